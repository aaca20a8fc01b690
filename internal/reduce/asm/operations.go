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

// and, or and xor are bitwise; the names of the instructions are their levels'.

func (g *generator) and(a, b operand.Op) reg.VecVirtual {
	if g.level == avx512 {
		return g.do((*ctx).VPANDD, a, b)
	}
	return g.do(three((*ctx).VPAND), a, b)
}

func (g *generator) or(a, b operand.Op) reg.VecVirtual {
	if g.level == avx512 {
		return g.do((*ctx).VPORD, a, b)
	}
	return g.do(three((*ctx).VPOR), a, b)
}

func (g *generator) xor(a, b operand.Op) reg.VecVirtual {
	if g.level == avx512 {
		return g.do((*ctx).VPXORD, a, b)
	}
	return g.do(three((*ctx).VPXOR), a, b)
}

// A list collects kernels.
type list []kernel

var names = map[string]string{"BF16": "bfloat16", "F16": "float16", "E5M2": "float8_e5m2", "E4M3": "float8_e4m3fn", "F32": "float32", "F64": "float64", "I8": "int8", "U8": "uint8",
	"I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64"}

// elements adds what combines elements of a type.
func (l *list) elements(typ string, size, unroll int, ops map[string]func(g *generator) operation) {
	for _, name := range []string{"sum", "product", "min", "max"} {
		if begin, ok := ops[name]; ok {
			*l = append(*l, kernel{
				name: name + typ, doc: "is the " + name + " of " + names[typ] + "s.",
				size: size, unroll: unroll, begin: begin,
			})
		}
	}
}

// find returns the kernel of a name.
func (l list) find(name string) *kernel {
	return &l[slices.IndexFunc(l, func(k kernel) bool { return k.name == name })]
}

// scale adds what divides or multiplies elements of a type.
func (l *list) scale(name, typ string, size, unroll, factor int, begin func(g *generator) operation) {
	*l = append(*l, kernel{
		name: name + typ,
		doc:  fmt.Sprintf("scales %ss by the lowest %d bytes of by.", names[typ], factor),
		size: size, unroll: unroll, factor: factor, begin: begin,
	})
}

