package gloo

import "time"

// recheck calls a function later, and again for as long as the function asks for it. One timer
// serves all operations of a kind: setting one for each would cost more than a small operation. A
// lock of the owner guards the methods; check takes that lock itself.
type recheck struct {
	check   func()
	timer   *time.Timer
	pending bool          // check is going to be called
	pause   time.Duration // before that call
	stopped bool
}

// within has check called after at most d.
func (r *recheck) within(d time.Duration) {
	if !r.pending || r.pause > d {
		r.after(d)
	}
}

// after has check called after d instead of when it was due.
func (r *recheck) after(d time.Duration) {
	if r.stopped {
		return
	}
	r.pending, r.pause = true, d
	if r.timer == nil {
		r.timer = time.AfterFunc(d, r.check)
	} else {
		r.timer.Reset(d)
	}
}

// rest says, in check, that there is nothing left to check.
func (r *recheck) rest() { r.pending = false }

// stop ends it for good. A call of check that has begun goes on.
func (r *recheck) stop() {
	r.stopped, r.pending = true, false
	if r.timer != nil {
		r.timer.Stop()
	}
}
