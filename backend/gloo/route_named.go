package gloo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
)

// CallbackRing is a name for Options.AllReduce. The tensor is cut into a block for each rank, as evenly as its elements
// allow. All blocks go around the ring of ranks at the same time, each from another rank on. A rank sends 2(size-1)
// messages. A step of a block begins when its message has come. Messages may come in any order: their ends meet the
// steps that wait for them in a callback.Registry.
const CallbackRing = "callback-ring"

// AllReduceAlgorithms returns the names that Options.AllReduce may have.
func AllReduceAlgorithms() (names []string) {
	for _, a := range plan.Algorithms(plan.OpAllReduce) {
		names = append(names, a.Name)
	}
	return append(names, CallbackRing)
}

// checkAllReduce returns why all-reduces cannot take the algorithm that o names.
func (o Options) checkAllReduce(wire Wire) error {
	name := o.AllReduce
	if name == "" {
		return nil
	}
	if !slices.Contains(AllReduceAlgorithms(), name) {
		return fmt.Errorf("gloo: Options.AllReduce is %q, want one of %s, or none", name, strings.Join(AllReduceAlgorithms(), ", "))
	}
	var ordered []string
	for _, a := range plan.Algorithms(plan.OpAllReduce) {
		if a.Order == plan.RankOrder {
			ordered = append(ordered, a.Name)
		}
	}
	switch {
	case o.Sums == SumsInRankOrder && !slices.Contains(ordered, name):
		return fmt.Errorf("gloo: Options.AllReduce is %q, which does not add in rank order: Options.Sums needs one of %s", name, strings.Join(ordered, ", "))
	case wire == WireGloo && o.Fabric == nil:
		return fmt.Errorf("gloo: Options.AllReduce is %q, and Options.Wire or C10D_WIRE is gloo, whose ranks all have the segmented ring only: choose another wire", name)
	}
	return nil
}

// namedRoute is a route whose all-reduces take the algorithm that Options.AllReduce names, with messages on any wire.
type namedRoute struct {
	route
	s      *session
	way    choice.Choice  // without an algorithm for CallbackRing
	around *cluster.Cache // of CallbackRing
	choose chooser        // way
}

// newNamed returns a route beside another one.
func newNamed(s *session, name string, other route) (*namedRoute, error) {
	n := &namedRoute{route: other, s: s}
	if name == CallbackRing {
		numbers := make([]int, s.size)
		for r := range numbers {
			numbers[r] = r
		}
		n.around = cluster.NewCache(cluster.New(numbers, nil), "")
		return n, nil
	}
	var err error
	if n.way.Algorithm, err = plan.Lookup(plan.OpAllReduce, name); err != nil {
		return nil, err
	}
	if err := n.way.Algorithm.Fits(plan.Call{Layout: s.layout}); err != nil {
		return nil, fmt.Errorf("gloo: Options.AllReduce: %w", err)
	}
	n.choose = func(plan.Op, int64) choice.Choice { return n.way }
	return n, nil
}

func (n *namedRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	if d := n.s.direct; d != nil {
		before := e.mesh
		defer func() { e.mesh = before }()
		e.mesh = d
	}
	if n.around == nil {
		c := plan.Call{Bytes: int64(len(buf)), Elem: int64(r.Grain), Rank: n.s.rank, Size: n.s.size, Layout: n.s.layout}
		return e.run(n.s.planFor(planKey{op: plan.OpAllReduce, named: true}, c, n.choose), buf, nil, r.Combine)
	}
	p, err := n.around.Plan(cluster.Call{Op: plan.OpAllReduce, Rank: n.s.rank, Bytes: int64(len(buf)), Elem: int64(r.Grain), Around: true})
	if err != nil {
		return err
	}
	e.cluster = clusterCall{plan: p, combine: r.Combine, meeting: e.meeting, bufs: [...][]byte{plan.Out: buf, plan.Scratch: nil}}
	return e.runStages(nil)
}

func (n *namedRoute) explain(op plan.Op) []backend.Choice {
	if op != plan.OpAllReduce {
		return n.route.explain(op)
	}
	if n.around == nil {
		return always(op, n.way.Algorithm.Name, "Options.AllReduce asks for it: "+n.way.Algorithm.Summary)
	}
	return always(op, CallbackRing, fmt.Sprintf("Options.AllReduce asks for it: %d blocks go around the ring of ranks at the same time, each step when its message has come", n.s.size))
}
