package cuda

import (
	"context"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Every collective is checked here, becomes a call, and goes to issue. What kernels and hosts do for it is in its row of
// operations.

// longest returns the bytes of the longest tensor.
func longest(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n = max(n, t.ByteLen())
	}
	return n
}

// total returns how many elements the tensors have together.
func total(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.Len()
	}
	return n
}

// bytesOf returns the bytes of all tensors.
func bytesOf(ts []*tensor.Tensor) int { return total(ts) * ts[0].DType().Size() }

// newReduction is newCall for an operation that combines elements of a dtype. It checks the operator.
func (b *Backend) newReduction(ctx context.Context, op work.OpType, timeout time.Duration, r backend.ReduceOp, d tensor.DType, n int) (*call, error) {
	if _, err := b.args.Reduction(op, r, d); err != nil {
		return nil, err
	}
	c := b.newCall(ctx, op, timeout, board.Call{With: board.Reducing(r), DType: d, N: n, Root: -1})
	c.reduce = r
	return c, nil
}

// Broadcast brings the root's tensor to all tensors of all ranks. Options.Broadcast has the ways that it can go.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	if err := b.args.Broadcast(ts, o); err != nil {
		return nil, err
	}
	c := b.newCall(ctx, work.Broadcast, o.Timeout, board.Call{DType: ts[0].DType(), N: ts[0].Len(), Root: o.Root})
	c.out, c.root, c.first, c.bytes = ts, o.Root, o.RootTensor, ts[0].ByteLen()
	return b.issue(c)
}

// AllReduce runs the all-reduce work that is registered for the tensors' layout,
// or the one that Options.AllReduce names.
func (b *Backend) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduce
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	for i, t := range ts {
		switch {
		case t == nil:
			return nil, bad(op, "tensor %d is nil", i)
		case t.Device().Type != tensor.CUDA && t.Device().Type != tensor.CPU:
			return nil, bad(op, "unsupported device type %v of tensor %d", t.Device().Type, i)
		case t.Layout() != ts[0].Layout():
			return nil, bad(op, "invalid tensor layout at index %d (expected %v, got %v)", i, ts[0].Layout(), t.Layout())
		case t.DType() != ts[0].DType():
			return nil, bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, ts[0].DType(), t.DType())
		case !t.SameShape(ts[0]):
			return nil, bad(op, "invalid tensor size at index %d (expected %v, got %v)", i, ts[0].Shape(), t.Shape())
		}
	}
	if err := b.args.Overlap(op, ts, nil); err != nil {
		return nil, err
	}
	sparse := ts[0].Layout() != tensor.Strided
	if !sparse {
		if err := b.args.Typed(op, "tensors", ts[0].DType(), ts); err != nil {
			return nil, err
		}
		if _, err := b.args.Reduction(op, o.Op, ts[0].DType()); err != nil {
			return nil, err
		}
	}
	c := b.newCall(ctx, op, o.Timeout, board.Call{With: board.Reducing(o.Op), DType: ts[0].DType(), N: ts[0].Len(), Root: -1, Sparse: sparse})
	if c.out, c.reduce = ts, o.Op; !sparse {
		c.bytes = ts[0].ByteLen()
	}
	return b.issue(c)
}

// AllReduceCoalesced all-reduces the same range of all tensors at a time.
func (b *Backend) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	if err := b.args.AllReduceCoalesced(ts); err != nil {
		return nil, err
	}
	c, err := b.newReduction(ctx, work.AllReduceCoalesced, o.Timeout, o.Op, ts[0].DType(), total(ts))
	if err != nil {
		return nil, err
	}
	c.out, c.parts, c.bytes = ts, len(ts), bytesOf(ts)
	return b.issue(c)
}

// Reduce combines t into the root's; the others keep theirs.
func (b *Backend) Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	if err := b.args.Reduce(t, o); err != nil {
		return nil, err
	}
	c, err := b.newReduction(ctx, work.Reduce, o.Timeout, o.Op, t.DType(), t.Len())
	if err != nil {
		return nil, err
	}
	if c.root, c.print.Root, c.bytes = o.Root, o.Root, t.ByteLen(); b.g.Rank == o.Root {
		c.out = []*tensor.Tensor{t}
	} else {
		c.in = []*tensor.Tensor{t}
	}
	return b.issue(c)
}

