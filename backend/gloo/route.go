package gloo

import (
	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
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

var glooAlgorithms = map[plan.Op]string{
	plan.OpBroadcast: "binomial", plan.OpAllReduce: "segmented ring", plan.OpReduce: "segmented ring",
	plan.OpAllGather: "ring", plan.OpGather: "direct", plan.OpScatter: "direct",
	plan.OpReduceScatter: "all_reduce", plan.OpAllToAll: "direct", plan.OpBarrier: "dissemination",
}

// limitOf returns from how many bytes on a collective is lent for, -1 for never.
func limitOf(l shm.Limits, op plan.Op) int64 {
	switch op {
	case plan.OpAllReduce:
		return l.AllReduce
	case plan.OpReduce:
		return l.Reduce
	case plan.OpReduceScatter:
		return l.ReduceScatter
	case plan.OpBroadcast:
		return l.Broadcast
	case plan.OpAllGather:
		return l.AllGather
	case plan.OpGather:
		return l.Gather
	case plan.OpScatter:
		return l.Scatter
	case plan.OpAllToAll:
		return l.AllToAll
	}
	return -1
}
