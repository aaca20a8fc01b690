package runs

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// width is how many bytes hold every distance within a range.
func width(span uint64) int {
	switch {
	case span <= 1<<8:
		return 1
	case span <= 1<<16:
		return 2
	case span <= 1<<32:
		return 4
	}
	return 8
}

// asBits reports whether a bit for each key of the range is the shorter form.
func asBits(n int, span uint64) bool {
	hi, all := bits.Mul64(uint64(n), uint64(width(span)))
	return hi != 0 || span/8 < all // rounded up, it is not longer
}

// Bytes returns how long n keys of a range of span keys are when encoded.
func Bytes(n int, span uint64) int64 {
	if asBits(n, span) {
		return int64(span/8 + min(span%8, 1))
	}
	return int64(n) * int64(width(span))
}

// Encode writes keys to dst, which must have the length that Bytes returns. The keys must ascend
// and lie within span keys from from.
func Encode(dst []byte, keys []uint64, from, span uint64) {
	if asBits(len(keys), span) {
		clear(dst)
		for _, k := range keys {
			dst[(k-from)/8] |= 1 << ((k - from) % 8)
		}
		return
	}
	switch width(span) {
	case 1:
		for i, k := range keys {
			dst[i] = byte(k - from)
		}
	case 2:
		for i, k := range keys {
			binary.LittleEndian.PutUint16(dst[2*i:], uint16(k-from))
		}
	case 4:
		for i, k := range keys {
			binary.LittleEndian.PutUint32(dst[4*i:], uint32(k-from))
		}
	default:
		for i, k := range keys {
			binary.LittleEndian.PutUint64(dst[8*i:], k-from)
		}
	}
}

// Decode is the inverse of Encode for len(keys) keys. Bytes that Encode would not
// have written are an error, so that keys then ascend and lie in the range.
func Decode(keys []uint64, src []byte, from, span uint64) error {
	if want := Bytes(len(keys), span); int64(len(src)) != want {
		return fmt.Errorf("%d keys of a range of %d in %d bytes, want %d", len(keys), span, len(src), want)
	}
	if asBits(len(keys), span) {
		return decodeBits(keys, src, from, span)
	}
	switch width(span) {
	case 1:
		for i := range keys {
			keys[i] = uint64(src[i])
		}
	case 2:
		for i := range keys {
			keys[i] = uint64(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case 4:
		for i := range keys {
			keys[i] = uint64(binary.LittleEndian.Uint32(src[4*i:]))
		}
	default:
		for i := range keys {
			keys[i] = binary.LittleEndian.Uint64(src[8*i:])
		}
	}
	for i, k := range keys {
		switch {
		case k >= span:
			return fmt.Errorf("key %d is %d, outside a range of %d", i, k, span)
		case i > 0 && k+from <= keys[i-1]:
			return fmt.Errorf("key %d does not come after the one before", i)
		}
		keys[i] = k + from
	}
	return nil
}

func decodeBits(keys []uint64, src []byte, from, span uint64) error {
	if rest := span % 8; rest != 0 && src[len(src)-1]>>rest != 0 {
		return fmt.Errorf("a key outside a range of %d", span)
	}
	n := 0
	for at := 0; at < len(src); at += 8 {
		w := word(src[at:])
		if n+bits.OnesCount64(w) > len(keys) {
			return fmt.Errorf("more keys than the %d that were announced", len(keys))
		}
		for ; w != 0; w &= w - 1 {
			keys[n] = from + uint64(8*at+bits.TrailingZeros64(w))
			n++
		}
	}
	if n != len(keys) {
		return fmt.Errorf("%d keys, announced were %d", n, len(keys))
	}
	return nil
}

// word is the first eight bytes of b, with zeros after its end.
func word(b []byte) uint64 {
	if len(b) >= 8 {
		return binary.LittleEndian.Uint64(b)
	}
	var w uint64
	for i, v := range b {
		w |= uint64(v) << (8 * i)
	}
	return w
}
