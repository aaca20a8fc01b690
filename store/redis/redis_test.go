package redis

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
)

func TestMain(m *testing.M) {
	if addr := os.Getenv("REDIS_TEST_DOWN"); addr != "" { // what TestQuiet starts
		_, err := New(context.Background(), "redis://"+addr)
		fmt.Println(err)
		return
	}
	goleak.VerifyTestMain(m)
}

// TestQuiet: go-redis writes nothing to standard error by itself.
func TestQuiet(t *testing.T) {
	self := must.Get(os.Executable())
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "REDIS_TEST_DOWN="+freeport.Loopback(t))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run())
	require.Contains(t, out.String(), "connection refused")
	require.Empty(t, errs.String())
}

// server is a redis-server of the test's own.
type server struct {
	addr string
	cmd  *exec.Cmd
	log  *bytes.Buffer // complete once ended is closed

	ended chan struct{}
}

// startServer starts redis-server with these arguments, in which PORT stands
// for a free port.
func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	return startServerAt(t, freeport.Loopback(t), args...)
}

func startServerAt(t *testing.T, addr string, args ...string) *server {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
		}
		t.Skip("needs redis-server in PATH")
	}
	s := &server{addr: addr, log: new(bytes.Buffer), ended: make(chan struct{})}
	_, port, _ := net.SplitHostPort(s.addr)
	full := []string{"--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", t.TempDir()}
	for _, a := range args {
		full = append(full, strings.ReplaceAll(a, "PORT", port))
	}
	s.cmd = exec.Command(program, full...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	require.NoError(t, s.cmd.Start())
	go func() { defer close(s.ended); _ = s.cmd.Wait() }()
	t.Cleanup(s.kill)
	if !s.listens() {
		if strings.Contains(s.log.String(), "Bad directive") {
			t.Skipf("%s was built without this: %s", program, s.log)
		}
		require.FailNow(t, "redis-server ended", "%s", s.log)
	}
	return s
}

// listens waits until the server accepts connections, or has ended.
func (s *server) listens() bool {
	for {
		c, err := net.Dial("tcp", s.addr)
		if err == nil {
			c.Close()
			return true
		}
		select {
		case <-s.ended:
			return false
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	<-s.ended
}

func plainServer(t *testing.T) *server { return startServer(t, "--port", "PORT") }

func connect(t *testing.T, rawURL string, opts Options) *Store {
	t.Helper()
	s := must.Get(New(t.Context(), rawURL, opts))
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

var jobs atomic.Int64

// freshPrefix returns a prefix with all that SCAN might misread.
func freshPrefix() string { return fmt.Sprintf(`job[*]?\%d`, jobs.Add(1)) }

func TestConformance(t *testing.T) {
	t.Parallel()
	srv := plainServer(t)
	neighbour := connect(t, "redis://"+srv.addr, Options{Prefix: "job"})
	require.NoError(t, neighbour.Set(t.Context(), "k", nil))
	fresh := func(t *testing.T) store.Store {
		return connect(t, "redis://"+srv.addr, Options{Prefix: freshPrefix()})
	}
	t.Run("clones", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, storetest.Config{New: fresh, No: []storetest.Feature{storetest.Wills}})
	})
	t.Run("one store", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, storetest.Config{
			New:  fresh,
			Peer: func(_ *testing.T, s store.Store) store.Store { return unclosed{s} },
			No:   []storetest.Feature{storetest.Wills},
		})
	})
	t.Run("for ever, under a prefix store, RESP3", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, storetest.Config{
			New: func(t *testing.T) store.Store {
				return store.Prefix("a/b", connect(t, "redis://"+srv.addr+"?protocol=3", Options{Prefix: freshPrefix(), Expiry: -1}))
			},
			No: []storetest.Feature{storetest.Wills},
		})
	})
}

// unclosed is a second handle that shares the store.
type unclosed struct{ store.Store }

func (unclosed) Close() error { return nil }

func TestLocalAddr(t *testing.T) {
	srv := startServer(t, "--port", "PORT")
	s := connect(t, "redis://"+srv.addr, Options{})
	require.Equal(t, netip.MustParseAddr("127.0.0.1"), store.LocalAddrOf(s))
}

