package gloo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: Name, Op: op, What: fmt.Sprintf(format, args...)}
}

// dense checks a strided tensor in CPU memory.
func dense(op work.OpType, name string, t *tensor.Tensor) error {
	switch {
	case t == nil:
		return bad(op, "%s is nil", name)
	case t.Layout() != tensor.Strided:
		return bad(op, "only supports dense tensors, %s is %v", name, t)
	case t.Device().Type != tensor.CPU:
		return bad(op, "unsupported device type %v of %s", t.Device().Type, name)
	}
	return nil
}

// like checks that every tensor of a list is dense and of one dtype and shape.
func like(op work.OpType, name string, want *tensor.Tensor, ts []*tensor.Tensor) error {
	for i, t := range ts {
		if dense(op, name, t) != nil {
			return dense(op, numbered(name, i), t)
		}
		if t.DType() != want.DType() {
			return bad(op, "invalid tensor type at index %d of %s (expected %v, got %v)", i, name, want.DType(), t.DType())
		}
		if !t.SameShape(want) {
			return bad(op, "invalid tensor size at index %d of %s (expected %v, got %v)", i, name, want.Shape(), t.Shape())
		}
	}
	return nil
}

// numbered returns the name of a tensor in a list, whose name is a plural.
func numbered(list string, i int) string {
	return fmt.Sprintf("%s %d", strings.TrimSuffix(list, "s"), i)
}

// typed checks that every tensor of a list is dense and of one dtype; shapes may differ.
func typed(op work.OpType, name string, d tensor.DType, ts []*tensor.Tensor) error {
	for i, t := range ts {
		if dense(op, name, t) != nil {
			return dense(op, numbered(name, i), t)
		}
		if t.DType() != d {
			return bad(op, "invalid tensor type at index %d of %s (expected %v, got %v)", i, name, d, t.DType())
		}
	}
	return nil
}

// overlap checks that a call's tensors share memory only where they may.
func (b *Backend) overlap(op work.OpType, out, in []*tensor.Tensor) error {
	if err := backend.CheckMemory(op, b.rank, out, in); err != nil {
		return bad(op, "%v", err)
	}
	return nil
}

func (b *Backend) root(op work.OpType, root int) error {
	if root < 0 || root >= b.size {
		return bad(op, "invalid root rank: %d (the group has %d ranks)", root, b.size)
	}
	return nil
}

func (b *Backend) listed(op work.OpType, name string, n int) error {
	if n != b.size {
		return bad(op, "invalid %s tensor list (expected length %d, got %d)", name, b.size, n)
	}
	return nil
}

// parts checks that dimension 0 of whole is size times that of part, and that their other
// dimensions are equal. whole may also have the shape [size, part...].
func (b *Backend) parts(op work.OpType, whole, part *tensor.Tensor) error {
	if whole.DType() != part.DType() {
		return bad(op, "dtypes differ: %v and %v", whole.DType(), part.DType())
	}
	w, p := whole.Shape(), part.Shape()
	joined := len(p) > 0 && len(w) == len(p) && w[0] == p[0]*b.size && slices.Equal(w[1:], p[1:])
	if !joined && (len(w) == 0 || w[0] != b.size || !slices.Equal(w[1:], p)) {
		return bad(op, "shape %v is not shape %v times %d along dimension 0, and not %[3]d of them stacked", w, p, b.size)
	}
	return nil
}

// reduction makes the operator ready for a dtype.
func (b *Backend) reduction(op work.OpType, r backend.ReduceOp, d tensor.DType) (backend.Reduction, error) {
	red, err := r.Reduction(d, b.size)
	if err != nil {
		return red, bad(op, "%v", err)
	}
	return red, nil
}
