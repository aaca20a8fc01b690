// Package registered has memory of tensors that the kernels of other ranks write (decision 42), or read (decision 48).
//
// A rank posts the handle of memory in a page that all ranks of the host share. Each other rank maps it when
// it comes to its next call, tells its kernels where, and acknowledges. From then on the owner may tell the
// peers' kernels to write or read there. Nobody waits for that: until then calls go through the rings.
//
// The owner alone decides, in each call. It knows its memory by the driver's object, never by an address: an
// address may be that of other memory by now.
package registered

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/pool"
)

// The page of a rank. Words that others wait for have lines of their own.
const (
	changesAt   = 0 // how often the owner has posted or withdrawn memory
	entriesAt   = 64
	entryHandle = 8 // after the entry's number: a handle, and the address for ranks of the same process
	entryAddr   = entryHandle + driver.MemoryHandleSize
	entryBytes  = 192
	acksAt      = entriesAt + window.MostRegions*entryBytes // a word for each rank and entry: the number that it has seen to

	// Bytes is how much of a shared region a rank needs.
	Bytes = acksAt + window.MostRanks*window.MostRegions*4
)

// Everyone is for memory that all peers are to write or read.
const Everyone = -1

// Registry has a rank's registered memory, and its mappings of the other ranks' memory. Its methods may be
// called from one goroutine at a time.
type Registry struct {
	w     *window.Window
	pages []*region.Region // of the ranks
	at    int              // where the registry is in a page
	rank  int
	s     driver.Stream // that writes addresses for the kernels

	mine    [window.MostRegions]entry
	lens    [window.MostRegions]atomic.Int64 // of mine, for Mapped
	index   map[driver.Memory]int
	refused map[driver.Memory]bool // what has no handle
	calls   uint64                 // of Use
	full    bool                   // Use has found no room
	renewed uint64                 // the call after which the last entry made room for other memory
	theirs  [window.MostRanks]peer
}

// entry is memory of this rank. Its number is odd while it is posted, and even after it was withdrawn.
type entry struct {
	m      driver.Memory
	number uint32
	used   uint64 // the last call that asked for it
	kept   bool   // a graph has it
}

// peer is what this rank knows of another one's page.
type peer struct {
	seen    uint32 // changes
	behind  bool   // there is more to do
	entries [window.MostRegions]mapping
}

type mapping struct {
	number uint32 // that has been seen to
	m      driver.Memory
	event  driver.Event // of its address, until that is there
}

// New makes the registry of a window that is connected. Pages has the shared regions of the ranks, in which
// the registries begin at an offset.
func New(w *window.Window, pages []*region.Region, at int) (*Registry, error) {
	rank, _ := w.Rank()
	s, err := w.Device().NewStream(driver.StreamOptions{Name: "registered"})
	if err != nil {
		return nil, err
	}
	return &Registry{w: w, pages: pages, at: at, rank: rank, s: s, index: make(map[driver.Memory]int), refused: make(map[driver.Memory]bool)}, nil
}

func (r *Registry) word(owner, off int) *atomic.Uint32 { return r.pages[owner].Word(r.at + off) }

func (r *Registry) number(owner, entry int) *atomic.Uint32 {
	return r.word(owner, entriesAt+entry*entryBytes)
}

func (r *Registry) ack(owner, rank, entry int) *atomic.Uint32 {
	return r.word(owner, acksAt+(rank*window.MostRegions+entry)*4)
}

// Use returns where in m peers may write or read: a rank or Everyone. It is nowhere if they have not mapped m yet; Use
// posts it then. Kept memory stays mapped until Close, for a graph.
func (r *Registry) Use(m driver.Memory, by int, kept bool) direct.Into {
	r.calls++
	i, ok := r.index[m]
	if !ok {
		r.post(m)
		return direct.Into{}
	}
	e := &r.mine[i]
	e.used = r.calls
	for p := range r.pages {
		if p != r.rank && (by == Everyone || by == p) && r.ack(r.rank, p, i).Load() != e.number {
			return direct.Into{}
		}
	}
	e.kept = e.kept || kept
	return direct.Into{Region: i + 1, At: m.Ptr()}
}

// post tells the others of memory, if there is room.
func (r *Registry) post(m driver.Memory) {
	if r.refused[m] {
		return
	}
	i := r.room()
	if i < 0 {
		return
	}
	h, err := m.Export()
	var b []byte
	if err == nil {
		b, err = h.AppendBinary(nil)
	}
	if err != nil {
		if len(r.refused) >= mostRefused {
			clear(r.refused)
		}
		r.refused[m] = true
		return
	}
	at := r.at + entriesAt + i*entryBytes
	copy(r.pages[r.rank].Bytes[at+entryHandle:], b)
	r.word(r.rank, at-r.at+entryAddr).Store(uint32(m.Ptr()))
	r.word(r.rank, at-r.at+entryAddr+4).Store(uint32(m.Ptr() >> 32))
	r.index[m] = i
	r.mine[i].m, r.mine[i].used, r.mine[i].kept = m, r.calls, false
	r.lens[i].Store(int64(m.Len()))
	r.change(i)
}

// Mapped returns how many regions of this rank all others have mapped, and their bytes. It may be called from
// any goroutine.
func (r *Registry) Mapped() (regions int, bytes int64) {
	for i := range r.lens {
		n := r.number(r.rank, i).Load()
		mapped := n%2 == 1
		for p := range r.pages {
			mapped = mapped && (p == r.rank || r.ack(r.rank, p, i).Load() == n)
		}
		if mapped {
			regions, bytes = regions+1, bytes+r.lens[i].Load()
		}
	}
	return regions, bytes
}

// mostRefused bounds how much memory is remembered that has no handle.
const mostRefused = 64

