package shm

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// polls is how often a waiting rank looks, with a pause after each, before it does anything
	// else. That takes about as long as a cache line takes from another core, and far less than
	// a context switch.
	polls = 10

	// spinFor is how long a rank goes on polling when each has a CPU of its own. A small
	// message takes a tenth of it. If the kernel has put two ranks on one CPU, an all-reduce
	// takes this time and two context switches: with 50 us it took 126 us at any size.
	spinFor = 5 * time.Microsecond

	// yieldFor is how long a rank then yields its CPU before it sleeps. With more ranks than
	// CPUs, this lets the other ranks run: a barrier of 4 ranks on 2 CPUs takes 6 us.
	// It took 460 us when they polled for 200 us first.
	yieldFor = 200 * time.Microsecond

	// A sleeping rank is woken by the rank that publishes. It also wakes up after these times,
	// to call stop, and because an abort may come between its last look and its sleep.
	minSleep = time.Millisecond
	maxSleep = 8 * time.Millisecond

	// yieldsPerClock is how many times a rank yields between two looks at the clock and calls
	// of stop.
	yieldsPerClock = 16

	// goschedsApart is how many of those lie between two calls of runtime.Gosched where each
	// rank has a CPU of its own. Gosched wakes another thread to look for goroutines, and that
	// thread needs a CPU too.
	goschedsApart = 8
)

// wait returns once *w, a word of rank owner, has reached want.
func (g *Group) wait(owner int, w *uint32, want uint32) error {
	for range polls {
		if reached(w, want) {
			return nil
		}
		pause()
	}
	return g.waitLong(owner, w, want)
}

// yieldsPerGosched returns after how many yields a rank lets other goroutines run.
func (g *Group) yieldsPerGosched() int {
	if g.spinFor > 0 && !g.oneProcess {
		return yieldsPerClock * goschedsApart
	}
	return yieldsPerClock
}

// reached compares modulo 2^32: no two ranks are 2^31 pieces apart.
func reached(w *uint32, want uint32) bool { return int32(atomic.LoadUint32(w)-want) >= 0 }

func (g *Group) waitLong(owner int, w *uint32, want uint32) error {
	start := time.Now()
	for time.Since(start) < g.spinFor {
		for range polls {
			if reached(w, want) {
				return nil
			}
			pause()
		}
	}
	if g.spinFor > 0 {
		g.moveOffCPU()
	}
	goschedAfter := g.yieldsPerGosched()
	for n := 1; ; n++ {
		if reached(w, want) {
			return nil
		}
		if n%yieldsPerClock == 0 {
			if err := g.ended(owner, w, want); err != nil || reached(w, want) {
				return err
			}
			if time.Since(start) > g.spinFor+yieldFor {
				break
			}
		}
		if n%goschedAfter == 0 {
			runtime.Gosched()
		}
		yield()
	}
	g.waitsFor.Store(int32(owner) + 1)
	defer g.waitsFor.Store(0)
	for sleep := minSleep; ; sleep = min(2*sleep, maxSleep) {
		atomic.AddUint32(g.segs[owner].waiters, 1)
		if now := atomic.LoadUint32(w); int32(now-want) < 0 {
			sleepOn(w, now, sleep)
		}
		atomic.AddUint32(g.segs[owner].waiters, ^uint32(0))
		if reached(w, want) {
			return nil
		}
		if err := g.ended(owner, w, want); err != nil {
			return err
		}
	}
}

// WaitsFor returns the rank that a collective of this rank waits for. ok is false if it waits for none.
func (g *Group) WaitsFor() (rank int, ok bool) {
	n := g.waitsFor.Load()
	return int(n) - 1, n != 0
}

// ended returns why the wait must end, nil if it must not.
func (g *Group) ended(owner int, w *uint32, want uint32) error {
	if err := g.refusal(); err != nil {
		return err
	}
	if err := g.compare(owner, g.number); err != nil {
		return g.giveUp(&RankError{Rank: owner, Err: err})
	}
	if gone := g.gone(owner); gone != nil && !reached(w, want) {
		return g.giveUp(&RankError{Rank: owner, Err: gone})
	}
	if g.stop != nil {
		if err := g.stop(); err != nil {
			return g.giveUp(err)
		}
	}
	return nil
}

// refusal returns why the group does not work, nil if it does.
func (g *Group) refusal() error {
	if p := g.failure.Load(); p != nil {
		return *p
	}
	return g.aborted()
}

// giveUp ends the group on all ranks, during an operation.
func (g *Group) giveUp(err error) error {
	err = g.fail(err)
	g.signalAbort()
	return err
}

// announce stores a word that other ranks wait for. A rank that sees it sees all earlier
// writes.
func (g *Group) announce(w *uint32, v uint32) {
	atomic.StoreUint32(w, v)
	if atomic.LoadUint32(g.self.waiters) != 0 {
		wake(w)
	}
}
