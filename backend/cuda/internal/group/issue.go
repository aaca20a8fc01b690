package group

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Operation is one call on its way. The Work is part of it.
type Operation struct {
	work.Promise
	B        *Engine
	Ctx      context.Context
	timeout  time.Duration
	deadline time.Time
	line     *line

	Legs   []Leg
	Print  board.Call
	number uint64 // of the collective

	// Call does the host's part for a piece: the same range of elements of every
	// leg, as one-dimensional CPU tensors. It must be the same on every rank.
	Call func(o *Operation, legs []*tensor.Tensor) error

	// Program, if not nil, is what the operation does instead of Call.
	Program Program

	// Later says that the operation has many commands.
	Later bool

	// Whole is for operations whose pieces the ranks cannot agree on.
	Whole bool

	// Width is over how many legs a chunk is spread, the same on every rank.
	Width int

	// Makes says that Call makes device memory, with Make.
	Makes bool

	// Near, if not nil, is where the inputs go. The operation makes memory then, and is whole.
	Near *Near

	given   *driver.CallStreams // of the call's context
	grain   int                 // elements of a leg in a piece
	pieces  int
	slots   int
	slot    int   // bytes
	at      []int // of each leg within a slot
	staging driver.HostMemory
	makes   []driver.Stream // of Make, one a device
	makeAt  int             // where Make copies from: in staging, up to word
	long    bool            // it gets to the streams in parts
	word    int             // that its streams write, in staging
	raw     []rawPlace      // tensors that the host packs and unpacks
	packed  []packedPlace   // those that devices do
	held    []driver.Memory // what Scratch has returned
	made    []driver.Memory // what New has, until the caller has it
	Shared  *shared         // of an all-reduce through memory that the ranks share
	Relay   *oneToAll       // of a broadcast from rank to rank

	fillWithin func(to Commander) error // see Within

	relayed []hostTurn              // its turns to send chunks on
	Sync    func(work.Stream) error // orders a stream after a work of somebody else's
	before  *work.Work              // of a barrier: what has to end first
	claim   *edges.Host             // of a message, and the turn in which it uses the tensor
	claimed int
	flying  bool           // it has left copies on its stream
	serve   func()         // begins the host's part; nil if Engine.work does it
	handed  bool           // who does the host's part has it; for who enqueues it
	feeding sync.WaitGroup // until it has been enqueued, if it was given to that one before
	issued  atomic.Bool    // it has been enqueued, or will not be
	driving atomic.Bool    // a batch of it is being enqueued
	staged  bool           // it has its streams and its memory; for who enqueues it

	// Of an operation that the feeder enqueues.
	later bool
	mark  edges.Mark      // of its end
	past  []past          // what it comes after
	uses  []driver.Access // of the callers' memory

	*temporary             // of who enqueues it
	unwatch    func() bool // stops watching ctx
	err        error

	mu       sync.Mutex
	turns    []hostTurn
	parts    []*edges.Pending // enqueued before the last one
	gone     int              // parts that no stream has any more; for who enqueues them
	pending  *edges.Pending   // the last or only one, which may be being enqueued
	feedErr  error            // why not all parts were
	halted   bool             // no more parts are enqueued
	launched bool             // it counts in underway
	over     bool             // the batches have ended, and are released; only settled writes it

	commands int // of engine.queued
}

// Captured returns an error if a call is part of a stream that is captured (InStream). What goes through the
// host cannot be replayed by a device.
func Captured(ctx context.Context, op work.OpType) error {
	if ctx == nil || !driver.CallCaptured(ctx) {
		return nil
	}
	return fmt.Errorf("cuda: %v in a capture: %w: the call would go through the host. Only calls that kernels do can be "+
		"captured; Explain says which do. Make a collective before: that connects the ranks", op, driver.ErrCapture)
}

// Issue starts a collective.
func (b *Engine) Issue(ctx context.Context, op work.OpType, timeout time.Duration, o *Operation, result ...*tensor.Tensor) (*work.Work, error) {
	if err := Captured(ctx, op); err != nil {
		return nil, err
	}
	if err := b.awaitHost(ctx, op, o); err != nil {
		return nil, err
	}
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, timeout)
	if err != nil {
		return nil, err
	}
	o.init(b, ctx, info, timeout)
	o.line = b.line
	o.Print.Op, o.number = op, b.collectives
	o.err = b.Enter(ctx, info, o.Print)
	if err := b.launch(o, result); err != nil {
		return nil, err
	}
	b.last(o)
	b.pass(o)
	o.beforeStream()
	b.collectives++
	b.hosted = op != work.Barrier
	b.writesHost(o)
	return o.Work(), nil
}

// Hosted reports whether a collective has gone through the hosts since the last barrier that did. It
// is the same on all ranks.
func (b *Engine) Hosted() bool {
	b.Calls.Lock()
	defer b.Calls.Unlock()
	return b.hosted
}

// Admit checks that an operation can start. It returns its description and its limit. If the CPU backend knows of a rank
// that has died, the refusal ends the group: other ranks may wait for this one, and not know of it.
func (b *Engine) Admit(ctx context.Context, op work.OpType, timeout time.Duration) (work.Info, time.Duration, error) {
	ended := ctx.Err() != nil
	failed, found := b.Broken(), false
	if failed == nil {
		if failed = b.CPUErr(); failed != nil {
			failed, found = fmt.Errorf("on the host: %w", failed), true
		}
	}
	b.Mu.Lock()
	info := b.Issuer.Info(op, b.seq)
	var err *work.Error
	switch {
	case b.closing || b.draining:
		err, found = &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}, false
	case failed != nil:
		err = &work.Error{Info: info, Peer: b.culprit(failed), Err: failed}
	case ended:
		err = &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w", Canceled(ctx))}
		b.uncalled = &work.Error{Info: info, Peer: b.Rank, Err: err.Err}
	}
	b.Mu.Unlock()
	switch {
	case err == nil:
		return info, b.Limit(timeout), nil
	case found:
		b.Fail(fmt.Errorf("the group has failed: %w", err), err)
	}
	return info, 0, err
}

