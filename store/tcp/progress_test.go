package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/internal/waiting/waitingtest"
	"github.com/c10d-go/c10d/store"
)

// soon is a context under which the log tells of waits at once.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(waiting.WithFirst(t.Context(), time.Millisecond))
	t.Cleanup(cancel)
	return ctx
}

// bound is for what a fault would keep from happening.
const bound = 20 * time.Second

// says waits until the log has a text.
func says(t *testing.T, l *waitingtest.Log, want string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(l.String(), want) }, bound, time.Millisecond, "%s\nwant %s", l, want)
}

// ends returns the result of a New.
func ends(t *testing.T, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(bound):
		require.FailNow(t, "New does not end")
		return nil
	}
}

// outOfTime returns the error of a New whose time ends once its log has said why it waits.
func outOfTime(t *testing.T, addr string, o Options, why string) error {
	t.Helper()
	var log waitingtest.Log
	o.Logger = log.Logger()
	ctx := expiring{soon(t), make(chan struct{})}
	done := go1(func() error {
		return must.Err(New(ctx, addr, o))
	})
	says(t, &log, why)
	ctx.expire()
	err := ends(t, done)
	require.ErrorIs(t, err, store.ErrTimeout)
	return err
}

// failed returns how a New ends whose context ends now.
func failed(t *testing.T, cancel context.CancelFunc, done <-chan error) error {
	cancel()
	err := ends(t, done)
	require.Error(t, err)
	return err
}

func TestHostNamesWhoIsMissing(t *testing.T) {
	for name, test := range map[string]struct {
		came []Options
		want string
	}{
		"named":   {[]Options{{Rank: 2}}, "waiting for rank 1: 2 of 3 ranks have joined the store"},
		"nobody":  {nil, "waiting for ranks 1 and 2: 1 of 3 ranks have joined the store"},
		"unnamed": {[]Options{{dialect: torch1}}, "waiting for 1 of the ranks 1 and 2: 2 of 3 ranks have joined the store"},
	} {
		t.Run(name, func(t *testing.T) {
			addr := freeport.Loopback(t)
			var log waitingtest.Log
			ctx, cancel := context.WithCancel(soon(t))
			defer cancel()
			host := go1(func() error {
				_, err := New(ctx, addr, Options{Server: true, WorldSize: 3, Logger: log.Logger(), Timeout: time.Hour})
				return err
			})
			for _, o := range test.came {
				o.WorldSize = 3
				join(t, addr, o)
			}
			says(t, &log, test.want)
			require.Contains(t, log.String(), "level=WARN")
			require.Contains(t, log.String(), addr)
			require.Contains(t, log.String(), "until=")
			err := failed(t, cancel, host)
			_, missing, _ := strings.Cut(test.want, "waiting for ")
			missing, _, _ = strings.Cut(missing, ":")
			require.ErrorContains(t, err, "missing: "+missing)
		})
	}
}

func TestWorkerTellsWhoItIs(t *testing.T) {
	for name, plain := range map[string]bool{"own server": false, "PyTorch's": true} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, ServerOptions{plain: plain})
			s := join(t, server.Addr().String(), Options{WorldSize: 2, Rank: 1})
			_, ok, err := s.Worker(t.Context(), 0)
			require.NoError(t, err)
			require.False(t, ok)
			who, ok, err := s.Worker(t.Context(), 1)
			require.NoError(t, err)
			require.Equal(t, !plain, ok)
			if ok {
				require.Regexp(t, `^host .+, process \d+$`, who)
			}
			require.EqualValues(t, 1, must.Get(s.Joined(t.Context())))
			keys, err := s.NumKeys(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, server.Stats().Keys, keys)
			if plain {
				require.EqualValues(t, 1, keys, "PyTorch's servers keep the counter alone")
				return
			}
			other := join(t, server.Addr().String(), Options{})
			require.NoError(t, s.Close())
			require.Eventually(t, func() bool {
				who, ok, err := other.Worker(t.Context(), 1)
				return err == nil && ok && strings.HasSuffix(who, "; its connection has ended")
			}, bound, time.Millisecond)
			join(t, server.Addr().String(), Options{WorldSize: 2, Rank: 1})
			who, _, err = other.Worker(t.Context(), 1)
			require.NoError(t, err)
			require.Regexp(t, `^host .+, process \d+$`, who, "it came again")
		})
	}
}

func TestClientTellsWhatItWaitsFor(t *testing.T) {
	silent, err := net.Listen("tcp", local)
	require.NoError(t, err)
	defer silent.Close()
	for name, test := range map[string]struct {
		addr string
		want []string
	}{
		"nobody listens": {freeport.Loopback(t), []string{"waiting for rank 0, which hosts the store at", "refused", "attempts=1"}},
		"silence":        {silent.Addr().String(), []string{"waiting for rank 0", "accepts connections but does not answer"}},
	} {
		t.Run(name, func(t *testing.T) {
			var log waitingtest.Log
			ctx, cancel := context.WithCancel(soon(t))
			defer cancel()
			done := go1(func() error {
				_, err := New(ctx, test.addr, Options{HostedBy: "rank 0", Logger: log.Logger(), Timeout: time.Hour})
				return err
			})
			for _, want := range append(test.want, test.addr) {
				says(t, &log, want)
			}
			failed(t, cancel, done)
		})
	}
}

