package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Send sends t, past the collectives: from device to device, or once it is on the host.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	return b.message(ctx, work.Send, t, dst, o)
}

// Recv receives into t.
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	return b.message(ctx, work.Recv, t, src, o)
}

// RecvAnySource receives from whoever sends first on the tag.
func (b *Backend) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	return b.message(ctx, work.RecvAnySource, t, -1, o)
}

// message sends or receives. Tags from 2^31 on, which c10d cannot have, are the backend's own.
func (b *Backend) message(ctx context.Context, op work.OpType, t *tensor.Tensor, peer int, o backend.P2POptions) (*work.Work, error) {
	anyone := op == work.RecvAnySource
	if o.Tag >= group.OwnTags {
		return nil, bad(op, "invalid tag %d (want less than 2^31)", o.Tag)
	}
	if err := b.args.Message(op, t, peer); err != nil {
		return nil, err
	}
	one, leg := []*tensor.Tensor{t}, group.From
	var written []*tensor.Tensor
	if op != work.Send {
		written, leg = one, group.To
	}
	// A message goes from device to device if it has the default tag, in a group that may have kernels. The lanes decide
	// then.
	onLane := o.Tag == 0 && b.direct.CanMesh() == nil
	if b.shadows(onLane, one) {
		return b.mix(ctx, op, written, written, [][]*tensor.Tensor{one}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.message(ctx, op, l[0][0], peer, o)
		})
	}
	host := b.onHost(op, peer, o.Tag)
	if !onLane {
		return b.g.Message(ctx, op, o, group.Post{Send: op == work.Send, Peer: peer, Tag: o.Tag}, leg(t), host)
	}
	var from func(src int) directway.HostPost
	if anyone {
		from = func(src int) directway.HostPost { return b.onHost(work.Recv, src, 0) }
	}
	return b.direct.Message(ctx, op, t, peer, o, host, from)
}

// onHost is the CPU backend's part of a message.
func (b *Backend) onHost(op work.OpType, peer int, tag uint32) directway.HostPost {
	return func(q *group.Operation, h *tensor.Tensor) (*work.Work, error) {
		o := backend.P2POptions{Tag: tag, Timeout: q.Left()}
		switch op {
		case work.Send:
			return b.g.CPU.Send(q.Ctx, h, peer, o)
		case work.Recv:
			return b.g.CPU.Recv(q.Ctx, h, peer, o)
		}
		return b.g.CPU.RecvAnySource(q.Ctx, h, o)
	}
}
