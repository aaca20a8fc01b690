package gloo

import (
	"errors"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/exact"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// A route carries a group's collectives to the other ranks. Which route a group has is decided
// once, when its ranks are connected; see [Backend.chooseRoute].
//
// Every method runs one collective on packed bytes and returns when this rank's part is done.
// Buffers are laid out as package plan says. counts are bytes, by rank. Of a reduction only
// Combine is applied: the caller applies Before and After.
type route interface {
	allReduce(e *engine, buf []byte, r backend.Reduction) error
	// reduce leaves the result in the root's buf.
	reduce(e *engine, buf []byte, root int, r backend.Reduction) error
	// overwrites reports whether reduce may change buf on ranks other than the root.
	overwrites(r backend.Reduction) bool
	// reduceScatter leaves in as it is. in consists of so many tensors one after the other:
	// one, or one for each rank.
	reduceScatter(e *engine, out, in []byte, counts []int64, tensors int, r backend.Reduction) error
	broadcast(e *engine, buf []byte, root int) error
	allGather(e *engine, out, in []byte) error
	allGatherV(e *engine, out, in []byte, counts []int64) error
	// gather brings counts[i] bytes of rank i to root. Other ranks than the root need to know
	// their own count only. even says that all counts are equal, on all ranks.
	gather(e *engine, out, in []byte, root int, counts []int64, even bool) error
	scatter(e *engine, out, in []byte, root int) error
	allToAll(e *engine, out, in []byte, recv, send []int64) error
	barrier(e *engine) error

	// explain says what the route does for an operation, by size.
	explain(op plan.Op) []backend.Choice
}

// listRoute is a route that takes tensors where they are: a buffer for each rank instead of one
// buffer with all of them.
type listRoute interface {
	allGatherList(e *engine, out [][]byte, in []byte) error
	gatherList(e *engine, out [][]byte, in []byte, root int) error
	scatterList(e *engine, out []byte, in [][]byte, root int) error
	allToAllList(e *engine, out, in [][]byte) error
}

// chooseRoute sets the route of a group whose ranks are connected.
func (b *Backend) chooseRoute() {
	table := &tableRoute{b}
	switch {
	case !b.native:
		b.route = &glooRoute{b}
		return
	case b.shared != nil:
		shared := &sharedRoute{b.shared, b.rank}
		b.route, b.lists = shared, shared
	case b.levels != nil && b.sums == SumsFast:
		b.route = b.levels
	case b.levels != nil:
		b.route = reductionsBy{b.levels, table} // in two levels they would not be in rank order
	default:
		b.route = table
	}
	if b.sums == SumsExact {
		b.route = exactSums{b.route}
	}
}

// glooRoute runs Gloo's algorithms with Gloo's messages, which PyTorch ranks understand.
type glooRoute struct{ b *Backend }

// run executes the plan of a key, which build makes the first time.
func (g *glooRoute) run(e *engine, k planKey, out, in []byte, combine func(dst, src []byte), build func() *plan.Plan) error {
	return e.run(g.b.planner.get(k, build), out, in, combine)
}

func (g *glooRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	n, grain := int64(len(buf)), int64(r.Grain)
	return g.run(e, planKey{op: plan.OpAllReduce, bytes: n, elem: grain}, buf, nil, r.Combine,
		func() *plan.Plan { return plan.AllReduceRing(g.b.rank, g.b.size, n, grain) })
}

func (g *glooRoute) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	n, grain := int64(len(buf)), int64(r.Grain)
	return g.run(e, planKey{op: plan.OpReduce, root: root, bytes: n, elem: grain}, buf, nil, r.Combine,
		func() *plan.Plan { return plan.ReduceRing(g.b.rank, g.b.size, root, n, grain) })
}

func (g *glooRoute) overwrites(backend.Reduction) bool { return true }

// reduceScatter does what PyTorch does, for Gloo has no such collective: it all-reduces each
// tensor of in, under a tag of its own, and keeps this rank's part.
func (g *glooRoute) reduceScatter(e *engine, out, in []byte, counts []int64, tensors int, r backend.Reduction) error {
	parts := [][]byte{in}
	if tensors > 1 {
		parts = split(in, counts)
	}
	own := int(totalOf(counts[:g.b.rank])) // where this rank's part begins
	for i, part := range parts {
		buf := grow(&e.joined, len(part))
		copy(buf, part)
		if err := g.allReduce(e, buf, r); err != nil {
			return err
		}
		if tensors == 1 {
			copy(out, buf[own:])
		} else if i == g.b.rank {
			copy(out, buf)
		}
		e.useTag(e.tag + 1)
	}
	return nil
}

