package main

import (
	"fmt"
	"math/bits"
	"slices"
)

// lanes are the names of a vector's lanes of so many bytes, in Go's syntax and in
// Arm's.
var lanes = map[int]struct{ plan9, arm string }{
	1: {"B16", "16b"}, 2: {"H8", "8h"}, 4: {"S4", "4s"}, 8: {"D2", "2d"},
}

// A neonInstruction returns the text of an instruction that sets register d to its result for n
// and m.
type neonInstruction func(d, n, m int) string

// known is an instruction that the assembler has, on lanes of size bytes.
func known(name string, size int) neonInstruction {
	l := lanes[size].plan9
	return func(d, n, m int) string {
		return fmt.Sprintf("%s\tV%d.%s, V%d.%s, V%d.%s", name, m, l, n, l, d, l)
	}
}

// word is an instruction that it has not.
func word(name string, code uint32, size int) neonInstruction {
	l := lanes[size].arm
	return func(d, n, m int) string {
		return fmt.Sprintf("WORD\t$0x%08x\t// %s v%d.%s, v%d.%s, v%d.%s", code|uint32(m<<16|n<<5|d), name, d, l, n, l, m, l)
	}
}

// integral is word with the code for bytes, floating with that for float32.

func integral(name string, code uint32, size int) neonInstruction {
	return word(name, code|uint32(bits.TrailingZeros(uint(size)))<<22, size)
}

func floating(name string, code uint32, size int) neonInstruction {
	return word(name, code|uint32(size/8)<<22, size)
}

func fadd(size int) neonInstruction  { return floating("fadd", 0x4e20d400, size) }
func fmul(size int) neonInstruction  { return floating("fmul", 0x6e20dc00, size) }
func fdiv(size int) neonInstruction  { return floating("fdiv", 0x6e20fc00, size) }
func fcmgt(size int) neonInstruction { return floating("fcmgt", 0x6ea0e400, size) }
func smin(size int) neonInstruction  { return integral("smin", 0x4e206c00, size) }
func smax(size int) neonInstruction  { return integral("smax", 0x4e206400, size) }

var (
	mul   = integral("mul", 0x4e209c00, 4)
	cmgt  = integral("cmgt", 0x4e203400, 8)
	cmhi  = integral("cmhi", 0x6e203400, 2)
	uqsub = integral("uqsub", 0x6e202c00, 2)
	umin  = known("VUMIN", 1)
	umax  = known("VUMAX", 1)
	bic   = word("bic", 0x4e601c00, 1) // n and not m
	bit   = known("VBIT", 1)           // takes n where m is 1
	zip1  = known("VZIP1", 2)
	zip2  = known("VZIP2", 2)
	uzp1  = known("VUZP1", 2)
	uzp2  = known("VUZP2", 2)
)

// kernelsNEON returns what kernelsAVX2 does, but for products of 64-bit integers,
// which NEON cannot multiply.
func kernelsNEON() []neonKernel {
	var list []neonKernel
	for _, typ := range []struct {
		name                   string
		sum, product, min, max neonOperation
	}{
		{"F32", direct(fadd(4)), direct(fmul(4)), lesser(fcmgt(4)), greater(fcmgt(4))},
		{"F64", direct(fadd(8)), direct(fmul(8)), lesser(fcmgt(8)), greater(fcmgt(8))},
		{"I8", direct(known("VADD", 1)), neonOperation{}, direct(smin(1)), direct(smax(1))},
		{"U8", neonOperation{}, neonOperation{}, direct(umin), direct(umax)},
		{"I32", direct(known("VADD", 4)), direct(mul), direct(smin(4)), direct(smax(4))},
		{"I64", direct(known("VADD", 8)), neonOperation{}, lesser(cmgt), greater(cmgt)},
		{"BF16", bf16.combined(fadd(4)), bf16.combined(fmul(4)), bf16.lesser(), bf16.greater()},
		{"F16", f16.combined(fadd(4)), f16.combined(fmul(4)), f16.lesser(), f16.greater()},
	} {
		for _, op := range []struct {
			name string
			neonOperation
		}{{"sum", typ.sum}, {"product", typ.product}, {"min", typ.min}, {"max", typ.max}} {
			if op.code != nil {
				list = append(list, neonKernel{
					Name: op.name + typ.name, Doc: "is the " + op.name + " of " + names[typ.name] + "s.", neonOperation: op.neonOperation,
				})
			}
		}
	}
	for _, s := range []struct {
		typ              string
		factor           int
		divide, multiply neonOperation
	}{
		{"F32", 4, direct(fdiv(4)), direct(fmul(4))},
		{"F64", 8, direct(fdiv(8)), direct(fmul(8))},
		{"BF16", 4, bf16.scaled(fdiv(4)), bf16.scaled(fmul(4))},
		{"F16", 4, f16.scaled(fdiv(4)), f16.scaled(fmul(4))},
	} {
		doc := fmt.Sprintf("scales %ss by the lowest %d bytes of by.", names[s.typ], s.factor)
		list = append(list,
			neonKernel{Name: "divide" + s.typ, Doc: doc, Factor: s.factor, neonOperation: s.divide},
			neonKernel{Name: "multiply" + s.typ, Doc: doc, Factor: s.factor, neonOperation: s.multiply},
		)
	}
	for _, b := range []struct {
		name string
		in   neonInstruction
	}{{"and", known("VAND", 1)}, {"or", known("VORR", 1)}, {"xor", known("VEOR", 1)}} {
		list = append(list,
			neonKernel{Name: b.name, Doc: "is " + b.name + ", by vectors.", neonOperation: direct(b.in)},
			neonKernel{Name: b.name + "Bool", Doc: "is " + b.name + "Bool, by vectors.", neonOperation: boolean(b.in)},
		)
	}
	for i := range list {
		list[i].Name += "NEON"
	}
	return list
}

