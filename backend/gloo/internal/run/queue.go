package run

import (
	"context"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/lazytimer"
	"github.com/c10d-go/c10d/internal/ring"
	"github.com/c10d-go/c10d/work"
)

// Who runs a collective? The goroutine that waits for it, if it comes soon: waking another one
// costs microseconds on both sides. Otherwise a worker does.
const (
	// Workers run collectives of more than largeBytes from the start, until promptWaits of them in a
	// row were waited for at once. On two CPUs an all-to-all of 64 KiB took 72 us by way of a worker.
	// Without workers from the start, a program that computes for 7.4 ms beside one all_reduce of
	// 16 MiB took 11.7 ms, because the waiter began it.
	largeBytes  = 64 << 10
	promptWaits = 2

	// The other collectives are left to their callers for waiterFirst to twice that. While every one is
	// waited for in that time, the pause doubles, up to waiterFirstMax: a timer that goes off wakes
	// threads on all ranks. With one every 100 us a barrier of 8 ranks on 16 CPUs took 26 us instead of 1.
	waiterFirst    = 100 * time.Microsecond
	waiterFirstMax = 10 * time.Millisecond
)

// promptly is how soon after its call a large collective has to be waited for to count as waited
// for at once.
var promptly = 100 * time.Microsecond

// queue is the collectives in the order of the calls, and what runs them.
type queue struct {
	*session
	route   route
	issuer  work.Issuer
	timeout atomic.Int64
	p2p     sync.WaitGroup // sends, receives, and what else runs beside the queue
	spares

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
	oldest    oldestWatch     // of the collectives under way
	unbegun   lazytimer.Timer // of the collectives that wait
	checked   uint64          // collectives issued at the last check
	streak    int             // large collectives in a row that were waited for at once
	draining  bool            // Shutdown has begun
	closing   bool            // Close has begun
	stopped   bool            // what waits ends without being run
}

// uncalled is an operation that was not started because its context had ended. Other ranks may wait
// for this rank in it.
type uncalled struct {
	op    work.OpType
	seq   uint64
	cause error // nil if there is none
}

// lastCall is the last collective that this rank has called.
type lastCall struct {
	op      work.OpType
	seq     uint64
	what    [2]uint64 // see transport.Call
	history uint64
}

// enqueue appends o to the queue. q.mu is held.
func (q *queue) enqueue(o *operation, bytes int) {
	o.queued = true
	q.waiting.Put(o)
	q.inflight.Put(o)
	o.alone = q.inflight.Len() == 1
	q.oldest.start(o.Work())
	if q.waiting.Len() > len(q.engines) && o.ctx.Done() != nil {
		q.p2p.Add(1)
		o.unwatch = context.AfterFunc(o.ctx, func() {
			defer q.p2p.Done()
			q.cancelQueued(o)
		})
	}
	large := bytes > largeBytes
	if large {
		o.issued, o.streak, q.streak = time.Now(), q.streak, 0
	}
	if large && o.streak < promptWaits || q.waiting.Len() > 1 {
		q.queued.Signal()
		return
	}
	if !q.unbegun.Pending {
		q.unbegun.After(max(q.unbegun.Pause, waiterFirst))
	}
}

// checkUnbegun wakes a worker if the oldest collective was in the queue at the last check too.
func (q *queue) checkUnbegun() {
	q.mu.Lock()
	defer q.mu.Unlock()
	pause := q.unbegun.Pause
	idle := q.waiting.Len() == 0 && q.calls == q.checked
	if q.waiting.Len() > 0 && q.waiting.At(0).call < q.checked {
		q.queued.Signal()
		pause = waiterFirst
	} else if !idle {
		pause = min(2*pause, waiterFirstMax)
	}
	q.checked = q.calls
	if idle {
		q.unbegun.Rest()
	} else {
		q.unbegun.After(pause)
	}
}

// work runs queued collectives until the backend closes.
func (q *queue) work() {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := false
	defer func() {
		if !left { // runtime.Goexit in an operation: others may be queued
			q.workers.Go(q.work)
		}
	}()
	for {
		for q.waiting.Len() > 0 && len(q.engines) > 0 {
			q.next()
		}
		if q.closing && q.waiting.Len() == 0 {
			left = true
			return
		}
		q.queued.Wait()
	}
}

// Help runs the operation, and those queued before it, in the calling goroutine, which waits for
// it.
func (f *future) Help(ctx context.Context) {
	q := f.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	o := f.op
	if o == nil {
		return
	}
	if !o.issued.IsZero() && time.Since(o.issued) < promptly {
		q.streak = o.streak + 1
	}
	for f.op != nil && o.queued && len(q.engines) > 0 {
		// Contexts are the same if they end together.
		if d := ctx.Done(); d != nil && d != q.waiting.At(0).ctx.Done() {
			q.queued.Signal()
			return
		}
		q.next()
	}
}

// Abort ends the group because of this operation.
func (f *future) Abort(cause error) {
	info := f.Info()
	f.queue.abort(cause, &info)
}

// EndsWith reports whether the operation ends with ctx.
func (f *future) EndsWith(ctx context.Context) bool {
	f.queue.mu.Lock()
	defer f.queue.mu.Unlock()
	return f.op != nil && f.op.ctx.Done() == ctx.Done()
}

