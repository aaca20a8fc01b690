package main

import (
	"fmt"

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
	y := g.YMM()
	in(g.Context, append(ops, y)...)
	return y
}

func kernels() []kernel {
	var all []kernel
	names := map[string]string{"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I8": "int8", "U8": "uint8",
		"I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64"}
	element := func(typ string, size, unroll int, ops map[string]func(g *generator) operation) {
		for _, name := range []string{"sum", "product", "min", "max"} {
			if begin, ok := ops[name]; ok {
				all = append(all, kernel{
					name: name + typ + "AVX2", doc: "is the " + name + " of " + names[typ] + "s.",
					size: size, unroll: unroll, begin: begin,
				})
			}
		}
	}
	scale := func(name, typ string, size, unroll, factor int, begin func(g *generator) operation) {
		all = append(all, kernel{
			name: name + typ + "AVX2",
			doc:  fmt.Sprintf("scales %ss by the lowest %d bytes of by.", names[typ], factor),
			size: size, unroll: unroll, factor: factor, begin: begin,
		})
	}

	element("F32", 4, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VADDPS),
		"product": plain((*ctx).VMULPS),
		"min":     receivedFirst((*ctx).VMINPS),
		"max":     receivedFirst((*ctx).VMAXPS),
	})
	element("F64", 8, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VADDPD),
		"product": plain((*ctx).VMULPD),
		"min":     receivedFirst((*ctx).VMINPD),
		"max":     receivedFirst((*ctx).VMAXPD),
	})
	element("I8", 1, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDB),
		"product": multiply8,
		"min":     plain((*ctx).VPMINSB),
		"max":     plain((*ctx).VPMAXSB),
	})
	element("U8", 1, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUB),
		"max": plain((*ctx).VPMAXUB),
	})
	element("I16", 2, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDW),
		"product": plain((*ctx).VPMULLW),
		"min":     plain((*ctx).VPMINSW),
		"max":     plain((*ctx).VPMAXSW),
	})
	element("U16", 2, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUW),
		"max": plain((*ctx).VPMAXUW),
	})
	element("I32", 4, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDD),
		"product": plain((*ctx).VPMULLD),
		"min":     plain((*ctx).VPMINSD),
		"max":     plain((*ctx).VPMAXSD),
	})
	element("U32", 4, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUD),
		"max": plain((*ctx).VPMAXUD),
	})
	element("I64", 8, 4, map[string]func(g *generator) operation{
		"sum":     plain((*ctx).VPADDQ),
		"product": multiply64,
		"min":     select64(true, false),
		"max":     select64(false, false),
	})
	element("U64", 8, 4, map[string]func(g *generator) operation{
		"min": select64(true, true),
		"max": select64(false, true),
	})
	for _, typ := range []struct {
		name  string
		begin func(g *generator) narrow
	}{{"BF16", bfloat16}, {"F16", float16}} {
		element(typ.name, 2, 1, map[string]func(g *generator) operation{
			"sum":     widened(typ.begin, (*ctx).VADDPS),
			"product": widened(typ.begin, (*ctx).VMULPS),
			"min":     selected(typ.begin, true),
			"max":     selected(typ.begin, false),
		})
		scale("divide", typ.name, 2, 1, 4, scaled(typ.begin, (*ctx).VDIVPS))
		scale("multiply", typ.name, 2, 1, 4, scaled(typ.begin, (*ctx).VMULPS))
	}
	scale("divide", "F32", 4, 4, 4, plain((*ctx).VDIVPS))
	scale("divide", "F64", 8, 4, 8, plain((*ctx).VDIVPD))
	scale("multiply", "F32", 4, 4, 4, plain((*ctx).VMULPS))
	scale("multiply", "F64", 8, 4, 8, plain((*ctx).VMULPD))
	scale("multiply", "I8", 1, 4, 1, multiply8)
	scale("multiply", "I16", 2, 4, 2, plain((*ctx).VPMULLW))
	scale("multiply", "I32", 4, 4, 4, plain((*ctx).VPMULLD))
	scale("multiply", "I64", 8, 4, 8, multiply64)

	for _, k := range []kernel{
		{name: "andAVX2", doc: "is and, by vectors.", begin: plain(three((*ctx).VPAND))},
		{name: "orAVX2", doc: "is or, by vectors.", begin: plain(three((*ctx).VPOR))},
		{name: "xorAVX2", doc: "is xor, by vectors.", begin: plain(three((*ctx).VPXOR))},
		{name: "andBoolAVX2", doc: "is andBool, by vectors.", begin: logical(three((*ctx).VPAND))},
		{name: "orBoolAVX2", doc: "is orBool, by vectors.", begin: logical(three((*ctx).VPOR))},
		{name: "xorBoolAVX2", doc: "is xorBool, by vectors.", begin: logical(three((*ctx).VPXOR))},
	} {
		k.size, k.unroll = 1, 4
		all = append(all, k)
	}
	return all
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
		shifted := g.YMM()
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
		t, u := g.YMM(), g.YMM()
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
			y := g.YMM()
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
	round func(f [2]reg.VecVirtual) reg.VecVirtual
	mask  func(m [2]reg.VecVirtual) reg.VecVirtual // narrows lanes of all ones or all zeros
}

