package gloo

import (
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// diagnoseFor is how long a rank that ran out of time waits for the answers of the
	// others before it says whose fault it was.
	diagnoseFor = 350 * time.Millisecond

	// diagnoseMost bounds it where answers may be on their way.
	diagnoseMost = 10 * diagnoseFor

	// lagTick is how often a rank looks whether it gets to run when it should.
	lagTick = 5 * time.Millisecond
)

// diagnose asks the other ranks how far they are. A rank that is alive answers as soon as it
// gets a CPU, and one that is stopped never does; which it is nobody can tell from silence. But
// who is starved is so with others: while this rank itself was kept waiting for a CPU, or
// answers came from ranks that had none at first, there is reason to ask again.
func diagnose(m transport.Mesh, lag func() (stop func() time.Duration)) []transport.Health {
	const round = diagnoseFor / 2
	begun := time.Now()
	health := m.Diagnose(round)
	for before := silent(m, health); before > 0; {
		stop := lag()
		health = m.Diagnose(round)
		kept, now := stop(), silent(m, health)
		if kept < round/4 && now == before || time.Since(begun) >= diagnoseMost {
			break
		}
		before = now
	}
	return health
}

// silent counts those that should have answered.
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

// watchLag measures until stop is called for how long this process was kept waiting for a CPU.
func watchLag() (stop func() time.Duration) {
	end, kept := make(chan struct{}), make(chan time.Duration)
	go func() {
		var sum time.Duration
		t := time.NewTimer(lagTick)
		defer t.Stop()
		for due := time.Now().Add(lagTick); ; due = time.Now().Add(lagTick) {
			select {
			case <-t.C:
				sum += max(0, time.Since(due))
				t.Reset(lagTick)
			case <-end:
				kept <- sum + max(0, time.Since(due))
				return
			}
		}
	}()
	return func() time.Duration {
		close(end)
		return <-kept
	}
}
