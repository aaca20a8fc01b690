package pg

import (
	"context"
	"errors"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/detail"
	"github.com/c10d-go/c10d/tensor"
)

// allocator is a backend that allocates tensors.
type allocator interface {
	Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error)
	Free(t *tensor.Tensor) error
}

// allocatorOf returns what is behind b, nil if it has no memory.
func allocatorOf(b backend.Backend) allocator {
	a, _ := unchecked(b).(allocator)
	return a
}

// unchecked returns the backend whose operations b checks, or b if that checks none.
func unchecked(b backend.Backend) backend.Backend {
	if d, ok := b.(*detail.Backend); ok {
		return d.Backend
	}
	return b
}

// Alloc returns a contiguous CPU tensor of zeros in memory that all ranks of the host share.
// Large operations of this group copy or reduce straight out of it, without a system call or an
// intermediate copy. An operation may mix such tensors with ordinary ones. NCCL calls such memory
// symmetric windows, PyTorch symmetric memory.
//
// It is collective: all ranks call it, in the same order as other collectives, and it returns
// when all have. Shapes and dtypes may differ between ranks. An error that matches
// backend.ErrExhausted means that a rank has no room left; the group can be used on. Any other error
// ends the group.
//
// The tensor is in ordinary memory if the ranks share none, or if the backend has no allocator.
// [ProcessGroup.Explain] says which, under "alloc".
//
// The garbage collector does not manage the memory. It stays until [ProcessGroup.Free], even
// after Close. After Reconfigure it is ordinary memory to operations.
func (g *ProcessGroup) Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error) {
	b, err := g.Backend(tensor.CPU)
	if err != nil {
		return nil, err
	}
	if a := allocatorOf(b); a != nil {
		g.now().allocated.Store(true)
		return a.Alloc(ctx, dtype, shape...)
	}
	return tensor.New(dtype, shape...)
}

// Free frees the memory of a tensor from Alloc: t as it was returned, or a contiguous view of all of its
// elements. Operations with it must have ended on this rank, and views and slices of it may not
// be used afterwards. Free is not collective, and may be called after Close. It does nothing for
// a tensor in ordinary memory.
func (g *ProcessGroup) Free(t *tensor.Tensor) error {
	if g.now().rank < 0 {
		return ErrNotMember
	}
	if t == nil {
		return errors.New("pg: Free: the tensor is nil")
	}
	g.mu.Lock()
	all := append(slices.Clone(g.allocators), allocatorOf(g.now().backends[tensor.CPU]))
	g.mu.Unlock()
	var err error // of the one whose memory it is, if none takes it
	freed := false
	for _, a := range all {
		if a == nil {
			continue
		}
		if e := a.Free(t); e != nil {
			err = e
		} else {
			freed = true
		}
	}
	if freed {
		return nil
	}
	return err
}
