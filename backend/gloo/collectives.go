package gloo

import (
	"context"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// inPlace gives the bytes of t to f: its own if they lie one after the other,
// else a packed copy that is written back afterwards unless readOnly is set.
func (e *engine) inPlace(t *tensor.Tensor, readOnly bool, f func(buf []byte) error) error {
	if buf := t.Bytes(); buf != nil || t.Len() == 0 {
		return f(buf)
	}
	buf := grow(&e.packed, t.ByteLen())
	if err := t.Pack(buf); err != nil {
		return err
	}
	if err := f(buf); err != nil || readOnly {
		return err
	}
	return t.Unpack(buf)
}

// pair gives the bytes of an output and an input to f, packed where they must be.
func (e *engine) pair(out, in []*tensor.Tensor, f func(out, in []byte) error) error {
	var o, i []byte
	needOut, needIn := !flat(out, &o), !flat(in, &i)
	n, m := 0, 0
	if needOut {
		n = total(out)
	}
	if needIn {
		m = total(in)
	}
	// Both halves aligned for every element type.
	n16 := (n + 15) &^ 15
	buf := grow(&e.packed, n16+m)
	if needOut {
		o = buf[:n]
	}
	if needIn {
		i = buf[n16 : n16+m]
		if err := pack(i, in); err != nil {
			return err
		}
	}
	if err := f(o, i); err != nil || !needOut {
		return err
	}
	return unpack(out, o)
}

// flat sets *b to the bytes of a list that needs no packing and reports whether it is one.
func flat(ts []*tensor.Tensor, b *[]byte) bool {
	if len(ts) == 0 {
		return true
	}
	if len(ts) == 1 && (ts[0].Len() == 0 || ts[0].Bytes() != nil) {
		*b = ts[0].Bytes()
		return true
	}
	return false
}

func one(t *tensor.Tensor) []*tensor.Tensor { return []*tensor.Tensor{t} }

// Broadcast sends the root's tensor down a binomial tree.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	const op = work.Broadcast
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if o.RootTensor < 0 || o.RootTensor >= len(ts) {
		return nil, bad(op, "invalid root tensor: %d (there are %d)", o.RootTensor, len(ts))
	}
	if err := dense(op, "tensor 0", output, ts[0]); err != nil {
		return nil, err
	}
	if err := like(op, "tensors", output, ts[0], ts); err != nil {
		return nil, err
	}
	ts = slices.Clone(ts)
	t := ts[0]
	if b.rank == o.Root {
		t = ts[o.RootTensor]
	}
	n := int64(t.ByteLen())
	p := b.planner.get(planKey{op, o.Root, n, 0}, func() *plan.Plan { return plan.Broadcast(b.rank, b.size, o.Root, n) })
	run := func(e *engine) error {
		err := e.inPlace(t, b.rank == o.Root, func(buf []byte) error { return e.run(p, buf, nil, nil) })
		for _, other := range ts {
			if err == nil && other != t {
				err = other.CopyFrom(t)
			}
		}
		return err
	}
	return b.issue(ctx, op, o.Timeout, prefixBroadcast, 1, &operation{run: run, result: ts})
}

// AllReduce runs the all-reduce work that is registered for the tensors'
// device type and layout.
func (b *Backend) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduce
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	for i, t := range ts {
		switch {
		case t == nil:
			return nil, bad(op, "tensor %d is nil", i)
		case t.Layout() != ts[0].Layout():
			return nil, bad(op, "invalid tensor layout at index %d (expected %v, got %v)", i, ts[0].Layout(), t.Layout())
		case t.DType() != ts[0].DType() || t.Device() != ts[0].Device():
			return nil, bad(op, "invalid tensor type at index %d (expected %v on %v, got %v on %v)", i, ts[0].DType(), ts[0].Device(), t.DType(), t.Device())
		case !t.SameShape(ts[0]):
			return nil, bad(op, "invalid tensor size at index %d (expected %v, got %v)", i, ts[0].Shape(), t.Shape())
		}
	}
	q := &operation{}
	ts = append(q.room[:0], ts...)
	h := &host{backend: b}
	call := &backend.AllReduceCall{Tensors: ts, Op: o.Op, Host: h}
	kind, err := backend.ChooseAllReduce(call)
	if err != nil {
		return nil, bad(op, "%v", err)
	}
	runner, err := kind.New(call)
	if err != nil {
		return nil, bad(op, "%v", err)
	}
	q.result = ts
	q.run = func(e *engine) error {
		h.engine = e
		return runner.Run(e.ctx)
	}
	if s, ok := runner.(backend.StreamRunner); ok {
		q.sync = s.Synchronize
	}
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, 1, q)
}

