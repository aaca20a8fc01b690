package gloo

import (
	"context"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/recheck"
	"github.com/c10d-go/c10d/internal/ring"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Who runs a collective? The goroutine that waits for it, if it comes soon: waking another one
// costs microseconds on both sides. Otherwise a worker does.
const (
	// Workers run collectives of more than largeBytes from the start, until promptWaits of them in a
	// row were waited for at once. On two CPUs an all-to-all of 64 KiB took 72 us by way of a worker.
	largeBytes  = 64 << 10
	promptWaits = 2

	// The other collectives are left to their callers for waiterFirst to twice that. While every one is
	// waited for in that time, the pause doubles, up to waiterFirstMax: a timer that goes off wakes
	// threads on all ranks. With one every 100 us a barrier of 8 ranks on 16 CPUs took 26 us instead of
	// 1. After habit calls in a pause it is waiterFirstMax at once. Pauses that double are 7 in the
	// first 12 ms: 56 timers on 8 ranks in 4000 all-reduces of 3 us.
	waiterFirst    = 100 * time.Microsecond
	waiterFirstMax = 10 * time.Millisecond
	habit          = 16
)

// A collective with a root of at most briefBytes in shared memory begins when it first has to wait, and so does a
// message. Other collectives of that size wait nearly always.
const briefBytes = 4 << 10

// promptly is how soon after its call a large collective has to be waited for to count as waited
// for at once.
var promptly = 100 * time.Microsecond

// queue is the collectives in the order of the calls, and what runs them.
type queue struct {
	mu        sync.Mutex             // guards what follows
	queued    sync.Cond              // a worker can go on, or the backend closes
	waiting   ring.Queue[*operation] // not begun
	inflight  ring.Queue[*operation] // not ended: waiting or running
	engines   []*engine              // that run nothing
	workers   sync.WaitGroup
	seq       uint64 // operations issued
	tag       uint32 // of the next collective
	calls     uint64 // collectives issued
	completed uint64 // collectives ended
	broken    bool   // a collective has failed
	intact    uint64 // then: collectives before the first that failed
	agreed    uint64 // collectives up to the last that has shown that all ranks called the same
	everyone  uint64 // collectives that are known to be complete on every rank
	beside    uint64 // collectives up to the last monitored barrier, which is not in the queue
	uncalled  uncalled
	last      lastCall
	unbegun   recheck.Timer // of the collectives that wait
	checked   uint64        // collectives issued at the last check
	streak    int           // large collectives in a row that were waited for at once
	draining  bool          // Shutdown has begun
	closing   bool          // Close has begun
	stopped   bool          // what waits ends without being run
}

// enqueue appends o to the queue. b.mu is held.
func (b *Backend) enqueue(o *operation, bytes int) {
	o.queued = true
	b.waiting.Put(o)
	b.inflight.Put(o)
	o.alone = b.inflight.Len() == 1
	b.waits.collectives.start(o.future)
	if b.waiting.Len() > len(b.engines) && o.ctx.Done() != nil {
		b.p2p.Add(1)
		o.unwatch = context.AfterFunc(o.ctx, func() {
			defer b.p2p.Done()
			b.cancelQueued(o)
		})
	}
	o.brief = bytes <= briefBytes && b.shared != nil && o.hasRoot()
	large := bytes > largeBytes
	if large {
		o.issued, o.streak, b.streak = time.Now(), b.streak, 0
	}
	if large && o.streak < promptWaits || b.waiting.Len() > 1 {
		b.queued.Signal()
		return
	}
	if !b.unbegun.Pending {
		b.unbegun.After(max(b.unbegun.Pause, waiterFirst))
	}
}

// checkUnbegun wakes a worker if the oldest collective was in the queue at the last check too.
func (b *Backend) checkUnbegun() {
	b.mu.Lock()
	defer b.mu.Unlock()
	pause := b.unbegun.Pause
	idle := b.waiting.Len() == 0 && b.calls == b.checked
	if b.waiting.Len() > 0 && b.waiting.At(0).call < b.checked {
		b.queued.Signal()
		pause = waiterFirst
	} else if !idle {
		pause = nextPause(pause, b.calls-b.checked-uint64(b.waiting.Len()))
	}
	b.checked = b.calls
	if idle {
		b.unbegun.Rest()
	} else {
		b.unbegun.After(pause)
	}
}

// nextPause returns the pause after one in which so many collectives began and none waited long.
func nextPause(pause time.Duration, began uint64) time.Duration {
	if began >= habit {
		return waiterFirstMax
	}
	return min(2*pause, waiterFirstMax)
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
		for b.waiting.Len() > 0 && len(b.engines) > 0 {
			b.next()
		}
		if b.closing && b.waiting.Len() == 0 {
			left = true
			return
		}
		b.queued.Wait()
	}
}

