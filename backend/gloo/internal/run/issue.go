package run

import (
	"context"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// issue gives a collective on so many bytes its number and its tags and queues it.
func (q *queue) issue(ctx context.Context, op work.OpType, timeout time.Duration, prefix uint8, tags, bytes int, o *operation) (*work.Work, error) {
	if err := q.admit(ctx, op); err != nil {
		return nil, err
	}
	defer q.mu.Unlock()
	o.begin(q, ctx, op, timeout)
	if q.native {
		tags = 1
	}
	o.collective, o.prefix, o.tag, o.call = true, prefix, q.tag, q.calls
	q.tag += uint32(tags)
	q.calls++
	q.enter(o)
	w := o.Work()
	q.enqueue(o, bytes)
	if o.early == later || !q.atOnce(o) {
		q.progress()
		return w, nil
	}
	q.next()
	return w, nil
}

// atOnce reports whether the call of o can run it without waiting for another rank. If it cannot, it
// publishes what it can. Then the other ranks get the data before this rank waits, or if it does not wait.
// q.mu is held.
func (q *queue) atOnce(o *operation) bool {
	if !o.alone || len(q.engines) == 0 || q.stopped {
		return false
	}
	s, ok := q.route.(*sharedRoute)
	if !ok {
		return false
	}
	g := s.group
	if o.early == gives {
		return g.Ready(o.args.t.ByteLen())
	}
	g.Begin(uint32(o.call), o.print.History)
	switch o.early {
	case postsAll:
		return g.PostAllGather(o.args.t.Bytes())
	case postsSum:
		w := &o.reduce.dense
		return g.PostAllReduce(w.ts[0].Bytes(), w.red.Grain)
	default:
		return g.PostBarrier()
	}
}

// admit checks that an operation can start; on success q.mu is held.
func (q *queue) admit(ctx context.Context, op work.OpType) error {
	ended := ctx.Err() != nil // a nil context panics here, not under the lock
	q.mu.Lock()
	seq := q.seq
	f, over := q.fault(), q.closing || q.draining
	if !over && f == nil && !ended {
		return nil
	}
	if !over && f == nil {
		q.uncalled = uncalled{op, seq, blame.Canceled(ctx)}
	}
	q.mu.Unlock()
	info := q.issuer.Info(op, seq)
	switch {
	case over:
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	case f != nil:
		return q.faultError(info, f)
	}
	return &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w", blame.Canceled(ctx))}
}

// givenUp returns the fault of a rank that leaves the group, or its epoch, after an operation that was
// not started. It returns nil if there is none, or if the rank has called another one since. q.mu is
// held.
func (q *queue) givenUp() *transport.Fault {
	u := &q.uncalled
	if u.cause == nil || u.seq != q.seq {
		return nil
	}
	return &transport.Fault{Kind: blame.KindOf(u.cause), Rank: q.rank, Reporter: q.rank, Op: uint8(u.op), Seq: u.seq, Err: u.cause}
}

// Revoke ends the group if the context of this rank's last operation had ended before the call. The
// operation was not started, so the rank could call it again. Revoke is for a rank that does not: the
// others may wait for it.
func (q *queue) Revoke() {
	q.mu.Lock()
	f := q.givenUp()
	q.mu.Unlock()
	if f != nil {
		q.end(*f)
	}
}

// begin fills in an operation that has been admitted. q.mu is held.
func (o *operation) begin(q *queue, ctx context.Context, op work.OpType, timeout time.Duration) {
	if o.future == nil {
		o.future = new(future)
	}
	o.future.queue, o.future.op = q, o
	o.Promise = &o.future.Promise
	q.begin(&o.called, ctx, op, timeout)
	o.RunBy(o.future)
}

// begin fills in a call that has been admitted. q.mu is held.
func (q *queue) begin(c *called, ctx context.Context, op work.OpType, timeout time.Duration) {
	if timeout <= 0 {
		timeout = time.Duration(q.timeout.Load())
	}
	c.Init(&q.issuer, op, q.seq)
	c.ctx, c.timeout = ctx, timeout
	q.seq++
}

// enter has the native wire compare this call with the other ranks' calls. q.mu is held.
func (q *queue) enter(o *operation) {
	info := o.Info()
	q.last.op, q.last.seq = info.Op, info.Seq
	if !q.native {
		return
	}
	o.print.Follow(q.last.what, q.last.history)
	q.last.what, q.last.history = o.print.What, o.print.History
	if g := q.Memory; g != nil {
		g.Enter(uint32(o.call), &o.print)
	}
	if q.Shared == nil && q.TCP != nil {
		q.TCP.Enter(o.tag, o.print, uint8(info.Op), info.Seq)
	}
}
