package cuda

import (
	"context"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/clusterway"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// longest returns the bytes of the longest tensor.
func longest(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n = max(n, t.ByteLen())
	}
	return n
}

// counts returns the elements of each tensor if they are uneven, else nil.
func counts(ts []*tensor.Tensor, uneven bool) (all []int) {
	if !uneven {
		return nil
	}
	for _, t := range ts {
		all = append(all, t.Len())
	}
	return all
}

// total returns how many elements the tensors have together.
func total(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.Len()
	}
	return n
}

// refused is the error of a call that no work does because of err. If the group has failed, it is
// the group's error.
func (b *Backend) refused(ctx context.Context, op work.OpType, err error) error {
	if b.g.Broken() != nil {
		if _, _, err := b.g.Admit(ctx, op, 0); err != nil {
			return err
		}
	}
	return bad(op, "%v", err)
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
	if err := b.overlap(op, ts, nil); err != nil {
		return nil, err
	}
	print := board.Call{With: board.Reducing(o.Op), DType: ts[0].DType(), N: ts[0].Len(), Root: -1, Sparse: ts[0].Layout() != tensor.Strided}
	a := allReduce{b: b, ctx: ctx, ts: ts, op: o.Op, print: print}
	name, registered, err := a.findWork()
	if err != nil {
		return nil, b.refused(ctx, op, err)
	}
	byKernels := registered == nil && (name == DirectWork || name == RingWork)
	if registered == nil && name == SparseWork {
		return b.allReduceSparse(ctx, ts, o, print)
	}
	if someOnCPU(ts) {
		if err := a.checked(); err != nil {
			return nil, err
		}
		onDevice := byKernels || name == ClustersWork && b.clusters.Why() == nil ||
			name == HostWork && a.way.Name == ways.HostShared
		if b.shadows(onDevice || registered != nil, ts) {
			ts = slices.Clone(ts)
			return b.mix(ctx, op, ts, ts, [][]*tensor.Tensor{ts}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
				return b.AllReduce(ctx, l[0], o)
			})
		}
		if registered != nil {
			return nil, bad(op, "tensors are in CPU memory, this rank has no device, and the registered work %q comes before %q: ask for %[2]q by Options.AllReduce", name, ClustersWork)
		}
	}
	if byKernels {
		c, err := a.byKernels()
		if err != nil {
			return nil, bad(op, "%v", err)
		}
		return b.direct.Issue(ctx, op, o.Timeout, c, print, c.Parts[0].Out...)
	}
	if registered == nil && name == ClustersWork {
		c, err := a.throughClusters()
		if err != nil {
			return nil, bad(op, "%v", err)
		}
		return b.clusters.Issue(ctx, op, o.Timeout, c, slices.Clone(ts)...)
	}
	var q *group.Operation
	if registered != nil {
		q, err = a.collectives().registered(registered)
	} else {
		q, err = a.throughHost()
	}
	if err != nil {
		return nil, bad(op, "%v", err)
	}
	return b.g.Issue(ctx, op, o.Timeout, q, slices.Clone(ts)...)
}

