package cuda

import (
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: Name, Op: op, What: fmt.Sprintf(format, args...)}
}

// dense checks a strided tensor, in CPU memory or in that of the driver's devices.
func (b *Backend) dense(op work.OpType, name string, t *tensor.Tensor) error {
	if !inCPU(t) {
		return dense(b.g.Driver, b.g.Missing, op, name, t)
	}
	if t.Layout() != tensor.Strided {
		return bad(op, "only supports dense tensors, %s is %v", name, t)
	}
	return nil
}

// overlap checks that a call's tensors share memory only where they may.
func (b *Backend) overlap(op work.OpType, out, in []*tensor.Tensor) error {
	return overlap(op, b.g.Rank, out, in)
}

func overlap(op work.OpType, rank int, out, in []*tensor.Tensor) error {
	if err := backend.CheckMemory(op, rank, out, in); err != nil {
		return bad(op, "%v", err)
	}
	return nil
}

// dense checks a strided tensor in memory of a driver's devices.
func dense(d driver.Driver, missing error, op work.OpType, name string, t *tensor.Tensor) error {
	switch {
	case t == nil:
		return bad(op, "%s is nil", name)
	case t.Layout() != tensor.Strided:
		return bad(op, "only supports dense tensors, %s is %v", name, t)
	case t.Device().Type != tensor.CUDA:
		return bad(op, "unsupported device type %v of %s", t.Device().Type, name)
	case missing != nil:
		return bad(op, "no device for %s: %v", name, missing)
	case t.Device().Index < 0 || t.Device().Index >= d.Count():
		return bad(op, "%s is on %v, the driver %s has %d devices", name, t.Device(), d.Name(), d.Count())
	}
	if _, ok := t.Memory().(interface{ Ptr() driver.Ptr }); !ok {
		return bad(op, "%s lies in a %T, want memory of package driver", name, t.Memory())
	}
	return nil
}

// like checks that every tensor of a list is dense and of one dtype and shape.
func (b *Backend) like(op work.OpType, name string, want *tensor.Tensor, ts []*tensor.Tensor) error {
	if err := b.typed(op, name, want.DType(), ts); err != nil {
		return err
	}
	for i, t := range ts {
		if !t.SameShape(want) {
			return bad(op, "invalid tensor size at index %d of %s (expected %v, got %v)", i, name, want.Shape(), t.Shape())
		}
	}
	return nil
}

// typed checks that every tensor of a list is dense and of one dtype; shapes may differ.
func (b *Backend) typed(op work.OpType, name string, d tensor.DType, ts []*tensor.Tensor) error {
	for i, t := range ts {
		if err := b.dense(op, name, t); err != nil {
			return b.dense(op, fmt.Sprintf("%s %d", strings.TrimSuffix(name, "s"), i), t)
		}
		if t.DType() != d {
			return bad(op, "invalid tensor type at index %d of %s (expected %v, got %v)", i, name, d, t.DType())
		}
	}
	return nil
}

func (b *Backend) root(op work.OpType, root int) error {
	if root < 0 || root >= b.g.Size {
		return bad(op, "invalid root rank: %d (the group has %d ranks)", root, b.g.Size)
	}
	return nil
}

func (b *Backend) listed(op work.OpType, name string, n int) error {
	if n != b.g.Size {
		return bad(op, "invalid %s tensor list (expected length %d, got %d)", name, b.g.Size, n)
	}
	return nil
}

// shares returns the parts of whole, along dimension 0, that belong to the ranks
// and have as many elements as part. whole may also have the ranks as a dimension of its own in front.
func (b *Backend) shares(op work.OpType, whole, part *tensor.Tensor) ([]*tensor.Tensor, error) {
	if whole.DType() != part.DType() {
		return nil, bad(op, "dtypes differ: %v and %v", whole.DType(), part.DType())
	}
	w, p := whole.Shape(), part.Shape()
	joined := len(p) > 0 && len(w) == len(p) && w[0] == p[0]*b.g.Size && slices.Equal(w[1:], p[1:])
	if !joined && (len(w) == 0 || w[0] != b.g.Size || !slices.Equal(w[1:], p)) {
		return nil, bad(op, "shape %v is not shape %v times %d along dimension 0, and not %[3]d of them stacked", w, p, b.g.Size)
	}
	return cut(op, whole, slices.Repeat([]int{w[0] / b.g.Size}, b.g.Size))
}

// cut returns the parts of t along dimension 0.
func cut(op work.OpType, t *tensor.Tensor, splits []int) ([]*tensor.Tensor, error) {
	parts := make([]*tensor.Tensor, len(splits))
	at := 0
	for i, n := range splits {
		part, err := t.Slice(0, at, at+n)
		if err != nil {
			return nil, bad(op, "%v", err)
		}
		parts[i] = part
		at += n
	}
	return parts, nil
}

// splits returns the sizes along dimension 0 of each rank's part of t.
func (b *Backend) splits(op work.OpType, name string, t *tensor.Tensor, splits []int) ([]int, error) {
	if t.Dims() == 0 {
		return nil, bad(op, "%s has no dimension 0 to split", name)
	}
	if len(splits) == 0 {
		if t.Dim(0)%b.g.Size != 0 {
			return nil, bad(op, "Tensor's dim 0 does not divide equally across group size: %s has %d for %d ranks", name, t.Dim(0), b.g.Size)
		}
		return slices.Repeat([]int{t.Dim(0) / b.g.Size}, b.g.Size), nil
	}
	if len(splits) != b.g.Size {
		return nil, bad(op, "Number of tensor splits not equal to group size: %s has %d for %d ranks", name, len(splits), b.g.Size)
	}
	sum := 0
	for i, s := range splits {
		if s < 0 || s > t.Dim(0) {
			return nil, bad(op, "split %d of %s is %d, not within dimension 0 of %d", i, name, s, t.Dim(0))
		}
		sum += s
	}
	if sum != t.Dim(0) {
		return nil, bad(op, "Split sizes doesn't match total dim 0 size: %s has %d, the splits sum to %d", name, t.Dim(0), sum)
	}
	return slices.Clone(splits), nil
}

// reduction checks an operator for a dtype.
func (b *Backend) reduction(op work.OpType, r backend.ReduceOp, d tensor.DType) error {
	if _, err := r.Reduction(d, b.g.Size); err != nil {
		return bad(op, "%v", err)
	}
	return nil
}
