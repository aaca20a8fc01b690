package gloo

import (
	"context"
	"iter"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/allreduce"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Broadcast sends the root's tensor down a binomial tree.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	const op = work.Broadcast
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if len(ts) == 0 {
		return nil, bad(op, "invalid root tensor: %d (requires non-empty tensor list)", o.RootTensor)
	}
	if o.RootTensor < 0 || o.RootTensor >= len(ts) {
		return nil, bad(op, "invalid root tensor: %d (there are %d)", o.RootTensor, len(ts))
	}
	if err := dense(op, "tensor 0", ts[0]); err != nil {
		return nil, err
	}
	if err := like(op, "tensors", ts[0], ts); err != nil {
		return nil, err
	}
	if err := b.overlap(op, ts, nil); err != nil {
		return nil, err
	}
	t := ts[0]
	if b.rank == o.Root {
		t = ts[o.RootTensor]
	}
	q := b.spare()
	q.run, q.result = runBroadcast, append(q.room[:0], ts...)
	q.args.t, q.args.root = t, o.Root
	if b.rank == o.Root {
		q.early = gives
	}
	q.print = fingerprint{op: op, dtype: t.DType(), root: o.Root, elements: t.Len(), sized: true}.call()
	return b.issue(ctx, op, o.Timeout, prefixBroadcast, 1, t.ByteLen(), q)
}

func runBroadcast(e *engine) error {
	c, route := &e.op.args, e.session.route
	err := e.inPlace(c.t, e.session.rank == c.root, func(buf []byte) error { return route.broadcast(e, buf, c.root) })
	for _, other := range e.op.result {
		if err == nil && other != c.t {
			err = other.CopyFrom(c.t)
		}
	}
	return err
}

// AllReduce runs the all-reduce work for the tensors' device type and layout.
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
	if err := b.overlap(op, ts, nil); err != nil {
		return nil, err
	}
	q := b.spare()
	ts = append(q.room[:0], ts...)
	call := &q.reduce
	call.host = host{session: b.session, op: q}
	call.Call = allreduce.Call{Tensors: ts, Op: o.Op, Collectives: &call.host}
	if err := q.chooseAllReduce(); err != nil {
		return nil, bad(op, "%v", err)
	}
	q.result = ts
	bytes := largeBytes + 1 // of a sparse tensor, nobody knows
	called := fingerprint{op: op, sparse: true, root: -1}
	if ts[0].Layout() == tensor.Strided {
		bytes = ts[0].ByteLen()
		called = fingerprint{op: op, with: &o.Op, dtype: ts[0].DType(), root: -1, elements: ts[0].Len(), sized: true}
	}
	q.print = called.call()
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, 1, bytes, q)
}

// AllReduceCoalesced joins the tensors and all-reduces them as one.
func (b *Backend) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduceCoalesced
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if err := dense(op, "tensor 0", ts[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "tensors", ts[0].DType(), ts); err != nil {
		return nil, err
	}
	if err := b.overlap(op, ts, nil); err != nil {
		return nil, err
	}
	red, err := b.reduction(op, o.Op, ts[0].DType())
	if err != nil {
		return nil, err
	}
	ts = slices.Clone(ts)
	bytes := total(ts)
	run := func(e *engine) error {
		buf := grow(&e.packed, bytes)
		if err := pack(buf, ts); err != nil {
			return err
		}
		if err := e.reduceInto(buf, red); err != nil {
			return err
		}
		return unpack(ts, buf)
	}
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, 1, bytes, &operation{
		run: run, result: ts, needsAll: bytes > 0,
		print: fingerprint{op: op, with: &o.Op, dtype: ts[0].DType(), root: -1, elements: bytes / ts[0].DType().Size(), sized: true}.call(),
	})
}

