package edges

import (
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// use is the last use of its kind that a lane made of some bytes.
type use struct {
	lane  int
	index uint64
	mode  driver.Mode
	// alone marks a use that the tracker has not seen, because somebody else made it. It
	// waited for no other use, so it does not stand for earlier ones.
	alone bool
}

// history remembers, for ranges of addresses in order and without overlap, the
// uses that a later operation may have to wait for.
type history struct{ segs []segment }

type segment struct {
	lo, hi driver.Ptr
	uses   []use
}

// at returns the first segment that ends after p.
func (h *history) at(p driver.Ptr) int {
	i, _ := slices.BinarySearchFunc(h.segs, p, func(s segment, p driver.Ptr) int {
		if s.hi <= p {
			return -1
		}
		return 1
	})
	return i
}

// conflicts appends the remembered uses that an access conflicts with.
func (h *history) conflicts(to []use, a driver.Access) []use {
	end := a.Ptr + driver.Ptr(a.Len)
	for i := h.at(a.Ptr); i < len(h.segs) && h.segs[i].lo < end; i++ {
		for _, u := range h.segs[i].uses {
			if u.mode.Conflicts(a.Mode) {
				to = append(to, u)
			}
		}
	}
	return to
}

// insert puts a segment at place i, with memory of one that was removed.
func (h *history) insert(i int, lo, hi driver.Ptr, uses []use) {
	n := len(h.segs)
	if n < cap(h.segs) {
		h.segs = h.segs[:n+1]
	} else {
		h.segs = append(h.segs, segment{})
	}
	spare := h.segs[n].uses[:0]
	copy(h.segs[i+1:], h.segs[i:n])
	h.segs[i] = segment{lo, hi, append(spare, uses...)}
}

// add remembers a use of an access that, unless it is alone, is ordered after all
// uses it conflicts with. After a write, older uses need not be remembered: who conflicts with
// one of them conflicts with the write too.
func (h *history) add(a driver.Access, u use) {
	u.mode = a.Mode
	lo, hi := a.Ptr, a.Ptr+driver.Ptr(a.Len)
	one := [1]use{u}
	for i := h.at(lo); lo < hi; i++ {
		if i == len(h.segs) || h.segs[i].lo >= hi {
			h.insert(i, lo, hi, one[:])
			return
		}
		if s := h.segs[i]; s.lo > lo {
			h.insert(i, lo, s.lo, one[:])
			lo = s.lo
			continue
		}
		if s := h.segs[i]; s.lo < lo {
			h.insert(i+1, lo, s.hi, s.uses)
			h.segs[i].hi = lo
			continue
		}
		if s := h.segs[i]; s.hi > hi {
			h.insert(i+1, hi, s.hi, s.uses)
			h.segs[i].hi = hi
		}
		s := &h.segs[i]
		s.uses = merge(s.uses, u)
		lo = s.hi
	}
}

// merge adds u to the uses of a segment.
func merge(uses []use, u use) []use {
	kept := uses[:0]
	for _, o := range uses {
		again := o.mode == u.mode && o.lane == u.lane && o.alone == u.alone
		if !again && (u.alone || u.mode != driver.Write) {
			kept = append(kept, o)
		}
	}
	return append(kept, u)
}

// each calls f for every use.
func (h *history) each(f func(*use)) {
	for i := range h.segs {
		for j := range h.segs[i].uses {
			f(&h.segs[i].uses[j])
		}
	}
}

// drop forgets the uses for which f returns true, and joins neighbours that then
// are the same.
func (h *history) drop(f func(use) bool) {
	n := 0
	for i := range h.segs {
		s := &h.segs[i]
		s.uses = slices.DeleteFunc(s.uses, f)
		if len(s.uses) == 0 {
			continue
		}
		if n > 0 && h.segs[n-1].hi == s.lo && slices.Equal(h.segs[n-1].uses, s.uses) {
			h.segs[n-1].hi = s.hi
			continue
		}
		// Exchanged, so that no two segments share memory.
		h.segs[n], h.segs[i] = h.segs[i], h.segs[n]
		n++
	}
	h.segs = h.segs[:n]
}
