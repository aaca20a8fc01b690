package cuda

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: Name, Op: op, What: fmt.Sprintf(format, args...)}
}

// role is what a tensor is for in an operation.
type role int

const (
	input  role = iota
	output      // written, so its elements must not overlap
)

// dense checks a strided tensor in memory of the driver's devices.
func (b *Backend) dense(op work.OpType, name string, r role, t *tensor.Tensor) error {
	return dense(b.driver, b.missing, op, name, r, t)
}

func dense(d driver.Driver, missing error, op work.OpType, name string, r role, t *tensor.Tensor) error {
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
	case r == output && t.HasOverlap():
		return bad(op, "elements of %s (%v with strides %v) overlap in memory", name, t, t.Strides())
	}
	if _, ok := t.Memory().(interface{ Ptr() driver.Ptr }); !ok {
		return bad(op, "%s lies in a %T, want memory of package driver", name, t.Memory())
	}
	return nil
}

// like checks that every tensor of a list is dense and of one dtype and shape.
func (b *Backend) like(op work.OpType, name string, r role, want *tensor.Tensor, ts []*tensor.Tensor) error {
	if err := b.typed(op, name, r, want.DType(), ts); err != nil {
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
func (b *Backend) typed(op work.OpType, name string, r role, d tensor.DType, ts []*tensor.Tensor) error {
	for i, t := range ts {
		if err := b.dense(op, name, r, t); err != nil {
			return b.dense(op, fmt.Sprintf("%s tensor %d", name, i), r, t)
		}
		if t.DType() != d {
			return bad(op, "invalid tensor type at index %d of %s (expected %v, got %v)", i, name, d, t.DType())
		}
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

// shares returns the parts of whole, along dimension 0, that belong to the ranks
// and have as many elements as part. With orStacked whole may also have the
// ranks as a dimension of its own in front.
func (b *Backend) shares(op work.OpType, whole, part *tensor.Tensor, orStacked bool) ([]*tensor.Tensor, error) {
	if whole.DType() != part.DType() {
		return nil, bad(op, "dtypes differ: %v and %v", whole.DType(), part.DType())
	}
	w, p := whole.Shape(), part.Shape()
	ok := len(p) > 0 && len(w) == len(p) && w[0] == p[0]*b.size && slices.Equal(w[1:], p[1:])
	if !ok && orStacked {
		ok = len(w) == len(p)+1 && w[0] == b.size && slices.Equal(w[1:], p)
	}
	if !ok {
		return nil, bad(op, "shape %v is not shape %v times %d along dimension 0", w, p, b.size)
	}
	return cut(op, whole, slices.Repeat([]int{w[0] / b.size}, b.size))
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
		if t.Dim(0)%b.size != 0 {
			return nil, bad(op, "Tensor's dim 0 does not divide equally across group size: %s has %d for %d ranks", name, t.Dim(0), b.size)
		}
		return slices.Repeat([]int{t.Dim(0) / b.size}, b.size), nil
	}
	if len(splits) != b.size {
		return nil, bad(op, "Number of tensor splits not equal to group size: %s has %d for %d ranks", name, len(splits), b.size)
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
	if _, err := r.Reduction(d, b.size); err != nil {
		return bad(op, "%v", err)
	}
	return nil
}

// span is a range of bytes of a storage.
type span struct{ off, n int }

// place is where the elements of a tensor lie.
type place struct {
	t      *tensor.Tensor
	dev    int
	base   driver.Ptr    // of the storage
	lo, hi int           // the bytes between which the elements lie
	holes  []span        // what they take of these, in order; nil if they take all
	flat   bool          // one after the other, in row-major order
	stream driver.Stream // that the caller uses it with; may be nil

	down, up driver.Stream // to the host and from there, once the operation has them

	of *place // where the tensor is, if the place is not the tensor's own
}

// placeOf returns the place of a tensor that dense has checked.
func placeOf(t *tensor.Tensor) *place {
	m := t.Memory()
	p := &place{t: t, dev: t.Device().Index, base: m.(interface{ Ptr() driver.Ptr }).Ptr()}
	if s, ok := m.(streamer); ok {
		p.stream = s.Stream()
	}
	es := t.DType().Size()
	p.lo = t.Offset() * es
	p.hi = p.lo + t.ByteLen()
	p.flat = t.Len() == 0 || t.IsContiguous()
	if !p.flat {
		p.lo, p.hi, p.holes = spans(t.Shape(), t.Strides(), t.Offset(), es)
	}
	return p
}

// spans returns the bytes between which elements lie, and the runs of bytes that
// they take, nil if that is all of them.
func spans(shape, strides []int, offset, es int) (lo, hi int, runs []span) {
	type axis struct{ n, stride int }
	var axes []axis
	offset0, last := offset, offset
	for i, n := range shape {
		s := strides[i]
		if n == 1 || s == 0 {
			continue
		}
		if s < 0 {
			offset += (n - 1) * s
			s = -s
		} else {
			last += (n - 1) * s
		}
		axes = append(axes, axis{n, s})
	}
	lo, hi = offset*es, (last+1)*es
	slices.SortFunc(axes, func(a, b axis) int { return cmp.Compare(a.stride, b.stride) })
	run := 1
	for len(axes) > 0 && axes[0].stride <= run {
		// Inputs may overlap; what they take is one run all the same.
		run = max(run, (axes[0].n-1)*axes[0].stride+run)
		axes = axes[1:]
	}
	reach := run
	for _, a := range axes {
		if a.stride < reach {
			return lo, hi, scattered(shape, strides, offset0, es)
		}
		reach = (a.n-1)*a.stride + reach
	}
	if len(axes) == 0 {
		return lo, hi, nil
	}
	runs = []span{{offset * es, run * es}}
	for _, a := range axes {
		k := len(runs)
		for i := 1; i < a.n; i++ {
			for _, r := range runs[:k] {
				runs = append(runs, span{r.off + i*a.stride*es, r.n})
			}
		}
	}
	return lo, hi, runs
}

// scattered is spans' runs where dimensions interleave: it looks at each element.
func scattered(shape, strides []int, offset, es int) []span {
	at := []int{offset}
	for i, n := range shape {
		k := len(at)
		for j := 1; j < n && strides[i] != 0; j++ {
			for _, o := range at[:k] {
				at = append(at, o+j*strides[i])
			}
		}
	}
	slices.Sort(at)
	var runs []span
	for _, o := range slices.Compact(at) {
		if k := len(runs) - 1; k >= 0 && runs[k].off+runs[k].n == o*es {
			runs[k].n += es
		} else {
			runs = append(runs, span{o * es, es})
		}
	}
	return runs
}

// each calls f for the runs of bytes that the elements take.
func (p *place) each(f func(span)) {
	if p.holes == nil {
		if p.hi > p.lo {
			f(span{p.lo, p.hi - p.lo})
		}
		return
	}
	for _, s := range p.holes {
		f(s)
	}
}

// over returns a CPU tensor of p's shape and strides over b, a copy of the bytes
// from lo to hi.
func (p *place) over(b []byte) (*tensor.Tensor, error) {
	es := p.t.DType().Size()
	all, err := tensor.FromBytes(p.t.DType(), b, len(b)/es)
	if err != nil {
		return nil, err
	}
	return all.AsStrided(p.t.Shape(), p.t.Strides(), p.t.Offset()-p.lo/es)
}