// reduceInto all-reduces packed elements in place.
func (e *engine) reduceInto(buf []byte, red backend.Reduction) error {
	before(red, buf)
	if err := e.session.route.allReduce(e, buf, red); err != nil {
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
	if err := dense(op, "tensor", t); err != nil {
		return nil, err
	}
	if err := b.overlap(op, single(t), nil); err != nil {
		return nil, err
	}
	red, err := b.reduction(op, o.Op, t.DType())
	if err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.needsAll = runReduce, b.rank == o.Root && t.Len() > 0
	q.args.t, q.args.root, q.args.red, q.early = t, o.Root, red, gives
	q.print = fingerprint{op: op, with: &o.Op, dtype: t.DType(), root: o.Root, elements: t.Len(), sized: true}.call()
	if b.rank == o.Root {
		q.result, q.early = append(q.room[:0], t), later
	}
	return b.issue(ctx, op, o.Timeout, prefixReduce, 1, t.ByteLen(), q)
}

func runReduce(e *engine) error {
	c, route := &e.op.args, e.session.route
	if e.session.rank == c.root {
		return e.inPlace(c.t, false, func(buf []byte) error {
			before(c.red, buf)
			if err := route.reduce(e, buf, c.root, c.red); err != nil {
				return err
			}
			after(c.red, buf)
			return nil
		})
	}
	if c.red.Before == nil && !route.overwrites(c.red) {
		return e.inPlace(c.t, true, func(buf []byte) error { return route.reduce(e, buf, c.root, c.red) })
	}
	buf := grow(&e.packed, c.t.ByteLen())
	if err := c.t.Pack(buf); err != nil {
		return err
	}
	before(c.red, buf)
	return route.reduce(e, buf, c.root, c.red)
}

// AllGather passes the ranks' inputs around a ring.
func (b *Backend) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := like(op, "outputs", in, out); err != nil {
		return nil, err
	}
	if err := b.overlap(op, out, single(in)); err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.result = runAllGather, slices.Clone(out)
	q.args.t, q.args.all = in, q.result
	return b.issueAllGather(ctx, op, o.Timeout, q)
}

// issueAllGather issues an all-gather of args.t into args.all.
func (b *Backend) issueAllGather(ctx context.Context, op work.OpType, timeout time.Duration, q *operation) (*work.Work, error) {
	in := q.args.t
	q.needsAll, q.early = in.Len() > 0, postsAll
	q.print = fingerprint{op: op, dtype: in.DType(), root: -1, elements: in.Len(), sized: true}.call()
	return b.issue(ctx, op, timeout, prefixAllGather, 1, b.size*in.ByteLen(), q)
}

func runAllGather(e *engine) error {
	c, s := &e.op.args, e.session
	if s.lists != nil && len(c.all) == s.size {
		if list := e.list(0, c.all, nil); list != nil {
			return e.inPlace(c.t, true, func(mine []byte) error { return s.lists.allGatherList(e, list, mine) })
		}
	}
	return e.pair(c.all, single(c.t), func(o, i []byte) error { return s.route.allGather(e, o, i) })
}

// gatherAll issues an all-gather of the joined inputs into the joined outputs.
func (b *Backend) gatherAll(ctx context.Context, op work.OpType, timeout time.Duration, out, in, result []*tensor.Tensor) (*work.Work, error) {
	run := func(e *engine) error {
		return e.pair(out, in, func(o, i []byte) error { return b.route.allGather(e, o, i) })
	}
	bytes := b.size * total(in)
	return b.issue(ctx, op, timeout, prefixAllGather, 1, bytes, &operation{
		run: run, result: result, needsAll: bytes > 0,
		print: fingerprint{op: op, dtype: in[0].DType(), root: -1, elements: total(in) / in[0].DType().Size(), sized: true}.call(),
	})
}

// AllGatherV gathers inputs of unequal size: around a ring, through shared memory, or among clusters.
func (b *Backend) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := b.listed(op, "output", len(out)); err != nil {
		return nil, err
	}
	if err := typed(op, "outputs", in.DType(), out); err != nil {
		return nil, err
	}
	if !out[b.rank].SameShape(in) {
		return nil, bad(op, "output %d has shape %v, this rank's input %v", b.rank, out[b.rank].Shape(), in.Shape())
	}
	if err := b.overlap(op, out, single(in)); err != nil {
		return nil, err
	}
	out = slices.Clone(out)
	counts := counted(out)
	run := func(e *engine) error {
		return e.pair(out, single(in), func(o, i []byte) error { return b.route.allGatherV(e, o, i, counts) })
	}
	return b.issue(ctx, op, o.Timeout, prefixAllGather, 1, total(out), &operation{
		run: run, result: out, print: fingerprint{op: op, dtype: in.DType(), root: -1}.blocks(counts).call(),
	})
}

func counted(ts []*tensor.Tensor) []int64 { return lengthsOf(nil, ts) }

