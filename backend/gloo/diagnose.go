package gloo

import (
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// diagnoseFor is how long a rank that timed out waits for the others' answers before it blames
	// one.
	diagnoseFor = 350 * time.Millisecond

	// diagnoseMost bounds it when answers may still be on their way.
	diagnoseMost = 10 * diagnoseFor

	// lagTick is how often watchLag checks for delays.
	lagTick = 5 * time.Millisecond
)

// diagnose asks the other ranks how far they are. A rank that is alive answers as soon as it gets a
// CPU. A stopped rank never does. Silence does not tell the two apart, but on a busy machine other
// processes are late too. So diagnose asks again while this process itself is late, or while more
// answers come in.
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

// watchLag measures, until stop is called, for how long this process waited for a CPU.
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
