//go:build unix

package redis

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
