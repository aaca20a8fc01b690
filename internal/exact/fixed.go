package exact

import (
	"math"
	"math/bits"
)

// fixed is a sum in fixed point: word k counts units of 2^(32k) times the least positive number
// of the type. Words are signed, and 2^31 additions of 32 bits cannot overflow one. Carries are
// therefore done once, at the end.
type fixed struct {
	words    [70]int64
	lo, hi   int // words that may differ from 0, from lo up to hi, which is not among them
	nan      bool
	pos, neg bool // there was an infinity
}

func (s *fixed) reset() {
	clear(s.words[min(s.lo, s.hi):s.hi])
	s.lo, s.hi = len(s.words), 0
	s.nan, s.pos, s.neg = false, false, false
}

// special notes a NaN or an infinity.
func (s *fixed) special(nan, negative bool) {
	switch {
	case nan:
		s.nan = true
	case negative:
		s.neg = true
	default:
		s.pos = true
	}
}

// add32 adds a float32.
func (s *fixed) add32(b uint32) {
	exponent, m := int(b>>23&0xff), uint64(b&(1<<23-1))
	switch exponent {
	case 0xff:
		s.special(m != 0, b>>31 != 0)
		return
	case 0:
		exponent = 1
	default:
		m |= 1 << 23
	}
	s.put(m, exponent-1, b>>31 != 0)
}

// add64 adds a float64.
func (s *fixed) add64(b uint64) {
	exponent, m := int(b>>52&0x7ff), b&(1<<52-1)
	switch exponent {
	case 0x7ff:
		s.special(m != 0, b>>63 != 0)
		return
	case 0:
		exponent = 1
	default:
		m |= 1 << 52
	}
	s.put(m, exponent-1, b>>63 != 0)
}

// put adds m * 2^shift units.
func (s *fixed) put(m uint64, shift int, negative bool) {
	k, by := shift/32, uint(shift%32)
	low, high := m<<by, m>>(64-by) // Go shifts by 64 to 0
	parts := [3]int64{int64(low & math.MaxUint32), int64(low >> 32), int64(high)}
	if negative {
		for i := range parts {
			parts[i] = -parts[i]
		}
	}
	for i, p := range parts {
		s.words[k+i] += p
	}
	s.lo, s.hi = min(s.lo, k), max(s.hi, k+3)
}

// magnitude does the carries, and returns the sum's sign and its highest 64 bits. The sum is top
// * 2^(last-63) units, plus lower bits if sticky is set. last is the place of the highest bit. A
// sum of 0 has top 0.
func (s *fixed) magnitude() (negative bool, top uint64, last int, sticky bool) {
	carry := int64(0)
	for k := s.lo; k < s.hi; k++ {
		v := s.words[k] + carry
		s.words[k], carry = v&math.MaxUint32, v>>32
	}
	for carry != 0 && carry != -1 {
		s.words[s.hi], carry = carry&math.MaxUint32, carry>>32
		s.hi++
	}
	if negative = carry < 0; negative {
		carry = 1
		for k := s.lo; k < s.hi; k++ {
			v := (s.words[k] ^ math.MaxUint32) + carry
			s.words[k], carry = v&math.MaxUint32, v>>32
		}
		if carry > 0 {
			s.words[s.hi] = carry
			s.hi++
		}
	}
	k := s.hi - 1
	for k >= s.lo && s.words[k] == 0 {
		k--
	}
	if k < s.lo {
		return false, 0, 0, false
	}
	// Up to 96 bits from three words; the highest 64 count.
	word := func(k int) uint64 {
		if k < s.lo {
			return 0
		}
		return uint64(s.words[k])
	}
	n := bits.Len64(word(k))
	low := word(k-1)<<32 | word(k-2)
	top = word(k)<<(64-n) | low>>n
	sticky = low<<(64-n) != 0
	for j := s.lo; j < k-2 && !sticky; j++ {
		sticky = s.words[j] != 0
	}
	return negative, top, 32*k + n - 1, sticky
}

// mode says how a sum is rounded.
type mode uint8

const (
	nearest mode = iota // ties to even
	toOdd               // see odd
)

// round returns the bits of the sum, without sign, in a type with precision bits in the
// significand. The caller handles sums beyond the largest number.
func round(top uint64, last int, sticky bool, precision int, m mode) uint64 {
	unit := max(last-(precision-1), 0) // place of the last bit that stays
	// Drop the bits of top below unit. Its highest bit is at last.
	drop := uint(63 - last + unit)
	q, rest := top>>drop, top<<(64-drop)
	inexact := rest != 0 || sticky
	switch {
	case m == toOdd && inexact:
		q |= 1
	case m == nearest && (rest > 1<<63 || rest == 1<<63 && (sticky || q&1 == 1)):
		q++
	}
	// The implicit bit of q counts one into the exponent, and so does a carry.
	return uint64(unit)<<(precision-1) + q
}

// float32 returns a sum of float32s.
func (s *fixed) float32(m mode) float32 {
	switch {
	case s.nan || s.pos && s.neg:
		return math.Float32frombits(0x7fc00000)
	case s.pos || s.neg:
		return float32(math.Inf(sign(s.neg)))
	}
	negative, top, last, sticky := s.magnitude()
	if top == 0 {
		return 0
	}
	b := min(round(top, last, sticky, 24, m), 0x7f800000)
	if negative {
		b |= 1 << 31
	}
	return math.Float32frombits(uint32(b))
}

// float64 returns a sum of float64s.
func (s *fixed) float64() float64 {
	switch {
	case s.nan || s.pos && s.neg:
		return math.Float64frombits(0x7ff8000000000000)
	case s.pos || s.neg:
		return math.Inf(sign(s.neg))
	}
	negative, top, last, sticky := s.magnitude()
	if top == 0 {
		return 0
	}
	b := min(round(top, last, sticky, 53, nearest), 0x7ff0000000000000)
	if negative {
		b |= 1 << 63
	}
	return math.Float64frombits(b)
}

func sign(negative bool) int {
	if negative {
		return -1
	}
	return 1
}
