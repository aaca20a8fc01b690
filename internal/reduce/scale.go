package reduce

import (
	"fmt"
	"math"

	"github.com/c10d-go/c10d/tensor"
)

// Divide returns the function that divides elements of dtype d by n, a group's size, to turn a
// sum into an average. Narrow floats are widened to float32 and rounded once; complex numbers are
// divided part by part, as c10d does with its real view of them. The error is an
// [*UnsupportedError] for a dtype without Avg.
func Divide(d tensor.DType, n int) (func(b []byte), error) {
	if err := supported(Avg, d); err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, fmt.Errorf("reduce: average over %d ranks", n)
	}
	if loop := inAssembly.dividers[d]; loop != nil {
		return loop.by(d, float64(n)), nil
	}
	return portableDivide(d, n), nil
}

func portableDivide(d tensor.DType, n int) func(b []byte) {
	switch d {
	case tensor.Float32, tensor.Complex64:
		return each(d.Size(), divide(float32(n)))
	case tensor.Float64, tensor.Complex128:
		return each(d.Size(), divide(float64(n)))
	}
	return eachNarrow(d, 1, float32(n))
}

// PreMul returns the function that multiplies elements of dtype d by factor, as PreMulSum does
// before the sum. The factor is rounded to float32 for float32 and narrower. For integers it must
// be a whole number of at most 2^53, and products wrap. The error is an [*UnsupportedError].
func PreMul(d tensor.DType, factor float64) (func(b []byte), error) {
	if err := supported(PreMulSum, d); err != nil {
		return nil, err
	}
	if d.IsInteger() && (factor != math.Trunc(factor) || math.Abs(factor) > 1<<53) {
		return nil, &UnsupportedError{PreMulSum, d, fmt.Sprintf("the factor %v is no whole number within 2^53", factor)}
	}
	if loop := inAssembly.multipliers[d]; loop != nil {
		return loop.by(d, factor), nil
	}
	return portablePreMul(d, factor), nil
}

func portablePreMul(d tensor.DType, factor float64) func(b []byte) {
	if d.IsInteger() {
		switch by := int64(factor); d.Size() {
		case 1:
			return each(1, multiply(uint8(by)))
		case 2:
			return each(2, multiply(uint16(by)))
		case 4:
			return each(4, multiply(uint32(by)))
		default:
			return each(8, multiply(uint64(by)))
		}
	}
	switch d {
	case tensor.Float32, tensor.Complex64:
		return each(d.Size(), multiply(float32(factor)))
	case tensor.Float64, tensor.Complex128:
		return each(d.Size(), multiply(factor))
	}
	return eachNarrow(d, float32(factor), 1)
}

// A scaler is a loop in assembly that divides or multiplies elements by a number. The lowest bits
// of by are that number, in the type of the arithmetic.
type scaler func(b []byte, by uint64)

// by returns the function that runs the loop with factor.
func (loop scaler) by(d tensor.DType, factor float64) func(b []byte) {
	bits := uint64(math.Float32bits(float32(factor)))
	if d == tensor.Float64 || d == tensor.Complex128 {
		bits = math.Float64bits(factor)
	}
	f := stepped(d.Size(), func(dst, _ []byte) { loop(dst, bits) })
	return func(b []byte) { f(b, b) }
}

func divide[T float32 | float64](by T) func(b []T) {
	return func(b []T) {
		for i := range b {
			b[i] /= by
		}
	}
}

func multiply[T number](by T) func(b []T) {
	return func(b []T) {
		for i := range b {
			b[i] *= by
		}
	}
}

// eachNarrow returns the function that multiplies elements of dtype d, narrower than float32, by
// mul and divides them by div. One of the two is 1.
func eachNarrow(d tensor.DType, mul, div float32) func(b []byte) {
	switch d {
	case tensor.BFloat16:
		return each(2, func(b []uint16) {
			for i, h := range b {
				b[i] = roundBF16(widenBF16(h) * mul / div)
			}
		})
	case tensor.Float16:
		return each(2, func(b []uint16) {
			wide := wideF16()
			for i, v := range b {
				f := wide[v] * mul / div
				h, ok := roundF16(f)
				if !ok {
					h = uint16(tensor.F16From(f))
				}
				b[i] = h
			}
		})
	}
	table := new([256]uint8)
	for i := range table {
		if d == tensor.Float8E4M3 {
			table[i] = uint8(tensor.F8E4M3From(tensor.F8E4M3(i).Float32() * mul / div))
		} else {
			table[i] = uint8(tensor.F8E5M2From(tensor.F8E5M2(i).Float32() * mul / div))
		}
	}
	return each(1, func(b []uint8) {
		for i, v := range b {
			b[i] = table[v]
		}
	})
}
