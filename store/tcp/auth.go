package tcp

import (
	"errors"
	"fmt"
	"net"
)

// alert is a server's answer if only one of client and server speaks TLS. It is TLS's
// alert protocol_version. Clients of this package recognise it with and without TLS.
const alert = "\x15\x03\x03\x00\x02\x02\x46"

// tlsBegin is what a connection with TLS begins with: a handshake record of version 3.
const tlsBegin = "\x16\x03"

// errNeedsTLS is the error of a client without TLS if the server answers with alert.
var errNeedsTLS = permanent{errors.New("the server speaks TLS, and this side does not: give it the job's certificate (InitOptions.Security, C10D_TLS_CERT, C10D_TLS_KEY and C10D_TLS_CA, or C10D_TLS_SECRET)")}

// errRefusedTLS is the error of a client whose TLS a server refuses, or that has none.
var errRefusedTLS = errors.New("the server refuses this side's TLS or certificate")

// errSpeaksTLS is a server's error for a client that begins with TLS.
var errSpeaksTLS = malformedf("the connection begins as TLS does, which this server does not speak")

// settled makes an error permanent if a server sent it through TLS, during the handshake or after
// this side's part of it.
func settled(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" {
		return permanent{fmt.Errorf("%w: %w", errRefusedTLS, err)}
	}
	return err
}
