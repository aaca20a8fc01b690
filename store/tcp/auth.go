package tcp

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/c10d-go/c10d/internal/credentials"
)

// The token handshake, before anything of the store's protocol:
//
//	client  hello   8 bytes, then a nonce of 32
//	server  a nonce of 32
//	client  proof of 32: HMAC-SHA256(token, "client" client-nonce server-nonce)
//	server  proof of 32: HMAC-SHA256(token, "server" client-nonce server-nonce)
//
// Both sides prove to know the token and neither sends it. The first byte of hello is not a query
// in any version of PyTorch: no PyTorch client begins so, and a PyTorch server closes the
// connection.
const (
	hello    = "\xc1c10d-go"
	nonceLen = 32
)

// Token is the secret of a store. fmt, slog and encoding/json do not show it.
type Token = credentials.Token

// ErrToken is matched by the error of a client if its token differs from the server's, or the
// server has none.
var ErrToken = errors.New("the token was not accepted")

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

func proof(token, side string, nonces []byte) []byte {
	m := hmac.New(sha256.New, []byte(token))
	io.WriteString(m, side)
	m.Write(nonces)
	return m.Sum(nil)
}

// admit is the server's side of the handshake.
func admit(conn io.ReadWriter, token string) error {
	in := make([]byte, len(hello)+nonceLen)
	if _, err := io.ReadFull(conn, in[:1]); err != nil {
		return err
	}
	if in[0] == tlsBegin[0] {
		return errSpeaksTLS
	}
	if in[0] != hello[0] {
		return malformedf("the connection begins with %#x: a client without token", in[0])
	}
	if _, err := io.ReadFull(conn, in[1:]); err != nil {
		return err
	}
	if string(in[:len(hello)]) != hello {
		return malformedf("the connection begins with %#x: a client without token", in[:len(hello)])
	}
	mine := make([]byte, nonceLen)
	rand.Read(mine)
	if _, err := conn.Write(mine); err != nil {
		return err
	}
	nonces := append(in[len(hello):], mine...)
	got := make([]byte, sha256.Size)
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if !hmac.Equal(got, proof(token, "client", nonces)) {
		return ErrToken
	}
	_, err := conn.Write(proof(token, "server", nonces))
	return err
}

// authenticate is the client's side. A server refuses by closing the connection.
func authenticate(conn io.ReadWriter, token string) error {
	nonces := make([]byte, 2*nonceLen)
	rand.Read(nonces[:nonceLen])
	if _, err := conn.Write(append([]byte(hello), nonces[:nonceLen]...)); err != nil {
		return err
	}
	if n, err := io.ReadFull(conn, nonces[nonceLen:]); err != nil {
		if string(nonces[nonceLen:nonceLen+n]) == alert {
			return errNeedsTLS
		}
		if disconnected(err) {
			return fmt.Errorf("%w: the server uses no token", ErrToken)
		}
		return err
	}
	if _, err := conn.Write(proof(token, "client", nonces)); err != nil {
		return err
	}
	got := make([]byte, sha256.Size)
	if _, err := io.ReadFull(conn, got); err != nil {
		if disconnected(err) {
			return permanent{fmt.Errorf("%w: the server has another token", ErrToken)}
		}
		return err
	}
	if !hmac.Equal(got, proof(token, "server", nonces)) {
		return permanent{fmt.Errorf("%w: the server has not proved that it knows the token", ErrToken)}
	}
	return nil
}
