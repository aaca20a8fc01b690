package tensor

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/cmplx"
	"slices"
)

// Fill sets every element of a CPU tensor as SetFloat64 does.
func (t *Tensor) Fill(value float64) error {
	const op = "Fill"
	if err := t.copyable(op, t.ByteLen()); err != nil {
		return err
	}
	var room [16]byte
	es := t.dtype.Size()
	if !store(t.dtype, room[:es], value) {
		return invalid(op, "%v cannot hold %v", t.dtype, value)
	}
	if t.count == 0 {
		return nil
	}
	if t.contig {
		b := t.Bytes()
		for n := copy(b, room[:es]); n < len(b); n *= 2 {
			copy(b[n:], b[:n])
		}
		return nil
	}
	var dimRoom [maxStackDims]axis
	dims := dimRoom[:0]
	for i, n := range t.shape {
		dims = appendAxis(dims, axis{n: n, dst: t.strides[i] * es})
	}
	move(es, dims, t.data, t.offset*es, room[:es], 0)
	return nil
}

// Float64At returns the element at index of a CPU tensor, with one number in index for each
// dimension. A bool is 0 or 1. An integer beyond 2^53 is rounded. A complex element is an error;
// use ViewAsReal.
func (t *Tensor) Float64At(index ...int) (float64, error) {
	if t.dtype.IsComplex() {
		return 0, invalid("Float64At", "%v is complex", t)
	}
	b, err := t.element("Float64At", index)
	if err != nil {
		return 0, err
	}
	return real(load(t.dtype, b)), nil
}

// SetFloat64 sets the element at index of a CPU tensor. Floating types round to nearest, those
// narrower than float32 through float32 as in PyTorch. Integers drop the fraction, and a value
// out of range is an error. A bool becomes true unless value is 0. A complex element gets an
// imaginary part of 0.
func (t *Tensor) SetFloat64(value float64, index ...int) error {
	b, err := t.element("SetFloat64", index)
	if err != nil {
		return err
	}
	if !store(t.dtype, b, value) {
		return invalid("SetFloat64", "%v cannot hold %v", t.dtype, value)
	}
	return nil
}

func (t *Tensor) element(op string, index []int) ([]byte, error) {
	if err := t.copyable(op, t.ByteLen()); err != nil {
		return nil, err
	}
	if len(index) != len(t.shape) {
		return nil, invalid(op, "%d indices for %v", len(index), t)
	}
	at := t.offset
	for i, k := range index {
		if k < 0 || k >= t.shape[i] {
			return nil, invalid(op, "no element %v in %v", slices.Clone(index), t)
		}
		at += k * t.strides[i]
	}
	es := t.dtype.Size()
	return t.data[at*es : (at+1)*es], nil
}

// ViewAsReal returns a view of a complex tensor as real numbers, with a last
// dimension of 2: the real and the imaginary part.
func (t *Tensor) ViewAsReal() (*Tensor, error) {
	const op = "ViewAsReal"
	if err := t.needStrided(op); err != nil {
		return nil, err
	}
	if !t.dtype.IsComplex() {
		return nil, invalid(op, "%v is not complex", t)
	}
	strides := make([]int, len(t.shape)+1)
	for i, s := range t.strides {
		strides[i] = 2 * s
	}
	strides[len(t.shape)] = 1
	v := t.view(append(t.Shape(), 2), strides, 2*t.offset)
	v.dtype = Float32
	if t.dtype == Complex128 {
		v.dtype = Float64
	}
	return v, nil
}

// Equal reports whether o has the dtype, shape and elements of t. As in
// PyTorch, NaN equals nothing and 0 equals -0; compare Bytes for the same
// bits. Sparse tensors are compared as coalesced. Elements that are not in CPU
// memory are an error.
func (t *Tensor) Equal(o *Tensor) (bool, error) { return t.compare("Equal", o, 0, 0) }

// AllClose reports whether o has the dtype and shape of t, and
// |t-o| <= atol + rtol*|o| for every pair of elements, or both are the same
// infinity. NaN is close to nothing. Sparse tensors are compared as coalesced.
func (t *Tensor) AllClose(o *Tensor, rtol, atol float64) (bool, error) {
	return t.compare("AllClose", o, rtol, atol)
}

func (t *Tensor) compare(op string, o *Tensor, rtol, atol float64) (bool, error) {
	if o == nil {
		return false, invalid(op, "nil tensor")
	}
	if t.layout != o.layout {
		return false, invalid(op, "cannot compare %v with %v", t, o)
	}
	if t.dtype != o.dtype || !t.SameShape(o) {
		return false, nil
	}
	if t.layout == SparseCOO {
		return t.compareSparse(op, o, rtol, atol)
	}
	var packed [2][]byte
	for i, x := range []*Tensor{t, o} {
		if err := x.copyable(op, x.ByteLen()); err != nil {
			return false, err
		}
		c, err := x.Contiguous()
		if err != nil {
			return false, err
		}
		packed[i] = c.Bytes()
	}
	return sameElements(t.dtype, packed[0], packed[1], rtol, atol), nil
}

