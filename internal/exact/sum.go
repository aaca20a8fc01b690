package exact

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/c10d-go/c10d/tensor"
)

// Func adds element by element: dst[i] is the sum of all operands[k][i]. All slices have the
// length of dst, a whole number of elements in the host's byte order. dst may be one of the
// operands. It must not overlap part of one. There must be at least one operand. A Func has no
// state, and many goroutines may call it.
//
// It panics on wrong lengths: going on would send a wrong result to other ranks.
type Func func(dst []byte, operands [][]byte)

// Sum returns the function that adds elements of dtype d, which must be a float
// or a complex one.
func Sum(d tensor.DType) (Func, error) {
	switch d {
	case tensor.Float32, tensor.Complex64:
		return checked(d, sumFloat32), nil
	case tensor.Float64, tensor.Complex128:
		return checked(d, sumFloat64), nil
	case tensor.Float16:
		return checked(d, narrow2(func(b uint16) float32 { return tensor.F16(b).Float32() }, func(f float32) uint16 { return uint16(tensor.F16From(f)) })), nil
	case tensor.BFloat16:
		return checked(d, narrow2(func(b uint16) float32 { return tensor.BF16(b).Float32() }, func(f float32) uint16 { return uint16(tensor.BF16From(f)) })), nil
	case tensor.Float8E4M3:
		return checked(d, narrow1(func(b byte) float32 { return tensor.F8E4M3(b).Float32() }, func(f float32) byte { return byte(tensor.F8E4M3From(f)) })), nil
	case tensor.Float8E5M2:
		return checked(d, narrow1(func(b byte) float32 { return tensor.F8E5M2(b).Float32() }, func(f float32) byte { return byte(tensor.F8E5M2From(f)) })), nil
	}
	return nil, fmt.Errorf("exact: no sum of %v: want a float or complex dtype", d)
}

func checked(d tensor.DType, f Func) Func {
	size := d.Size()
	return func(dst []byte, operands [][]byte) {
		if len(operands) == 0 || len(dst)%size != 0 {
			panic(fmt.Sprintf("exact: %d operands, %d bytes of elements of %d", len(operands), len(dst), size))
		}
		for _, o := range operands {
			if len(o) != len(dst) {
				panic(fmt.Sprintf("exact: an operand of %d bytes for a sum of %d", len(o), len(dst)))
			}
		}
		f(dst, operands)
	}
}

// add returns a+b and whether that is exact. It is not for infinities and NaN.
func add(a, b float64) (sum float64, ok bool) {
	sum = a + b
	of := sum - a
	return sum, (a-(sum-of))+(b-of) == 0
}

func sumFloat32(dst []byte, operands [][]byte) {
	at := binary.NativeEndian
	var slow fixed
	for i := 0; i+4 <= len(dst); i += 4 {
		total := float64(math.Float32frombits(at.Uint32(operands[0][i:])))
		ok := total-total == 0 // finite
		for _, o := range operands[1:] {
			x := float64(math.Float32frombits(at.Uint32(o[i:])))
			var exactly bool
			total, exactly = add(total, x)
			ok = ok && exactly
		}
		result := float32(total)
		if !ok {
			slow.reset()
			for _, o := range operands {
				slow.add32(at.Uint32(o[i:]))
			}
			result = slow.float32(nearest)
		}
		at.PutUint32(dst[i:], math.Float32bits(result))
	}
}

// sumFloat64 also adds the errors, which have few bits. If their sum is exact, one more addition
// of it to the total rounds the exact sum.
func sumFloat64(dst []byte, operands [][]byte) {
	at := binary.NativeEndian
	var slow fixed
	for i := 0; i+8 <= len(dst); i += 8 {
		total, errors := math.Float64frombits(at.Uint64(operands[0][i:])), 0.0
		ok := total-total == 0
		for _, o := range operands[1:] {
			x := math.Float64frombits(at.Uint64(o[i:]))
			sum := total + x
			of := sum - total
			var exactly bool
			errors, exactly = add(errors, (total-(sum-of))+(x-of))
			total, ok = sum, ok && exactly
		}
		switch {
		case !ok:
			slow.reset()
			for _, o := range operands {
				slow.add64(at.Uint64(o[i:]))
			}
			total = slow.float64()
		case errors != 0: // -0 stays
			total += errors
		}
		at.PutUint64(dst[i:], math.Float64bits(total))
	}
}

// narrowed adds one element of a narrow type. It returns a float32 that rounds to the same number
// as the exact sum.
func narrowed(n int, at func(k int) float32, slow *fixed) float32 {
	total := float64(at(0))
	ok := total-total == 0
	for k := 1; k < n && ok; k++ {
		total, ok = add(total, float64(at(k)))
	}
	if ok {
		return odd(total)
	}
	slow.reset()
	for k := range n {
		slow.add32(math.Float32bits(at(k)))
	}
	return slow.float32(toOdd)
}

// odd rounds a finite x to odd: an inexact result has its last bit set. A later rounding to fewer
// bits then does not take it for a tie (Boldo and Melquiond, "Emulation of FMA and correctly
// rounded sums: proved algorithms using rounding to odd", 2008).
func odd(x float64) float32 {
	f := float32(x)
	if float64(f) == x {
		return f
	}
	b := math.Float32bits(f)
	if math.Abs(float64(f)) > math.Abs(x) {
		b--
	}
	return math.Float32frombits(b | 1)
}

func narrow2(widen func(uint16) float32, round func(float32) uint16) Func {
	return func(dst []byte, operands [][]byte) {
		at := binary.NativeEndian
		var slow fixed
		for i := 0; i+2 <= len(dst); i += 2 {
			f := narrowed(len(operands), func(k int) float32 { return widen(at.Uint16(operands[k][i:])) }, &slow)
			at.PutUint16(dst[i:], round(f))
		}
	}
}

func narrow1(widen func(byte) float32, round func(float32) byte) Func {
	return func(dst []byte, operands [][]byte) {
		var slow fixed
		for i := range dst {
			dst[i] = round(narrowed(len(operands), func(k int) float32 { return widen(operands[k][i]) }, &slow))
		}
	}
}
