package pg

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
)

// AllReduceSlice combines v with every rank's, in place, and waits.
func AllReduceSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, op backend.ReduceOp) error {
	return await(ctx)(g.AllReduce(ctx, list(flatTensor(v)), backend.AllReduceOptions{Op: op}))
}

// BroadcastSlice overwrites v with rank root's and waits.
func BroadcastSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int) error {
	return await(ctx)(g.Broadcast(ctx, list(flatTensor(v)), backend.BroadcastOptions{Root: root}))
}

// AllGatherSlice returns every rank's v, one after the other, and waits. All
// have the same length.
func AllGatherSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T) ([]T, error) {
	if !g.IsMember() {
		return nil, ErrNotMember
	}
	out := make([]T, len(v)*g.now().size)
	err := await(ctx)(g.AllGatherIntoTensor(ctx, flatTensor(out), flatTensor(v), backend.AllGatherOptions{}))
	return out, err
}

// ReduceScatterSlice combines part r of all ranks' v, cut into as many equal
// parts as there are ranks, returns it on rank r, and waits.
func ReduceScatterSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, op backend.ReduceOp) ([]T, error) {
	if !g.IsMember() {
		return nil, ErrNotMember
	}
	if len(v)%g.now().size != 0 {
		return nil, fmt.Errorf("pg: ReduceScatterSlice: %d elements do not divide into %d parts", len(v), g.now().size)
	}
	out := make([]T, len(v)/g.now().size)
	err := await(ctx)(g.ReduceScatterTensor(ctx, flatTensor(out), flatTensor(v), backend.ReduceScatterOptions{Op: op}))
	return out, err
}