// AllGather gathers the ranks' inputs.
func (b *Backend) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGather(out, in, true); err != nil {
		return nil, err
	}
	return b.allGather(ctx, work.AllGather, o, out, in, nil)
}

// AllGatherV gathers inputs of unequal size.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGather(out, in, false); err != nil {
		return nil, err
	}
	return b.allGather(ctx, work.AllGather, o, out, in, nil)
}

// AllGatherIntoTensor gathers the ranks' inputs into parts of out.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherIntoTensor
	if err := b.args.AllGatherIntoTensor(out, in); err != nil {
		return nil, err
	}
	parts, err := b.args.Cut(op, out, nil)
	if err != nil {
		return nil, err
	}
	return b.allGather(ctx, op, o, parts, in, []*tensor.Tensor{out})
}

// allGather takes outputs of all sizes: that is the general case, and those of
// one size are one.
func (b *Backend) allGather(ctx context.Context, op work.OpType, o backend.AllGatherOptions, out []*tensor.Tensor, in *tensor.Tensor, result []*tensor.Tensor) (*work.Work, error) {
	c := b.newCall(ctx, op, o.Timeout, board.Call{DType: in.DType(), N: total(out), Root: -1})
	c.out, c.in, c.result, c.bytes = out, []*tensor.Tensor{in}, result, longest(out)
	c.uneven = slices.ContainsFunc(out, func(t *tensor.Tensor) bool { return t.Len() != in.Len() })
	return b.issue(c)
}

// AllGatherCoalesced gathers the same range of all inputs at a time.
func (b *Backend) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	joined, err := b.args.AllGatherCoalesced(out, in)
	if err != nil {
		return nil, err
	}
	return b.allGatherCoalesced(ctx, o, joined, in, nil)
}

// AllGatherIntoTensorCoalesced gathers the same range of all inputs at a time.
func (b *Backend) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	joined, err := b.args.AllGatherIntoTensorCoalesced(out, in)
	if err != nil {
		return nil, err
	}
	return b.allGatherCoalesced(ctx, o, joined, in, out)
}

// allGatherCoalesced gathers rank r's input i to out[r*len(in)+i].
func (b *Backend) allGatherCoalesced(ctx context.Context, o backend.AllGatherOptions, out, in, result []*tensor.Tensor) (*work.Work, error) {
	c := b.newCall(ctx, work.AllGatherCoalesced, o.Timeout, board.Call{DType: in[0].DType(), N: total(out), Root: -1})
	c.out, c.in, c.result, c.parts, c.bytes = out, in, result, len(in), bytesOf(in)
	return b.issue(c)
}

// Gather gathers the ranks' inputs at the root.
func (b *Backend) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, true)
}

// GatherV is Gather with inputs of unequal size. Only the root knows the sizes, so through the hosts
// it goes in one piece.
func (b *Backend) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, false)
}

func (b *Backend) gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions, even bool) (*work.Work, error) {
	if err := b.args.Gather(out, in, o.Root, even); err != nil {
		return nil, err
	}
	c := b.newCall(ctx, work.Gather, o.Timeout, board.Call{DType: in.DType(), Root: o.Root})
	c.out, c.in, c.root, c.uneven, c.bytes = out, []*tensor.Tensor{in}, o.Root, !even, ways.UnknownBytes
	if even {
		c.print.N, c.bytes = b.g.Size*in.Len(), in.ByteLen()
	}
	return b.issue(c)
}

// Scatter sends the root's inputs to their ranks.
func (b *Backend) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	if err := b.args.Scatter(out, in, o.Root); err != nil {
		return nil, err
	}
	c := b.newCall(ctx, work.Scatter, o.Timeout, board.Call{DType: out.DType(), N: b.g.Size * out.Len(), Root: o.Root})
	c.out, c.in, c.root, c.bytes = []*tensor.Tensor{out}, in, o.Root, out.ByteLen()
	return b.issue(c)
}

