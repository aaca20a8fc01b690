package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// P2P is one send or receive of a batch.
type P2P struct {
	Op      work.OpType // work.Send or work.Recv
	Tensor  *tensor.Tensor
	Peer    int // rank in the group
	Options backend.P2POptions
}

// BatchISendIRecv posts sends and receives together, so two ranks can exchange tensors without
// agreeing on which sends first. It returns one Work for each. A batch whose tensors share memory where they must
// not (see backend.CheckMemory) is refused as a whole. When another operation is refused, it
// returns the error and the works of the operations before it, which are under way.
func (g *ProcessGroup) BatchISendIRecv(ctx context.Context, ops []P2P) ([]*work.Work, error) {
	if len(ops) == 0 {
		return nil, errors.New("pg: BatchISendIRecv: no operations")
	}
	var room [2][8]*tensor.Tensor
	received, sent := room[0][:0], room[1][:0]
	for i, op := range ops {
		if op.Op != work.Send && op.Op != work.Recv {
			return nil, fmt.Errorf("pg: BatchISendIRecv: operation %d is %v, not send or recv", i, op.Op)
		}
		if _, err := g.GlobalRank(op.Peer); err != nil {
			return nil, fmt.Errorf("pg: BatchISendIRecv: operation %d: %w", i, err)
		}
		out, in := op.Tensor, (*tensor.Tensor)(nil)
		if op.Op == work.Send {
			out, in = in, out
		}
		received, sent = append(received, out), append(sent, in)
	}
	if err := backend.CheckMemory(work.Coalesced, g.Rank(), received, sent); err != nil {
		return nil, fmt.Errorf("pg: BatchISendIRecv: %w: %w", backend.ErrInvalidArgument, err)
	}
	works := make([]*work.Work, 0, len(ops))
	for i, op := range ops {
		post := g.Send
		if op.Op == work.Recv {
			post = g.Recv
		}
		w, err := post(ctx, op.Tensor, op.Peer, op.Options)
		if err != nil {
			return works, fmt.Errorf("pg: BatchISendIRecv: operation %d: %w", i, err)
		}
		works = append(works, w)
	}
	return works, nil
}

// Coalescer collects operations and issues them as one, c10d's coalescing manager. All must be of
// one kind, and reductions must have one operator. Use it from one goroutine. Coalesce makes one;
// the zero value is not usable.
type Coalescer struct {
	g       *ProcessGroup
	kind    work.OpType
	op      backend.ReduceOp
	out, in []*tensor.Tensor
	err     error
}

// Coalesce returns a collector of operations on g. Nothing is sent before End.
func (g *ProcessGroup) Coalesce() *Coalescer { return &Coalescer{g: g, kind: work.Unknown} }

func (c *Coalescer) add(kind work.OpType, op backend.ReduceOp, out, in *tensor.Tensor) {
	switch {
	case c.err != nil:
	case c.kind == work.Unknown:
		c.kind, c.op = kind, op
	case c.kind != kind:
		c.err = fmt.Errorf("pg: Coalesce: %v among operations of kind %v", kind, c.kind)
	case c.op != op:
		c.err = fmt.Errorf("pg: Coalesce: operator %v among operations with %v", op, c.op)
	}
	c.out, c.in = append(c.out, out), append(c.in, in)
}

// AllReduce adds an all-reduce of t.
func (c *Coalescer) AllReduce(t *tensor.Tensor, op backend.ReduceOp) {
	c.add(work.AllReduce, op, t, nil)
}

// AllGatherIntoTensor adds an all-gather of in into out.
func (c *Coalescer) AllGatherIntoTensor(out, in *tensor.Tensor) {
	c.add(work.AllGatherIntoTensor, backend.ReduceOp{}, out, in)
}

// ReduceScatterTensor adds a reduce-scatter of in into out.
func (c *Coalescer) ReduceScatterTensor(out, in *tensor.Tensor, op backend.ReduceOp) {
	c.add(work.ReduceScatterTensor, op, out, in)
}

// End issues what was collected. The collector cannot be used again. Every
// rank must have collected at least one operation.
func (c *Coalescer) End(ctx context.Context) (*work.Work, error) {
	if c.err != nil {
		return nil, c.err
	}
	switch c.kind {
	case work.AllReduce:
		return c.g.AllReduceCoalesced(ctx, c.out, backend.AllReduceOptions{Op: c.op})
	case work.AllGatherIntoTensor:
		return c.g.AllGatherIntoTensorCoalesced(ctx, c.out, c.in, backend.AllGatherOptions{})
	case work.ReduceScatterTensor:
		return c.g.ReduceScatterTensorCoalesced(ctx, c.out, c.in, backend.ReduceScatterOptions{Op: c.op})
	}
	return nil, errors.New("pg: Coalesce: nothing was collected")
}