// Help runs the operation, and those queued before it, in the calling goroutine, which waits for
// it.
func (f *future) Help(ctx context.Context) {
	b := f.backend
	b.mu.Lock()
	defer b.mu.Unlock()
	o := f.op
	if o == nil {
		return
	}
	if !o.issued.IsZero() && time.Since(o.issued) < promptly {
		b.streak = o.streak + 1
	}
	for f.op != nil && o.queued && len(b.engines) > 0 {
		// Contexts are the same if they end together.
		if d := ctx.Done(); d != nil && d != b.waiting.At(0).ctx.Done() {
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
	o := b.waiting.Take()
	o.queued = false
	e := b.engines[len(b.engines)-1]
	b.engines = b.engines[:len(b.engines)-1]
	refused := b.stopped
	b.mu.Unlock()

	if o.unwatch != nil && o.unwatch() {
		b.p2p.Done()
	}
	if !o.brief {
		o.Start()
	}
	e.begin(o)
	var err error
	returned := false
	defer func() {
		panicked := false
		if !returned {
			err, panicked = b.panicked(e, recover()), true
		}
		e.end()
		err = b.setResult(o, err)
		b.mu.Lock()
		b.stopped = b.stopped || panicked
		b.engines = append(b.engines, e)
		if b.waiting.Len() > 0 {
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
	b.fail(e.mesh, &e.op.called, p, b.rank)
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
		b.giveUp(b.dueOf(b.meshFor(o.tag), &o.called, anyRank, time.Now()))
	}
}

func (b *Backend) finish(o *operation, err error) {
	err = b.setResult(o, err)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended(o, err)
}

// setResult sets the result of an operation that ran.
func (b *Backend) setResult(o *operation, err error) error {
	if err == nil {
		err = cleanBools(o.result)
		o.SetResult(o.result...)
	}
	if err != nil && b.fault() == nil {
		// It failed on this rank alone: the others wait for its messages.
		b.fail(b.meshFor(o.tag), &o.called, err, b.rank)
	}
	if err != nil {
		b.tellFirst()
	}
	return err
}

// ended completes an operation. b.mu is held: what a barrier finds in flight no
// more has ended.
func (b *Backend) ended(o *operation, err error) {
	for i := range b.inflight.Len() { // nearly always the first one
		if b.inflight.At(i) == o {
			b.inflight.Remove(i)
			break
		}
	}
	b.completed++
	if err != nil && o.collective && (!b.broken || o.call < b.intact) {
		b.broken, b.intact = true, o.call
	}
	if err == nil && o.needsAll {
		b.agreed = max(b.agreed, o.call+1)
		if o.afterAll || b.inTurn() && b.everyone >= b.beside {
			b.everyone = max(b.everyone, o.call)
		}
	}
	b.progress()
	o.run = nil
	o.op = nil
	o.Complete(err)
	b.recycle(o)
}

// Completed returns how many collectives this rank has completed before the first one that has
// failed or has not ended.
func (b *Backend) Completed() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.completedHere()
}

// completedHere is Completed. b.mu is held.
func (b *Backend) completedHere() uint64 {
	n := b.calls
	if b.broken {
		n = min(n, b.intact)
	}
	for o := range b.inflight.All() {
		if o.collective {
			n = min(n, o.call)
		}
	}
	return n
}

// inTurn reports whether all ranks run one collective of the queue at a time.
func (s *session) inTurn() bool { return s.shared != nil || s.clusters != nil }

// CompletedEverywhere returns how many of the first collectives this rank knows to be complete on
// every rank. More may be. A collective that needs data from all ranks shows that all have begun it.
// Those before it have then ended, if it is a barrier, or if collectives run one at a time.
func (b *Backend) CompletedEverywhere() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.size == 1 {
		return b.completedHere()
	}
	return b.everyone
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
