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
	for i, v := range src[:len(dst)] {
		a, b := uint32(dst[i])<<16, uint32(v)<<16
		if math.Float32frombits(b) < math.Float32frombits(a) {
			a = b
		}
		dst[i] = uint16(a >> 16)
	}
}

func maxBF16(dst, src []uint16) {
	for i, v := range src[:len(dst)] {
		a, b := uint32(dst[i])<<16, uint32(v)<<16
		if math.Float32frombits(a) < math.Float32frombits(b) {
			a = b
		}
		dst[i] = uint16(a >> 16)
	}
}

// wideF16 returns the float32 of every float16: 256 KiB, made when first needed. A conversion by
// arithmetic cannot use branches, because a processor cannot predict the order of zeros,
// subnormals and normals in gradients. It took two to three times as long (float16/sum of
// BenchmarkKernel).
var wideF16 = sync.OnceValue(func() *[1 << 16]float32 {
	t := new([1 << 16]float32)
	for h := range t {
		t[h] = tensor.F16(h).Float32()
	}
	return t
})

// roundF16 returns f as a float16, and whether the result is correct. It is if the result is
// normal; use [tensor.F16From] otherwise. The compiler inlines it.
func roundF16(f float32) (h uint16, ok bool) {
	const least, over = 0x38800000, 0x477ff000 // 2^-14; 65520, which rounds to infinity
	b := math.Float32bits(f)
	x := b & 0x7fffffff
	return uint16((x+0xfff+x>>13&1-112<<23)>>13 | b>>16&0x8000), x-least < over-least
}

func sumF16(dst, src []uint16) {
	wide := wideF16()
	for i, b := range src[:len(dst)] {
		f := wide[dst[i]] + wide[b]
		h, ok := roundF16(f)
		if !ok {
			h = uint16(tensor.F16From(f))
		}
		dst[i] = h
	}
}

func productF16(dst, src []uint16) {
	wide := wideF16()
	for i, b := range src[:len(dst)] {
		f := wide[dst[i]] * wide[b]
		h, ok := roundF16(f)
		if !ok {
			h = uint16(tensor.F16From(f))
		}
		dst[i] = h
	}
}

func minF16(dst, src []uint16) {
	wide := wideF16()
	for i, v := range src[:len(dst)] {
		a, b := uint32(dst[i]), uint32(v)
		if wide[v] < wide[dst[i]] {
			a = b
		}
		dst[i] = uint16(a)
	}
}

func maxF16(dst, src []uint16) {
	wide := wideF16()
	for i, v := range src[:len(dst)] {
		a, b := uint32(dst[i]), uint32(v)
		if wide[dst[i]] < wide[v] {
			a = b
		}
		dst[i] = uint16(a)
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
