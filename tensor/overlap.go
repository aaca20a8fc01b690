package tensor

import (
	"cmp"
	"slices"
	"unsafe"
)

// Range returns the addresses between which the elements of a strided tensor lie: of the first byte, and
// behind the last. Both are 0 for a tensor without elements, a sparse one, and one in memory without addresses
// (see Memory). Tensors on different types of devices are apart, whatever their addresses are.
func (t *Tensor) Range() (from, to uint64) {
	var base uint64
	if t.count == 0 || t.layout != Strided {
		return 0, 0
	} else if t.mem == nil {
		base = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(t.data))))
	} else if m, ok := t.mem.(interface{ Address() uint64 }); ok {
		base = m.Address()
	} else {
		return 0, 0
	}
	lo, hi := t.offset, t.offset+t.count
	if !t.contig {
		hi = t.offset + 1
		for i, s := range t.strides {
			if reach := (t.shape[i] - 1) * s; reach < 0 {
				lo += reach
			} else {
				hi += reach
			}
		}
	}
	es := uint64(t.dtype.Size())
	return base + uint64(lo)*es, base + uint64(hi)*es
}

// overlapSteps bounds the search of Overlaps. Columns, tiles and other views with the strides of one
// array take less than ten steps for each dimension. 4096 steps take about 20 us.
const overlapSteps = 4096

// Overlaps reports whether an element of t and one of o have a byte in common. It allocates nothing. The
// answer is exact for views of one array, so that its columns do not overlap. For tensors whose
// strides have little to do with each other it is true where a short search finds no answer.
func (t *Tensor) Overlaps(o *Tensor) bool {
	from, to := t.Range()
	oFrom, oTo := o.Range()
	switch {
	case t.device.Type != o.device.Type || from >= oTo || oFrom >= to:
		return false
	case t.contig && o.contig:
		return true
	}
	// The bytes of a tensor are at its first address plus a multiple of each stride. Two tensors share one if
	// the difference of their first addresses is a sum of multiples of the strides.
	var room [2 * maxStackDims]multiple
	terms := o.appendMultiples(t.appendMultiples(room[:0], 1), -1)
	s := search{terms: terms, slack: [2]int64{1 - int64(o.dtype.Size()), int64(t.dtype.Size()) - 1}, left: overlapSteps}
	slices.SortFunc(s.terms, func(a, b multiple) int { return cmp.Compare(b.stride, a.stride) })
	g, low, high := int64(0), s.slack[0], s.slack[1]
	for i := len(s.terms) - 1; i >= 0; i-- {
		m := &s.terms[i]
		g = gcd(m.stride, g)
		m.divisor, m.below = g, [2]int64{low, high}
		low, high = low+m.low*m.stride, high+m.high*m.stride
	}
	return s.reaches(0, int64(oFrom-from))
}

// multiple is a term low*stride ... high*stride of a sum.
type multiple struct {
	stride, low, high int64
	below             [2]int64 // the least and the greatest sum of the later terms and the slack
	divisor           int64    // of the strides from this one on
}

// search looks for terms with a certain sum. The slack, the least and the greatest distance of two bytes of
// two elements, is the last term.
type search struct {
	terms []multiple // the longest stride first
	slack [2]int64
	left  int // steps
}

// appendMultiples adds the strides of t, forwards or backwards.
func (t *Tensor) appendMultiples(terms []multiple, sign int) []multiple {
	es := int64(t.dtype.Size())
	for i, n := range t.shape {
		if n == 1 || t.strides[i] == 0 {
			continue
		}
		m := multiple{stride: int64(abs(t.strides[i])) * es, high: int64(n - 1)}
		if sign < 0 {
			m.low, m.high = -m.high, 0
		}
		k := slices.IndexFunc(terms, func(x multiple) bool { return x.stride == m.stride })
		if k < 0 {
			terms = append(terms, m)
			continue
		}
		terms[k].low += m.low
		terms[k].high += m.high
	}
	return terms
}

// reaches reports whether the terms from number i on can have the sum d. It is true when too many steps
// were needed.
func (s *search) reaches(i int, d int64) bool {
	if s.left--; s.left < 0 {
		return true
	}
	if i == len(s.terms) {
		return s.slack[0] <= d && d <= s.slack[1]
	}
	m := &s.terms[i]
	if floorDiv(d-s.slack[0], m.divisor) < ceilDiv(d-s.slack[1], m.divisor) {
		return false // no multiple of the divisor is near enough
	}
	last := min(m.high, floorDiv(d-m.below[0], m.stride))
	for k := max(m.low, ceilDiv(d-m.below[1], m.stride)); k <= last; k++ {
		if s.reaches(i+1, d-k*m.stride) {
			return true
		}
	}
	return false
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// floorDiv and ceilDiv divide by a positive number.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

func ceilDiv(a, b int64) int64 { return -floorDiv(-a, b) }
