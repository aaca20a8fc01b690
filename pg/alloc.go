package pg

import (
	"context"
	"errors"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/tensor"
)

// allocator is a backend that has memory of its own for tensors.
type allocator interface {
	Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error)
	Free(t *tensor.Tensor) error
}

// allocatorOf returns what is behind b, nil if it has no memory.
func allocatorOf(b backend.Backend) allocator {
	if d, ok := b.(*detail.Backend); ok {
		b = d.Backend // there is nothing to compare
	}
	a, _ := b.(allocator)
	return a
}

// Alloc returns a contiguous CPU tensor of zeros in memory that the other ranks of
// the host see, for operations of this group: large ones then copy or reduce straight out of it,
// with no system call and no copy in between. Operations with other tensors, or with some
// of each, work as ever. NCCL calls such memory symmetric windows, PyTorch symmetric
// memory.
//
// It is collective: all ranks call it, in the same order as other collectives, and
// it returns when all have. Shapes and dtypes may differ from rank to rank. An error that
// matches gloo.ErrExhausted says that a rank has no room left, and changes nothing;
// others end the group, as those of any operation.
//
// Where ranks share no memory, and with backends that have none of their own, the tensor is in
// ordinary memory. [ProcessGroup.Explain] says which, under "alloc".
//
// The garbage collector does not know the memory, so that slices of the elements (Data, Bytes)
// cannot keep it: it stays until [ProcessGroup.Free], after Close too.
func (g *ProcessGroup) Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error) {
	b, err := g.Backend(tensor.CPU)
	if err != nil {
		return nil, err
	}
	if a := allocatorOf(b); a != nil {
		return a.Alloc(ctx, dtype, shape...)
	}
	return tensor.New(dtype, shape...)
}

// Free gives back the memory of a tensor from Alloc: t as it was returned, or a view of all of
// its elements. Neither that memory nor views and slices of it may be used afterwards;
// operations with it must have ended on this rank. It is not collective, and may be called
// after Close. A tensor whose memory is ordinary is left to the garbage collector.
func (g *ProcessGroup) Free(t *tensor.Tensor) error {
	if g.rank < 0 {
		return ErrNotMember
	}
	if t == nil {
		return errors.New("pg: Free of no tensor")
	}
	if a := allocatorOf(g.backends[tensor.CPU]); a != nil {
		return a.Free(t)
	}
	return nil
}
