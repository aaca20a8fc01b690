package tcp

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// authority signs certificates for tests.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))
	cert := must.Get(x509.ParseCertificate(der))
	return &authority{cert, key}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// issue returns a certificate for 127.0.0.1, with changes.
func (a *authority) issue(t testing.TB, change func(*x509.Certificate)) tls.Certificate {
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "rank"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"rank.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func secure(a *authority, c tls.Certificate) Options {
	return Options{Host: "127.0.0.1", Lanes: 2, TLS: &tls.Config{RootCAs: a.pool(), Certificates: []tls.Certificate{c}}}
}

func TestMeshOverTLS(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	o := secure(a, a.issue(t, nil))
	transporttest.Run(t, transporttest.Config{
		New:  func(t testing.TB, size int) []transport.Mesh { return meshes(join(t, size, o)) },
		Kill: kill,
		No:   []transporttest.Feature{transporttest.Allocations}, // crypto/tls
	})
	ms := join(t, 2, o)
	ms[0].Mu.Lock()
	defer ms[0].Mu.Unlock()
	state := ms[0].pairs[1].first.conn.(*tls.Conn).ConnectionState()
	require.EqualValues(t, tls.VersionTLS13, state.Version)
	require.NotEmpty(t, state.PeerCertificates, "the other side is not authenticated")
}

// Whoever has no good certificate is no rank, on either side of a connection.
func TestBadCertificates(t *testing.T) {
	t.Parallel()
	a, other := newAuthority(t), newAuthority(t)
	good := secure(a, a.issue(t, nil))
	named := good
	named.TLS = good.TLS.Clone()
	named.TLS.ServerName = "rank.test"
	misnamed := good
	misnamed.TLS = good.TLS.Clone()
	misnamed.TLS.ServerName = "elsewhere.test"
	expired := secure(a, a.issue(t, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }))
	elsewhere := secure(a, a.issue(t, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(192, 0, 2, 1)} }))
	serverOnly := secure(a, a.issue(t, func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }))
	stranger := secure(a, other.issue(t, nil))
	for name, c := range map[string]struct {
		opts [2]Options
		ok   bool
	}{
		"good":                     {[2]Options{good, good}, true},
		"good by name":             {[2]Options{named, named}, true},
		"wrong name":               {opts: [2]Options{good, misnamed}},
		"expired, accepting":       {opts: [2]Options{expired, good}},
		"expired, connecting":      {opts: [2]Options{good, expired}},
		"other address, accepting": {opts: [2]Options{elsewhere, good}},
		"no client, connecting":    {opts: [2]Options{good, serverOnly}},
		"stranger, accepting":      {opts: [2]Options{stranger, good}},
		"stranger, connecting":     {opts: [2]Options{good, stranger}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			es := make([]*Endpoint, 2)
			addrs := make([]string, 2)
			for i := range es {
				es[i] = must.Get(Listen(c.opts[i]))
				addrs[i] = es[i].Addr()
			}
			var errs [2]error
			var wg sync.WaitGroup
			zero, stop := context.WithCancel(ctx)
			wg.Go(func() {
				m, err := es[0].Join(zero, 0, addrs)
				if errs[0] = err; err == nil {
					defer m.Close()
				}
			})
			m, err := es[1].Join(ctx, 1, addrs)
			if c.ok {
				wg.Wait()
				require.NoError(t, err)
				require.NoError(t, errs[0])
				require.NoError(t, m.Close())
				stop()
				return
			}
			stop() // nobody will come
			wg.Wait()
			require.ErrorContains(t, err, "tcp: rank 1 of 2 is not connected with rank 0")
			require.ErrorContains(t, errs[0], "rank 1: it has not connected to this rank")
		})
	}
}

// Plain bytes to a rank that wants TLS, and a handshake that stands still.
func TestTLSDoor(t *testing.T) {
	a := newAuthority(t)
	o := secure(a, a.issue(t, nil))
	o.Handshake = 200 * time.Millisecond
	e := must.Get(Listen(o))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	peer := stranger()
	peer.secure = true
	go func() {
		defer close(done)
		e.Join(ctx, 0, []string{e.Addr(), peer.String()})
	}()
	plain := call(t, e, helloOf(1, 2, 0, e.addr.token))
	still, err := net.Dial("tcp", e.addr.places[0].String())
	require.NoError(t, err)
	defer still.Close()
	still.Write([]byte{0x16, 3, 1})
	for _, c := range []net.Conn{plain, still} {
		c.SetReadDeadline(time.Now().Add(patience))
		var err error
		for err == nil {
			_, err = c.Read(make([]byte, 100)) // there may be an alert
		}
		late, ok := err.(net.Error)
		require.False(t, ok && late.Timeout(), "still there")
	}
	cancel()
	<-done
}
