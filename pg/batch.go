package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// P2P is one send or receive of a batch.
type P2P struct {
	Send    *tensor.Tensor // the tensor to send, or
	Recv    *tensor.Tensor // the tensor to receive into
	Peer    int            // rank in the group
	Tag     uint32
	Timeout time.Duration // as in CallOptions
}

// BatchISendIRecv posts sends and receives together.
func (g *ProcessGroup) BatchISendIRecv(ctx context.Context, ops []P2P) ([]*work.Work, error) {
	if len(ops) == 0 {
		return nil, errors.New("pg: BatchISendIRecv: no operations")
	}
	var room [2][8]*tensor.Tensor
	received, sent := room[0][:0], room[1][:0]
	for i, op := range ops {
		if (op.Send == nil) == (op.Recv == nil) {
			return nil, fmt.Errorf("pg: BatchISendIRecv: operation %d needs either Send or Recv", i)
		}
		if _, err := g.GlobalRank(op.Peer); err != nil {
			return nil, fmt.Errorf("pg: BatchISendIRecv: operation %d: %w", i, err)
		}
		received, sent = append(received, op.Recv), append(sent, op.Send)
	}
	if err := backend.CheckMemory(work.Coalesced, g.Rank(), received, sent); err != nil {
		return nil, fmt.Errorf("pg: BatchISendIRecv: %w: %w", backend.ErrInvalidArgument, err)
	}
	if w, err := g.batch(ctx, ops); err != nil {
		return nil, err
	} else if w != nil {
		return slices.Repeat([]*work.Work{w}, len(ops)), nil
	}
	works := make([]*work.Work, 0, len(ops))
	for i, op := range ops {
		post, t := g.Send, op.Send
		if t == nil {
			post, t = g.Recv, op.Recv
		}
		w, err := post(ctx, t, op.Peer, P2POptions{Tag: op.Tag, Timeout: op.Timeout})
		if err != nil {
			return works, fmt.Errorf("pg: BatchISendIRecv: operation %d: %w", i, err)
		}
		works = append(works, w)
	}
	return works, nil
}

// batch starts all at once if the group's backend needs that, and else returns nil.
func (g *ProcessGroup) batch(ctx context.Context, ops []P2P) (*work.Work, error) {
	b, err := g.of(work.Coalesced, cmp.Or(ops[0].Send, ops[0].Recv))
	if err != nil {
		return nil, err
	}
	all, ok := unchecked(b).(backend.Batcher)
	if !ok {
		return nil, nil
	}
	ms, ts, limit := make([]backend.P2P, len(ops)), make([]*tensor.Tensor, len(ops)), time.Duration(0)
	for i, op := range ops {
		ms[i] = backend.P2P{Send: op.Send, Recv: op.Recv, Peer: op.Peer, P2POptions: backend.P2POptions{Tag: op.Tag, Timeout: op.Timeout}}
		ts[i], limit = cmp.Or(op.Send, op.Recv), max(limit, op.Timeout)
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Coalesced, ts, ts, -1, limit)
	return c.Issued(all.Batch(ctx, ms))
}

// Coalescer issues operations of one kind and operator as one, as c10d does.
type Coalescer struct {
	g       *ProcessGroup
	kind    work.OpType
	op      ReduceOp
	out, in []*tensor.Tensor
	err     error
}

// Coalesce returns a collector of operations on g. Nothing is sent before End.
func (g *ProcessGroup) Coalesce() *Coalescer { return &Coalescer{g: g, kind: work.Unknown} }

func (c *Coalescer) add(kind work.OpType, op ReduceOp, out, in *tensor.Tensor) {
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
func (c *Coalescer) AllReduce(t *tensor.Tensor, op ReduceOp) {
	c.add(work.AllReduce, op, t, nil)
}

// AllGatherIntoTensor adds an all-gather of in into out.
func (c *Coalescer) AllGatherIntoTensor(out, in *tensor.Tensor) {
	c.add(work.AllGatherIntoTensor, ReduceOp{}, out, in)
}

// ReduceScatterTensor adds a reduce-scatter of in into out.
func (c *Coalescer) ReduceScatterTensor(out, in *tensor.Tensor, op ReduceOp) {
	c.add(work.ReduceScatterTensor, op, out, in)
}

// End issues what was collected, and ends the collector.
func (c *Coalescer) End(ctx context.Context) (*work.Work, error) {
	if c.err != nil {
		return nil, c.err
	}
	switch c.kind {
	case work.AllReduce:
		return c.g.AllReduceCoalesced(ctx, c.out, c.op)
	case work.AllGatherIntoTensor:
		return c.g.AllGatherIntoTensorCoalesced(ctx, c.out, c.in)
	case work.ReduceScatterTensor:
		return c.g.ReduceScatterTensorCoalesced(ctx, c.out, c.in, c.op)
	}
	return nil, errors.New("pg: Coalesce: nothing was collected")
}
