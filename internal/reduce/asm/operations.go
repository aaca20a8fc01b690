package main

import (
	"fmt"
	"slices"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

type ctx = build.Context

// An instruction has two sources, the second first, and a result, as Go's
// assembler has them.
type instruction = func(c *ctx, ops ...operand.Op)

// three makes an instruction of one that has no form but this.
func three(in func(c *ctx, src2, src1, dst operand.Op)) instruction {
	return func(c *ctx, ops ...operand.Op) { in(c, ops[0], ops[1], ops[2]) }
}

// do emits an instruction and returns its result.
func (g *generator) do(in instruction, ops ...operand.Op) reg.VecVirtual {
	y := g.vector()
	in(g.Context, append(ops, y)...)
	return y
}

// names are those of dtypes, by the ends of kernels' names.
var names = map[string]string{
	"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
	"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64",
}

// A begin loads constants and returns an operation.
type begin = func(g *generator) operation

// combining returns the kernels of a type, but for those that are nil.
func combining(typ string, sum, product, least, largest begin) []kernel {
	var list []kernel
	for _, op := range []struct {
		name string
		begin
	}{{"sum", sum}, {"product", product}, {"min", least}, {"max", largest}} {
		if op.begin != nil {
			list = append(list, kernel{name: op.name + typ, doc: "is the " + op.name + " of " + names[typ] + "s.", begin: op.begin})
		}
	}
	return list
}

// scaling returns the kernels that divide and multiply elements of a type by a
// factor of so many bytes.
func scaling(typ string, factor int, divide, multiply begin) []kernel {
	doc := fmt.Sprintf("scales %ss by the lowest %d bytes of by.", names[typ], factor)
	return []kernel{
		{name: "divide" + typ, doc: doc, begin: divide, factor: factor},
		{name: "multiply" + typ, doc: doc, begin: multiply, factor: factor},
	}
}

func kernelsAVX2() []kernel {
	return slices.Concat(
		combining("F32", plain((*ctx).VADDPS), plain((*ctx).VMULPS), receivedFirst((*ctx).VMINPS), receivedFirst((*ctx).VMAXPS)),
		combining("F64", plain((*ctx).VADDPD), plain((*ctx).VMULPD), receivedFirst((*ctx).VMINPD), receivedFirst((*ctx).VMAXPD)),
		combining("I8", plain((*ctx).VPADDB), nil, plain((*ctx).VPMINSB), plain((*ctx).VPMAXSB)),
		combining("U8", nil, nil, plain((*ctx).VPMINUB), plain((*ctx).VPMAXUB)),
		combining("I32", plain((*ctx).VPADDD), plain((*ctx).VPMULLD), plain((*ctx).VPMINSD), plain((*ctx).VPMAXSD)),
		combining("I64", plain((*ctx).VPADDQ), multiply64, select64(true), select64(false)),
		combining("BF16", bfloat16((*ctx).VADDPS), bfloat16((*ctx).VMULPS), bfloat16Picked((*ctx).VMINPS), bfloat16Picked((*ctx).VMAXPS)),
		combining("F16", float16((*ctx).VADDPS), float16((*ctx).VMULPS), float16Ordered(true), float16Ordered(false)),
		scaling("F32", 4, plain((*ctx).VDIVPS), plain((*ctx).VMULPS)),
		scaling("F64", 8, plain((*ctx).VDIVPD), plain((*ctx).VMULPD)),
		scaling("BF16", 4, bfloat16((*ctx).VDIVPS), bfloat16((*ctx).VMULPS)),
		scaling("F16", 4, float16((*ctx).VDIVPS), float16((*ctx).VMULPS)),
		[]kernel{
			{name: "and", doc: "is and, by vectors.", begin: plain(three((*ctx).VPAND))},
			{name: "or", doc: "is or, by vectors.", begin: plain(three((*ctx).VPOR))},
			{name: "xor", doc: "is xor, by vectors.", begin: plain(three((*ctx).VPXOR))},
			{name: "andBool", doc: "is andBool, by vectors.", begin: logical(three((*ctx).VPAND))},
			{name: "orBool", doc: "is orBool, by vectors.", begin: logical(three((*ctx).VPOR))},
			{name: "xorBool", doc: "is xorBool, by vectors.", begin: logical(three((*ctx).VPXOR))},
		},
	)
}

// kernelsAVX512 returns what AVX-512 does clearly faster than AVX2: the rounding of
// bfloat16.
func kernelsAVX512() []kernel {
	return slices.Concat(
		combining("BF16", bfloat16((*ctx).VADDPS), bfloat16((*ctx).VMULPS), nil, nil),
		scaling("BF16", 4, bfloat16((*ctx).VDIVPS), bfloat16((*ctx).VMULPS)),
	)
}

// plain is an operation that is one instruction. d is its first source, whose
// NaN is the result if both are.
func plain(in instruction) begin {
	return func(g *generator) operation {
		return func(d operand.Mem, s operand.Op) { g.move(g.do(in, s, g.load(d)), d) }
	}
}

// receivedFirst is plain with s as the first source. For a NaN or two zeros, minimum and maximum
// of floats give the second source, which must be the local operand.
func receivedFirst(in instruction) begin {
	return func(g *generator) operation {
		return func(d operand.Mem, s operand.Op) { g.move(g.do(in, d, g.load(s)), d) }
	}
}

// multiply64 adds up the three products of halves that reach the lower 64 bits.
func multiply64(g *generator) operation {
	return func(d operand.Mem, s operand.Op) {
		a, b := g.load(d), g.load(s)
		t, u := g.vector(), g.vector()
		g.VPSRLQ(operand.Imm(32), a, t)
		g.VPMULUDQ(t, b, t)
		g.VPSRLQ(operand.Imm(32), b, u)
		g.VPMULUDQ(u, a, u)
		g.VPADDQ(t, u, t)
		g.VPSLLQ(operand.Imm(32), t, t)
		g.VPMULUDQ(a, b, u)
		g.VPADDQ(t, u, t)
		g.move(t, d)
	}
}

// select64 is min or max of 64-bit integers, which can only be compared.
func select64(least bool) begin {
	return func(g *generator) operation {
		return func(d operand.Mem, s operand.Op) {
			a, b := g.load(d), g.load(s)
			large, small := a, b // the received one is taken if large > small
			if !least {
				large, small = b, a
			}
			y := g.vector()
			g.VPCMPGTQ(small, large, y)
			g.VBLENDVPD(y, b, a, y)
			g.move(y, d)
		}
	}
}

// logical is an operation on bools: min(x, 1) tells whether x is not 0.
func logical(in instruction) begin {
	return func(g *generator) operation {
		ones := g.constant(0x0101010101010101)
		return func(d operand.Mem, s operand.Op) {
			g.move(g.do(in, g.do((*ctx).VPMINUB, d, ones), g.do((*ctx).VPMINUB, s, ones)), d)
		}
	}
}

// float16 is an operation on float32, from and to which the processor converts
// half a vector.
func float16(in instruction) begin {
	const nearestEven = 0
	return func(g *generator) operation {
		widen := func(x operand.Op, off int) operand.Op {
			if m, ok := x.(operand.Mem); ok {
				y := g.vector()
				g.VCVTPH2PS(m.Offset(off), y)
				return y
			}
			return x // a factor is a float32
		}
		return func(d operand.Mem, s operand.Op) {
			for _, off := range []int{0, g.width / 2} {
				a, b := widen(d, off), widen(s, off)
				g.VCVTPS2PH(operand.Imm(nearestEven), g.do(in, b, a), d.Offset(off))
			}
		}
	}
}

// float16Ordered is min or max of float16s as integers, by their magnitudes and
// signs: so zeros are equal. A NaN, whose magnitude is above infinity's, is looked
// for apart.
func float16Ordered(least bool) begin {
	return func(g *generator) operation {
		magnitude, infinity := g.constant(0x7fff7fff7fff7fff), g.constant(0x7c007c007c007c00)
		return func(d operand.Mem, s operand.Op) {
			a, b := g.load(d), g.load(s)
			m, n := g.do(three((*ctx).VPAND), magnitude, a), g.do(three((*ctx).VPAND), magnitude, b)
			nan := g.do(three((*ctx).VPOR), g.do((*ctx).VPCMPGTW, infinity, m), g.do((*ctx).VPCMPGTW, infinity, n))
			large, small := g.do(three((*ctx).VPSIGNW), a, m), g.do(three((*ctx).VPSIGNW), b, n)
			if !least {
				large, small = small, large
			}
			take := g.do(three((*ctx).VPANDN), g.do((*ctx).VPCMPGTW, small, large), nan)
			y := g.vector()
			g.VPBLENDVB(take, b, a, y)
			g.move(y, d)
		}
	}
}

// A bfloat16 is the upper half of a float32. A vector of them makes a pair of
// vectors of float32: one of the even elements, one of the odd.
type pair [2]reg.VecVirtual

// bfloat16 is an operation on float32, whose result is rounded.
func bfloat16(in instruction) begin {
	return func(g *generator) operation {
		widen, join := g.bfloat16()
		round := g.round(join)
		return func(d operand.Mem, s operand.Op) {
			a, b := widen(d), pair{}
			if factor, ok := s.(reg.VecVirtual); ok {
				b = pair{factor, factor}
			} else {
				b = widen(s)
			}
			g.move(round(pair{g.do(in, b[0], a[0]), g.do(in, b[1], a[1])}), d)
		}
	}
}

// bfloat16Picked is min or max as receivedFirst is: the processor's minimum and
// maximum of float32 give one operand, to the bit.
func bfloat16Picked(in instruction) begin {
	return func(g *generator) operation {
		widen, join := g.bfloat16()
		return func(d operand.Mem, s operand.Op) {
			a, b := widen(d), widen(s)
			g.move(g.highs(join, pair{g.do(in, a[0], b[0]), g.do(in, a[1], b[1])}), d)
		}
	}
}

// bfloat16 returns what widens, and what joins the even words of a vector and the
// odd ones of another.
func (g *generator) bfloat16() (widen func(x operand.Op) pair, join func(even, odd reg.VecVirtual) reg.VecVirtual) {
	upper := g.constant(0xffff0000ffff0000)
	and := three((*ctx).VPAND)
	join = func(even, odd reg.VecVirtual) reg.VecVirtual {
		y := g.vector()
		g.VPBLENDW(operand.Imm(0xaa), odd, even, y)
		return y
	}
	if g.level == avx512 {
		and = (*ctx).VPANDD
		odds := g.mask(0xaaaaaaaa)
		join = func(even, odd reg.VecVirtual) reg.VecVirtual {
			y := g.vector()
			g.VPBLENDMW(odd, even, odds, y)
			return y
		}
	}
	widen = func(x operand.Op) pair {
		r, even := g.load(x), g.vector()
		g.VPSLLD(operand.Imm(16), r, even)
		return pair{even, g.do(and, upper, r)}
	}
	return widen, join
}

// highs returns the upper halves of float32s.
func (g *generator) highs(join func(even, odd reg.VecVirtual) reg.VecVirtual, f pair) reg.VecVirtual {
	y := g.vector()
	g.VPSRLD(operand.Imm(16), f[0], y)
	return join(y, f[1])
}

// lows returns the lower halves.
func (g *generator) lows(join func(even, odd reg.VecVirtual) reg.VecVirtual, f pair) reg.VecVirtual {
	y := g.vector()
	g.VPSLLD(operand.Imm(16), f[1], y)
	return join(f[0], y)
}

// round returns what makes bfloat16s of float32s.
//
// It rounds both vectors in one step. First it collects the upper halves in high and
// the lower ones in low. Then high goes up in two cases: low is more than one half of
// a step of high; or it is one half, and high is odd.
func (g *generator) round(join func(even, odd reg.VecVirtual) reg.VecVirtual) func(f pair) reg.VecVirtual {
	if g.level == avx512 {
		return g.roundMasked(join)
	}
	var (
		one       = g.constant(0x0001000100010001)
		magnitude = g.constant(0x7fff7fff7fff7fff)
		infinity  = g.constant(0x7f807f807f807f80)
		nan       = g.constant(0x7fc07fc07fc07fc0)
	)
	return func(f pair) reg.VecVirtual {
		high, low := g.highs(join, f), g.lows(join, f)
		// The highest bit of low less 1, or less 0 if high is odd, says up.
		t := g.do(three((*ctx).VPANDN), one, high)
		g.VPSUBUSW(t, low, t)
		g.VPSRLW(operand.Imm(15), t, t)
		g.VPADDW(t, high, t)
		// A NaN can be told from high alone, for arithmetic makes them quiet.
		isNaN := g.do(three((*ctx).VPAND), magnitude, high)
		g.VPCMPGTW(infinity, isNaN, isNaN)
		g.VPBLENDVB(isNaN, nan, t, t)
		return t
	}
}

// roundMasked is round for AVX-512.
func (g *generator) roundMasked(join func(even, odd reg.VecVirtual) reg.VecVirtual) func(f pair) reg.VecVirtual {
	const (
		orAnd   = 0b1111_1000 // of the first operand, and of both others
		greater = 6
	)
	var (
		one       = g.constant(0x0001000100010001)
		half      = g.constant(0x8000800080008000)
		up        = g.constant(0xffffffffffffffff)
		nan       = g.constant(0x7fc000007fc00000)
		unlessNaN = g.constant(0x1111110011111100) // by class: the constant stays, or the number is taken
	)
	return func(f pair) reg.VecVirtual {
		for i, from := range f {
			f[i] = g.vector()
			g.move(nan, f[i])
			g.VFIXUPIMMPS(operand.Imm(0), unlessNaN, from, f[i])
		}
		high, low, above := g.highs(join, f), g.lows(join, f), g.K()
		g.VPTERNLOGD(operand.Imm(orAnd), one, high, low)
		g.VPCMPUW(operand.Imm(greater), half, low, above)
		g.VPSUBW(up, high, above, high)
		return high
	}
}
