package blame

import (
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// AskFor is how long a rank that waits, but not yet runs out of time, waits for the others' answers.
	AskFor = 350 * time.Millisecond

	// A rank begins to ask leadMost before an operation's time is over, or after half of that time. On two CPUs with
	// a load of 28, a rank that was alive took longer than 1.4 s to be heard.
	leadMost = 4 * time.Second

	// It blames somebody at the latest a part of the grace after that time. The grace is 0.3 s, or a tenth
	// of the time. The part is larger if others know more and come first, see Call.Turn.
	graceLeast   = 300 * time.Millisecond
	graceMost    = 3 * time.Second
	graceIsOneOf = 10
	partOfGrace  = 60 // per cent, and for each turn:
	partOfTurn   = 15

	// With less time, questions come leastPace apart, and an answer may take leastAnswer.
	leastPace   = 20 * time.Millisecond
	leastAnswer = 120 * time.Millisecond
)

// Lead returns how long before its end a call with a limit makes its rank ask the others.
func Lead(limit time.Duration) time.Duration { return max(0, min(limit/2, leadMost)) }

// Grace returns how long after its end a call with a limit may still be open.
func Grace(limit time.Duration, turn int) time.Duration {
	return min(max(graceLeast, limit/graceIsOneOf), graceMost) * time.Duration(partOfGrace+partOfTurn*turn) / 100
}

// Inquiry decides when a rank asks the others, and what their answers show. One inquiry is for all calls of a mesh that
// run out of time together. Its methods take the first of them, whose time ends first.
//
// A rank that is alive answers as soon as it gets a CPU. A stopped rank never does. Silence does not tell the two
// apart, but on a busy machine other processes are late too. So the rank asks again while its own process is late, or
// while more answers come in. It also asks again while data move or ranks wait for each other. The second question is
// about the ranks that the first answers have shown. By the third, the others know more of them.
type Inquiry struct {
	evidence
	begun  time.Time
	asked  time.Time     // when the last round began
	pace   time.Duration // from one round to the next
	silent int           // how many ranks should have answered and have not
	before int           // and how many in the round before
	late   bool          // this process was late in the last round
	waited time.Duration // for a CPU, since begun
}

// New returns an inquiry of rank self. Hosts is the number of each rank's host, nil if that is unknown. With checks
// the calls of the group are not the program's, but checks of these.
func New(self int, hosts []int, checks bool, now time.Time) *Inquiry {
	if len(hosts) > 0 && slices.Max(hosts) == slices.Min(hosts) {
		hosts = nil // it makes no difference
	}
	e := evidence{self: self, hosts: hosts, checks: checks, call: Call{Peer: -1}}
	return &Inquiry{evidence: e, begun: now, silent: -1}
}

// Ask begins a round. It returns how long to wait for answers, and the ranks that the question is about. No limit means
// not to ask: answers would come too late.
func (q *Inquiry) Ask(now time.Time, first Call) (limit time.Duration, about []int) {
	q.asked = now
	span := first.Latest.Sub(q.begun)
	q.pace = max(span/(idleRounds+2), leastPace)
	q.silentFrom = min(linkSilent, span/2)
	left, short := first.Latest.Sub(now), min(q.pace, leastAnswer/2)
	if q.round > 0 && left < short {
		return 0, nil
	}
	q.call = first
	return min(max(q.pace, leastAnswer), max(left, short)), q.suspects()
}

// Hear takes the answers of a round, nil if nobody was asked. This process has waited for a CPU for some of that time.
func (q *Inquiry) Hear(health []transport.Health, waited time.Duration) {
	if health != nil {
		q.hear(health)
	}
	q.late = waited >= q.pace/4
	q.waited += waited
	q.before, q.silent = q.silent, 0
	for _, h := range q.health {
		if isSilent(h) && h.Rank != q.self {
			q.silent++
		}
	}
}

// Judge says why a call runs out of time, once its time is over. It reports false if the answers leave doubt and more
// may come.
func (q *Inquiry) Judge(now time.Time, c Call) (Verdict, bool) {
	q.call = c
	v, end := q.judge(), !now.Before(c.Latest)
	took := now.Sub(q.begun)
	if end && v.weak && q.late && (q.silent > 0 || v.Other >= 0) && q.waited >= took/2 {
		const what = "rank %d waited for a CPU for %.1f s of %.1f: answers may be late for that"
		v = q.nobody(fmt.Sprintf(what, q.self, q.waited.Seconds(), took.Seconds()))
	}
	enough := q.round >= leastRounds && !v.weak && !q.late && q.silent == q.before
	return v, end || c.Turn == 0 && (enough || v.sure && q.silent == 0)
}

// Next returns when the next round begins.
func (q *Inquiry) Next(now time.Time, first Call) time.Time {
	next := q.asked.Add(q.pace)
	for _, t := range []time.Time{first.Until, first.Latest} {
		if t.After(now) && t.Before(next) {
			next = t
		}
	}
	return next
}
