package pg

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// The slice functions are the operations for a program that has its numbers in slices. Each has a
// twin with Async in its name, which returns the Work instead of waiting for it. Until the Work has
// ended, the slices belong to the operation.

// AllReduceSlice combines v with every rank's, in place, and waits.
func AllReduceSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, op backend.ReduceOp) error {
	return await(ctx)(AllReduceSliceAsync(ctx, g, v, op))
}

// AllReduceSliceAsync starts AllReduceSlice. v has the result when the Work has ended.
func AllReduceSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, op backend.ReduceOp) (*work.Work, error) {
	return g.AllReduce(ctx, list(flatTensor(v)), backend.AllReduceOptions{Op: op})
}

// BroadcastSlice overwrites v with rank root's and waits.
func BroadcastSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int) error {
	return await(ctx)(BroadcastSliceAsync(ctx, g, v, root))
}

// BroadcastSliceAsync starts BroadcastSlice. v has the result when the Work has ended.
func BroadcastSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int) (*work.Work, error) {
	return g.Broadcast(ctx, list(flatTensor(v)), backend.BroadcastOptions{Root: root})
}

// ReduceSlice combines v of all ranks into rank root's, and waits. The contents of v on other ranks
// are undefined afterwards.
func ReduceSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int, op backend.ReduceOp) error {
	return await(ctx)(ReduceSliceAsync(ctx, g, v, root, op))
}

// ReduceSliceAsync starts ReduceSlice. Rank root's v has the result when the Work has ended.
func ReduceSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int, op backend.ReduceOp) (*work.Work, error) {
	return g.Reduce(ctx, flatTensor(v), backend.ReduceOptions{Root: root, Op: op})
}

// AllGatherSlice returns every rank's v, one after the other, and waits. All
// have the same length.
func AllGatherSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T) ([]T, error) {
	return awaitSlice[T](ctx)(AllGatherSliceAsync(ctx, g, v))
}

// AllGatherSliceAsync starts AllGatherSlice. The slice that it returns is complete when the Work has
// ended.
func AllGatherSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T) ([]T, *work.Work, error) {
	if !g.IsMember() {
		return nil, nil, ErrNotMember
	}
	out := make([]T, len(v)*g.now().size)
	w, err := g.AllGatherIntoTensor(ctx, flatTensor(out), flatTensor(v), backend.AllGatherOptions{})
	return out, w, err
}

// GatherSlice returns every rank's v on rank root, one after the other, and nil elsewhere. It waits.
// All have the same length.
func GatherSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int) ([]T, error) {
	return awaitSlice[T](ctx)(GatherSliceAsync(ctx, g, v, root))
}

// GatherSliceAsync starts GatherSlice. The slice that it returns on rank root is complete when the
// Work has ended.
func GatherSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, root int) ([]T, *work.Work, error) {
	if !g.IsMember() {
		return nil, nil, ErrNotMember
	}
	var all []T
	var out []*tensor.Tensor
	if e := g.now(); e.rank == root {
		all = make([]T, len(v)*e.size)
		out = cut(all, e.size)
	}
	w, err := g.Gather(ctx, out, flatTensor(v), backend.GatherOptions{Root: root})
	return all, w, err
}

// ScatterSlice cuts rank root's v into as many equal parts as there are ranks, puts part r into
// rank r's out, and waits. Other ranks pass a nil v.
func ScatterSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, out, v []T, root int) error {
	return await(ctx)(ScatterSliceAsync(ctx, g, out, v, root))
}

// ScatterSliceAsync starts ScatterSlice. out has the result when the Work has ended.
func ScatterSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, out, v []T, root int) (*work.Work, error) {
	if !g.IsMember() {
		return nil, ErrNotMember
	}
	var in []*tensor.Tensor
	switch e := g.now(); {
	case e.rank == root && len(v) != len(out)*e.size:
		return nil, fmt.Errorf("pg: ScatterSlice: %d elements are not %d parts of %d, which is the length of out", len(v), e.size, len(out))
	case e.rank == root:
		in = cut(v, e.size)
	case len(v) > 0:
		return nil, fmt.Errorf("pg: ScatterSlice: rank %d passes %d elements to scatter, but the root is rank %d", e.rank, len(v), root)
	}
	return g.Scatter(ctx, flatTensor(out), in, backend.ScatterOptions{Root: root})
}

// ReduceScatterSlice combines part r of all ranks' v, cut into as many equal
// parts as there are ranks, returns it on rank r, and waits.
func ReduceScatterSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, op backend.ReduceOp) ([]T, error) {
	return awaitSlice[T](ctx)(ReduceScatterSliceAsync(ctx, g, v, op))
}

// ReduceScatterSliceAsync starts ReduceScatterSlice. The slice that it returns is complete when the
// Work has ended.
func ReduceScatterSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, op backend.ReduceOp) ([]T, *work.Work, error) {
	if !g.IsMember() {
		return nil, nil, ErrNotMember
	}
	if len(v)%g.now().size != 0 {
		return nil, nil, fmt.Errorf("pg: ReduceScatterSlice: %d elements do not divide into %d parts", len(v), g.now().size)
	}
	out := make([]T, len(v)/g.now().size)
	w, err := g.ReduceScatterTensor(ctx, flatTensor(out), flatTensor(v), backend.ReduceScatterOptions{Op: op})
	return out, w, err
}

// SendSlice sends v to rank dst of the group, with tag 0, and waits.
func SendSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, dst int) error {
	return await(ctx)(SendSliceAsync(ctx, g, v, dst))
}

// SendSliceAsync starts SendSlice.
func SendSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, dst int) (*work.Work, error) {
	return g.Send(ctx, flatTensor(v), dst, backend.P2POptions{})
}

// RecvSlice receives into v from rank src of the group, with tag 0, and waits. v must have the length
// that the sender's has.
func RecvSlice[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, src int) error {
	return await(ctx)(RecvSliceAsync(ctx, g, v, src))
}

// RecvSliceAsync starts RecvSlice. v has the elements when the Work has ended.
func RecvSliceAsync[T tensor.Element](ctx context.Context, g *ProcessGroup, v []T, src int) (*work.Work, error) {
	return g.Recv(ctx, flatTensor(v), src, backend.P2POptions{})
}

// awaitSlice is await for an operation that returns a slice. The slice is nil if it fails.
func awaitSlice[T any](ctx context.Context) func([]T, *work.Work, error) ([]T, error) {
	return func(v []T, w *work.Work, err error) ([]T, error) {
		if err = await(ctx)(w, err); err != nil {
			return nil, err
		}
		return v, nil
	}
}
