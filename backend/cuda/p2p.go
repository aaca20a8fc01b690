package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// tagged checks a user's tag. Those from 2^31 on, which c10d cannot have, are the
// backend's own.
func tagged(op work.OpType, tag uint32) error {
	if tag >= group.OwnTags {
		return bad(op, "invalid tag %d (want less than 2^31)", tag)
	}
	return nil
}

func (b *Backend) peer(op work.OpType, t *tensor.Tensor, rank int, tag uint32) error {
	if err := tagged(op, tag); err != nil {
		return err
	}
	if rank < 0 || rank >= b.g.Size {
		return bad(op, "invalid rank %d (the group has %d ranks)", rank, b.g.Size)
	}
	if rank == b.g.Rank {
		return bad(op, "rank %d cannot send to or receive from itself", rank)
	}
	return b.dense(op, "tensor", t)
}

// onLane reports whether a message may go from device to device: the default tag, in a group that may have
// kernels. The lanes decide then.
func (b *Backend) onLane(o backend.P2POptions) bool {
	return o.Tag == 0 && b.direct.CanMesh() == nil
}

// Send sends t, past the collectives: from device to device, or once it is on the host.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Send, t, dst, o.Tag); err != nil {
		return nil, err
	}
	if one := []*tensor.Tensor{t}; b.shadows(b.onLane(o), one) {
		return b.mix(ctx, work.Send, nil, nil, [][]*tensor.Tensor{one}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.Send(ctx, l[0][0], dst, o)
		})
	}
	f := func(q *group.Operation, h *tensor.Tensor) (*work.Work, error) {
		return b.g.CPU.Send(q.Ctx, h, dst, backend.P2POptions{Tag: o.Tag, Timeout: q.Left()})
	}
	if b.onLane(o) {
		return b.direct.Send(ctx, t, dst, o, f)
	}
	return b.g.Message(ctx, work.Send, o, group.Post{Send: true, Peer: dst, Tag: o.Tag}, group.From(t), f)
}

// Recv receives into t.
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Recv, t, src, o.Tag); err != nil {
		return nil, err
	}
	if err := b.args.Overlap(work.Recv, []*tensor.Tensor{t}, nil); err != nil {
		return nil, err
	}
	if one := []*tensor.Tensor{t}; b.shadows(b.onLane(o), one) {
		return b.mix(ctx, work.Recv, one, one, [][]*tensor.Tensor{one}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.Recv(ctx, l[0][0], src, o)
		})
	}
	f := b.fromHost(src, o.Tag)
	if b.onLane(o) {
		return b.direct.Recv(ctx, t, src, o, f)
	}
	return b.g.Message(ctx, work.Recv, o, group.Post{Peer: src, Tag: o.Tag}, group.To(t), f)
}

// fromHost receives from a rank through the host.
func (b *Backend) fromHost(src int, tag uint32) directway.HostPost {
	return func(q *group.Operation, h *tensor.Tensor) (*work.Work, error) {
		return b.g.CPU.Recv(q.Ctx, h, src, backend.P2POptions{Tag: tag, Timeout: q.Left()})
	}
}

// RecvAnySource receives from whoever sends first on the tag.
func (b *Backend) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	const op = work.RecvAnySource
	if b.g.Size == 1 {
		return nil, bad(op, "no other rank is in the group")
	}
	if err := tagged(op, o.Tag); err != nil {
		return nil, err
	}
	if err := b.dense(op, "tensor", t); err != nil {
		return nil, err
	}
	if err := b.args.Overlap(op, []*tensor.Tensor{t}, nil); err != nil {
		return nil, err
	}
	if one := []*tensor.Tensor{t}; b.shadows(b.onLane(o), one) {
		return b.mix(ctx, op, one, one, [][]*tensor.Tensor{one}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.RecvAnySource(ctx, l[0][0], o)
		})
	}
	f := func(q *group.Operation, h *tensor.Tensor) (*work.Work, error) {
		return b.g.CPU.RecvAnySource(q.Ctx, h, backend.P2POptions{Tag: o.Tag, Timeout: q.Left()})
	}
	if b.onLane(o) {
		return b.direct.RecvAny(ctx, t, o, f, func(src int) directway.HostPost { return b.fromHost(src, 0) })
	}
	return b.g.Message(ctx, op, o, group.Post{Tag: o.Tag}, group.To(t), f)
}
