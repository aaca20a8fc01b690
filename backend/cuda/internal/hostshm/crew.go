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
	quit   atomic.Bool   // what they do is of no use any more
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

// Start has the first n of the crew do their parts of j. The job before has ended.
func (c *crew) Start(n int, j job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.number.Load() == 0 {
		for i := range c.N {
			c.wg.Go(func() { c.member(i, 0) })
		}
	}
	c.quit.Store(false)
	c.job, c.parts = j, n
	c.busy.Store(int32(n))
	c.number.Add(1)
	c.cond.Broadcast()
}

// End waits for the job to end; with stop what is left of it is not done.
func (c *crew) End(stop bool) {
	c.quit.Store(stop)
	PollFor(c.linger, func() bool { return c.busy.Load() == 0 })
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.busy.Load() > 0 {
		c.cond.Wait()
	}
	c.job = nil
}

// member does parts of the jobs after number done.
func (c *crew) member(i int, done uint64) {
	left := false
	defer func() {
		if !left { // a part has ended the goroutine: runtime.Goexit
			c.wg.Go(func() { c.member(i, done) })
		}
	}()
	for {
		c.mu.Lock()
		for c.number.Load() == done && !c.closed {
			c.cond.Wait()
		}
		if c.number.Load() == done {
			c.mu.Unlock()
			left = true
			return
		}
		// Who has no part may come when the job has ended.
		j, parts := c.job, c.parts
		done = c.number.Load()
		c.mu.Unlock()
		if i < parts && j != nil {
			c.do(j, i)
		}
		PollFor(c.linger, func() bool { return c.number.Load() != done })
	}
}

// do does part i of j, and counts it whether it returns or not.
func (c *crew) do(j job, i int) {
	defer func() {
		c.mu.Lock()
		if c.busy.Add(-1) == 0 {
			c.cond.Broadcast()
		}
		c.mu.Unlock()
	}()
	j.Part(i)
}

func (c *crew) close() {
	c.mu.Lock()
	c.closed = true
	c.cond.Broadcast()
	c.mu.Unlock()
	c.wg.Wait()
}