// lengthsOf appends the bytes of each tensor to counts.
func lengthsOf(counts []int64, ts []*tensor.Tensor) []int64 {
	for _, t := range ts {
		counts = append(counts, int64(t.ByteLen()))
	}
	return counts
}

// AllGatherIntoTensor passes the inputs around a ring, straight into out.
func (b *Backend) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherIntoTensor
	if err := dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := dense(op, "output", out); err != nil {
		return nil, err
	}
	if err := b.parts(op, out, in); err != nil {
		return nil, err
	}
	if err := b.overlap(op, single(out), single(in)); err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.result = runAllGather, append(q.room[:0], out)
	q.args.t, q.args.all = in, q.result
	return b.issueAllGather(ctx, op, o.Timeout, q)
}

// AllGatherCoalesced joins the inputs and gathers them as one.
func (b *Backend) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGatherCoalesced
	if len(in) == 0 {
		return nil, bad(op, "requires non-empty input tensor list")
	}
	if err := dense(op, "input 0", in[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", in[0].DType(), in); err != nil {
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
		if err := typed(op, "outputs", in[0].DType(), list); err != nil {
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
	if err := dense(op, "input 0", in[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", in[0].DType(), in); err != nil {
		return nil, err
	}
	if err := typed(op, "outputs", in[0].DType(), out); err != nil {
		return nil, err
	}
	for i := range in {
		if err := b.parts(op, out[i], in[i]); err != nil {
			return nil, err
		}
	}
	if err := b.overlap(op, out, in); err != nil {
		return nil, err
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
	if err := dense(op, "input", in); err != nil {
		return nil, err
	}
	if b.rank == o.Root {
		if err := b.listed(op, "output", len(out)); err != nil {
			return nil, err
		}
		check := typed(op, "outputs", in.DType(), out)
		if even {
			check = like(op, "outputs", in, out)
		}
		if check != nil {
			return nil, check
		}
		if !out[b.rank].SameShape(in) {
			return nil, bad(op, "output %d has shape %v, this rank's input %v", b.rank, out[b.rank].Shape(), in.Shape())
		}
	} else if len(out) != 0 {
		return nil, bad(op, "requires empty output on non-root (rank %d, root %d)", b.rank, o.Root)
	}
	if err := b.overlap(op, out, single(in)); err != nil {
		return nil, err
	}
	q := b.spare()
	c := &q.args
	q.run, q.result = runGather, slices.Clone(out)
	c.t, c.all, c.root, c.even = in, q.result, o.Root, even
	if even && b.rank != o.Root {
		q.early = gives
	}
	if c.lengths = lengthsOf(c.lengths[:0], out); len(out) == 0 {
		c.lengths = slices.Grow(c.lengths, b.size)[:b.size]
		clear(c.lengths)
		c.lengths[b.rank] = int64(in.ByteLen())
	}
	call := fingerprint{op: op, dtype: in.DType(), root: o.Root}
	if even {
		call.elements, call.sized = in.Len(), true
	}
	q.print, q.needsAll = call.call(), even && b.rank == o.Root && in.Len() > 0
	return b.issue(ctx, op, o.Timeout, prefixGather, 1, b.size*in.ByteLen(), q)
}

func runGather(e *engine) error {
	c, s := &e.op.args, e.session
	if s.lists != nil && c.even {
		if list := e.list(0, c.all, nil); s.rank != c.root || list != nil {
			return e.inPlace(c.t, true, func(mine []byte) error { return s.lists.gatherList(e, list, mine, c.root) })
		}
	}
	return e.pair(c.all, single(c.t), func(all, mine []byte) error { return s.route.gather(e, all, mine, c.root, c.lengths, c.even) })
}

// Scatter sends the root's inputs straight to their ranks.
func (b *Backend) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	const op = work.Scatter
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if err := dense(op, "output", out); err != nil {
		return nil, err
	}
	if b.rank == o.Root {
		if err := b.listed(op, "input", len(in)); err != nil {
			return nil, err
		}
		if err := like(op, "inputs", out, in); err != nil {
			return nil, err
		}
	} else if len(in) != 0 {
		return nil, bad(op, "requires empty input on non-root (rank %d, root %d)", b.rank, o.Root)
	}
	if err := b.overlap(op, single(out), in); err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.result = runScatter, append(q.room[:0], out)
	q.args.t, q.args.all, q.args.root = out, append(q.args.room[:0], in...), o.Root
	if b.rank == o.Root {
		q.early = gives
	}
	q.print = fingerprint{op: op, dtype: out.DType(), root: o.Root, elements: out.Len(), sized: true}.call()
	return b.issue(ctx, op, o.Timeout, prefixScatter, 1, b.size*out.ByteLen(), q)
}

func runScatter(e *engine) error {
	c, s := &e.op.args, e.session
	if s.lists != nil {
		if list := e.list(0, c.all, nil); s.rank != c.root || list != nil {
			return e.inPlace(c.t, false, func(mine []byte) error { return s.lists.scatterList(e, mine, list, c.root) })
		}
	}
	return e.pair(single(c.t), c.all, func(mine, all []byte) error { return s.route.scatter(e, mine, all, c.root) })
}

// ReduceScatter combines input i of all ranks into rank i's output.
func (b *Backend) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	const op = work.ReduceScatter
	if err := dense(op, "output", out); err != nil {
		return nil, err
	}
	if err := b.listed(op, "input", len(in)); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", out.DType(), in); err != nil {
		return nil, err
	}
	if !in[b.rank].SameShape(out) {
		return nil, bad(op, "input %d has shape %v, this rank's output %v", b.rank, in[b.rank].Shape(), out.Shape())
	}
	if err := b.overlap(op, single(out), in); err != nil {
		return nil, err
	}
	in = slices.Clone(in)
	counts := counted(in)
	return b.reduceScatter(ctx, op, o, b.size, total(in), counts, single(out), func(e *engine, red backend.Reduction) error {
		return e.reduceScatter(single(out), in, counts, red)
	})
}

// reduceScatter combines the joined inputs. Rank i gets counts[i] bytes, which follow those of the
// ranks before it.
func (e *engine) reduceScatter(out, in []*tensor.Tensor, counts []int64, red backend.Reduction) error {
	run := func(mine, all []byte) error {
		if err := e.session.route.reduceScatter(e, mine, all, counts, len(in), red); err != nil {
			return err
		}
		after(red, mine)
		return nil
	}
	if red.Before == nil {
		return e.pair(out, in, run)
	}
	changed := make([]byte, total(in))
	if err := pack(changed, in); err != nil {
		return err
	}
	red.Before(changed)
	return e.pair(out, nil, func(mine, _ []byte) error { return run(mine, changed) })
}

// reduceScatter issues an operation that uses so many tags and bytes. counts are the lengths of
// the blocks, nil if there are several tensors with blocks.
func (b *Backend) reduceScatter(ctx context.Context, op work.OpType, o backend.ReduceScatterOptions, tags, bytes int, counts []int64, out []*tensor.Tensor, run func(*engine, backend.Reduction) error) (*work.Work, error) {
	red, err := b.reduction(op, o.Op, out[0].DType())
	if err != nil {
		return nil, err
	}
	print := fingerprint{op: op, with: &o.Op, dtype: out[0].DType(), root: -1}
	if counts != nil {
		print = print.blocks(counts)
	} else {
		print = print.parted(counted(out), b.size)
	}
	q := &operation{result: out, print: print.call(), needsAll: counts != nil && even(counts) && counts[0] > 0}
	q.run = func(e *engine) error { return run(e, red) }
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, tags, bytes, q)
}

