package directway

import (
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// The words that a rank has in the pages of the others, on a line for each rank.
const (
	sentLine = wordEach * window.MostRanks // how many messages that rank has posted on its lane
	leftLine = 2 * sentLine                // two words of a rank that has closed: what it has sent and received on the lanes, plus one
	quitLine = 3 * sentLine                // see quitWord
)

func sentWord(p *region.Region, rank int) *atomic.Uint32 { return p.Word(sentLine + rank*wordEach) }

func leftWord(p *region.Region, rank, dir int) *atomic.Uint32 {
	return p.Word(leftLine + rank*wordEach + 4*dir)
}

// pageOf returns the page of another rank.
func (d *Group) pageOf(rank int) *region.Region {
	if rank > d.Rank() {
		rank--
	}
	return d.pages[rank]
}

// wordEach keeps the ranks' words on lines of their own.
const wordEach = 64

// madeWord is where a rank writes to its own page how many direct operations it has made.
func madeWord(p *region.Region) *atomic.Uint32 { return p.Word(madeLine) }

// madeLine comes after what lanes and ranks have in a page.
const madeLine = 2 << 10

// goneWord is where a rank writes that it has unmapped the memory of the page's owner: the number
// of direct operations it has made, plus one.
func goneWord(p *region.Region, rank int) *atomic.Uint32 { return p.Word(rank * wordEach) }

// quitWord is where a rank tells the page's owner that its kernels have left their device for good.
func quitWord(p *region.Region, rank int) *atomic.Uint32 { return p.Word(quitLine + rank*wordEach) }
