package blame

import (
	"fmt"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/work"
)

// Waiting returns the ranks for which a call of rank self waits, and what the answers of the other ranks tell of each.
func Waiting(c Call, self int, checks bool, health []transport.Health) (text string, ranks []int, each []string) {
	var foreign []int
	add := func(rank int, format string, args ...any) {
		ranks = append(ranks, rank)
		each = append(each, fmt.Sprintf("rank %d ", rank)+fmt.Sprintf(format, args...))
	}
	for _, h := range health {
		switch {
		case h.Rank == self || c.Peer >= 0 && h.Rank != c.Peer:
		case h.Departed:
			// It has mostly done its part of a collective: who needs it is told at once.
			if !c.Collective {
				add(h.Rank, "%s", ending(h))
			}
		case !h.Native && c.Collective:
			foreign = append(foreign, h.Rank)
		case isSilent(h):
			add(h.Rank, "does not answer (stopped or unreachable)")
		case c.Collective && h.Issued <= c.Number:
			add(h.Rank, "%s", sayNotCalled(h.Issued, c.Number, checks))
		case c.Peer >= 0 && c.Op == work.Send:
			add(h.Rank, "has not received it (tag %d)", c.Tag)
		case c.Peer >= 0:
			add(h.Rank, "has not sent it (tag %d)", c.Tag)
		}
	}
	switch {
	case len(ranks) > 0:
		text = fmt.Sprintf("%v waits for %s", c.Op, waiting.Ranks(ranks))
	case len(foreign) > 0:
		const what = "%v waits for one of %s, which cannot say how far they are (PyTorch)"
		text = fmt.Sprintf(what, c.Op, waiting.Ranks(foreign))
	default:
		text = fmt.Sprintf("%v takes long; every rank has called it", c.Op)
	}
	return text, ranks, each
}
