package cuda

import (
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// operation is what the ways need to know of an operation.
type operation struct {
	plan plan.Op // its name in tables of ways

	// block says that bytes in tables are those of one rank's block.
	block bool

	// whole says that a rank knows its own sizes only. So a call goes through the hosts in one piece.
	whole bool

	// wide says that a chunk is spread over all tensors, which all ranks have alike.
	wide bool

	// part returns collective number i of a call, as kernels do it.
	part func(c *call, i int) directway.Part

	// host has the CPU backend do a piece of a call: the same range of elements of all tensors, those that are written
	// first.
	host func(c *call, q *group.Operation, h []*tensor.Tensor) error
}

// operations are the rows of the table, by operation. Tables of ways have no rows for a barrier.
var operations = [work.ReduceScatterTensorCoalesced + 1]operation{
	work.Broadcast:          {plan: plan.OpBroadcast, part: broadcastPart, host: hostBroadcast},
	work.AllReduce:          {plan: plan.OpAllReduce, part: reducePart, host: hostAllReduce},
	work.AllReduceCoalesced: {plan: plan.OpAllReduce, part: reducePart, wide: true, host: hostAllReduceCoalesced},
	work.Reduce:             {plan: plan.OpReduce, part: rootedPart, host: hostReduce},

	work.AllGather:           {plan: plan.OpAllGather, block: true, wide: true, part: gatherPart, host: hostAllGather},
	work.AllGatherIntoTensor: {plan: plan.OpAllGather, block: true, wide: true, part: gatherPart, host: hostAllGather},
	work.AllGatherCoalesced:  {plan: plan.OpAllGather, block: true, wide: true, part: gatherPart, host: hostAllGatherCoalesced},

	work.Gather:  {plan: plan.OpGather, block: true, wide: true, part: rootedPart, host: hostGather},
	work.Scatter: {plan: plan.OpScatter, block: true, wide: true, part: rootedPart, host: hostScatter},

	work.ReduceScatter:                {plan: plan.OpReduceScatter, block: true, wide: true, part: scatterPart, host: hostReduceScatter},
	work.ReduceScatterTensor:          {plan: plan.OpReduceScatter, block: true, wide: true, part: scatterPart, host: hostReduceScatter},
	work.ReduceScatterTensorCoalesced: {plan: plan.OpReduceScatter, block: true, wide: true, part: scatterPart, host: hostReduceScatter},

	work.AllToAll:       {plan: plan.OpAllToAll, whole: true, part: rootedPart, host: hostAllToAll},
	work.AllToAllSingle: {plan: plan.OpAllToAll, whole: true, part: rootedPart, host: hostAllToAll},

	work.Barrier: {part: rootedPart, host: hostBarrier},
}

// combined are the operations whose outputs are inputs too.
func (c *call) combined() bool {
	return c.row().plan == plan.OpAllReduce && len(c.out) > 0 || c.op == work.Reduce
}

// rootedPart is one collective of all tensors.
func rootedPart(c *call, _ int) directway.Part {
	p := directway.Part{Out: c.out, In: c.in, Root: c.root, Uneven: c.uneven, Op: c.reduce}
	switch c.op {
	case work.Reduce:
		p.N = c.tensor().Len()
		if len(c.in) == 0 {
			p.In = c.out
		}
	case work.Gather:
		p.N = c.in[0].Len()
	case work.Scatter:
		p.N = c.out[0].Len()
	}
	return p
}

// broadcastPart has the first tensor first. On the root that is the source.
func broadcastPart(c *call, _ int) directway.Part {
	p := directway.Part{N: c.out[0].Len(), Out: c.ordered(), Root: c.root}
	if c.b.g.Rank == c.root {
		p.In, p.Out = p.Out[:1], p.Out[1:]
	}
	return p
}

// ordered returns the tensors of a broadcast, the first to have the data first.
func (c *call) ordered() []*tensor.Tensor { return slices.Concat(c.out[c.first:], c.out[:c.first]) }

// reducePart is an all-reduce of all tensors, which have one form, or of one tensor of a coalesced call.
func reducePart(c *call, i int) directway.Part {
	ts := c.out
	if c.parts > 0 {
		ts = ts[i : i+1]
	}
	return directway.Part{Out: ts, In: ts, N: ts[0].Len(), Op: c.reduce}
}

// gatherPart is an all-gather of input i. Rank r's is to be in out[r*parts+i].
func gatherPart(c *call, i int) directway.Part {
	p := directway.Part{Out: c.out, In: c.in, N: c.in[i].Len(), Uneven: c.uneven}
	if n := len(c.in); n > 1 {
		p.Out, p.In = make([]*tensor.Tensor, c.b.g.Size), c.in[i:i+1]
		for r := range p.Out {
			p.Out[r] = c.out[r*n+i]
		}
	}
	return p
}

// scatterPart is a reduce-scatter into out[i], whose inputs are in[i*size:].
func scatterPart(c *call, i int) directway.Part {
	in := c.in[i*c.b.g.Size : (i+1)*c.b.g.Size]
	return directway.Part{Out: c.out[i : i+1], In: in, N: c.out[i].Len(), Op: c.reduce, Uneven: c.uneven}
}

func hostBroadcast(c *call, q *group.Operation, h []*tensor.Tensor) error {
	return q.Wait(c.b.g.CPU.Broadcast(q.Ctx, h, backend.BroadcastOptions{Root: c.root, Timeout: q.Left()}))
}

func hostAllReduce(c *call, q *group.Operation, h []*tensor.Tensor) error {
	return q.Wait(c.b.g.CPU.AllReduce(q.Ctx, h, backend.AllReduceOptions{Op: c.reduce, Timeout: q.Left()}))
}

func hostAllReduceCoalesced(c *call, q *group.Operation, h []*tensor.Tensor) error {
	return q.Wait(c.b.g.CPU.AllReduceCoalesced(q.Ctx, h, backend.AllReduceOptions{Op: c.reduce, Timeout: q.Left()}))
}

func hostReduce(c *call, q *group.Operation, h []*tensor.Tensor) error {
	return q.Wait(c.b.g.CPU.Reduce(q.Ctx, h[0], backend.ReduceOptions{Op: c.reduce, Root: c.root, Timeout: q.Left()}))
}

// hostAllGather takes outputs of all sizes: that is the general case.
func hostAllGather(c *call, q *group.Operation, h []*tensor.Tensor) error {
	n := c.b.g.Size
	return q.Wait(c.b.g.CPU.AllGatherV(q.Ctx, h[:n], h[n], backend.AllGatherOptions{Timeout: q.Left()}))
}

func hostAllGatherCoalesced(c *call, q *group.Operation, h []*tensor.Tensor) error {
	n := len(c.in)
	lists := slices.Collect(slices.Chunk(h[:c.b.g.Size*n], n))
	return q.Wait(c.b.g.CPU.AllGatherCoalesced(q.Ctx, lists, h[c.b.g.Size*n:], backend.AllGatherOptions{Timeout: q.Left()}))
}

func hostGather(c *call, q *group.Operation, h []*tensor.Tensor) error {
	f := c.b.g.CPU.Gather
	if c.uneven {
		f = c.b.g.CPU.GatherV
	}
	last := len(h) - 1
	return q.Wait(f(q.Ctx, h[:last], h[last], backend.GatherOptions{Root: c.root, Timeout: q.Left()}))
}

func hostScatter(c *call, q *group.Operation, h []*tensor.Tensor) error {
	return q.Wait(c.b.g.CPU.Scatter(q.Ctx, h[0], h[1:], backend.ScatterOptions{Root: c.root, Timeout: q.Left()}))
}

func hostReduceScatter(c *call, q *group.Operation, h []*tensor.Tensor) error {
	n, size := len(c.out), c.b.g.Size
	for i := range n {
		in := h[n+i*size : n+(i+1)*size]
		if err := q.Wait(c.b.g.CPU.ReduceScatter(q.Ctx, h[i], in, backend.ReduceScatterOptions{Op: c.reduce, Timeout: q.Left()})); err != nil {
			return err
		}
	}
	return nil
}

func hostAllToAll(c *call, q *group.Operation, h []*tensor.Tensor) error {
	n := c.b.g.Size
	return q.Wait(c.b.g.CPU.AllToAll(q.Ctx, h[:n], h[n:], backend.AllToAllOptions{Timeout: q.Left()}))
}

func hostBarrier(c *call, q *group.Operation, _ []*tensor.Tensor) error {
	return q.Wait(c.b.g.CPU.Barrier(q.Ctx, backend.BarrierOptions{Timeout: q.Left()}))
}
