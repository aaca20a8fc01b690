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

// Alloc returns zeros in memory that all ranks of the host share, or else in ordinary memory: large operations then make
// no intermediate copy. It is collective; shapes may differ. backend.ErrExhausted leaves the group usable.
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

// Free frees a tensor of Alloc, whose operations must have ended.
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
