package driver

import (
	"encoding/binary"
	"math"
	"slices"
)

// Args is the parameters of a kernel. Each lies at the next multiple of its own
// alignment. PTX's .param declarations place parameters like that, and CUDA's launch
// takes such a buffer. The zero value has no parameters. An Args may be used for many launches, one after the other; Reset
// and the same calls again allocate nothing.
//
//	args.Reset().Ptr(dst).Ptr(src).Uint64(n).Float32(scale)
type Args struct {
	buf  []byte
	offs []int
	lent bool // buf is the caller's
}

// MaxArgs is the most bytes that parameters may take.
const MaxArgs = 4096

// Reset removes all parameters.
func (a *Args) Reset() *Args {
	if a.lent {
		a.buf, a.lent = nil, false
	}
	a.buf, a.offs = a.buf[:0], a.offs[:0]
	return a
}

// Set makes a's parameters those of b.
func (a *Args) Set(b *Args) *Args {
	a.Reset()
	a.buf, a.offs = append(a.buf, b.buf...), append(a.offs, b.offs...)
	return a
}

// next makes room for a parameter of n bytes.
func (a *Args) next(n, align int) []byte {
	if a.lent {
		a.buf, a.lent = slices.Clip(a.buf), false
	}
	had, at := len(a.buf), (len(a.buf)+align-1)/align*align
	a.buf = slices.Grow(a.buf, at+n-had)[:at+n]
	clear(a.buf[had:])
	a.offs = append(a.offs, at)
	return a.buf[at : at+n]
}

// Ptr appends an address.
func (a *Args) Ptr(p Ptr) *Args { return a.Uint64(uint64(p)) }

// Uint64 appends 8 bytes.
func (a *Args) Uint64(v uint64) *Args {
	binary.NativeEndian.PutUint64(a.next(8, 8), v)
	return a
}

// Int64 appends 8 bytes.
func (a *Args) Int64(v int64) *Args { return a.Uint64(uint64(v)) }

// Uint32 appends 4 bytes.
func (a *Args) Uint32(v uint32) *Args {
	binary.NativeEndian.PutUint32(a.next(4, 4), v)
	return a
}

// Int32 appends 4 bytes.
func (a *Args) Int32(v int32) *Args { return a.Uint32(uint32(v)) }

// Float32 appends 4 bytes.
func (a *Args) Float32(v float32) *Args { return a.Uint32(math.Float32bits(v)) }

// Float64 appends 8 bytes.
func (a *Args) Float64(v float64) *Args { return a.Uint64(math.Float64bits(v)) }

// Struct appends a structure passed by value: its bytes, at an alignment of 1,
// 2, 4, 8 or 16.
func (a *Args) Struct(b []byte, align int) *Args {
	copy(a.next(len(b), max(align, 1)), b)
	return a
}

// StructIn makes b the only parameter, a structure that begins at any alignment. It copies nothing: the
// bytes are those of b when the kernel is launched.
func (a *Args) StructIn(b []byte) *Args {
	a.buf, a.lent = b, true
	a.offs = append(a.offs[:0], 0)
	return a
}

// Len returns the number of parameters.
func (a *Args) Len() int {
	if a == nil {
		return 0
	}
	return len(a.offs)
}

// Bytes returns the packed parameters, for drivers. They are valid until the
// next change.
func (a *Args) Bytes() []byte {
	if a == nil {
		return nil
	}
	return a.buf
}

// Offset returns where parameter i begins in Bytes, for drivers.
func (a *Args) Offset(i int) int { return a.offs[i] }