// AllReduceCoalesced joins the tensors and all-reduces them as one.
func (b *Backend) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduceCoalesced
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if err := dense(op, "tensor 0", output, ts[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "tensors", output, ts[0].DType(), ts); err != nil {
		return nil, err
	}
	red, err := b.reduction(op, o.Op, ts[0].DType())
	if err != nil {
		return nil, err
	}
	ts = slices.Clone(ts)
	p := b.allReducePlan(int64(total(ts)), red)
	run := func(e *engine) error {
		buf := grow(&e.packed, total(ts))
		if err := pack(buf, ts); err != nil {
			return err
		}
		if err := e.reduceInto(p, buf, red); err != nil {
			return err
		}
		return unpack(ts, buf)
	}
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, 1, &operation{run: run, result: ts})
}

func (b *Backend) allReducePlan(n int64, red backend.Reduction) *plan.Plan {
	es := int64(red.Grain)
	return b.planner.get(planKey{work.AllReduce, 0, n, es}, func() *plan.Plan { return plan.AllReduceRing(b.rank, b.size, n, es) })
}

// reduceInto all-reduces packed elements in place.
func (e *engine) reduceInto(p *plan.Plan, buf []byte, red backend.Reduction) error {
	before(red, buf)
	if err := e.run(p, buf, nil, red.Combine); err != nil {
		return err
	}
	after(red, buf)
	return nil
}

// Reduce combines t into the root's. Ranks other than the root keep their t,
// which Gloo overwrites with partial sums.
func (b *Backend) Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	const op = work.Reduce
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := dense(op, "tensor", output, t); err != nil {
		return nil, err
	}
	red, err := b.reduction(op, o.Op, t.DType())
	if err != nil {
		return nil, err
	}
	n, es := int64(t.ByteLen()), int64(red.Grain)
	p := b.planner.get(planKey{op, o.Root, n, es}, func() *plan.Plan { return plan.ReduceRing(b.rank, b.size, o.Root, n, es) })
	reduce := func(e *engine, buf []byte) error {
		before(red, buf)
		return e.run(p, buf, nil, red.Combine)
	}
	run := func(e *engine) error {
		if b.rank != o.Root {
			buf := grow(&e.packed, int(n))
			if err := t.Pack(buf); err != nil {
				return err
			}
			return reduce(e, buf)
		}
		return e.inPlace(t, false, func(buf []byte) error {
			if err := reduce(e, buf); err != nil {
				return err
			}
			after(red, buf)
			return nil
		})
	}
	q := &operation{run: run}
	if b.rank == o.Root {
		q.result = one(t)
	}
	return b.issue(ctx, op, o.Timeout, prefixReduce, 1, q)
}

// AllGather passes the ranks' inputs around a ring.
func (b *Backend) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := dense(op, "input", input, in); err != nil {
		return nil, err
	}
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := like(op, "outputs", output, in, out); err != nil {
		return nil, err
	}
	out = slices.Clone(out)
	return b.gatherAll(ctx, op, o.Timeout, out, one(in), out)
}

// gatherAll issues an all-gather of the joined inputs into the joined outputs.
func (b *Backend) gatherAll(ctx context.Context, op work.OpType, timeout time.Duration, out, in, result []*tensor.Tensor) (*work.Work, error) {
	n := int64(total(in))
	p := b.planner.get(planKey{work.AllGather, 0, n, 0}, func() *plan.Plan { return plan.AllGather(b.rank, b.size, n) })
	run := func(e *engine) error {
		return e.pair(out, in, func(o, i []byte) error { return e.run(p, o, i, nil) })
	}
	return b.issue(ctx, op, timeout, prefixAllGather, 1, &operation{run: run, result: result})
}

// AllGatherV passes inputs of unequal size around a ring.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := dense(op, "input", input, in); err != nil {
		return nil, err
	}
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := typed(op, "outputs", output, in.DType(), out); err != nil {
		return nil, err
	}
	if !out[b.rank].SameShape(in) {
		return nil, bad(op, "output %d has shape %v, this rank's input %v", b.rank, out[b.rank].Shape(), in.Shape())
	}
	out = slices.Clone(out)
	counts := counted(out)
	run := func(e *engine) error {
		return e.pair(out, one(in), func(o, i []byte) error { return e.run(plan.AllGatherV(b.rank, counts), o, i, nil) })
	}
	return b.issue(ctx, op, o.Timeout, prefixAllGather, 1, &operation{run: run, result: out})
}

