package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A generator emits the loops of one level.
type generator struct {
	*build.Context
	level
}

// A level is what a loop may ask of the processor.
type level struct {
	name  string // what names of functions end in
	width int    // the bytes of a vector
}

var (
	avx2   = level{"AVX2", 32}
	avx512 = level{"AVX512", 64}
)

// vector returns a register as wide as the level has them.
func (g *generator) vector() reg.VecVirtual {
	if g.level == avx512 {
		return g.ZMM()
	}
	return g.YMM()
}

// move emits a load, a store or a copy of a vector.
func (g *generator) move(from, to operand.Op) {
	if g.level == avx512 {
		g.VMOVDQU64(from, to)
		return
	}
	g.VMOVDQU(from, to)
}

// An operation emits what combines a vector of the local operand, d, and one of
// the received, s, and returns the register of the results. Operands are in
// memory or in registers, and keep their values.
type operation func(d, s operand.Op) reg.VecVirtual

// A kernel is one function of package reduce.
type kernel struct {
	name string
	doc  string
	size int // the bytes of an element

	// unroll is how many vectors the main loop takes at a time. Four of those
	// that take one instruction each pay for the loop's own four; an operation
	// of a dozen instructions does not notice them.
	unroll int

	// begin loads constants and returns the operation. If the kernel scales,
	// the operation's s is the factor, in all lanes as wide as factor says.
	begin  func(g *generator) operation
	factor int // the bytes of a factor; 0 for two slices

	// ahead is how far ahead the main loop of AVX-512 fetches; 0 leaves that to the
	// processor. A loop whose arithmetic takes as long as memory gains by it.
	ahead int

	// store, if there is one, emits the operation and stores its results for less
	// than it takes to bring them together in one register.
	store func(g *generator, d, s operand.Op, to operand.Mem)
}

// A walk is what the loops of a kernel go by: the registers of its arguments,
// of which dst, src and n advance, and its operation.
type walk struct {
	kernel
	dst, src, n reg.Register   // src only with two slices
	by          reg.VecVirtual // the factor of a kernel that scales
	op          operation
}

// kernel emits a function that works on any number of elements at any address,
// and touches no byte outside of its slices.
//
// Every store comes after the loads of the bytes that it changes, so that both
// slices may be the same.
func (g *generator) kernel(k kernel) {
	k.name += g.level.name
	g.Function(k.name)
	g.Attributes(attr.NOSPLIT)
	g.Pragma("noescape")
	g.Doc(k.name + " " + k.doc)
	w := walk{kernel: k}
	if k.factor > 0 {
		g.SignatureExpr("func(b []byte, by uint64)")
		w.dst = g.Load(g.Param("b").Base(), g.GP64())
		w.n = g.Load(g.Param("b").Len(), g.GP64())
		w.by = g.broadcast(g.Load(g.Param("by"), g.GP64()), k.factor)
	} else {
		g.SignatureExpr("func(dst, src []byte)")
		w.dst = g.Load(g.Param("dst").Base(), g.GP64())
		w.src = g.Load(g.Param("src").Base(), g.GP64())
		w.n = g.Load(g.Param("dst").Len(), g.GP64())
	}
	w.op = k.begin(g)
	if g.level == avx512 {
		g.masked(w)
	} else {
		g.overlapping(w)
	}
}

// apply emits the operation on a vector of each operand.
func (w walk) apply(d, s operand.Op) reg.VecVirtual {
	if w.factor > 0 {
		return w.op(d, w.by)
	}
	return w.op(d, s)
}

// combine emits the operation on the i-th vectors from here, and stores the results.
func (g *generator) combine(w walk, i int) {
	var (
		d            = operand.Mem{Base: w.dst, Disp: i * g.width}
		s operand.Op = w.by
	)
	if w.factor == 0 {
		s = operand.Mem{Base: w.src, Disp: i * g.width}
	}
	if w.store != nil {
		w.store(g, d, s, d)
	} else {
		g.move(w.apply(d, s), d)
	}
}

