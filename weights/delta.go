package weights

import (
	"encoding/binary"
	"fmt"
	"math/bits"
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
	i := 0
	for ; i+32 <= len(now); i += 32 {
		// Most blocks are equal if 1 % of the elements differ.
		a, b := base[i:i+32:i+32], now[i:i+32:i+32]
		if (word(a, 0)^word(b, 0))|(word(a, 8)^word(b, 8))|(word(a, 16)^word(b, 16))|(word(a, 24)^word(b, 24)) == 0 {
			continue
		}
		for j := 0; j < 32; j += 8 {
			new := word(b, j)
			for d := word(a, j) ^ new; d != 0; {
				k := bits.TrailingZeros64(d) / 8 / unit * unit // the first byte of the unit
				indices = binary.LittleEndian.AppendUint32(indices, uint32((i+j+k)/unit))
				values = append(values, b[j+k:j+k+unit]...)
				d &^= (1<<(8*unit) - 1) << (8 * k)
			}
			binary.LittleEndian.PutUint64(a[j:], new)
		}
		if len(indices)/4 > most {
			return indices, values, false
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

// word returns the 8 bytes at i.
func word(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[i:]) }

// checkDelta reports what is wrong with the delta of count units for a bucket of size bytes.
func checkDelta(delta []byte, count, unit, size int) error {
	if len(delta) != count*(4+unit) {
		return fmt.Errorf("weights: a delta of %d elements has %d bytes, want %d", count, len(delta), count*(4+unit))
	}
	last := -1
	for i := range count {
		k := int(binary.LittleEndian.Uint32(delta[4*i:]))
		if k <= last || k >= size/unit {
			return fmt.Errorf("weights: a delta has index %d after %d in a bucket of %d elements", k, last, size/unit)
		}
		last = k
	}
	return nil
}

// patch applies a delta that checkDelta accepts.
func patch(to, delta []byte, count, unit int) {
	values := delta[4*count:]
	if unit == 2 { // bf16 and f16, the usual case
		for i := range count {
			k := int(binary.LittleEndian.Uint32(delta[4*i:]))
			to[2*k], to[2*k+1] = values[2*i], values[2*i+1]
		}
		return
	}
	for i := range count {
		k := int(binary.LittleEndian.Uint32(delta[4*i:]))
		copy(to[k*unit:(k+1)*unit], values[i*unit:])
	}
}

// copyUnits copies the units with these indices, which are those of a delta that checkDelta accepted.
func copyUnits(to, from, indices []byte, unit int) {
	if unit == 2 {
		for ; len(indices) > 0; indices = indices[4:] {
			k := int(binary.LittleEndian.Uint32(indices))
			to[2*k], to[2*k+1] = from[2*k], from[2*k+1]
		}
		return
	}
	for ; len(indices) > 0; indices = indices[4:] {
		k := int(binary.LittleEndian.Uint32(indices))
		copy(to[k*unit:(k+1)*unit], from[k*unit:])
	}
}
