package gloo

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/lag"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// due is an operation whose time is nearly over.
type due struct {
	wait
	waitsFor atomic.Int64 // a rank, or less than 0 if that is unknown
	mesh     transport.Mesh
	work     *work.Work
	ctx      context.Context
	timeout  time.Duration
	blame    func(d *due, v blame.Verdict)
}

// call is what an inquiry has to know of the operation.
func (d *due) call() blame.Call {
	c := d.Call
	c.Peer = max(anyRank, int(d.waitsFor.Load()))
	return c
}

// isOver reports whether the time of the operation is over.
func (d *due) isOver(now time.Time) bool { return !now.Before(d.Until) || d.ctx.Err() != nil }

// timerWithin is how long cause waits for a context whose deadline has come. Its timer may fire after this package's.
const timerWithin = 10 * time.Millisecond

// cause says why the operation ends.
func (d *due) cause() error {
	if by, ok := d.ctx.Deadline(); ok && by.Equal(d.Until) {
		t := time.NewTimer(timerWithin)
		defer t.Stop()
		select {
		case <-d.ctx.Done(): // with the cause that the program gave it
		case <-t.C:
			return fmt.Errorf("%w: %w", work.ErrTimeout, context.DeadlineExceeded)
		}
	}
	if d.ctx.Err() != nil {
		return canceled(d.ctx)
	}
	return fmt.Errorf("%w after %v", work.ErrTimeout, d.timeout)
}

// inquiry asks the other ranks why operations run out of time: how far they are, and for whom they
// wait. It begins before that time is over, so that an operation ends soon after it, with the rank or the
// link to blame. It forgets operations that end in time. One inquiry asks for all operations of a mesh: with
// the questions of many, answers would be late.
type inquiry struct {
	log    *slog.Logger
	hosts  *plan.Layout
	checks bool // see backend.Options.Checks
	lag    func() (stop func() time.Duration)

	mesh   transport.Mesh
	mu     sync.Mutex
	due    map[*work.Work]*due // operations by their futures
	first  time.Time           // when the time of the first of them ends
	sooner chan struct{}       // takes one value: that time has changed
	closed bool
	runs   bool
	wg     sync.WaitGroup
}

func newInquiry(log *slog.Logger, hosts *plan.Layout, checks bool) *inquiry {
	return &inquiry{log: log, hosts: hosts, checks: checks, lag: lag.Watch, due: make(map[*work.Work]*due), sooner: make(chan struct{}, 1)}
}

// add makes the inquiry ask the ranks of m for d.
func (q *inquiry) add(m transport.Mesh, d *due) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed || q.due[d.work] != nil {
		return
	}
	if d.Latest.IsZero() {
		d.Latest = d.Until.Add(blame.Grace(d.Until.Sub(d.since), d.Turn))
	}
	sooner := d.Until.Before(q.first)
	q.due[d.work] = d
	switch {
	case !q.runs:
		q.mesh, q.runs = m, true
		q.wg.Go(q.run)
	case sooner:
		q.wake()
	}
}

// wake ends a pause.
func (q *inquiry) wake() {
	select {
	case q.sooner <- struct{}{}:
	default:
	}
}

// close returns when nothing is asked any more. The mesh has been closed.
func (q *inquiry) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wake()
	q.wg.Wait()
}

// open returns the operations that have not ended. Those whose time ends first come first. If there are
// none, or if the mesh has failed, the inquiry ends.
func (q *inquiry) open() (all []*due) {
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
	slices.SortFunc(all, func(a, b *due) int { return a.Until.Compare(b.Until) })
	q.first = all[0].Until
	return all
}

// run asks the other ranks until no operation is open.
func (q *inquiry) run() {
	begun := time.Now()
	i := blame.New(q.mesh.Rank(), q.hosts, q.checks, begun)
	stop := q.lag()
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
		stop = q.lag()
		now = time.Now()
		for _, d := range all {
			if !d.isOver(now) || d.work.IsCompleted() {
				continue
			}
			if v, ok := i.Judge(now, d.call()); ok {
				if q.log.Enabled(context.Background(), slog.LevelDebug) {
					q.log.Debug("asked the other ranks why an operation timed out",
						"op", d.Op.String(), "seq", d.seq, "blames", v.Why, "answers", i.String())
				}
				d.blame(d, v)
				break
			}
		}
		q.pause(time.Until(i.Next(now, first)))
	}
	stop()
}

// pause waits for d, for a new operation, or until the mesh fails.
func (q *inquiry) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-q.mesh.Failed():
	case <-q.sooner:
	case <-t.C:
	}
}