// change posts or withdraws entry i.
func (r *Registry) change(i int) {
	r.mine[i].number++
	r.number(r.rank, i).Store(r.mine[i].number)
	r.word(r.rank, changesAt).Add(1)
}

// room returns an entry that is free, -1 if there is none.
func (r *Registry) room() int {
	for i := range r.mine {
		if r.mine[i].m == nil && r.gone(i) {
			return i
		}
	}
	r.full = true
	return -1
}

// restCalls is how many calls memory has to be unused before it makes room for other memory, and how many are
// between two that do. A program that uses more memory than there are entries would else map memory in each call.
const restCalls = 64

// tidy withdraws memory that has been freed. If there was no room, it withdraws the memory that has not been used
// for longest. No kernel of this rank can have told of any: the caller is alone.
func (r *Registry) tidy() {
	oldest, leaving := -1, false
	for i := range r.mine {
		e := &r.mine[i]
		switch {
		case e.m == nil:
		case closed(e.m):
			r.withdraw(i)
			leaving = true
		case !e.kept && (oldest < 0 || e.used < r.mine[oldest].used):
			oldest = i
		}
	}
	if !r.full || leaving {
		return
	}
	if r.full = len(r.index) == len(r.mine); !r.full || oldest < 0 {
		return
	}
	if r.calls-r.mine[oldest].used >= restCalls && r.calls-r.renewed >= restCalls {
		r.withdraw(oldest)
		r.renewed, r.full = r.calls, false
	}
}

// own is how many operations are under way if the caller's is the only one. CUDA may wait for the device when memory is
// mapped no more, and so for kernels that wait for this rank.
const own = 1

// gone reports whether all peers have let go of an entry that was withdrawn.
func (r *Registry) gone(i int) bool {
	for p := range r.pages {
		if p != r.rank && r.ack(r.rank, p, i).Load() != r.mine[i].number {
			return false
		}
	}
	return true
}

func (r *Registry) withdraw(i int) {
	delete(r.index, r.mine[i].m)
	r.mine[i].m = nil
	r.change(i)
}

// closed reports whether memory has been freed.
func closed(m driver.Memory) bool {
	c, ok := m.(interface{ Closed() bool })
	return ok && c.Closed()
}

// Look maps the memory that the others have posted, and unmaps the memory that they have withdrawn. It withdraws
// this rank's memory that has been freed. An operation calls it before its first kernel; pool.Underway counts the
// operation. Nothing is withdrawn or let go while other operations are under way.
func (r *Registry) Look() {
	if len(r.index) > 0 && pool.Underway.Load() <= own {
		r.tidy()
	}
	for p := range r.pages {
		if p == r.rank {
			continue
		}
		x := &r.theirs[p]
		changes := r.word(p, changesAt).Load()
		if changes == x.seen && !x.behind {
			continue
		}
		x.seen, x.behind = changes, false
		for i := range x.entries {
			if !r.see(p, i, &x.entries[i]) {
				x.behind = true
			}
		}
	}
}

// see brings what this rank has of another one's entry up to date. It returns false if that takes longer.
func (r *Registry) see(p, i int, x *mapping) bool {
	n := r.number(p, i).Load()
	if n != x.number {
		if x.m != nil {
			var err error
			if !pool.Alone(own, func() { err = r.forget(x) }) {
				return false
			}
			if err != nil {
				return true // its entry is lost
			}
		}
		x.number = n
		if n%2 == 0 {
			r.ack(p, r.rank, i).Store(n)
			return true
		}
		if err := r.mapEntry(p, i, x); err != nil {
			return true // the owner goes without
		}
	}
	if x.event == nil {
		return true
	}
	done, err := x.event.Done()
	if !done && err == nil {
		return false
	}
	x.event.Release()
	x.event = nil
	if err == nil {
		r.ack(p, r.rank, i).Store(n)
	}
	return true
}

// mapEntry maps another rank's memory, and has a stream write its address for the kernels.
func (r *Registry) mapEntry(p, i int, x *mapping) (err error) {
	at := entriesAt + i*entryBytes
	var h driver.MemoryHandle
	if err := h.UnmarshalBinary(r.pages[p].Bytes[r.at+at+entryHandle:][:driver.MemoryHandleSize]); err != nil {
		return err
	}
	addr := driver.Ptr(r.word(p, at+entryAddr).Load()) | driver.Ptr(r.word(p, at+entryAddr+4).Load())<<32
	if x.m, err = r.w.Reach(h, addr); err != nil {
		return err
	}
	to := r.w.Maps(p) + driver.Ptr(8*i)
	if err = r.s.WriteValue(to, uint32(x.m.Ptr())); err == nil {
		if err = r.s.WriteValue(to+4, uint32(x.m.Ptr()>>32)); err == nil {
			x.event, err = r.s.Record()
		}
	}
	return err
}

// forget lets go of another rank's memory.
func (r *Registry) forget(x *mapping) error {
	if x.event != nil {
		x.event.Done()
		x.event.Release()
	}
	err := x.m.Close()
	x.m, x.event = nil, nil
	return err
}

// closeLimit is how long Close waits for words that its stream writes. Nothing comes before them there.
const closeLimit = time.Second

// Close lets go of the other ranks' memory. This rank's kernels must have ended. The words in the window may still be on
// their way: the window is freed next.
func (r *Registry) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	var errs []error
	for p := range r.theirs {
		for i := range r.theirs[p].entries {
			if x := &r.theirs[p].entries[i]; x.m != nil {
				if x.event != nil {
					errs = append(errs, x.event.Sync(ctx))
				}
				errs = append(errs, r.forget(x))
			}
		}
	}
	return errors.Join(append(errs, r.s.Close())...)
}
