package shm

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Waiter is what a goroutine waits for while it moves messages.
type Waiter interface {
	// Finished reports whether the wait is over. It is called often.
	Finished() bool
	// Expired reports whether the wait must end early: its context or deadline is over. It is
	// called every few microseconds at first, later every few milliseconds.
	Expired() bool
}

// PollUntil moves messages in the calling goroutine, until w has finished or is over, or done is
// closed. It returns at once if another goroutine does that work.
func (m *Mesh) PollUntil(w Waiter, done <-chan struct{}) {
	m.pollers.Add(1)
	if m.takeOver() {
		m.run(w, done)
		m.driver.Unlock()
	}
	if m.pollers.Add(-1) > 0 || m.pending.Load() == 0 {
		return
	}
	if !m.lazy || m.turnedAway.Swap(false) {
		m.MoveInBackground()
	} else if m.leftToPollers.Load() {
		m.mu.Lock()
		m.later.Within(leaveFor)
		m.mu.Unlock()
	}
}

// leaveFor is how long messages that the mesh's goroutine has left to a waiting goroutine wait
// for the next one. To wake a goroutine costs more than most messages.
const leaveFor = 100 * time.Microsecond

// PollOnce moves what can be moved at once.
func (m *Mesh) PollOnce() { m.progress() }

// takeOver makes the caller the driver. The mesh's own goroutine lets it, other callers do not.
func (m *Mesh) takeOver() bool {
	for n := 1; !m.driver.TryLock(); n++ {
		if !m.background.Load() {
			// It may just have ended. Who drives sees the mark when it stops.
			m.turnedAway.Store(true)
			return m.driver.TryLock()
		}
		if n == 1 {
			m.mu.Lock()
			if m.end == nil {
				m.g.self.wakeMesh()
			}
			m.mu.Unlock()
		}
		yield()
		if n%yieldsPerClock == 0 {
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
		case <-m.wake:
		}
		if m.pollers.Load() > 0 || !m.driver.TryLock() {
			m.leaveToPollers()
			continue
		}
		m.background.Store(true)
		m.run(nil, nil)
		m.background.Store(false)
		m.driver.Unlock()
		if m.pending.Load() > 0 {
			m.leaveToPollers()
		} else {
			m.leftToPollers.Store(false)
		}
	}
}

// leaveToPollers leaves the requests to goroutines in PollUntil. The last of them wakes the mesh's
// goroutine again.
func (m *Mesh) leaveToPollers() {
	m.leftToPollers.Store(true)
	if m.pollers.Load() == 0 {
		m.MoveInBackground()
	}
}

// stopDriving reports whether the driver has no more work.
func (m *Mesh) stopDriving(w Waiter) bool {
	if w == nil {
		return m.pending.Load() == 0 || m.pollers.Load() > 0
	}
	return w.Finished()
}

// run moves messages until stopDriving or mustStop. It waits as Group.waitLong does.
func (m *Mesh) run(w Waiter, done <-chan struct{}) {
	sleep := minSleep
	var since time.Time
	moved := m.g.spinFor == 0 // there is no CPU of its own to move to
	goschedAfter := m.g.yieldsPerGosched()
	for n := 0; !m.stopDriving(w); n++ {
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
		if n%yieldsPerClock == 0 {
			if m.mustStop(w, done) {
				return
			}
			waited := time.Since(since)
			if waited > m.g.spinFor+yieldFor {
				if m.sleepUntilMove(w, sleep) {
					sleep = min(2*sleep, maxSleep)
				}
				continue
			}
			if waited > m.g.spinFor && n%goschedAfter == 0 {
				runtime.Gosched()
			}
		}
		if m.g.spinFor > 0 && time.Since(since) <= m.g.spinFor {
			continue
		}
		if !moved && w != nil {
			moved = true
			m.moveAway()
		}
		yield()
	}
}

// mustStop reports whether the driver has to return before its work is done.
func (m *Mesh) mustStop(w Waiter, done <-chan struct{}) bool {
	select {
	case <-m.closed:
		return true
	case <-done:
		return true
	default:
	}
	if w != nil && w.Expired() {
		return true
	}
	m.checkEnd()
	return false
}

// sleepUntilMove sleeps until a message may have moved. It returns false if it has not slept.
func (m *Mesh) sleepUntilMove(w Waiter, limit time.Duration) bool {
	self := m.g.self
	atomic.AddUint32(self.dozing, 1)
	defer atomic.AddUint32(self.dozing, ^uint32(0))
	now := atomic.LoadUint32(self.moves)
	if m.progress() || m.stopDriving(w) {
		return false
	}
	select {
	case <-m.closed:
		return false
	default:
	}
	sleepOn(self.moves, now, limit)
	return true
}

// moveAway moves this thread away from the CPU of another rank, if it waits for a message.
func (m *Mesh) moveAway() {
	m.mu.Lock()
	waits := m.end == nil && m.pending.Load() > 0
	m.mu.Unlock()
	if waits {
		m.g.moveOffCPU()
	}
}
