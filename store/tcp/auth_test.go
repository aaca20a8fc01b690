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

	"github.com/c10d-go/c10d/store"
)

type certs struct {
	both  *tls.Config // a server's and a client's
	trust *tls.Config // a client's only
}

func newCerts(t testing.TB) certs {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
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
	v, err := s.Get(t.Context(), "works")
	require.NoError(t, err)
	require.Equal(t, "yes", string(v))
}

func TestTLSAndToken(t *testing.T) {
	certs := newCerts(t)
	none := Options{}
	token := Options{Token: "secret of the store"}
	other := Options{Token: "Secret of the store"}
	tlsOnly := Options{TLS: certs.trust}
	tlsToken := Options{TLS: certs.trust, Token: "secret of the store"}
	tlsOther := Options{TLS: certs.trust, Token: "guess of the token"}
	untrusted := Options{TLS: &tls.Config{RootCAs: x509.NewCertPool()}, Token: "secret of the store"}

	for name, test := range map[string]struct {
		server  ServerOptions
		good    []Options
		wrong   []Options // refused in a way that is an error at once
		useless []Options // refused in a way that could be a server's end
	}{
		"plain":         {ServerOptions{}, []Options{none}, nil, []Options{token, tlsOnly}},
		"token":         {ServerOptions{Token: "secret of the store"}, []Options{token}, []Options{other}, []Options{none, tlsToken, {Dialect: store.DialectV1}}},
		"TLS":           {ServerOptions{TLS: certs.both}, []Options{tlsOnly}, []Options{untrusted}, []Options{none, token, tlsToken}},
		"TLS and token": {ServerOptions{TLS: certs.both, Token: "secret of the store"}, []Options{tlsToken}, []Options{tlsOther, untrusted}, []Options{none, token, tlsOnly}},
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, test.server)
			addr := server.Addr().String()
			for _, o := range test.good {
				works(t, join(t, addr, o))
			}
			for _, o := range test.wrong {
				o.Timeout = patience
				start := time.Now()
				_, err := New(t.Context(), addr, o)
				require.Error(t, err)
				require.Less(t, time.Since(start), patience, "%v", err)
				require.NotErrorIs(t, err, store.ErrTimeout)
				require.ErrorContains(t, err, addr)
				var bad *tls.CertificateVerificationError
				if o.TLS != untrusted.TLS {
					require.ErrorIs(t, err, ErrToken)
				} else {
					require.ErrorAs(t, err, &bad)
				}
			}
			for _, o := range test.useless {
				o.Timeout = 300 * time.Millisecond
				s, err := New(t.Context(), addr, o)
				if err == nil { // the old dialect says nothing when it opens
					_, err = s.NumKeys(t.Context())
					require.NoError(t, s.Close())
				}
				require.Error(t, err, "%+v", o)
			}
			works(t, join(t, addr, test.good[0]))
		})
	}
}

// A token that can be guessed is refused on both sides, before anything is sent. The error has no part of it.
func TestShortToken(t *testing.T) {
	_, asServer := Listen(t.Context(), "127.0.0.1:0", ServerOptions{Token: "hunter2-hunter2"})
	_, asClient := New(t.Context(), "127.0.0.1:1", Options{Token: "hunter2-hunter2", Timeout: patience})
	for _, err := range []error{asServer, asClient} {
		require.ErrorContains(t, err, "the token has 15 bytes, want at least 16 that nobody can guess: make one with c10d certs -secret FILE")
		require.NotContains(t, err.Error(), "hunter2")
	}
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
		{ServerOptions{TLS: certs.both}, Options{Token: "secret of the store"}, "the server speaks TLS, and this side does not"},
		{ServerOptions{}, Options{TLS: certs.trust}, "the server refuses this side's TLS"},
		{ServerOptions{Token: "secret of the store"}, Options{TLS: certs.trust, Token: "secret of the store"}, "the server refuses this side's TLS"},
	} {
		c.client.Timeout = 20 * time.Second
		_, err := New(t.Context(), serve(t, c.server).Addr().String(), c.client)
		require.ErrorContains(t, err, c.want)
		require.NotErrorIs(t, err, store.ErrTimeout)
	}
}

// A process without TLS is refused, and the ranks of the job can find out its address.
func TestRefused(t *testing.T) {
	certs := newCerts(t)
	for _, token := range []Token{"", "secret of the store"} {
		addr := serve(t, ServerOptions{TLS: certs.both, Token: token}).Addr().String()
		good := join(t, addr, Options{TLS: certs.trust, Token: token})
		_, ok, err := good.Refused(t.Context())
		require.NoError(t, err)
		require.False(t, ok)
		for _, first := range [][]byte{opening, cat(3, "/k", uint64(1))} { // as PyTorch's ranks begin
			c := dialRaw(t, addr, first...)
			c.expect([]byte(alert)...)
			from, ok, err := good.Refused(t.Context())
			require.NoError(t, err)
			require.True(t, ok)
			require.Equal(t, c.LocalAddr().String(), from)
		}
	}
}

// A server that only pretends to know the token is found out.
func TestTokenProvesTheServer(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	done := go1(func() error { return authenticate(client, "secret") })
	go func() {
		defer server.Close()
		admit(server, "another") // refuses the client
	}()
	require.ErrorIs(t, await(t, done), ErrToken)

	client, server = net.Pipe()
	defer client.Close()
	done = go1(func() error { return authenticate(client, "secret") })
	go func() {
		defer server.Close()
		b := make([]byte, len(hello)+nonceLen)
		server.Read(b)
		server.Write(b[len(hello):]) // the client's own nonce
		server.Read(b[:32])
		server.Write(b[:32]) // the client's own proof
	}()
	require.ErrorIs(t, await(t, done), ErrToken)
}

// Silence before the token is no client's right, unlike silence before VALIDATE.
func TestSilentGuestsOfAProtectedServer(t *testing.T) {
	for name, opts := range map[string]ServerOptions{
		"token": {Token: "secret of the store"},
		"TLS":   {TLS: newCerts(t).both},
	} {
		opts.OpeningTimeout = 20 * time.Millisecond
		server := serve(t, opts)
		c := dialRaw(t, server.Addr().String())
		c.closed()
		until(t, func() bool { return server.Stats().Clients == 0 && server.Stats().Refused == 1 })
		t.Log(name)
	}
}
