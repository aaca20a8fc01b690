package run_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/work"
)

// TestErrorsNameTheOperation: when one operation ends the group, the errors of others name it.
func TestErrorsNameTheOperation(t *testing.T) {
	ctx := context.Background()
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		first, err := b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})
		require.NoError(t, err)
		if b.Rank() == 1 {
			require.NoError(t, first.Wait(ctx))
			_, err = b.Barrier(ctx, backend.BarrierOptions{}) // and nothing else
			require.NoError(t, err)
			<-time.After(time.Second)
			return
		}
		require.NoError(t, first.Wait(ctx))
		require.NoError(t, must.Get(b.Barrier(ctx, backend.BarrierOptions{})).Wait(ctx))
		third := must.Get(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{}))
		fourth := must.Get(b.Barrier(ctx, backend.BarrierOptions{}))
		third.Abort(errors.New("enough"))
		err = third.Wait(ctx)
		require.ErrorIs(t, err, work.ErrAborted)
		require.NotContains(t, err.Error(), "(in ")
		err = fourth.Wait(ctx)
		require.ErrorIs(t, err, work.ErrAborted)
		require.ErrorContains(t, err, "(in all_reduce seq 2)")
	})
}

// TestAbortWithoutACause: the error says that the group was aborted.
func TestAbortWithoutACause(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		require.NoError(t, barrier(b))
		if b.Rank() == 0 {
			b.Abort(nil)
		}
		err := barrier(b)
		require.ErrorIs(t, err, work.ErrAborted)
		require.ErrorContains(t, err, "rank 0 aborted the group")
	})
}

// TestAbortKeepsItsCause for the operations of the rank that aborted.
func TestAbortKeepsItsCause(t *testing.T) {
	cause := errors.New("the loss is not a number")
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		if b.Rank() == 0 {
			b.Abort(cause)
			require.ErrorIs(t, barrier(b), cause)
		} else {
			require.ErrorIs(t, barrier(b), work.ErrAborted)
		}
	})
}

// TestAbortThatBlamesNobody: the cause is the timeout of an operation for which no rank was to blame. It blames nobody
// in this group either.
func TestAbortThatBlamesNobody(t *testing.T) {
	cause := &work.Error{Peer: -1, Err: transport.NewFault(transport.FaultTimeout, -1, 0, errors.New("too slow"))}
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		if b.Rank() == 0 {
			b.Abort(cause)
		}
		err := barrier(b)
		require.ErrorIs(t, err, work.ErrTimeout)
		require.ErrorContains(t, err, "too slow")
		e := must.As[*work.Error](t, err)
		require.Equal(t, -1, e.Peer)
	})
}

// TestMonitoredBarrierNamesWhoIsMissing: rank 0 names all ranks that have not come in time, and
// those that have.
func TestMonitoredBarrierNamesWhoIsMissing(t *testing.T) {
	ranks(t, mem.NewFabric(), 4, 1, 0, func(t *testing.T, b *gloo.Backend) {
		if b.Rank() == 1 || b.Rank() == 3 {
			time.Sleep(10 * time.Second) // does not come
			return
		}
		limit := 5 * time.Second
		if b.Rank() == 2 {
			limit = 8 * time.Second // rank 0 is the first to give up
		}
		err := b.MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{Timeout: limit})
		require.ErrorIs(t, err, work.ErrTimeout)
		e := must.As[*work.Error](t, err)
		require.Equal(t, 1, e.Peer)
		if b.Rank() == 0 {
			require.ErrorContains(t, err, "Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms; these came: 2")
		}
	})
}

// TestShutdownRunsTheQueue shuts a group down while callers run two operations and a third one is in
// the queue: Shutdown returns when that one has run.
func TestShutdownRunsTheQueue(t *testing.T) {
	ctx := context.Background()
	ranks(t, mem.NewFabric(), 2, 1, 2, func(t *testing.T, b *gloo.Backend) {
		works := make([]*work.Work, 3)
		for i := range works {
			if b.Rank() == 1 {
				time.Sleep(time.Second) // they end one after the other
			}
			works[i] = must.Get(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{}))
			if i < 2 {
				go works[i].Wait(ctx)
			}
		}
		if b.Rank() == 0 {
			synctest.Wait()
		}
		require.NoError(t, b.Shutdown(ctx))
		for _, w := range works {
			require.True(t, w.IsSuccess())
		}
	})
}

// TestSparseResultsAreApart: the tensors of a list get the same result, and no memory of each other's.
func TestSparseResultsAreApart(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		ts := list(sparse(t, 3, []int64{1}, []float32{1}), sparse(t, 3, []int64{2}, []float32{2}))
		require.NoError(t, wait(b.AllReduce(context.Background(), ts, backend.AllReduceOptions{})))
		require.Equal(t, vec(2, 4).Bytes(), ts[1].Values().Bytes())
		clear(ts[0].Values().Bytes())
		clear(ts[0].Indices().Bytes())
		require.Equal(t, vec(2, 4).Bytes(), ts[1].Values().Bytes())
		require.Equal(t, of(t, []int64{1, 2}, 1, 2).Bytes(), ts[1].Indices().Bytes())
	})
}

// TestClosedWithoutAFault: an operation that finds its group closed says so. A nil fault is no error.
func TestClosedWithoutAFault(t *testing.T) {
	b := connected(t, run.GroupTimeout, gloo.WireTCP)[0]
	require.NoError(t, b.Close())
	require.ErrorIs(t, b.FaultError(), work.ErrClosed)
}
