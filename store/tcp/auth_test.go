package tcp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

type certs struct {
	both  *tls.Config // a server's and a client's
	trust *tls.Config // a client's only
}

func newCerts(t testing.TB) certs {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))
	cert := must.Get(x509.ParseCertificate(der))
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return certs{
		both:  &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		trust: &tls.Config{RootCAs: pool},
	}
}

func works(t testing.TB, s *Store) {
	t.Helper()
	require.NoError(t, s.Set(t.Context(), "works", []byte("yes")))
	require.Equal(t, "yes", string(must.Get(s.Get(t.Context(), "works"))))
}

func TestTLS(t *testing.T) {
	certs := newCerts(t)
	trusted, untrusted := Options{TLS: certs.trust}, Options{TLS: &tls.Config{RootCAs: x509.NewCertPool()}, Timeout: patience}
	addr := serve(t, ServerOptions{TLS: certs.both}).Addr().String()
	works(t, join(t, addr, trusted))
	start := time.Now()
	_, err := New(t.Context(), addr, untrusted)
	require.ErrorAs(t, err, new(*tls.CertificateVerificationError))
	require.Less(t, time.Since(start), patience, "%v", err)
	require.NotErrorIs(t, err, store.ErrTimeout)
	require.ErrorContains(t, err, addr)
	works(t, join(t, addr, trusted))
}

// A client and a server of which only one has TLS say so, and do not try again.
func TestTLSOnOneSide(t *testing.T) {
	certs := newCerts(t)
	for _, c := range []struct {
		server ServerOptions
		client Options
		want   string
	}{
		{ServerOptions{TLS: certs.both}, Options{}, "the server speaks TLS, and this side does not"},
		{ServerOptions{}, Options{TLS: certs.trust}, "the server refuses this side's TLS"},
	} {
		c.client.Timeout = 20 * time.Second
		_, err := New(t.Context(), serve(t, c.server).Addr().String(), c.client)
		require.ErrorContains(t, err, c.want)
		require.NotErrorIs(t, err, store.ErrTimeout)
	}
}

// A process without TLS is refused, and told why.
func TestRefused(t *testing.T) {
	addr := serve(t, ServerOptions{TLS: newCerts(t).both}).Addr().String()
	for _, first := range [][]byte{opening, cat(3, "/k", uint64(1))} { // as PyTorch's ranks begin
		dialRaw(t, addr, first...).expect([]byte(alert)...)
	}
}

// Silence before the handshake of TLS is no client's right, unlike silence before VALIDATE.
func TestSilentGuestsOfAProtectedServer(t *testing.T) {
	server := serve(t, ServerOptions{TLS: newCerts(t).both, OpeningTimeout: 20 * time.Millisecond})
	dialRaw(t, server.Addr().String()).closed()
	until(t, func() bool { return server.Stats().Clients == 0 && server.Stats().Refused == 1 })
}
