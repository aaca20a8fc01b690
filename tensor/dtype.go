package tensor

import (
	"fmt"
	"math"
	"strings"
)

// DType is the type of a tensor's elements. The zero value is Invalid.
type DType uint8

// The element types. Their String is PyTorch's name.
const (
	Invalid DType = iota
	Uint8
	Int8
	Int16
	Int32
	Int64
	Float16
	Float32
	Float64
	Complex64
	Complex128
	Bool
	BFloat16
	Float8E5M2
	Float8E4M3
	Uint16
	Uint32
	Uint64

	numDTypes
)

var dtypeInfo = [numDTypes]struct {
	name  string
	size  int
	torch int // PyTorch's ScalarType, as its wire formats carry it
}{
	Invalid:    {"invalid", 0, -1},
	Uint8:      {"uint8", 1, 0},
	Int8:       {"int8", 1, 1},
	Int16:      {"int16", 2, 2},
	Int32:      {"int32", 4, 3},
	Int64:      {"int64", 8, 4},
	Float16:    {"float16", 2, 5},
	Float32:    {"float32", 4, 6},
	Float64:    {"float64", 8, 7},
	Complex64:  {"complex64", 8, 9},
	Complex128: {"complex128", 16, 10},
	Bool:       {"bool", 1, 11},
	BFloat16:   {"bfloat16", 2, 15},
	Float8E5M2: {"float8_e5m2", 1, 23},
	Float8E4M3: {"float8_e4m3fn", 1, 24},
	Uint16:     {"uint16", 2, 27},
	Uint32:     {"uint32", 4, 28},
	Uint64:     {"uint64", 8, 29},
}

// DTypes returns every valid element type.
func DTypes() []DType {
	all := make([]DType, 0, numDTypes-1)
	for d := Invalid + 1; d < numDTypes; d++ {
		all = append(all, d)
	}
	return all
}

var aliases = map[string]DType{
	"short": Int16, "int": Int32, "long": Int64, "half": Float16,
	"float": Float32, "double": Float64, "cfloat": Complex64, "cdouble": Complex128,
}

// ParseDType returns the type that PyTorch calls name, with or without the
// "torch." in front. PyTorch's aliases ("half", "long", ...) are known too.
func ParseDType(name string) (DType, error) {
	short := strings.TrimPrefix(name, "torch.")
	if d, ok := aliases[short]; ok {
		return d, nil
	}
	for d := Invalid + 1; d < numDTypes; d++ {
		if dtypeInfo[d].name == short {
			return d, nil
		}
	}
	var known []string
	for d := Invalid + 1; d < numDTypes; d++ {
		known = append(known, dtypeInfo[d].name)
	}
	return Invalid, fmt.Errorf("tensor: unknown dtype %q (known: %s)", name, strings.Join(known, ", "))
}

// String returns PyTorch's name of the type.
func (d DType) String() string {
	if d >= numDTypes {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypeInfo[d].name
}

// Valid reports whether d is one of the element types.
func (d DType) Valid() bool { return d > Invalid && d < numDTypes }

// Size returns the bytes of one element, 0 for Invalid.
func (d DType) Size() int {
	if d >= numDTypes {
		return 0
	}
	return dtypeInfo[d].size
}

// TorchCode returns PyTorch's number for the type (its ScalarType), -1 for Invalid.
func (d DType) TorchCode() int {
	if d >= numDTypes {
		return -1
	}
	return dtypeInfo[d].torch
}

// IsFloat reports whether d is a real floating-point type, fp8 included.
func (d DType) IsFloat() bool {
	switch d {
	case Float16, BFloat16, Float32, Float64, Float8E4M3, Float8E5M2:
		return true
	}
	return false
}

// IsComplex reports whether d is a complex type.
func (d DType) IsComplex() bool { return d == Complex64 || d == Complex128 }

// IsInteger reports whether d is an integer type; bool is none.
func (d DType) IsInteger() bool {
	switch d {
	case Uint8, Int8, Uint16, Int16, Uint32, Int32, Uint64, Int64:
		return true
	}
	return false
}

// IsUnsigned reports whether d is an unsigned integer type.
func (d DType) IsUnsigned() bool {
	switch d {
	case Uint8, Uint16, Uint32, Uint64:
		return true
	}
	return false
}

// The element types that Go has no type for, as their bits.
type (
	F16    uint16 // IEEE 754 binary16
	BF16   uint16 // the upper half of a float32
	F8E4M3 uint8  // 4 exponent, 3 mantissa bits, no infinities (PyTorch's e4m3fn)
	F8E5M2 uint8  // 5 exponent, 2 mantissa bits
)

// Element is the set of Go types that a tensor's elements may have.
type Element interface {
	uint8 | uint16 | uint32 | uint64 | int8 | int16 | int32 | int64 |
		F16 | BF16 | F8E4M3 | F8E5M2 | float32 | float64 | bool | complex64 | complex128
}

// DTypeOf returns the element type that goes with a Go type.
func DTypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case uint8:
		return Uint8
	case uint16:
		return Uint16
	case uint32:
		return Uint32
	case uint64:
		return Uint64
	case int8:
		return Int8
	case int16:
		return Int16
	case int32:
		return Int32
	case int64:
		return Int64
	case F16:
		return Float16
	case BF16:
		return BFloat16
	case F8E4M3:
		return Float8E4M3
	case F8E5M2:
		return Float8E5M2
	case float32:
		return Float32
	case float64:
		return Float64
	case bool:
		return Bool
	case complex64:
		return Complex64
	case complex128:
		return Complex128
	}
	return Invalid
}

