package run

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/bytesize"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// arenas returns the memory in which Alloc allocates, nil if that is ordinary memory.
func (s *session) arenas() *shm.Group {
	g := s.Memory
	if g == nil || g.WhyNoArenas() != "" {
		return nil
	}
	return g
}

// Alloc returns a contiguous CPU tensor of zeros in memory that all ranks of the host see.
// Collectives and messages then read its data in place: they need no staging copy, and no copy by
// the kernel.
//
// Alloc is a collective: all ranks call it, in the same order as other collectives. It waits for
// the collectives that this rank has called before. Shape and dtype may differ between ranks. If
// one rank has no room, all return an error that matches backend.ErrExhausted, and the group stays usable.
//
// Where ranks do not share memory, Alloc returns ordinary memory, and operations work the same.
// Explain says which it is.
//
// The garbage collector does not free this memory. It stays until Free, also after Close.
func (b *Group) Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error) {
	const op = work.Barrier // c10d has no number for it
	n, err := byteLen(dtype, shape)
	if err != nil {
		return nil, err
	}
	var buf []byte
	var full error
	g := b.arenas()
	q := &operation{print: fingerprint{op: opAlloc, root: -1}.call()}
	q.run = func(e *engine) error {
		if g == nil {
			return nil
		}
		got, err := g.Alloc(n, e.stop)
		if errors.Is(err, shm.ErrExhausted) {
			full = err
			return nil
		}
		buf = got
		return e.shared(err)
	}
	if b.Shared == nil && b.Clusters == nil {
		// Ranks of PyTorch, which may be in the group, do not know of this call.
		if err := b.admit(ctx, op); err != nil {
			return nil, err
		}
		b.mu.Unlock()
		return tensor.New(dtype, shape...)
	}
	w, err := b.issue(ctx, op, 0, prefixBarrier, 1, 0, q)
	if err == nil {
		err = w.Wait(ctx)
	}
	if err == nil && full != nil {
		err = fmt.Errorf("gloo: Alloc of %d bytes: %w: %w", n, backend.ErrExhausted, full)
	}
	if err != nil {
		return nil, err
	}
	if g == nil {
		return tensor.New(dtype, shape...)
	}
	return tensor.FromBytes(dtype, buf, shape...)
}

// byteLen returns how many bytes a tensor takes, or what is wrong with its shape.
func byteLen(dtype tensor.DType, shape []int) (int, error) {
	n, most := 1, math.MaxInt
	if dtype.Valid() {
		n = dtype.Size()
	}
	for _, d := range shape {
		if d == 0 {
			n = 0
		}
	}
	for _, d := range shape {
		if n > 0 && (d < 0 || d > most/n) {
			n = -1
			break
		}
		n *= d
	}
	if n <= 0 || !dtype.Valid() {
		// It is empty, or wrong, which the package tensor can say best.
		_, err := tensor.FromBytes(dtype, nil, shape...)
		return 0, err
	}
	return n, nil
}

// Free gives back the memory of a tensor from Alloc. After it, do not use the tensor, its views, or
// slices of its elements. No operation with the tensor may be under way on this rank. Free waits
// for nobody and may be called after Close. For a tensor in ordinary memory it does nothing.
func (b *Group) Free(t *tensor.Tensor) error {
	if t == nil {
		return errors.New("gloo: Free of no tensor")
	}
	g := b.arenas()
	if g == nil || t.Len() == 0 {
		return nil
	}
	if err := g.Free(t.Bytes()); err != nil {
		return fmt.Errorf("gloo: Free of %v: %w", t, err)
	}
	return nil
}

// explainAlloc says where tensors of Alloc are, and which operations gain.
func (b *Group) explainAlloc() backend.Choice {
	c := backend.Choice{Op: "alloc", UpTo: -1, Algorithm: "ordinary memory", Why: "the ranks do not share any"}
	g := b.Memory
	switch {
	case g == nil:
		return c
	case g.WhyNoArenas() != "":
		c.Why = "no shared memory to allocate in: " + g.WhyNoArenas()
		return c
	}
	c.Algorithm = "shared memory"
	l := g.MappedLimits()
	var from []string
	for _, op := range []struct {
		name string
		size int64
	}{
		{"all_reduce", l.AllReduce}, {"reduce", l.Reduce}, {"reduce_scatter", l.ReduceScatter}, {"broadcast", l.Broadcast},
		{"all_gather", l.AllGather}, {"uneven all_gather", l.AllGatherV}, {"gather", l.Gather}, {"scatter", l.Scatter},
		{"all_to_all", l.AllToAll}, {"messages", l.Message},
	} {
		if op.size >= 0 {
			from = append(from, op.name+" "+bytesize.Name(op.size))
		}
	}
	c.Why = "all operations copy it"
	if len(from) > 0 {
		c.Why = "the other ranks read it in place, from this size on: " + strings.Join(from, ", ")
	}
	return c
}