func counted(ts []*tensor.Tensor) []int64 {
	counts := make([]int64, len(ts))
	for i, t := range ts {
		counts[i] = int64(t.ByteLen())
	}
	return counts
}

// AllGatherIntoTensor passes the inputs around a ring, straight into out.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherIntoTensor
	if err := dense(op, "input", input, in); err != nil {
		return nil, err
	}
	if err := dense(op, "output", output, out); err != nil {
		return nil, err
	}
	if err := b.parts(op, out, in, true); err != nil {
		return nil, err
	}
	return b.gatherAll(ctx, op, o.Timeout, one(out), one(in), one(out))
}

// AllGatherCoalesced joins the inputs and gathers them as one.
func (b *Backend) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherCoalesced
	if len(in) == 0 {
		return nil, bad(op, "requires non-empty input tensor list")
	}
	if err := dense(op, "input 0", input, in[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", input, in[0].DType(), in); err != nil {
		return nil, err
	}
	if len(out) != b.size {
		return nil, bad(op, "output lists should be equal to world size (%d, got %d)", b.size, len(out))
	}
	joined := make([]*tensor.Tensor, 0, b.size*len(in))
	for r, list := range out {
		if len(list) != len(in) {
			return nil, bad(op, "invalid output size of list %d: (expected length %d, got %d)", r, len(in), len(list))
		}
		if err := typed(op, "outputs", output, in[0].DType(), list); err != nil {
			return nil, err
		}
		for i, t := range list {
			if !t.SameShape(in[i]) {
				return nil, bad(op, "invalid size of output tensor at index %d of list %d (expected %v, got %v)", i, r, in[i].Shape(), t.Shape())
			}
		}
		joined = append(joined, list...)
	}
	return b.gatherAll(ctx, op, o.Timeout, joined, slices.Clone(in), joined)
}

// AllGatherIntoTensorCoalesced joins the inputs and gathers them as one.
func (b *Backend) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherCoalesced
	if len(in) == 0 {
		return nil, bad(op, "requires non-empty input tensor list")
	}
	if len(out) != len(in) {
		return nil, bad(op, "requires input/output tensor lists to have the same length (%d and %d)", len(in), len(out))
	}
	if err := dense(op, "input 0", input, in[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", input, in[0].DType(), in); err != nil {
		return nil, err
	}
	if err := typed(op, "outputs", output, in[0].DType(), out); err != nil {
		return nil, err
	}
	for i := range in {
		if err := b.parts(op, out[i], in[i], true); err != nil {
			return nil, err
		}
	}
	// On the wire rank r's inputs lie together; in the outputs, input i of all ranks.
	joined := make([]*tensor.Tensor, 0, b.size*len(in))
	for r := range b.size {
		for i := range in {
			part := out[i].Dim(0) / b.size
			t, err := out[i].Slice(0, r*part, (r+1)*part)
			if err != nil {
				return nil, bad(op, "output %d: %v", i, err)
			}
			joined = append(joined, t)
		}
	}
	return b.gatherAll(ctx, op, o.Timeout, joined, slices.Clone(in), slices.Clone(out))
}

// Gather sends each rank's input straight to the root.
func (b *Backend) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, true)
}

// GatherV is Gather with inputs of unequal size.
func (b *Backend) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, false)
}

func (b *Backend) gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions, even bool) (*work.Work, error) {
	const op = work.Gather
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := dense(op, "input", input, in); err != nil {
		return nil, err
	}
	counts := make([]int64, b.size)
	counts[b.rank] = int64(in.ByteLen())
	if b.rank == o.Root {
		if err := b.listed(op, "output", len(out)); err != nil {
			return nil, err
		}
		check := typed(op, "outputs", output, in.DType(), out)
		if even {
			check = like(op, "outputs", output, in, out)
		}
		if check != nil {
			return nil, check
		}
		if !out[b.rank].SameShape(in) {
			return nil, bad(op, "output %d has shape %v, this rank's input %v", b.rank, out[b.rank].Shape(), in.Shape())
		}
		counts = counted(out)
	} else if len(out) != 0 {
		return nil, bad(op, "requires empty output on non-root (rank %d, root %d)", b.rank, o.Root)
	}
	out = slices.Clone(out)
	p := plan.GatherV(b.rank, o.Root, counts)
	run := func(e *engine) error {
		return e.pair(out, one(in), func(o, i []byte) error { return e.run(p, o, i, nil) })
	}
	return b.issue(ctx, op, o.Timeout, prefixGather, 1, &operation{run: run, result: out})
}

