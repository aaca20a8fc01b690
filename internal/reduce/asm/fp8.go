package main

import (
	"math"

	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// octet is a float of one byte. It goes by float16, whose conversion the
// processor has: the even elements of a vector make one vector of those, the odd
// another. Sums and products are rounded twice, to float16 and to the byte, which
// gives what rounding once does: float16 has more than twice the bits, and one and
// two more, of what it is rounded to, and shows the ties of its subnormals. The
// tests try all pairs.
type octet struct {
	// widen returns the even or, if odd is 1, the odd elements as float16, times
	// 1/scale.
	widen func(x operand.Op, odd int) reg.VecVirtual
	scale float32

	// round returns the elements of two vectors of float16.
	round func(h [2]reg.VecVirtual) reg.VecVirtual

	// repair returns y with what is to become of NaN, in the operands or in y.
	repair func(d, s operand.Op, y reg.VecVirtual) reg.VecVirtual
}

// octets is an operation on float32, whose result is rounded. A product of
// scaled operands has the scale once too often.
func octets(begin func(g *generator) octet, in instruction, product bool) func(g *generator) operation {
	return func(g *generator) operation {
		o := begin(g)
		var scale reg.VecVirtual
		if product = product && o.scale != 1; product {
			bits := uint64(math.Float32bits(o.scale))
			scale = g.constant(bits<<32 | bits)
		}
		f := float16(g)
		round := f.round()
		return func(d, s operand.Op) reg.VecVirtual {
			// Operands are loaded each time: the registers are few.
			var h [2]reg.VecVirtual
			for i := range h {
				x, y := f.widen(o.widen(d, i)), f.widen(o.widen(s, i))
				for j := range x {
					if product {
						x[j] = g.do((*ctx).VMULPS, scale, x[j])
					}
					x[j] = g.do(in, y[j], x[j])
				}
				h[i] = round(x)
			}
			return o.repair(d, s, o.round(h))
		}
	}
}

// float8E5M2 is the upper half of a float16.
func float8E5M2(g *generator) octet {
	var (
		upper     = g.constant(0xff00ff00ff00ff00)
		below     = g.constant(0x007f007f007f007f) // one less than half a step
		magnitude = g.constant(0x7f7f7f7f7f7f7f7f)
		infinity  = g.constant(0x7c7c7c7c7c7c7c7c)
	)
	return octet{
		scale: 1,
		widen: func(x operand.Op, odd int) reg.VecVirtual {
			if odd == 1 {
				return g.and(x, upper)
			}
			even := g.vector()
			g.VPSLLW(operand.Imm(8), g.load(x), even)
			return even
		},
		round: func(h [2]reg.VecVirtual) reg.VecVirtual {
			for i, x := range h {
				odd := g.vector()
				g.VPSLLW(operand.Imm(7), x, odd)
				g.VPSRLW(operand.Imm(15), odd, odd)
				h[i] = g.do((*ctx).VPADDW, odd, g.do((*ctx).VPADDW, below, x))
			}
			return g.upperBytes(h)
		},
		// Every NaN becomes the one with all bits set.
		repair: func(_, _ operand.Op, y reg.VecVirtual) reg.VecVirtual {
			t := g.and(magnitude, y)
			if g.level == avx512 {
				k := g.K()
				g.VPCMPGTB(infinity, t, k)
				g.VMOVDQU8(g.or(magnitude, y), k, y)
				return y
			}
			g.VPCMPGTB(infinity, t, t)
			return g.or(g.and(magnitude, t), y)
		},
	}
}

// float8E4M3 has its magnitude one bit lower than float16 does, and a bias that
// is less by 8. Its NaN, all bits set, is taken for a number, and is what a sum or
// product that is too large is rounded to.
func float8E4M3(g *generator) octet {
	var (
		fields    = g.constant(0xbf80bf80bf80bf80)
		positive  = g.constant(0x7fff7fff7fff7fff)
		nan16     = g.constant(0x3f803f803f803f80)
		below     = g.constant(0x003f003f003f003f) // one less than half a step
		magnitude = g.constant(0x7f7f7f7f7f7f7f7f)
	)
	return octet{
		scale: 256,
		widen: func(x operand.Op, odd int) reg.VecVirtual {
			r, h := g.load(x), g.vector()
			if odd == 0 {
				even := g.vector()
				g.VPSLLW(operand.Imm(8), r, even)
				r = even
			}
			g.VPSRAW(operand.Imm(1), r, h)
			return g.and(fields, h)
		},
		round: func(h [2]reg.VecVirtual) reg.VecVirtual {
			for i, x := range h {
				m, odd := g.and(positive, x), g.vector()
				sign := g.xor(m, x)
				g.VPMINSW(nan16, m, m)
				g.VPSLLW(operand.Imm(8), m, odd)
				g.VPSRLW(operand.Imm(15), odd, odd)
				g.VPADDW(below, m, m)
				g.VPADDW(odd, m, m)
				g.VPADDW(m, m, m)
				h[i] = g.or(sign, m)
			}
			return g.upperBytes(h)
		},
		// An operand that is NaN is the result.
		repair: func(d, s operand.Op, y reg.VecVirtual) reg.VecVirtual {
			for _, x := range []operand.Op{s, d} {
				t := g.and(x, magnitude)
				if g.level == avx512 {
					k := g.K()
					g.VPCMPEQB(magnitude, t, k)
					g.VMOVDQU8(x, k, y)
					continue
				}
				g.VPCMPEQB(magnitude, t, t)
				g.VPBLENDVB(t, x, y, t)
				y = t
			}
			return y
		},
	}
}

// upperBytes returns the upper bytes of words, those of the first vector as even
// elements, those of the second as odd.
func (g *generator) upperBytes(h [2]reg.VecVirtual) reg.VecVirtual {
	even, odd := g.vector(), g.vector()
	g.VPSRLW(operand.Imm(8), h[0], even)
	g.VPSRLW(operand.Imm(8), h[1], odd)
	g.VPSLLW(operand.Imm(8), odd, odd)
	return g.or(even, odd)
}

// ordered is min or max of floats as integers, by their magnitudes and signs: so
// zeros are equal, and a NaN, whose magnitude is above last, is looked for apart.
func ordered(size int, last uint64, least bool) func(g *generator) operation {
	greater, negate := instruction((*ctx).VPCMPGTB), three((*ctx).VPSIGNB)
	every, positive := uint64(0x0101010101010101), uint64(0x7f)
	if size == 2 {
		greater, negate = (*ctx).VPCMPGTW, three((*ctx).VPSIGNW)
		every, positive = 0x0001000100010001, 0x7fff
	}
	return func(g *generator) operation {
		magnitude, limit := g.constant(every*positive), g.constant(every*last)
		return func(d, s operand.Op) reg.VecVirtual {
			a, b := g.load(d), g.load(s)
			m, n := g.do(three((*ctx).VPAND), magnitude, a), g.do(three((*ctx).VPAND), magnitude, b)
			nan := g.do(three((*ctx).VPOR), g.do(greater, limit, m), g.do(greater, limit, n))
			large, small := g.do(negate, a, m), g.do(negate, b, n)
			if !least {
				large, small = small, large
			}
			take := g.do(three((*ctx).VPANDN), g.do(greater, small, large), nan)
			y := g.vector()
			g.VPBLENDVB(take, b, a, y)
			return y
		}
	}
}
