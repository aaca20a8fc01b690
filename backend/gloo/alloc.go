package gloo

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ErrExhausted is matched by the error of Alloc, on all ranks that share memory, when one of
// them has no room left for it.
var ErrExhausted = shm.ErrExhausted

// arenas returns what Alloc allocates in, nil if that is ordinary memory.
func (s *session) arenas() *shm.Group {
	g := s.memory()
	if g == nil || g.WhyNoArenas() != "" {
		return nil
	}
	return g
}

// Alloc returns a contiguous CPU tensor of zeros, in memory that the other ranks of the host
// see: collectives and messages that would stage its data, or have the kernel copy
// them, take them where they are. It is collective: all ranks call it, in the same order as
// other collectives, and it waits for those of this rank that came before. The shape may
// differ from rank to rank, and so may the dtype. An error that matches
// ErrExhausted says that some rank has no room, and leaves the group as it was.
//
// Where ranks do not share memory it is ordinary memory, and all works the same;
// [Backend.Explain] says which it is.
//
// The memory is not the garbage collector's. It stays, after Close too, until Free.
func (b *Backend) Alloc(ctx context.Context, dtype tensor.DType, shape ...int) (*tensor.Tensor, error) {
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
		if errors.Is(err, ErrExhausted) {
			full = err
			return nil
		}
		buf = got
		return e.shared(err)
	}
	if b.shared == nil && b.levels == nil {
		// Ranks of PyTorch, which may be in the group, do not know of this call.
		if err := b.admit(ctx, op, q); err != nil {
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
		err = fmt.Errorf("gloo: Alloc of %d bytes: %w", n, full)
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

// Free gives back the memory of a tensor from Alloc, which neither it nor its views, nor
// slices of its elements, may be used for any more. No operation with it may be
// under way on this rank. It waits for nobody, and may be called after Close. Where
// tensors of Alloc are in ordinary memory it does nothing.
func (b *Backend) Free(t *tensor.Tensor) error {
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

// explainAlloc says where tensors of Alloc are, and what for.
func (b *Backend) explainAlloc() backend.Choice {
	c := backend.Choice{Op: "alloc", UpTo: -1, Algorithm: "ordinary memory", Why: "the ranks do not share any"}
	g := b.memory()
	switch {
	case g == nil:
		return c
	case g.WhyNoArenas() != "":
		c.Why = "no shared memory to allocate in: " + g.WhyNoArenas()
		return c
	}
	c.Algorithm, c.Why = "shared memory", "the others take what is there where it is, from so many bytes on:"
	l := g.MappedLimits()
	var from []string
	for _, op := range plan.Ops() {
		if n := limitOf(l, op); n >= 0 {
			from = append(from, fmt.Sprintf(" %v %d", op, n))
		}
	}
	if l.Message >= 0 {
		from = append(from, fmt.Sprintf(" messages %d", l.Message))
	}
	c.Why += strings.Join(from, ",")
	return c
}
