package gloo

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

const (
	// linkSilent is how long a rank must not have answered another one, until the link between
	// them counts as broken if both answer others.
	linkSilent = 600 * time.Millisecond

	// linkMoves is the rate in bytes a second from which a connection carries data. Questions and
	// answers of a diagnosis are below 12 KiB/s.
	linkMoves = 32 << 10

	// A rank or a link is slow if its answers take slowAnswer at least, and slowFactor times as long
	// as all others. With 2 Mbit/s in groups of 3 to 5 they took 52 ms and more, and others up to
	// 14 ms on two CPUs with 20 threads that wanted to run.
	slowAnswer = 20 * time.Millisecond
	slowFactor = 3

	// slowSecond is how late a rank must answer on a second link, until the rank is to blame and not the
	// first link. Ranks that had to wait for a CPU answered after up to 47 ms.
	slowSecond = 50 * time.Millisecond

	// queueFactor takes the place of slowFactor for a rank at one end of the only link whose sockets
	// have data that wait. A slow rank with 2 Mbit/s answered 2.95 times as late as others, on two
	// busy CPUs.
	queueFactor = 2

	// slowLeast is how late every other answer of a rank must be, until the rank is to blame for its
	// slow link. A packet of 1500 bytes takes 6 ms at 2 Mbit/s.
	slowLeast = 5 * time.Millisecond

	// Long questions about a slow link begin after longFrom rounds: by then, small ones have shown most slow
	// ranks. There are longRounds at most. A rank that waits for a CPU is late in some of them, a slow one in
	// all.
	longFrom   = leastRounds - 2
	longRounds = 4

	// idleRounds is how often to ask before blaming a rank that waits for nobody. If it waits in
	// another group, it finds the broken link itself in leastRounds.
	idleRounds = leastRounds + 2
)

// verdict says why an operation ran out of time.
type verdict struct {
	rank  int    // to blame, -1 if none
	other int    // if this is not -1, the link between rank and other is to blame
	why   string // what is known; "" if nothing
	sure  bool   // to ask again would tell no more
	weak  bool   // it takes more time to be sure
	long  bool   // long questions about the link would tell more
}

// evidence is what ranks have answered about an operation.
type evidence struct {
	self       int
	collective bool
	call       uint64
	hosts      *plan.Layout  // nil if no two ranks are on one host, or if that is unknown
	peer       int           // of a send or a receive, or the rank that the operation waited for; -1 if unknown
	checks     bool          // see backend.Options.Checks
	silentFrom time.Duration // takes the place of linkSilent if there is less time
	round      int           // how often the ranks have been asked
	health     []transport.Health
	moved      map[pairOfRanks]bool            // data moved between two ranks
	delays     map[pairOfRanks][]time.Duration // of answers between two ranks or hosts, one a round
	queued     map[pairOfRanks]int             // in how many rounds data waited in a socket between them
	long       map[pairOfRanks]time.Duration   // of the quickest answers to long questions between them
	longAsked  map[pairOfRanks]int             // how often long questions about a link were asked
	longLast   map[pairOfRanks]int             // in which round the last time
}

// pairOfRanks are two ranks, the lower one first.
type pairOfRanks struct{ a, b int }

func pairOf(a, b int) pairOfRanks { return pairOfRanks{min(a, b), max(a, b)} }

// about makes d the operation that judge is about.
func (e *evidence) about(d *due) {
	e.collective, e.call, e.peer = d.collective, d.call, max(anyRank, int(d.waitsFor.Load()))
}

// hear takes the answers of a round.
func (e *evidence) hear(health []transport.Health) {
	e.round++
	e.health = health
	if e.moved == nil {
		e.moved, e.delays, e.queued = make(map[pairOfRanks]bool), make(map[pairOfRanks][]time.Duration), make(map[pairOfRanks]int)
		e.long = make(map[pairOfRanks]time.Duration)
	}
	now, queued := make(map[pairOfRanks]time.Duration), make(map[pairOfRanks]bool)
	for _, h := range health {
		for _, l := range h.Links {
			if moves(l) {
				e.moved[pairOf(h.Rank, l.Peer)] = true
			}
			k := pairOf(e.onHost(h.Rank), e.onHost(l.Peer))
			now[k] = max(now[k], l.RTT, l.Silent)
			queued[k] = queued[k] || l.Queued
			if was, ok := e.long[k]; l.Long > 0 && (!ok || l.Long < was) {
				e.long[k] = l.Long
			}
		}
	}
	for k, q := range queued {
		if q && k.a != k.b {
			e.queued[k]++
		}
	}
	for k, d := range now {
		if d > 0 && k.a != k.b {
			e.delays[k] = append(e.delays[k], d)
		}
	}
}