// AllReduceCoalesced all-reduces the same range of all tensors at a time.
func (b *Backend) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduceCoalesced
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if err := b.dense(op, "tensor 0", ts[0]); err != nil {
		return nil, err
	}
	if err := b.typed(op, "tensors", ts[0].DType(), ts); err != nil {
		return nil, err
	}
	if err := b.overlap(op, ts, nil); err != nil {
		return nil, err
	}
	if err := b.reduction(op, o.Op, ts[0].DType()); err != nil {
		return nil, err
	}
	ts = slices.Clone(ts)
	print := board.Call{With: board.Reducing(o.Op), DType: ts[0].DType(), N: total(ts), Root: -1}
	shadowed := func() (*work.Work, error) {
		return b.mix(ctx, op, ts, ts, [][]*tensor.Tensor{ts}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.AllReduceCoalesced(ctx, l[0], o)
		})
	}
	if b.choose(ctx, op, ts[0], bytesOf(ts), direct.Supports(o.Op, ts[0].DType()), print).Kernels() {
		if b.shadows(true, ts) {
			return shadowed()
		}
		c := b.direct.NewCall()
		for i, t := range ts {
			c.Parts = append(c.Parts, directway.Part{
				Out: ts[i : i+1], In: ts[i : i+1], N: t.Len(), Op: o.Op, Form: b.formOf(plan.OpAllReduce, t.ByteLen()),
			})
		}
		c.Parts = b.join(plan.OpAllReduce, c.Parts)
		return b.direct.Issue(ctx, op, o.Timeout, c, print, ts...)
	}
	if c := (&clusterway.Call{Op: plan.OpAllReduce, Reduce: o.Op, Out: ts, Print: print}); b.isBetween(ctx, op, c) {
		if b.shadows(b.clusters.Why() == nil, ts) {
			return shadowed()
		}
		return b.clusters.Issue(ctx, op, o.Timeout, c, ts...)
	}
	if b.shadows(false, ts) {
		return shadowed()
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: group.Legs(group.Both, ts...), Width: len(ts), Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.AllReduceCoalesced(q.Ctx, h, backend.AllReduceOptions{Op: o.Op, Timeout: q.Left()}))
		},
	}, ts...)
}

// Reduce combines t into the root's; the others keep theirs.
func (b *Backend) Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	const op = work.Reduce
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := b.dense(op, "tensor", t); err != nil {
		return nil, err
	}
	if err := b.overlap(op, []*tensor.Tensor{t}, nil); err != nil {
		return nil, err
	}
	if err := b.reduction(op, o.Op, t.DType()); err != nil {
		return nil, err
	}
	l, result := group.From(t), []*tensor.Tensor(nil)
	if b.g.Rank == o.Root {
		l, result = group.Both(t), []*tensor.Tensor{t}
	}
	print := board.Call{With: board.Reducing(o.Op), DType: t.DType(), N: t.Len(), Root: o.Root}
	way := b.choose(ctx, op, t, t.ByteLen(), direct.Supports(o.Op, t.DType()), print)
	c := &clusterway.Call{Op: plan.OpReduce, Root: o.Root, Reduce: o.Op, Out: result, Print: print}
	if b.g.Rank != o.Root {
		c.In = []*tensor.Tensor{t}
	}
	between := !way.Kernels() && b.isBetween(ctx, op, c)
	if one := []*tensor.Tensor{t}; b.shadows(way.Kernels() || between && b.clusters.Why() == nil, one) {
		return b.mix(ctx, op, result, result, [][]*tensor.Tensor{one}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.Reduce(ctx, l[0][0], o)
		})
	}
	if between {
		return b.clusters.Issue(ctx, op, o.Timeout, c, result...)
	}
	if way.Kernels() {
		return b.byKernels(ctx, op, o.Timeout, print, directway.Part{Out: result, In: []*tensor.Tensor{t}, N: t.Len(), Op: o.Op, Root: o.Root, Form: form(way.Way)}, result)
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: []group.Leg{l}, Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.Reduce(q.Ctx, h[0], backend.ReduceOptions{Op: o.Op, Root: o.Root, Timeout: q.Left()}))
		},
	}, result...)
}

// byKernels issues a collective that kernels do.
func (b *Backend) byKernels(ctx context.Context, op work.OpType, timeout time.Duration, print board.Call, p directway.Part, result []*tensor.Tensor) (*work.Work, error) {
	c := b.direct.NewCall()
	p.Out, p.In = slices.Clone(p.Out), slices.Clone(p.In)
	c.Parts = append(c.Parts, p)
	return b.direct.Issue(ctx, op, timeout, c, print, slices.Clone(result)...)
}

// AllGather gathers the ranks' inputs.
func (b *Backend) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := b.dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := b.like(op, "outputs", in, out); err != nil {
		return nil, err
	}
	if err := b.overlap(op, out, []*tensor.Tensor{in}); err != nil {
		return nil, err
	}
	return b.allGather(ctx, op, o, out, in, out)
}

