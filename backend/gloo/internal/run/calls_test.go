package run_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestWrongCalls: a call that is wrong is refused, uses no number, and the group goes on.
func TestWrongCalls(t *testing.T) {
	ctx := context.Background()
	ints := func(v ...int32) *tensor.Tensor { return of(t, v, len(v)) }
	scalar := of(t, []float32{1}, []int{}...)
	wide := of(t, []float32{1, 2}, 2, 1)
	type call struct {
		name string
		do   func(b *gloo.Backend, other int) (*work.Work, error)
	}
	var calls []call
	add := func(name string, do func(b *gloo.Backend, other int) (*work.Work, error)) {
		calls = append(calls, call{name, do})
	}
	for _, root := range []int{-1, 2} {
		add("broadcast: root", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Broadcast(ctx, list(vec(1)), backend.BroadcastOptions{Root: root})
		})
		add("broadcast: root tensor", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Broadcast(ctx, list(vec(1), vec(2)), backend.BroadcastOptions{RootTensor: root})
		})
		add("reduce: root", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Reduce(ctx, vec(1), backend.ReduceOptions{Root: root})
		})
		add("gather: root", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Gather(ctx, nil, vec(1), backend.GatherOptions{Root: root})
		})
		add("scatter: root", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Scatter(ctx, vec(1), nil, backend.ScatterOptions{Root: root})
		})
		add("send: rank", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Send(ctx, vec(1), root, backend.P2POptions{})
		})
		add("recv: rank", func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Recv(ctx, vec(1), root, backend.P2POptions{})
		})
	}
	for name, ts := range map[string][]*tensor.Tensor{
		"no list": nil, "nil": list(nil), "dtypes": list(vec(1), ints(1)), "a nil among others": list(vec(1), nil),
	} {
		add("all_reduce: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllReduce(ctx, ts, backend.AllReduceOptions{})
		})
		add("all_reduce_coalesced: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllReduceCoalesced(ctx, ts, backend.AllReduceOptions{})
		})
		add("broadcast: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Broadcast(ctx, ts, backend.BroadcastOptions{})
		})
		add("all_gather: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllGather(ctx, ts, vec(1), backend.AllGatherOptions{})
		})
		add("all_gather_v: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllGatherV(ctx, ts, vec(1), backend.AllGatherOptions{})
		})
		add("all_gather_coalesced: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllGatherCoalesced(ctx, [][]*tensor.Tensor{ts, ts}, list(vec(1), vec(1)), backend.AllGatherOptions{})
		})
		add("all_gather_into_tensor_coalesced: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllGatherIntoTensorCoalesced(ctx, list(vec(1, 1), vec(1, 1)), ts, backend.AllGatherOptions{})
		})
		add("gather: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Gather(ctx, ts, vec(1), backend.GatherOptions{Root: b.Rank()})
		})
		add("gather_v: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.GatherV(ctx, ts, vec(1), backend.GatherOptions{Root: b.Rank()})
		})
		add("scatter: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.Scatter(ctx, vec(1), ts, backend.ScatterOptions{Root: b.Rank()})
		})
		add("reduce_scatter: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.ReduceScatter(ctx, vec(1), ts, backend.ReduceScatterOptions{})
		})
		add("reduce_scatter_tensor_coalesced: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.ReduceScatterTensorCoalesced(ctx, ts, list(vec(1, 1), vec(1, 1)), backend.ReduceScatterOptions{})
		})
		add("all_to_all, outputs: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllToAll(ctx, ts, list(vec(1), vec(1)), backend.AllToAllOptions{})
		})
		add("all_to_all, inputs: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllToAll(ctx, list(vec(1), vec(1)), ts, backend.AllToAllOptions{})
		})
	}
	for name, t := range map[string]*tensor.Tensor{"nil": nil, "dtype": ints(1, 2), "length": vec(1, 2, 3), "no dimension": scalar} {
		add("all_gather_into_tensor: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllGatherIntoTensor(ctx, t, vec(1), backend.AllGatherOptions{})
		})
		add("reduce_scatter_tensor: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.ReduceScatterTensor(ctx, vec(1), t, backend.ReduceScatterOptions{})
		})
		add("all_to_all_single, input: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllToAllSingle(ctx, vec(1, 2), t, nil, nil, backend.AllToAllOptions{})
		})
		add("all_to_all_single, output: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllToAllSingle(ctx, t, vec(1, 2), nil, nil, backend.AllToAllOptions{})
		})
	}
	for name, splits := range map[string][]int{"few": {2}, "negative": {-1, 3}, "sum": {1, 2}, "long": {3, 0}} {
		add("all_to_all_single, input splits: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllToAllSingle(ctx, vec(1, 2), vec(1, 2), nil, splits, backend.AllToAllOptions{})
		})
		add("all_to_all_single, output splits: "+name, func(b *gloo.Backend, _ int) (*work.Work, error) {
			return b.AllToAllSingle(ctx, vec(1, 2), vec(1, 2), splits, nil, backend.AllToAllOptions{})
		})
	}
	add("all_to_all_single: to itself", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllToAllSingle(ctx, vec(1, 2), vec(1, 2), []int{2, 0}, []int{0, 2}, backend.AllToAllOptions{})
	})
	add("gather: outputs elsewhere", func(b *gloo.Backend, other int) (*work.Work, error) {
		return b.Gather(ctx, list(vec(1), vec(1)), vec(1), backend.GatherOptions{Root: other})
	})
	add("scatter: inputs elsewhere", func(b *gloo.Backend, other int) (*work.Work, error) {
		return b.Scatter(ctx, vec(1), list(vec(1), vec(1)), backend.ScatterOptions{Root: other})
	})
	add("all_reduce: shapes", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllReduce(ctx, list(vec(1, 2), wide), backend.AllReduceOptions{})
	})
	add("all_reduce: layouts", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllReduce(ctx, list(vec(1, 2), sparse(t, 2, []int64{1}, []float32{1})), backend.AllReduceOptions{})
	})
	add("all_reduce: average of integers", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllReduce(ctx, list(ints(1)), backend.AllReduceOptions{Op: backend.Avg()})
	})
	add("all_reduce_coalesced: average of integers", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllReduceCoalesced(ctx, list(ints(1)), backend.AllReduceOptions{Op: backend.Avg()})
	})
	add("reduce: average of integers", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.Reduce(ctx, ints(1), backend.ReduceOptions{Op: backend.Avg()})
	})
	add("reduce: nil", func(b *gloo.Backend, _ int) (*work.Work, error) { return b.Reduce(ctx, nil, backend.ReduceOptions{}) })
	add("reduce_scatter: average of integers", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.ReduceScatter(ctx, ints(1), list(ints(1), ints(2)), backend.ReduceScatterOptions{Op: backend.Avg()})
	})
	add("reduce_scatter: own shape", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.ReduceScatter(ctx, vec(1), list(vec(1, 2), vec(1, 2)), backend.ReduceScatterOptions{})
	})
	add("all_gather: shapes", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllGather(ctx, list(vec(1), vec(1, 2)), vec(1), backend.AllGatherOptions{})
	})
	add("all_gather_v: own shape", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllGatherV(ctx, list(vec(1, 2), vec(1, 2)), vec(1), backend.AllGatherOptions{})
	})
	add("gather: shapes", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.Gather(ctx, list(vec(1), vec(1, 2)), vec(1), backend.GatherOptions{Root: b.Rank()})
	})
	add("gather_v: own shape", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.GatherV(ctx, list(vec(1, 2), vec(1, 2)), vec(1), backend.GatherOptions{Root: b.Rank()})
	})
	add("scatter: shapes", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.Scatter(ctx, vec(1), list(vec(1), vec(1, 2)), backend.ScatterOptions{Root: b.Rank()})
	})
	add("all_to_all: own shape", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.AllToAll(ctx, list(vec(1), vec(1)), list(vec(1, 2), vec(1, 2)), backend.AllToAllOptions{})
	})
	add("send: nil", func(b *gloo.Backend, other int) (*work.Work, error) {
		return b.Send(ctx, nil, other, backend.P2POptions{})
	})
	add("send: to itself", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.Send(ctx, vec(1), b.Rank(), backend.P2POptions{})
	})
	add("recv: nil", func(b *gloo.Backend, other int) (*work.Work, error) {
		return b.Recv(ctx, nil, other, backend.P2POptions{})
	})
	add("recv_anysource: nil", func(b *gloo.Backend, _ int) (*work.Work, error) {
		return b.RecvAnySource(ctx, nil, backend.P2POptions{})
	})
	ranks(t, mem.NewFabric(), 2, 1, 0, func(t *testing.T, b *gloo.Backend) {
		for _, c := range calls {
			w, err := c.do(b, 1-b.Rank())
			assert.ErrorIs(t, err, backend.ErrInvalidArgument, "%s", c.name)
			assert.Nil(t, w, "%s", c.name)
			if w != nil {
				b.Abort(nil)
				return
			}
		}
		assert.Zero(t, b.Seq())
		assert.NoError(t, barrier(b))
	})
}
