package blame

import (
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

const (
	// leastRounds is how often to ask before blaming a rank or a link.
	leastRounds = 6

	// idleRounds is how often to ask before blaming a rank that waits for nobody. If it waits in
	// another group, it finds the broken link itself in leastRounds.
	idleRounds = leastRounds + 2
)

// Verdict says why a call ran out of time.
type Verdict struct {
	Rank  int    // to blame, -1 if none
	Other int    // if this is not -1, the link between Rank and Other is to blame
	Why   string // what is known; "" if nothing
	sure  bool   // to ask again would tell no more
	weak  bool   // it takes more time to be sure
}

// noneMissing is what a rank knows of an operation for which nobody is to blame.
const noneMissing = "no rank is missing: the operation was too slow"

// nobody blames nobody, and shows the table.
func (e *evidence) nobody(why string) Verdict {
	return Verdict{Rank: -1, Other: -1, Why: why + e.table()}
}

// judge finds the rank or the link to blame. It takes the first of these:
//
//  1. a rank that answers nobody;
//  2. a broken link;
//  3. a rank that has not called the operation and waits for nobody. It may wait in another group,
//     as in DETAIL's checks, so a broken link comes first;
//  4. the rank at the end of the chain of ranks that wait for each other.
//
// While data move it blames nobody for the last two: the operation is slow. A rank that moves data is not blamed, nor
// are its links. Then the table shows what the answers say.
func (e *evidence) judge() Verdict {
	idle, busy := e.notCalled()
	v, silent := e.unreachable()
	if silent && v.Rank >= 0 && (v.Other < 0 || !v.weak) {
		if len(idle) > 0 {
			v.Why += "; " + e.describeNotCalled(append(idle, busy...))
		}
		return v
	}
	if link, ok := e.brokenLink(); ok {
		return link
	}
	if len(idle) > 0 {
		why := e.describeNotCalled(append(idle, busy...))
		if e.movesData(idle[0]) {
			return e.nobody(why)
		}
		return Verdict{Rank: idle[0], Other: -1, Why: why, weak: e.round < idleRounds}
	}
	if len(e.moved) > 0 {
		slow := e.nobody(noneMissing)
		slow.weak = silent && v.weak
		return slow
	}
	if silent {
		return v // the answer may be late
	}
	return e.chain(busy)
}

// notCalled returns the ranks that have not called the collective. Idle ones wait for nobody. Busy
// ones are in an earlier operation.
func (e *evidence) notCalled() (idle, busy []int) {
	if !e.call.Collective {
		return nil, nil
	}
	for _, h := range e.health {
		if !h.Answered || h.Rank == e.self || h.Issued > e.call.Number {
			continue
		}
		if h.Completed == h.Issued && !slices.ContainsFunc(h.Links, waits) {
			idle = append(idle, h.Rank)
		} else {
			busy = append(busy, h.Rank)
		}
	}
	return idle, busy
}

func waits(l transport.Link) bool { return l.Waits }

func (e *evidence) describeNotCalled(ranks []int) string {
	var all []string
	for _, r := range ranks {
		all = append(all, fmt.Sprintf("rank %d ", r)+sayNotCalled(e.of(r).Issued, e.call.Number, e.checks))
	}
	return strings.Join(all, "; ")
}

// sayNotCalled says that a rank has not called the collective number call, counted from 0. The numbers of checks are
// not the program's.
func sayNotCalled(issued, call uint64, checks bool) string {
	if checks {
		return "has not called it"
	}
	return fmt.Sprintf("has not called it: it has issued %d collectives, this is number %d", issued, call)
}

// unreachable blames a rank that does not answer this one, or the link to it if it answers others.
func (e *evidence) unreachable() (Verdict, bool) {
	silent := e.silent()
	answered, hosts := 0, map[int]bool{} // answers from other hosts
	for _, h := range e.health {
		hosts[e.onHost(h.Rank)] = true
		if h.Answered && e.onHost(h.Rank) != e.onHost(e.self) {
			answered++
		}
	}
	var broken []int
	var gone []string
	first, asked := -1, true
	for _, s := range silent {
		heard, looked := false, answered == 0
		for _, h := range e.health {
			if l, ok := e.link(h.Rank, s); ok && h.Rank == e.self {
				asked = asked && l.Silent >= e.silentFrom
			} else if ok {
				heard = heard || l.Answered || e.moved[pairOf(h.Rank, s)] > 0
				looked = looked || l.Silent > 0
			}
		}
		switch {
		case heard:
			broken = append(broken, s)
			continue
		case first < 0:
			first = s
		}
		asked = asked && looked
		gone = append(gone, fmt.Sprintf("rank %d does not answer (stopped or unreachable)", s))
	}
	alone := len(gone) > 0 && answered == 0 && len(hosts) > 2
	mine, _ := e.link(e.self, first)
	switch {
	case alone && e.movesData(e.self), first >= 0 && e.movesData(first),
		first >= 0 && !asked && e.isLate(e.self, first, mine.Silent):
		v := e.nobody(noneMissing)
		v.weak = true
		return v, true
	case alone && len(gone) > 1:
		const what = "no other rank answers this one: its network does not work"
		return Verdict{Rank: e.self, Other: -1, Why: what, weak: true}, true
	case first >= 0:
		return Verdict{Rank: first, Other: -1, Why: strings.Join(gone, "; "), weak: !asked}, true
	case len(broken) > 0:
		l, _ := e.link(e.self, broken[0])
		v := linkVerdict(e.self, broken[0], quiet(l))
		if e.mayBeSlow(e.self, broken[0], l.Silent) {
			v = e.nobody(noneMissing)
		}
		v.weak = !asked
		return v, true
	}
	return Verdict{}, false
}

func quiet(l transport.Link) string {
	return fmt.Sprintf("no data for %.1f s, both alive", max(l.Silent, l.Quiet).Seconds())
}

func linkVerdict(a, b int, why string) Verdict {
	return Verdict{Rank: min(a, b), Other: max(a, b), Why: why}
}

// brokenLink blames a link between two ranks that both answer this one and do not hear each other.
func (e *evidence) brokenLink() (Verdict, bool) {
	for _, h := range e.health {
		for _, l := range h.Links {
			if l.Silent < e.silentFrom || l.Peer == e.self || h.Rank == e.self || !e.of(l.Peer).Answered {
				continue
			}
			if e.mayBeSlow(h.Rank, l.Peer, l.Silent) {
				continue
			}
			if back, ok := e.link(l.Peer, h.Rank); ok && back.Answered {
				continue // it is only late
			}
			return linkVerdict(h.Rank, l.Peer, quiet(l)), true
		}
	}
	return Verdict{}, false
}

func notExpected(rank int) string {
	return fmt.Sprintf("rank %d did not send or receive what was expected", rank)
}

// chain follows the ranks that wait for each other, from those in an earlier operation and from
// this one. It blames the first that waits for nobody. A rank that is in an operation and needs no
// connection waits in memory for the others on its host.
func (e *evidence) chain(busy []int) Verdict {
	from := append([]int{}, busy...)
	if e.call.Peer >= 0 && e.call.Peer != e.self {
		from = append(from, e.call.Peer)
	}
	for _, l := range e.of(e.self).Links {
		if l.Waits {
			from = append(from, l.Peer)
		}
	}
	if len(from) == 0 && e.call.Collective {
		from = e.beside(e.self)
	}
	// The first answer does not show yet whether data move.
	sure := e.round > 1 || !slices.ContainsFunc(e.of(e.self).Links, waits)
	seen := map[int]bool{e.self: true}
	done := Verdict{Rank: -1, Other: -1} // blames a rank that has done its part, as far as it knows
	for len(from) > 0 {
		r := from[0]
		from = from[1:]
		if seen[r] {
			continue
		}
		seen[r] = true
		h := e.of(r)
		waiting := slices.ContainsFunc(h.Links, waits)
		// A rank in a collective that waits for nobody may be between two messages.
		sure := sure && !(e.call.Collective && h.Answered && h.Completed < h.Issued)
		switch {
		case h.Departed:
			return Verdict{Rank: r, Other: -1, Why: fmt.Sprintf("rank %d %s", r, ending(*h)), sure: sure}
		case h.Answered && waiting:
			for _, l := range h.Links {
				if l.Waits {
					from = append(from, l.Peer)
				}
			}
		case e.call.Collective && h.Answered && h.Completed < h.Issued && len(e.beside(r)) > 0:
			from = append(from, e.beside(r)...)
		case e.call.Collective && h.Answered && h.Completed > e.call.Number: // what it sent may be on its way
			if done.Rank < 0 {
				done = Verdict{Rank: r, Other: -1, Why: notExpected(r)}
			}
		case e.call.Collective && h.Answered && h.Issued <= e.call.Number:
			// In its earlier operation it may have run out of time. It then tells why itself.
			early := h.Completed < h.Issued && e.round < idleRounds
			return Verdict{Rank: r, Other: -1, Why: e.describeNotCalled(busy), sure: sure, weak: early}
		default:
			return Verdict{Rank: r, Other: -1, Why: notExpected(r), sure: sure}
		}
	}
	if circle := e.circle(seen); circle != nil {
		return Verdict{Rank: -1, Other: -1, Why: e.describeCircle(circle)}
	}
	if done.Rank >= 0 {
		return done
	}
	if len(busy) > 0 {
		return Verdict{Rank: busy[0], Other: -1, Why: e.describeNotCalled(busy)}
	}
	if e.call.Collective {
		for _, h := range e.health {
			if h.Departed { // mostly after it has done its part
				return Verdict{Rank: h.Rank, Other: -1, Why: fmt.Sprintf("rank %d %s", h.Rank, ending(h)), sure: true}
			}
		}
	}
	v := Verdict{Rank: -1, Other: -1}
	if e.call.Collective {
		v = e.nobody(noneMissing)
	}
	// In the first round a piece of a collective may just have come.
	v.sure = len(seen) == 1 && (e.round > 1 || !e.call.Collective)
	if len(seen) > 1 {
		var cycle []int
		for r := range seen {
			cycle = append(cycle, r)
		}
		slices.Sort(cycle)
		v.Why = "ranks " + List(cycle) + " wait for each other"
	}
	return v
}

// ending says how a rank has ended that is gone.
func ending(h transport.Health) string {
	if h.Died {
		return "has died"
	}
	return "has left the group"
}

// circle returns ranks of which each waits for the next, and the last one for the first. It returns nil if there
// are none among some ranks. Of several circles, the one with the lowest rank counts, and then the shortest.
func (e *evidence) circle(among map[int]bool) []int {
	for first := range e.health {
		if !among[first] {
			continue
		}
		before := map[int]int{first: -1} // on the shortest way from first
		for from := []int{first}; len(from) > 0; from = from[1:] {
			for _, l := range e.of(from[0]).Links {
				if !l.Waits {
					continue
				}
				if l.Peer == first {
					var back []int
					for r := from[0]; r >= 0; r = before[r] {
						back = append(back, r)
					}
					slices.Reverse(back)
					return back
				}
				if _, ok := before[l.Peer]; !ok && among[l.Peer] {
					before[l.Peer] = from[0]
					from = append(from, l.Peer)
				}
			}
		}
	}
	return nil
}

// describeCircle says in what each rank of a circle waits for the next one.
func (e *evidence) describeCircle(ranks []int) string {
	var all []string
	each, next := "", " the next"
	for i, r := range ranks {
		peer := ranks[(i+1)%len(ranks)]
		l, _ := e.link(r, peer)
		in, to := "a collective", ""
		switch op := e.of(r).Op; {
		case l.Sends && l.Recvs:
			in, to = "send to and recv from", fmt.Sprintf(" rank %d", peer)
		case l.Sends:
			in, to = "send to", fmt.Sprintf(" rank %d", peer)
		case l.Recvs:
			in, to = "recv from", fmt.Sprintf(" rank %d", peer)
		case op != transport.NoOp:
			in = work.OpType(op).String()
		}
		if to == "" {
			next = ""
		}
		if i > 0 && in != each {
			each = ""
		} else {
			each = in
		}
		all = append(all, fmt.Sprintf("rank %d is in %s%s", r, in, to))
	}
	what := strings.Join(all, ", ")
	if each != "" {
		what = "each is in " + each + next
	}
	return "ranks " + List(ranks) + " wait for each other: " + what
}

// suspects returns up to two ranks that the next question should be about. Ranks that have not called
// the operation take turns if there is no other suspect. They may wait for each other in another group,
// as in DETAIL's checks, because a link between them is broken.
func (e *evidence) suspects() []int {
	ranks := e.silent()
	for _, h := range e.health {
		for _, l := range h.Links {
			if l.Silent > 0 || moves(l) {
				ranks = append(ranks, h.Rank, l.Peer)
			}
		}
	}
	if idle, _ := e.notCalled(); len(idle) > 0 {
		turn := 2 * e.round % len(idle)
		ranks = append(append(ranks, idle[turn:]...), idle[:turn]...)
	}
	var two []int
	for _, r := range ranks {
		if r != e.self && len(two) < 2 && !slices.Contains(two, r) {
			two = append(two, r)
		}
	}
	return two
}

// List formats ranks as "1, 3", or "none".
func List(ranks []int) string {
	if len(ranks) == 0 {
		return "none"
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
}
