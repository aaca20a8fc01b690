package ddp

import "github.com/c10d-go/c10d/tensor"

// The functions here work on contiguous CPU tensors of equal length and
// allocate nothing. Types narrower than float32 are widened in pieces that
// stay on the stack and in the first-level cache.
const piece = 512

// data returns t's elements; the caller has checked the dtype.
func data[T tensor.Element](t *tensor.Tensor) []T {
	s, err := tensor.Data[T](t)
	if err != nil {
		panic(err) // a bucket is contiguous and on the CPU
	}
	return s
}

// scale sets dst = src * (1/n), as c10d does on the way into a bucket. The bits
// are PyTorch's for float32 and float64. Narrower types are multiplied by 1/n
// in float32, as by PyTorch 2; 1.13 rounds the factor to the narrow type first.
func scale(dst, src *tensor.Tensor, n int) {
	switch f := 1 / float64(n); dst.DType() {
	case tensor.Float32:
		product(data[float32](dst), data[float32](src), float32(f))
	case tensor.Float64:
		product(data[float64](dst), data[float64](src), f)
	case tensor.Complex64:
		d, g := data[complex64](dst), float32(f)
		for i, v := range data[complex64](src) {
			d[i] = complex(real(v)*g, imag(v)*g)
		}
	case tensor.Complex128:
		d := data[complex128](dst)
		for i, v := range data[complex128](src) {
			d[i] = complex(real(v)*f, imag(v)*f)
		}
	default:
		throughFloat32(dst, src, float32(f), 1)
	}
}

// divide sets dst = src / n, as c10d's hooks do.
func divide(dst, src *tensor.Tensor, n int) {
	switch dst.DType() {
	case tensor.Float32:
		quotient(data[float32](dst), data[float32](src), float32(n))
	case tensor.Float64:
		quotient(data[float64](dst), data[float64](src), float64(n))
	case tensor.Complex64:
		d, g := data[complex64](dst), float32(n)
		for i, v := range data[complex64](src) {
			d[i] = complex(real(v)/g, imag(v)/g)
		}
	case tensor.Complex128:
		d, g := data[complex128](dst), float64(n)
		for i, v := range data[complex128](src) {
			d[i] = complex(real(v)/g, imag(v)/g)
		}
	default:
		throughFloat32(dst, src, 1, float32(n))
	}
}

func product[T float32 | float64](dst, src []T, f T) {
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = v * f
	}
}

func quotient[T float32 | float64](dst, src []T, n T) {
	dst = dst[:len(src)]
	for i, v := range src {
		dst[i] = v / n
	}
}

// convert sets dst = src rounded to dst's dtype, both real floating types.
func convert(dst, src *tensor.Tensor) {
	switch {
	case src.DType() == tensor.Float32:
		narrow(dst, 0, data[float32](src))
	case dst.DType() == tensor.Float32:
		widen(data[float32](dst), src, 0)
	default:
		throughFloat32(dst, src, 1, 1)
	}
}

// throughFloat32 sets dst = src * mul / div. One of mul and div is 1.
func throughFloat32(dst, src *tensor.Tensor, mul, div float32) {
	var room [piece]float32
	for at := 0; at < dst.Len(); at += piece {
		v := room[:min(piece, dst.Len()-at)]
		widen(v, src, at)
		for i := range v {
			v[i] = v[i] * mul / div
		}
		narrow(dst, at, v)
	}
}

// widen reads elements of src from at on.
func widen(dst []float32, src *tensor.Tensor, at int) {
	switch src.DType() {
	case tensor.Float64:
		for i, v := range data[float64](src)[at : at+len(dst)] {
			dst[i] = float32(v)
		}
	case tensor.Float16:
		for i, v := range data[tensor.F16](src)[at : at+len(dst)] {
			dst[i] = v.Float32()
		}
	case tensor.BFloat16:
		for i, v := range data[tensor.BF16](src)[at : at+len(dst)] {
			dst[i] = v.Float32()
		}
	case tensor.Float8E4M3:
		for i, v := range data[tensor.F8E4M3](src)[at : at+len(dst)] {
			dst[i] = v.Float32()
		}
	case tensor.Float8E5M2:
		for i, v := range data[tensor.F8E5M2](src)[at : at+len(dst)] {
			dst[i] = v.Float32()
		}
	default:
		copy(dst, data[float32](src)[at:])
	}
}

// narrow writes elements of dst from at on.
func narrow(dst *tensor.Tensor, at int, src []float32) {
	switch dst.DType() {
	case tensor.Float64:
		d := data[float64](dst)[at:]
		for i, v := range src {
			d[i] = float64(v)
		}
	case tensor.Float16:
		d := data[tensor.F16](dst)[at:]
		for i, v := range src {
			d[i] = tensor.F16From(v)
		}
	case tensor.BFloat16:
		d := data[tensor.BF16](dst)[at:]
		for i, v := range src {
			d[i] = tensor.BF16From(v)
		}
	case tensor.Float8E4M3:
		d := data[tensor.F8E4M3](dst)[at:]
		for i, v := range src {
			d[i] = tensor.F8E4M3From(v)
		}
	case tensor.Float8E5M2:
		d := data[tensor.F8E5M2](dst)[at:]
		for i, v := range src {
			d[i] = tensor.F8E5M2From(v)
		}
	default:
		copy(data[float32](dst)[at:], src)
	}
}
