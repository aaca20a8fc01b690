package hostshm

import (
	"sync"
	"sync/atomic"
	"time"
)

// crew is goroutines that combine parts of a rank's share side by side. They sleep while there is
// nothing to do. Sleeping threads are woken one after the other. So the goroutines first poll for
// a while, if there are CPUs for that.
type crew struct {
	N      int
	linger time.Duration
	number atomic.Uint64 // of the job; changed under mu
	busy   atomic.Int32  // who has not done with it; comes to zero under mu

	mu     sync.Mutex
	cond   sync.Cond
	job    job
	parts  int // of the job
	closed bool
	wg     sync.WaitGroup
}

func newCrew(n int, eager bool) *crew {
	c := &crew{N: max(n, 1)}
	if eager {
		c.linger = LingerFor
	}
	c.cond.L = &c.mu
	return c
}

// job is what a crew does, each a part of it.
type job interface{ Part(i int) }

// Do has the first n of the crew do their parts of j, and waits for them. The caller does a part that is the only one.
func (c *crew) Do(n int, j job) {
	if n == 1 {
		j.Part(0)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.number.Load() == 0 {
		for i := range c.N {
			c.wg.Go(func() { c.member(i) })
		}
	}
	c.job, c.parts = j, n
	c.busy.Store(int32(n))
	c.number.Add(1)
	c.cond.Broadcast()
	c.mu.Unlock()
	PollFor(c.linger, func() bool { return c.busy.Load() == 0 })
	c.mu.Lock()
	for c.busy.Load() > 0 {
		c.cond.Wait()
	}
	c.job = nil
}

// member does parts of the jobs.
func (c *crew) member(i int) {
	for done := uint64(0); ; PollFor(c.linger, func() bool { return c.number.Load() != done }) {
		c.mu.Lock()
		for c.number.Load() == done && !c.closed {
			c.cond.Wait()
		}
		// Who has no part may come when the job has ended.
		j, parts, last := c.job, c.parts, c.number.Load() == done
		done = c.number.Load()
		c.mu.Unlock()
		if last {
			return
		}
		if i >= parts || j == nil {
			continue
		}
		j.Part(i)
		c.mu.Lock()
		if c.busy.Add(-1) == 0 {
			c.cond.Broadcast()
		}
		c.mu.Unlock()
	}
}

func (c *crew) close() {
	c.mu.Lock()
	c.closed = true
	c.cond.Broadcast()
	c.mu.Unlock()
	c.wg.Wait()
}
