// Package testcerts makes a certificate authority and certificates for tests.
package testcerts

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Files makes an authority and a certificate for 127.0.0.1 and localhost, good for
// both sides of a connection, and returns the names of their PEM files.
func Files(t testing.TB) (cert, key, ca string) {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal("testcerts: ", err)
		}
	}
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		must(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	newKey := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		must(err)
		return k
	}
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	rootKey := newKey()
	der, err := x509.CreateCertificate(rand.Reader, root, root, &rootKey.PublicKey, rootKey)
	must(err)
	ca = write("ca.pem", "CERTIFICATE", der)

	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "rank"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	leafKey := newKey()
	der, err = x509.CreateCertificate(rand.Reader, leaf, root, &leafKey.PublicKey, rootKey)
	must(err)
	cert = write("cert.pem", "CERTIFICATE", der)
	der, err = x509.MarshalECPrivateKey(leafKey)
	must(err)
	return cert, write("key.pem", "EC PRIVATE KEY", der), ca
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
