package detail

import (
	"context"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func one(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }

// alike returns t if all tensors of a list have one shape: only then PyTorch compares the
// tensors.
func alike(t *tensor.Tensor, list []*tensor.Tensor) []*tensor.Tensor {
	for _, x := range list {
		if x == nil || !x.SameShape(list[0]) {
			return nil
		}
	}
	return one(t)
}

// Broadcast checks the tensors.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	c := call{op: work.Broadcast, timeout: o.Timeout, out: ts, tensors: ts, root: o.Root + 1}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.Broadcast(ctx, ts, o) })
}

// AllReduce checks the tensors.
func (b *Backend) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	c := call{op: work.AllReduce, timeout: o.Timeout, out: ts, tensors: ts, real: true, reduce: &o.Op}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllReduce(ctx, ts, o) })
}

// AllReduceCoalesced checks that every rank calls it, and the tensors if there are no PyTorch
// ranks.
func (b *Backend) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	c := call{op: work.AllReduceCoalesced, timeout: o.Timeout, out: ts, more: ts, reduce: &o.Op}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllReduceCoalesced(ctx, ts, o) })
}

// Reduce checks the tensor.
func (b *Backend) Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	c := call{op: work.Reduce, timeout: o.Timeout, out: one(t), tensors: one(t), root: o.Root + 1, reduce: &o.Op}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.Reduce(ctx, t, o) })
}

// AllGather checks the input.
func (b *Backend) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	c := call{op: work.AllGather, timeout: o.Timeout, out: out, in: one(in), tensors: one(in), real: true}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllGather(ctx, out, in, o) })
}

// AllGatherV checks that every rank calls it, and the input if all have one shape.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	c := call{op: work.AllGather, timeout: o.Timeout, out: out, in: one(in), tensors: alike(in, out), real: true}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllGatherV(ctx, out, in, o) })
}

// AllGatherIntoTensor checks the input.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	c := call{op: work.AllGatherIntoTensor, timeout: o.Timeout, out: one(out), in: one(in), tensors: one(in), real: true}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllGatherIntoTensor(ctx, out, in, o) })
}

// AllGatherCoalesced checks that every rank calls it, and the inputs if there are no PyTorch
// ranks.
func (b *Backend) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	c := call{op: work.AllGatherCoalesced, timeout: o.Timeout, out: slices.Concat(out...), in: in, more: in}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllGatherCoalesced(ctx, out, in, o) })
}

// AllGatherIntoTensorCoalesced is checked like AllGatherCoalesced, since PyTorch's gloo
// implements one by the other. PyTorch up to 2.11 does not check it.
func (b *Backend) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	c := call{op: work.AllGatherCoalesced, timeout: o.Timeout, out: out, in: in, more: in}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) {
		return b.Backend.AllGatherIntoTensorCoalesced(ctx, out, in, o)
	})
}

// Gather checks the input.
func (b *Backend) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	c := call{op: work.Gather, timeout: o.Timeout, out: out, in: one(in), tensors: one(in), root: o.Root + 1}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.Gather(ctx, out, in, o) })
}

// GatherV checks that every rank calls it.
func (b *Backend) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	c := call{op: work.Gather, timeout: o.Timeout, out: out, in: one(in), root: o.Root + 1}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.GatherV(ctx, out, in, o) })
}

// Scatter checks the output.
func (b *Backend) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	c := call{op: work.Scatter, timeout: o.Timeout, out: one(out), in: in, tensors: one(out), real: true, root: o.Root + 1}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.Scatter(ctx, out, in, o) })
}

// ReduceScatter checks the output, if all inputs have one shape. PyTorch's gloo does one
// all-reduce for each rank and counts them.
func (b *Backend) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	c := call{op: work.ReduceScatter, timeout: o.Timeout, out: one(out), in: in, tensors: alike(out, in), reduce: &o.Op, counts: b.Size()}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.ReduceScatter(ctx, out, in, o) })
}

// ReduceScatterTensor checks input and output.
func (b *Backend) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	c := call{op: work.ReduceScatterTensor, timeout: o.Timeout, out: one(out), in: one(in), tensors: []*tensor.Tensor{in, out}, reduce: &o.Op}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.ReduceScatterTensor(ctx, out, in, o) })
}

// ReduceScatterTensorCoalesced checks that every rank calls it, and the inputs if there are no
// PyTorch ranks. PyTorch's gloo counts each tensor.
func (b *Backend) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	c := call{op: work.ReduceScatterTensorCoalesced, timeout: o.Timeout, out: out, in: in, more: in, reduce: &o.Op, counts: len(out)}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) {
		return b.Backend.ReduceScatterTensorCoalesced(ctx, out, in, o)
	})
}

// AllToAll checks that every rank calls it.
func (b *Backend) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	c := call{op: work.AllToAll, timeout: o.Timeout, out: out, in: in}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.AllToAll(ctx, out, in, o) })
}

// AllToAllSingle checks that every rank calls it.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	c := call{op: work.AllToAllSingle, timeout: o.Timeout, out: one(out), in: one(in)}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) {
		return b.Backend.AllToAllSingle(ctx, out, in, outSplits, inSplits, o)
	})
}

// Barrier checks that every rank calls it.
func (b *Backend) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	c := call{op: work.Barrier, timeout: o.Timeout}
	return b.run(ctx, c, func(ctx context.Context) (*work.Work, error) { return b.Backend.Barrier(ctx, o) })
}

// Send is not checked.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	return b.p2p(b.Backend.Send(ctx, t, dst, o))
}

// Recv is not checked.
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	return b.p2p(b.Backend.Recv(ctx, t, src, o))
}

// RecvAnySource is not checked.
func (b *Backend) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	return b.p2p(b.Backend.RecvAnySource(ctx, t, o))
}

// MonitoredBarrier is not checked, since its own error names missing ranks. PyTorch counts each
// of its messages.
func (b *Backend) MonitoredBarrier(ctx context.Context, o backend.MonitoredBarrierOptions) error {
	messages := 2
	if b.Rank() == 0 {
		messages = 2 * (b.Size() - 1)
	}
	b.counted.Add(uint64(messages))
	return b.Backend.MonitoredBarrier(ctx, o)
}