// Scatter sends the root's inputs straight to their ranks.
func (b *Backend) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	const op = work.Scatter
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := dense(op, "output", output, out); err != nil {
		return nil, err
	}
	if b.rank == o.Root {
		if err := b.listed(op, "input", len(in)); err != nil {
			return nil, err
		}
		if err := like(op, "inputs", input, out, in); err != nil {
			return nil, err
		}
	} else if len(in) != 0 {
		return nil, bad(op, "requires empty input on non-root (rank %d, root %d)", b.rank, o.Root)
	}
	in = slices.Clone(in)
	n := int64(out.ByteLen())
	p := b.planner.get(planKey{op, o.Root, n, 0}, func() *plan.Plan { return plan.Scatter(b.rank, b.size, o.Root, n) })
	run := func(e *engine) error {
		return e.pair(one(out), in, func(o, i []byte) error { return e.run(p, o, i, nil) })
	}
	return b.issue(ctx, op, o.Timeout, prefixScatter, 1, &operation{run: run, result: one(out)})
}

// ReduceScatter all-reduces every input and keeps this rank's, as PyTorch does over Gloo.
func (b *Backend) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	const op = work.ReduceScatter
	if err := dense(op, "output", output, out); err != nil {
		return nil, err
	}
	if err := b.listed(op, "input", len(in)); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", input, out.DType(), in); err != nil {
		return nil, err
	}
	if !in[b.rank].SameShape(out) {
		return nil, bad(op, "input %d has shape %v, this rank's output %v", b.rank, in[b.rank].Shape(), out.Shape())
	}
	in = slices.Clone(in)
	return b.reduceScatter(ctx, op, o, b.size, func(e *engine, red backend.Reduction, tag uint32) error {
		for i, t := range in {
			e.useTag(tag + uint32(i))
			buf := grow(&e.packed, t.ByteLen())
			if err := t.Pack(buf); err != nil {
				return err
			}
			if err := e.reduceInto(b.allReducePlan(int64(len(buf)), red), buf, red); err != nil {
				return err
			}
			if i == b.rank {
				if err := out.Unpack(buf); err != nil {
					return err
				}
			}
		}
		return nil
	}, one(out))
}

// reduceScatter issues an operation that uses one tag for each of its all-reduces.
func (b *Backend) reduceScatter(ctx context.Context, op work.OpType, o backend.ReduceScatterOptions, tags int, run func(*engine, backend.Reduction, uint32) error, out []*tensor.Tensor) (*work.Work, error) {
	red, err := b.reduction(op, o.Op, out[0].DType())
	if err != nil {
		return nil, err
	}
	q := &operation{result: out}
	q.run = func(e *engine) error { return run(e, red, q.tag) }
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, tags, q)
}

// ReduceScatterTensor all-reduces the input and keeps this rank's part, as PyTorch does over Gloo.
func (b *Backend) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensor, one(out), one(in), o)
}

// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair.
func (b *Backend) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensorCoalesced, out, in, o)
}

func (b *Backend) reduceScatterTensors(ctx context.Context, op work.OpType, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	if len(in) == 0 || len(out) != len(in) {
		return nil, bad(op, "requires non-empty input/output tensor lists of the same length (%d and %d)", len(in), len(out))
	}
	for i := range in {
		if err := dense(op, "input", input, in[i]); err != nil {
			return nil, err
		}
		if err := dense(op, "output", output, out[i]); err != nil {
			return nil, err
		}
		if err := b.parts(op, in[i], out[i], false); err != nil {
			return nil, err
		}
		if in[i].DType() != in[0].DType() {
			return nil, bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, in[0].DType(), in[i].DType())
		}
	}
	in, out = slices.Clone(in), slices.Clone(out)
	return b.reduceScatter(ctx, op, o, len(in), func(e *engine, red backend.Reduction, tag uint32) error {
		for i, t := range in {
			e.useTag(tag + uint32(i))
			buf := grow(&e.packed, t.ByteLen())
			if err := t.Pack(buf); err != nil {
				return err
			}
			if err := e.reduceInto(b.allReducePlan(int64(len(buf)), red), buf, red); err != nil {
				return err
			}
			n := out[i].ByteLen()
			if err := out[i].Unpack(buf[b.rank*n : (b.rank+1)*n]); err != nil {
				return err
			}
		}
		return nil
	}, out)
}

