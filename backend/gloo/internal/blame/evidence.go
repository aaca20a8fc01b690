package blame

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

const (
	// linkMoves is the rate in bytes a second from which a connection carries data. Questions and
	// answers of a diagnosis are below 12 KiB/s.
	linkMoves = 32 << 10

	// linkSilent is how long a rank must not have answered another one, until the link between
	// them counts as broken if both answer others.
	linkSilent = 1500 * time.Millisecond

	// silentFactor is how many times as long as the quickest other answer of either end a link must be
	// silent. Ranks that wait for a CPU answer late, and not never.
	silentFactor = 4

	// tableRows is how many pairs of ranks a table shows. Five rows fit into transport.MaxWords.
	tableRows = 4
)

// Call is an operation that waits for other ranks.
type Call struct {
	Op         work.OpType
	Seq        uint64
	Collective bool
	Number     uint64 // which collective this is, counted from 0
	Tag        uint32 // of a send or a receive
	Peer       int    // of a send or a receive, or the rank that it waits for; less than 0 if that is unknown

	Since  time.Time // when it began to wait
	Until  time.Time // when its time is over
	Latest time.Time // when it ends at the latest
	Turn   int       // if it is not 0, others know more: this rank blames nobody before Latest
}

// evidence is what ranks have answered about a call.
type evidence struct {
	self       int
	hosts      []int         // by rank: the number of its host; nil if all are on one, or if that is unknown
	checks     bool          // the group's calls are checks, see backend.Options.Checks
	call       Call          // that judge is about
	silentFrom time.Duration // takes the place of linkSilent if there is less time
	round      int           // how often the ranks have answered
	health     []transport.Health
	moved      map[pair]uint64        // bytes a second between two ranks, the most of a round
	answers    map[pair]time.Duration // how long answers between them take, or are missing
}

// pair are two ranks, the lower one first.
type pair struct{ a, b int }

func pairOf(a, b int) pair { return pair{min(a, b), max(a, b)} }

// hear takes the answers of a round.
func (e *evidence) hear(health []transport.Health) {
	e.round++
	e.health = health
	if e.moved == nil {
		e.moved, e.answers = make(map[pair]uint64), make(map[pair]time.Duration)
	}
	now := make(map[pair]time.Duration)
	for _, h := range health {
		for _, l := range h.Links {
			k := pairOf(h.Rank, l.Peer)
			if moves(l) {
				e.moved[k] = max(e.moved[k], l.Rate)
			}
			if d := max(l.RTT, l.Silent); d > 0 {
				now[k] = max(now[k], d)
			}
		}
	}
	maps.Copy(e.answers, now)
}

// table shows what the answers say about pairs of ranks: how long answers take, how much data moved, and who
// waits for whom. The latest answers come first.
func (e *evidence) table() string {
	waits := make(map[pair][]int)
	pairs := make(map[pair]bool)
	for _, h := range e.health {
		for _, l := range h.Links {
			if k := pairOf(h.Rank, l.Peer); l.Waits {
				waits[k], pairs[k] = append(waits[k], h.Rank), true
			}
		}
	}
	for k := range e.answers {
		pairs[k] = true
	}
	all := slices.SortedFunc(maps.Keys(pairs), func(a, b pair) int {
		return cmp.Or(cmp.Compare(e.answers[b], e.answers[a]), cmp.Compare(a.a, b.a), cmp.Compare(a.b, b.b))
	})
	var b strings.Builder
	for i, k := range all {
		if i == tableRows {
			fmt.Fprintf(&b, "\nother pairs: answers take %v at most", milliseconds(e.answers[k]))
			break
		}
		fmt.Fprintf(&b, "\nranks %d and %d:", k.a, k.b)
		cells := make([]string, 0, 3)
		if d := e.answers[k]; d > 0 {
			cells = append(cells, fmt.Sprintf(" answers take %v", milliseconds(d)))
		}
		if n := e.moved[k]; n > 0 {
			cells = append(cells, fmt.Sprintf(" %d KiB/s", n>>10))
		}
		switch w := waits[k]; len(w) {
		case 1:
			cells = append(cells, fmt.Sprintf(" rank %d waits", w[0]))
		case 2:
			cells = append(cells, " both wait")
		}
		b.WriteString(strings.Join(cells, ","))
	}
	return b.String()
}