// AllGatherV gathers inputs of unequal size.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := b.dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := b.typed(op, "outputs", in.DType(), out); err != nil {
		return nil, err
	}
	if !out[b.g.Rank].SameShape(in) {
		return nil, bad(op, "output %d has shape %v, this rank's input %v", b.g.Rank, out[b.g.Rank].Shape(), in.Shape())
	}
	if err := b.overlap(op, out, []*tensor.Tensor{in}); err != nil {
		return nil, err
	}
	return b.allGather(ctx, op, o, out, in, out)
}

// AllGatherIntoTensor gathers the ranks' inputs into parts of out.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherIntoTensor
	if err := b.dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := b.dense(op, "output", out); err != nil {
		return nil, err
	}
	parts, err := b.shares(op, out, in)
	if err != nil {
		return nil, err
	}
	if err := b.overlap(op, []*tensor.Tensor{out}, []*tensor.Tensor{in}); err != nil {
		return nil, err
	}
	return b.allGather(ctx, op, o, parts, in, []*tensor.Tensor{out})
}

// allGather takes outputs of all sizes: that is the general case, and those of
// one size are one.
func (b *Backend) allGather(ctx context.Context, op work.OpType, o backend.AllGatherOptions, out []*tensor.Tensor, in *tensor.Tensor, result []*tensor.Tensor) (*work.Work, error) {
	print := board.Call{DType: in.DType(), N: total(out), Root: -1}
	uneven := slices.ContainsFunc(out, func(t *tensor.Tensor) bool { return t.Len() != in.Len() })
	shadowed := func() (*work.Work, error) {
		return b.mix(ctx, op, out, result, [][]*tensor.Tensor{out, {in}}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.allGather(ctx, op, o, l[0], l[1][0], l[0])
		})
	}
	one := []*tensor.Tensor{in}
	if way := b.choose(ctx, op, in, longest(out), nil, print); way.Kernels() {
		if b.shadows(true, out, one) {
			return shadowed()
		}
		c := b.direct.NewCall()
		c.Parts = append(c.Parts, directway.Part{Out: out, In: []*tensor.Tensor{in}, N: in.Len(), Uneven: uneven, Form: form(way.Way)})
		return b.direct.Issue(ctx, op, o.Timeout, c, print, slices.Clone(result)...)
	}
	if c := (&clusterway.Call{Op: plan.OpAllGather, Out: out, In: one, Counts: counts(out, uneven), Print: print}); b.isBetween(ctx, op, c) {
		if b.shadows(b.clusters.Why() == nil, out, one) {
			return shadowed()
		}
		return b.clusters.Issue(ctx, op, o.Timeout, c, slices.Clone(result)...)
	}
	if b.shadows(false, out, one) {
		return shadowed()
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: append(group.Legs(group.To, out...), group.From(in)), Width: b.g.Size, Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.AllGatherV(q.Ctx, h[:b.g.Size], h[b.g.Size], backend.AllGatherOptions{Timeout: q.Left()}))
		},
	}, slices.Clone(result)...)
}

// AllGatherCoalesced gathers the same range of all inputs at a time.
func (b *Backend) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherCoalesced
	if err := b.inputs(op, in); err != nil {
		return nil, err
	}
	if len(out) != b.g.Size {
		return nil, bad(op, "output lists should be equal to world size (%d, got %d)", b.g.Size, len(out))
	}
	var joined []*tensor.Tensor
	for r, list := range out {
		if len(list) != len(in) {
			return nil, bad(op, "invalid output size of list %d: (expected length %d, got %d)", r, len(in), len(list))
		}
		if err := b.typed(op, "outputs", in[0].DType(), list); err != nil {
			return nil, err
		}
		for i, t := range list {
			if !t.SameShape(in[i]) {
				return nil, bad(op, "invalid size of output tensor at index %d of list %d (expected %v, got %v)", i, r, in[i].Shape(), t.Shape())
			}
		}
		joined = append(joined, list...)
	}
	if err := b.overlap(op, joined, in); err != nil {
		return nil, err
	}
	return b.allGatherCoalesced(ctx, o, joined, in, joined)
}