// Limit returns the time of an operation: the group's, unless the call has one.
func (b *Engine) Limit(timeout time.Duration) time.Duration {
	if timeout > 0 {
		return timeout
	}
	return time.Duration(b.timeout.Load())
}

// Enter tells the other ranks of this host which collective comes next. If they call something
// else the group ends, on all ranks and at once. The caller holds B.calls.
func (b *Engine) Enter(ctx context.Context, info work.Info, c board.Call) error {
	if s := driver.CallStreamsOf(ctx); s != nil {
		c.Beside = s.Beside
	}
	mine := c.Said()
	peer, theirs, ok := b.Board.Enter(b.collectives, mine)
	if ok {
		return nil
	}
	err := &work.Error{Info: info, Peer: peer, Err: fmt.Errorf("cuda: %w", board.Disagree(b.collectives, b.Rank, mine, peer, theirs))}
	b.Fail(fmt.Errorf("the group has failed: %w", err), err)
	return err
}

// Issued notes a collective. The caller holds b.calls.
func (b *Engine) Issued(w *work.Work) {
	b.Mu.Lock()
	b.seq++
	b.Last = w
	b.Mu.Unlock()
	b.collectives++
}

// launch begins an operation that was admitted. An error means that it has not been issued. Later errors,
// of the feeder and on the streams, are the operation's.
func (b *Engine) launch(o *Operation, result []*tensor.Tensor) error {
	later := b.waits(o)
	if o.err == nil && !later {
		if err := o.stage(); err != nil {
			return o.named(err)
		}
		later = o.long && o.claim == nil
	}
	pool.Begin()
	b.Staged.Add(1)
	o.launched = true
	o.SetResult(result...)
	o.watch()
	b.Mu.Lock()
	b.seq++
	b.Mu.Unlock()
	if s := o.Shared; s != nil {
		s.first = s.x.Next
		s.x.Next += uint64(s.chunks)
	}
	if later {
		o.err = o.postpone()
	}
	return nil
}

// Init prepares an operation that was admitted.
func (o *Operation) init(b *Engine, ctx context.Context, info work.Info, timeout time.Duration) {
	o.Init(&b.Issuer, info.Op, info.Seq)
	o.B, o.Ctx, o.timeout, o.deadline = b, ctx, timeout, time.Now().Add(timeout)
	o.given = driver.CallStreamsOf(ctx)
	o.RunBy(o)
}

// watch ends the group when the call's context ends. The host may be busy with earlier operations then.
func (o *Operation) watch() {
	if o.Ctx.Done() == nil {
		return
	}
	o.unwatch = context.AfterFunc(o.Ctx, func() {
		err := o.named(Canceled(o.Ctx))
		o.B.Fail(fmt.Errorf("the group has failed: %w", err), err)
	})
}

// beforeStream has the stream of a call that is part of one wait for the operation. An error is
// also the operation's.
func (o *Operation) beforeStream() {
	if o.given != nil && o.given.In != nil && len(o.Legs) > 0 && !o.onHost() {
		o.order(o.given.In)
	}
}

// Order makes s wait for all that the operation does on devices. It waits for the Work if nothing is on a device, or
// if the operation makes memory, whose length is not known before.
func (o *Operation) Order(s work.Stream) error {
	switch {
	case o.Sync != nil:
		return o.Sync(s)
	case len(o.Legs) == 0, o.Makes, o.onHost():
		return o.Work().Wait(context.Background())
	}
	return o.order(s)
}

// order is Order for what the operation does with the tensors of the call.
func (o *Operation) order(s work.Stream) error {
	st, ok := s.(driver.Stream)
	if !ok {
		return o.named(fmt.Errorf("synchronize: %T is no stream of package driver", s))
	}
	o.mu.Lock()
	if o.later && !o.over {
		m := o.mark
		o.mu.Unlock()
		if err := m.Order(st); err != nil {
			return o.named(fmt.Errorf("synchronize: %w", err))
		}
		return o.Work().Err()
	}
	if o.pending == nil || o.over {
		o.mu.Unlock()
		return o.Work().Wait(context.Background())
	}
	// s may be full: o.mu is not held meanwhile, which the worker needs.
	var few [4]*edges.Pending
	all := append(append(few[:0], o.pending), o.parts...)
	for _, p := range all {
		p.Retain()
	}
	whole := o.feedErr == nil
	o.mu.Unlock()
	var err error
	for _, p := range all {
		err = cmp.Or(err, p.Order(st))
		p.Release()
	}
	if err != nil {
		return o.named(fmt.Errorf("synchronize: %w", err))
	}
	if !whole {
		return o.Work().Wait(context.Background())
	}
	return o.Work().Err()
}

// awaitHost waits for what writes the operation's tensors in CPU memory. No lock is held.
func (b *Engine) awaitHost(ctx context.Context, op work.OpType, o *Operation) error {
	if b.OnHost == nil || !o.onHost() || ctx.Err() != nil {
		return nil // or the call is refused
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		uses := l.hostDst
		if l.hostSrc != nil {
			uses = append(uses[:len(uses):len(uses)], l.hostSrc)
		}
		if err := b.OnHost.Await(ctx, uses); err != nil {
			if _, _, refused := b.Admit(ctx, op, 0); refused != nil {
				err = refused
			}
			return err
		}
	}
	return nil
}
