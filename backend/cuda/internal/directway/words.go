package directway

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/work"
)

// The words that a rank writes into the pages of the others, which each have a line for it.
const (
	wordGone = 4 * iota // it has unmapped the memory of the page's owner: how many direct operations it has made, plus one
	wordQuit            // its kernels have left their device for good
	wordSent            // how many messages it has posted on its lane
	wordLeft            // and the next one, when it has closed: what it has sent and received on the lanes, plus one
	_
	wordMade    // in its own page: how many direct operations it has made
	wordSpoiled // there: from which of them on it sends what is of no use, plus one; so it does in all messages
	wordEach    = 64
)

// Spoil implements group.Spoiler: an operation through the host has failed. Kernels that have not ended may come after it.
func (d *Group) Spoil() {
	if d.Open.Load() == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	number := word(d.own, d.Rank(), wordMade).Load()
	if i := slices.IndexFunc(d.line.calls, func(c *Call) bool { return !c.done() }); i >= 0 {
		number = d.line.calls[i].number
	}
	d.SpoilFrom(number)
}

// SpoilFrom tells the other ranks that an operation has failed here, and its streams go on without all of its input. What
// this rank's kernels send in it and later is of no use.
func (d *Group) SpoilFrom(number uint32) {
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

// SpoiledBy is the error of an operation with wrong data from a rank: an operation before it has failed there.
func SpoiledBy(info work.Info, rank int) error {
	return &work.Error{Info: info, Peer: rank, Err: fmt.Errorf("cuda: %w: rank %d has failed in it, and its device went on", work.ErrAborted, rank)}
}

// awaitsReason reports whether another rank has spoiled an operation that this rank's device has done, and the reason is on
// its way between the hosts. The caller holds d.mu.
func (c *Call) awaitsReason() bool {
	d := c.d
	if cmp.Or(c.err, d.comm.Err()) != nil || !c.failed.IsZero() {
		return false
	}
	rank, spoiled := 0, false
	if x := c.lane; x == nil {
		rank, spoiled = d.Spoiled(c.number)
	} else if x.dir == in {
		rank, spoiled = x.peer, word(d.pageOf(x.peer), x.peer, wordSpoiled).Load() != 0
	}
	if !spoiled {
		return false
	}
	if c.err = cmp.Or(d.B.Broken(), d.B.CPUErr()); c.err != nil {
		return false
	}
	if c.spoiled.IsZero() {
		c.spoiled = time.Now()
	}
	if time.Since(c.spoiled) < ReportLimit {
		return true
	}
	c.err = SpoiledBy(c.Info(), rank)
	return false
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
