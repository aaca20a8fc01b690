// Package testcerts makes a certificate authority and certificates for tests.
package testcerts

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"testing"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
)

// Files makes an authority and a certificate for 127.0.0.1 and localhost, good for
// both sides of a connection, and returns the names of their PEM files.
func Files(t testing.TB) (cert, key, ca string) {
	t.Helper()
	dir := t.TempDir()
	a, _, err := credentials.OpenAuthority(dir)
	if err == nil {
		err = a.Issue(dir, "rank0", []string{"127.0.0.1", "localhost"}, time.Now().Add(time.Hour))
	}
	if err != nil {
		t.Fatal("testcerts: ", err)
	}
	f := credentials.InDir(dir, "rank0")
	return f.Cert, f.Key, f.CA
}

// Config returns a configuration for both sides of a connection with such files.
func Config(t testing.TB) *tls.Config {
	t.Helper()
	cert, key, ca := Files(t)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal("testcerts: ", err)
	}
	text, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal("testcerts: ", err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool}
}