// AllGatherIntoTensorCoalesced gathers the same range of all inputs at a time.
func (b *Backend) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherCoalesced
	if err := b.inputs(op, in); err != nil {
		return nil, err
	}
	if len(out) != len(in) {
		return nil, bad(op, "requires input/output tensor lists to have the same length (%d and %d)", len(in), len(out))
	}
	if err := b.typed(op, "outputs", in[0].DType(), out); err != nil {
		return nil, err
	}
	joined := make([]*tensor.Tensor, b.g.Size*len(in))
	for i := range in {
		parts, err := b.shares(op, out[i], in[i])
		if err != nil {
			return nil, err
		}
		for r, t := range parts {
			joined[r*len(in)+i] = t
		}
	}
	if err := b.overlap(op, out, in); err != nil {
		return nil, err
	}
	return b.allGatherCoalesced(ctx, o, joined, in, out)
}

func (b *Backend) inputs(op work.OpType, in []*tensor.Tensor) error {
	if len(in) == 0 {
		return bad(op, "requires non-empty input tensor list")
	}
	if err := b.dense(op, "input 0", in[0]); err != nil {
		return err
	}
	return b.typed(op, "inputs", in[0].DType(), in)
}

// allGatherCoalesced gathers rank r's input i to out[r*len(in)+i].
func (b *Backend) allGatherCoalesced(ctx context.Context, o backend.AllGatherOptions, out, in, result []*tensor.Tensor) (*work.Work, error) {
	n, print := len(in), board.Call{DType: in[0].DType(), N: total(out), Root: -1}
	way := b.choose(ctx, work.AllGatherCoalesced, in[0], bytesOf(in), nil, print)
	c := &clusterway.Call{Op: plan.OpAllGather, Out: out, In: in, Print: print} // a rank's block has all its inputs
	between := !way.Kernels() && b.isBetween(ctx, work.AllGatherCoalesced, c)
	if b.shadows(way.Kernels() || between && b.clusters.Why() == nil, out, in) {
		return b.mix(ctx, work.AllGatherCoalesced, out, result, [][]*tensor.Tensor{out, in}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.allGatherCoalesced(ctx, o, l[0], l[1], l[0])
		})
	}
	if between {
		return b.clusters.Issue(ctx, work.AllGatherCoalesced, o.Timeout, c, slices.Clone(result)...)
	}
	if way.Kernels() {
		c := b.direct.NewCall()
		for i := range in {
			p := directway.Part{In: in[i : i+1], N: in[i].Len(), Form: b.formOf(plan.OpAllGather, in[i].ByteLen())}
			for r := range b.g.Size {
				p.Out = append(p.Out, out[r*n+i])
			}
			c.Parts = append(c.Parts, p)
		}
		c.Parts = b.join(plan.OpAllGather, c.Parts)
		return b.direct.Issue(ctx, work.AllGatherCoalesced, o.Timeout, c, print, slices.Clone(result)...)
	}
	return b.g.Issue(ctx, work.AllGatherCoalesced, o.Timeout, &group.Operation{
		Legs: append(group.Legs(group.To, out...), group.Legs(group.From, in...)...), Width: b.g.Size * n, Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			lists := make([][]*tensor.Tensor, b.g.Size)
			for r := range lists {
				lists[r] = h[r*n : (r+1)*n]
			}
			return q.Wait(b.g.CPU.AllGatherCoalesced(q.Ctx, lists, h[b.g.Size*n:], backend.AllGatherOptions{Timeout: q.Left()}))
		},
	}, slices.Clone(result)...)
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
	const op = work.Gather
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := b.dense(op, "input", in); err != nil {
		return nil, err
	}
	if b.g.Rank == o.Root {
		if err := b.listed(op, "output", len(out)); err != nil {
			return nil, err
		}
		check := b.typed
		if even {
			check = func(op work.OpType, name string, _ tensor.DType, ts []*tensor.Tensor) error {
				return b.like(op, name, in, ts)
			}
		}
		if err := check(op, "outputs", in.DType(), out); err != nil {
			return nil, err
		}
		if !out[b.g.Rank].SameShape(in) {
			return nil, bad(op, "output %d has shape %v, this rank's input %v", b.g.Rank, out[b.g.Rank].Shape(), in.Shape())
		}
	} else if len(out) != 0 {
		return nil, bad(op, "requires empty output on non-root (rank %d, root %d)", b.g.Rank, o.Root)
	}
	if err := b.overlap(op, out, []*tensor.Tensor{in}); err != nil {
		return nil, err
	}
	c, bytes := board.Call{DType: in.DType(), Root: o.Root}, ways.UnknownBytes
	if even {
		c.N, bytes = b.g.Size*in.Len(), in.ByteLen()
	}
	way := b.choose(ctx, op, in, bytes, nil, c)
	if one := []*tensor.Tensor{in}; b.shadows(way.Kernels(), out, one) {
		return b.mix(ctx, op, out, out, [][]*tensor.Tensor{out, one}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.gather(ctx, l[0], l[1][0], o, even)
		})
	}
	if way.Kernels() {
		p := directway.Part{Out: out, In: []*tensor.Tensor{in}, N: in.Len(), Root: o.Root, Uneven: !even, Form: form(way.Way)}
		return b.byKernels(ctx, op, o.Timeout, c, p, out)
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: append(group.Legs(group.To, out...), group.From(in)), Width: b.g.Size, Whole: !even, Print: c,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			f := b.g.CPU.GatherV
			if even {
				f = b.g.CPU.Gather
			}
			last := len(h) - 1
			return q.Wait(f(q.Ctx, h[:last], h[last], backend.GatherOptions{Root: o.Root, Timeout: q.Left()}))
		},
	}, slices.Clone(out)...)
}

