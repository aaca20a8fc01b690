//go:build unix

package redis

import (
	"bytes"
	"context"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// TestServerFreezes checks that nothing waits for the answer of a stopped
// server once its context or the store has ended.
func TestServerFreezes(t *testing.T) {
	srv := plainServer(t)
	s := connect(t, "redis://"+srv.addr, Options{Timeout: -1})
	require.NoError(t, s.Set(t.Context(), "k", nil))
	require.NoError(t, srv.cmd.Process.Signal(syscall.SIGSTOP))

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	err := s.Set(ctx, "k", nil)
	require.ErrorIs(t, err, store.ErrTimeout)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	s.SetTimeout(50 * time.Millisecond)
	_, err = s.Add(t.Context(), "n", 1)
	require.ErrorIs(t, err, store.ErrTimeout)
	s.SetTimeout(-1)

	ctx, cancel = context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { _, err := s.Get(ctx, "k"); ended <- err }()
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	go func() { _, err := s.Get(t.Context(), "k"); ended <- err }()
	require.NoError(t, s.Close())
	require.ErrorIs(t, <-ended, store.ErrClosed)
	require.Less(t, time.Since(start), ioTimeout, "somebody waited for the server")
}

// popped tells once a command to pop has been written to it.
type popped struct {
	net.Conn
	told chan struct{} // has room
}

func (p popped) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	if bytes.Contains(bytes.ToLower(b), []byte("lpop")) {
		select {
		case p.told <- struct{}{}:
		default:
		}
	}
	return n, err
}

// connectPopped returns a store, and a channel that tells once it has written a command to pop.
func connectPopped(t *testing.T, addr string) (*Store, <-chan struct{}) {
	var opts Options
	config := must.Get(parse("redis://"+addr, &opts))
	dial, told := config.Dialer, make(chan struct{}, 1)
	config.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return popped{c, told}, nil
	}
	return must.Get(open(t.Context(), config, opts)), told
}

// popAndGo pops, and goes once the command has been written.
func popAndGo(t *testing.T, s *Store, told <-chan struct{}) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- must.Err(s.QueuePop(ctx, "q", true)) }()
	must.Receive(t, "the command is written", told)
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
}

// TestPopLosesNothing: the server carries out a QueuePop after the caller has gone.
func TestPopLosesNothing(t *testing.T) {
	srv := plainServer(t)
	s, told := connectPopped(t, srv.addr)
	defer func() { require.NoError(t, s.Close()) }()
	for _, v := range []string{"first", "second"} {
		require.NoError(t, s.QueuePush(t.Context(), "q", []byte(v)))
	}
	require.NoError(t, srv.cmd.Process.Signal(syscall.SIGSTOP))
	popAndGo(t, s, told)
	require.NoError(t, srv.cmd.Process.Signal(syscall.SIGCONT))
	require.Eventually(t, func() bool {
		stats, err := s.client.Info(t.Context(), "commandstats").Result()
		return err == nil && strings.Contains(stats, "cmdstat_lpop:")
	}, 20*time.Second, time.Millisecond)
	require.Eventually(t, func() bool {
		n, err := s.QueueLen(t.Context(), "q")
		return err == nil && n == 2
	}, 20*time.Second, time.Millisecond, "the element is lost")
	for _, want := range []string{"first", "second"} {
		require.Equal(t, want, string(must.Get(s.QueuePop(t.Context(), "q", false))))
	}
}

// TestCloseLosesNoPop: the server carries out a QueuePop after its store has been closed.
func TestCloseLosesNoPop(t *testing.T) {
	srv := plainServer(t)
	s, told := connectPopped(t, srv.addr)
	require.NoError(t, s.QueuePush(t.Context(), "q", []byte("element")))
	require.NoError(t, srv.cmd.Process.Signal(syscall.SIGSTOP))
	popAndGo(t, s, told)
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	require.Eventually(t, s.isClosed, 20*time.Second, time.Millisecond)
	require.NoError(t, srv.cmd.Process.Signal(syscall.SIGCONT))
	require.NoError(t, <-closed)
	other := connect(t, "redis://"+srv.addr, Options{})
	stats := must.Get(other.client.Info(t.Context(), "commandstats").Result())
	require.Contains(t, stats, "cmdstat_lpop:", "the server has got the command")
	require.Equal(t, "element", string(must.Get(other.QueuePop(t.Context(), "q", false))))
}
