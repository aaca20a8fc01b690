package weights

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"unsafe"
)

// A delta lists the units of a bucket that changed: their indices, 4 bytes each, then their values.
// Numbers are little-endian, and indices increase. Units are compared as bits: -0 differs from 0, and
// a NaN equals itself.

// alignedBytes returns n zero bytes that begin at a multiple of 8.
func alignedBytes(n int) []byte {
	if n == 0 {
		return nil
	}
	words := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), n)
}

// diff appends to indices and values the units of now that differ from those of base, and copies them
// to base. It stops and returns false once the delta is not shorter than now; base is then partly
// copied.
func diff(base, now []byte, unit int, indices, values []byte) (_, _ []byte, short bool) {
	most := (len(now) - 1) / (4 + unit) // the longest delta that is shorter than now
	shift := bits.TrailingZeros(uint(unit))
	var dirty [256]int // where the lines that differ begin
	i := 0
	for len(now)-i >= line {
		// A first pass without branches finds lines that differ. The second one is shorter: 1 % of bfloat16
		// are in a quarter of the lines.
		count := 0
		for range min((len(now)-i)/line, len(dirty)) {
			a, b := (*[line]byte)(base[i:]), (*[line]byte)(now[i:])
			d := (word(a, 0) ^ word(b, 0)) | (word(a, 8) ^ word(b, 8)) | (word(a, 16) ^ word(b, 16)) | (word(a, 24) ^ word(b, 24)) |
				(word(a, 32) ^ word(b, 32)) | (word(a, 40) ^ word(b, 40)) | (word(a, 48) ^ word(b, 48)) | (word(a, 56) ^ word(b, 56))
			dirty[count&(len(dirty)-1)] = i
			count += int((d | -d) >> 63)
			i += line
		}
		for _, at := range dirty[:count] {
			if len(indices)/4 > most {
				return indices, values, false
			}
			a, b := (*[line]byte)(base[at:]), (*[line]byte)(now[at:])
			n, v := len(indices), len(values)
			indices, values = extend(indices, 4*line>>shift), extend(values, line+8)
			for j := 0; j < line; j += 8 {
				new := word(b, j)
				for d := word(a, j) ^ new; d != 0; {
					k := bits.TrailingZeros64(d) >> 3 >> shift << shift // the first byte of the unit
					binary.LittleEndian.PutUint32(indices[n:], uint32((at+j+k)>>shift))
					binary.LittleEndian.PutUint64(values[v:], new>>(8*k))
					n, v = n+4, v+unit
					d &^= (1<<(8*unit) - 1) << (8 * k)
				}
				binary.LittleEndian.PutUint64(a[j:], new)
			}
			indices, values = indices[:n], values[:v]
		}
	}
	for ; i < len(now); i += unit {
		if string(base[i:i+unit]) != string(now[i:i+unit]) {
			indices = binary.LittleEndian.AppendUint32(indices, uint32(i/unit))
			values = append(values, now[i:i+unit]...)
			copy(base[i:i+unit], now[i:i+unit])
		}
	}
	return indices, values, len(indices)/4 <= most
}

const line = 64 // bytes

// word returns the 8 bytes at i.
func word(b *[line]byte, i int) uint64 { return binary.LittleEndian.Uint64(b[i:]) }

// extend makes b longer by n bytes.
func extend(b []byte, n int) []byte { return slices.Grow(b, n)[:len(b)+n] }

// checkDelta reports what is wrong with the delta of count units for a bucket of size bytes.
func checkDelta(delta []byte, count, unit, size int) error {
	if len(delta) != count*(4+unit) {
		return fmt.Errorf("weights: a delta of %d elements has %d bytes, want %d", count, len(delta), count*(4+unit))
	}
	last, end := int64(-1), int64(size/unit)
	for _, k := range as[uint32](delta, count) {
		if int64(k) <= last || int64(k) >= end {
			return fmt.Errorf("weights: a delta has index %d after %d in a bucket of %d elements", k, last, size/unit)
		}
		last = int64(k)
	}
	return nil
}

// as returns the first count numbers of b, which begins at a multiple of their size. They are little-endian, as all hosts
// of this library have them.
func as[T uint16 | uint32](b []byte, count int) []T {
	if count == 0 {
		return nil
	}
	b = b[:count*int(unsafe.Sizeof(T(0)))]
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), count)
}

// patch applies a delta that checkDelta accepts.
func patch(to, delta []byte, count, unit int) {
	indices, values := as[uint32](delta, count), delta[4*count:]
	switch unit {
	case 2: // bf16 and f16, the usual case
		put(as[uint16](to, len(to)/2), indices, as[uint16](values, count))
	case 4:
		put(as[uint32](to, len(to)/4), indices, as[uint32](values, count))
	default:
		for i, k := range indices {
			copy(to[int(k)*unit:int(k+1)*unit], values[i*unit:])
		}
	}
}

func put[T any](to []T, indices []uint32, values []T) {
	values = values[:len(indices)]
	for i, k := range indices {
		to[k] = values[i]
	}
}