// AllToAll sends in[j] straight to rank j.
func (b *Backend) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	const op = work.AllToAll
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := b.listed(op, "input", len(in)); err != nil {
		return nil, err
	}
	if err := dense(op, "input 0", input, in[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", input, in[0].DType(), in); err != nil {
		return nil, err
	}
	if err := typed(op, "outputs", output, in[0].DType(), out); err != nil {
		return nil, err
	}
	if !in[b.rank].SameShape(out[b.rank]) {
		return nil, bad(op, "input %d has shape %v, output %d %v", b.rank, in[b.rank].Shape(), b.rank, out[b.rank].Shape())
	}
	out, in = slices.Clone(out), slices.Clone(in)
	return b.allToAll(ctx, op, o.Timeout, out, in, counted(out), counted(in))
}

func (b *Backend) allToAll(ctx context.Context, op work.OpType, timeout time.Duration, out, in []*tensor.Tensor, recv, send []int64) (*work.Work, error) {
	p := plan.AllToAllV(b.rank, send, recv)
	run := func(e *engine) error {
		return e.pair(out, in, func(o, i []byte) error { return e.run(p, o, i, nil) })
	}
	return b.issue(ctx, op, timeout, prefixAllToAll, 1, &operation{run: run, result: out})
}

// AllToAllSingle sends part j of in straight to rank j.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	const op = work.AllToAllSingle
	if err := dense(op, "input", input, in); err != nil {
		return nil, err
	}
	if err := dense(op, "output", output, out); err != nil {
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
	if send[b.rank] != recv[b.rank] {
		return nil, bad(op, "rank %d sends itself %d bytes but receives %d", b.rank, send[b.rank], recv[b.rank])
	}
	return b.allToAll(ctx, op, o.Timeout, one(out), one(in), recv, send)
}

// splits returns the bytes of each rank's part of t.
func (b *Backend) splits(op work.OpType, name string, t *tensor.Tensor, splits []int) ([]int64, error) {
	if t.Dims() == 0 {
		return nil, bad(op, "%s has no dimension 0 to split", name)
	}
	counts := make([]int64, b.size)
	if len(splits) == 0 {
		if t.Dim(0)%b.size != 0 {
			return nil, bad(op, "Tensor's dim 0 does not divide equally across group size: %s has %d for %d ranks", name, t.Dim(0), b.size)
		}
		for i := range counts {
			counts[i] = int64(t.ByteLen() / b.size)
		}
		return counts, nil
	}
	if len(splits) != b.size {
		return nil, bad(op, "Number of tensor splits not equal to group size: %s has %d for %d ranks", name, len(splits), b.size)
	}
	sum, row := 0, 0
	if t.Dim(0) > 0 {
		row = t.ByteLen() / t.Dim(0)
	}
	for i, s := range splits {
		if s < 0 || s > t.Dim(0) {
			return nil, bad(op, "split %d of %s is %d, not within dimension 0 of %d", i, name, s, t.Dim(0))
		}
		sum += s
		counts[i] = int64(s * row)
	}
	if sum != t.Dim(0) {
		return nil, bad(op, "Split sizes doesn't match total dim 0 size: %s has %d, the splits sum to %d", name, t.Dim(0), sum)
	}
	return counts, nil
}

// Barrier waits for this rank's earlier collectives, then meets the others.
func (b *Backend) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	p := b.planner.get(planKey{op: work.Barrier}, func() *plan.Plan { return plan.Barrier(b.rank, b.size) })
	q := &operation{}
	q.run = func(e *engine) error {
		for _, earlier := range b.before(q) {
			select {
			case <-earlier.Work().Done():
			case <-e.ctx.Done():
				b.giveUp(e.mesh, q, -1, canceled(e.ctx))
			case <-e.timer.C:
				b.giveUp(e.mesh, q, -1, tooLate(q))
			}
			if f := e.mesh.Fault(); f != nil {
				return b.faultError(q.Info(), f)
			}
		}
		return e.run(p, nil, nil, nil)
	}
	return b.issue(ctx, work.Barrier, o.Timeout, prefixBarrier, 1, q)
}

// before returns the collectives that were issued before o and have not ended.
func (b *Backend) before(o *operation) []*operation {
	b.mu.Lock()
	defer b.mu.Unlock()
	var earlier []*operation
	for _, x := range b.inflight {
		if x.call < o.call {
			earlier = append(earlier, x)
		}
	}
	return earlier
}
