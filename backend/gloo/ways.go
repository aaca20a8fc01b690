package gloo

import (
	"errors"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/transport"
	"github.com/c10d-go/c10d/backend/gloo/transport/shm"
	"github.com/c10d-go/c10d/internal/exact"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// The collectives on packed bytes. Each goes the way that the group has: through
// memory that the ranks share, as a plan over the native mesh, by an algorithm from a
// table, or as Gloo does it. Buffers are as for package plan; of a reduction
// only Combine is applied.

func (e *engine) allReduce(buf []byte, r backend.Reduction) error {
	b := e.backend
	n, grain := int64(len(buf)), int64(r.Grain)
	switch {
	case b.exact(r):
		return e.allReduceExact(buf, r)
	case b.shared != nil:
		return e.shared(b.shared.AllReduce(buf, r.Grain, r.Combine, e.stop))
	case b.levels != nil && b.sums == SumsFast:
		return e.allReduceLevels(buf, r)
	case b.native:
		return e.plan(plan.OpAllReduce, buf, nil, plan.Call{Bytes: n, Elem: grain}, r.Combine)
	}
	p := b.planner.get(planKey{op: plan.OpAllReduce, bytes: n, elem: grain}, func() *plan.Plan { return plan.AllReduceRing(b.rank, b.size, n, grain) })
	return e.run(p, buf, nil, r.Combine)
}

// reduce leaves the result in the root's buf. The other ranks' stay as they are
// in shared memory; else nobody knows what is in them then.
func (e *engine) reduce(buf []byte, root int, r backend.Reduction) error {
	b := e.backend
	n, grain := int64(len(buf)), int64(r.Grain)
	switch {
	case b.exact(r):
		return e.allReduceExact(buf, r)
	case b.shared != nil:
		var out []byte
		if b.rank == root {
			out = buf
		}
		return e.shared(b.shared.Reduce(out, buf, root, r.Grain, r.Combine, e.stop))
	case b.levels != nil && b.sums == SumsFast:
		return e.reduceLevels(buf, root, r)
	case b.native:
		return e.plan(plan.OpReduce, buf, nil, plan.Call{Root: root, Bytes: n, Elem: grain}, r.Combine)
	}
	p := b.planner.get(planKey{op: plan.OpReduce, root: root, bytes: n, elem: grain}, func() *plan.Plan { return plan.ReduceRing(b.rank, b.size, root, n, grain) })
	return e.run(p, buf, nil, r.Combine)
}

// reduceScatter is for native groups only; in stays as it is.
func (e *engine) reduceScatter(out, in []byte, counts []int64, r backend.Reduction) error {
	b := e.backend
	switch {
	case b.exact(r):
		return e.reduceScatterExact(out, in, counts, r)
	case b.levels != nil && b.sums == SumsFast:
		return e.reduceScatterLevels(out, in, counts, r)
	case b.shared == nil && even(counts):
		return e.plan(plan.OpReduceScatter, out, in, plan.Call{Bytes: counts[0], Elem: int64(r.Grain)}, r.Combine)
	case b.shared == nil:
		return e.plan(plan.OpReduceScatter, out, in, plan.Call{Counts: counts, Elem: int64(r.Grain)}, r.Combine)
	case even(counts):
		return e.shared(b.shared.ReduceScatter(out, in, r.Grain, r.Combine, e.stop))
	}
	for root, n := range counts {
		var mine []byte
		if root == b.rank {
			mine = out
		}
		if err := e.shared(b.shared.Reduce(mine, in[:n], root, r.Grain, r.Combine, e.stop)); err != nil {
			return err
		}
		in = in[n:]
	}
	return nil
}

func even(counts []int64) bool {
	for _, n := range counts {
		if n != counts[0] {
			return false
		}
	}
	return true
}

// exact reports whether a reduction has to be a sum that does not depend on order.
func (b *Backend) exact(r backend.Reduction) bool {
	return b.sums == SumsExact && b.native && r.Adds != tensor.Invalid
}

// allReduceExact brings all operands of an element to the rank that adds them.
func (e *engine) allReduceExact(buf []byte, r backend.Reduction) error {
	b := e.backend
	counts := shares(int64(len(buf)), b.size, int64(r.Grain))
	mine := make([]byte, counts[b.rank])
	if err := e.reduceScatterExact(mine, buf, counts, r); err != nil {
		return err
	}
	return e.allGatherV(buf, mine, counts)
}

// shares cuts n bytes into whole elements for each rank, as evenly as it goes.
func shares(n int64, ranks int, elem int64) []int64 {
	counts := make([]int64, ranks)
	per, more := n/elem/int64(ranks), n/elem%int64(ranks)
	for r := range counts {
		counts[r] = per * elem
		if int64(r) < more {
			counts[r] += elem
		}
	}
	return counts
}

func (e *engine) reduceScatterExact(out, in []byte, counts []int64, r backend.Reduction) error {
	b := e.backend
	n := counts[b.rank]
	from := slices.Repeat([]int64{n}, b.size)
	operands := make([]byte, n*int64(b.size))
	if err := e.allToAll(operands, in, from, counts); err != nil {
		return err
	}
	sum, err := exact.Sum(r.Adds)
	if err != nil {
		return err
	}
	sum(out, split(operands, from))
	return nil
}

func (e *engine) broadcast(buf []byte, root int) error {
	b := e.backend
	n := int64(len(buf))
	switch {
	case b.shared != nil:
		return e.shared(b.shared.Broadcast(buf, root, e.stop))
	case b.levels != nil:
		return e.broadcastLevels(buf, root)
	case b.native:
		return e.plan(plan.OpBroadcast, buf, nil, plan.Call{Root: root, Bytes: n}, nil)
	}
	p := b.planner.get(planKey{op: plan.OpBroadcast, root: root, bytes: n}, func() *plan.Plan { return plan.Broadcast(b.rank, b.size, root, n) })
	return e.run(p, buf, nil, nil)
}

func (e *engine) allGather(out, in []byte) error {
	b := e.backend
	n := int64(len(in))
	switch {
	case b.shared != nil:
		return e.shared(b.shared.AllGather(out, in, e.stop))
	case b.levels != nil:
		counts := slices.Repeat([]int64{n}, b.size)
		return e.onSlot(prefixAllGather, func() error { return e.allGatherLevels(out, in, counts) })
	case b.native:
		return e.onSlot(prefixAllGather, func() error { return e.plan(plan.OpAllGather, out, in, plan.Call{Bytes: n}, nil) })
	}
	p := b.planner.get(planKey{op: plan.OpAllGather, bytes: n}, func() *plan.Plan { return plan.AllGather(b.rank, b.size, n) })
	return e.onSlot(prefixAllGather, func() error { return e.run(p, out, in, nil) })
}

func (e *engine) allGatherV(out, in []byte, counts []int64) error {
	b := e.backend
	switch {
	case b.levels != nil:
		return e.onSlot(prefixAllGather, func() error { return e.allGatherLevels(out, in, counts) })
	case b.shared == nil && b.native:
		return e.onSlot(prefixAllGather, func() error { return e.plan(plan.OpAllGather, out, in, plan.Call{Counts: counts}, nil) })
	case b.shared == nil:
		return e.onSlot(prefixAllGather, func() error { return e.run(plan.AllGatherV(b.rank, counts), out, in, nil) })
	}
	return e.shared(b.shared.AllGatherV(out, in, counts, e.stop))
}

// onSlot runs a collective within another one on a slot of its own, as Gloo does
// with all-gathers within an all-reduce.
func (e *engine) onSlot(prefix uint8, run func() error) error {
	before := e.slot
	defer func() { e.slot = before }()
	e.slot = slotOf(prefix, e.tag)
	return run()
}

// gather brings counts[i] bytes of each rank to root. Even says that all ranks
// send as many, which the others cannot see from their counts.
func (e *engine) gather(out, in []byte, root int, counts []int64, even bool) error {
	b := e.backend
	switch {
	case b.shared != nil && even:
		return e.shared(b.shared.Gather(out, in, root, e.stop))
	case b.levels != nil:
		return e.gatherLevels(out, in, root, counts, even)
	case b.native && even:
		return e.plan(plan.OpGather, out, in, plan.Call{Root: root, Bytes: int64(len(in))}, nil)
	case b.shared == nil:
		return e.run(plan.GatherV(b.rank, root, counts), out, in, nil)
	}
	to, from := make([][]byte, b.size), make([][]byte, b.size)
	to[root] = in
	if b.rank == root {
		from = split(out, counts)
	}
	return e.shared(b.shared.AllToAllV(from, to, e.stop))
}

func (e *engine) scatter(out, in []byte, root int) error {
	b := e.backend
	n := int64(len(out))
	switch {
	case b.shared != nil:
		return e.shared(b.shared.Scatter(out, in, root, e.stop))
	case b.levels != nil:
		return e.scatterLevels(out, in, root)
	case b.native:
		return e.plan(plan.OpScatter, out, in, plan.Call{Root: root, Bytes: n}, nil)
	}
	p := b.planner.get(planKey{op: plan.OpScatter, root: root, bytes: n}, func() *plan.Plan { return plan.Scatter(b.rank, b.size, root, n) })
	return e.run(p, out, in, nil)
}

// allToAll is direct over a mesh alone: only who sends and who receives know the
// lengths, so ranks could not choose alike by them.
func (e *engine) allToAll(out, in []byte, recv, send []int64) error {
	b := e.backend
	if b.shared != nil {
		return e.shared(b.shared.AllToAllV(split(out, recv), split(in, send), e.stop))
	}
	if b.levels != nil {
		return e.allToAllLevels(out, in, recv, send)
	}
	return e.run(plan.AllToAllV(b.rank, send, recv), out, in, nil)
}

// split cuts buf into consecutive parts.
func split(buf []byte, counts []int64) [][]byte {
	parts := make([][]byte, len(counts))
	for i, n := range counts {
		parts[i], buf = buf[:n:n], buf[n:]
	}
	return parts
}

func (e *engine) barrier() error {
	b := e.backend
	switch {
	case b.shared != nil:
		return e.shared(b.shared.Barrier(e.stop))
	case b.levels != nil:
		return e.barrierLevels()
	}
	p := b.planner.get(planKey{op: plan.OpBarrier}, func() *plan.Plan { return plan.Barrier(b.rank, b.size) })
	return e.run(p, nil, nil, nil)
}

// plan runs the algorithm that the table has for a call, all of whose arguments
// every rank has the same.
func (e *engine) plan(op plan.Op, out, in []byte, c plan.Call, combine func(dst, src []byte)) error {
	b := e.backend
	c.Rank, c.Size, c.Layout = b.rank, b.size, b.layout
	bytes := c.Bytes
	for _, n := range c.Counts {
		bytes += n
	}
	if c.Counts != nil {
		bytes /= int64(b.size)
	}
	planned := func() *plan.Plan {
		way := b.choose(op, bytes)
		c.Chunk = way.Chunk
		return way.Algorithm.Plan(c)
	}
	if c.Counts != nil {
		return e.run(planned(), out, in, combine)
	}
	return e.run(b.planner.get(planKey{op, c.Root, bytes, c.Elem, false}, planned), out, in, combine)
}

// over returns why the operation has to end, nil while it may go on. It is what
// waits in shared memory ask.
func (e *engine) over() error {
	b := e.backend
	select {
	case <-e.mesh.Failed():
	case <-e.ctx.Done():
		b.giveUp(e.mesh, e.op, -1, canceled(e.ctx))
	default:
		if time.Now().Before(e.until()) {
			return nil
		}
		b.giveUp(e.mesh, e.op, -1, tooLate(e.op))
	}
	return e.mesh.Fault()
}

// wordOfFault is how long a rank waits for the mesh to say why the others have
// ended an operation in shared memory, which they say there first.
const wordOfFault = time.Second

// shared turns the error of a collective in shared memory into the operation's.
func (e *engine) shared(err error) error { return e.backend.inMemory(e.mesh, e.op.Info(), err) }

// inMemory turns an error from shared memory into that of an operation, and tells the other ranks.
func (b *Backend) inMemory(m transport.Mesh, info work.Info, err error) error {
	if err == nil {
		return nil
	}
	var at *shm.RankError
	if errors.As(err, &at) && m.Fault() == nil {
		culprit := at.Rank
		if b.levels != nil {
			culprit = b.levels.members[b.levels.host][culprit]
		}
		err = b.renumbered(err)
		f := &transport.Fault{Rank: culprit, Reporter: b.rank, Op: uint8(info.Op), Seq: info.Seq, Err: err}
		var calls *transport.Disagreement
		switch {
		case errors.As(err, &calls):
			f.Kind, f.Err = transport.FaultMismatch, calls
			m.Abort(f)
		case errors.Is(err, shm.ErrMismatch):
			f.Kind = transport.FaultMismatch
			m.Abort(f)
		case errors.Is(err, shm.ErrLeft):
			f.Kind = transport.FaultPeerLeft
			m.Abort(f)
		default:
			t := time.NewTimer(wordOfFault)
			defer t.Stop()
			select {
			case <-m.Failed():
			case <-t.C:
				f.Kind = transport.FaultAborted
				if errors.As(b.renumbered(b.local().Settle(0)), &calls) {
					f.Kind, f.Err = transport.FaultMismatch, calls
				}
				m.Abort(f)
			}
		}
	}
	if f := m.Fault(); f != nil {
		return b.faultError(info, f)
	}
	return &work.Error{Info: info, Peer: -1, Err: err}
}

// renumbered is an error from shared memory with the numbers that all ranks know.
func (b *Backend) renumbered(err error) error {
	if b.levels == nil {
		return err
	}
	return renumbered(err, b.levels.members[b.levels.host])
}