// Scatter sends the root's inputs to their ranks.
func (b *Backend) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	const op = work.Scatter
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := b.dense(op, "output", out); err != nil {
		return nil, err
	}
	if b.g.Rank == o.Root {
		if err := b.listed(op, "input", len(in)); err != nil {
			return nil, err
		}
		if err := b.like(op, "inputs", out, in); err != nil {
			return nil, err
		}
	} else if len(in) != 0 {
		return nil, bad(op, "requires empty input on non-root (rank %d, root %d)", b.g.Rank, o.Root)
	}
	if err := b.overlap(op, []*tensor.Tensor{out}, in); err != nil {
		return nil, err
	}
	print := board.Call{DType: out.DType(), N: b.g.Size * out.Len(), Root: o.Root}
	way := b.choose(ctx, op, out, out.ByteLen(), nil, print)
	if one := []*tensor.Tensor{out}; b.shadows(way.Kernels(), one, in) {
		return b.mix(ctx, op, one, one, [][]*tensor.Tensor{one, in}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.Scatter(ctx, l[0][0], l[1], o)
		})
	}
	if way.Kernels() {
		p := directway.Part{Out: []*tensor.Tensor{out}, In: in, N: out.Len(), Root: o.Root, Form: form(way.Way)}
		return b.byKernels(ctx, op, o.Timeout, print, p, p.Out)
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: append([]group.Leg{group.To(out)}, group.Legs(group.From, in...)...), Width: b.g.Size, Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.Scatter(q.Ctx, h[0], h[1:], backend.ScatterOptions{Root: o.Root, Timeout: q.Left()}))
		},
	}, out)
}

