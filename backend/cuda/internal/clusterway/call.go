package clusterway

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/netstage"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Call is an all-reduce, a reduce, a broadcast, a reduce-scatter or an all-gather. The tensors are dense, and in
// CPU memory or on devices.
type Call struct {
	Op     plan.Op
	Root   int              // of a broadcast and a reduce
	Reduce backend.ReduceOp // of the operations that reduce

	// Out are the tensors that are written, In those that are only read. The elements of a list, one
	// tensor after the other, are a buffer of the plan. A reduce has its tensor in Out on the root, and in
	// In elsewhere. A broadcast has its tensors in Out, with the same elements; the first one is the root's
	// source, or the first to have the data.
	Out, In []*tensor.Tensor

	// Counts are the elements of each rank's block of an all-gather or a reduce-scatter, nil if the blocks
	// have one length.
	Counts []int

	Print board.Call
}

// dtype returns that of the tensors. Every rank has one.
func (c *Call) dtype() tensor.DType {
	if len(c.Out) > 0 {
		return c.Out[0].DType()
	}
	return c.In[0].DType()
}

// start returns where a rank's block begins, of blocks of n bytes if they have one length.
func (c *Call) start(rank, n int) int {
	if c.Counts == nil {
		return rank * n
	}
	n = 0
	for _, k := range c.Counts[:rank] {
		n += k * c.dtype().Size()
	}
	return n
}

// mostTensors bounds the tensors of a call besides one for each rank: each may have commands of its own.
const mostTensors = 32

// root reports whether this rank only reads the first tensor.
func (c *Call) root(rank int) bool { return c.Op == plan.OpBroadcast && c.Root == rank }

// mostChunks bounds the commands of an operation: a stream gets up to ten for a chunk.
const mostChunks = 20

// planned returns this rank's plan.
func (g *Group) planned(c *Call, grain int) (*cluster.Plan, error) {
	n, all := 0, 0 // of a rank, and of all that have a part
	switch c.Op {
	case plan.OpBroadcast:
		n = c.Out[0].ByteLen()
		all = n
	case plan.OpReduceScatter:
		n, all = place.Bytes(c.Out), place.Bytes(c.In)
	case plan.OpAllGather:
		n, all = place.Bytes(c.In), place.Bytes(c.Out)
	default: // of a reduce, one of them is empty
		n = max(place.Bytes(c.Out), place.Bytes(c.In))
		all = n
	}
	call := cluster.Call{Op: c.Op, Apart: true, Rank: g.B.Rank, Root: c.Root, Bytes: int64(n), Elem: int64(grain), Chunk: int64(max(g.Chunk, (all+mostChunks-1)/mostChunks, 1))}
	if c.Counts != nil {
		call.Bytes = 0
		for _, n := range c.Counts {
			call.Counts = append(call.Counts, int64(n*c.dtype().Size()))
		}
	}
	return g.plans.Plan(call)
}

// job is what all kinds of programs have.
type job struct {
	g       *Group
	c       Call
	plan    *cluster.Plan
	red     backend.Reduction
	elem    int
	network *netstage.Call
	results []atomic.Bool // by chunk: the network has ended it
	o       *group.Operation
}

// later is how much longer the network may take than the operation. A rank whose own device does not do its
// part says so first, and says why. The network knows only which rank's data are missing.
const later = 100 * time.Millisecond

// supported returns why kernels do not do a call, the same on all ranks.
func (c *Call) supported() error {
	if !c.Op.Reduces() {
		return nil
	}
	return direct.Supports(inner(c.Reduce), c.dtype())
}

// inner is the operator of the steps inside. The sum of all is divided once.
func inner(op backend.ReduceOp) backend.ReduceOp {
	if op.Kind() == backend.Avg().Kind() {
		return backend.Sum()
	}
	return op
}

