package direct

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
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

// What the kernel gets as its parameter: struct Ring of ring.cu.
const (
	ringSrc = 8 * iota
	ringDst
	ringPart
	ringSlots
	ringFlags
	ringNextSlots
	ringNextFlags
	ringState
	ringFailed
	ringHost
	ringFactor
	ringLimit
	ringRanks  // two numbers of 4 bytes each from here on
	ringBefore // and the channels of a slot
	ringDepth  // and the operator
	ringBy     // and whether operands are scaled
	ringAlign  // and the number of the call
	ringShots  // and the dtype
	ringFrom
	ringTo    = ringFrom + 16*window.MostRingRanks
	ringBytes = ringTo + 16*window.MostRingRanks
)

// What a call does with the parts.
const (
	ringCombines = 1 << iota
	ringGathers
)

// RingImage calls f with the text of rings, as Images does with others.
func RingImage(f func(image []byte, kernels ...string)) { f(images()[rings], RingKernel) }

// RingCall is what the kernel is told, for a kernel in Go.
type RingCall struct {
	Src, Dst                           driver.Ptr
	Part                               int // bytes of the longest part
	Slots, Flags, NextSlots, NextFlags driver.Ptr
	State, Failed, Host                driver.Ptr
	Limit                              time.Duration
	Ranks, Place, Before               int
	Channels, Depth                    int
	DType                              tensor.DType
	Op                                 backend.ReduceOp
	Number                             uint32
	Combines, Gathers                  bool
	From, To                           [window.MostRingRanks]Span // by place
}

// ParseRing reads the parameter of the kernel, for a kernel in Go.
func ParseRing(b []byte) (c RingCall) {
	long := func(at int) int { return int(binary.NativeEndian.Uint64(b[at:])) }
	word := func(at int) int { return int(binary.NativeEndian.Uint32(b[at:])) }
	for at, p := range map[int]*driver.Ptr{
		ringSrc: &c.Src, ringDst: &c.Dst, ringSlots: &c.Slots, ringFlags: &c.Flags,
		ringNextSlots: &c.NextSlots, ringNextFlags: &c.NextFlags,
		ringState: &c.State, ringFailed: &c.Failed, ringHost: &c.Host,
	} {
		*p = driver.Ptr(long(at))
	}
	c.Part, c.Limit = long(ringPart), time.Duration(long(ringLimit))
	c.Ranks, c.Place = word(ringRanks), word(ringRanks+4)
	c.Before, c.Channels, c.Depth = word(ringBefore), word(ringBefore+4), word(ringDepth)
	c.DType = dtypes[word(ringShots+4)]
	op := Call{Op: word(ringDepth + 4), By: word(ringBy), Scaled: word(ringBy + 4), Factor: uint64(long(ringFactor))}
	c.Op = op.Operator(c.DType)
	c.Number = uint32(word(ringAlign + 4))
	shots := word(ringShots)
	c.Combines, c.Gathers = shots&ringCombines != 0, shots&ringGathers != 0
	for i := range c.From {
		c.From[i], c.To[i] = parseSpan(b[ringFrom+16*i:]), parseSpan(b[ringTo+16*i:])
	}
	return c
}

// ring is what a Comm has for calls round a ring.
type ring struct {
	window.Ring
	channels int
	f        driver.Function
	call     [ringBytes]byte
}

// openRing loads the kernel of the window's ring, if it has one.
func (c *Comm) openRing() error {
	r, channels, ok := c.w.Ring()
	if !ok {
		return nil
	}
	m, err := c.loadImage(images()[rings])
	if err != nil {
		return err
	}
	x := &ring{Ring: r, channels: channels}
	if x.f, err = m.Function(RingKernel); err != nil {
		return err
	}
	for at, p := range map[int]driver.Ptr{
		ringSlots: r.Slots, ringFlags: r.Flags, ringNextSlots: r.NextSlots, ringNextFlags: r.NextFlags,
		ringState: r.State, ringFailed: r.Failed, ringHost: r.Host,
	} {
		x.put(at, uint64(p))
	}
	x.put(ringLimit, uint64(c.o.Limit.Nanoseconds()))
	x.put2(ringRanks, uint32(c.ranks), uint32(r.Place))
	x.put2(ringBefore, uint32(r.At(r.Place-1)), uint32(channels))
	c.ring = x
	return nil
}

func (x *ring) put(at int, v uint64) { binary.NativeEndian.PutUint64(x.call[at:], v) }

func (x *ring) put2(at int, a, b uint32) {
	binary.NativeEndian.PutUint32(x.call[at:], a)
	binary.NativeEndian.PutUint32(x.call[at+4:], b)
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
	x.put(ringSrc, uint64(a.src))
	x.put(ringDst, uint64(a.dst))
	x.put(ringPart, uint64(a.part))
	x.put(ringFactor, a.r.factor)
	x.put2(ringDepth, uint32(window.RingDepth(c.ranks)), a.r.op)
	x.put2(ringBy, a.r.by, a.r.scaled)
	align := a.src | a.dst
	for place, r := range x.Ring.Order {
		for at, p := range map[int]Span{ringFrom: a.from[r], ringTo: a.to[r]} {
			x.put(at+16*place, uint64(p.Off))
			x.put(at+16*place+8, uint64(p.N))
			align |= driver.Ptr(p.Off)
		}
	}
	x.put2(ringAlign, uint32(align), c.next(s))
	x.put2(ringShots, a.shots, uint32(slices.Index(dtypes, a.d)))
	shape := RingShape(a.part, c.blocks(a.blocks), x.channels)
	return c.run(s, x.f, shape, x.call[:], driver.Reads(a.src, a.srcRange), driver.Writes(a.dst, a.dstRange))
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
		dst: dst, src: src, part: partOf(bytes, c.ranks), shots: ringCombines | ringGathers, r: r, d: d,
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
		dst: x.dst, src: x.src, part: x.part, shots: ringCombines, r: x.r, d: d,
		srcRange: x.srcRange, dstRange: x.dstRange, blocks: x.blocks,
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
	a := around{dst: dst, src: src, shots: ringGathers, d: tensor.Uint8, blocks: form.Blocks}
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