// Float32 returns the value of h; every F16 is exact in float32.
func (h F16) Float32() float32 {
	sign := uint32(h&0x8000) << 16
	exp := uint32(h>>10) & 0x1f
	man := uint32(h) & 0x3ff
	switch {
	case exp == 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | man<<13)
	case exp == 0:
		v := float32(man) * (1.0 / (1 << 24))
		return math.Float32frombits(sign | math.Float32bits(v))
	}
	return math.Float32frombits(sign | (exp+112)<<23 | man<<13)
}

// F16From returns the F16 nearest to f, ties to even. A NaN keeps its sign and
// the upper bits of its payload.
func F16From(f float32) F16 {
	b := math.Float32bits(f)
	sign := uint16(b>>16) & 0x8000
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return F16(sign | 0x7e00 | uint16(b>>13)&0x3ff)
	case b >= 0x477ff000: // rounds to 65536 or more
		return F16(sign | 0x7c00)
	case b < 0x38800000: // subnormal: adding 0.5 lets the float unit round at 2^-24
		v := math.Float32frombits(b) + 0.5
		return F16(sign | uint16(math.Float32bits(v)-0x3f000000))
	}
	b += 0xfff + b>>13&1
	return F16(sign | uint16((b-112<<23)>>13))
}

// Float32 returns the value of h; every BF16 is exact in float32.
func (h BF16) Float32() float32 { return math.Float32frombits(uint32(h) << 16) }

// BF16From returns the BF16 nearest to f, ties to even. Every NaN becomes
// 0x7fc0, as in PyTorch.
func BF16From(f float32) BF16 {
	b := math.Float32bits(f)
	if b&0x7fffffff > 0x7f800000 {
		return 0x7fc0
	}
	return BF16((b + 0x7fff + b>>16&1) >> 16)
}

// Float32 returns the value of e.
func (e F8E5M2) Float32() float32 { return F16(uint16(e) << 8).Float32() }

// F8E5M2From returns the F8E5M2 nearest to f, ties to even; what is out of
// range becomes infinite.
func F8E5M2From(f float32) F8E5M2 {
	b := math.Float32bits(f)
	sign := uint8(b>>24) & 0x80
	b &= 0x7fffffff
	switch {
	case b > 0x7f800000:
		return F8E5M2(sign | 0x7f)
	case b >= 0x47700000: // 61440, half way between 57344 and 65536
		return F8E5M2(sign | 0x7c)
	case b < 0x38800000: // below 2^-14: the step is 2^-16, one ulp of [64, 128)
		v := math.Float32frombits(b) + 128
		return F8E5M2(sign | uint8(math.Float32bits(v)-0x43000000))
	}
	b += 0xfffff + b>>21&1
	return F8E5M2(sign | uint8((b-112<<23)>>21))
}

// Float32 returns the value of e.
func (e F8E4M3) Float32() float32 {
	sign := uint32(e&0x80) << 24
	exp := uint32(e>>3) & 0xf
	man := uint32(e) & 7
	switch {
	case exp == 0xf && man == 7:
		return math.Float32frombits(sign | 0x7fc00000)
	case exp == 0:
		v := float32(man) * (1.0 / (1 << 9))
		return math.Float32frombits(sign | math.Float32bits(v))
	}
	return math.Float32frombits(sign | (exp+120)<<23 | man<<20)
}

// F8E4M3From returns the F8E4M3 nearest to f, ties to even. The type has no
// infinity: what is out of range becomes NaN, as in PyTorch.
func F8E4M3From(f float32) F8E4M3 {
	b := math.Float32bits(f)
	sign := uint8(b>>24) & 0x80
	b &= 0x7fffffff
	switch {
	case b > 0x43e80000: // above 464, half way between 448 and 480
		return F8E4M3(sign | 0x7f)
	case b < 0x3c800000: // below 2^-6: the step is 2^-9, one ulp of [2^14, 2^15)
		v := math.Float32frombits(b) + 16384
		return F8E4M3(sign | uint8(math.Float32bits(v)-0x46800000))
	}
	b += 0x7ffff + b>>20&1
	return F8E4M3(sign | uint8((b-120<<23)>>20))
}
