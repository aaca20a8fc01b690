package nccl

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// call is an operation whose arguments have been checked.
type call struct {
	ctx     context.Context
	op      work.OpType
	timeout time.Duration
	out, in []*tensor.Tensor
	result  []*tensor.Tensor  // of the Work; nil means out
	pair    int               // the other rank of a message that has a communicator of its own; -1 for the group's
	source  int               // of a receive, -1 of others
	enqueue func(x *enqueuer) // makes NCCL's calls
	then    func(x *enqueuer) // gives the stream what comes after; may be nil
}

// operation is a call that a stream was given.
type operation struct {
	work.Promise
	b        *Backend
	c        *comm
	ctx      context.Context
	limit    time.Duration
	deadline time.Time
	scratch  []driver.Memory

	mu   sync.Mutex
	end  driver.Event // passes when the stream has done it; nil in a capture
	over bool
}

// enqueuer makes the calls of an operation. After an error it makes none.
type enqueuer struct {
	b    *Backend
	c    *comm
	h    libnccl.Comm
	s    driver.Stream
	o    *operation
	pair bool // the communicator is that of two ranks
	err  error
}

// do makes one call.
func (x *enqueuer) do(name string, f func() libnccl.Result) {
	if x.err == nil {
		x.err = libnccl.Check(x.b.api, x.h, name, f())
	}
}

// group makes calls that NCCL does at the same time.
func (x *enqueuer) group(f func()) {
	x.do("GroupStart", x.b.api.GroupStart)
	if x.err != nil {
		return
	}
	f()
	err := x.err
	x.err = nil
	x.do("GroupEnd", x.b.api.GroupEnd) // also after an error, for the group is the thread's
	if err != nil {
		x.err = err
	}
}

// copy copies bytes within the device.
func (x *enqueuer) copy(dst, src driver.Ptr, n int) {
	if x.err == nil && n > 0 && dst != src {
		x.err = x.s.Copy(dst, src, n)
	}
}

// room returns n bytes of device memory that the operation has until its end.
func (x *enqueuer) room(n int) driver.Ptr {
	if x.err != nil || n == 0 {
		return 0
	}
	m, err := x.b.scratch.Get(x.c.dev.ID().Index, n)
	if err != nil {
		x.err = err
		return 0
	}
	x.o.scratch = append(x.o.scratch, m)
	return m.Ptr()
}

// issue starts a call.
func (b *Backend) issue(q call) (*work.Work, error) {
	b.calls.Lock()
	defer b.calls.Unlock()
	info := b.issuer.Info(q.op, b.seq.Load())
	if err := b.admit(q.ctx, info); err != nil {
		return nil, err
	}
	o := &operation{b: b, ctx: q.ctx, limit: b.limit(q.timeout)}
	o.deadline = time.Now().Add(o.limit)
	o.Init(&b.issuer, q.op, info.Seq)
	o.RunBy(o)
	if q.result == nil {
		q.result = slices.Clone(q.out)
	}
	o.SetResult(q.result...)
	if q.source >= 0 {
		o.SetSource(q.source)
	}
	dev, s, before, err := b.streams(q)
	if err != nil {
		return nil, err
	}
	b.seq.Add(1)
	err = b.start(o, q, dev, s, before)
	if err != nil {
		err = b.named(info, err)
		b.fail(err)
		o.finish(err)
		return o.Work(), nil
	}
	if o.end == nil { // captured: the graph has it
		o.finish(nil)
		return o.Work(), nil
	}
	b.mu.Lock()
	b.pending = append(b.pending, o)
	b.mu.Unlock()
	if err := b.Err(); err != nil { // it may not have seen the operation
		o.finish(b.named(info, err))
	}
	select {
	case b.wake <- struct{}{}:
	default:
	}
	return o.Work(), nil
}

// admit returns why a call cannot start.
func (b *Backend) admit(ctx context.Context, info work.Info) error {
	b.hear()
	b.mu.Lock()
	closing := b.closing
	b.mu.Unlock()
	switch err := b.Err(); {
	case closing:
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	case err != nil:
		return b.named(info, err)
	case ctx.Err() != nil:
		return &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w", canceled(ctx))}
	}
	return nil
}

