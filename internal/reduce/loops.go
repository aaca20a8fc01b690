package reduce

import (
	"encoding/binary"
	"math"
)

// The loops take eight elements at a time, with one bounds check for them, and then the rest. All
// slices of a call have one length.

type integer interface {
	uint8 | uint16 | uint32 | uint64 | int8 | int16 | int32 | int64
}

type number interface {
	integer | float32 | float64
}

func sum[T number](dst, src []T) {
	for len(dst) >= 8 && len(src) >= 8 {
		d, s := (*[8]T)(dst), (*[8]T)(src)
		d[0] += s[0]
		d[1] += s[1]
		d[2] += s[2]
		d[3] += s[3]
		d[4] += s[4]
		d[5] += s[5]
		d[6] += s[6]
		d[7] += s[7]
		dst, src = dst[8:], src[8:]
	}
	for i, v := range src[:len(dst)] {
		dst[i] += v
	}
}

func product[T number](dst, src []T) {
	for len(dst) >= 8 && len(src) >= 8 {
		d, s := (*[8]T)(dst), (*[8]T)(src)
		d[0] *= s[0]
		d[1] *= s[1]
		d[2] *= s[2]
		d[3] *= s[3]
		d[4] *= s[4]
		d[5] *= s[5]
		d[6] *= s[6]
		d[7] *= s[7]
		dst, src = dst[8:], src[8:]
	}
	for i, v := range src[:len(dst)] {
		dst[i] *= v
	}
}

func minInt[T integer](dst, src []T) {
	for i, b := range src[:len(dst)] {
		dst[i] = min(dst[i], b)
	}
}

func maxInt[T integer](dst, src []T) {
	for i, b := range src[:len(dst)] {
		dst[i] = max(dst[i], b)
	}
}

// Min and max of floats select among the bits, which the compiler makes a conditional move. For
// floats it would branch, and mispredict every other element of random data.

func minF32(dst, src []uint32) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if math.Float32frombits(b) < math.Float32frombits(a) {
			a = b
		}
		dst[i] = a
	}
}

func maxF32(dst, src []uint32) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if math.Float32frombits(a) < math.Float32frombits(b) {
			a = b
		}
		dst[i] = a
	}
}

func minF64(dst, src []uint64) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if math.Float64frombits(b) < math.Float64frombits(a) {
			a = b
		}
		dst[i] = a
	}
}

func maxF64(dst, src []uint64) {
	for i, b := range src[:len(dst)] {
		a := dst[i]
		if math.Float64frombits(a) < math.Float64frombits(b) {
			a = b
		}
		dst[i] = a
	}
}

// The bitwise loops go by words whatever the element, and need no alignment.

func and(dst, src []byte) {
	for len(dst) >= 8 && len(src) >= 8 {
		put(dst, get(dst)&get(src))
		dst, src = dst[8:], src[8:]
	}
	for i, b := range src[:len(dst)] {
		dst[i] &= b
	}
}

func or(dst, src []byte) {
	for len(dst) >= 8 && len(src) >= 8 {
		put(dst, get(dst)|get(src))
		dst, src = dst[8:], src[8:]
	}
	for i, b := range src[:len(dst)] {
		dst[i] |= b
	}
}

func xor(dst, src []byte) {
	for len(dst) >= 8 && len(src) >= 8 {
		put(dst, get(dst)^get(src))
		dst, src = dst[8:], src[8:]
	}
	for i, b := range src[:len(dst)] {
		dst[i] ^= b
	}
}

func orBool(dst, src []byte) {
	for len(dst) >= 8 && len(src) >= 8 {
		put(dst, truth(get(dst)|get(src)))
		dst, src = dst[8:], src[8:]
	}
	for i, b := range src[:len(dst)] {
		dst[i] = byte(truth(uint64(dst[i] | b)))
	}
}

func andBool(dst, src []byte) {
	for len(dst) >= 8 && len(src) >= 8 {
		put(dst, truth(get(dst))&truth(get(src)))
		dst, src = dst[8:], src[8:]
	}
	for i, b := range src[:len(dst)] {
		dst[i] = byte(truth(uint64(dst[i])) & truth(uint64(b)))
	}
}

func xorBool(dst, src []byte) {
	for len(dst) >= 8 && len(src) >= 8 {
		put(dst, truth(get(dst))^truth(get(src)))
		dst, src = dst[8:], src[8:]
	}
	for i, b := range src[:len(dst)] {
		dst[i] = byte(truth(uint64(dst[i])) ^ truth(uint64(b)))
	}
}

// truth returns 1 in every byte in which w is not 0. A byte's lower seven bits
// reach the eighth when 0x7f is added, without a carry into the next.
func truth(w uint64) uint64 {
	const low = 0x7f7f7f7f7f7f7f7f
	return (w&low + low | w) >> 7 & 0x0101010101010101
}

func get(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

func put(b []byte, w uint64) { binary.NativeEndian.PutUint64(b, w) }