// ReduceScatterTensor combines part i of all ranks' inputs into rank i's output.
func (b *Backend) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensor, single(out), single(in), o)
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
		if err := dense(op, "input", in[i]); err != nil {
			return nil, err
		}
		if err := dense(op, "output", out[i]); err != nil {
			return nil, err
		}
		if err := b.parts(op, in[i], out[i]); err != nil {
			return nil, err
		}
		if in[i].DType() != in[0].DType() {
			return nil, bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, in[0].DType(), in[i].DType())
		}
	}
	if err := b.overlap(op, out, in); err != nil {
		return nil, err
	}
	if len(in) == 1 {
		return b.reduceScatterOne(ctx, op, out[0], in[0], o)
	}
	in, out = slices.Clone(in), slices.Clone(out)
	return b.reduceScatter(ctx, op, o, len(in), total(in), nil, out, func(e *engine, red backend.Reduction) error {
		for i := range in {
			counts := slices.Repeat([]int64{int64(out[i].ByteLen())}, b.size)
			if err := e.reduceScatter(single(out[i]), single(in[i]), counts, red); err != nil {
				return err
			}
		}
		return nil
	})
}

// reduceScatterOne issues the operation for one pair of tensors.
func (b *Backend) reduceScatterOne(ctx context.Context, op work.OpType, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	red, err := b.reduction(op, o.Op, out.DType())
	if err != nil {
		return nil, err
	}
	q := b.spare()
	c := &q.args
	q.run, q.result, q.needsAll = runReduceScatter, append(q.room[:0], out), out.Len() > 0
	c.t, c.all, c.red, c.lengths = out, append(c.room[:0], in), red, c.lengths[:0]
	for range b.size {
		c.lengths = append(c.lengths, int64(out.ByteLen()))
	}
	q.print = fingerprint{op: op, with: &o.Op, dtype: out.DType(), root: -1, elements: out.Len(), sized: true}.call()
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, 1, in.ByteLen(), q)
}

