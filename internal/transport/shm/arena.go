package shm

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"unsafe"
)

// Every rank has an arena in the shared memory, from which [Group.Alloc] takes memory. The
// others have mapped it too, for reading. An arena is address space until it is used.

const (
	// hugePage is what arenas, and large allocations in them, are aligned to.
	hugePage = 2 << 20

	// maxArenas is how much address space the arenas of a group take at most, of the 128 TiB
	// that a process has. It leaves room for many groups, and for MaxRanks in one process. An
	// arena is no larger than the host's memory.
	maxArenas = 512 << 30

	// inArena marks a place in the arena of the rank that publishes it, not in its process. The
	// other bits are the offset.
	inArena = uint64(1) << 63
)

var (
	// ErrNoArenas is returned by Alloc if the group has no memory for it;
	// [Group.WhyNoArenas] says why.
	ErrNoArenas = errors.New("shm: the group has no memory for Alloc")
	// ErrExhausted is returned by Alloc, on all ranks, if one has no room left.
	// The group goes on.
	ErrExhausted = errors.New("shm: no memory of Alloc is left")
	// ErrNotAllocated is returned by Free for memory that Alloc has not returned, or that
	// has been freed.
	ErrNotAllocated = errors.New("shm: the memory is not from Alloc, or was freed")
)

// What a rank says about its arenas, in the low byte of a word; above it, the error number.
const (
	// What a rank says about its arenas: the low byte of a word. Above it is the error number.
	arenasYes = iota + 1
	arenasFail
	arenasOff
	arenasNarrow
	arenasLimited
)

// errArenas is a reason to have no arenas: one of the above.
type errArenas uint64

func arenasFailed(err error) errArenas {
	var no syscall.Errno
	errors.As(err, &no)
	return errArenas(arenasFail | uint64(no)<<8)
}

func (e errArenas) Error() string {
	switch e & 0xff {
	case arenasOff:
		return "is told not to"
	case arenasNarrow:
		return "has addresses of 32 bits"
	case arenasLimited:
		return "has a limit on addresses or files (ulimit -v, -f)"
	}
	return fmt.Sprintf("cannot map it: %v", syscall.Errno(e>>8))
}

// span is a piece of an arena.
type span struct{ at, n int }

// heap holds the free spans of an arena, in their order. They do not touch. Allocation is
// first-fit.
type heap struct{ free []span }

// alloc takes n bytes at a multiple of align.
func (h *heap) alloc(n, align int) (at int, ok bool) {
	for i, s := range h.free {
		at := (s.at + align - 1) / align * align
		end := s.at + s.n
		if at > end || n > end-at {
			continue
		}
		var rest []span
		if at > s.at {
			rest = append(rest, span{s.at, at - s.at})
		}
		if end > at+n {
			rest = append(rest, span{at + n, end - at - n})
		}
		h.free = slices.Replace(h.free, i, i+1, rest...)
		return at, true
	}
	return 0, false
}

// release makes a span free again.
func (h *heap) release(s span) {
	i, _ := slices.BinarySearchFunc(h.free, s, func(a, b span) int { return a.at - b.at })
	h.free = slices.Insert(h.free, i, s)
	if i+1 < len(h.free) && s.at+s.n == h.free[i+1].at {
		h.free[i].n += h.free[i+1].n
		h.free = slices.Delete(h.free, i+1, i+2)
	}
	if i > 0 && h.free[i-1].at+h.free[i-1].n == s.at {
		h.free[i-1].n += h.free[i].n
		h.free = slices.Delete(h.free, i, i+1)
	}
}

// arena is this rank's memory for Alloc. It outlives the group while anything is allocated.
type arena struct {
	mu     sync.Mutex
	mem    []byte // nil once it is unmapped
	heap   heap
	live   map[int]int // what is allocated: length by offset
	closed bool        // the group is
}

func newArena(mem []byte) *arena {
	return &arena{mem: mem, heap: heap{free: []span{{0, len(mem)}}}, live: map[int]int{}}
}

// alloc returns n bytes of zeros, n > 0.
func (a *arena) alloc(n int) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	align := page
	if n >= hugePage {
		align = hugePage
	}
	if n <= len(a.mem) {
		if at, ok := a.heap.alloc(wholePages(n), align); ok {
			a.live[at] = n
			return a.mem[at:][:n:n], nil
		}
	}
	left := 0
	for _, s := range a.heap.free {
		left += s.n
	}
	return nil, fmt.Errorf("%w: %d bytes requested, %d of %d are free", ErrExhausted, n, left, len(a.mem))
}

// wholePages rounds n up to pages.
func wholePages(n int) int { return (n + page - 1) &^ (page - 1) }

