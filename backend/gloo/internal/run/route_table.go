package run

import (
	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

// tableRoute runs the algorithms that a table of measurements picks, over the native TCP wire.
type tableRoute struct{ messageRoute }

func newTable(s *session) *tableRoute {
	return &tableRoute{messageRoute{s, func(op plan.Op, c plan.Call) *plan.Plan {
		c.Rank, c.Size = s.rank, s.size
		return s.planner.planFor(planKey{op: op}, c, s.choose)
	}}}
}

func (t *tableRoute) reduceScatter(e *engine, out, in []byte, counts []int64, _ int, r backend.Reduction) error {
	p := t.plan(plan.OpReduceScatter, blocksOf(counts, int64(r.Grain)))
	if own := totalOf(counts[:t.s.rank]); len(out) == 0 || &out[0] != &in[own] {
		return e.run(p, out, in, r.Combine)
	}
	// In place: a plan writes to out before it has read all of in.
	mine := grow(&e.joined, len(out))
	if err := e.run(p, mine, in, r.Combine); err != nil {
		return err
	}
	copy(out, mine)
	return nil
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

// explainTo is up to which size algorithms are looked up one by one.
const explainTo = 1 << 30

// explain looks up every power of two and joins those with one algorithm.
func (t *tableRoute) explain(op plan.Op) []backend.Choice {
	c := func(bytes int64) backend.Choice {
		way := t.s.choose(op, bytes)
		return backend.Choice{Op: op.String(), UpTo: bytes, Algorithm: way.Algorithm.Name, Why: way.Why}
	}
	if op == plan.OpBarrier || op == plan.OpAllToAll {
		return always(op, glooAlgorithms[op], "the only one")
	}
	all := []backend.Choice{c(1)}
	for bytes := int64(2); bytes <= explainTo; bytes *= 2 {
		last := &all[len(all)-1]
		if next := c(bytes); next.Algorithm != last.Algorithm {
			all = append(all, next)
		} else {
			last.UpTo = bytes
		}
	}
	all[len(all)-1].UpTo = -1
	return all
}

// choose returns the algorithm of a collective on the native mesh. Ranks that
// ask the same get the same.
func (s *session) choose(op plan.Op, bytes int64) choice.Choice {
	return s.Table.Choose(choice.Query{
		Op: op, Bytes: bytes, Wire: "tcp", Ranks: s.size, Hosts: s.Parts, RankOrder: s.RankOrder,
	})
}
