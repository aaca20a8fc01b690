// Package attack has what strangers send to listeners in tests of several packages.
package attack

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"sync"
)

// bigCertificate returns the certificate of a stranger: one that nobody has signed, and then 250 KB.
// A server reads all of them before it looks at the first.
var bigCertificate = sync.OnceValues(func() (*tls.Certificate, error) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	return &tls.Certificate{Certificate: [][]byte{der, make([]byte, 250_000)}, PrivateKey: key}, err
})

// BigCertificate begins a TLS handshake on c with a client's certificate of 250 KB, and stops when it has sent most
// bytes.
func BigCertificate(c net.Conn, most int) error {
	return tls.Client(&cut{Conn: c, left: most}, &tls.Config{
		InsecureSkipVerify: true, CurvePreferences: []tls.CurveID{tls.X25519},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return bigCertificate() },
	}).Handshake()
}

// cut is a connection on which only the first bytes are sent.
type cut struct {
	net.Conn
	left int
}

func (c *cut) Write(b []byte) (int, error) {
	some := b[:min(len(b), c.left)]
	c.left -= len(some)
	if len(some) > 0 {
		if _, err := c.Conn.Write(some); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}
