package run

import (
	"context"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/argcheck"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Broadcast sends the root's tensor down a binomial tree.
func (b *Group) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	const op = work.Broadcast
	if err := b.args.Broadcast(ts, o); err != nil {
		return nil, err
	}
	t := ts[0]
	if b.rank == o.Root {
		t = ts[o.RootTensor]
	}
	q := b.spare()
	q.run, q.result = runBroadcast, append(q.future.room[:0], ts...)
	q.args.t, q.args.root = t, o.Root
	if b.rank == o.Root {
		q.early = gives
	}
	q.print = fingerprint{op: op, dtype: t.DType(), root: o.Root, elements: t.Len(), sized: true}.call()
	return b.issue(ctx, op, o.Timeout, prefixBroadcast, 1, t.ByteLen(), q)
}

func runBroadcast(e *engine) error {
	c, route := &e.op.args, e.route
	err := e.inPlace(c.t, e.session.rank == c.root, func(buf []byte) error { return route.broadcast(e, buf, c.root) })
	for _, other := range e.op.result {
		if err == nil && other != c.t {
			err = other.CopyFrom(c.t)
		}
	}
	return err
}

// AllReduce runs the all-reduce work for the tensors' device type and layout.
func (b *Group) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduce
	if err := b.args.AllReduce(ts); err != nil {
		return nil, err
	}
	for i, t := range ts {
		if t.Device() != ts[0].Device() {
			return nil, bad(op, "invalid device at index %d (expected %v, got %v)", i, ts[0].Device(), t.Device())
		}
	}
	q := b.spare()
	ts = append(q.future.room[:0], ts...)
	call := &q.reduce
	call.host = host{session: b.session}
	call.tensors, call.op = ts, o.Op
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
func (b *Group) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	const op = work.AllReduceCoalesced
	if err := b.args.AllReduceCoalesced(ts); err != nil {
		return nil, err
	}
	red, err := b.args.Reduction(op, o.Op, ts[0].DType())
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
		before(red, buf)
		if err := e.route.allReduce(e, buf, red); err != nil {
			return err
		}
		after(red, buf)
		return unpack(ts, buf)
	}
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, 1, bytes, &operation{
		run: run, result: ts, needsAll: bytes > 0,
		print: fingerprint{op: op, with: &o.Op, dtype: ts[0].DType(), root: -1, elements: bytes / ts[0].DType().Size(), sized: true}.call(),
	})
}

// Reduce combines t into the root's. Ranks other than the root keep their t,
// which Gloo overwrites with partial sums.
func (b *Group) Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	const op = work.Reduce
	if err := b.args.Reduce(t, o); err != nil {
		return nil, err
	}
	red, err := b.args.Reduction(op, o.Op, t.DType())
	if err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.needsAll = runReduce, b.rank == o.Root && t.Len() > 0
	q.args.t, q.args.root, q.args.red, q.early = t, o.Root, red, gives
	q.print = fingerprint{op: op, with: &o.Op, dtype: t.DType(), root: o.Root, elements: t.Len(), sized: true}.call()
	if b.rank == o.Root {
		q.result, q.early = append(q.future.room[:0], t), later
	}
	return b.issue(ctx, op, o.Timeout, prefixReduce, 1, t.ByteLen(), q)
}

func runReduce(e *engine) error {
	c, route := &e.op.args, e.route
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
func (b *Group) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGather(out, in, true); err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.result = runAllGather, slices.Clone(out)
	q.args.t, q.args.all = in, q.result
	return b.issueAllGather(ctx, work.AllGather, o.Timeout, q)
}

// issueAllGather issues an all-gather of args.t into args.all.
func (b *Group) issueAllGather(ctx context.Context, op work.OpType, timeout time.Duration, q *operation) (*work.Work, error) {
	in := q.args.t
	q.needsAll, q.early = in.Len() > 0, postsAll
	q.print = fingerprint{op: op, dtype: in.DType(), root: -1, elements: in.Len(), sized: true}.call()
	return b.issue(ctx, op, timeout, prefixAllGather, 1, b.size*in.ByteLen(), q)
}

func runAllGather(e *engine) error {
	c, s := &e.op.args, e.session
	if e.byList != nil && len(c.all) == s.size {
		if list := e.list(0, c.all, nil); list != nil {
			return e.inPlace(c.t, true, func(mine []byte) error { return e.byList.allGatherList(e, list, mine) })
		}
	}
	return e.pair(c.all, single(c.t), func(o, i []byte) error { return e.route.allGather(e, o, i) })
}

