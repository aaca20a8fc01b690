package gloo

import (
	"context"
	"slices"
	"time"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
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
	if !b.silence.collectives.armed {
		b.silence.collectives.arm(o.future)
	}
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
	left := false
	defer func() {
		if !left { // runtime.Goexit in an operation: others may be queued
			b.workers.Go(b.work)
		}
	}()
	for {
		for len(b.queue) > 0 && len(b.engines) > 0 {
			b.next()
		}
		if b.closing && len(b.queue) == 0 {
			left = true
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
//
// It takes the lock again whatever the operation does: a function of the program, such as a
// custom operator, may panic, or end the goroutine by runtime.Goexit.
func (b *Backend) next() {
	o := b.queue[0]
	copy(b.queue, b.queue[1:])
	b.queue[len(b.queue)-1] = nil
	b.queue = b.queue[:len(b.queue)-1]
	o.queued = false
	e := b.engines[len(b.engines)-1]
	b.engines = b.engines[:len(b.engines)-1]
	refused := b.stopped
	b.mu.Unlock()

	if o.unwatch != nil && o.unwatch() {
		b.p2p.Done()
	}
	o.Start()
	e.begin(o)
	var err error
	returned := false
	defer func() {
		panicked := false
		if !returned {
			err, panicked = b.panicked(e, recover()), true
		}
		e.end()
		err = b.settle(o, err)
		b.mu.Lock()
		b.stopped = b.stopped || panicked
		b.engines = append(b.engines, e)
		if len(b.queue) > 0 {
			b.queued.Signal()
		} else if b.closing {
			b.queued.Broadcast()
		}
		b.ended(o, err)
	}()
	if refused {
		err = b.stopError(o.Info())
	} else {
		err = o.run(e)
	}
	returned = true
}

// panicked ends the group because a function that e's operation called has not returned: it
// panicked with value, or ended its goroutine.
func (b *Backend) panicked(e *engine, value any) error {
	p := work.Recovered(value)
	b.fail(e.mesh, e.op, p, b.rank)
	if g := b.memory(); g != nil {
		g.Abort(p) // or an operation that begins before the mesh's end gets there would disturb the others
	}
	e.drain()
	return b.tell(&work.Error{Info: e.op.Info(), Peer: b.rank, Err: p})
}

// stopError is what an operation ends with that was queued when the backend stopped.
func (b *Backend) stopError(info work.Info) error {
	if f := b.fault(); f != nil {
		return b.faultError(info, f)
	}
	return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
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
	if err == nil && o.meets {
		b.met = max(b.met, o.call+1)
	}
	b.progress()
	o.run = nil
	o.op = nil
	o.Complete(err)
	b.recycle(o)
}

// cleanBools makes every true byte 1: PyTorch adds bools as bytes, and in Go
// any other value is no bool.
func cleanBools(ts []*tensor.Tensor) error {
	for _, t := range ts {
		if t.DType() != tensor.Bool || t.Layout() != tensor.Strided {
			continue
		}
		c, err := t.Contiguous()
		if err != nil {
			return err
		}
		buf, dirty := c.Bytes(), false
		for i, v := range buf {
			if v > 1 {
				buf[i], dirty = 1, true
			}
		}
		if dirty && c != t {
			if err := t.Unpack(buf); err != nil {
				return err
			}
		}
	}
	return nil
}
