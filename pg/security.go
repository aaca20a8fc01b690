package pg

import (
	"crypto/tls"

	"github.com/c10d-go/c10d/internal/credentials"
)

// Security names the PEM files that protect a job: Cert, Key and CA, or Secret. "c10d certs" makes them.
type Security struct {
	Cert   string // this process's certificate, for both sides of a connection and valid for its address
	Key    string // the certificate's key
	CA     string // certificates of the authorities that sign the other processes' certificates
	Secret string // one secret of the job, of 32 to 4096 bytes: whoever has it is a member
}

// Configs returns TLS configurations of a further server and its clients.
func (s Security) Configs() (server, client *tls.Config, err error) {
	return credentials.Files(s).Configs()
}