func kernelsAVX2() []kernel {
	var l list
	l.elements("F32", 4, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VADDPS),
		"product": plain((*ctx).VMULPS),
		"min":     receivedFirst((*ctx).VMINPS),
		"max":     receivedFirst((*ctx).VMAXPS),
	})
	l.elements("F64", 8, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VADDPD),
		"product": plain((*ctx).VMULPD),
		"min":     receivedFirst((*ctx).VMINPD),
		"max":     receivedFirst((*ctx).VMAXPD),
	})
	l.elements("I8", 1, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDB),
		"product": multiply8,
		"min":     plain((*ctx).VPMINSB),
		"max":     plain((*ctx).VPMAXSB),
	})
	l.elements("U8", 1, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUB),
		"max": plain((*ctx).VPMAXUB),
	})
	l.elements("I16", 2, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDW),
		"product": plain((*ctx).VPMULLW),
		"min":     plain((*ctx).VPMINSW),
		"max":     plain((*ctx).VPMAXSW),
	})
	l.elements("U16", 2, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUW),
		"max": plain((*ctx).VPMAXUW),
	})
	l.elements("I32", 4, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDD),
		"product": plain((*ctx).VPMULLD),
		"min":     plain((*ctx).VPMINSD),
		"max":     plain((*ctx).VPMAXSD),
	})
	l.elements("U32", 4, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUD),
		"max": plain((*ctx).VPMAXUD),
	})
	l.elements("I64", 8, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDQ),
		"product": multiply64,
		"min":     select64(true, false),
		"max":     select64(false, false),
	})
	l.elements("U64", 8, 4, map[string]func(g *generator) operation{
		"min": select64(true, true),
		"max": select64(false, true),
	})
	l.elements("BF16", 2, 1, map[string]func(g *generator) operation{
		"sum":     widened(bfloat16, (*ctx).VADDPS),
		"product": widened(bfloat16, (*ctx).VMULPS),
		"min":     picked(bfloat16, (*ctx).VMINPS),
		"max":     picked(bfloat16, (*ctx).VMAXPS),
	})
	l.elements("F16", 2, 1, map[string]func(g *generator) operation{
		"sum":     widened(float16, (*ctx).VADDPS),
		"product": widened(float16, (*ctx).VMULPS),
		"min":     ordered(2, 0x7c00, true),
		"max":     ordered(2, 0x7c00, false),
	})
	l.elements("E5M2", 1, 1, map[string]func(g *generator) operation{
		"sum":     octets(float8E5M2, (*ctx).VADDPS, false),
		"product": octets(float8E5M2, (*ctx).VMULPS, true),
		"min":     ordered(1, 0x7c, true),
		"max":     ordered(1, 0x7c, false),
	})
	l.elements("E4M3", 1, 1, map[string]func(g *generator) operation{
		"sum":     octets(float8E4M3, (*ctx).VADDPS, false),
		"product": octets(float8E4M3, (*ctx).VMULPS, true),
		"min":     ordered(1, 0x7e, true),
		"max":     ordered(1, 0x7e, false),
	})
	l.scale("divide", "BF16", 2, 1, 4, scaled(bfloat16, (*ctx).VDIVPS))
	l.scale("multiply", "BF16", 2, 1, 4, scaled(bfloat16, (*ctx).VMULPS))
	l.scale("divide", "F16", 2, 1, 4, scaled(float16, (*ctx).VDIVPS))
	l.scale("multiply", "F16", 2, 1, 4, scaled(float16, (*ctx).VMULPS))
	for name, in := range map[string]instruction{
		"sumF16": (*ctx).VADDPS, "productF16": (*ctx).VMULPS, "divideF16": (*ctx).VDIVPS, "multiplyF16": (*ctx).VMULPS,
	} {
		l.find(name).store = storeFloat16(in)
	}
	l.scale("divide", "F32", 4, 4, 4, plain((*ctx).VDIVPS))
	l.scale("divide", "F64", 8, 4, 8, plain((*ctx).VDIVPD))
	l.scale("multiply", "F32", 4, 4, 4, plain((*ctx).VMULPS))
	l.scale("multiply", "F64", 8, 4, 8, plain((*ctx).VMULPD))
	l.scale("multiply", "I8", 1, 4, 1, multiply8)
	l.scale("multiply", "I16", 2, 4, 2, plain((*ctx).VPMULLW))
	l.scale("multiply", "I32", 4, 4, 4, plain((*ctx).VPMULLD))
	l.scale("multiply", "I64", 8, 4, 8, multiply64)

	for _, k := range []kernel{
		{name: "and", doc: "is and, by vectors.", begin: plain(three((*ctx).VPAND))},
		{name: "or", doc: "is or, by vectors.", begin: plain(three((*ctx).VPOR))},
		{name: "xor", doc: "is xor, by vectors.", begin: plain(three((*ctx).VPXOR))},
		{name: "andBool", doc: "is andBool, by vectors.", begin: logical(three((*ctx).VPAND))},
		{name: "orBool", doc: "is orBool, by vectors.", begin: logical(three((*ctx).VPOR))},
		{name: "xorBool", doc: "is xorBool, by vectors.", begin: logical(three((*ctx).VPXOR))},
	} {
		k.size, k.unroll = 1, 4
		l = append(l, k)
	}
	return l
}

// plain is an operation that is one instruction. d is its first source, whose
// NaN is the result if both are.
func plain(in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		return func(d, s operand.Op) reg.VecVirtual { return g.do(in, s, g.load(d)) }
	}
}

