package shm

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Waiter is somebody who waits for messages and lends the goroutine for it.
type Waiter interface {
	// Finished reports whether there is nothing left to wait for. It is asked often.
	Finished() bool
	// Over reports whether the wait is over all the same: a context or a deadline. It is
	// asked every few microseconds at first, later every few milliseconds.
	Over() bool
}

// Help makes messages go on in the calling goroutine, until w has finished or
// is over, or done is closed, or there is nothing to help with, because another goroutine does it.
func (m *Mesh) Help(w Waiter, done <-chan struct{}) {
	m.helpers.Add(1)
	if m.takeOver() {
		m.run(w, done)
		m.driver.Unlock()
	}
	if m.helpers.Add(-1) > 0 || m.pending.Load() == 0 {
		return
	}
	if !m.lazy || m.refused.Swap(false) {
		m.Kick()
	} else if m.owed.Load() {
		m.later.Start()
	}
}

// leaveFor is for how long messages that the mesh's goroutine has left to a
// helper wait for the next one: waking a goroutine costs more than most of them.
const leaveFor = 100 * time.Microsecond

// Poll moves what can be moved at once.
func (m *Mesh) Poll() { m.progress() }

// takeOver makes the caller the driver. The mesh's own goroutine makes way, others do not.
func (m *Mesh) takeOver() bool {
	for n := 1; !m.driver.TryLock(); n++ {
		if !m.background.Load() {
			// It may just have ended. Who drives sees the mark when it stops.
			m.refused.Store(true)
			return m.driver.TryLock()
		}
		if n == 1 {
			m.mu.Lock()
			if m.end == nil {
				m.g.self.ring()
			}
			m.mu.Unlock()
		}
		yield()
		if n%glance == 0 {
			runtime.Gosched()
		}
	}
	return true
}

// drive is the goroutine of the mesh.
func (m *Mesh) drive() {
	defer m.wg.Done()
	for {
		select {
		case <-m.closed:
			return
		case <-m.kicks:
		}
		if m.helpers.Load() > 0 || !m.driver.TryLock() {
			m.owe()
			continue
		}
		m.background.Store(true)
		m.run(nil, nil)
		m.background.Store(false)
		m.driver.Unlock()
		if m.pending.Load() > 0 {
			m.owe()
		} else {
			m.owed.Store(false)
		}
	}
}

// owe leaves what is under way to helpers, the last of which has to see to it
// that the goroutine of the mesh comes back.
func (m *Mesh) owe() {
	m.owed.Store(true)
	if m.helpers.Load() == 0 {
		m.Kick()
	}
}

// enough reports whether the driver stops.
func (m *Mesh) enough(w Waiter) bool {
	if w == nil {
		return m.pending.Load() == 0 || m.helpers.Load() > 0
	}
	return w.Finished()
}

// run polls until there is no need any more. Waiting is as in Group.waitLong.
func (m *Mesh) run(w Waiter, done <-chan struct{}) {
	sleep := minSleep
	var since time.Time
	settled := m.g.spinFor == 0 // there is no CPU of its own to move to
	offer := m.g.offer()
	for n := 0; !m.enough(w); n++ {
		if m.progress() {
			n, sleep, since = -1, minSleep, time.Time{}
			continue
		}
		pause()
		if n < polls {
			continue
		}
		if since.IsZero() {
			since = time.Now()
		}
		if n%glance == 0 {
			if m.over(w, done) {
				return
			}
			waited := time.Since(since)
			if waited > m.g.spinFor+yieldFor {
				if m.doze(w, sleep) {
					sleep = min(2*sleep, maxSleep)
				}
				continue
			}
			if waited > m.g.spinFor && n%offer == 0 {
				runtime.Gosched()
			}
		}
		if m.g.spinFor > 0 && time.Since(since) <= m.g.spinFor {
			continue
		}
		if !settled && w != nil {
			settled = true
			m.part()
		}
		yield()
	}
}

// over reports whether there is no use in driving on, or no right.
func (m *Mesh) over(w Waiter, done <-chan struct{}) bool {
	select {
	case <-m.closed:
		return true
	case <-done:
		return true
	default:
	}
	if w != nil && w.Over() {
		return true
	}
	m.look()
	return false
}

// doze sleeps until a message may have moved, unless one has.
func (m *Mesh) doze(w Waiter, limit time.Duration) bool {
	self := m.g.self
	atomic.AddUint32(self.dozing, 1)
	defer atomic.AddUint32(self.dozing, ^uint32(0))
	now := atomic.LoadUint32(self.bell)
	if m.progress() || m.enough(w) {
		return false
	}
	select {
	case <-m.closed:
		return false
	default:
	}
	doze(self.bell, now, limit)
	return true
}

// part moves this thread away from the CPU of a rank from which a message is to come.
func (m *Mesh) part() {
	m.mu.Lock()
	owner := -1
	for i := range m.peers {
		if m.peers[i].pending > 0 && m.end == nil {
			owner = i
			break
		}
	}
	m.mu.Unlock()
	if owner >= 0 {
		m.g.hop(owner)
	}
}