// String lists the answers of the last round, and how late answers mostly were.
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
			fmt.Fprintf(&b, ", link to %d:", l.Peer)
			for _, x := range []struct {
				is   bool
				text string
			}{
				{l.Waits, " waits"}, {l.Answered, " answered"}, {l.Silent > 0, fmt.Sprintf(" silent for %v", l.Silent)}, {l.Quiet > 0, fmt.Sprintf(" no data for %v", l.Quiet)},
				{l.RTT > 0, fmt.Sprintf(" answers in %v", l.RTT)}, {l.Long > 0, fmt.Sprintf(" long ones in %v", l.Long)}, {l.Rate > 0, fmt.Sprintf(" %d B/s", l.Rate)}, {l.Queued, " data wait in its socket"},
			} {
				if x.is {
					b.WriteString(x.text)
				}
			}
		}
	}
	fmt.Fprintf(&b, "; late %v, moved %v, queued %v", e.medians(), e.moved, e.queued)
	if len(e.longAsked) > 0 {
		fmt.Fprintf(&b, ", long questions %v, quickest answers %v", e.longAsked, e.long)
	}
	return b.String()
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

// hearsLate reports whether every answer that this rank has got took long.
func (e *evidence) hearsLate() bool {
	late := false
	for _, l := range e.of(e.self).Links {
		if l.RTT > 0 && l.RTT < slowAnswer {
			return false
		}
		late = late || l.RTT > 0
	}
	return late
}

// movesHere reports whether data have moved between this host and another one.
func (e *evidence) movesHere() bool {
	here := e.onHost(e.self)
	for k := range e.moved {
		if (e.onHost(k.a) == here) != (e.onHost(k.b) == here) {
			return true
		}
	}
	return false
}

// moves reports whether data go between rank and peer.
func moves(l transport.Link) bool { return l.Rate >= linkMoves }