// advance leaves vectors behind.
func (g *generator) advance(w walk, vectors int) {
	bytes := operand.I32(vectors * g.width)
	g.ADDQ(bytes, w.dst)
	if w.factor == 0 {
		g.ADDQ(bytes, w.src)
	}
	g.SUBQ(bytes, w.n)
}

// masked emits the loops of AVX-512, whose loads and stores leave out, and do not
// even look at, the bytes that a mask leaves out: what is no whole vector.
func (g *generator) masked(w walk) {
	whole := func(vectors int, loop, after string) {
		bytes := operand.I32(vectors * g.width)
		g.SUBQ(bytes, w.n)
		g.JL(operand.LabelRef(after))
		g.Label(loop)
		for i := range vectors {
			if vectors > 1 && w.ahead > 0 {
				g.PREFETCHT0(operand.Mem{Base: w.dst, Disp: w.ahead + i*g.width})
				g.PREFETCHT0(operand.Mem{Base: w.src, Disp: w.ahead + i*g.width})
			}
			g.combine(w, i)
		}
		g.advance(w, vectors)
		g.JGE(operand.LabelRef(loop))
		g.Label(after)
		g.ADDQ(bytes, w.n)
	}
	if w.unroll > 1 {
		whole(w.unroll, "unrolled", "single")
	}
	whole(1, "vector", "tail")
	g.JZ(operand.LabelRef("done"))

	bits, k := g.GP64(), g.K()
	g.MOVQ(operand.I32(-1), bits)
	g.BZHIQ(w.n, bits, bits)
	g.KMOVQ(bits, k)
	d, s := g.vector(), g.vector()
	g.VMOVDQU8_Z(operand.Mem{Base: w.dst}, k, d)
	if w.factor == 0 {
		g.VMOVDQU8_Z(operand.Mem{Base: w.src}, k, s)
	}
	g.VMOVDQU8(w.apply(d, s), k, operand.Mem{Base: w.dst})
	g.Label("done")
	g.VZEROUPPER()
	g.RET()
}

// overlapping emits the loops of AVX2, which has no masks for bytes:
//
//   - The last vector's results are computed first, kept in a register, and
//     stored last. The main loop can then take whole vectors only: what it
//     writes into the last vector's place is overwritten by the same results.
//   - Less than a vector is loaded as two halves, which overlap unless it is a
//     power of two, side by side in one register, and stored like that.
func (g *generator) overlapping(w walk) {
	dst, src, n, width := w.dst, w.src, w.n, g.width
	d, s := g.YMM(), g.YMM()
	last := func(base reg.Register) operand.Mem {
		return operand.Mem{Base: base, Index: n, Scale: 1, Disp: -width}
	}
	g.CMPQ(n, operand.Imm(uint64(width)))
	g.JB(operand.LabelRef("loadShort"))
	g.VMOVDQU(last(dst), d)
	if w.factor == 0 {
		g.VMOVDQU(last(src), s)
	}
	g.Label("compute")
	t := w.apply(d, s)
	g.CMPQ(n, operand.Imm(uint64(width)))
	g.JB(operand.LabelRef("storeShort"))

	end := g.GP64()
	g.LEAQ(last(dst), end)
	g.SUBQ(operand.Imm(uint64(width)), n) // what is left to the main loop
	if w.unroll > 1 {
		g.SUBQ(operand.Imm(uint64(w.unroll*width)), n)
		g.JL(operand.LabelRef("single"))
		g.Label("unrolled")
		for i := range w.unroll {
			g.combine(w, i)
		}
		g.advance(w, w.unroll)
		g.JGE(operand.LabelRef("unrolled"))
		g.Label("single")
		g.ADDQ(operand.Imm(uint64(w.unroll*width)), n)
	}
	g.TESTQ(n, n)
	g.JLE(operand.LabelRef("storeLast"))
	g.Label("vector")
	g.combine(w, 0)
	g.advance(w, 1)
	g.JG(operand.LabelRef("vector"))
	g.Label("storeLast")
	g.VMOVDQU(t, operand.Mem{Base: end})
	g.Label("done")
	g.VZEROUPPER()
	g.RET()

	g.Label("loadShort")
	halves := w.halves()
	for _, h := range halves {
		g.unless(n, h)
		h.load(g, dst, n, d)
		if w.factor == 0 {
			h.load(g, src, n, s)
		}
		g.JMP(operand.LabelRef("compute"))
		g.Label("loadLess" + h.name)
	}
	g.JMP(operand.LabelRef("done"))

	g.Label("storeShort")
	for i, h := range halves {
		if i < len(halves)-1 {
			g.CMPQ(n, operand.Imm(uint64(h.bytes)))
			g.JB(operand.LabelRef("storeLess" + h.name))
		}
		h.store(g, t, dst, n)
		g.JMP(operand.LabelRef("done"))
		g.Label("storeLess" + h.name)
	}
}