// receivedFirst is plain with s as the first source: minimum and maximum of
// floats give the second one if either is NaN, and of zeros, and that has to be
// the local operand.
func receivedFirst(in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		return func(d, s operand.Op) reg.VecVirtual { return g.do(in, d, g.load(s)) }
	}
}

// multiply8 multiplies bytes, for which there is no instruction, as the lower
// and the upper halves of words.
func multiply8(g *generator) operation {
	upper := g.constant(0xff00ff00ff00ff00)
	return func(d, s operand.Op) reg.VecVirtual {
		a, b := g.load(d), g.load(s)
		even := g.do((*ctx).VPMULLW, a, b)
		even = g.do(three((*ctx).VPANDN), even, upper)
		shifted := g.vector()
		g.VPSRLW(operand.Imm(8), a, shifted)
		odd := g.do(three((*ctx).VPAND), upper, b)
		odd = g.do((*ctx).VPMULLW, odd, shifted)
		return g.do(three((*ctx).VPOR), odd, even)
	}
}

// multiply64 adds up the three products of halves that reach the lower 64 bits.
func multiply64(g *generator) operation {
	return func(d, s operand.Op) reg.VecVirtual {
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
		return t
	}
}

// select64 is min or max of 64-bit integers. Only signed ones can be compared;
// turning their highest bits over puts unsigned ones into the same order.
func select64(least, unsigned bool) func(g *generator) operation {
	return func(g *generator) operation {
		var sign reg.VecVirtual
		if unsigned {
			sign = g.constant(1 << 63)
		}
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := g.load(d), g.load(s)
			large, small := a, b // the received one is taken if large > small
			if !least {
				large, small = b, a
			}
			if unsigned {
				large = g.do(three((*ctx).VPXOR), sign, large)
				small = g.do(three((*ctx).VPXOR), sign, small)
			}
			y := g.vector()
			g.VPCMPGTQ(small, large, y)
			g.VBLENDVPD(y, b, a, y)
			return y
		}
	}
}

// logical is an operation on bools: min(x, 1) tells whether x is not 0.
func logical(in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		ones := g.constant(0x0101010101010101)
		return func(d, s operand.Op) reg.VecVirtual {
			a := g.do((*ctx).VPMINUB, d, ones)
			b := g.do((*ctx).VPMINUB, s, ones)
			return g.do(in, a, b)
		}
	}
}

// narrow is a float of two bytes. A vector of them makes two vectors of
// float32, in an order of its own.
type narrow struct {
	widen func(x operand.Op) [2]reg.VecVirtual

	// round loads constants and returns what rounds.
	round func() func(f [2]reg.VecVirtual) reg.VecVirtual

	// take returns the elements of s where the first float32 of a pair is less
	// than the second, and those of d elsewhere. Float16 has it, with AVX-512.
	take func(d, s operand.Op, less [2][2]reg.VecVirtual) reg.VecVirtual

	// narrow returns what widen was given. Bfloat16 has it.
	narrow func(f [2]reg.VecVirtual) reg.VecVirtual
}

// widened is an operation on float32, whose result is rounded.
func widened(begin func(g *generator) narrow, in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		n := begin(g)
		round := n.round()
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := n.widen(d), n.widen(s)
			return round([2]reg.VecVirtual{g.do(in, b[0], a[0]), g.do(in, b[1], a[1])})
		}
	}
}

// scaled is widened with a float32 as s.
func scaled(begin func(g *generator) narrow, in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		n := begin(g)
		round := n.round()
		return func(d, factor operand.Op) reg.VecVirtual {
			a := n.widen(d)
			return round([2]reg.VecVirtual{g.do(in, factor, a[0]), g.do(in, factor, a[1])})
		}
	}
}

// picked is min or max as receivedFirst is: the processor's minimum and maximum
// of float32 give one operand, to the bit.
func picked(begin func(g *generator) narrow, in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		n := begin(g)
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := n.widen(d), n.widen(s)
			return n.narrow([2]reg.VecVirtual{g.do(in, a[0], b[0]), g.do(in, a[1], b[1])})
		}
	}
}