// flat reports whether the call has one buffer for all its steps, made of tensors whose elements are in order on
// devices.
func (j *job) flat() bool {
	c := &j.c
	if c.Op != plan.OpAllReduce && c.Op != plan.OpReduce && (c.Op != plan.OpBroadcast || len(c.Out) > 1) {
		return false
	}
	for _, list := range [2][]*tensor.Tensor{c.Out, c.In} {
		for _, t := range list {
			if t.Device().Type != tensor.CUDA || !place.Of(t).Flat {
				return false
			}
		}
	}
	return len(c.Out)+len(c.In) <= mostFlat
}

// mostFlat bounds the tensors that are copied one by one: a chunk may have some of each.
const mostFlat = 8

// begin issues the network's part. Memory returns that of a step, ended is told of each chunk.
func (j *job) begin(o *group.Operation, memory func(i int) []byte, ended func(chunk int)) (err error) {
	j.o = o
	s := netstage.Stage{Op: o.Info().Op, Plan: j.plan, Memory: memory, Combine: j.red.Combine, Timeout: o.Left() + later}
	j.results = make([]atomic.Bool, j.plan.Chunks)
	s.Result = func(k int) {
		j.divide(k, memory)
		j.results[k].Store(true)
		ended(k)
	}
	j.network, err = j.g.Network.Stage(o.Ctx, s)
	return err
}

// divide ends the reduction of what a chunk's steps have for this rank.
func (j *job) divide(chunk int, memory func(i int) []byte) {
	if j.red.After == nil {
		return
	}
	for i := range j.plan.Steps {
		s := &j.plan.Steps[i]
		if s.Stage == cluster.Between && !s.Finish && s.Chunk == chunk && j.written(s) {
			j.red.After(memory(i))
		}
	}
}

// read and written say what a step between clusters does with this rank's memory.
func (j *job) read(s *cluster.Step) bool {
	return s.Op.Reduces() || s.Ranks[s.Root] == j.g.B.Rank
}

func (j *job) written(s *cluster.Step) bool {
	return s.Op == plan.OpAllReduce || s.Op.Reduces() == (s.Ranks[s.Root] == j.g.B.Rank)
}

// end waits until nobody uses the memory any more, and returns the error of the operation. err is this
// rank's own, nil if it has none.
func (j *job) end(err error) error {
	if j.network == nil {
		return err
	}
	if err != nil && !errors.Is(err, errNetwork) {
		j.network.Abort(j.o.B.Named(j.o.Info(), err, func() string { return "" }))
	}
	if ended := j.network.Wait(context.Background()); ended != nil && (err == nil || errors.Is(err, errNetwork)) {
		return ended
	}
	return err
}

// errNetwork stands for the error of the network's part.
var errNetwork = errors.New("the stage between clusters has failed")

// turn waits until a turn is the host's, that of the chunk with step i. The wait ends early with the operation,
// with the network's part, and when lost, which may be nil, returns an error.
func (j *job) turn(lost func() error, i, turn int) error {
	return j.o.Begin(group.Asks(func() error {
		if j.network.IsCompleted() && j.network.Err() != nil {
			return errNetwork
		}
		if err := j.o.AskDriver(); err != nil {
			if errors.Is(err, work.ErrTimeout) && j.owed(i) {
				return nil
			}
			return err
		}
		if lost == nil {
			return nil
		}
		return lost()
	}), turn)
}

// owed reports whether the network has not ended a chunk that comes before a step. Then it is the network that
// the device waits for, and says so.
func (j *job) owed(step int) bool {
	for i := range step {
		if s := &j.plan.Steps[i]; s.Finish && !j.results[s.Chunk].Load() {
			return true
		}
	}
	return false
}

// at names a step in an error.
func (j *job) at(i int, err error) error {
	s := &j.plan.Steps[i]
	return fmt.Errorf("step %d of %d (%v, chunk %d): %w", i+1, len(j.plan.Steps), s.Stage, s.Chunk, err)
}
