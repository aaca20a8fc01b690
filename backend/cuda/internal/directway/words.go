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
	wordMade // in its own page: how many direct operations it has made
	wordEach = 64
)

// word returns a word of a rank in a page.
func word(p *region.Region, rank, at int) *atomic.Uint32 { return p.Word(rank*wordEach + at) }

// pageOf returns the page of another rank.
func (d *Group) pageOf(rank int) *region.Region {
	if rank > d.Rank() {
		rank--
	}
	return d.pages[rank]
}