func TestPassword(t *testing.T) {
	const password = "p@ss/w:rd"
	srv := startServer(t, "--port", "PORT", "--requirepass", password)
	u := url.URL{Scheme: "redis", Host: srv.addr, User: url.UserPassword("", password)}
	s := connect(t, u.String(), Options{})
	require.NoError(t, s.Set(t.Context(), "k", []byte("v")))

	u.User = url.UserPassword("", "hunter2")
	for _, wrong := range []string{u.String(), "redis://" + srv.addr} {
		_, err := New(t.Context(), wrong)
		require.ErrorContains(t, err, "store: redis "+srv.addr+": connect: ")
		require.NotContains(t, err.Error(), "hunter2")
	}
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	pool := writeCertificate(t, dir)
	srv := startServer(t, "--port", "0", "--tls-port", "PORT", "--tls-auth-clients", "no", "--requirepass", "secret",
		"--tls-cert-file", filepath.Join(dir, "cert.pem"), "--tls-key-file", filepath.Join(dir, "key.pem"),
		"--tls-ca-cert-file", filepath.Join(dir, "cert.pem"))
	secure := "rediss://:secret@" + srv.addr
	config := &tls.Config{RootCAs: pool}
	s := connect(t, secure, Options{TLS: config})
	require.Empty(t, config.ServerName, "the caller's configuration was changed")
	require.NoError(t, s.Set(t.Context(), "k", []byte("v")))
	clone := must.Get(s.Clone(t.Context()))
	got, err := clone.Get(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, "v", string(got))
	require.NoError(t, clone.Close())
	connect(t, secure+"?skip_verify=true", Options{})

	_, err = New(t.Context(), secure)
	must.As[x509.UnknownAuthorityError](t, err, "an unknown authority is refused")
	require.Error(t, must.Err(New(t.Context(), "redis://:secret@"+srv.addr)))
	_, err = New(t.Context(), "redis://:secret@"+srv.addr, Options{TLS: config})
	require.ErrorContains(t, err, "not rediss")
}

func writeCertificate(t *testing.T, dir string) *x509.CertPool {
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "redis test"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	cert := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))
	private := must.Get(x509.MarshalPKCS8PrivateKey(key))
	for name, block := range map[string]*pem.Block{
		"cert.pem": {Type: "CERTIFICATE", Bytes: cert},
		"key.pem":  {Type: "PRIVATE KEY", Bytes: private},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
	parsed := must.Get(x509.ParseCertificate(cert))
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return pool
}

func TestOptions(t *testing.T) {
	for _, test := range []struct {
		url    string
		opts   Options
		prefix string
		expiry time.Duration
	}{
		{"redis://h", Options{}, DefaultPrefix, DefaultExpiry},
		{"redis://h:1?prefix=job-7&expiry=90m&pool_size=3", Options{}, "job-7", 90 * time.Minute},
		{"redis://h?prefix=a&expiry=1h", Options{Prefix: "b", Expiry: -1}, "b", -1},
		{"redis://h?expiry=-1s", Options{}, DefaultPrefix, -time.Second},
		{"unix:///run/redis.sock?prefix=a%20b", Options{}, "a b", DefaultExpiry},
	} {
		config, err := parse(test.url, &test.opts)
		require.NoError(t, err, test.url)
		require.Equal(t, test.prefix, test.opts.Prefix, test.url)
		require.Equal(t, test.expiry, test.opts.Expiry, test.url)
		require.Equal(t, -1, config.MaxRetries, "an Add must not be repeated")
		require.Equal(t, ioTimeout, config.ReadTimeout)
	}
	config, err := parse("redis://h?read_timeout=2s&max_retries=5&protocol=3", &Options{})
	require.NoError(t, err)
	require.Equal(t, 2*time.Second, config.ReadTimeout)
	require.Equal(t, -1, config.MaxRetries)
	require.Equal(t, 3, config.Protocol)

	for _, test := range []struct {
		url, want string
		opts      Options
	}{
		{"http://h", "scheme", Options{}},
		{"redis://:hunter2@h:port", "invalid port", Options{}},
		{"redis://:hunter2@h/x", "database", Options{}},
		{"redis://:hunter2@h/-1", "database -1: the number must be 0 or more", Options{}},
		{"redis://:hunter2@h?db=-2", "database -2: the number must be 0 or more", Options{}},
		{"redis://h?nonsense=1", "nonsense", Options{}},
		{"redis://h?expiry=soon", "expiry", Options{}},
		{"redis://h?expiry=10ms", "below a second", Options{}},
		{"redis://h", "below a second", Options{Expiry: time.Millisecond}},
		{"redis://h", "braces", Options{Prefix: "a}b"}},
	} {
		_, err := New(t.Context(), test.url, test.opts)
		require.ErrorContains(t, err, test.want, test.url)
		require.ErrorContains(t, err, "store: redis: ")
		require.NotContains(t, err.Error(), "hunter2")
	}
}

