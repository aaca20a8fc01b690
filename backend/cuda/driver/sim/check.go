package sim

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// entry is one line of an agent's log: a step, and memory that was used in it.
// Logs go one way, from the agent to the checker, so that they order nothing
// for Go's race detector.
type entry struct {
	op    *op
	agent *agent
	tick  uint32
	clock clock // what had happened before, without the agent's own steps
	spans []span
	next  atomic.Pointer[entry]
}

func newEntry() *entry { return new(entry) }

// add appends to the agent's log.
func (a *agent) add(e *entry) {
	e.agent = a
	a.log.next.Store(e)
	a.log = e
}

// checker reads the logs in an order that agrees with the vector clocks and
// compares each use of memory with those before it. It has a goroutine of its
// own, which nothing waits for but Check.
type checker struct {
	m   *Machine // nil if it is off
	ask chan func()

	shadow   map[exportKey]*shadow // by backing; another machine has the same numbers
	hosts    map[*Driver]clock     // what the hosts had published in the operations taken
	seen     map[[2]string]bool    // races that were reported
	taken    int                   // entries since the last sweep
	sweepAt  int
	timeline []*entry
}

// run is the goroutine.
func (c *checker) run() {
	c.shadow = make(map[exportKey]*shadow)
	c.hosts = make(map[*Driver]clock)
	c.seen = make(map[[2]string]bool)
	c.sweepAt = 4096
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-c.m.quit:
			return
		case f := <-c.ask:
			c.take()
			f()
		case <-tick.C:
			c.take()
		}
	}
}

// drain returns when everything that is in the logs has been looked at.
func (c *checker) drain() { c.do(func() {}) }

// do runs f on the checker's goroutine, after everything that is in the logs
// has been looked at. Without a checker, or after the end, it does nothing.
func (c *checker) do(f func()) {
	if c.m == nil {
		return
	}
	done := make(chan struct{})
	select {
	case c.ask <- func() { f(); close(done) }:
		<-done
	case <-c.m.quit:
	}
}

// take looks at all entries whose predecessors have been looked at.
func (c *checker) take() {
	for progress := true; progress; {
		progress = false
		for _, a := range *c.m.agents.Load() {
			for {
				e := a.head.next.Load()
				if e == nil || !c.ready(e) {
					break
				}
				a.head = e
				c.handle(e)
				progress = true
			}
		}
	}
	if c.taken >= c.sweepAt {
		c.sweep()
	}
}

// ready reports whether everything that happened before e has been looked at.
// What e's clock counts was logged before e.
func (c *checker) ready(e *entry) bool {
	all := *c.m.agents.Load()
	for i, n := range e.clock {
		if n == 0 || i == e.agent.id {
			continue
		}
		if next := all[i].head.next.Load(); next != nil && next.tick <= n {
			return false
		}
	}
	return true
}

func (c *checker) handle(e *entry) {
	c.taken++
	if e.op.s != nil {
		d := e.op.s.d
		c.hosts[d] = c.hosts[d].join(e.op.host)
	}
	// What is kept must not keep the rest of the log.
	e = &entry{op: e.op, agent: e.agent, tick: e.tick, clock: e.clock, spans: e.spans}
	if c.m.cfg.Timeline {
		c.timeline = append(c.timeline, e)
	}
	if c.m.cfg.NoCheck {
		return
	}
	for _, sp := range e.spans {
		k := exportKey{sp.b.owner, sp.b.id}
		sh := c.shadow[k]
		if sh == nil {
			sh = new(shadow)
			c.shadow[k] = sh
		}
		// The end of memory is remembered too: operations that were looked at later
		// need not have been before it.
		sh.use(sp.off, sp.off+sp.len, use{e, sp}, func(old use, from, to int) { c.race(old, use{e, sp}, from, to) })
	}
}

// use is one use of memory, a line of the shadow.
type use struct {
	e  *entry
	sp span
}

// before reports whether u happened before v, which comes later in the checker's
// order.
func (u use) before(v use) bool {
	return u.e.agent == v.e.agent || v.e.clock.at(u.e.agent.id) >= u.e.tick
}

// replaces reports whether whoever is not ordered after u, which happened before
// v, is not ordered after v either, so that u can be forgotten.
func (v use) replaces(u use) bool {
	return v.e.op.only == nil && (v.sp.mode == driver.Write || v.sp.mode == u.sp.mode)
}

// shadow remembers the uses of one backing. It has ranges of bytes, in order and without
// overlap, and for each the last uses of each kind.
type shadow struct{ segs []segment }

type segment struct {
	lo, hi int
	uses   []use
}