// milliseconds returns d in whole milliseconds, 1 at least.
func milliseconds(d time.Duration) time.Duration {
	return max(d.Round(time.Millisecond), time.Millisecond)
}

// movesData reports whether data have moved between the host of a rank and another one. No rank or link of such a host
// is blamed: it may be slow.
func (e *evidence) movesData(rank int) bool {
	host := e.onHost(rank)
	for k := range e.moved {
		if (e.onHost(k.a) == host) != (e.onHost(k.b) == host) {
			return true
		}
	}
	return false
}

// isLate reports whether silence of d between ranks a and b says little, because all other hosts are slow to answer the
// host of a, too.
func (e *evidence) isLate(a, b int, d time.Duration) bool {
	host, other, least := e.onHost(a), e.onHost(b), time.Duration(0)
	for _, h := range e.health {
		for _, l := range h.Links {
			x, y := e.onHost(h.Rank), e.onHost(l.Peer)
			if l.RTT == 0 || (x == host) == (y == host) || x == other || y == other {
				continue
			}
			if least == 0 || l.RTT < least {
				least = l.RTT
			}
		}
	}
	return d < silentFactor*least
}

// mayBeSlow reports whether a link that has been silent for d may be slow, or one of its ranks.
func (e *evidence) mayBeSlow(a, b int, d time.Duration) bool {
	return e.movesData(a) || e.movesData(b) || e.isLate(a, b, d) || e.isLate(b, a, d)
}

// String lists the answers of the last round.
func (e *evidence) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "round %d", e.round)
	for _, h := range e.health {
		fmt.Fprintf(&b, "; rank %d", h.Rank)
		switch {
		case h.Departed:
			b.WriteString(" has left")
		case h.Rank != e.self && !h.Answered:
			b.WriteString(" does not answer")
		default:
			fmt.Fprintf(&b, " has completed %d of %d collectives", h.Completed, h.Issued)
		}
		for _, l := range h.Links {
			fmt.Fprintf(&b, ", link to %+v", l)
		}
	}
	return b.String() + e.table()
}

func (e *evidence) of(rank int) *transport.Health { return &e.health[rank] }

// link returns what rank says of its connection with peer.
func (e *evidence) link(rank, peer int) (l transport.Link, ok bool) {
	for _, l := range e.of(rank).Links {
		if l.Peer == peer {
			return l, true
		}
	}
	return transport.Link{}, false
}

// moves reports whether data go between rank and peer.
func moves(l transport.Link) bool { return l.Rate >= linkMoves }

// silent returns the ranks that should have answered this one, have not, and send and take no data. A rank that has
// answered the last question but one may still answer.
func (e *evidence) silent() (ranks []int) {
	for _, h := range e.health {
		l, _ := e.link(e.self, h.Rank)
		if isSilent(h) && h.Rank != e.self && !l.Answered && e.moved[pairOf(e.self, h.Rank)] == 0 {
			ranks = append(ranks, h.Rank)
		}
	}
	return ranks
}

// beside returns the other ranks on the host of a rank, nil if all are on one host.
func (e *evidence) beside(rank int) (others []int) {
	for r, host := range e.hosts {
		if r != rank && host == e.hosts[rank] {
			others = append(others, r)
		}
	}
	return others
}

// onHost returns the first rank on the host of a rank, or the rank if all are on one host.
func (e *evidence) onHost(rank int) int {
	if e.hosts == nil {
		return rank
	}
	return slices.Index(e.hosts, e.hosts[rank])
}

// isSilent reports whether a peer should have answered and has not.
func isSilent(h transport.Health) bool { return h.Native && !h.Answered && !h.Departed }