// widened is an operation on float32, whose result is rounded.
func widened(begin func(g *generator) narrow, in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		n := begin(g)
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := n.widen(d), n.widen(s)
			return n.round([2]reg.VecVirtual{g.do(in, b[0], a[0]), g.do(in, b[1], a[1])})
		}
	}
}

// scaled is widened with a float32 as s.
func scaled(begin func(g *generator) narrow, in instruction) func(g *generator) operation {
	return func(g *generator) operation {
		n := begin(g)
		return func(d, factor operand.Op) reg.VecVirtual {
			a := n.widen(d)
			return n.round([2]reg.VecVirtual{g.do(in, factor, a[0]), g.do(in, factor, a[1])})
		}
	}
}

// selected is min or max: it compares float32 and selects an operand's bits.
func selected(begin func(g *generator) narrow, least bool) func(g *generator) operation {
	const less = 0x11 // ordered, so that NaN is not less, and quiet
	return func(g *generator) operation {
		n := begin(g)
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := n.widen(d), n.widen(s)
			var take [2]reg.VecVirtual
			for i := range take {
				take[i] = g.YMM()
				if least {
					g.VCMPPS(operand.Imm(less), a[i], b[i], take[i])
				} else {
					g.VCMPPS(operand.Imm(less), b[i], a[i], take[i])
				}
			}
			y := n.mask(take)
			g.VPBLENDVB(y, s, g.load(d), y)
			return y
		}
	}
}

// bfloat16 is the upper half of a float32: one vector of the even elements, one
// of the odd.
func bfloat16(g *generator) narrow {
	var (
		upper = g.constant(0xffff0000ffff0000)
		one   = g.constant(0x0000000100000001)
		below = g.constant(0x00007fff00007fff) // one less than half a step
		nan   = g.constant(0x7fc000007fc00000)
	)
	// oddWords takes the lower words of even and the upper ones of odd.
	oddWords := func(even, odd reg.VecVirtual) reg.VecVirtual {
		y := g.YMM()
		g.VPBLENDW(operand.Imm(0xaa), odd, even, y)
		return y
	}
	return narrow{
		widen: func(x operand.Op) [2]reg.VecVirtual {
			r := g.load(x)
			even := g.YMM()
			g.VPSLLD(operand.Imm(16), r, even)
			return [2]reg.VecVirtual{even, g.do(three((*ctx).VPAND), upper, r)}
		},
		round: func(f [2]reg.VecVirtual) reg.VecVirtual {
			const unordered = 3
			for _, y := range f {
				t := g.YMM()
				g.VCMPPS(operand.Imm(unordered), y, y, t)
				g.VBLENDVPS(t, nan, y, y)
				g.VPSRLD(operand.Imm(16), y, t)
				g.VPAND(one, t, t)
				g.VPADDD(below, t, t)
				g.VPADDD(t, y, y)
			}
			g.VPSRLD(operand.Imm(16), f[0], f[0])
			return oddWords(f[0], f[1])
		},
		mask: func(m [2]reg.VecVirtual) reg.VecVirtual { return oddWords(m[0], m[1]) },
	}
}

// float16 is converted by the processor: one vector of the first eight
// elements, one of the last.
func float16(g *generator) narrow {
	return narrow{
		widen: func(x operand.Op) [2]reg.VecVirtual {
			low, high := g.YMM(), g.YMM()
			if m, ok := x.(operand.Mem); ok {
				g.VCVTPH2PS(m, low)
				g.VCVTPH2PS(m.Offset(width/2), high)
			} else {
				y := x.(reg.VecVirtual)
				g.VEXTRACTI128(operand.Imm(1), y, high.AsX())
				g.VCVTPH2PS(y.AsX(), low)
				g.VCVTPH2PS(high.AsX(), high)
			}
			return [2]reg.VecVirtual{low, high}
		},
		round: func(f [2]reg.VecVirtual) reg.VecVirtual {
			const nearestEven = 0
			low, high := g.YMM(), g.XMM()
			g.VCVTPS2PH(operand.Imm(nearestEven), f[0], low.AsX())
			g.VCVTPS2PH(operand.Imm(nearestEven), f[1], high)
			g.VINSERTI128(operand.Imm(1), high, low, low)
			return low
		},
		mask: func(m [2]reg.VecVirtual) reg.VecVirtual {
			const evenQuads = 0b11_01_10_00 // packing goes by halves of vectors
			y := g.YMM()
			g.VPACKSSDW(m[1], m[0], y)
			g.VPERMQ(operand.Imm(evenQuads), y, y)
			return y
		},
	}
}