// streams returns the device of a call, the stream that the call is part of (nil if none), and the streams that it
// comes after. Those are named by the call, or else by the tensors' memories.
func (b *Backend) streams(q call) (dev int, in driver.Stream, before []driver.Stream, err error) {
	dev = b.ownDevice()
	ts := append(slices.Clone(q.out), q.in...)
	if len(ts) > 0 {
		dev = ts[0].Device().Index
	}
	for _, t := range ts {
		if t.Device() != ts[0].Device() {
			return 0, nil, nil, bad(q.op, "tensors are on %v and on %v: a rank of an NCCL group has one device", ts[0].Device(), t.Device())
		}
	}
	switch given := driver.CallStreamsOf(q.ctx); {
	case given != nil && given.In != nil:
		if on := given.In.Device().Index; on != dev {
			return 0, nil, nil, bad(q.op, "the call is part of a stream of device %d, and its tensors are on device %d", on, dev)
		}
		return dev, given.In, nil, nil
	case given != nil:
		before = given.Before
	default:
		for _, t := range ts {
			if m, ok := t.Memory().(driver.Streamer); ok && !slices.Contains(before, m.Stream()) {
				before = append(before, m.Stream())
			}
		}
	}
	if slices.ContainsFunc(before, driver.Capturing) {
		return 0, nil, nil, fmt.Errorf("nccl: %v: %w: only a call that is part of the captured stream can be captured (cuda.InStream)", q.op, driver.ErrCapture)
	}
	return dev, nil, before, nil
}

// start has a communicator, and gives stream s, or else that of the communicator, the operation.
func (b *Backend) start(o *operation, q call, dev int, s driver.Stream, before []driver.Stream) (err error) {
	if q.pair >= 0 {
		o.c, err = b.pairComm(q.ctx, dev, q.pair, o.deadline)
	} else {
		o.c, err = b.groupComm(q.ctx, dev, o.deadline)
	}
	if err != nil {
		return fmt.Errorf("connecting the ranks: %w", err)
	}
	if s == nil {
		s = o.c.stream
		for _, x := range before {
			e, err := x.Record()
			if err != nil {
				return err
			}
			err = s.Wait(e)
			e.Release()
			if err != nil {
				return err
			}
		}
	}
	if !driver.Capturing(s) {
		if err = b.scratch.Tidy(); err != nil { // no Get of this operation may
			return err
		}
	}
	o.Start()
	pool.Begin() // nothing is freed meanwhile
	x := &enqueuer{b: b, c: o.c, s: s, o: o, pair: q.pair >= 0}
	err = o.c.do(func() error {
		err := o.c.with(func(h libnccl.Comm) error {
			x.h = h
			q.enqueue(x)
			return x.err
		})
		if err == nil && q.then != nil {
			q.then(x)
			err = x.err
		}
		return err
	})
	if err == nil && !driver.Capturing(s) {
		o.end, err = s.Record()
	}
	return err
}

// finish ends the operation, once.
func (o *operation) finish(err error) {
	o.mu.Lock()
	if o.over {
		o.mu.Unlock()
		return
	}
	o.over = true
	if o.end != nil {
		o.end.Release()
	}
	o.mu.Unlock()
	if o.c != nil {
		if o.end == nil && err == nil { // a graph uses it
			o.b.mu.Lock()
			o.b.held = append(o.b.held, o.scratch...)
			o.b.mu.Unlock()
		} else {
			for _, m := range o.scratch {
				o.b.scratch.Put(o.c.dev.ID().Index, m)
			}
		}
		if o.Work().Began() != 0 {
			pool.Underway.Add(-1)
		}
	}
	o.Complete(err)
}

// leave waits until the streams of an operation that has been aborted have gone on: its memory may be freed then.
func (o *operation) leave(ctx context.Context) {
	if !o.isOver() {
		_ = o.end.Sync(ctx) // an error ends the wait too
	}
}

// Poll ends the operation if the device has done it.
func (o *operation) Poll() {
	o.mu.Lock()
	if o.over || o.end == nil {
		o.mu.Unlock()
		return
	}
	done, err := o.end.Done()
	o.mu.Unlock()
	switch {
	case err != nil:
		o.b.fail(o.b.named(o.Info(), err))
	case done && o.b.Err() == nil: // an abort ends kernels too
		o.finish(nil)
	}
}

// Help looks for the end while the caller of Wait would sleep, for the first milliseconds.
func (o *operation) Help(ctx context.Context) {
	const most = 4 * time.Millisecond
	for began := time.Now(); time.Since(began) < most && ctx.Err() == nil; runtime.Gosched() {
		if o.Poll(); o.isOver() {
			return
		}
	}
}

func (o *operation) isOver() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.over
}

// Order makes a stream wait for the operation.
func (o *operation) Order(s work.Stream) error {
	d, ok := s.(driver.Stream)
	if !ok {
		return o.b.named(o.Info(), fmt.Errorf("synchronize: %T is no stream of package driver", s))
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.over {
		return d.Wait(o.end)
	}
	return o.Work().Err()
}

// Abort ends the group because of this operation.
func (o *operation) Abort(cause error) { o.b.abortFor(o.Info(), cause) }

// EndsWith reports whether the operation ends with ctx.
func (o *operation) EndsWith(ctx context.Context) bool { return o.ctx.Done() == ctx.Done() }
