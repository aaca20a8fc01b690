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
type history struct {
	// The segments, in blocks of 1 to blockLen. A tensor whose elements lie apart has a segment
	// for each element. So a new segment moves those of its block only, and not a hundred
	// thousand.
	blocks [][]segment
	n      int // segments
}

type segment struct {
	lo, hi driver.Ptr
	uses   []use
}

// blockLen is how many segments a block has room for.
const blockLen = 128

// cursor is a segment of a history, or its end.
type cursor struct{ block, at int }

// search returns the first segment that ends after p.
func (h *history) search(p driver.Ptr) cursor {
	lo, hi := 0, len(h.blocks)
	for lo < hi {
		m := (lo + hi) / 2
		if b := h.blocks[m]; b[len(b)-1].hi <= p {
			lo = m + 1
		} else {
			hi = m
		}
	}
	c := cursor{block: lo}
	if lo == len(h.blocks) {
		return c
	}
	b := h.blocks[lo]
	hi = len(b) - 1 // the last one ends after p
	for c.at < hi {
		if m := (c.at + hi) / 2; b[m].hi <= p {
			c.at = m + 1
		} else {
			hi = m
		}
	}
	return c
}

// get returns a segment, and nil at the end.
func (h *history) get(c cursor) *segment {
	if c.block == len(h.blocks) {
		return nil
	}
	return &h.blocks[c.block][c.at]
}

// next returns the segment after one.
func (h *history) next(c cursor) cursor {
	if c.at++; c.at == len(h.blocks[c.block]) {
		return cursor{c.block + 1, 0}
	}
	return c
}

// conflicts appends the remembered uses that an access conflicts with.
func (h *history) conflicts(to []use, a driver.Access) []use {
	end := a.Ptr + driver.Ptr(a.Len)
	for c := h.search(a.Ptr); ; c = h.next(c) {
		s := h.get(c)
		if s == nil || s.lo >= end {
			return to
		}
		for _, u := range s.uses {
			if u.mode.Conflicts(a.Mode) {
				to = append(to, u)
			}
		}
	}
}

// insert puts a segment before the one at c, with memory of one that was removed, and returns where
// it is.
func (h *history) insert(c cursor, lo, hi driver.Ptr, uses []use) cursor {
	if c.block > 0 && c.at == 0 && (c.block == len(h.blocks) || len(h.blocks[c.block]) == blockLen) {
		c = cursor{c.block - 1, len(h.blocks[c.block-1])}
	}
	if c.block == len(h.blocks) {
		h.grow(c.block)
	}
	if b := h.blocks[c.block]; len(b) == blockLen {
		// The upper half goes to a block of its own. What is at the end of all is mostly
		// followed by more: it takes nothing along.
		keep := blockLen / 2
		if c.at == blockLen && c.block == len(h.blocks)-1 {
			keep = blockLen
		}
		h.grow(c.block + 1)
		half := h.blocks[c.block+1][:blockLen-keep]
		for i := range half {
			half[i], b[keep+i] = b[keep+i], half[i] // so that no two share memory
		}
		h.blocks[c.block], h.blocks[c.block+1] = b[:keep], half
		if c.at >= keep {
			c = cursor{c.block + 1, c.at - keep}
		}
	}
	b := h.blocks[c.block]
	n := len(b)
	b = b[:n+1]
	spare := b[n].uses[:0]
	copy(b[c.at+1:], b[c.at:n])
	b[c.at] = segment{lo, hi, append(spare, uses...)}
	h.blocks[c.block] = b
	h.n++
	return c
}

// split cuts a segment in two at an address, and returns the lower one.
func (h *history) split(c cursor, at driver.Ptr) cursor {
	s := h.get(c)
	c = h.insert(c, s.lo, at, s.uses)
	h.get(h.next(c)).lo = at
	return c
}

// grow puts an empty block at place i, one that was removed if there is one.
func (h *history) grow(i int) {
	n := len(h.blocks)
	var empty []segment
	if n < cap(h.blocks) {
		empty = h.blocks[:n+1][n]
	}
	if empty == nil {
		empty = make([]segment, 0, blockLen)
	}
	h.blocks = append(h.blocks, nil)
	copy(h.blocks[i+1:], h.blocks[i:n])
	h.blocks[i] = empty[:0]
}

// add remembers a use of an access that, unless it is alone, is ordered after all
// uses it conflicts with. After a write, older uses need not be remembered: who conflicts with
// one of them conflicts with the write too.
func (h *history) add(a driver.Access, u use) {
	u.mode = a.Mode
	lo, hi := a.Ptr, a.Ptr+driver.Ptr(a.Len)
	one := [1]use{u}
	for c := h.search(lo); lo < hi; c = h.next(c) {
		s := h.get(c)
		if s == nil || s.lo >= hi {
			h.insert(c, lo, hi, one[:])
			return
		}
		if to := s.lo; to > lo {
			c = h.insert(c, lo, to, one[:])
			lo = to
			continue
		}
		if s.lo < lo {
			c = h.next(h.split(c, lo))
		}
		if h.get(c).hi > hi {
			c = h.split(c, hi)
		}
		s = h.get(c)
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
	for _, b := range h.blocks {
		for i := range b {
			for j := range b[i].uses {
				f(&b[i].uses[j])
			}
		}
	}
}

// drop forgets the uses for which f returns true, joins neighbours that then are the
// same, and fills the blocks from the first one.
func (h *history) drop(f func(use) bool) {
	var end cursor
	var last *segment
	h.n = 0
	for _, b := range h.blocks {
		for i := range b {
			s := &b[i]
			s.uses = slices.DeleteFunc(s.uses, f)
			if len(s.uses) == 0 {
				continue
			}
			if last != nil && last.hi == s.lo && slices.Equal(last.uses, s.uses) {
				last.hi = s.hi
				continue
			}
			if end.at == blockLen {
				end = cursor{end.block + 1, 0}
			}
			// Exchanged, so that no two segments share memory.
			last = &h.blocks[end.block][:blockLen][end.at]
			*last, *s = *s, *last
			end.at++
			h.n++
		}
	}
	for i := range h.blocks {
		switch {
		case i < end.block:
			h.blocks[i] = h.blocks[i][:blockLen]
		case i == end.block:
			h.blocks[i] = h.blocks[i][:end.at]
		}
	}
	if end.at > 0 {
		end.block++
	}
	h.blocks = h.blocks[:end.block]
}
