package reduce

import (
	"math"
	"sync"

	"github.com/c10d-go/c10d/tensor"
)

func widenBF16(h uint16) float32 { return tensor.BF16(h).Float32() }

func roundBF16(f float32) uint16 { return uint16(tensor.BF16From(f)) }

func sumBF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		dst[i] = roundBF16(widenBF16(dst[i]) + widenBF16(b))
	}
}

func productBF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		dst[i] = roundBF16(widenBF16(dst[i]) * widenBF16(b))
	}
}

func minBF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if widenBF16(b) < widenBF16(a) {
			a = b
		}
		dst[i] = a
	}
}

func maxBF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if widenBF16(a) < widenBF16(b) {
			a = b
		}
		dst[i] = a
	}
}

// widenF16 returns what [tensor.F16.Float32] does, without a branch: gradients
// mix zeros, subnormals and normals in no order that a processor could guess.
func widenF16(h uint16) float32 {
	x := uint32(h) & 0x7fff
	// All ones if x is subnormal or zero. Such a value is m * 2^-24, and
	// 2^-14 + m * 2^-24 less 2^-14 is exact.
	small := uint32(int32(x-0x400) >> 31)
	// All ones if x is infinite or NaN: the exponent goes from 31 to 255.
	large := uint32(int32(0x7bff-x) >> 31)
	f := math.Float32frombits(x<<13+112<<23+small&(1<<23)+large&(112<<23)) - math.Float32frombits(small&(113<<23))
	return math.Float32frombits(math.Float32bits(f) | uint32(h&0x8000)<<16)
}

// roundF16 returns what [tensor.F16From] does, with one branch that is all but
// never taken.
func roundF16(f float32) uint16 {
	b := math.Float32bits(f)
	x := b & 0x7fffffff
	if x >= 0x477ff000 { // 65520 rounds to infinity
		return uint16(tensor.F16From(f))
	}
	h := (x + 0xfff + x>>13&1 - 112<<23) >> 13
	// Adding 0.5 lets the float unit round a subnormal at 2^-24.
	s := math.Float32bits(math.Float32frombits(x)+0.5) - 0x3f000000
	if x < 0x38800000 {
		h = s
	}
	return uint16(h | b>>16&0x8000)
}

func sumF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		dst[i] = roundF16(widenF16(dst[i]) + widenF16(b))
	}
}

func productF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		dst[i] = roundF16(widenF16(dst[i]) * widenF16(b))
	}
}

func minF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if widenF16(b) < widenF16(a) {
			a = b
		}
		dst[i] = a
	}
}

func maxF16(dst, src []uint16) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if widenF16(a) < widenF16(b) {
			a = b
		}
		dst[i] = a
	}
}

// tabulated returns the loops of an fp8 type. Each looks its results up in a
// table of all pairs of operands, 64 KiB that are made when first needed.
func tabulated[T ~uint8](widen func(T) float32, round func(float32) T) map[Kind]func(dst, src []uint8) {
	loop := func(op func(a, b T) T) func(dst, src []uint8) {
		table := sync.OnceValue(func() *[1 << 16]uint8 {
			t := new([1 << 16]uint8)
			for i := range t {
				t[i] = uint8(op(T(i>>8), T(i)))
			}
			return t
		})
		return func(dst, src []uint8) {
			t := table()
			for i, b := range src[:len(dst)] {
				dst[i] = t[uint16(dst[i])<<8|uint16(b)]
			}
		}
	}
	return map[Kind]func(dst, src []uint8){
		Sum:     loop(func(a, b T) T { return round(widen(a) + widen(b)) }),
		Product: loop(func(a, b T) T { return round(widen(a) * widen(b)) }),
		Min: loop(func(a, b T) T {
			if widen(b) < widen(a) {
				return b
			}
			return a
		}),
		Max: loop(func(a, b T) T {
			if widen(a) < widen(b) {
				return b
			}
			return a
		}),
	}
}