func TestExpiry(t *testing.T) {
	srv := plainServer(t)
	ctx := t.Context()
	client := redis.NewClient(&redis.Options{Addr: srv.addr})
	defer client.Close()
	lives := func(key string) time.Duration {
		return must.Get(client.PTTL(ctx, key).Result())
	}

	s := connect(t, "redis://"+srv.addr, Options{Prefix: "job", Expiry: time.Hour})
	require.NoError(t, s.Set(ctx, "set", nil))
	require.NoError(t, s.Append(ctx, "append", nil))
	require.NoError(t, s.QueuePush(ctx, "push", nil))
	must.Get(s.Add(ctx, "add", 1))
	require.NoError(t, s.Set(ctx, "add text", []byte(" 1")))
	must.Get(s.Add(ctx, "add text", 1))
	must.Get(s.CompareSet(ctx, "compare", nil, []byte("x")))
	keys := []string{"{job}kset", "{job}kappend", "{job}qpush", "{job}kadd", "{job}kadd text", "{job}kcompare"}
	for _, k := range keys {
		require.Greater(t, lives(k), 30*time.Minute, k)
		require.LessOrEqual(t, lives(k), time.Hour, k)
		require.NoError(t, client.PExpire(ctx, k, 20*time.Minute).Err())
	}
	require.NoError(t, s.renewAll(ctx))
	for _, k := range keys {
		require.Greater(t, lives(k), 30*time.Minute, k)
	}

	ever := connect(t, "redis://"+srv.addr, Options{Prefix: "ever", Expiry: -1})
	require.NoError(t, ever.Set(ctx, "set", nil))
	must.Get(ever.CompareSet(ctx, "compare", nil, []byte("x")))
	c := must.Get(ever.Clone(ctx))
	defer c.Close()
	require.NoError(t, c.Set(ctx, "clone", nil))
	for _, k := range []string{"set", "compare", "clone"} {
		require.Negative(t, lives("{ever}k"+k), k)
	}
}

// TestRenews waits for the goroutine to take a key's life from an hour to the
// store's two seconds.
func TestRenews(t *testing.T) {
	srv := plainServer(t)
	client := redis.NewClient(&redis.Options{Addr: srv.addr})
	defer client.Close()
	s := connect(t, "redis://"+srv.addr, Options{Expiry: 2 * time.Second})
	require.NoError(t, s.Set(t.Context(), "k", nil))
	require.NoError(t, client.PExpire(t.Context(), "{c10d}kk", time.Hour).Err())
	require.Eventually(t, func() bool {
		d, err := client.PTTL(t.Context(), "{c10d}kk").Result()
		return err == nil && d <= 2*time.Second
	}, time.Minute, 10*time.Millisecond)
}

func TestManyKeys(t *testing.T) {
	srv := plainServer(t)
	s := connect(t, "redis://"+srv.addr, Options{})
	var keys []string
	for i := range 2*scanCount + 1 {
		keys = append(keys, fmt.Sprint(i))
	}
	require.NoError(t, s.MultiSet(t.Context(), keys, make([][]byte, len(keys))))
	require.NoError(t, s.Wait(t.Context(), keys...))
	require.EqualValues(t, len(keys), must.Get(s.NumKeys(t.Context())))
	require.ElementsMatch(t, keys, must.Get(s.ListKeys(t.Context())))
	require.NoError(t, s.renewAll(t.Context()))
}

// TestConcurrentTextAdds is about sums that Redis does not compute itself.
func TestConcurrentTextAdds(t *testing.T) {
	srv := plainServer(t)
	s := connect(t, "redis://"+srv.addr, Options{})
	const adders = 20
	// The first add near the end of int64 wraps; text before that is parsed.
	require.NoError(t, s.Set(t.Context(), "n", []byte(" 9223372036854775800")))
	var wg sync.WaitGroup
	for range adders {
		wg.Go(func() {
			if _, err := s.Add(t.Context(), "n", 1); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Equal(t, "-9223372036854775796", string(must.Get(s.Get(t.Context(), "n"))))
}

func TestServerGoesAway(t *testing.T) {
	srv := plainServer(t)
	ctx := t.Context()
	s := connect(t, "redis://"+srv.addr, Options{Timeout: -1})
	require.NoError(t, s.Set(ctx, "k", nil))
	waited := make(chan error, 1)
	go func() { waited <- s.Wait(ctx, "never") }()
	srv.kill()
	for _, err := range []error{<-waited, s.Set(ctx, "k", nil)} {
		require.ErrorContains(t, err, "store: redis "+srv.addr)
		require.NotErrorIs(t, err, store.ErrTimeout)
		require.NotErrorIs(t, err, store.ErrClosed)
	}
	require.ErrorContains(t, must.Err(New(ctx, "redis://"+srv.addr)), "store: redis "+srv.addr+": connect: ")
}

// TestEmptiedServer: a server comes back without its data. Open stores do not take
// it for the one that was there. New ones use it.
func TestEmptiedServer(t *testing.T) {
	first := plainServer(t)
	url := "redis://" + first.addr + "?prefix=" + "job"
	s := connect(t, url, Options{})
	n, err := s.Add(t.Context(), "n", 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	first.kill()
	<-first.ended
	second := startServerAt(t, first.addr, "--port", "PORT")

	require.Eventually(t, func() bool {
		_, err = s.Add(t.Context(), "n", 1)
		require.Error(t, err)
		return errors.Is(err, ErrEmptied) // and not that the old connection has ended
	}, 20*time.Second, 10*time.Millisecond)
	require.ErrorContains(t, err, second.addr)
	require.ErrorContains(t, err, "the server has lost the data under this store's prefix (job)")

	fresh := connect(t, url, Options{})
	n = must.Get(fresh.Add(t.Context(), "n", 1))
	require.EqualValues(t, 1, n)
	require.ErrorIs(t, must.Err(s.Add(t.Context(), "n", 1)), ErrEmptied)
}