func runReduceScatter(e *engine) error {
	c := &e.op.args
	return e.reduceScatter(single(c.t), c.all, c.lengths, c.red)
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
	if err := dense(op, "input 0", in[0]); err != nil {
		return nil, err
	}
	if err := typed(op, "inputs", in[0].DType(), in); err != nil {
		return nil, err
	}
	if err := typed(op, "outputs", in[0].DType(), out); err != nil {
		return nil, err
	}
	if !in[b.rank].SameShape(out[b.rank]) {
		return nil, bad(op, "input %d has shape %v, output %d %v", b.rank, in[b.rank].Shape(), b.rank, out[b.rank].Shape())
	}
	if err := b.overlap(op, out, in); err != nil {
		return nil, err
	}
	out, in = slices.Clone(out), slices.Clone(in)
	return b.allToAll(ctx, op, o.Timeout, out, in, counted(out), counted(in))
}

func (b *Backend) allToAll(ctx context.Context, op work.OpType, timeout time.Duration, out, in []*tensor.Tensor, recv, send []int64) (*work.Work, error) {
	run := func(e *engine) error {
		if b.lists != nil {
			if to, from := e.list(0, out, recv), e.list(1, in, send); to != nil && from != nil {
				return b.lists.allToAllList(e, to, from)
			}
		}
		return e.pair(out, in, func(o, i []byte) error { return b.route.allToAll(e, o, i, recv, send) })
	}
	q := b.spare()
	q.run, q.result = run, out
	q.print = fingerprint{op: op, dtype: in[0].DType(), root: -1}.call()
	return b.issue(ctx, op, timeout, prefixAllToAll, 1, total(out)+total(in), q)
}

// AllToAllSingle sends part j of in straight to rank j.
func (b *Backend) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	const op = work.AllToAllSingle
	if err := dense(op, "input", in); err != nil {
		return nil, err
	}
	if err := dense(op, "output", out); err != nil {
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
	if err := b.overlap(op, single(out), single(in)); err != nil {
		return nil, err
	}
	return b.allToAll(ctx, op, o.Timeout, single(out), single(in), recv, send)
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
	q := b.spare()
	q.run, q.needsAll, q.afterAll, q.early = runBarrier, true, true, postsNone
	q.print = fingerprint{op: work.Barrier, root: -1}.call()
	return b.issue(ctx, work.Barrier, o.Timeout, prefixBarrier, 1, 0, q)
}

func runBarrier(e *engine) error {
	b, q := e.op.backend, e.op
	if q.alone {
		return b.route.barrier(e)
	}
	for _, earlier := range b.before(q) {
		e.sleep(earlier.Done(), e.mesh.Failed(), anyRank)
		if f := e.mesh.Fault(); f != nil {
			return b.faultError(q.Info(), f)
		}
	}
	return b.route.barrier(e)
}

// before returns the collectives that were issued before o and have not ended.
func (b *Backend) before(o *operation) []*work.Work {
	b.mu.Lock()
	defer b.mu.Unlock()
	var earlier []*operation
	for x := range b.inflight.All() {
		if x.call < o.call {
			earlier = append(earlier, x)
		}
	}
	return works(slices.Values(earlier))
}

// works returns the futures of operations.
func works(all iter.Seq[*operation]) []*work.Work {
	var ws []*work.Work
	for o := range all {
		ws = append(ws, o.Work())
	}
	return ws
}
