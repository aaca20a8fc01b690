package cuda

import (
	"context"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Every collective is checked here, becomes a call, and goes to issue. What kernels and hosts do for it is in its row of
// operations.

// total returns how many elements the tensors have together.
func total(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.Len()
	}
	return n
}

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
	if err := b.args.AllReduce(ts); err != nil {
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
	c.out, c.parts, c.bytes = ts, len(ts), place.Bytes(ts)
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
	return b.allGather(ctx, work.AllGather, o, out, in, nil, b.args.AllGather(out, in, true))
}

// AllGatherV gathers inputs of unequal size.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	return b.allGather(ctx, work.AllGather, o, out, in, nil, b.args.AllGather(out, in, false))
}

// AllGatherIntoTensor gathers the ranks' inputs into parts of out.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherIntoTensor
	if err := b.args.AllGatherIntoTensor(out, in); err != nil {
		return nil, err
	}
	parts, err := b.args.Cut(op, out, nil)
	return b.allGather(ctx, op, o, parts, in, []*tensor.Tensor{out}, err)
}

// allGather takes outputs of all sizes, unless the call is wrong.
func (b *Backend) allGather(ctx context.Context, op work.OpType, o backend.AllGatherOptions, out []*tensor.Tensor, in *tensor.Tensor, result []*tensor.Tensor, wrong error) (*work.Work, error) {
	if wrong != nil {
		return nil, wrong
	}
	c := b.newCall(ctx, op, o.Timeout, board.Call{DType: in.DType(), N: total(out), Root: -1})
	c.out, c.in, c.result, c.bytes = out, []*tensor.Tensor{in}, result, place.Longest(out)
	c.uneven = slices.ContainsFunc(out, func(t *tensor.Tensor) bool { return t.Len() != in.Len() })
	return b.issue(c)
}

// AllGatherCoalesced gathers the same range of all inputs at a time.
func (b *Backend) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	joined, err := b.args.AllGatherCoalesced(out, in)
	return b.allGatherCoalesced(ctx, o, joined, in, nil, err)
}

// AllGatherIntoTensorCoalesced gathers the same range of all inputs at a time.
func (b *Backend) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	joined, err := b.args.AllGatherIntoTensorCoalesced(out, in)
	return b.allGatherCoalesced(ctx, o, joined, in, out, err)
}

// allGatherCoalesced gathers rank r's input i to out[r*len(in)+i], unless the call is wrong.
func (b *Backend) allGatherCoalesced(ctx context.Context, o backend.AllGatherOptions, out, in, result []*tensor.Tensor, wrong error) (*work.Work, error) {
	if wrong != nil {
		return nil, wrong
	}
	c := b.newCall(ctx, work.AllGatherCoalesced, o.Timeout, board.Call{DType: in[0].DType(), N: total(out), Root: -1})
	c.out, c.in, c.result, c.parts, c.bytes = out, in, result, len(in), place.Bytes(in)
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
	return b.reduceScatter(ctx, work.ReduceScatter, o, []*tensor.Tensor{out}, in, b.args.ReduceScatter(out, in))
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
	return b.reduceScatter(ctx, op, o, out, joined, nil)
}

// reduceScatter combines in[i*size+r] of all ranks into rank r's out[i], unless the call is wrong.
func (b *Backend) reduceScatter(ctx context.Context, op work.OpType, o backend.ReduceScatterOptions, out, in []*tensor.Tensor, wrong error) (*work.Work, error) {
	if wrong != nil {
		return nil, wrong
	}
	c, err := b.newReduction(ctx, op, o.Timeout, o.Op, out[0].DType(), total(in))
	if err != nil {
		return nil, err
	}
	c.out, c.in, c.parts, c.bytes = out, in, len(out), place.Bytes(out)
	if len(out) == 1 && slices.ContainsFunc(in, func(t *tensor.Tensor) bool { return t.Len() != out[0].Len() }) {
		c.uneven, c.bytes = true, place.Longest(in)
	}
	return b.issue(c)
}

// AllToAll sends in[j] to rank j. A rank knows its own messages only, so through the hosts it goes
// in one piece.
func (b *Backend) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	return b.allToAll(ctx, work.AllToAll, o, out, in, nil, b.args.AllToAll(out, in))
}

// AllToAllSingle sends part j of in to rank j, as AllToAll does.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	outs, ins, err := b.args.AllToAllParts(out, in, outSplits, inSplits)
	return b.allToAll(ctx, work.AllToAllSingle, o, outs, ins, []*tensor.Tensor{out}, err)
}

func (b *Backend) allToAll(ctx context.Context, op work.OpType, o backend.AllToAllOptions, out, in, result []*tensor.Tensor, wrong error) (*work.Work, error) {
	if wrong != nil {
		return nil, wrong
	}
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
