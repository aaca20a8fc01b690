package pg_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

// stoppedStore does not answer once stopped is set, like a store whose process has stopped.
type stoppedStore struct {
	store.Store
	stopped atomic.Bool
	asked   chan struct{}
}

func (s *stoppedStore) wait(ctx context.Context) error {
	if !s.stopped.Load() {
		return nil
	}
	select {
	case s.asked <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return ctx.Err()
}

func (s *stoppedStore) Add(ctx context.Context, key string, n int64) (int64, error) {
	if err := s.wait(ctx); err != nil {
		return 0, err
	}
	return s.Store.Add(ctx, key, n)
}

func (s *stoppedStore) Get(ctx context.Context, key string) ([]byte, error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	return s.Store.Get(ctx, key)
}

func (s *stoppedStore) Set(ctx context.Context, key string, v []byte) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.Store.Set(ctx, key, v)
}

func (s *stoppedStore) CompareSet(ctx context.Context, key string, a, b []byte) ([]byte, error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	return s.Store.CompareSet(ctx, key, a, b)
}

// TestClosePending: Close ends a Pending whose store does not answer.
func TestClosePending(t *testing.T) {
	st := &stoppedStore{Store: store.NewHash(), asked: make(chan struct{}, 1)}
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	g, err := pg.New(ctx, st, 0, 1)
	require.NoError(t, err)
	must.Get(g.Pending(ctx))
	st.stopped.Store(true)
	ended := make(chan error, 1)
	go func() {
		_, err := g.Pending(ctx)
		ended <- err
	}()
	<-st.asked
	require.NoError(t, g.Close())
	require.NoError(t, ctx.Err())
	require.ErrorIs(t, <-ended, pg.ErrClosed)
}

// slowWills takes wills once slow is set, but does not say so before the call's context has ended.
type slowWills struct {
	*store.Hash
	slow  atomic.Bool
	asked chan struct{}
}

func (s *slowWills) SetWill(ctx context.Context, key string, expected, desired []byte) error {
	if !s.slow.Load() {
		return nil
	}
	close(s.asked)
	<-ctx.Done()
	return ctx.Err()
}

func (s *slowWills) DropWill(context.Context, string) error { return nil }

// TestCloseEarlyNewGroup: the other ranks hear that a rank has closed, even if its NewGroup had only begun.
func TestCloseEarlyNewGroup(t *testing.T) {
	st := store.NewHash()
	slow := &slowWills{Hash: st, asked: make(chan struct{})}
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var gs [2]*pg.ProcessGroup
	var init errgroup.Group
	for r, s := range []store.Store{slow, st} {
		init.Go(func() (err error) {
			gs[r], err = pg.New(ctx, s, r, 2)
			return err
		})
	}
	require.NoError(t, init.Wait())
	defer gs[1].Close()
	slow.slow.Store(true)
	var ended [2]chan error
	for r := range gs {
		ended[r] = make(chan error, 1)
		go func() {
			_, err := gs[r].NewGroup(ctx, []int{0, 1})
			ended[r] <- err
		}()
	}
	<-slow.asked
	require.NoError(t, gs[0].Close())
	require.ErrorIs(t, <-ended[0], pg.ErrClosed)
	err := <-ended[1]
	fault := must.As[*pg.GroupFault](t, err)
	require.Equal(t, 0, fault.Rank)
	require.ErrorContains(t, err, pg.ErrClosed.Error())
	require.NoError(t, ctx.Err())
	require.ErrorIs(t, must.Err(gs[0].NewGroup(ctx, []int{0, 1})), pg.ErrClosed)
}

// TestCloseNewGroup: Close ends a NewGroup that waits for other ranks.
func TestCloseNewGroup(t *testing.T) {
	st := store.NewHash()
	ctx, cancel := context.WithTimeout(t.Context(), jobLimit)
	defer cancel()
	var gs [2]*pg.ProcessGroup
	var init errgroup.Group
	for r := range gs {
		init.Go(func() (err error) {
			gs[r], err = pg.New(ctx, st, r, 2)
			return err
		})
	}
	require.NoError(t, init.Wait())
	defer gs[1].Close()
	ended := make(chan error, 1)
	go func() {
		_, err := gs[0].NewGroup(ctx, []int{0, 1})
		ended <- err
	}()
	require.Eventually(t, func() bool {
		keys, err := st.ListKeys(ctx)
		return err == nil && slices.ContainsFunc(keys, func(key string) bool { return strings.HasSuffix(key, "/lists/1") })
	}, jobLimit, time.Millisecond)
	require.NoError(t, gs[0].Close())
	_, err := gs[1].NewGroup(ctx, []int{0, 1})
	fault := must.As[*pg.GroupFault](t, err, "Close waits until the other ranks can know of it")
	require.Equal(t, 0, fault.Rank)
	require.ErrorIs(t, <-ended, pg.ErrClosed)
}
