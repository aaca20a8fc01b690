package direct

import (
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

// rings is the text with the kernel of rings, for any dtype and any number of ranks.
const (
	rings = "ring"

	// RingKernel is the name of that kernel.
	RingKernel = "c10d_ring"
)

// RingImage calls f with the text of rings, as Images does with others.
func RingImage(f func(image []byte, kernels ...string)) { f(image(rings), RingKernel) }

// ring is what a Comm has for calls round a ring.
type ring struct {
	window.Ring
	channels int
	f        driver.Function
	call     Ring
}

// openRing loads the kernel of the window's ring, if it has one.
func (c *Comm) openRing() error {
	r, channels, ok := c.w.Ring()
	if !ok {
		return nil
	}
	all, err := c.open(image(rings), RingKernel)
	if err != nil {
		return err
	}
	x := &ring{Ring: r, channels: channels, f: all[RingKernel]}
	x.call = Ring{
		Slots: r.Slots, Flags: r.Flags, NextSlots: r.NextSlots, NextFlags: r.NextFlags, State: r.State, Failed: r.Failed, Host: r.Host,
		Limit: c.o.Limit, Ranks: uint32(c.ranks), Place: uint32(r.Place), Before: uint32(r.At(r.Place - 1)),
		Channels: uint32(channels), Depth: uint32(window.RingDepth(c.ranks)),
	}
	c.ring = x
	return nil
}

// Order returns the ranks in the order of the ring, nil if there is none.
func (c *Comm) Order() []int {
	if c.ring == nil {
		return nil
	}
	return slices.Clone(c.ring.Ring.Order)
}

// around is a call round the ring. From has the ranks' parts of src and to those of dst, as far as this rank has them.
type around struct {
	dst, src           driver.Ptr
	from, to           [window.MostRingRanks]Span // by rank
	part               int                        // bytes of the longest part
	shots              uint32
	srcRange, dstRange int // what is read from src and written to dst
	r                  reduced
	d                  tensor.DType
	blocks             int // see Form
}

var errNoRing = errors.New("direct: the window has no ring")

// goAround launches a call. The caller holds c.mu.
func (c *Comm) goAround(s Launcher, a *around) error {
	x := c.ring
	if x == nil {
		return errNoRing
	}
	p := &x.call
	p.Src, p.Dst, p.Part, p.Shots = a.src, a.dst, a.part, a.shots
	p.Factor, p.Op, p.By, p.Scaled, p.Type = a.r.factor, a.r.op, a.r.by, a.r.scaled, uint32(slices.Index(dtypes, a.d))
	align := a.src | a.dst
	for place, r := range x.Ring.Order {
		p.From[place], p.To[place] = a.from[r], a.to[r]
		align |= driver.Ptr(a.from[r].Off | a.to[r].Off)
	}
	p.Align, p.Number = uint32(align), c.next(s)
	shape := RingShape(a.part, c.blocks(a.blocks), x.channels)
	return c.run(s, x.f, shape, raw(p), driver.Reads(a.src, a.srcRange), driver.Writes(a.dst, a.dstRange))
}

// RingShape returns the shape for a call round a ring whose longest part has n bytes: a warp for each tile, as far as
// there are so many. It was not measured on GPUs.
func RingShape(n, blocks, channels int) Shape {
	warps := max(min((n+window.RingSlotBytes-1)/window.RingSlotBytes, channels), 1)
	s := Shape{Threads: 32 * min(warps, 8), Large: true}
	if s.Blocks = warps / (s.Threads / 32); s.Blocks > blocks {
		// Fewer blocks of more threads have the same channels.
		s.Threads = 32 * min(warps, 16)
		s.Blocks = min(blocks, warps/(s.Threads/32))
	}
	return s
}

// ringReduce is an all_reduce. The caller holds c.mu.
func (c *Comm) ringReduce(s Launcher, dst, src driver.Ptr, bytes int, r reduced, d tensor.DType, form Form) error {
	a := around{
		dst: dst, src: src, part: partOf(bytes, c.ranks), shots: Combines | Collects, r: r, d: d,
		srcRange: bytes, dstRange: bytes, blocks: form.Blocks,
	}
	for p := range c.ranks {
		at := min(p*a.part, bytes)
		a.from[p] = Span{at, min(a.part, bytes-at)}
	}
	a.to = a.from
	return c.goAround(s, &a)
}

// ringScatter is a reduce_scatter. The parts are those of x, in bytes. The caller holds c.mu.
func (c *Comm) ringScatter(s Launcher, x step, d tensor.DType) error {
	a := around{
		dst: x.dst, src: x.src, part: x.part, shots: Combines, r: x.r, d: d,
		srcRange: x.srcBytes, dstRange: x.dstBytes, blocks: x.blocks,
	}
	for p := range c.ranks {
		at := min(p*x.part, x.srcBytes)
		a.from[p] = Span{at, min(x.part, x.srcBytes-at)}
	}
	a.to[c.rank] = Span{0, x.dstBytes}
	return c.goAround(s, &a)
}

// ringGather is an all_gather of src to the spans take of dst.
func (c *Comm) ringGather(s Launcher, dst, src driver.Ptr, take []Span, form Form) error {
	if len(take) != c.ranks {
		return fmt.Errorf("direct: all_gather to %d spans, want one for each of %d ranks", len(take), c.ranks)
	}
	a := around{dst: dst, src: src, shots: Collects, d: tensor.Uint8, blocks: form.Blocks}
	copy(a.to[:], take)
	a.from[c.rank].N = take[c.rank].N
	a.srcRange = take[c.rank].N
	for _, x := range take {
		a.part, a.dstRange = max(a.part, x.N), max(a.dstRange, x.Off+x.N)
	}
	if dst+driver.Ptr(take[c.rank].Off) == src {
		a.to[c.rank].N = 0 // it is there
	}
	if a.srcRange == 0 {
		a.src = dst
	}
	if ok, err := c.begin("all_gather", dst, a.src, a.part); !ok {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.goAround(s, &a)
}
