package run

import (
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
)

// glooRoute runs Gloo's algorithms with Gloo's messages, which PyTorch ranks understand.
type glooRoute struct{ messageRoute }

var glooAlgorithms = map[plan.Op]string{
	plan.OpBroadcast: "binomial", plan.OpAllReduce: "segmented ring", plan.OpReduce: "segmented ring",
	plan.OpAllGather: "ring", plan.OpGather: "direct", plan.OpScatter: "direct",
	plan.OpReduceScatter: "all_reduce", plan.OpAllToAll: "direct", plan.OpBarrier: "dissemination",
}

func newGloo(s *session) *glooRoute {
	return &glooRoute{messageRoute{s, func(op plan.Op, c plan.Call) *plan.Plan {
		if c.Counts != nil {
			return plan.AllGatherV(s.rank, c.Counts)
		}
		return s.planner.get(planKey{op: op, root: c.Root, bytes: c.Bytes, elem: c.Elem}, func() *plan.Plan {
			switch op {
			case plan.OpAllReduce:
				return plan.AllReduceRing(s.rank, s.size, c.Bytes, c.Elem)
			case plan.OpReduce:
				return plan.ReduceRing(s.rank, s.size, c.Root, c.Bytes, c.Elem)
			case plan.OpBroadcast:
				return plan.Broadcast(s.rank, s.size, c.Root, c.Bytes)
			case plan.OpAllGather:
				return plan.AllGather(s.rank, s.size, c.Bytes)
			case plan.OpScatter:
				return plan.Scatter(s.rank, s.size, c.Root, c.Bytes)
			default:
				return plan.GatherV(s.rank, c.Root, slices.Repeat([]int64{c.Bytes}, s.size))
			}
		})
	}}}
}

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

func (g *glooRoute) explain(op plan.Op) []backend.Choice {
	return always(op, glooAlgorithms[op], "as Gloo does it")
}
