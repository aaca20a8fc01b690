package run

import (
	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
)

// A route carries a group's collectives to the other ranks. Which route a group has is decided
// once, when its ranks are connected; see [session.chooseRoute].
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
	// reduceScatter does not change in. Only out may be a part of it. in has one tensor, or one
	// for each rank, in their order.
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

// always returns the choice of a route that does the same for every size.
func always(op plan.Op, algorithm, why string) []backend.Choice {
	return []backend.Choice{{Op: op.String(), UpTo: -1, Algorithm: algorithm, Why: why}}
}

// messageRoute sends messages by plans.
type messageRoute struct {
	s *session

	// plan returns the plan for a call whose arguments all ranks have alike.
	plan func(op plan.Op, c plan.Call) *plan.Plan
}

func (m *messageRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	return e.run(m.plan(plan.OpAllReduce, plan.Call{Bytes: int64(len(buf)), Elem: int64(r.Grain)}), buf, nil, r.Combine)
}

func (m *messageRoute) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	c := plan.Call{Root: root, Bytes: int64(len(buf)), Elem: int64(r.Grain)}
	return e.run(m.plan(plan.OpReduce, c), buf, nil, r.Combine)
}

func (m *messageRoute) overwrites(backend.Reduction) bool { return true }

func (m *messageRoute) broadcast(e *engine, buf []byte, root int) error {
	return e.run(m.plan(plan.OpBroadcast, plan.Call{Root: root, Bytes: int64(len(buf))}), buf, nil, nil)
}

func (m *messageRoute) allGather(e *engine, out, in []byte) error {
	return e.onSlot(prefixAllGather, func() error {
		return e.run(m.plan(plan.OpAllGather, plan.Call{Bytes: int64(len(in))}), out, in, nil)
	})
}

func (m *messageRoute) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.onSlot(prefixAllGather, func() error { return e.run(m.plan(plan.OpAllGather, plan.Call{Counts: counts}), out, in, nil) })
}

func (m *messageRoute) gather(e *engine, out, in []byte, root int, counts []int64, even bool) error {
	if !even {
		return e.run(plan.GatherV(m.s.rank, root, counts), out, in, nil)
	}
	return e.run(m.plan(plan.OpGather, plan.Call{Root: root, Bytes: int64(len(in))}), out, in, nil)
}

func (m *messageRoute) scatter(e *engine, out, in []byte, root int) error {
	return e.run(m.plan(plan.OpScatter, plan.Call{Root: root, Bytes: int64(len(out))}), out, in, nil)
}

// allToAll always sends straight: only the sender and the receiver of a block know its length,
// so the ranks could not choose alike by the lengths.
func (m *messageRoute) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	return e.run(plan.AllToAllV(m.s.rank, send, recv), out, in, nil)
}

func (m *messageRoute) barrier(e *engine) error {
	p := m.s.planner.get(planKey{op: plan.OpBarrier}, func() *plan.Plan { return plan.Barrier(m.s.rank, m.s.size) })
	return e.run(p, nil, nil, nil)
}
