package shm

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// polls is how often a waiting rank looks, with a pause after each look, before it does
	// anything else: about as long as a line takes to come from another core's
	// cache, and nothing beside a context switch.
	polls = 10

	// spinFor is for how long a rank goes on polling when each has a CPU of its
	// own. A small message takes a tenth of it. It is not longer because the kernel
	// may have put two ranks on one CPU all the same: an all-reduce then takes this
	// and two context switches (126 us at any size when it was 50 us).
	spinFor = 5 * time.Microsecond

	// yieldFor is for how long a rank then offers its CPU to others before it
	// sleeps. With more ranks than CPUs it is how a rank lets others go ahead:
	// a barrier of 4 ranks on 2 CPUs takes 6 us so (BenchmarkProcesses), and took 460 us
	// when they polled for 200 us first.
	yieldFor = 200 * time.Microsecond

	// Sleeping ranks are woken. They wake by themselves to ask stop, and because an
	// abort may fall between a rank's last look and its sleep.
	minSleep = time.Millisecond
	maxSleep = 8 * time.Millisecond

	// glance is how many times a rank yields between two looks at the clock and at stop.
	glance = 16

	// courtesy is how many of those there are from one offer to the other goroutines of this
	// process to the next, where each rank has a CPU of its own. An offer wakes another thread
	// to look for goroutines, which is one more that wants a CPU, and a late rank
	// would make all others do so.
	courtesy = 8
)

// wait returns once *w, a word of rank owner, has come to want.
func (g *Group) wait(owner int, w *uint32, want uint32) error {
	for range polls {
		if reached(w, want) {
			return nil
		}
		pause()
	}
	return g.waitLong(owner, w, want)
}

// offer returns after how many yields a rank offers to let other goroutines go on.
func (g *Group) offer() int {
	if g.spinFor > 0 && !g.inside {
		return glance * courtesy
	}
	return glance
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
		g.hop(owner)
	}
	offer := g.offer()
	for n := 1; ; n++ {
		if reached(w, want) {
			return nil
		}
		if n%glance == 0 {
			if err := g.ended(owner, w, want); err != nil || reached(w, want) {
				return err
			}
			if time.Since(start) > g.spinFor+yieldFor {
				break
			}
		}
		if n%offer == 0 {
			runtime.Gosched()
		}
		yield()
	}
	for sleep := minSleep; ; sleep = min(2*sleep, maxSleep) {
		atomic.AddUint32(g.segs[owner].waiters, 1)
		if now := atomic.LoadUint32(w); int32(now-want) < 0 {
			doze(w, now, sleep)
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

// ended returns why there is no use in waiting on, nil if there is.
func (g *Group) ended(owner int, w *uint32, want uint32) error {
	if err := g.refused(); err != nil {
		return err
	}
	if err := g.compare(owner, g.number); err != nil {
		return g.giveUp(&RankError{Rank: owner, Err: err})
	}
	if atomic.LoadUint32(g.segs[owner].left) != 0 && !reached(w, want) {
		return g.giveUp(&RankError{Rank: owner, Err: ErrLeft})
	}
	if g.stop != nil {
		if err := g.stop(); err != nil {
			return g.giveUp(err)
		}
	}
	return nil
}

// refused returns why the group does not work, nil if it does.
func (g *Group) refused() error {
	if p := g.failure.Load(); p != nil {
		return *p
	}
	return g.aborted()
}

// giveUp ends the group on all ranks from within an operation.
func (g *Group) giveUp(err error) error {
	err = g.fail(err)
	g.tell()
	return err
}

// announce stores a word that others wait for. Whatever was written to memory
// before is there for whoever sees it.
func (g *Group) announce(w *uint32, v uint32) {
	atomic.StoreUint32(w, v)
	if atomic.LoadUint32(g.self.waiters) != 0 {
		wake(w)
	}
}
