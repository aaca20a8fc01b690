package gloo

import (
	"context"
	"slices"
	"time"
)

const (
	// handOver is how many bytes make a collective worth a goroutine of its own
	// from the start: waking one costs microseconds on both sides. Smaller ones
	// are left for a while to whoever waits for them, and so are all once habit
	// of the larger ones in a row were waited for as soon as they were called: on
	// two CPUs an all-to-all of 64 KiB took 72 us by way of a worker.
	handOver = 64 << 10
	habit    = 2

	// leaveFor is for how long: at least once and at most twice that, which is
	// what a small collective loses that nobody waits for at once. While somebody
	// always does, it grows to leaveForMax, since a timer that goes off wakes
	// threads, on all ranks: every 100 us, they took a barrier of 8 ranks on 16 CPUs
	// from 1 to 26 us.
	leaveFor    = 100 * time.Microsecond
	leaveForMax = 10 * time.Millisecond
)

// atOnce is how soon after its call a large collective is waited for by those who wait at once.
var atOnce = 100 * time.Microsecond

// alarm rings for collectives that nobody has begun. It goes on by itself
// while there are any, because setting a timer for each costs more than some of them.
type alarm struct {
	timer *time.Timer
	armed bool
	wait  time.Duration
	seen  uint64 // collectives issued when it rang last
}

// stop silences the alarm; the backend's lock is held.
func (a *alarm) stop() {
	if a.timer != nil {
		a.timer.Stop()
	}
}

// enqueue appends o to the queue. b.mu is held.
func (b *Backend) enqueue(o *operation, bytes int) {
	o.queued = true
	b.queue = append(b.queue, o)
	b.inflight = append(b.inflight, o)
	if len(b.queue) > len(b.engines) && o.ctx.Done() != nil {
		b.p2p.Add(1)
		o.unwatch = context.AfterFunc(o.ctx, func() {
			defer b.p2p.Done()
			b.cancelQueued(o)
		})
	}
	large := bytes > handOver
	if large {
		o.issued, o.streak, b.streak = time.Now(), b.streak, 0
	}
	if large && o.streak < habit || len(b.queue) > 1 {
		b.queued.Signal()
		return
	}
	switch {
	case b.alarm.timer == nil:
		b.alarm.wait = leaveFor
		b.alarm.timer = time.AfterFunc(leaveFor, b.ring)
	case !b.alarm.armed:
		b.alarm.timer.Reset(b.alarm.wait)
	}
	b.alarm.armed = true
}

// ring wakes a worker if the oldest collective has been there since the last time.
func (b *Backend) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := &b.alarm
	idle := len(b.queue) == 0 && b.calls == a.seen
	if len(b.queue) > 0 && b.queue[0].call < a.seen {
		b.queued.Signal()
		a.wait = leaveFor
	} else if !idle {
		a.wait = min(2*a.wait, leaveForMax)
	}
	a.seen = b.calls
	a.armed = !idle && !b.closing
	if a.armed {
		a.timer.Reset(a.wait)
	}
}

// work runs queued collectives until the backend closes.
func (b *Backend) work() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		for len(b.queue) > 0 && len(b.engines) > 0 {
			b.next()
		}
		if b.closing && len(b.queue) == 0 {
			return
		}
		b.queued.Wait()
	}
}

// Help runs the operation, and what is queued before it, in the goroutine that waits for it.
func (f *future) Help(ctx context.Context) {
	b := f.backend
	b.mu.Lock()
	defer b.mu.Unlock()
	o := f.op
	if o == nil {
		return
	}
	if !o.issued.IsZero() && time.Since(o.issued) < atOnce {
		b.streak = o.streak + 1
	}
	for f.op != nil && o.queued && len(b.engines) > 0 {
		// Contexts are the same if they end together.
		if d := ctx.Done(); d != nil && d != b.queue[0].ctx.Done() {
			b.queued.Signal()
			return
		}
		b.next()
	}
}

// next runs the oldest collective in the queue on an engine that is free. b.mu
// is held, but not while it runs.
func (b *Backend) next() {
	o := b.queue[0]
	copy(b.queue, b.queue[1:])
	b.queue[len(b.queue)-1] = nil
	b.queue = b.queue[:len(b.queue)-1]
	o.queued = false
	e := b.engines[len(b.engines)-1]
	b.engines = b.engines[:len(b.engines)-1]
	b.mu.Unlock()

	if o.unwatch != nil && o.unwatch() {
		b.p2p.Done()
	}
	o.Start()
	e.begin(o)
	err := o.run(e)
	e.end()
	err = b.settle(o, err)

	b.mu.Lock()
	b.engines = append(b.engines, e)
	if len(b.queue) > 0 {
		b.queued.Signal()
	} else if b.closing {
		b.queued.Broadcast()
	}
	b.ended(o, err)
}

// cancelQueued ends the group because the context of o ended before anybody
// had come to o.
func (b *Backend) cancelQueued(o *operation) {
	b.mu.Lock()
	queued := o.queued
	b.mu.Unlock()
	if queued {
		b.giveUp(b.meshFor(o.tag), o, -1, canceled(o.ctx))
	}
}

func (b *Backend) finish(o *operation, err error) {
	err = b.settle(o, err)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended(o, err)
}

// settle sets the result of an operation that ran.
func (b *Backend) settle(o *operation, err error) error {
	if err == nil {
		err = cleanBools(o.result)
		o.SetResult(o.result...)
	}
	if err != nil && b.fault() == nil {
		// It failed on this rank alone: the others wait for its messages.
		b.fail(b.meshFor(o.tag), o, err, b.rank)
	}
	return err
}

// ended completes an operation. b.mu is held: what a barrier finds in flight no
// more has ended.
func (b *Backend) ended(o *operation, err error) {
	if i := slices.Index(b.inflight, o); i >= 0 {
		b.inflight = slices.Delete(b.inflight, i, i+1)
	}
	b.completed++
	b.progress()
	o.run = nil
	o.op = nil
	o.Complete(err)
	b.recycle(o)
}