// direct is an operation that is one instruction. d is its first operand, whose
// NaN is the result if both are, as Go has it.
func direct(in neonInstruction) neonOperation {
	return neonOperation{code: func(r neonRegisters) []string { return []string{in(r.d, r.d, r.s)} }}
}

// lesser and greater are min and max by an instruction that compares whether n is greater than m.
// For NaN that is false. NEON's own of floats make NaN of one NaN.

func lesser(compare neonInstruction) neonOperation {
	return neonOperation{code: func(r neonRegisters) []string {
		return []string{compare(r.t, r.d, r.s), bit(r.d, r.s, r.t)}
	}}
}

func greater(compare neonInstruction) neonOperation {
	return neonOperation{code: func(r neonRegisters) []string {
		return []string{compare(r.t, r.s, r.d), bit(r.d, r.s, r.t)}
	}}
}

// boolean is an operation on bools: min(x, 1) tells whether x is not 0.
func boolean(in neonInstruction) neonOperation {
	return neonOperation{
		constants: []uint64{0x0101010101010101},
		code: func(r neonRegisters) []string {
			return []string{umin(r.d, r.d, r.k[0]), umin(r.s, r.s, r.k[0]), in(r.d, r.d, r.s)}
		},
	}
}

// neonNarrow is a float of two bytes. A vector of them makes two of float32.
type neonNarrow struct {
	constants []uint64

	// widen makes low and high of x.
	widen func(r neonRegisters, low, high, x int) []string

	// round makes d of t and u, which it may change, as it may v and w.
	round func(r neonRegisters) []string
}

// bf16 is the upper half of a float32.
//
// Results are rounded once their upper halves are together in d and their lower ones in v. d is
// incremented if v, less 1 if d is even, has its highest bit set. A NaN can be told from d alone,
// for arithmetic makes them quiet.
var bf16 = neonNarrow{
	constants: []uint64{0, 0x0001000100010001, 0xff00ff00ff00ff00, 0x7fc07fc07fc07fc0},
	widen: func(r neonRegisters, low, high, x int) []string {
		zero := r.k[0]
		return []string{zip1(low, zero, x), zip2(high, zero, x)}
	},
	round: func(r neonRegisters) []string {
		one, infinity, nan := r.k[1], r.k[2], r.k[3] // infinity is without its sign, at the top
		return []string{
			uzp2(r.d, r.t, r.u),
			uzp1(r.v, r.t, r.u),
			bic(r.w, one, r.d),
			uqsub(r.w, r.v, r.w),
			known("VADD", 2)(r.v, r.d, r.d),
			cmhi(r.v, r.v, infinity),
			fmt.Sprintf("VUSRA\t$15, V%d.H8, V%d.H8", r.w, r.d),
			bit(r.d, nan, r.v),
		}
	},
}

// f16 is converted by the processor.
var f16 = neonNarrow{
	widen: func(_ neonRegisters, low, high, x int) []string {
		return []string{
			fmt.Sprintf("WORD\t$0x%08x\t// fcvtl v%d.4s, v%d.4h", 0x0e217800|x<<5|low, low, x),
			fmt.Sprintf("WORD\t$0x%08x\t// fcvtl2 v%d.4s, v%d.8h", 0x4e217800|x<<5|high, high, x),
		}
	},
	round: func(r neonRegisters) []string {
		return []string{
			fmt.Sprintf("WORD\t$0x%08x\t// fcvtn v%d.4h, v%d.4s", 0x0e216800|r.t<<5|r.d, r.d, r.t),
			fmt.Sprintf("WORD\t$0x%08x\t// fcvtn2 v%d.8h, v%d.4s", 0x4e216800|r.u<<5|r.d, r.d, r.u),
		}
	},
}

// combined is an operation on float32, whose result is rounded.
func (n neonNarrow) combined(in neonInstruction) neonOperation {
	return neonOperation{n.constants, func(r neonRegisters) []string {
		return slices.Concat(n.both(r), []string{in(r.t, r.t, r.v), in(r.u, r.u, r.w)}, n.round(r))
	}}
}

// scaled is combined with a float32 as s.
func (n neonNarrow) scaled(in neonInstruction) neonOperation {
	return neonOperation{n.constants, func(r neonRegisters) []string {
		return slices.Concat(n.widen(r, r.t, r.u, r.d), []string{in(r.t, r.t, r.s), in(r.u, r.u, r.s)}, n.round(r))
	}}
}

// lesser and greater compare float32 and select an operand's bits.

func (n neonNarrow) lesser() neonOperation {
	return neonOperation{n.constants, func(r neonRegisters) []string {
		return slices.Concat(n.both(r), []string{fcmgt(4)(r.t, r.t, r.v), fcmgt(4)(r.u, r.u, r.w)}, pick(r))
	}}
}

func (n neonNarrow) greater() neonOperation {
	return neonOperation{n.constants, func(r neonRegisters) []string {
		return slices.Concat(n.both(r), []string{fcmgt(4)(r.t, r.v, r.t), fcmgt(4)(r.u, r.w, r.u)}, pick(r))
	}}
}

// both widens d to t and u, and s to v and w.
func (n neonNarrow) both(r neonRegisters) []string {
	return append(n.widen(r, r.t, r.u, r.d), n.widen(r, r.v, r.w, r.s)...)
}

// pick takes elements of s where t and u say so, which have float32's width.
func pick(r neonRegisters) []string {
	return []string{uzp1(r.t, r.t, r.u), bit(r.d, r.s, r.t)}
}
