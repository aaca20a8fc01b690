package cluster

import (
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/plan"
)

// Stage is a part of a collective.
type Stage uint8

// The stages of a collective.
const (
	Before  Stage = iota // inside a cluster
	Between              // among ranks of different clusters
	After                // inside a cluster
)

// String returns the stage's name.
func (s Stage) String() string {
	switch s {
	case Before:
		return "inside, before"
	case Between:
		return "between clusters"
	case After:
		return "inside, after"
	}
	return fmt.Sprintf("stage %d", uint8(s))
}

// Step is one step of a plan.
//
// A step inside is a collective among all ranks of the cluster. It has ended when the next step
// begins. A step between clusters only begins: the executor goes on with the next step. A step with
// Finish ends the steps between clusters that have its Chunk.
type Step struct {
	Stage  Stage
	Finish bool
	Chunk  int
	Op     plan.Op

	// ID numbers a step between clusters. It is the same on all Ranks, and no other step of the
	// group has it.
	ID int

	Ranks []int // that take part, by place: the cluster's, or others
	Root  int   // a place in Ranks, of the operations that have a root

	Src, Dst plan.Buffer
	Parts    []Part // of a step between clusters: one, in Dst, in place

	// Even says that a step inside has a part for each rank, all of one length. Those of a
	// reduce-scatter or an all-gather lie one after the other. All ranks of the step have the
	// same Even.
	Even bool

	// Seal, if not 0, is what the last 8 bytes of a message have to be. It stands for the
	// lengths of the message's blocks. The sender sets these bytes; Parts include them.
	Seal uint64
}

// Part is a range of a step. From and To are places in Step.Ranks.
//
//	reduce-scatter       Src+Len of all ranks is combined to Dst+Len on rank To
//	all-gather           Src+Len of rank From goes to Dst+Len on all ranks
//	gather, scatter and  Src+Len of rank From goes to Dst+Len on rank To; the rank's
//	all-to-all           plan has only the parts from it and to it
type Part struct {
	From, To      int
	Src, Dst, Len int64
}

// Plan is the steps of one rank in one collective. It is immutable: it can be cached, and run from
// many goroutines.
type Plan struct {
	Call    Call
	Steps   []Step
	Chunks  int
	Scratch int64 // bytes of scratch memory
	IDs     int   // steps between clusters in the group have IDs below it
}

// Way returns the name of the algorithm for long messages of an operation among ranks of so many
// clusters: a direct exchange between two, a ring or a chain between more. A partial result of a
// reduce leaves each cluster once.
func Way(op plan.Op, clusters int) string {
	switch {
	case op == plan.OpAllReduce && clusters > 2:
		return "ring"
	case op == plan.OpAllReduce:
		return "recursive-doubling" // of two ranks: each sends everything
	case op == plan.OpBroadcast && clusters > 2:
		return "chain"
	case op == plan.OpBarrier:
		return "dissemination"
	}
	return "binomial"
}

// Around is the way of steps of a call with Around.
const Around = "around"

// Messages returns the plan of a step between clusters for a rank, as messages among Ranks by
// place. With an empty way the algorithm is that of Way.
func (s *Step) Messages(rank int, elem int64, way string) *plan.Plan {
	at := slices.Index(s.Ranks, rank)
	switch way {
	case "":
		way = Way(s.Op, len(s.Ranks))
	case Around:
		return plan.AllReduceAround(at, len(s.Ranks), s.Root, s.Parts[0].Len)
	}
	a, err := plan.Lookup(s.Op, way)
	if err != nil {
		panic(err) // Way knows the names
	}
	if s.Op == plan.OpBroadcast && len(s.Ranks) == 2 {
		return plan.Broadcast(at, 2, s.Root, s.Parts[0].Len) // even if it is empty
	}
	c := plan.Call{Rank: at, Size: len(s.Ranks), Root: s.Root, Elem: elem, Chunk: plan.DefaultChunk}
	if len(s.Parts) > 0 {
		c.Bytes = s.Parts[0].Len
	}
	if !s.Op.Reduces() {
		c.Elem = 1
	}
	return a.Plan(c)
}

// inPlace reports whether all parts stay where they are.
func (s *Step) inPlace() bool {
	return s.Src == s.Dst && !slices.ContainsFunc(s.Parts, func(p Part) bool { return p.Src != p.Dst })
}

// even reports whether parts have one length, one for each rank, and for a reduce-scatter or an
// all-gather also whether they lie one after the other.
func even(op plan.Op, ranks int, parts []Part) bool {
	if len(parts) != ranks {
		return false
	}
	n := parts[0].Len
	for i, p := range parts {
		own := p.From
		if op == plan.OpReduceScatter || op == plan.OpScatter {
			own = p.To
		}
		list := op == plan.OpGather || op == plan.OpScatter
		at, first := p.Src, parts[0].Src
		if op == plan.OpAllGather {
			at, first = p.Dst, parts[0].Dst
		}
		if p.Len != n || own != i || !list && at != first+int64(i)*n {
			return false
		}
	}
	return op != plan.OpAllToAll
}