// selected is min or max of what widening changes, a signalling NaN: it
// compares float32 and selects an operand's bits.
func selected(begin func(g *generator) narrow, least bool) func(g *generator) operation {
	return func(g *generator) operation {
		n := begin(g)
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := n.widen(d), n.widen(s)
			if !least {
				a, b = b, a
			}
			return n.take(d, s, [2][2]reg.VecVirtual{{b[0], a[0]}, {b[1], a[1]}})
		}
	}
}

// bfloat16 is the upper half of a float32: one vector of the even elements, one
// of the odd.
//
// Results are rounded after their upper halves, high, and their lower ones, low,
// were brought together, in one step for both vectors: high goes up where low is
// above one half of a step of it, or is one half and high is odd. A NaN can be
// told from high alone, for arithmetic makes them quiet.
func bfloat16(g *generator) narrow {
	if g.level == avx512 {
		return bfloat16Masked(g)
	}
	upper := g.constant(0xffff0000ffff0000)
	// oddWords takes the lower words of even and the upper ones of odd.
	oddWords := func(even, odd reg.VecVirtual) reg.VecVirtual {
		y := g.vector()
		g.VPBLENDW(operand.Imm(0xaa), odd, even, y)
		return y
	}
	highs := func(f [2]reg.VecVirtual) reg.VecVirtual {
		y := g.vector()
		g.VPSRLD(operand.Imm(16), f[0], y)
		return oddWords(y, f[1])
	}
	return narrow{
		widen: func(x operand.Op) [2]reg.VecVirtual {
			r := g.load(x)
			even := g.vector()
			g.VPSLLD(operand.Imm(16), r, even)
			return [2]reg.VecVirtual{even, g.do(three((*ctx).VPAND), upper, r)}
		},
		round: func() func(f [2]reg.VecVirtual) reg.VecVirtual {
			var (
				one       = g.constant(0x0001000100010001)
				magnitude = g.constant(0x7fff7fff7fff7fff)
				infinity  = g.constant(0x7f807f807f807f80)
				nan       = g.constant(0x7fc07fc07fc07fc0)
			)
			return func(f [2]reg.VecVirtual) reg.VecVirtual {
				high := highs(f)
				low := g.vector()
				g.VPSLLD(operand.Imm(16), f[1], low)
				low = oddWords(f[0], low)
				// The highest bit of low less 1, or less 0 if high is odd, says up.
				t := g.do(three((*ctx).VPANDN), one, high)
				g.VPSUBUSW(t, low, t)
				g.VPSRLW(operand.Imm(15), t, t)
				g.VPADDW(t, high, t)
				isNaN := g.do(three((*ctx).VPAND), magnitude, high)
				g.VPCMPGTW(infinity, isNaN, isNaN)
				g.VPBLENDVB(isNaN, nan, t, t)
				return t
			}
		},
		narrow: highs,
	}
}