// gatherAll issues an all-gather of the joined inputs into the joined outputs.
func (b *Group) gatherAll(ctx context.Context, op work.OpType, timeout time.Duration, out, in, result []*tensor.Tensor) (*work.Work, error) {
	run := func(e *engine) error {
		return e.pair(out, in, func(o, i []byte) error { return e.route.allGather(e, o, i) })
	}
	bytes := b.size * total(in)
	return b.issue(ctx, op, timeout, prefixAllGather, 1, bytes, &operation{
		run: run, result: result, needsAll: bytes > 0,
		print: fingerprint{op: op, dtype: in[0].DType(), root: -1, elements: total(in) / in[0].DType().Size(), sized: true}.call(),
	})
}

// AllGatherV gathers inputs of unequal size: around a ring, through shared memory, or among clusters.
func (b *Group) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	const op = work.AllGather
	if err := b.args.AllGather(out, in, false); err != nil {
		return nil, err
	}
	out = slices.Clone(out)
	counts := lengthsOf(nil, out)
	run := func(e *engine) error {
		return e.pair(out, single(in), func(o, i []byte) error { return e.route.allGatherV(e, o, i, counts) })
	}
	return b.issue(ctx, op, o.Timeout, prefixAllGather, 1, total(out), &operation{
		run: run, result: out, print: fingerprint{op: op, dtype: in.DType(), root: -1}.blocks(counts).call(),
	})
}

// AllGatherIntoTensor passes the inputs around a ring, straight into out.
func (b *Group) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	if err := b.args.AllGatherIntoTensor(out, in); err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.result = runAllGather, append(q.future.room[:0], out)
	q.args.t, q.args.all = in, q.result
	return b.issueAllGather(ctx, work.AllGatherIntoTensor, o.Timeout, q)
}

// AllGatherCoalesced joins the inputs and gathers them as one.
func (b *Group) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	joined, err := b.args.AllGatherCoalesced(out, in)
	if err != nil {
		return nil, err
	}
	return b.gatherAll(ctx, work.AllGatherCoalesced, o.Timeout, joined, slices.Clone(in), joined)
}

// AllGatherIntoTensorCoalesced joins the inputs and gathers them as one.
func (b *Group) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	// On the wire rank r's inputs lie together; in the outputs, input i of all ranks.
	joined, err := b.args.AllGatherIntoTensorCoalesced(out, in)
	if err != nil {
		return nil, err
	}
	return b.gatherAll(ctx, work.AllGatherCoalesced, o.Timeout, joined, slices.Clone(in), slices.Clone(out))
}

// Gather sends each rank's input straight to the root.
func (b *Group) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, true)
}

// GatherV is Gather with inputs of unequal size.
func (b *Group) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	return b.gather(ctx, out, in, o, false)
}

func (b *Group) gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions, even bool) (*work.Work, error) {
	const op = work.Gather
	if err := b.args.Gather(out, in, o.Root, even); err != nil {
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
	if e.byList != nil && c.even {
		if list := e.list(0, c.all, nil); s.rank != c.root || list != nil {
			return e.inPlace(c.t, true, func(mine []byte) error { return e.byList.gatherList(e, list, mine, c.root) })
		}
	}
	return e.pair(c.all, single(c.t), func(all, mine []byte) error { return e.route.gather(e, all, mine, c.root, c.lengths, c.even) })
}

// Scatter sends the root's inputs straight to their ranks.
func (b *Group) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	const op = work.Scatter
	if err := b.args.Scatter(out, in, o.Root); err != nil {
		return nil, err
	}
	q := b.spare()
	q.run, q.result = runScatter, append(q.future.room[:0], out)
	q.args.t, q.args.all, q.args.root = out, append(q.args.room[:0], in...), o.Root
	if b.rank == o.Root {
		q.early = gives
	}
	q.print = fingerprint{op: op, dtype: out.DType(), root: o.Root, elements: out.Len(), sized: true}.call()
	return b.issue(ctx, op, o.Timeout, prefixScatter, 1, b.size*out.ByteLen(), q)
}

func runScatter(e *engine) error {
	c, s := &e.op.args, e.session
	if e.byList != nil {
		if list := e.list(0, c.all, nil); s.rank != c.root || list != nil {
			return e.inPlace(c.t, false, func(mine []byte) error { return e.byList.scatterList(e, mine, list, c.root) })
		}
	}
	return e.pair(single(c.t), c.all, func(mine, all []byte) error { return e.route.scatter(e, mine, all, c.root) })
}

// ReduceScatter combines input i of all ranks into rank i's output.
func (b *Group) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	if err := b.args.ReduceScatter(out, in); err != nil {
		return nil, err
	}
	in = slices.Clone(in)
	counts := lengthsOf(nil, in)
	return b.reduceScatter(ctx, work.ReduceScatter, o, b.size, total(in), counts, single(out), func(e *engine, red backend.Reduction) error {
		return e.reduceScatter(single(out), in, counts, red)
	})
}