// next runs the oldest collective in the queue on an engine that is free. q.mu
// is held, but not while it runs.
//
// It takes the lock again whatever the operation does: a function of the program, such as a
// custom operator, may panic, or end the goroutine by runtime.Goexit.
func (q *queue) next() {
	o := q.waiting.Take()
	o.queued = false
	e := q.engines[len(q.engines)-1]
	q.engines = q.engines[:len(q.engines)-1]
	refused := q.stopped
	q.mu.Unlock()

	if o.unwatch != nil && o.unwatch() {
		q.p2p.Done()
	}
	o.Start()
	e.begin(o)
	var err error
	returned := false
	defer func() {
		panicked := false
		if !returned {
			err, panicked = q.panicked(e, recover()), true
		}
		e.end()
		err = q.setResult(o, err)
		q.mu.Lock()
		q.stopped = q.stopped || panicked
		q.engines = append(q.engines, e)
		if q.waiting.Len() > 0 {
			q.queued.Signal()
		} else if q.closing {
			q.queued.Broadcast()
		}
		q.ended(o, err)
	}()
	if refused {
		err = q.stopError(o.Info())
	} else {
		err = o.run(e)
	}
	returned = true
}

// panicked ends the group because a function that e's operation called has not returned: it
// panicked with value, or ended its goroutine.
func (q *queue) panicked(e *engine, value any) error {
	p := work.Recovered(value)
	q.fail(e.mesh, e.op.Info(), p, q.rank)
	if g := q.Memory; g != nil {
		g.Abort(p) // or an operation that begins before the mesh's end gets there would disturb the others
	}
	e.drain()
	return q.tell(&work.Error{Info: e.op.Info(), Peer: q.rank, Err: p})
}

// stopError is what an operation ends with that was queued when the backend stopped.
func (q *queue) stopError(info work.Info) error {
	if f := q.fault(); f != nil {
		return q.faultError(info, f)
	}
	return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
}

// cancelQueued ends the group because the context of o ended before anybody
// had come to o.
func (q *queue) cancelQueued(o *operation) {
	q.mu.Lock()
	queued := o.queued
	q.mu.Unlock()
	if queued {
		q.giveUp(q.dueOf(q.meshFor(o.tag), &o.called, anyRank, time.Now()))
	}
}

func (q *queue) finish(o *operation, err error) {
	err = q.setResult(o, err)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended(o, err)
}

// setResult sets the result of an operation that ran.
func (q *queue) setResult(o *operation, err error) error {
	if err == nil {
		err = cleanBools(o.result)
		o.SetResult(o.result...)
	}
	if err != nil && q.fault() == nil {
		// It failed on this rank alone: the others wait for its messages.
		q.fail(q.meshFor(o.tag), o.Info(), err, q.rank)
	}
	if err != nil {
		q.tellFirst()
	}
	return err
}

// ended completes an operation. q.mu is held: what a barrier finds in flight no
// more has ended.
func (q *queue) ended(o *operation, err error) {
	for i := range q.inflight.Len() { // nearly always the first one
		if q.inflight.At(i) == o {
			q.inflight.Remove(i)
			break
		}
	}
	q.completed++
	if err != nil && o.collective && (!q.broken || o.call < q.intact) {
		q.broken, q.intact = true, o.call
	}
	if err == nil && o.needsAll {
		q.agreed = max(q.agreed, o.call+1)
		if o.afterAll || q.inTurn() && q.everyone >= q.beside {
			q.everyone = max(q.everyone, o.call)
		}
	}
	q.progress()
	o.run = nil
	o.future.op = nil
	o.Complete(err)
	q.recycle(o)
}

// progress tells the peers, should they ask, how far this rank is. q.mu is held.
func (q *queue) progress() {
	for _, m := range q.Meshes {
		m.SetProgress(q.calls, q.completed)
	}
}

// Completed returns how many collectives this rank has completed before the first one that has
// failed or has not ended.
func (q *queue) Completed() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.completedHere()
}

// completedHere is Completed. q.mu is held.
func (q *queue) completedHere() uint64 {
	n := q.calls
	if q.broken {
		n = min(n, q.intact)
	}
	for o := range q.inflight.All() {
		if o.collective {
			n = min(n, o.call)
		}
	}
	return n
}

// CompletedEverywhere returns how many of the first collectives this rank knows to be complete on
// every rank. More may be. A collective that needs data from all ranks shows that all have begun it.
// Those before it have then ended, if it is a barrier, or if collectives run one at a time.
func (q *queue) CompletedEverywhere() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.size == 1 {
		return q.completedHere()
	}
	return q.everyone
}

// before returns the collectives that were issued before o and have not ended.
func (q *queue) before(o *operation) []*work.Work {
	q.mu.Lock()
	defer q.mu.Unlock()
	var earlier []*operation
	for x := range q.inflight.All() {
		if x.call < o.call {
			earlier = append(earlier, x)
		}
	}
	return works(slices.Values(earlier))
}

// works returns the futures of operations.
func works(all iter.Seq[*operation]) []*work.Work {
	var ws []*work.Work
	for o := range all {
		ws = append(ws, o.Work())
	}
	return ws
}
