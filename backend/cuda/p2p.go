package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// tagged checks a user's tag. Those from 2^31 on, which c10d cannot have, are the
// backend's own.
func tagged(op work.OpType, tag uint32) error {
	if tag >= ownTags {
		return bad(op, "invalid tag %d (want less than 2^31)", tag)
	}
	return nil
}

func (b *Backend) peer(op work.OpType, t *tensor.Tensor, rank int, tag uint32, r role) error {
	if err := tagged(op, tag); err != nil {
		return err
	}
	if rank < 0 || rank >= b.g.size {
		return bad(op, "invalid rank %d (the group has %d ranks)", rank, b.g.size)
	}
	if rank == b.g.rank {
		return bad(op, "rank %d cannot send to or receive from itself", rank)
	}
	return b.dense(op, "tensor", r, t)
}

// Send sends t once it is on the host, past the collectives.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Send, t, dst, o.Tag, input); err != nil {
		return nil, err
	}
	return b.g.message(ctx, work.Send, o, post{true, dst, o.Tag}, from(t), func(q *operation, h *tensor.Tensor) (*work.Work, error) {
		return b.g.cpu.Send(q.ctx, h, dst, backend.P2POptions{Tag: o.Tag, Timeout: q.left()})
	})
}

// Recv receives into t by way of the host.
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Recv, t, src, o.Tag, output); err != nil {
		return nil, err
	}
	return b.g.message(ctx, work.Recv, o, post{false, src, o.Tag}, to(t), func(q *operation, h *tensor.Tensor) (*work.Work, error) {
		return b.g.cpu.Recv(q.ctx, h, src, backend.P2POptions{Tag: o.Tag, Timeout: q.left()})
	})
}

// RecvAnySource receives from whoever sends first on the tag.
func (b *Backend) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	const op = work.RecvAnySource
	if b.g.size == 1 {
		return nil, bad(op, "no other rank is in the group")
	}
	if err := tagged(op, o.Tag); err != nil {
		return nil, err
	}
	if err := b.dense(op, "tensor", output, t); err != nil {
		return nil, err
	}
	return b.g.message(ctx, op, o, post{false, 0, o.Tag}, to(t), func(q *operation, h *tensor.Tensor) (*work.Work, error) {
		return b.g.cpu.RecvAnySource(q.ctx, h, backend.P2POptions{Tag: o.Tag, Timeout: q.left()})
	})
}
