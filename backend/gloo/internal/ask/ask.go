// Package ask asks the other ranks why operations run out of time. Package blame judges the answers.
package ask

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// Operation is an operation whose time is nearly over.
type Operation struct {
	blame.Call                // but Peer, see WaitsFor
	Mesh       transport.Mesh // that the operation uses
	Work       *work.Work
	Ctx        context.Context
	Timeout    time.Duration
	Blame      func(o *Operation, v blame.Verdict) // is called when its time is over

	peer atomic.Int64
}

// WaitsFor says for which rank the operation waits now, less than 0 if that is unknown. It is called before Add, and may
// be called again.
func (o *Operation) WaitsFor(rank int) { o.peer.Store(int64(rank)) }

// call is what an inquiry has to know of the operation.
func (o *Operation) call() blame.Call {
	c := o.Call
	c.Peer = max(-1, int(o.peer.Load()))
	return c
}

// isOver reports whether the time of the operation is over.
func (o *Operation) isOver(now time.Time) bool { return !now.Before(o.Until) || o.Ctx.Err() != nil }

// timerWithin is how long Cause waits for a context whose deadline has come. Its timer may fire after this package's.
const timerWithin = 10 * time.Millisecond

// Cause says why the operation ends.
func (o *Operation) Cause() error {
	if by, ok := o.Ctx.Deadline(); ok && by.Equal(o.Until) {
		t := time.NewTimer(timerWithin)
		defer t.Stop()
		select {
		case <-o.Ctx.Done(): // with the cause that the program gave it
		case <-t.C:
			return fmt.Errorf("%w: %w", work.ErrTimeout, context.DeadlineExceeded)
		}
	}
	if o.Ctx.Err() != nil {
		return blame.Canceled(o.Ctx)
	}
	return fmt.Errorf("%w after %v", work.ErrTimeout, o.Timeout)
}

// Inquiry asks the other ranks why operations run out of time: how far they are, and for whom they
// wait. It begins before that time is over, so that an operation ends soon after it, with the rank or the
// link to blame. It forgets operations that end in time. One inquiry asks for all operations of a mesh: with
// the questions of many, answers would be late.
type Inquiry struct {
	log    *slog.Logger
	hosts  []int // by rank, see blame.New
	checks bool  // see backend.Options.Checks

	mesh   transport.Mesh
	mu     sync.Mutex
	due    map[*work.Work]*Operation
	first  time.Time     // when the time of the first of them ends
	sooner chan struct{} // takes one value: that time has changed
	closed bool
	runs   bool
	wg     sync.WaitGroup
}

// New returns an Inquiry of one mesh. Hosts are as in blame.New, and checks as in backend.Options.
func New(log *slog.Logger, hosts []int, checks bool) *Inquiry {
	return &Inquiry{log: log, hosts: hosts, checks: checks, due: make(map[*work.Work]*Operation), sooner: make(chan struct{}, 1)}
}

// Add makes the inquiry ask the ranks of m for o, until o has ended.
func (q *Inquiry) Add(m transport.Mesh, o *Operation) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || q.due[o.Work] != nil {
		return
	}
	if o.Latest.IsZero() {
		o.Latest = o.Until.Add(blame.Grace(o.Until.Sub(o.Since), o.Turn))
	}
	sooner := o.Until.Before(q.first)
	q.due[o.Work] = o
	switch {
	case !q.runs:
		q.mesh, q.runs = m, true
		q.wg.Go(q.run)
	case sooner:
		q.wake()
	}
}

// wake ends a pause.
func (q *Inquiry) wake() {
	select {
	case q.sooner <- struct{}{}:
	default:
	}
}

// Close returns when nothing is asked any more. The mesh has been closed.
func (q *Inquiry) Close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wake()
	q.wg.Wait()
}

// open returns the operations that have not ended. Those whose time ends first come first. If there are
// none, or if the mesh has failed, the inquiry ends.
func (q *Inquiry) open() (all []*Operation) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for w, d := range q.due {
		if w.IsCompleted() {
			delete(q.due, w)
		} else {
			all = append(all, d)
		}
	}
	if len(all) == 0 || q.closed || q.mesh.Fault() != nil {
		clear(q.due)
		q.runs = false
		return nil
	}
	slices.SortFunc(all, func(a, b *Operation) int { return a.Until.Compare(b.Until) })
	q.first = all[0].Until
	return all
}

// run asks the other ranks until no operation is open.
func (q *Inquiry) run() {
	begun := time.Now()
	i := blame.New(q.mesh.Rank(), q.hosts, q.checks, begun)
	stop := cputime.Watch()
	for all := q.open(); len(all) > 0; all = q.open() {
		first := all[0].call()
		now := time.Now()
		var health []transport.Health
		if limit, about := i.Ask(now, first); limit > 0 {
			health = q.mesh.Diagnose(limit, about...)
		} else {
			q.pause(first.Latest.Sub(now))
		}
		i.Hear(health, stop())
		stop = cputime.Watch()
		now = time.Now()
		for _, d := range all {
			if !d.isOver(now) || d.Work.IsCompleted() {
				continue
			}
			if v, ok := i.Judge(now, d.call()); ok {
				if q.log.Enabled(context.Background(), slog.LevelDebug) {
					q.log.Debug("asked the other ranks why an operation timed out",
						"op", d.Op.String(), "seq", d.Seq, "blames", v.Why, "answers", i.String())
				}
				d.Blame(d, v)
				break
			}
		}
		q.pause(time.Until(i.Next(now, first)))
	}
	stop()
}

// Wait returns when no operation is open.
func (q *Inquiry) Wait() { q.wg.Wait() }

// pause waits for d, for a new operation, or until the mesh fails.
func (q *Inquiry) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-q.mesh.Failed():
	case <-q.sooner:
	case <-t.C:
	}
}