// use adds a use of [lo, hi) and calls clash for each remembered one that has no
// order to it.
func (sh *shadow) use(lo, hi int, v use, clash func(old use, from, to int)) {
	i, _ := slices.BinarySearchFunc(sh.segs, lo, func(s segment, lo int) int {
		if s.hi <= lo {
			return -1
		}
		return 1
	})
	for lo < hi {
		if i == len(sh.segs) || sh.segs[i].lo >= hi {
			sh.segs = slices.Insert(sh.segs, i, segment{lo, hi, []use{v}})
			return
		}
		if s := sh.segs[i]; s.lo > lo {
			sh.segs = slices.Insert(sh.segs, i, segment{lo, s.lo, []use{v}})
			lo = s.lo
			i++
			continue
		}
		if s := sh.segs[i]; s.lo < lo {
			sh.segs[i].hi = lo
			s.lo, s.uses = lo, slices.Clone(s.uses)
			i++
			sh.segs = slices.Insert(sh.segs, i, s)
		}
		if s := sh.segs[i]; s.hi > hi {
			sh.segs[i].hi = hi
			sh.segs = slices.Insert(sh.segs, i+1, segment{hi, s.hi, slices.Clone(s.uses)})
		}
		s := &sh.segs[i]
		kept := s.uses[:0]
		for _, u := range s.uses {
			ordered := u.before(v)
			if !ordered && u.sp.mode.Conflicts(v.sp.mode) && v.concerns(u) {
				clash(u, s.lo, s.hi)
			}
			if !ordered || !v.replaces(u) {
				kept = append(kept, u)
			}
		}
		clear(s.uses[len(kept):])
		s.uses = kept
		s.uses = append(s.uses, v)
		lo = s.hi
		i++
	}
}

// concerns reports whether u and v are each other's business: the end of one
// process's mapping is that of the process's own operations only.
func (v use) concerns(u use) bool {
	of := func(only *Driver, w use) bool { return only == nil || w.e.agent.d == only }
	return of(v.e.op.only, u) && of(u.e.op.only, v)
}

// sweep forgets uses that everything to come is ordered after.
func (c *checker) sweep() {
	c.taken = 0
	all := *c.m.agents.Load()
	// next is the least that the clock of each agent's next entry can be.
	next := make([]clock, len(all))
	for i, a := range all {
		next[i] = a.head.clock
		if s := a.stream; (s == nil || s.done.Load() == s.enq.Load()) && a.head.next.Load() == nil {
			// Its next operation will be enqueued after all those that were looked at.
			next[i] = next[i].join(c.hosts[a.d])
		}
	}
	size := 0
	for id, sh := range c.shadow {
		segs := sh.segs[:0]
		for _, s := range sh.segs {
			s.uses = slices.DeleteFunc(s.uses, func(u use) bool {
				for i := range all {
					if i != u.e.agent.id && next[i].at(u.e.agent.id) < u.e.tick {
						return false
					}
				}
				return true
			})
			if len(s.uses) > 0 {
				segs = append(segs, s)
				size += len(s.uses)
			}
		}
		clear(sh.segs[len(segs):])
		sh.segs = segs
		if len(segs) == 0 {
			delete(c.shadow, id)
		}
	}
	c.sweepAt = max(4096, size)
}

// race reports two uses without an order.
func (c *checker) race(u, v use, from, to int) {
	a, b := u.e, v.e
	// One report stands for all pairs from the same two lines.
	first, second := fmt.Sprint(a.op.kind, a.op.pcs), fmt.Sprint(b.op.kind, b.op.pcs)
	key := [2]string{min(first, second), max(first, second)}
	if c.seen[key] {
		return
	}
	c.seen[key] = true
	memory := fmt.Sprintf("device %d's memory that begins at %v", u.sp.device, u.sp.ptr-driver.Ptr(u.sp.off))
	if u.sp.b.host {
		memory = fmt.Sprintf("page-locked memory that begins at %v", u.sp.ptr-driver.Ptr(u.sp.off))
	}
	c.m.findings.add(&Race{
		First:  fmt.Sprintf("%s, which %v %d bytes", a.op.full(), u.sp.mode, u.sp.len),
		Second: fmt.Sprintf("%s, which %v %d bytes", b.op.full(), v.sp.mode, v.sp.len),
		Memory: memory, From: from, To: to, Missing: missing(a, b),
	})
}

// missing says which order two entries lack.
func missing(a, b *entry) string {
	switch {
	case a.agent.stream != nil && b.agent.stream != nil:
		return fmt.Sprintf("stream %s waits, before operation %d, for an event that stream %s records after operation %d, or the other way round",
			b.agent.name, b.op.n, a.agent.name, a.op.n)
	case a.agent.stream != nil:
		return fmt.Sprintf("the %s sees, before it goes on, an event or a word of stream %s after operation %d", b.agent.name, a.agent.name, a.op.n)
	case b.agent.stream != nil:
		return fmt.Sprintf("stream %s waits, before operation %d, for a word that the %s writes when it is done", b.agent.name, b.op.n, a.agent.name)
	}
	return fmt.Sprintf("an order between the %s and the %s", a.agent.name, b.agent.name)
}