func (t *Tensor) compareSparse(op string, o *Tensor, rtol, atol float64) (bool, error) {
	if t.SparseDims() != o.SparseDims() {
		return false, nil
	}
	a, err := t.Coalesce()
	if err != nil {
		return false, err
	}
	b, err := o.Coalesce()
	if err != nil {
		return false, err
	}
	if equal, err := a.Indices().Equal(b.Indices()); err != nil || !equal {
		return false, err
	}
	return a.Values().compare(op, b.Values(), rtol, atol)
}

func sameElements(d DType, a, b []byte, rtol, atol float64) bool {
	// Integers beyond 2^53 are compared by their bits: as floats they may look equal.
	exact := d.IsInteger() || d == Bool
	if exact && rtol == 0 && atol == 0 {
		return bytes.Equal(a, b)
	}
	es := d.Size()
	for i := 0; i < len(a); i += es {
		x, y := a[i:i+es], b[i:i+es]
		if exact && bytes.Equal(x, y) {
			continue
		}
		u, v := load(d, x), load(d, y)
		if u == v {
			continue
		}
		if diff := cmplx.Abs(u - v); !(diff <= atol+rtol*cmplx.Abs(v)) || math.IsInf(diff, 0) {
			return false
		}
	}
	return true
}

// load returns the element in b as a complex number, whatever its type.
func load(d DType, b []byte) complex128 {
	switch d {
	case Complex64:
		return complex(load32(b[:4]), load32(b[4:]))
	case Complex128:
		return complex(math.Float64frombits(bits(b[:8])), math.Float64frombits(bits(b[8:])))
	}
	u := bits(b)
	var v float64
	switch d {
	case Float16:
		v = float64(F16(u).Float32())
	case BFloat16:
		v = float64(BF16(u).Float32())
	case Float8E4M3:
		v = float64(F8E4M3(u).Float32())
	case Float8E5M2:
		v = float64(F8E5M2(u).Float32())
	case Float32:
		v = load32(b)
	case Float64:
		v = math.Float64frombits(u)
	case Int8, Int16, Int32, Int64:
		v = float64(signed(b))
	default:
		v = float64(u)
	}
	return complex(v, 0)
}

func load32(b []byte) float64 { return float64(math.Float32frombits(uint32(bits(b)))) }

// signed returns the signed integer in b.
func signed(b []byte) int64 {
	shift := 64 - 8*len(b)
	return int64(bits(b)<<shift) >> shift
}

// store puts v into b as SetFloat64 says; false if the type cannot hold it.
func store(d DType, b []byte, v float64) bool {
	switch d {
	case Float16:
		putBits(b, uint64(F16From(float32(v))))
	case BFloat16:
		putBits(b, uint64(BF16From(float32(v))))
	case Float8E4M3:
		putBits(b, uint64(F8E4M3From(float32(v))))
	case Float8E5M2:
		putBits(b, uint64(F8E5M2From(float32(v))))
	case Float32:
		putBits(b, uint64(math.Float32bits(float32(v))))
	case Float64:
		putBits(b, math.Float64bits(v))
	case Complex64:
		putBits(b[:4], uint64(math.Float32bits(float32(v))))
		putBits(b[4:], 0)
	case Complex128:
		putBits(b[:8], math.Float64bits(v))
		putBits(b[8:], 0)
	case Bool:
		b[0] = 0
		if v != 0 {
			b[0] = 1
		}
	default:
		return storeInt(d, b, math.Trunc(v))
	}
	return true
}

func storeInt(d DType, b []byte, v float64) bool {
	width := 8 * len(b)
	if d.IsUnsigned() {
		if !(v >= 0 && v < math.Ldexp(1, width)) {
			return false
		}
		putBits(b, uint64(v))
		return true
	}
	if limit := math.Ldexp(1, width-1); !(v >= -limit && v < limit) {
		return false
	}
	putBits(b, uint64(int64(v)))
	return true
}

func bits(b []byte) uint64 {
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	}
	return binary.NativeEndian.Uint64(b)
}

func putBits(b []byte, u uint64) {
	switch len(b) {
	case 1:
		b[0] = byte(u)
	case 2:
		binary.NativeEndian.PutUint16(b, uint16(u))
	case 4:
		binary.NativeEndian.PutUint32(b, uint32(u))
	default:
		binary.NativeEndian.PutUint64(b, u)
	}
}