// banner answers every connection with some bytes, as other services do.
func banner(t *testing.T, first bool, answer string) string {
	ln, err := net.Listen("tcp", local)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				b := make([]byte, 10)
				if !first {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
				}
				io.WriteString(c, answer)
				io.Copy(io.Discard, c)
			})
		}
	})
	t.Cleanup(func() { ln.Close(); wg.Wait() })
	return ln.Addr().String()
}

// Another service on the port ends New at once, and its answer is shown.
func TestOtherServices(t *testing.T) {
	for name, test := range map[string]struct {
		first  bool
		answer string
		want   string
	}{
		"HTTP": {false, "HTTP/1.1 400 Bad Request\r\n\r\n", `is no TCPStore; check the port: its answer begins with "HTTP"`},
		"SSH":  {true, "SSH-2.0-OpenSSH_9.6\r\n", `its answer begins with "SSH-"`},
		"TLS":  {false, "\x15\x03\x03\x00\x02\x02\x0a", "the server speaks TLS, and this side does not"},
	} {
		t.Run(name, func(t *testing.T) {
			addr := banner(t, test.first, test.answer)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			err := ends(t, go1(func() error { _, err := New(ctx, addr); return err }))
			require.ErrorContains(t, err, test.want)
			require.ErrorContains(t, err, addr)
		})
	}
}

func TestSilentPort(t *testing.T) {
	ln := must.Get(net.Listen("tcp", local))
	defer ln.Close()
	err := outOfTime(t, ln.Addr().String(), Options{}, "accepts connections but does not answer")
	require.ErrorContains(t, err, "it is no TCPStore, or its process has stopped")
}

// A server that closes every connection may be ending, so it is tried again.
func TestServiceThatCloses(t *testing.T) {
	ln, err := net.Listen("tcp", local)
	require.NoError(t, err)
	closed := go1(func() error {
		for {
			c, err := ln.Accept()
			if err != nil {
				return nil
			}
			c.Close()
		}
	})
	err = outOfTime(t, ln.Addr().String(), Options{}, "is no TCPStore, or is ending")
	require.ErrorContains(t, err, "is no TCPStore, or is ending")
	ln.Close()
	await(t, closed)
}

// A process without a descriptor for the connection says so at once: no later try would do better.
func TestNoDescriptorLeft(t *testing.T) {
	tries := 0
	d := dialer{addr: "127.0.0.1:29500"}
	d.connectTo = func(context.Context, string, string) (net.Conn, error) {
		tries++
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)}
	}
	_, err := d.dialRetry(t.Context())
	require.ErrorIs(t, err, syscall.EMFILE)
	require.ErrorContains(t, err, "this process has no file descriptor left")
	require.Equal(t, 1, tries)
}

// A host name that does not exist ends New long before the timeout; a name server that
// does not answer does not.
func TestNoSuchHost(t *testing.T) {
	absent := &net.DNSError{Err: "no such host", Name: "nowhere.invalid", IsNotFound: true}
	unsure := &net.DNSError{Err: "server misbehaving", Name: "nowhere.invalid", IsTemporary: true}
	const limit = 20 * time.Millisecond
	tries := 0
	d := dialer{addr: "nowhere.invalid:29500", resolveFor: limit}
	d.connectTo = func(context.Context, string, string) (net.Conn, error) { tries++; return nil, absent }
	begun := time.Now()
	_, err := d.dialRetry(t.Context())
	require.ErrorIs(t, err, absent)
	require.ErrorContains(t, err, "has not existed for 20ms; check the address")
	require.GreaterOrEqual(t, time.Since(begun), limit)
	require.GreaterOrEqual(t, tries, 2)

	// With a later answer of another kind the time begins again.
	u := unresolved{limit: limit}
	left, final := u.see(absent)
	require.NoError(t, final)
	require.LessOrEqual(t, left, limit)
	u.since = u.since.Add(-limit)
	_, final = u.see(unsure)
	require.NoError(t, final)
	left, final = u.see(absent)
	require.NoError(t, final)
	require.Positive(t, left)

	// Names that come up later are found.
	tries = 0
	server := serve(t, ServerOptions{})
	d = dialer{addr: "nowhere.invalid:29500"}
	d.connectTo = func(ctx context.Context, network, _ string) (net.Conn, error) {
		if tries++; tries == 1 {
			return nil, absent
		}
		return new(net.Dialer).DialContext(ctx, network, server.Addr().String())
	}
	c := must.Get(d.dialRetry(t.Context()))
	c.Close()
	require.Equal(t, 2, tries)
	require.False(t, noSuchHost(errors.New("refused")))
}
