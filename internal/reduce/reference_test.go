package reduce

import (
	"encoding/binary"
	"math"
	"math/big"
	"slices"

	"github.com/c10d-go/c10d/tensor"
)

// The reference: one element at a time, integers in arbitrary precision,
// floats from their fields, rounding by looking for the nearest value.

// layout describes a narrow float: its fields and what its largest exponent means.
type layout struct {
	exponent, mantissa, bias int
	infinite                 bool // the largest exponent is for infinities and NaNs, as IEEE 754 has it
}

var layouts = map[tensor.DType]layout{
	tensor.Float16:    {5, 10, 15, true},
	tensor.BFloat16:   {8, 7, 127, true},
	tensor.Float8E5M2: {5, 2, 15, true},
	tensor.Float8E4M3: {4, 3, 7, false}, // only all ones is NaN
}

func (l layout) value(bits uint64) float64 {
	man := bits & (1<<l.mantissa - 1)
	exp := int(bits >> l.mantissa & (1<<l.exponent - 1))
	v := math.Ldexp(float64(man)+float64(int(1)<<l.mantissa), exp-l.bias-l.mantissa)
	switch last := 1<<l.exponent - 1; {
	case exp == last && l.infinite && man == 0:
		v = math.Inf(1)
	case exp == last && (l.infinite || man == 1<<l.mantissa-1):
		return math.NaN()
	case exp == 0:
		v = math.Ldexp(float64(man), 1-l.bias-l.mantissa)
	}
	if bits>>(l.exponent+l.mantissa) != 0 {
		v = -v
	}
	return v
}

// magnitudes holds, by dtype, the finite values that are not negative; the
// index is their bits.
var magnitudes = func() map[tensor.DType][]float64 {
	m := make(map[tensor.DType][]float64)
	for d, l := range layouts {
		for bits := uint64(0); ; bits++ {
			v := l.value(bits)
			if math.IsInf(v, 0) || math.IsNaN(v) {
				break
			}
			m[d] = append(m[d], v)
		}
	}
	return m
}()

// nearest returns the bits of the value nearest to v, ties to even ones.
func nearest(d tensor.DType, v float64) uint64 {
	l, finite := layouts[d], magnitudes[d]
	overflow := uint64(len(finite)) // what follows the largest: infinity, or NaN
	if math.IsNaN(v) {
		return uint64(1)<<(l.exponent+l.mantissa) - 1
	}
	sign := uint64(0)
	if math.Signbit(v) {
		sign, v = 1<<(l.exponent+l.mantissa), -v
	}
	i, found := slices.BinarySearch(finite, v)
	if found {
		return sign | uint64(i)
	}
	// The value after the largest would be one step on.
	n := len(finite)
	above := 2*finite[n-1] - finite[n-2]
	if i < n {
		above = finite[i]
	} else if v > above {
		return sign | overflow
	}
	switch middle := finite[i-1] + (above-finite[i-1])/2; {
	case v < middle, v == middle && i%2 == 1:
		i--
	}
	return sign | uint64(i)
}

func bitsOf(d tensor.DType, b []byte) uint64 {
	switch d.Size() {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	}
	return binary.NativeEndian.Uint64(b)
}

func setBits(d tensor.DType, b []byte, bits uint64) {
	switch d.Size() {
	case 1:
		b[0] = uint8(bits)
	case 2:
		binary.NativeEndian.PutUint16(b, uint16(bits))
	case 4:
		binary.NativeEndian.PutUint32(b, uint32(bits))
	default:
		binary.NativeEndian.PutUint64(b, bits)
	}
}

func decode(d tensor.DType, b []byte) float64 {
	bits := bitsOf(d, b)
	switch d {
	case tensor.Float32:
		return float64(math.Float32frombits(uint32(bits)))
	case tensor.Float64:
		return math.Float64frombits(bits)
	}
	return layouts[d].value(bits)
}

// encode rounds v to float32 first, for the narrow types do their arithmetic
// there. Of a sum, product or quotient of narrower numbers in float64 that
// gives what float32 arithmetic does.
func encode(d tensor.DType, b []byte, v float64) {
	switch d {
	case tensor.Float64:
		setBits(d, b, math.Float64bits(v))
	case tensor.Float32:
		setBits(d, b, uint64(math.Float32bits(float32(v))))
	default:
		setBits(d, b, nearest(d, float64(float32(v))))
	}
}

func whole(d tensor.DType, b []byte) *big.Int {
	v := new(big.Int).SetUint64(bitsOf(d, b))
	if n := uint(8 * d.Size()); !d.IsUnsigned() && v.Bit(int(n-1)) == 1 {
		v.Sub(v, new(big.Int).Lsh(big.NewInt(1), n))
	}
	return v
}

func setWhole(d tensor.DType, b []byte, v *big.Int) {
	mod := new(big.Int).Lsh(big.NewInt(1), uint(8*d.Size()))
	setBits(d, b, new(big.Int).Mod(v, mod).Uint64()) // Mod is Euclidean: never negative
}

// part returns the dtype of the reals that d consists of.
func part(d tensor.DType) tensor.DType {
	switch d {
	case tensor.Complex64:
		return tensor.Float32
	case tensor.Complex128:
		return tensor.Float64
	}
	return d
}

// combine sets dst, one element or one part of a complex one, to dst op src.
func combine(k Kind, d tensor.DType, dst, src []byte) {
	switch {
	case d == tensor.Bool:
		a, b := dst[0] != 0, src[0] != 0
		switch k {
		case Sum, Max, BOr:
			a = a || b
		case Product, Min, BAnd:
			a = a && b
		case BXor:
			a = a != b
		}
		dst[0] = 0
		if a {
			dst[0] = 1
		}
	case d.IsInteger():
		a, b := whole(d, dst), whole(d, src)
		switch k {
		case Sum, PreMulSum:
			a.Add(a, b)
		case Product:
			a.Mul(a, b)
		case Min:
			if b.Cmp(a) < 0 {
				a = b
			}
		case Max:
			if a.Cmp(b) < 0 {
				a = b
			}
		case BAnd:
			a.And(a, b)
		case BOr:
			a.Or(a, b)
		case BXor:
			a.Xor(a, b)
		}
		setWhole(d, dst, a)
	default:
		a, b := decode(d, dst), decode(d, src)
		switch k {
		case Sum, Avg, PreMulSum:
			encode(d, dst, a+b)
		case Product:
			encode(d, dst, a*b)
		case Min:
			if b < a {
				copy(dst, src)
			}
		case Max:
			if a < b {
				copy(dst, src)
			}
		}
	}
}

// reference sets dst to dst op src.
func reference(k Kind, d tensor.DType, dst, src []byte) {
	p := part(d)
	for i := 0; i < len(dst); i += p.Size() {
		combine(k, p, dst[i:][:p.Size()], src[i:][:p.Size()])
	}
}

// same reports whether two results agree: their bits or, where arithmetic made
// them, that both are NaN.
func same(k Kind, d tensor.DType, want, got []byte) bool {
	if slices.Equal(want, got) {
		return true
	}
	if k == Min || k == Max || d.IsInteger() || d == tensor.Bool {
		return false
	}
	return math.IsNaN(decode(d, want)) && math.IsNaN(decode(d, got))
}