// reduceScatter combines the joined inputs. Rank i gets counts[i] bytes, which follow those of the
// ranks before it.
func (e *engine) reduceScatter(out, in []*tensor.Tensor, counts []int64, red backend.Reduction) error {
	run := func(mine, all []byte) error {
		if err := e.route.reduceScatter(e, mine, all, counts, len(in), red); err != nil {
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
func (b *Group) reduceScatter(ctx context.Context, op work.OpType, o backend.ReduceScatterOptions, tags, bytes int, counts []int64, out []*tensor.Tensor, run func(*engine, backend.Reduction) error) (*work.Work, error) {
	red, err := b.args.Reduction(op, o.Op, out[0].DType())
	if err != nil {
		return nil, err
	}
	print := fingerprint{op: op, with: &o.Op, dtype: out[0].DType(), root: -1}
	if counts != nil {
		print = print.blocks(counts)
	} else {
		print = print.parted(lengthsOf(nil, out), b.size)
	}
	q := &operation{result: out, print: print.call(), needsAll: counts != nil && even(counts) && counts[0] > 0}
	q.run = func(e *engine) error { return run(e, red) }
	return b.issue(ctx, op, o.Timeout, prefixAllReduce, tags, bytes, q)
}

// ReduceScatterTensor combines part i of all ranks' inputs into rank i's output.
func (b *Group) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensor, single(out), single(in), o)
}

// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair.
func (b *Group) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	return b.reduceScatterTensors(ctx, work.ReduceScatterTensorCoalesced, out, in, o)
}

func (b *Group) reduceScatterTensors(ctx context.Context, op work.OpType, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	if err := b.args.ReduceScatterTensors(op, out, in); err != nil {
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
func (b *Group) reduceScatterOne(ctx context.Context, op work.OpType, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	red, err := b.args.Reduction(op, o.Op, out.DType())
	if err != nil {
		return nil, err
	}
	q := b.spare()
	c := &q.args
	q.run, q.result, q.needsAll = runReduceScatter, append(q.future.room[:0], out), out.Len() > 0
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
func (b *Group) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	if err := b.args.AllToAll(out, in); err != nil {
		return nil, err
	}
	out, in = slices.Clone(out), slices.Clone(in)
	return b.allToAll(ctx, work.AllToAll, o.Timeout, out, in, lengthsOf(nil, out), lengthsOf(nil, in))
}

func (b *Group) allToAll(ctx context.Context, op work.OpType, timeout time.Duration, out, in []*tensor.Tensor, recv, send []int64) (*work.Work, error) {
	run := func(e *engine) error {
		if e.byList != nil {
			if to, from := e.list(0, out, recv), e.list(1, in, send); to != nil && from != nil {
				return e.byList.allToAllList(e, to, from)
			}
		}
		return e.pair(out, in, func(o, i []byte) error { return e.route.allToAll(e, o, i, recv, send) })
	}
	q := b.spare()
	q.run, q.result = run, out
	q.print = fingerprint{op: op, dtype: in[0].DType(), root: -1}.call()
	return b.issue(ctx, op, timeout, prefixAllToAll, 1, total(out)+total(in), q)
}

// AllToAllSingle sends part j of in straight to rank j.
func (b *Group) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	recv, send, err := b.args.AllToAllSingle(out, in, outSplits, inSplits)
	if err != nil {
		return nil, err
	}
	for r := range recv {
		recv[r] *= argcheck.RowBytes(out)
		send[r] *= argcheck.RowBytes(in)
	}
	return b.allToAll(ctx, work.AllToAllSingle, o.Timeout, single(out), single(in), recv, send)
}

// Barrier waits for this rank's earlier collectives, then meets the others.
func (b *Group) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	q := b.spare()
	q.run, q.needsAll, q.afterAll, q.early = runBarrier, true, true, postsNone
	q.print = fingerprint{op: work.Barrier, root: -1}.call()
	return b.issue(ctx, work.Barrier, o.Timeout, prefixBarrier, 1, 0, q)
}

func runBarrier(e *engine) error {
	b, q := e.op.future.queue, e.op
	if q.alone {
		return e.route.barrier(e)
	}
	for _, earlier := range b.before(q) {
		e.sleep(earlier.Done(), e.mesh.Failed(), anyRank)
		if f := e.mesh.Fault(); f != nil {
			return b.faultError(q.Info(), f)
		}
	}
	return e.route.barrier(e)
}