// ReduceScatter combines input i of all ranks into rank i's output.
func (b *Backend) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	const op = work.ReduceScatter
	if err := b.dense(op, "output", out); err != nil {
		return nil, err
	}
	if err := b.listed(op, "input", len(in)); err != nil {
		return nil, err
	}
	if err := b.typed(op, "inputs", out.DType(), in); err != nil {
		return nil, err
	}
	if !in[b.g.Rank].SameShape(out) {
		return nil, bad(op, "input %d has shape %v, this rank's output %v", b.g.Rank, in[b.g.Rank].Shape(), out.Shape())
	}
	if err := b.overlap(op, []*tensor.Tensor{out}, in); err != nil {
		return nil, err
	}
	return b.reduceScatter(ctx, op, o, []*tensor.Tensor{out}, in)
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
	if len(in) == 0 || len(out) != len(in) {
		return nil, bad(op, "requires non-empty input/output tensor lists of the same length (%d and %d)", len(in), len(out))
	}
	var joined []*tensor.Tensor
	for i := range in {
		if err := b.dense(op, "input", in[i]); err != nil {
			return nil, err
		}
		if err := b.dense(op, "output", out[i]); err != nil {
			return nil, err
		}
		if in[i].DType() != in[0].DType() {
			return nil, bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, in[0].DType(), in[i].DType())
		}
		parts, err := b.shares(op, in[i], out[i])
		if err != nil {
			return nil, err
		}
		joined = append(joined, parts...)
	}
	if err := b.overlap(op, out, in); err != nil {
		return nil, err
	}
	return b.reduceScatter(ctx, op, o, out, joined)
}

// reduceScatter combines in[i*size+r] of all ranks into rank r's out[i].
func (b *Backend) reduceScatter(ctx context.Context, op work.OpType, o backend.ReduceScatterOptions, out, in []*tensor.Tensor) (*work.Work, error) {
	if err := b.reduction(op, o.Op, out[0].DType()); err != nil {
		return nil, err
	}
	n, print := len(out), board.Call{With: board.Reducing(o.Op), DType: out[0].DType(), N: total(in), Root: -1}
	even := n > 1 || !slices.ContainsFunc(in, func(t *tensor.Tensor) bool { return t.Len() != out[0].Len() })
	bytes := bytesOf(out)
	if !even {
		bytes = longest(in)
	}
	shadowed := func() (*work.Work, error) {
		return b.mix(ctx, op, out, out, [][]*tensor.Tensor{out, in}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.reduceScatter(ctx, op, o, l[0], l[1])
		})
	}
	if b.choose(ctx, op, out[0], bytes, direct.Supports(o.Op, out[0].DType()), print).Kernels() {
		if b.shadows(true, out, in) {
			return shadowed()
		}
		c := b.direct.NewCall()
		for i, t := range out {
			c.Parts = append(c.Parts, directway.Part{
				Out: out[i : i+1], In: in[i*b.g.Size : (i+1)*b.g.Size], N: t.Len(), Op: o.Op, Uneven: !even, Form: b.formOf(plan.OpReduceScatter, longest(in[i*b.g.Size:(i+1)*b.g.Size])),
			})
		}
		if n > 1 {
			c.Parts = b.join(plan.OpReduceScatter, c.Parts)
		}
		return b.direct.Issue(ctx, op, o.Timeout, c, print, slices.Clone(out)...)
	}
	if b.clusters != nil {
		// A rank's block has what all pairs have for it.
		c := &clusterway.Call{Op: plan.OpReduceScatter, Reduce: o.Op, Out: out, Counts: counts(in, !even), Print: print}
		for r := range b.g.Size {
			for i := range n {
				c.In = append(c.In, in[i*b.g.Size+r])
			}
		}
		if b.isBetween(ctx, op, c) {
			if b.shadows(b.clusters.Why() == nil, out, in) {
				return shadowed()
			}
			return b.clusters.Issue(ctx, op, o.Timeout, c, slices.Clone(out)...)
		}
	}
	if b.shadows(false, out, in) {
		return shadowed()
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: append(group.Legs(group.To, out...), group.Legs(group.From, in...)...), Width: b.g.Size * n, Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			for i := range n {
				in := h[n+i*b.g.Size : n+(i+1)*b.g.Size]
				if err := q.Wait(b.g.CPU.ReduceScatter(q.Ctx, h[i], in, backend.ReduceScatterOptions{Op: o.Op, Timeout: q.Left()})); err != nil {
					return err
				}
			}
			return nil
		},
	}, slices.Clone(out)...)
}