// bfloat16Masked is bfloat16 for AVX-512.
func bfloat16Masked(g *generator) narrow {
	const greater = 6
	upper := g.constant(0xffff0000ffff0000)
	odd := g.mask(0xaaaaaaaa)
	oddWords := func(even, from reg.VecVirtual) reg.VecVirtual {
		y := g.vector()
		g.VPBLENDMW(from, even, odd, y)
		return y
	}
	highs := func(f [2]reg.VecVirtual) reg.VecVirtual {
		y := g.vector()
		g.VPSRLD(operand.Imm(16), f[0], y)
		return oddWords(y, f[1])
	}
	return narrow{
		widen: func(x operand.Op) [2]reg.VecVirtual {
			even := g.vector()
			g.VPSLLD(operand.Imm(16), x, even)
			return [2]reg.VecVirtual{even, g.do((*ctx).VPANDD, x, upper)}
		},
		round: func() func(f [2]reg.VecVirtual) reg.VecVirtual {
			const orAnd = 0b1111_1000 // of the first operand, and of both others
			var (
				one       = g.constant(0x0001000100010001)
				half      = g.constant(0x8000800080008000)
				up        = g.constant(0xffffffffffffffff)
				nan       = g.constant(0x7fc000007fc00000)
				unlessNaN = g.constant(0x1111110011111100) // by class: the constant stays, or the number is taken
			)
			return func(f [2]reg.VecVirtual) reg.VecVirtual {
				for i, from := range f {
					f[i] = g.vector()
					g.move(nan, f[i])
					g.VFIXUPIMMPS(operand.Imm(0), unlessNaN, from, f[i])
				}
				high := highs(f)
				low := g.vector()
				g.VPSLLD(operand.Imm(16), f[1], low)
				low = oddWords(f[0], low)
				above := g.K()
				g.VPTERNLOGD(operand.Imm(orAnd), one, high, low)
				g.VPCMPUW(operand.Imm(greater), half, low, above)
				g.VPSUBW(up, high, above, high)
				return high
			}
		},
		narrow: highs,
	}
}

const nearestEven = 0 // of the conversion to float16

// float16 is converted by the processor: one vector of the first half of the
// elements, one of the last.
func float16(g *generator) narrow {
	const less = 0x11 // ordered, so that NaN is not less, and quiet
	n := narrow{
		widen: func(x operand.Op) [2]reg.VecVirtual {
			low, high := g.vector(), g.vector()
			switch x := x.(type) {
			case operand.Mem:
				g.VCVTPH2PS(x, low)
				g.VCVTPH2PS(x.Offset(g.width/2), high)
			case reg.VecVirtual:
				half := g.half(high)
				if g.level == avx512 {
					g.VEXTRACTI64X4(operand.Imm(1), x, half)
				} else {
					g.VEXTRACTI128(operand.Imm(1), x, half)
				}
				g.VCVTPH2PS(g.half(x), low)
				g.VCVTPH2PS(half, high)
			}
			return [2]reg.VecVirtual{low, high}
		},
		round: func() func(f [2]reg.VecVirtual) reg.VecVirtual {
			return func(f [2]reg.VecVirtual) reg.VecVirtual {
				low, high := g.vector(), g.half(g.vector())
				g.VCVTPS2PH(operand.Imm(nearestEven), f[0], g.half(low))
				g.VCVTPS2PH(operand.Imm(nearestEven), f[1], high)
				if g.level == avx512 {
					g.VINSERTI64X4(operand.Imm(1), high, low, low)
				} else {
					g.VINSERTI128(operand.Imm(1), high, low, low)
				}
				return low
			}
		},
	}
	n.take = func(d, s operand.Op, f [2][2]reg.VecVirtual) reg.VecVirtual {
		low, high, y := g.K(), g.K(), g.vector()
		g.VCMPPS(operand.Imm(less), f[0][1], f[0][0], low)
		g.VCMPPS(operand.Imm(less), f[1][1], f[1][0], high)
		g.KUNPCKWD(low, high, low)
		g.VPBLENDMW(s, g.load(d), low, y)
		return y
	}
	return n
}

// storeFloat16 is widened or scaled for float16. The conversion stores half a
// vector, and then leaves out a step on the way to a register.
func storeFloat16(in instruction) func(g *generator, d, s operand.Op, to operand.Mem) {
	return func(g *generator, d, s operand.Op, to operand.Mem) {
		n := float16(g)
		a, b := n.widen(d), [2]operand.Op{s, s}
		if m, ok := s.(operand.Mem); ok {
			wide := n.widen(m)
			b = [2]operand.Op{wide[0], wide[1]}
		}
		for i := range a {
			g.VCVTPS2PH(operand.Imm(nearestEven), g.do(in, b[i], a[i]), to.Offset(i*g.width/2))
		}
	}
}