// A half is how less than a vector is loaded and stored: bytes from its start,
// and as many to its end.
type half struct {
	bytes int
	name  string
	load  func(g *generator, base, n reg.Register, y reg.VecVirtual)
	store func(g *generator, y reg.VecVirtual, base, n reg.Register)
}

// halves returns the halves that elements of the kernel need, the largest first.
func (k kernel) halves() []half {
	tail := func(base, n reg.Register, bytes int) operand.Mem {
		return operand.Mem{Base: base, Index: n, Scale: 1, Disp: -bytes}
	}
	all := []half{
		{16, "16", func(g *generator, base, n reg.Register, y reg.VecVirtual) {
			g.VMOVDQU(operand.Mem{Base: base}, y.AsX())
			g.VINSERTI128(operand.Imm(1), tail(base, n, 16), y, y)
		}, func(g *generator, y reg.VecVirtual, base, n reg.Register) {
			g.VMOVDQU(y.AsX(), operand.Mem{Base: base})
			g.VEXTRACTI128(operand.Imm(1), y, tail(base, n, 16))
		}},
		{8, "8", func(g *generator, base, n reg.Register, y reg.VecVirtual) {
			g.VMOVQ(operand.Mem{Base: base}, y.AsX())
			g.VPINSRQ(operand.Imm(1), tail(base, n, 8), y.AsX(), y.AsX())
		}, func(g *generator, y reg.VecVirtual, base, n reg.Register) {
			g.VMOVQ(y.AsX(), operand.Mem{Base: base})
			g.VPEXTRQ(operand.Imm(1), y.AsX(), tail(base, n, 8))
		}},
		{4, "4", func(g *generator, base, n reg.Register, y reg.VecVirtual) {
			g.VMOVD(operand.Mem{Base: base}, y.AsX())
			g.VPINSRD(operand.Imm(1), tail(base, n, 4), y.AsX(), y.AsX())
		}, func(g *generator, y reg.VecVirtual, base, n reg.Register) {
			g.VMOVD(y.AsX(), operand.Mem{Base: base})
			g.VPEXTRD(operand.Imm(1), y.AsX(), tail(base, n, 4))
		}},
		{2, "2", func(g *generator, base, n reg.Register, y reg.VecVirtual) {
			g.VPXOR(y, y, y)
			g.VPINSRW(operand.Imm(0), operand.Mem{Base: base}, y.AsX(), y.AsX())
			g.VPINSRW(operand.Imm(1), tail(base, n, 2), y.AsX(), y.AsX())
		}, func(g *generator, y reg.VecVirtual, base, n reg.Register) {
			g.VPEXTRW(operand.Imm(0), y.AsX(), operand.Mem{Base: base})
			g.VPEXTRW(operand.Imm(1), y.AsX(), tail(base, n, 2))
		}},
		{1, "1", func(g *generator, base, _ reg.Register, y reg.VecVirtual) {
			g.VPXOR(y, y, y)
			g.VPINSRB(operand.Imm(0), operand.Mem{Base: base}, y.AsX(), y.AsX())
		}, func(g *generator, y reg.VecVirtual, base, _ reg.Register) {
			g.VPEXTRB(operand.Imm(0), y.AsX(), operand.Mem{Base: base})
		}},
	}
	for i, h := range all {
		if h.bytes == k.size {
			return all[:i+1]
		}
	}
	panic("asm: no elements of such a size")
}