func (a *arena) free(b []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, ok := a.find(b)
	if n, is := a.live[at]; !ok || !is || n != len(b) {
		return ErrNotAllocated
	}
	delete(a.live, at)
	s := span{at, wholePages(len(b))}
	a.heap.release(s)
	if a.closed && len(a.live) == 0 {
		return a.unmap()
	}
	empty(a.mem[s.at:][:s.n])
	return nil
}

// find returns the offset of b in the arena, if it is there.
func (a *arena) find(b []byte) (at int, ok bool) {
	if len(b) == 0 || len(a.mem) == 0 {
		return 0, false
	}
	off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - uintptr(unsafe.Pointer(unsafe.SliceData(a.mem)))
	if off >= uintptr(len(a.mem)) || uintptr(len(b)) > uintptr(len(a.mem))-off {
		return 0, false
	}
	return int(off), true
}

// close unmaps the arena, now or when the last allocation has been freed.
func (a *arena) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if len(a.live) > 0 {
		return nil
	}
	return a.unmap()
}

func (a *arena) unmap() error {
	mem := a.mem
	a.mem = nil
	if len(mem) == 0 {
		return nil
	}
	return unmapPart(mem)
}

// agreeArenas decides, from what all ranks have said, whether this group has arenas.
func (g *Group) agreeArenas(said func(r int) uint64) {
	for r := range g.segs {
		if v := said(r); v != arenasYes {
			g.whyNoArenas = fmt.Sprintf("rank %d %v", r, errArenas(v))
			break
		}
	}
	if g.whyNoArenas != "" {
		g.mapped = uniform(never)
		g.dropArenas()
		return
	}
	g.mapped = defaultMapped(g.size, g.spinFor > 0, g.fast)
	g.own = newArena(g.arenas[g.rank])
}

// dropArenas unmaps the arenas of the others, and this rank's unless it is in use.
func (g *Group) dropArenas() (err error) {
	for r, mem := range g.arenas {
		if r != g.rank || g.own == nil {
			err = errors.Join(err, unmapPart(mem))
		}
	}
	if g.own != nil {
		err = errors.Join(err, g.own.close())
	}
	g.arenas = nil
	return err
}

// WhyNoArenas returns why there is no memory for Alloc, "" if there is.
func (g *Group) WhyNoArenas() string { return g.whyNoArenas }

// MappedLimits returns the sizes from which data in memory of Alloc are not staged. All ranks
// of the group have the same.
func (g *Group) MappedLimits() Limits { return g.mapped }

// Alloc returns n bytes of zeros that the other ranks can read in place. If all data of a call
// that would be staged lie in such memory, ranks copy or reduce from there, without a system
// call. The same holds for messages. All ranks call Alloc at the same point of their sequence
// of collectives. n may differ. If one rank has no room, all get [ErrExhausted], and the group
// goes on.
//
// The garbage collector does not free the memory: it stays until [Group.Free], which may be
// called after the group has been closed.
func (g *Group) Alloc(n int, stop func() error) ([]byte, error) {
	if n < 0 {
		return nil, fmt.Errorf("shm: allocation of %d bytes", n)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opAlloc}, stop); err != nil {
		return nil, err
	}
	if g.own == nil {
		return nil, fmt.Errorf("%w: %s", ErrNoArenas, g.whyNoArenas)
	}
	var b []byte
	var full error
	if n > 0 {
		b, full = g.own.alloc(n)
	}
	p, err := g.publishWords(yesOrNo(full == nil), 0)
	for i := 1; i < g.size && err == nil; i++ {
		r := g.nth(i)
		var said [2]uint64
		if said, err = g.waitWords(r, p); err == nil && said[0] == 0 && full == nil {
			full = fmt.Errorf("%w on rank %d", ErrExhausted, r)
		}
	}
	if err == nil {
		g.allPublished(p)
		g.allocated = true
		err = full
	}
	if err != nil && b != nil {
		g.own.free(b)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Free gives back what Alloc has returned, all of it. No operation of this rank may be using
// it. Free does not wait for other ranks.
func (g *Group) Free(b []byte) error {
	if g.own == nil {
		return ErrNotAllocated
	}
	return g.own.free(b)
}

// arenaPlace returns the place of b in this rank's arena, 0 if it is not there.
func (g *Group) arenaPlace(b []byte) uint64 {
	if g.own == nil {
		return 0
	}
	// The arena stays where it is while the group is open.
	at, ok := g.own.find(b)
	if !ok {
		return 0
	}
	return inArena | uint64(at)
}

// arenaBytes returns n bytes in the arena of rank r, nil if they are not there.
func (g *Group) arenaBytes(r int, at uint64, n int) []byte {
	if at&inArena == 0 || g.arenas == nil {
		return nil
	}
	at &^= inArena
	a := g.arenas[r]
	if at > uint64(len(a)) || uint64(n) > uint64(len(a))-at {
		return nil
	}
	return a[at:][:n:n]
}
