package gloo

import (
	"context"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// spare returns an empty operation. One that has ended is used again if nobody else can have it.
func (b *Backend) spare() *operation {
	o, ok := b.spares.Get().(*operation)
	if !ok {
		o = &operation{arguments: new(arguments)}
	}
	o.future = new(future)
	return o
}

// recycle keeps o, which has ended, for spare. It keeps only operations that spare has made, without
// a registered work or a watcher of a context: those may still hold the operation.
func (b *Backend) recycle(o *operation) {
	a := o.arguments
	if a == nil || a.reduce.runner != nil || o.unwatch != nil {
		return
	}
	if a.reduce.dense.ts != nil {
		a.reduce = reduceCall{}
	} else {
		a.args = tensorCall{lengths: a.args.lengths}
	}
	*o = operation{arguments: a}
	b.spares.Put(o)
}

// issue gives a collective on so many bytes its number and its tags and queues it.
func (b *Backend) issue(ctx context.Context, op work.OpType, timeout time.Duration, prefix uint8, tags, bytes int, o *operation) (*work.Work, error) {
	if err := b.admit(ctx, op); err != nil {
		return nil, err
	}
	defer b.mu.Unlock()
	o.begin(b, ctx, op, timeout)
	o.future.op = o
	if o.sync != nil {
		o.RunBy(&ordered{o.future, o.sync})
	}
	if b.native {
		tags = 1
	}
	o.collective, o.prefix, o.tag, o.call = true, prefix, b.tag, b.calls
	b.tag += uint32(tags)
	b.calls++
	b.enter(o)
	w := o.Work()
	b.enqueue(o, bytes)
	if o.early == later || !b.atOnce(o) {
		b.progress()
		return w, nil
	}
	large, streak := !o.issued.IsZero(), o.streak
	if b.next(); large {
		b.streak = streak + 1 // as if it had been waited for
	}
	return w, nil
}

// early is what the call of a small collective can do in shared memory before it waits.
type early uint8

const (
	later     early = iota // nothing
	gives                  // all, if a slot is free: the rank only gives args.t, or parts of args.all that are as long
	postsAll               // publish args.t, and all if every rank has published: AllGather
	postsSum               // the same for reduce.dense: AllReduce
	postsNone              // the same for a Barrier
)

// atOnce reports whether the call of o can run it without waiting for another rank. If it cannot, it
// publishes what it can. Then the other ranks get the data before this rank waits, or if it does not wait.
// b.mu is held.
func (b *Backend) atOnce(o *operation) bool {
	if !o.alone || len(b.engines) == 0 || b.stopped {
		return false
	}
	s, ok := b.route.(*sharedRoute)
	if !ok {
		return false
	}
	g := s.group
	if o.early == gives {
		return g.Ready(o.args.t.ByteLen())
	}
	g.Begin(uint32(o.call), o.print.History, nil)
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

// admit checks that an operation can start; on success b.mu is held.
func (b *Backend) admit(ctx context.Context, op work.OpType) error {
	ended := ctx.Err() != nil // a nil context panics here, not under the lock
	b.mu.Lock()
	seq := b.seq
	f, over := b.fault(), b.closing || b.draining
	if !over && f == nil && !ended {
		return nil
	}
	if !over && f == nil {
		b.uncalled = uncalled{op, seq, canceled(ctx)}
	}
	b.mu.Unlock()
	info := b.issuer.Info(op, seq)
	switch {
	case over:
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	case f != nil:
		return b.faultError(info, f)
	}
	return &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w", canceled(ctx))}
}

// uncalled is an operation that was not started because its context had ended. Other ranks may wait
// for this rank in it.
type uncalled struct {
	op    work.OpType
	seq   uint64
	cause error // nil if there is none
}

// givenUp returns the fault of a rank that leaves the group, or its epoch, after an operation that was
// not started. It returns nil if there is none, or if the rank has called another one since. b.mu is
// held.
func (b *Backend) givenUp() *transport.Fault {
	u := &b.uncalled
	if u.cause == nil || u.seq != b.seq {
		return nil
	}
	return &transport.Fault{Kind: kindOf(u.cause), Rank: b.rank, Reporter: b.rank, Op: uint8(u.op), Seq: u.seq, Err: u.cause}
}

// Revoke ends the group if the context of this rank's last operation had ended before the call. The
// operation was not started, so the rank could call it again. Revoke is for a rank that does not: the
// others may wait for it.
func (b *Backend) Revoke() {
	b.mu.Lock()
	f := b.givenUp()
	b.mu.Unlock()
	if f != nil {
		b.end(*f)
	}
}

// begin fills in a call that has been admitted. b.mu is held.
func (o *called) begin(b *Backend, ctx context.Context, op work.OpType, timeout time.Duration) {
	if timeout <= 0 {
		timeout = time.Duration(b.timeout.Load())
	}
	if o.future == nil {
		o.future = new(future)
	}
	o.Init(&b.issuer, op, b.seq)
	o.backend = b
	o.ctx, o.timeout = ctx, timeout
	o.RunBy(o.future)
	b.seq++
}

// Abort ends the group because of this operation.
func (f *future) Abort(cause error) { f.backend.abort(cause, f) }

// EndsWith reports whether the operation ends with ctx.
func (f *future) EndsWith(ctx context.Context) bool {
	f.backend.mu.Lock()
	defer f.backend.mu.Unlock()
	return f.op != nil && f.op.ctx.Done() == ctx.Done()
}

// progress tells the peers, should they ask, how far this rank is. b.mu is held.
func (b *Backend) progress() {
	b.setProgress(b.calls, b.completed)
}

// lastCall is the last collective that this rank has called.
type lastCall struct {
	op      work.OpType
	seq     uint64
	what    [2]uint64 // see transport.Call
	history uint64
}

// enter has the native wire compare this call with the other ranks' calls. b.mu is held.
func (b *Backend) enter(o *operation) {
	info := o.Info()
	b.last.op, b.last.seq = info.Op, info.Seq
	if !b.native {
		return
	}
	o.print.Follow(b.last.what, b.last.history)
	b.last.what, b.last.history = o.print.What, o.print.History
	b.session.enter(o.call, o.tag, &o.print, info.Op, info.Seq)
}
