package gloo

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/lag"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

const (
	// diagnoseFor is how long a rank waits for the others' answers before it says that a rank does
	// not answer. A rank whose operation runs out of time asks leastRounds times, mostly twice in that
	// time, before it blames a rank or a link.
	diagnoseFor = 350 * time.Millisecond
	leastRounds = 6

	// A rank begins to ask leadMost before an operation's time is over, or after half of that time.
	leadMost = idleRounds * diagnoseFor / 2

	// It blames somebody at the latest a part of the grace after that time. The grace is 0.3 s, or a tenth
	// of the time. The part is larger if others know more and come first, see due.turn.
	graceLeast   = 300 * time.Millisecond
	graceMost    = 3 * time.Second
	graceIsOneOf = 10
	partOfGrace  = 60 // per cent, and for each turn:
	partOfTurn   = 15

	// With less time, questions come leastPace apart, and an answer may take leastAnswer.
	leastPace   = 20 * time.Millisecond
	leastAnswer = 120 * time.Millisecond
)

// due is an operation whose time is nearly over.
type due struct {
	wait
	waitsFor atomic.Int64 // a rank, or less than 0 if that is unknown
	mesh     transport.Mesh
	work     *work.Work
	ctx      context.Context
	timeout  time.Duration
	turn     int       // if it is not 0, others know more: this rank blames nobody before latest
	latest   time.Time // when it ends at the latest; add sets it
	blame    func(d *due, v verdict)
}

// lead returns how long before its end an operation with a limit asks the other ranks.
func lead(limit time.Duration) time.Duration { return max(0, min(limit/2, leadMost)) }

// grace returns how long after its end an operation with a limit may still be open.
func grace(limit time.Duration, turn int) time.Duration {
	return min(max(graceLeast, limit/graceIsOneOf), graceMost) * time.Duration(partOfGrace+partOfTurn*turn) / 100
}

// isOver reports whether the time of the operation is over.
func (d *due) isOver(now time.Time) bool { return !now.Before(d.until) || d.ctx.Err() != nil }

// timerWithin is how long cause waits for a context whose deadline has come. Its timer may fire after this package's.
const timerWithin = 10 * time.Millisecond

// cause says why the operation ends.
func (d *due) cause() error {
	if by, ok := d.ctx.Deadline(); ok && by.Equal(d.until) {
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
	if d.latest.IsZero() {
		d.latest = d.until.Add(grace(d.until.Sub(d.since), d.turn))
	}
	sooner := d.until.Before(q.first)
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
	slices.SortFunc(all, func(a, b *due) int { return a.until.Compare(b.until) })
	q.first = all[0].until
	return all
}

// run asks again and again. A rank that is alive answers as soon as it gets a CPU. A stopped rank never
// does. Silence does not tell the two apart, but on a busy machine other processes are late too. So run asks
// again while this process itself is late, or while more answers come in. It also asks again while data
// move or ranks wait for each other. The second question is about the ranks that the first answers
// have shown. By the third, the others know more of them. When an operation has to end, run may still not be sure of a
// silent rank or a link. It blames nobody then if this process waited for a CPU for half of the time.
func (q *inquiry) run() {
	e := &evidence{self: q.mesh.Rank(), hosts: q.hosts, checks: q.checks, peer: -1}
	begun, before := time.Now(), -1
	var about []int
	var waited time.Duration // for a CPU
	stop := q.lag()
	for all := q.open(); len(all) > 0; all = q.open() {
		first, asked := all[0], time.Now()
		span := first.latest.Sub(begun)
		pace := min(max(span/(idleRounds+2), leastPace), diagnoseFor/2)
		e.silentFrom = min(linkSilent, span/2)
		// Too short a question would get no answer: the last ones count then.
		left := first.latest.Sub(asked)
		if short := min(pace, leastAnswer/2); e.round > 0 && left < short {
			q.pause(left)
		} else {
			e.hear(q.mesh.Diagnose(min(max(pace, leastAnswer), max(left, short)), about...))
		}
		kept := stop()
		stop = q.lag()
		waited += kept
		now, silent := time.Now(), silent(q.mesh, e.health)
		for _, d := range all {
			if !d.isOver(now) || d.work.IsCompleted() {
				continue
			}
			e.about(d)
			v := e.judge()
			late, end := kept >= pace/4, !now.Before(d.latest)
			if took := now.Sub(begun); end && v.weak && late && (silent > 0 || v.other >= 0) && waited >= took/2 {
				const what = "rank %d waited for a CPU for %.1f s of %.1f: answers may be late for that"
				v = e.nobody(fmt.Sprintf(what, e.self, waited.Seconds(), took.Seconds()))
			}
			enough := e.round >= leastRounds && !v.weak && !late && silent == before
			if end || d.turn == 0 && (enough || v.sure && silent == 0) {
				if q.log.Enabled(context.Background(), slog.LevelDebug) {
					q.log.Debug("asked the other ranks why an operation timed out", "op", d.info.Op.String(), "seq", d.info.Seq, "blames", v.why, "answers", e.String())
				}
				d.blame(d, v)
				break
			}
		}
		e.about(first)
		before, about = silent, e.suspects()
		next := asked.Add(pace)
		if first.until.After(now) && first.until.Before(next) {
			next = first.until
		}
		if first.latest.After(now) && first.latest.Before(next) {
			next = first.latest
		}
		q.pause(time.Until(next))
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

// silent returns the number of ranks that should have answered and have not.
func silent(m transport.Mesh, health []transport.Health) (n int) {
	for _, h := range health {
		if isSilent(h) && h.Rank != m.Rank() && m.Fault() == nil {
			n++
		}
	}
	return n
}

// isSilent reports whether a peer should have answered and has not.
func isSilent(h transport.Health) bool { return h.Native && !h.Answered && !h.Departed }
