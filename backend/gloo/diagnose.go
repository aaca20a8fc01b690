package gloo

import (
	"fmt"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// diagnoseFor is how long a rank waits for the others' answers before it says that a rank does
	// not answer. A rank that timed out asks leastRounds times, twice in that time, before it
	// blames a rank or a link.
	diagnoseFor = 350 * time.Millisecond
	leastRounds = 6

	// diagnoseMost bounds it when answers may still be on their way.
	diagnoseMost = 10 * diagnoseFor
)

// diagnose asks the other ranks how far they are and for whom they wait. It returns the verdict. A
// rank that is alive answers as soon as it gets a CPU. A stopped rank never does. Silence does not
// tell the two apart, but on a busy machine other processes are late too. So diagnose asks again
// while this process itself is late, or while more answers come in. It also asks again while data
// move or ranks wait for each other. The second question is about the ranks that the first answers
// have shown. By the third, the others know more of them. It asks long questions about a link that
// seems slow. If it is still not sure at the end, and this process has waited for a CPU for half of
// the time, this rank is the slow one.
func diagnose(m transport.Mesh, lag func() (stop func() time.Duration), e *evidence) verdict {
	const round = diagnoseFor / 2
	begun := time.Now()
	var about []int
	var waited time.Duration // for a CPU
	before := -1
	var v verdict
	for n := 1; ; n++ {
		stop, asked := func() time.Duration { return 0 }, time.Now()
		if n > 1 {
			stop = lag()
		}
		e.ask(m, round, v, about)
		now := silent(m, e.health)
		v = e.judge()
		if m.Fault() != nil || v.sure && now == 0 {
			stop()
			return v
		}
		pause(m, round-time.Since(asked))
		kept := stop()
		waited += kept
		enough := n >= leastRounds && !v.weak
		switch late := kept >= round/4; {
		case m.Fault() != nil, enough && !late && now == before:
			return v
		case time.Since(begun) >= diagnoseMost:
			if took := time.Since(begun); v.weak && waited >= took/2 {
				return verdict{rank: e.self, other: -1, why: fmt.Sprintf("rank %d is slow: it waited for a CPU for %.1f s of %.1f", e.self, waited.Seconds(), took.Seconds())}
			}
			return v
		}
		before, about = now, e.suspects()
	}
}

// pause waits for d or until the mesh fails.
func pause(m transport.Mesh, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-m.Failed():
	case <-t.C:
	}
}

// silent returns the number of ranks that should have answered and have not.
func silent(m transport.Mesh, health []transport.Health) (n int) {
	for _, h := range health {
		if isSilent(h) && h.Rank != m.Rank() && m.Fault() == nil {
			n++
		}
	}
	return n
}

// isSilent reports whether a peer should have answered and has not.
func isSilent(h transport.Health) bool { return h.Native && !h.Answered && !h.Departed }