// unless emits a jump over what follows if n is less than h takes.
func (g *generator) unless(n reg.Register, h half) {
	g.CMPQ(n, operand.Imm(uint64(h.bytes)))
	g.JB(operand.LabelRef("loadLess" + h.name))
}

// broadcast returns a vector of what the lowest bytes of r hold.
func (g *generator) broadcast(r reg.Register, bytes int) reg.VecVirtual {
	y := g.vector()
	g.VMOVQ(r, y.AsX())
	switch bytes {
	case 1:
		g.VPBROADCASTB(y.AsX(), y)
	case 2:
		g.VPBROADCASTW(y.AsX(), y)
	case 4:
		g.VPBROADCASTD(y.AsX(), y)
	default:
		g.VPBROADCASTQ(y.AsX(), y)
	}
	return y
}

// constant returns a vector of 64-bit lanes of v.
func (g *generator) constant(v uint64) reg.VecVirtual {
	r := g.GP64()
	g.MOVQ(operand.U64(v), r)
	return g.broadcast(r, 8)
}

// mask returns a mask of bits.
func (g *generator) mask(bits uint32) reg.OpmaskVirtual {
	r, k := g.GP32(), g.K()
	g.MOVL(operand.U32(bits), r)
	g.KMOVD(r, k)
	return k
}

// half returns the lower half of a vector.
func (g *generator) half(v reg.VecVirtual) reg.Register {
	if g.level == avx512 {
		return v.AsY()
	}
	return v.AsX()
}

// load returns x in a register.
func (g *generator) load(x operand.Op) reg.VecVirtual {
	if y, ok := x.(reg.VecVirtual); ok {
		return y
	}
	y := g.vector()
	g.move(x, y)
	return y
}

// hasF16C emits the test for the instructions that convert float16, about which
// golang.org/x/sys/cpu says nothing.
func (g *generator) hasF16C() {
	g.Function("hasF16C")
	g.Attributes(attr.NOSPLIT)
	g.Doc("hasF16C reports whether the processor converts float16.")
	g.SignatureExpr("func() bool")
	g.MOVL(operand.U32(1), reg.EAX)
	g.XORL(reg.ECX, reg.ECX)
	g.CPUID()
	g.SHRL(operand.Imm(29), reg.ECX)
	g.ANDL(operand.Imm(1), reg.ECX)
	g.Store(reg.CL, g.ReturnIndex(0))
	g.RET()
}

// uncachedStep is how many bytes the loop of uncached copies at a time.
const uncachedStep = 128

// uncached emits a copy with stores that leave nothing in the caches. They are ordered
// with nothing but the fence.
func (g *generator) uncached() {
	g.Function("uncachedAVX")
	g.Attributes(attr.NOSPLIT)
	g.Doc(fmt.Sprintf("uncachedAVX copies src past the caches to dst, which begins at a multiple of 32. Both have the same multiple of %d bytes.", uncachedStep))
	g.SignatureExpr("func(dst, src []byte)")
	dst, src, n := g.Load(g.Param("dst").Base(), g.GP64()), g.Load(g.Param("src").Base(), g.GP64()), g.Load(g.Param("dst").Len(), g.GP64())
	g.Label("loop")
	g.SUBQ(operand.Imm(uncachedStep), n)
	g.JL(operand.LabelRef("done"))
	at := func(r reg.Register, off int) operand.Mem { return operand.Mem{Base: r, Disp: off} }
	var v []reg.VecVirtual
	for i := range uncachedStep / 32 {
		v = append(v, g.YMM())
		g.VMOVDQU(at(src, 32*i), v[i])
	}
	for i, y := range v {
		g.VMOVNTDQ(y, at(dst, 32*i))
	}
	g.ADDQ(operand.Imm(uncachedStep), src)
	g.ADDQ(operand.Imm(uncachedStep), dst)
	g.JMP(operand.LabelRef("loop"))
	g.Label("done")
	g.SFENCE()
	g.VZEROUPPER()
	g.RET()
}
