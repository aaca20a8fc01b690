// Package place tells where the elements of a tensor lie in memory of a device, and which stream uses it.
package place

import (
	"cmp"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
)

// Span is a range of bytes of a storage.
type Span struct{ Off, N int }

// Place is where the elements of a tensor lie.
type Place struct {
	T      *tensor.Tensor
	Dev    int
	Base   driver.Ptr    // of the storage
	Lo, Hi int           // the bytes between which the elements lie
	Holes  []Span        // what they take of these, in order; nil if they take all
	Flat   bool          // one after the other, in row-major order
	Stream driver.Stream // that the caller uses it with; may be nil

	Down, Up driver.Stream // to the host and from there, once the operation has them

	Of *Place // where the tensor is, if the place is not the tensor's own
}

// Of returns the place of a tensor that dense has checked.
func Of(t *tensor.Tensor) *Place {
	m := t.Memory()
	p := &Place{T: t, Dev: t.Device().Index, Base: m.(interface{ Ptr() driver.Ptr }).Ptr()}
	if s, ok := m.(driver.Streamer); ok {
		p.Stream = s.Stream()
	}
	es := t.DType().Size()
	p.Lo = t.Offset() * es
	p.Hi = p.Lo + t.ByteLen()
	p.Flat = t.Len() == 0 || t.IsContiguous()
	if !p.Flat {
		p.Lo, p.Hi, p.Holes = spans(t.Shape(), t.Strides(), t.Offset(), es)
	}
	return p
}

// Memory returns the memory that a tensor lies in, as its driver made it.
func Memory(t *tensor.Tensor) driver.Memory {
	if w, ok := t.Memory().(interface{ Whole() driver.Memory }); ok {
		return w.Whole()
	}
	m, _ := t.Memory().(driver.Memory)
	return m
}

// spans returns the range of bytes in which the elements lie, and the runs of bytes that they
// take, nil if they take all of it.
func spans(shape, strides []int, offset, es int) (lo, hi int, runs []Span) {
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
		// Inputs may overlap. The bytes of overlapping inputs are one run.
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
	runs = []Span{{offset * es, run * es}}
	for _, a := range axes {
		k := len(runs)
		for i := 1; i < a.n; i++ {
			for _, r := range runs[:k] {
				runs = append(runs, Span{r.Off + i*a.stride*es, r.N})
			}
		}
	}
	return lo, hi, runs
}

// scattered is spans' runs where dimensions interleave: it looks at each element.
func scattered(shape, strides []int, offset, es int) []Span {
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
	var runs []Span
	for _, o := range slices.Compact(at) {
		if k := len(runs) - 1; k >= 0 && runs[k].Off+runs[k].N == o*es {
			runs[k].N += es
		} else {
			runs = append(runs, Span{o * es, es})
		}
	}
	return runs
}

// Each calls f for the runs of bytes that the elements take.
func (p *Place) Each(f func(Span)) {
	if p.Holes == nil {
		if p.Hi > p.Lo {
			f(Span{p.Lo, p.Hi - p.Lo})
		}
		return
	}
	for _, s := range p.Holes {
		f(s)
	}
}

// Over returns a CPU tensor of p's shape and strides over b, a copy of the bytes
// from lo to hi.
func (p *Place) Over(b []byte) (*tensor.Tensor, error) {
	es := p.T.DType().Size()
	all, err := tensor.FromBytes(p.T.DType(), b, len(b)/es)
	if err != nil {
		return nil, err
	}
	return all.AsStrided(p.T.Shape(), p.T.Strides(), p.T.Offset()-p.Lo/es)
}

// mostRuns is up to how many runs of bytes each one is noted as used. Notes stay in order,
// so they cost more the more there are. Of a tensor with more runs all that lies between
// its first and its last byte counts as used.
const mostRuns = 1 << 14

// Uses calls f for what an operation uses of the memory of a tensor's place.
func (p *Place) Uses(f func(Span)) {
	if len(p.Holes) > mostRuns {
		f(Span{p.Lo, p.Hi - p.Lo})
		return
	}
	p.Each(f)
}

// Tensor returns the place of the tensor itself.
func (p *Place) Tensor() *Place {
	if p.Of != nil {
		return p.Of
	}
	return p
}

// InOrder calls f for each kernel that brings n bytes of the elements in order, between
// them and where they are packed.
func (p *Place) InOrder(packed driver.Ptr, f func(l kernels.Layout, packed, spread driver.Ptr, n int)) {
	es := p.T.DType().Size()
	shape, strides := slices.Clone(p.T.Shape()), slices.Clone(p.T.Strides())
	first := p.Base + driver.Ptr(p.T.Offset()*es)
	if most := 8; es > most {
		// To the kernels an element is several.
		for d := range strides {
			strides[d] *= es / most
		}
		shape, strides, es = append(shape, es/most), append(strides, 1), most
	}
	shape, strides = collapsed(shape, strides)
	outer := max(len(shape)-kernels.MostDims, 0)
	l := kernels.Layout{Size: es, Shape: shape[outer:], Strides: strides[outer:]}
	inner := es
	for _, k := range l.Shape {
		inner *= k
	}
	// A layout of more dimensions than a kernel takes is several.
	index := make([]int, outer)
	for {
		spread := first
		for d, k := range index {
			spread += driver.Ptr(k * strides[d] * es)
		}
		f(l, packed, spread, inner)
		packed += driver.Ptr(inner)
		d := outer - 1
		for ; d >= 0; d-- {
			if index[d]++; index[d] < shape[d] {
				break
			}
			index[d] = 0
		}
		if d < 0 {
			return
		}
	}
}

// collapsed returns shape and strides with as few dimensions as say the same.
func collapsed(shape, strides []int) (s, t []int) {
	for i, n := range shape {
		if n == 1 {
			continue
		}
		if k := len(s) - 1; k >= 0 && t[k] == n*strides[i] {
			s[k], t[k] = s[k]*n, strides[i]
			continue
		}
		s, t = append(s, n), append(t, strides[i])
	}
	return s, t
}

// At returns the address of an element of a flat place.
func (p *Place) At(i int) driver.Ptr {
	return p.Base + driver.Ptr(p.Lo) + driver.Ptr(i)*driver.Ptr(p.T.DType().Size())
}

// Start returns where the first element of a tensor is.
func Start(t *tensor.Tensor) driver.Ptr {
	return t.Memory().(interface{ Ptr() driver.Ptr }).Ptr() + driver.Ptr(t.Offset()*t.DType().Size())
}

// InOrder returns where the elements of tensors lie, one tensor after the other, on a device; false if they do not.
func InOrder(ts []*tensor.Tensor, dev int) (at driver.Ptr, bytes int, ok bool) {
	ok = true
	for _, t := range ts {
		n := t.ByteLen()
		if n == 0 {
			continue
		}
		if t.Device() != (tensor.Device{Type: tensor.CUDA, Index: dev}) || !t.IsContiguous() || bytes > 0 && Start(t) != at+driver.Ptr(bytes) {
			ok = false
		}
		if ok && bytes == 0 {
			at = Start(t)
		}
		bytes += n
	}
	return at, bytes, ok
}

// Bytes returns how many bytes tensors have together.
func Bytes(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n += t.ByteLen()
	}
	return n
}

// Longest returns the bytes of the longest tensor.
func Longest(ts []*tensor.Tensor) (n int) {
	for _, t := range ts {
		n = max(n, t.ByteLen())
	}
	return n
}
