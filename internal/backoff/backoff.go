// Package backoff calls a function some time after it is asked to, and again while the function
// asks for it, at intervals that may double.
//
// It is for work that another goroutine usually does soon. Setting a timer for each piece of
// work would cost more than most of them, so one timer serves all: it goes off now and then
// while there is work, and looks for work that was left.
package backoff

import (
	"sync/atomic"
	"time"
)

// Timer calls a function after an interval. New makes one. Its methods may be called from many
// goroutines, and from the function.
type Timer struct {
	first, longest time.Duration
	check          func() (again bool)
	timer          *time.Timer
	interval       atomic.Int64
	set            atomic.Bool
	stopped        atomic.Bool
}

// New returns a Timer that is not set. The interval begins with first and never exceeds
// longest. Check runs in a goroutine of its own and returns whether to set the timer again.
func New(first, longest time.Duration, check func() (again bool)) *Timer {
	t := &Timer{first: first, longest: longest, check: check}
	t.Shrink()
	t.timer = time.AfterFunc(time.Hour, t.run)
	t.timer.Stop()
	return t
}

// Start sets the timer, unless it is set or stopped. It costs an atomic load then.
func (t *Timer) Start() {
	if t.set.Load() || t.set.Swap(true) || t.stopped.Load() {
		return
	}
	t.timer.Reset(time.Duration(t.interval.Load()))
}

// Grow doubles the interval.
func (t *Timer) Grow() {
	t.interval.Store(min(2*t.interval.Load(), int64(t.longest)))
}

// Shrink makes the interval the first one again.
func (t *Timer) Shrink() { t.interval.Store(int64(t.first)) }

// Stop ends the timer for good. It does not wait: a check may still be under way.
func (t *Timer) Stop() {
	t.stopped.Store(true)
	t.timer.Stop()
}

// run counts the timer as not set while check runs, so that a Start meanwhile is not lost.
func (t *Timer) run() {
	t.set.Store(false)
	if t.check() {
		t.Start()
	}
}
