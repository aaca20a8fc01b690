// Package lazytimer calls a function later, and again for as long as the function asks for it.
//
// It is for work that usually is done soon without it. One timer serves all work of a kind,
// because setting a timer for each piece would cost more than most pieces do. When the timer goes
// off, the function looks for work that was left.
package lazytimer

import "time"

// Timer calls Check later. A lock of the owner guards its methods and fields. Check takes that lock
// itself.
type Timer struct {
	Check   func()        // set it before the first call of a method
	Pending bool          // Check is going to be called
	Pause   time.Duration // before that call, or before the last one

	timer   *time.Timer
	stopped bool
}

// Within has Check called after at most d.
func (t *Timer) Within(d time.Duration) {
	if !t.Pending || t.Pause > d {
		t.After(d)
	}
}

// After has Check called after d, and not when it was due.
func (t *Timer) After(d time.Duration) {
	if t.stopped {
		return
	}
	t.Pending, t.Pause = true, d
	if t.timer == nil {
		t.timer = time.AfterFunc(d, t.Check)
	} else {
		t.timer.Reset(d)
	}
}

// Rest says, in Check, that there is nothing left to check.
func (t *Timer) Rest() { t.Pending = false }

// Stop ends the timer for good. It does not wait: a Check may still be under way.
func (t *Timer) Stop() {
	t.stopped, t.Pending = true, false
	if t.timer != nil {
		t.timer.Stop()
	}
}

// Stopped reports whether Stop was called.
func (t *Timer) Stopped() bool { return t.stopped }
