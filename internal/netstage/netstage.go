// Package netstage is what a backend for devices and the gloo backend tell each other of a collective between clusters.
package netstage

import (
	"context"
	"time"

	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/work"
)

// Stage is a collective of a group whose ranks form clusters, and whose stages inside the
// clusters run elsewhere, for example on devices. The gloo backend runs the steps between the clusters.
type Stage struct {
	// Op is the operation that errors name. All ranks have the same.
	Op work.OpType

	// Plan is this rank's plan. All ranks have plans for one call and one cluster.Layout of the
	// group. Of its steps, the backend runs those with the stage cluster.Between.
	Plan *cluster.Plan

	// Memory returns the memory of step i of the plan, as many bytes as its part has. The memory
	// is the backend's from Call.Ready(i) until Result of the step's chunk, or until the Work
	// has ended. Memory is called once for each step, after Ready.
	Memory func(i int) []byte

	// Combine computes dst = dst op src, of operations that reduce.
	Combine func(dst, src []byte)

	// Result, if not nil, is called when the results of a chunk are in the memory of its steps.
	// Chunks come in the order in which the plan finishes them. After an error Result is not
	// called any more.
	//
	// Memory, Combine and Result run in a goroutine of the backend, one at a time. The other
	// chunks of the operation wait for them.
	Result func(chunk int)

	// Timeout is as in backend.AllReduceOptions. It begins when the operation first has to wait.
	Timeout time.Duration
}

// Call is a Stage under way. Its Work ends when all chunks have their results. After a
// failure of the caller's own, Work.Abort ends the group. Memory may be freed when the Work has
// ended.
type Call struct {
	*work.Work

	// Ready says that step i of the plan may begin: this rank's operand is in its memory, and the memory
	// is the backend's. Every step between clusters needs one call, from any goroutine, in any order.
	//
	// A step begins when it is ready and the chunks that end before it in the plan have their results.
	// Ready must not depend on a later result. It does not wait. An error that wraps callback.ErrLate
	// says that the operation has ended.
	Ready func(i int) error
}

// Backend is a backend that runs network stages.
type Backend interface {
	// Stage issues a network stage. All ranks of the group issue it in the order of their collectives,
	// also those that have no step between clusters. It has a sequence number and a slot of its own, and
	// does not wait. An error means that it was not issued.
	//
	// A group with clusters or shared memory runs one collective at a time. A later one begins when this
	// one has ended. If all ranks share memory, the messages go through it.
	Stage(ctx context.Context, s Stage) (*Call, error)
}
