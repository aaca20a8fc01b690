package run

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
)

// CallbackRing is a name for Connections.AllReduce. The tensor is cut into a block for each rank, as evenly as its elements
// allow. All blocks go around the ring of ranks at the same time, each from another rank on. A rank sends 2(size-1)
// messages. A step of a block begins when its message has come. Messages may come in any order: their ends meet the
// steps that wait for them in a callback.Registry.
const CallbackRing = "callback-ring"

// AllReduceAlgorithms returns the names that Connections.AllReduce may have.
func AllReduceAlgorithms() (names []string) {
	for _, a := range plan.Algorithms(plan.OpAllReduce) {
		names = append(names, a.Name)
	}
	return append(names, CallbackRing)
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
		n.around = cluster.NewCache(cluster.New(numbers, nil))
		return n, nil
	}
	var err error
	if n.way.Algorithm, err = plan.Lookup(plan.OpAllReduce, name); err != nil {
		return nil, err
	}
	n.choose = func(plan.Op, int64) choice.Choice { return n.way }
	return n, nil
}

func (n *namedRoute) allReduce(e *engine, buf []byte, r backend.Reduction) error {
	if d := n.s.Direct; d != nil {
		before := e.mesh
		defer func() { e.mesh = before }()
		e.mesh = d
	}
	if n.around == nil {
		c := plan.Call{Bytes: int64(len(buf)), Elem: int64(r.Grain), Rank: n.s.rank, Size: n.s.size}
		return e.run(n.s.planner.planFor(planKey{op: plan.OpAllReduce, named: true}, c, n.choose), buf, nil, r.Combine)
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
