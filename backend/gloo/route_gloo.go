package gloo

import (
	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
)

// glooRoute runs Gloo's algorithms with Gloo's messages, which PyTorch ranks understand.
type glooRoute struct{ s *session }

func (g *glooRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	n, grain := int64(len(buf)), int64(r.Grain)
	p := g.s.planner.get(planKey{op: plan.OpAllReduce, bytes: n, elem: grain},
		func() *plan.Plan { return plan.AllReduceRing(g.s.rank, g.s.size, n, grain) })
	return e.run(p, buf, nil, r.Combine)
}

func (g *glooRoute) reduce(e *engine, buf []byte, root int, r backend.Reduction) error {
	n, grain := int64(len(buf)), int64(r.Grain)
	p := g.s.planner.get(planKey{op: plan.OpReduce, root: root, bytes: n, elem: grain},
		func() *plan.Plan { return plan.ReduceRing(g.s.rank, g.s.size, root, n, grain) })
	return e.run(p, buf, nil, r.Combine)
}

func (g *glooRoute) overwrites(backend.Reduction) bool { return true }

// reduceScatter all-reduces each tensor of in, under a tag of its own, and keeps this rank's part.
// Gloo has no such collective; PyTorch does the same.
func (g *glooRoute) reduceScatter(e *engine, out, in []byte, counts []int64, tensors int, r backend.Reduction) error {
	parts := [][]byte{in}
	if tensors > 1 {
		parts = split(in, counts)
	}
	own := int(totalOf(counts[:g.s.rank])) // where this rank's part begins
	for i, part := range parts {
		buf := grow(&e.joined, len(part))
		copy(buf, part)
		if err := g.allReduce(e, buf, r); err != nil {
			return err
		}
		if tensors == 1 {
			copy(out, buf[own:])
		} else if i == g.s.rank {
			copy(out, buf)
		}
		e.useTag(e.tag + 1)
	}
	return nil
}

func (g *glooRoute) broadcast(e *engine, buf []byte, root int) error {
	n := int64(len(buf))
	p := g.s.planner.get(planKey{op: plan.OpBroadcast, root: root, bytes: n},
		func() *plan.Plan { return plan.Broadcast(g.s.rank, g.s.size, root, n) })
	return e.run(p, buf, nil, nil)
}

func (g *glooRoute) allGather(e *engine, out, in []byte) error {
	n := int64(len(in))
	return e.onSlot(prefixAllGather, func() error {
		p := g.s.planner.get(planKey{op: plan.OpAllGather, bytes: n},
			func() *plan.Plan { return plan.AllGather(g.s.rank, g.s.size, n) })
		return e.run(p, out, in, nil)
	})
}

func (g *glooRoute) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.onSlot(prefixAllGather, func() error { return e.run(plan.AllGatherV(g.s.rank, counts), out, in, nil) })
}

func (g *glooRoute) gather(e *engine, out, in []byte, root int, counts []int64, _ bool) error {
	return e.run(plan.GatherV(g.s.rank, root, counts), out, in, nil)
}

func (g *glooRoute) scatter(e *engine, out, in []byte, root int) error {
	n := int64(len(out))
	p := g.s.planner.get(planKey{op: plan.OpScatter, root: root, bytes: n},
		func() *plan.Plan { return plan.Scatter(g.s.rank, g.s.size, root, n) })
	return e.run(p, out, in, nil)
}

func (g *glooRoute) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	return e.run(plan.AllToAllV(g.s.rank, send, recv), out, in, nil)
}

func (g *glooRoute) barrier(e *engine) error {
	p := g.s.planner.get(planKey{op: plan.OpBarrier},
		func() *plan.Plan { return plan.Barrier(g.s.rank, g.s.size) })
	return e.run(p, nil, nil, nil)
}

func (g *glooRoute) explain(op plan.Op) []backend.Choice {
	return always(op, glooAlgorithms[op], "as Gloo does it")
}
