package gloo_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
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
		second, err := b.Barrier(ctx, backend.BarrierOptions{})
		require.NoError(t, err)
		require.NoError(t, second.Wait(ctx))
		third, err := b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})
		require.NoError(t, err)
		fourth, err := b.Barrier(ctx, backend.BarrierOptions{})
		require.NoError(t, err)
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
		var e *work.Error
		require.ErrorAs(t, err, &e)
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
		var e *work.Error
		require.ErrorAs(t, err, &e)
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
			var err error
			works[i], err = b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})
			require.NoError(t, err)
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

// TestLargeAllToAll has blocks long enough to be copied once.
func TestLargeAllToAll(t *testing.T) {
	const p, n = 3, 300_001
	ctx := context.Background()
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, gloo.GroupTimeout, same(wire, p)...)
		onAll(t, bs, func(r int, b *gloo.Backend) {
			block := func(from, to int) *tensor.Tensor { return filled(n, (from*p+to)*1000) }
			in := each(p, func(to int) *tensor.Tensor { return block(r, to) })
			out := each(p, func(int) *tensor.Tensor { return filled(n, -1) })
			assert.NoError(t, wait(b.AllToAll(ctx, out, in, backend.AllToAllOptions{})))
			for from, x := range out {
				assert.True(t, slices.Equal(block(from, r).Bytes(), x.Bytes()), "rank %d, block of rank %d", r, from)
			}
		})
	})
}

// TestClosedWithoutAFault: an operation that finds its group closed says so. A nil fault is no error.
func TestClosedWithoutAFault(t *testing.T) {
	b := connected(t, gloo.GroupTimeout, gloo.WireTCP)[0]
	require.NoError(t, b.Close())
	require.ErrorIs(t, b.FaultError(), work.ErrClosed)
}
