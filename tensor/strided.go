package tensor

import (
	"cmp"
	"encoding/binary"
	"slices"
)

// Pack copies the elements of a CPU tensor to dst in row-major order. The
// length of dst must be ByteLen; dst must not overlap the tensor's memory.
func (t *Tensor) Pack(dst []byte) error {
	if err := t.copyable("Pack", len(dst)); err != nil {
		return err
	}
	if t.contig {
		copy(dst, t.Bytes())
		return nil
	}
	var room [maxStackDims]axis
	dims, step := room[:0], len(dst)
	es := t.dtype.Size()
	for i, n := range t.shape {
		step /= max(n, 1)
		dims = appendAxis(dims, axis{n: n, dst: step, src: t.strides[i] * es})
	}
	move(es, dims, dst, 0, t.data, t.offset*es)
	return nil
}

// Unpack copies row-major elements from src into a CPU tensor through its
// strides. The length of src must be ByteLen; src must not overlap the
// tensor's memory.
func (t *Tensor) Unpack(src []byte) error {
	if err := t.copyable("Unpack", len(src)); err != nil {
		return err
	}
	if t.contig {
		copy(t.Bytes(), src)
		return nil
	}
	var room [maxStackDims]axis
	dims, step := room[:0], len(src)
	es := t.dtype.Size()
	for i, n := range t.shape {
		step /= max(n, 1)
		dims = appendAxis(dims, axis{n: n, dst: t.strides[i] * es, src: step})
	}
	move(es, dims, t.data, t.offset*es, src, 0)
	return nil
}

// Clone returns a contiguous copy of a CPU tensor; a sparse one is copied as
// it is, coalesced or not.
func (t *Tensor) Clone() (*Tensor, error) {
	if t.layout == SparseCOO {
		return t.cloneSparse()
	}
	if err := t.copyable("Clone", t.ByteLen()); err != nil {
		return nil, err
	}
	c, err := New(t.dtype, t.shape...)
	if err != nil {
		return nil, err
	}
	return c, t.Pack(c.data)
}

// CopyFrom copies src's elements into t. Both are strided CPU tensors of one
// dtype and shape; their strides may differ, their memory must not overlap.
func (t *Tensor) CopyFrom(src *Tensor) error {
	const op = "CopyFrom"
	if src == nil {
		return invalid(op, "nil source")
	}
	if t.dtype != src.dtype || !t.SameShape(src) {
		return invalid(op, "cannot copy %v into %v", src, t)
	}
	if err := t.copyable(op, t.ByteLen()); err != nil {
		return err
	}
	if err := src.copyable(op, src.ByteLen()); err != nil {
		return err
	}
	if t.contig && src.contig {
		copy(t.Bytes(), src.Bytes())
		return nil
	}
	var room [maxStackDims]axis
	dims := room[:0]
	es := t.dtype.Size()
	for i, n := range t.shape {
		dims = appendAxis(dims, axis{n: n, dst: t.strides[i] * es, src: src.strides[i] * es})
	}
	move(es, dims, t.data, t.offset*es, src.data, src.offset*es)
	return nil
}

func (t *Tensor) copyable(op string, n int) error {
	if err := t.needStrided(op); err != nil {
		return err
	}
	if t.device.Type != CPU {
		return invalid(op, "%v is not in CPU memory", t)
	}
	if n != t.ByteLen() {
		return invalid(op, "%v takes %d bytes, got %d", t, t.ByteLen(), n)
	}
	return nil
}

// axis is one loop of a strided copy: n steps, strides in bytes.
type axis struct{ n, dst, src int }

// maxStackDims is how many axes a copy handles without allocating.
const maxStackDims = 8

// appendAxis adds the next inner axis, or merges it into the last one if the two make one loop.
func appendAxis(dims []axis, a axis) []axis {
	if a.n == 1 {
		return dims
	}
	if k := len(dims) - 1; k >= 0 && dims[k].dst == a.dst*a.n && dims[k].src == a.src*a.n {
		dims[k] = axis{n: dims[k].n * a.n, dst: a.dst, src: a.src}
		return dims
	}
	return append(dims, a)
}

// tile is the side, in elements, of the squares in which a transposing copy walks. Their cache lines must stay in
// the first-level cache on both sides. BenchmarkPack chose it: to pack and to unpack a transpose of 2048x2048
// bfloat16 took 13 and 12 ms with side 8, and 13 and 18 ms with 16. It took 15 and 22 ms with 32, and 17 and 28 ms
// without tiles (EPYC, 32 KiB of cache).
const tile = 8

