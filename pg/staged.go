package pg

import (
	"context"
	"errors"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Objects are bytes in CPU memory. In a group without a backend for that, they go through the memory of a device.

// stager returns the backend that does so, nil if the group needs none.
func (g *epoch) stager() backend.Stager {
	if g.forCPU != nil || len(g.distinct) == 0 {
		return nil
	}
	s, _ := unchecked(g.distinct[0]).(backend.Stager)
	return s
}

// staged waits for an operation on tensors in CPU memory.
func (g *ProcessGroup) staged(ctx context.Context, out, in []*tensor.Tensor, f func(out, in []*tensor.Tensor) (*work.Work, error)) error {
	s := g.now().stager()
	if s == nil {
		return Wait(f(out, in))
	}
	on, back, free, err := s.Stage(ctx, append(slices.Clone(out), in...))
	if err != nil {
		return err
	}
	if err = Wait(f(on[:len(out)], on[len(out):])); err == nil {
		err = back(len(out))
	}
	return errors.Join(err, free())
}

func (g *ProcessGroup) broadcastStaged(ctx context.Context, t *tensor.Tensor, root int) error {
	return g.staged(ctx, list(t), nil, func(out, _ []*tensor.Tensor) (*work.Work, error) { return g.Broadcast(ctx, out[0], root) })
}

func (g *ProcessGroup) scatterStaged(ctx context.Context, t *tensor.Tensor, in []*tensor.Tensor, root int) error {
	return g.staged(ctx, list(t), in, func(out, in []*tensor.Tensor) (*work.Work, error) { return g.Scatter(ctx, out[0], in, root) })
}

func (g *ProcessGroup) sendStaged(ctx context.Context, t *tensor.Tensor, dst int) error {
	return g.staged(ctx, nil, list(t), func(_, in []*tensor.Tensor) (*work.Work, error) { return g.Send(ctx, in[0], dst) })
}

func (g *ProcessGroup) recvStaged(ctx context.Context, t *tensor.Tensor, src int) error {
	return g.staged(ctx, list(t), nil, func(out, _ []*tensor.Tensor) (*work.Work, error) { return g.Recv(ctx, out[0], src) })
}
