package tcp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
)

func TestMain(m *testing.M) {
	if args := os.Getenv(clientsEnv); args != "" {
		if err := manyClients(args); err != nil {
			fmt.Fprintln(os.Stderr, clientsEnv, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// patience bounds what must happen; only a failing test waits for it. A process
// may take tens of seconds to import PyTorch.
const patience = 2 * time.Minute

const local = "127.0.0.1:0"

func serve(t testing.TB, opts ServerOptions) *Server {
	t.Helper()
	s := must.Get(Listen(t.Context(), local, opts))
	t.Cleanup(func() { s.Close() })
	return s
}

func join(t testing.TB, addr string, opts Options) *Store {
	t.Helper()
	if opts.Timeout == 0 {
		opts.Timeout = patience
	}
	s := must.Get(New(t.Context(), addr, opts))
	t.Cleanup(func() { s.Close() })
	return s
}

// raw is a client that sends what it is told.
type raw struct {
	testing.TB
	net.Conn
	r *bufio.Reader
}

func dialRaw(t testing.TB, addr string, first ...byte) *raw {
	t.Helper()
	c := must.Get(net.Dial("tcp", addr))
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	r := &raw{t, c, bufio.NewReader(c)}
	if len(first) > 0 {
		r.send(first)
	}
	return r
}

func (r *raw) send(b []byte) {
	r.Helper()
	must.Get(r.Write(b))
}

// request sends one in a dialect.
func (r *raw) request(d *dialect, req *request) {
	r.Helper()
	b := must.Get(req.append(nil, d))
	r.send(b)
}

func (r *raw) expect(want ...byte) {
	r.Helper()
	got := make([]byte, len(want))
	n, err := io.ReadFull(r.r, got)
	require.NoError(r, err, "got % x, want % x", got[:n], want)
	require.Equal(r, want, got)
}

// closed expects the end of the connection and nothing before it.
func (r *raw) closed() {
	r.Helper()
	b, err := io.ReadAll(r.r)
	require.Empty(r, b)
	require.True(r, err == nil || disconnected(err), "%v", err)
}

// open expects that the connection is in use, with nothing more to read: a
// request has its own reply.
func (r *raw) open(d *dialect) {
	r.Helper()
	r.request(d, keyed(qCheck, "no such key"))
	r.expect(notReady)
}

// until waits for a state.
func until(t testing.TB, state func() bool) {
	t.Helper()
	require.Eventually(t, state, patience, time.Millisecond)
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// expiring is a context with a deadline that comes when the test says so.
type expiring struct {
	context.Context
	ended chan struct{}
}

func newExpiring(t testing.TB) expiring { return expiring{t.Context(), make(chan struct{})} }

func (c expiring) expire() { close(c.ended) }

func (c expiring) Deadline() (time.Time, bool) { return time.Now().Add(time.Hour), true }

func (c expiring) Done() <-chan struct{} { return c.ended }

func (c expiring) Err() error {
	select {
	case <-c.ended:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func go1[T any](f func() T) <-chan T {
	c := make(chan T, 1)
	go func() { c <- f() }()
	return c
}

func await[T any](t testing.TB, c <-chan T) T {
	t.Helper()
	return must.Receive(t, "what a goroutine sends", c)
}

var dialects = map[string]*dialect{"v1": torch1, "v2": pytorch}