// move copies es bytes at each point of the grid that dims spans, outermost
// axis first. The caller has checked that the grid lies within dst and src.
func move(es int, dims []axis, dst []byte, do int, src []byte, so int) {
	m := mover{es: es, run: es, dst: dst, src: src}
	k := len(dims) - 1
	switch {
	case k >= 0 && dims[k].dst == es && dims[k].src == es:
		m.run = es * dims[k].n
		dims = dims[:k]
	case k >= 1:
		m.tiled = transposes(dims)
	}
	m.walk(dims, do, so)
}

// transposes reports whether a copy along the last axis touches a new cache line at each step
// while another axis is adjacent in memory. If so it moves that axis to the last but one place,
// the longer of the two last.
func transposes(dims []axis) bool {
	k := len(dims) - 1
	near := func(a axis) int { return min(abs(a.dst), abs(a.src)) }
	far := max(abs(dims[k].dst), abs(dims[k].src))
	best := k
	for i := range k {
		if near(dims[i]) < far && (best == k || near(dims[i]) < near(dims[best])) {
			best = i
		}
	}
	if best == k {
		return false
	}
	a := dims[best]
	copy(dims[best:], dims[best+1:k])
	dims[k-1] = a
	if dims[k].n < a.n {
		dims[k-1], dims[k] = dims[k], a
	}
	return true
}

type mover struct {
	es, run  int // bytes of an element, of an adjacent run of them
	tiled    bool
	dst, src []byte
}

func (m *mover) walk(dims []axis, do, so int) {
	switch {
	case len(dims) == 0:
		copy(m.dst[do:do+m.run], m.src[so:])
	case len(dims) == 1 && m.run > m.es:
		for range dims[0].n {
			copy(m.dst[do:do+m.run], m.src[so:])
			do += dims[0].dst
			so += dims[0].src
		}
	case len(dims) == 1:
		m.line(dims[0], do, so)
	case len(dims) == 2 && m.tiled:
		m.tiles(dims[0], dims[1], do, so)
	default:
		for range dims[0].n {
			m.walk(dims[1:], do, so)
			do += dims[0].dst
			so += dims[0].src
		}
	}
}

func (m *mover) tiles(outer, inner axis, do, so int) {
	for i := 0; i < outer.n; i += tile {
		rows := min(tile, outer.n-i)
		for j := 0; j < inner.n; j += tile {
			a := axis{n: min(tile, inner.n-j), dst: inner.dst, src: inner.src}
			d := do + i*outer.dst + j*inner.dst
			s := so + i*outer.src + j*inner.src
			for range rows {
				m.line(a, d, s)
				d += outer.dst
				s += outer.src
			}
		}
	}
}

// line copies single elements along one axis. Neither side need be aligned.
func (m *mover) line(a axis, do, so int) {
	ne, dst, src := binary.NativeEndian, m.dst, m.src
	switch m.es {
	case 1:
		for range a.n {
			dst[do] = src[so]
			do += a.dst
			so += a.src
		}
	case 2:
		for range a.n {
			ne.PutUint16(dst[do:do+2], ne.Uint16(src[so:so+2]))
			do += a.dst
			so += a.src
		}
	case 4:
		for range a.n {
			ne.PutUint32(dst[do:do+4], ne.Uint32(src[so:so+4]))
			do += a.dst
			so += a.src
		}
	case 8:
		for range a.n {
			ne.PutUint64(dst[do:do+8], ne.Uint64(src[so:so+8]))
			do += a.dst
			so += a.src
		}
	default:
		for range a.n {
			copy(dst[do:do+m.es], src[so:so+m.es])
			do += a.dst
			so += a.src
		}
	}
}

// HasOverlap reports whether two elements of a strided tensor share memory, so that writing one
// changes the other. The answer is exact. If the strides do not decide it, it checks every
// element, with one bit of memory for each element of storage between the first and the last.
func (t *Tensor) HasOverlap() bool {
	if t.layout != Strided || t.contig {
		return false
	}
	var dims []axis // dst holds the stride; its sign does not matter here
	for i, n := range t.shape {
		if n > 1 {
			dims = append(dims, axis{n: n, dst: abs(t.strides[i])})
		}
	}
	slices.SortFunc(dims, func(a, b axis) int { return cmp.Compare(b.dst, a.dst) })
	nested, reach := true, 0
	for _, a := range slices.Backward(dims) {
		nested = nested && a.dst > reach
		reach += (a.n - 1) * a.dst
	}
	if nested {
		return false
	}
	if t.count > reach+1 {
		return true
	}
	return marked(make([]uint64, reach/64+1), dims, 0)
}

// marked sets the bit of each element and reports whether one was set already.
func marked(seen []uint64, dims []axis, at int) bool {
	if len(dims) == 0 {
		bit := uint64(1) << (at % 64)
		was := seen[at/64]&bit != 0
		seen[at/64] |= bit
		return was
	}
	for range dims[0].n {
		if marked(seen, dims[1:], at) {
			return true
		}
		at += dims[0].dst
	}
	return false
}

func abs(n int) int { return max(n, -n) }
