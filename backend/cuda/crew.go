package cuda

import (
	"sync"
	"sync/atomic"
)

// crew is goroutines that combine parts of a rank's share side by side. They sleep
// while there is nothing to do.
type crew struct {
	n    int
	quit atomic.Bool // what they do is of no use any more

	mu     sync.Mutex
	cond   sync.Cond
	job    job
	parts  int    // of the job
	number uint64 // of the job
	busy   int    // who has not done with it
	closed bool
	wg     sync.WaitGroup
}

func newCrew(n int) *crew {
	c := &crew{n: max(n, 1)}
	c.cond.L = &c.mu
	return c
}

// job is what a crew does, each a part of it.
type job interface{ part(i int) }

// start has the first n of the crew do their parts of j. The job before has ended.
func (c *crew) start(n int, j job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.number == 0 {
		for i := range c.n {
			c.wg.Go(func() { c.member(i) })
		}
	}
	c.number++
	c.quit.Store(false)
	c.job, c.parts, c.busy = j, n, c.n
	c.cond.Broadcast()
}

// end waits for the job to end; with stop what is left of it is not done.
func (c *crew) end(stop bool) {
	c.quit.Store(stop)
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.busy > 0 {
		c.cond.Wait()
	}
	c.job = nil
}

func (c *crew) member(i int) {
	for done := uint64(0); ; {
		c.mu.Lock()
		for c.number == done && !c.closed {
			c.cond.Wait()
		}
		j, parts := c.job, c.parts
		if c.number == done {
			c.mu.Unlock()
			return
		}
		done = c.number
		c.mu.Unlock()
		if i < parts {
			j.part(i)
		}
		c.mu.Lock()
		if c.busy--; c.busy == 0 {
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
