package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// step is how many bytes a loop takes at a time, and has to be given a multiple of.
const step = 64

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

// An operation emits what sets a vector of the local operand, d, to d op s. The
// received operand, s, is in memory, or a factor in a register.
type operation func(d operand.Mem, s operand.Op)

// A kernel is one function of package reduce.
type kernel struct {
	name string
	doc  string

	// begin loads constants and returns the operation. If the kernel scales,
	// the operation's s is the factor, in all lanes as wide as factor says.
	begin  begin
	factor int // the bytes of a factor; 0 for two slices
}

// kernel emits a function that works on a positive multiple of step bytes at any
// address. It loads what a store changes before the store, so both slices may be
// the same.
func (g *generator) kernel(k kernel) {
	k.name += g.level.name
	g.Function(k.name)
	g.Attributes(attr.NOSPLIT)
	g.Pragma("noescape")
	g.Doc(k.name + " " + k.doc)
	var (
		dst, src, n reg.Register
		factor      reg.VecVirtual
	)
	if k.factor > 0 {
		g.SignatureExpr("func(b []byte, by uint64)")
		dst = g.Load(g.Param("b").Base(), g.GP64())
		n = g.Load(g.Param("b").Len(), g.GP64())
		factor = g.broadcast(g.Load(g.Param("by"), g.GP64()), k.factor)
	} else {
		g.SignatureExpr("func(dst, src []byte)")
		dst = g.Load(g.Param("dst").Base(), g.GP64())
		src = g.Load(g.Param("src").Base(), g.GP64())
		n = g.Load(g.Param("dst").Len(), g.GP64())
	}
	op := k.begin(g)

	g.Label("loop")
	for at := 0; at < step; at += g.width {
		d := operand.Mem{Base: dst, Disp: at}
		var s operand.Op = factor
		if k.factor == 0 {
			s = operand.Mem{Base: src, Disp: at}
		}
		op(d, s)
	}
	g.ADDQ(operand.Imm(step), dst)
	if k.factor == 0 {
		g.ADDQ(operand.Imm(step), src)
	}
	g.SUBQ(operand.Imm(step), n)
	g.JG(operand.LabelRef("loop"))
	g.VZEROUPPER()
	g.RET()
}

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

// load returns x in a register.
func (g *generator) load(x operand.Op) reg.VecVirtual {
	if y, ok := x.(reg.VecVirtual); ok {
		return y
	}
	y := g.vector()
	g.move(x, y)
	return y
}

// broadcast returns a vector of what the lowest 4 or 8 bytes of r hold.
func (g *generator) broadcast(r reg.Register, bytes int) reg.VecVirtual {
	y := g.vector()
	g.VMOVQ(r, y.AsX())
	if bytes == 4 {
		g.VPBROADCASTD(y.AsX(), y)
	} else {
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

// uncached emits a copy with stores that leave nothing in the caches. They are ordered
// with nothing but the fence.
func (g *generator) uncached() {
	g.Function("uncachedAVX")
	g.Attributes(attr.NOSPLIT)
	g.Doc(fmt.Sprintf("uncachedAVX copies src past the caches to dst, which begins at a multiple of 32. Both have the same positive multiple of %d bytes.", step))
	g.SignatureExpr("func(dst, src []byte)")
	dst, src, n := g.Load(g.Param("dst").Base(), g.GP64()), g.Load(g.Param("src").Base(), g.GP64()), g.Load(g.Param("dst").Len(), g.GP64())
	g.Label("loop")
	low, high := g.YMM(), g.YMM()
	g.VMOVDQU(operand.Mem{Base: src}, low)
	g.VMOVDQU(operand.Mem{Base: src, Disp: 32}, high)
	g.VMOVNTDQ(low, operand.Mem{Base: dst})
	g.VMOVNTDQ(high, operand.Mem{Base: dst, Disp: 32})
	g.ADDQ(operand.Imm(step), src)
	g.ADDQ(operand.Imm(step), dst)
	g.SUBQ(operand.Imm(step), n)
	g.JG(operand.LabelRef("loop"))
	g.SFENCE()
	g.VZEROUPPER()
	g.RET()
}

// A joiner is a function that combines any number of operands in one pass.
type joiner struct {
	name string
	doc  string
	add  instruction
}

const (
	// joinStep is how many bytes of each operand the longer loop of a joiner takes at a time.
	joinStep = 256

	// joinAhead is how far a joiner fetches each operand ahead. Those of other ranks are in the
	// caches of other CPUs.
	joinAhead = 1 << 10
)

// join emits a function that combines the bytes of all operands, from byte at on, into dst. It
// combines len(dst) bytes, a positive multiple of step. dst may be one of the operands.
func (g *generator) join(j joiner) {
	j.name += g.level.name
	g.Function(j.name)
	g.Attributes(attr.NOSPLIT)
	g.Pragma("noescape")
	g.Doc(j.name + " " + j.doc)
	g.SignatureExpr("func(dst []byte, operands [][]byte, at int)")
	dst, n := g.Load(g.Param("dst").Base(), g.GP64()), g.Load(g.Param("dst").Len(), g.GP64())
	first, end := g.Load(g.Param("operands").Base(), g.GP64()), g.Load(g.Param("operands").Len(), g.GP64())
	at := g.Load(g.Param("at"), g.GP64())
	// A slice is three words.
	g.LEAQ(operand.Mem{Base: end, Index: end, Scale: 2}, end)
	g.LEAQ(operand.Mem{Base: first, Index: end, Scale: 8}, end)
	next, src := g.GP64(), g.GP64()

	for _, loop := range []struct {
		name, after string
		bytes       int
	}{{"long", "short", joinStep}, {"short", "done", step}} {
		g.Label(loop.name)
		g.CMPQ(n, operand.U32(loop.bytes))
		g.JL(operand.LabelRef(loop.after))
		g.MOVQ(operand.Mem{Base: first}, src)
		sums := make([]reg.VecVirtual, loop.bytes/g.width)
		for i := range sums {
			sums[i] = g.vector()
			g.move(operand.Mem{Base: src, Index: at, Scale: 1, Disp: i * g.width}, sums[i])
		}
		fetch := func() {
			for ahead := 0; ahead < loop.bytes && loop.bytes == joinStep; ahead += 64 {
				g.PREFETCHT0(operand.Mem{Base: src, Index: at, Scale: 1, Disp: joinAhead + ahead})
			}
		}
		fetch()
		g.MOVQ(first, next)
		g.ADDQ(operand.Imm(24), next)
		g.CMPQ(next, end)
		g.JAE(operand.LabelRef(loop.name + "Stored"))
		g.Label(loop.name + "Operand")
		g.MOVQ(operand.Mem{Base: next}, src)
		fetch()
		for i, sum := range sums {
			j.add(g.Context, operand.Mem{Base: src, Index: at, Scale: 1, Disp: i * g.width}, sum, sum)
		}
		g.ADDQ(operand.Imm(24), next)
		g.CMPQ(next, end)
		g.JB(operand.LabelRef(loop.name + "Operand"))
		g.Label(loop.name + "Stored")
		for i, sum := range sums {
			g.move(sum, operand.Mem{Base: dst, Disp: i * g.width})
		}
		g.ADDQ(operand.U32(loop.bytes), dst)
		g.ADDQ(operand.U32(loop.bytes), at)
		g.SUBQ(operand.U32(loop.bytes), n)
		g.JMP(operand.LabelRef(loop.name))
	}
	g.Label("done")
	g.VZEROUPPER()
	g.RET()
}