// AllToAll sends in[j] to rank j. A rank knows its own messages only, so through the hosts it goes
// in one piece.
func (b *Backend) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	const op = work.AllToAll
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := b.listed(op, "input", len(in)); err != nil {
		return nil, err
	}
	if err := b.inputs(op, in); err != nil {
		return nil, err
	}
	if err := b.typed(op, "outputs", in[0].DType(), out); err != nil {
		return nil, err
	}
	if !in[b.g.Rank].SameShape(out[b.g.Rank]) {
		return nil, bad(op, "input %d has shape %v, output %d %v", b.g.Rank, in[b.g.Rank].Shape(), b.g.Rank, out[b.g.Rank].Shape())
	}
	if err := b.overlap(op, out, in); err != nil {
		return nil, err
	}
	return b.allToAll(ctx, op, o, out, in, out)
}

// AllToAllSingle sends part j of in to rank j, as AllToAll does.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	const op = work.AllToAllSingle
	if err := b.dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := b.dense(op, "output", out); err != nil {
		return nil, err
	}
	if in.DType() != out.DType() {
		return nil, bad(op, "dtypes differ: input %v, output %v", in.DType(), out.DType())
	}
	send, err := b.splits(op, "input", in, inSplits)
	if err != nil {
		return nil, err
	}
	recv, err := b.splits(op, "output", out, outSplits)
	if err != nil {
		return nil, err
	}
	ins, err := cut(op, in, send)
	if err != nil {
		return nil, err
	}
	outs, err := cut(op, out, recv)
	if err != nil {
		return nil, err
	}
	if n, m := ins[b.g.Rank].ByteLen(), outs[b.g.Rank].ByteLen(); n != m {
		return nil, bad(op, "rank %d sends itself %d bytes but receives %d", b.g.Rank, n, m)
	}
	if err := b.overlap(op, []*tensor.Tensor{out}, []*tensor.Tensor{in}); err != nil {
		return nil, err
	}
	return b.allToAll(ctx, op, o, outs, ins, []*tensor.Tensor{out})
}

func (b *Backend) allToAll(ctx context.Context, op work.OpType, o backend.AllToAllOptions, out, in, result []*tensor.Tensor) (*work.Work, error) {
	print := board.Call{DType: in[0].DType(), Root: -1}
	way := b.choose(ctx, op, in[0], ways.UnknownBytes, nil, print)
	if b.shadows(way.Kernels(), out, in) {
		return b.mix(ctx, op, out, result, [][]*tensor.Tensor{out, in}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.allToAll(ctx, op, o, l[0], l[1], l[0])
		})
	}
	if way.Kernels() {
		return b.byKernels(ctx, op, o.Timeout, print, directway.Part{Out: out, In: in, Form: form(way.Way)}, result)
	}
	return b.g.Issue(ctx, op, o.Timeout, &group.Operation{
		Legs: append(group.Legs(group.To, out...), group.Legs(group.From, in...)...), Whole: true, Print: print,
		Call: func(q *group.Operation, h []*tensor.Tensor) error {
			return q.Wait(b.g.CPU.AllToAll(q.Ctx, h[:b.g.Size], h[b.g.Size:], backend.AllToAllOptions{Timeout: q.Left()}))
		},
	}, slices.Clone(result)...)
}

// Barrier waits for this rank's earlier collectives, on the devices too, then
// meets the others. If kernels did all collectives since the last barrier through the hosts, the
// devices meet.
func (b *Backend) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	if b.clusters == nil && b.direct.Mesh() == nil && !b.g.Hosted() {
		return b.byKernels(ctx, work.Barrier, o.Timeout, board.Call{Root: -1}, directway.Part{}, nil)
	}
	q := &group.Operation{Print: board.Call{Root: -1}, Call: func(q *group.Operation, _ []*tensor.Tensor) error {
		return q.Wait(b.g.CPU.Barrier(q.Ctx, backend.BarrierOptions{Timeout: q.Left()}))
	}}
	return b.g.Issue(ctx, work.Barrier, o.Timeout, q)
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