func (g *glooRoute) broadcast(e *engine, buf []byte, root int) error {
	n := int64(len(buf))
	return g.run(e, planKey{op: plan.OpBroadcast, root: root, bytes: n}, buf, nil, nil,
		func() *plan.Plan { return plan.Broadcast(g.b.rank, g.b.size, root, n) })
}

func (g *glooRoute) allGather(e *engine, out, in []byte) error {
	n := int64(len(in))
	return e.onSlot(prefixAllGather, func() error {
		return g.run(e, planKey{op: plan.OpAllGather, bytes: n}, out, in, nil,
			func() *plan.Plan { return plan.AllGather(g.b.rank, g.b.size, n) })
	})
}

func (g *glooRoute) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.onSlot(prefixAllGather, func() error { return e.run(plan.AllGatherV(g.b.rank, counts), out, in, nil) })
}

func (g *glooRoute) gather(e *engine, out, in []byte, root int, counts []int64, _ bool) error {
	return e.run(plan.GatherV(g.b.rank, root, counts), out, in, nil)
}

func (g *glooRoute) scatter(e *engine, out, in []byte, root int) error {
	n := int64(len(out))
	return g.run(e, planKey{op: plan.OpScatter, root: root, bytes: n}, out, in, nil,
		func() *plan.Plan { return plan.Scatter(g.b.rank, g.b.size, root, n) })
}

func (g *glooRoute) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	return e.run(plan.AllToAllV(g.b.rank, send, recv), out, in, nil)
}

func (g *glooRoute) barrier(e *engine) error {
	return g.run(e, planKey{op: plan.OpBarrier}, nil, nil, nil, func() *plan.Plan { return plan.Barrier(g.b.rank, g.b.size) })
}

func (g *glooRoute) explain(op plan.Op) []backend.Choice {
	return always(op, glooAlgorithms[op], "as Gloo does it")
}

// tableRoute runs the algorithms that a table of measurements picks, over the native TCP wire.
type tableRoute struct{ b *Backend }

// plan runs the algorithm for a call whose arguments all ranks have alike.
func (t *tableRoute) plan(e *engine, op plan.Op, out, in []byte, c plan.Call, combine func(dst, src []byte)) error {
	c.Rank, c.Size, c.Layout = t.b.rank, t.b.size, t.b.layout
	return e.planned(planKey{op: op}, c, out, in, combine, t.b.choose)
}

func (t *tableRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	return t.plan(e, plan.OpAllReduce, buf, nil, plan.Call{Bytes: int64(len(buf)), Elem: int64(r.Grain)}, r.Combine)
}

func (t *tableRoute) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	return t.plan(e, plan.OpReduce, buf, nil, plan.Call{Root: root, Bytes: int64(len(buf)), Elem: int64(r.Grain)}, r.Combine)
}

func (t *tableRoute) overwrites(backend.Reduction) bool { return true }

func (t *tableRoute) reduceScatter(e *engine, out, in []byte, counts []int64, _ int, r backend.Reduction) error {
	return t.plan(e, plan.OpReduceScatter, out, in, blocksOf(counts, int64(r.Grain)), r.Combine)
}

func (t *tableRoute) broadcast(e *engine, buf []byte, root int) error {
	return t.plan(e, plan.OpBroadcast, buf, nil, plan.Call{Root: root, Bytes: int64(len(buf))}, nil)
}

func (t *tableRoute) allGather(e *engine, out, in []byte) error {
	return e.onSlot(prefixAllGather, func() error {
		return t.plan(e, plan.OpAllGather, out, in, plan.Call{Bytes: int64(len(in))}, nil)
	})
}

func (t *tableRoute) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.onSlot(prefixAllGather, func() error { return t.plan(e, plan.OpAllGather, out, in, plan.Call{Counts: counts}, nil) })
}

func (t *tableRoute) gather(e *engine, out, in []byte, root int, counts []int64, even bool) error {
	if !even {
		return e.run(plan.GatherV(t.b.rank, root, counts), out, in, nil)
	}
	return t.plan(e, plan.OpGather, out, in, plan.Call{Root: root, Bytes: int64(len(in))}, nil)
}

func (t *tableRoute) scatter(e *engine, out, in []byte, root int) error {
	return t.plan(e, plan.OpScatter, out, in, plan.Call{Root: root, Bytes: int64(len(out))}, nil)
}

// allToAll always sends straight: only the sender and the receiver of a block know its length,
// so the ranks could not choose alike by the lengths.
func (t *tableRoute) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	return e.run(plan.AllToAllV(t.b.rank, send, recv), out, in, nil)
}

func (t *tableRoute) barrier(e *engine) error {
	p := t.b.planner.get(planKey{op: plan.OpBarrier}, func() *plan.Plan { return plan.Barrier(t.b.rank, t.b.size) })
	return e.run(p, nil, nil, nil)
}