// silent returns the ranks that should have answered this one, have not, and send and take no data.
func (e *evidence) silent() (ranks []int) {
	for _, h := range e.health {
		if isSilent(h) && h.Rank != e.self && !e.moved[pairOf(e.self, h.Rank)] {
			ranks = append(ranks, h.Rank)
		}
	}
	return ranks
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

// judge finds the rank or the link to blame. It takes the first of these:
//
//  1. a rank that answers nobody, unless answers reach only this rank late;
//  2. a slow rank;
//  3. a broken link;
//  4. a rank that has not called the operation and waits for nobody. It may wait in another group,
//     as in DETAIL's checks, so a broken link comes first;
//  5. a slow link;
//  6. the rank at the end of the chain of ranks that wait for each other.
func (e *evidence) judge() verdict {
	idle, busy := e.notCalled()
	v, silent := e.unreachable()
	if silent && (v.weak || v.other >= 0) && e.hearsLate() {
		if slow := e.slowest(); slow.rank == e.self && slow.other < 0 {
			slow.weak = v.weak // others hear the rank, or have not looked
			return slow
		}
	}
	if silent && v.other >= 0 {
		if slow, ok := e.slowEnd(v); ok {
			return slow
		}
	}
	if silent && (v.other < 0 || !v.weak) {
		if len(idle) > 0 {
			v.why += "; " + e.describeNotCalled(append(idle, busy...))
		}
		return v
	}
	slow, moving := e.slow()
	slow.weak = slow.weak || silent
	link, broken := e.brokenLink()
	atEnd := broken && (slow.rank == e.onHost(link.rank) || slow.rank == e.onHost(link.other))
	if moving && slow.rank >= 0 && slow.other < 0 && !atEnd {
		return slow
	}
	if broken {
		if slow, ok := e.slowEnd(link); ok {
			return slow // one of its links may have stood still for a second
		}
		return link
	}
	if len(idle) > 0 {
		return verdict{rank: idle[0], other: -1, why: e.describeNotCalled(append(idle, busy...)), weak: e.round < idleRounds}
	}
	if moving {
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
	if !e.collective {
		return nil, nil
	}
	for _, h := range e.health {
		if !h.Answered || h.Rank == e.self || h.Issued > e.call {
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
		all = append(all, fmt.Sprintf("rank %d ", r)+sayNotCalled(e.of(r).Issued, e.call, e.checks))
	}
	return strings.Join(all, "; ")
}

// sayNotCalled says that a rank has not called the collective number call, counted from 0. The numbers of checks are
// not the program's.
func sayNotCalled(issued, call uint64, checks bool) string {
	if checks {
		return "has not called it"
	}
	return fmt.Sprintf("has not called it: it has issued %d collectives, this is number %d", issued, call+1)
}

// unreachable blames a rank that does not answer this one, or the link to it if it answers others.
func (e *evidence) unreachable() (verdict, bool) {
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
				heard = heard || l.Answered || e.moved[pairOf(h.Rank, s)]
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
	switch {
	case len(gone) > 0 && answered == 0 && len(hosts) > 2 && e.movesHere():
		r := e.onHost(e.self)
		return verdict{rank: r, other: -1, why: fmt.Sprintf("rank %d is slow: it moves data, and no answer reaches it in time", r), weak: true}, true
	case len(gone) > 1 && answered == 0 && len(hosts) > 2:
		return verdict{rank: e.self, other: -1, why: "no other rank answers this one: its network does not work", weak: true}, true
	case first >= 0:
		return verdict{rank: first, other: -1, why: strings.Join(gone, "; "), weak: !asked}, true
	case len(broken) > 0:
		l, _ := e.link(e.self, broken[0])
		v := linkVerdict(e.self, broken[0], quiet(l))
		v.weak = !asked
		return v, true
	}
	return verdict{}, false
}

func quiet(l transport.Link) string {
	return fmt.Sprintf("no data for %.1f s, both alive", max(l.Silent, l.Quiet).Seconds())
}

func linkVerdict(a, b int, why string) verdict {
	return verdict{rank: min(a, b), other: max(a, b), why: why}
}

// brokenLink blames a link between two ranks that both answer this one and do not hear each other.
func (e *evidence) brokenLink() (verdict, bool) {
	for _, h := range e.health {
		for _, l := range h.Links {
			if l.Silent < e.silentFrom || e.moved[pairOf(h.Rank, l.Peer)] || l.Peer == e.self || h.Rank == e.self || !e.of(l.Peer).Answered {
				continue
			}
			if back, ok := e.link(l.Peer, h.Rank); ok && back.Answered {
				continue // it is only late
			}
			return linkVerdict(h.Rank, l.Peer, quiet(l)), true
		}
	}
	return verdict{}, false
}

// slow blames a rank or a link while data still move.
func (e *evidence) slow() (verdict, bool) {
	if len(e.moved) == 0 {
		return verdict{}, false
	}
	return e.confirmed(e.slowest()), true
}

// confirmed returns v, or blames a rank at one end of the slow link of v. It has long questions asked between the
// two ends and other ranks. If all answers of one end are late, and one of the other end is not, the first end is
// slow. Small questions do not show that while TCP waits to send lost data again. Ranks of PyTorch, and older ones
// of this library, take no part.
func (e *evidence) confirmed(v verdict) verdict {
	k := e.networksOf(v)
	if v.other < 0 || e.round < longFrom || len(e.askers(k)) == 0 {
		return v
	}
	a, b := e.quickestLong(k.a, k), e.quickestLong(k.b, k)
	known := a > 0 && b > 0
	switch {
	case known && max(a, b) < slowAnswer:
	case e.longAsked[k] < longRounds:
		v.weak, v.long = true, true
	case e.longLast[k] == e.round:
		v.weak = true // an asker tells in the next round how late the ends answered
	case known && a >= slowSecond && isLate(a, b):
		return slowByLong(k.a, a, b)
	case known && b >= slowSecond && isLate(b, a):
		return slowByLong(k.b, b, a)
	}
	return v
}

func slowByLong(rank int, late, other time.Duration) verdict {
	const what = "rank %d is slow: it answers long questions after %v, the other end of its slow link after %v"
	return verdict{rank: rank, other: -1, why: fmt.Sprintf(what, rank, late.Round(time.Millisecond), max(other.Round(time.Millisecond), time.Millisecond))}
}

// networksOf returns the first ranks of the two hosts of a link that is blamed.
func (e *evidence) networksOf(v verdict) (k pairOfRanks) {
	if v.other >= 0 {
		k = pairOf(e.onHost(v.rank), e.onHost(v.other))
	}
	return k
}

// askers returns the first ranks of hosts that can ask both ends of the link k. One that has left cannot.
func (e *evidence) askers(k pairOfRanks) (ranks []int) {
	for r, h := range e.health {
		if h.Native && h.Answered && e.onHost(r) == r && r != k.a && r != k.b {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// quickestLong returns how late the quickest answer to long questions between rank r and others was, leaving out
// the link k. It is 0 if there was none.
func (e *evidence) quickestLong(r int, k pairOfRanks) (least time.Duration) {
	for link, d := range e.long {
		if link != k && link.a != link.b && (link.a == r || link.b == r) && (least == 0 || d < least) {
			least = d
		}
	}
	return least
}

// ask asks the other ranks again, about some of them, or with long questions about the link of v. The ranks of
// other hosts take turns to ask the two ends. Long questions of all would delay the fault that a slow rank is told
// at the end.
func (e *evidence) ask(m transport.Mesh, limit time.Duration, v verdict, about []int) {
	if !v.long {
		e.hear(m.Diagnose(limit, about...))
		return
	}
	k := e.networksOf(v)
	askers := e.askers(k)
	long := []int{askers[e.longAsked[k]%len(askers)]}
	if long[0] == e.self {
		long = []int{k.a, k.b}
	}
	if e.longAsked == nil {
		e.longAsked, e.longLast = make(map[pairOfRanks]int), make(map[pairOfRanks]int)
	}
	e.longAsked[k]++
	e.longLast[k] = e.round + 1
	e.hear(m.DiagnoseLink(limit, k.a, k.b, long...))
}

// slowest blames a rank or a link whose answers take much longer than all others. All answers of a
// slow rank are late, because they queue behind its data or because it waits for a CPU. Of any other
// rank only those to the slow one are. So the rank counts whose second latest answer is later than
// that of all others. Without such a rank, the link with the latest answer counts. The ranks of a
// host have one network: its first rank stands for all.
func (e *evidence) slowest() verdict {
	if v, late := e.slowRank(); late > 0 {
		return v
	}
	links := e.medians()
	if k, late, other, ok := latest(links); ok {
		if v, ok := e.slowBeside(links, k); ok {
			return v
		}
		v := linkVerdict(k.a, k.b, fmt.Sprintf("slow, both alive: answers take %v, others %v", late, other))
		v.weak = !e.answersBeside(k)
		return v
	}
	long := e.longQueues()
	if r := common(long); r >= 0 {
		return verdict{rank: r, other: -1, why: fmt.Sprintf("rank %d is slow: data wait in its sockets, and in those of no other rank", r)}
	}
	if len(long) == 1 {
		if v, late, other := e.latestRank(); late >= slowSecond && late >= queueFactor*other && (v.rank == long[0].a || v.rank == long[0].b) {
			return v
		}
		if v, ok := e.slowBeside(links, long[0]); ok {
			return v
		}
		return linkVerdict(long[0].a, long[0].b, "slow, both alive: data wait in its sockets")
	}
	if _, late, _, _ := latest(links); late < slowAnswer && len(e.moved) == 1 && e.round >= leastRounds && len(e.health) > 2 {
		for k := range e.moved { // its answers overtake the data
			return linkVerdict(k.a, k.b, "slow, both alive: no other one carries data")
		}
	}
	if v, ok := e.slowAlike(links); ok {
		return v
	}
	return verdict{rank: -1, other: -1, why: "no rank is missing: the operation was too slow" + describeDelays(links)}
}

// slowBeside blames a rank at one end of a slow link whose answers on all its other links are late too.
func (e *evidence) slowBeside(links map[pairOfRanks]time.Duration, link pairOfRanks) (verdict, bool) {
	for _, r := range []int{link.a, link.b} {
		if n, least, others := e.quickest(links, r, link); (n > 1 || others > 0) && allLate(least, others) {
			return slowByAll(r, least, others), true
		}
	}
	return verdict{}, false
}

// slowAlike blames a rank whose answers are all much later than those between others.
func (e *evidence) slowAlike(links map[pairOfRanks]time.Duration) (verdict, bool) {
	for r := range e.health {
		if n, least, others := e.quickest(links, r, pairOfRanks{-1, -1}); n > 1 && others > 0 && allLate(least, others) {
			return slowByAll(r, least, others), true
		}
	}
	return verdict{}, false
}

// allLate reports whether a rank is slow whose quickest answer takes least, and others at most others.
func allLate(least, others time.Duration) bool {
	return least >= slowLeast && least >= slowFactor*others
}

func slowByAll(rank int, least, others time.Duration) verdict {
	return verdict{rank: rank, other: -1, why: fmt.Sprintf("rank %d is slow: its quickest answer takes %v, others %v at most", rank, least.Round(time.Millisecond), max(others.Round(time.Millisecond), time.Millisecond))}
}

// quickest returns the quickest answer of rank r on its n links other than slow, and the latest answer between
// other ranks. With several links their medians count. With one it is the quickest of all rounds: a rank that
// waits for a CPU is late in some of them only.
func (e *evidence) quickest(links map[pairOfRanks]time.Duration, r int, slow pairOfRanks) (n int, least, others time.Duration) {
	var only pairOfRanks
	for link, d := range links {
		switch {
		case link == slow:
		case link.a != r && link.b != r:
			others = max(others, d)
		default:
			if n++; n == 1 || d < least {
				least, only = d, link
			}
		}
	}
	if n == 1 {
		least = slices.Min(e.delays[only])
	}
	return n, least, others
}

// latestRank compares the second latest answer of each rank. It returns the rank with the latest one,
// how late that is, and how late those of the other ranks are.
func (e *evidence) latestRank() (v verdict, late, other time.Duration) {
	first, second := make(map[int]time.Duration), make(map[int]time.Duration)
	for k, d := range e.medians() {
		for _, r := range []int{k.a, k.b} {
			first[r], second[r] = max(first[r], d), max(second[r], min(first[r], d))
		}
	}
	r, late, other, _ := latest(second)
	return verdict{rank: r, other: -1, why: fmt.Sprintf("rank %d is slow: it answers after %v, others after %v", r, late, other)}, late, other
}

// slowRank blames a rank by its second latest answer, and returns how late that is, 0 if there is no
// such rank.
func (e *evidence) slowRank() (verdict, time.Duration) {
	if v, late, other := e.latestRank(); late >= slowSecond && isLate(late, other) {
		return v, late
	}
	return verdict{rank: -1, other: -1}, 0
}

// slowEnd blames a rank at one end of a silent link if its other links answer late too.
func (e *evidence) slowEnd(v verdict) (slow verdict, ok bool) {
	slow, late := e.slowRank()
	slow.weak = v.weak
	return slow, late > 0 && (slow.rank == e.onHost(v.rank) || slow.rank == e.onHost(v.other))
}

// medians returns how late the answers between two ranks mostly were.
func (e *evidence) medians() map[pairOfRanks]time.Duration {
	links := make(map[pairOfRanks]time.Duration)
	for k, all := range e.delays {
		slices.Sort(all)
		links[k] = all[len(all)/2]
	}
	return links
}

// longQueues returns between which ranks data waited in a socket in most rounds. Answers are quick all
// the same if they overtake the data.
func (e *evidence) longQueues() (long []pairOfRanks) {
	for k, n := range e.queued {
		if n > e.round/2 {
			long = append(long, k)
		}
	}
	return long
}

// common returns the rank that several pairs have in common, -1 if there is none.
func common(pairs []pairOfRanks) int {
	if len(pairs) < 2 {
		return -1
	}
	for _, r := range []int{pairs[0].a, pairs[0].b} {
		if !slices.ContainsFunc(pairs, func(k pairOfRanks) bool { return k.a != r && k.b != r }) {
			return r
		}
	}
	return -1
}

// answersBeside reports whether both ranks of a link have answered on another one. Until then a slow
// rank looks like a slow link.
func (e *evidence) answersBeside(k pairOfRanks) bool {
	hosts := make(map[int]bool)
	for r := range e.health {
		hosts[e.onHost(r)] = true
	}
	if len(hosts) < 3 {
		return true // there is no other one
	}
	beside := func(r int) bool {
		for other := range e.delays {
			if other != k && (other.a == r || other.b == r) {
				return true
			}
		}
		return false
	}
	return beside(k.a) && beside(k.b)
}

// describeDelays says between which ranks answers took longest.
func describeDelays(links map[pairOfRanks]time.Duration) string {
	k, late, other, _ := latest(links)
	if late == 0 {
		return ""
	}
	return fmt.Sprintf("; answers between ranks %d and %d took %v, others %v at most", k.a, k.b, late, other)
}

func notExpected(rank int) string {
	return fmt.Sprintf("rank %d did not send or receive what was expected", rank)
}

// beside returns the other ranks on the host of a rank, nil if all are on one host.
func (e *evidence) beside(rank int) (others []int) {
	if e.hosts == nil || e.hosts.Hosts() == 1 {
		return nil
	}
	for _, r := range e.hosts.Members(e.hosts.Host(rank)) {
		if r != rank {
			others = append(others, r)
		}
	}
	return others
}

// onHost returns the first rank on the host of a rank, or the rank if all are on one host.
func (e *evidence) onHost(rank int) int {
	if e.hosts == nil || e.hosts.Hosts() == 1 {
		return rank
	}
	return e.hosts.Members(e.hosts.Host(rank))[0]
}

// latest returns which of some ranks or links answers much later than all others, its time and the
// longest time of the others.
func latest[K comparable](times map[K]time.Duration) (which K, late, other time.Duration, ok bool) {
	for k, d := range times {
		if d > late {
			which, late, other = k, d, late
		} else {
			other = max(other, d)
		}
	}
	return which, late.Round(time.Millisecond), max(other.Round(time.Millisecond), time.Millisecond), isLate(late, other)
}

// isLate reports whether an answer is much later than the others.
func isLate(late, other time.Duration) bool { return late >= slowAnswer && late >= slowFactor*other }

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
		case op != noOp:
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
	return "ranks " + list(ranks) + " wait for each other: " + what
}

// ending says how a rank has ended that is gone.
func ending(h transport.Health) string {
	if h.Died {
		return "has died"
	}
	return "has left the group"
}

// chain follows the ranks that wait for each other, from those in an earlier operation and from
// this one. It blames the first that waits for nobody. A rank that is in an operation and needs no
// connection waits in memory for the others on its host.
func (e *evidence) chain(busy []int) verdict {
	from := append([]int{}, busy...)
	if e.peer >= 0 && e.peer != e.self {
		from = append(from, e.peer)
	}
	for _, l := range e.of(e.self).Links {
		if l.Waits {
			from = append(from, l.Peer)
		}
	}
	if len(from) == 0 && e.collective {
		from = e.beside(e.self)
	}
	// The first answer does not show yet whether data move.
	sure := e.round > 1 || !slices.ContainsFunc(e.of(e.self).Links, waits)
	seen := map[int]bool{e.self: true}
	done := verdict{rank: -1, other: -1} // blames a rank that has done its part, as far as it knows
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
		sure := sure && !(e.collective && h.Answered && h.Completed < h.Issued)
		switch {
		case h.Departed:
			return verdict{rank: r, other: -1, why: fmt.Sprintf("rank %d %s", r, ending(*h)), sure: sure}
		case h.Answered && waiting:
			for _, l := range h.Links {
				if l.Waits {
					from = append(from, l.Peer)
				}
			}
		case e.collective && h.Answered && h.Completed < h.Issued && len(e.beside(r)) > 0:
			from = append(from, e.beside(r)...)
		case e.collective && h.Answered && h.Completed > e.call: // what it sent may be on its way
			if done.rank < 0 {
				done = verdict{rank: r, other: -1, why: notExpected(r)}
			}
		case e.collective && h.Answered && h.Issued <= e.call:
			// In its earlier operation it may have run out of time. It then tells why itself.
			early := h.Completed < h.Issued && e.round < idleRounds
			return verdict{rank: r, other: -1, why: e.describeNotCalled(busy), sure: sure, weak: early}
		default:
			return verdict{rank: r, other: -1, why: notExpected(r), sure: sure}
		}
	}
	if circle := e.circle(seen); circle != nil {
		return verdict{rank: -1, other: -1, why: e.describeCircle(circle)}
	}
	if done.rank >= 0 {
		return done
	}
	if len(busy) > 0 {
		return verdict{rank: busy[0], other: -1, why: e.describeNotCalled(busy)}
	}
	if e.collective {
		for _, h := range e.health {
			if h.Departed { // mostly after it has done its part
				return verdict{rank: h.Rank, other: -1, why: fmt.Sprintf("rank %d %s", h.Rank, ending(h)), sure: true}
			}
		}
	}
	// In the first round a piece of a collective may just have come.
	v := verdict{rank: -1, other: -1, sure: len(seen) == 1 && (e.round > 1 || !e.collective)}
	if len(seen) > 1 {
		var cycle []int
		for r := range seen {
			cycle = append(cycle, r)
		}
		slices.Sort(cycle)
		v.why = "ranks " + list(cycle) + " wait for each other"
	}
	return v
}