// ReduceScatter combines input i of all ranks into rank i's output.
func (b *Backend) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	if err := b.args.ReduceScatter(out, in); err != nil {
		return nil, err
	}
	return b.reduceScatter(ctx, work.ReduceScatter, o, []*tensor.Tensor{out}, in)
}

// ReduceScatterTensor combines part i of all ranks' inputs into rank i's output.
func (b *Backend) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensor, []*tensor.Tensor{out}, []*tensor.Tensor{in}, o)
}

// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair.
func (b *Backend) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensorCoalesced, out, in, o)
}

func (b *Backend) reduceScatterTensors(ctx context.Context, op work.OpType, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	if err := b.args.ReduceScatterTensors(op, out, in); err != nil {
		return nil, err
	}
	var joined []*tensor.Tensor
	for _, t := range in {
		parts, err := b.args.Cut(op, t, nil)
		if err != nil {
			return nil, err
		}
		joined = append(joined, parts...)
	}
	return b.reduceScatter(ctx, op, o, out, joined)
}

// reduceScatter combines in[i*size+r] of all ranks into rank r's out[i].
func (b *Backend) reduceScatter(ctx context.Context, op work.OpType, o backend.ReduceScatterOptions, out, in []*tensor.Tensor) (*work.Work, error) {
	c, err := b.newReduction(ctx, op, o.Timeout, o.Op, out[0].DType(), total(in))
	if err != nil {
		return nil, err
	}
	c.out, c.in, c.parts, c.bytes = out, in, len(out), bytesOf(out)
	if len(out) == 1 && slices.ContainsFunc(in, func(t *tensor.Tensor) bool { return t.Len() != out[0].Len() }) {
		c.uneven, c.bytes = true, longest(in)
	}
	return b.issue(c)
}

// AllToAll sends in[j] to rank j. A rank knows its own messages only, so through the hosts it goes
// in one piece.
func (b *Backend) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	if err := b.args.AllToAll(out, in); err != nil {
		return nil, err
	}
	return b.allToAll(ctx, work.AllToAll, o, out, in, nil)
}

// AllToAllSingle sends part j of in to rank j, as AllToAll does.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	const op = work.AllToAllSingle
	recv, send, err := b.args.AllToAllSingle(out, in, outSplits, inSplits)
	if err != nil {
		return nil, err
	}
	ins, err := b.args.Cut(op, in, send)
	if err != nil {
		return nil, err
	}
	outs, err := b.args.Cut(op, out, recv)
	if err != nil {
		return nil, err
	}
	return b.allToAll(ctx, op, o, outs, ins, []*tensor.Tensor{out})
}

func (b *Backend) allToAll(ctx context.Context, op work.OpType, o backend.AllToAllOptions, out, in, result []*tensor.Tensor) (*work.Work, error) {
	c := b.newCall(ctx, op, o.Timeout, board.Call{DType: in[0].DType(), Root: -1})
	c.out, c.in, c.result, c.bytes = out, in, result, ways.UnknownBytes
	return b.issue(c)
}

// Barrier waits for this rank's earlier collectives, on the devices too, then
// meets the others. If kernels did all collectives since the last barrier through the hosts, the
// devices meet.
func (b *Backend) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	return b.issue(b.newCall(ctx, work.Barrier, o.Timeout, board.Call{Root: -1}))
}

// MonitoredBarrier is a barrier, after this rank's earlier collectives, whose
// error names the ranks that did not come.
func (b *Backend) MonitoredBarrier(ctx context.Context, o backend.MonitoredBarrierOptions) error {
	q := &group.Operation{Print: board.Call{Root: 0}, Call: func(q *group.Operation, _ []*tensor.Tensor) error {
		return b.g.CPU.MonitoredBarrier(q.Ctx, backend.MonitoredBarrierOptions{Timeout: q.Left()})
	}}
	w, err := b.g.Issue(ctx, work.Barrier, o.Timeout, q)
	if err != nil {
		return err
	}
	return w.Wait(context.Background())
}

var _ backend.Backend = (*Backend)(nil)
