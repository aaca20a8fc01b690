package directway

import (
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/internal/region"
)

// The words that a rank writes into the pages of the others, which each have a line for it.
const (
	wordGone = 4 * iota // it has unmapped the memory of the page's owner: how many direct operations it has made, plus one
	wordQuit            // its kernels have left their device for good
	wordSent            // how many messages it has posted on its lane
	wordLeft            // and the next one, when it has closed: what it has sent and received on the lanes, plus one
	_
	wordMade    // in its own page: how many direct operations it has made
	wordSpoiled // there: from which of them on it sends what is of no use, plus one
	wordEach    = 64
)

// Spoil tells the other ranks that an operation has failed here, and its streams go on without all of its input. What this
// rank's kernels send in it and later is of no use.
func (d *Group) Spoil(number uint32) {
	w := word(d.own, d.Rank(), wordSpoiled)
	for {
		at := w.Load()
		if at != 0 && int32(number-(at-1)) >= 0 || w.CompareAndSwap(at, number+1) {
			return
		}
	}
}

// Spoiled returns a rank of the engine that may have sent in an operation what is of no use. A rank whose kernels have done the
// operation calls it.
func (d *Group) Spoiled(number uint32) (rank int, spoiled bool) {
	for r := range d.Size() {
		if r == d.Rank() {
			continue
		}
		if at := word(d.pageOf(r), r, wordSpoiled).Load(); at != 0 && int32(number-(at-1)) >= 0 {
			return d.Of(r), true
		}
	}
	return 0, false
}

// word returns a word of a rank in a page.
func word(p *region.Region, rank, at int) *atomic.Uint32 { return p.Word(rank*wordEach + at) }

// pageOf returns the page of another rank.
func (d *Group) pageOf(rank int) *region.Region {
	if rank > d.Rank() {
		rank--
	}
	return d.pages[rank]
}
