package gloo

import (
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/exact"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
)

// exactSums is a route that brings all operands of an element to one rank, which adds them
// exactly. Reductions other than sums of floats take the route below.
type exactSums struct{ route }

func (x exactSums) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	if r.Adds == tensor.Invalid {
		return x.route.allReduce(e, buf, r)
	}
	s := e.session
	counts := shares(int64(len(buf)), s.size, int64(r.Grain))
	mine := make([]byte, counts[s.rank])
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
	s := e.session
	n := counts[s.rank]
	from := slices.Repeat([]int64{n}, s.size)
	operands := make([]byte, n*int64(s.size))
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
func (s *session) exact(r backend.Reduction) bool {
	return s.sums == SumsExact && s.native && r.Adds != tensor.Invalid
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