// reductionsBy is a route whose reductions take another one.
type reductionsBy struct {
	route
	reductions route
}

func (s reductionsBy) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	return s.reductions.allReduce(e, buf, r)
}

func (s reductionsBy) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	return s.reductions.reduce(e, buf, root, r)
}

func (s reductionsBy) overwrites(r backend.Reduction) bool { return s.reductions.overwrites(r) }

func (s reductionsBy) reduceScatter(e *engine, out, in []byte, counts []int64, tensors int, r backend.Reduction) error {
	return s.reductions.reduceScatter(e, out, in, counts, tensors, r)
}

func (s reductionsBy) explain(op plan.Op) []backend.Choice {
	if op.Reduces() {
		return s.reductions.explain(op)
	}
	return s.route.explain(op)
}

// exactSums is a route that brings all operands of an element to one rank, which adds them
// exactly. Reductions other than sums of floats take the route below.
type exactSums struct{ route }

func (x exactSums) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	if r.Adds == tensor.Invalid {
		return x.route.allReduce(e, buf, r)
	}
	b := e.backend
	counts := shares(int64(len(buf)), b.size, int64(r.Grain))
	mine := make([]byte, counts[b.rank])
	if err := x.reduceScatter(e, mine, buf, counts, 1, r); err != nil {
		return err
	}
	return x.allGatherV(e, buf, mine, counts)
}

func (x exactSums) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	if r.Adds == tensor.Invalid {
		return x.route.reduce(e, buf, root, r)
	}
	return x.allReduce(e, buf, r)
}

func (x exactSums) overwrites(r backend.Reduction) bool {
	return r.Adds != tensor.Invalid || x.route.overwrites(r)
}

func (x exactSums) reduceScatter(e *engine, out, in []byte, counts []int64, tensors int, r backend.Reduction) error {
	if r.Adds == tensor.Invalid {
		return x.route.reduceScatter(e, out, in, counts, tensors, r)
	}
	b := e.backend
	n := counts[b.rank]
	from := slices.Repeat([]int64{n}, b.size)
	operands := make([]byte, n*int64(b.size))
	if err := x.allToAll(e, operands, in, from, counts); err != nil {
		return err
	}
	sum, err := exact.Sum(r.Adds)
	if err != nil {
		return err
	}
	sum(out, split(operands, from))
	return nil
}

func (x exactSums) explain(op plan.Op) []backend.Choice {
	if op.Reduces() {
		return always(op, "exact", "sums of floats: all operands of an element go to the rank that adds them")
	}
	return x.route.explain(op)
}

// exact reports whether a reduction is a sum that must not depend on the order of its operands.
func (b *Backend) exact(r backend.Reduction) bool {
	return b.sums == SumsExact && b.native && r.Adds != tensor.Invalid
}

// shares cuts n bytes into whole elements for each rank, as evenly as possible.
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

// blocksOf is a call with a block of counts[i] bytes for rank i.
func blocksOf(counts []int64, elem int64) plan.Call {
	if even(counts) {
		return plan.Call{Bytes: counts[0], Elem: elem}
	}
	return plan.Call{Counts: counts, Elem: elem}
}

func even(counts []int64) bool {
	for _, n := range counts {
		if n != counts[0] {
			return false
		}
	}
	return true
}

// split cuts buf into consecutive parts.
func split(buf []byte, counts []int64) [][]byte {
	parts := make([][]byte, len(counts))
	for i, n := range counts {
		parts[i], buf = buf[:n:n], buf[n:]
	}
	return parts
}

// onSlot runs a collective within another one on a slot of its own, as Gloo does
// with all-gathers within an all-reduce.
func (e *engine) onSlot(prefix uint8, run func() error) error {
	before := e.slot
	defer func() { e.slot = before }()
	e.slot = slotOf(prefix, e.tag)
	return run()
}

// planned runs the algorithm that choose picks for a call. Plans of calls without counts are kept.
func (e *engine) planned(k planKey, c plan.Call, out, in []byte, combine func(dst, src []byte), choose chooser) error {
	bytes := c.Bytes // what the table goes by: the mean of a rank's bytes
	if c.Counts != nil {
		bytes = totalOf(c.Counts) / int64(len(c.Counts))
	}
	build := func() *plan.Plan {
		way := choose(k.op, bytes)
		c.Chunk = way.Chunk
		return way.Algorithm.Plan(c)
	}
	if c.Counts != nil {
		return e.run(build(), out, in, combine)
	}
	k.root, k.bytes, k.elem = c.Root, bytes, c.Elem
	return e.run(e.backend.planner.get(k, build), out, in, combine)
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
