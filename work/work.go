package work

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/c10d-go/c10d/tensor"
)

// Info describes a Work's operation.
type Info struct {
	Op    OpType
	Seq   uint64 // the operation's number in its group, counted from 0; it has 56 bits
	Group string // the group's name
	Rank  int    // the rank that issued it
	Names *Names // may be nil
}

// Stream is a queue of device commands. The backend of the device knows the concrete type.
type Stream interface {
	Device() tensor.Device
}

// Issuer is the rank of a group that issues an operation.
type Issuer struct {
	Group string // the group's name
	Rank  int
	Names *Names // may be nil; must not change
}

// Info describes an operation of the rank.
func (i *Issuer) Info(op OpType, seq uint64) Info {
	return Info{Op: op, Seq: seq, Group: i.Group, Rank: i.Rank, Names: i.Names}
}

// Work is the future of one operation. All methods may be called from many
// goroutines. Works come from operations; a backend makes them through a Promise.
//
// Each operation allocates one, and the collector stops all ranks the more often the more bytes they allocate. So
// its fields are packed: 104 bytes on 64-bit systems.
type Work struct {
	issuer  *Issuer
	issued  uint64 // the sequence number, and the operation in the low 8 bits
	runner  runner // may be nil
	state   atomic.Uint32
	source  atomic.Int32                  // the rank plus 1, 0 = unknown
	token   uint32                        // for observer
	results uint32                        // how many tensors result has
	started atomic.Int64                  // nanoseconds since base, 0 = not yet
	done    atomic.Pointer[chan struct{}] // made by the first Done

	observer Observer // of state observed; nil once it has been told

	// Written before state says that the operation has ended, and read afterwards.
	err      *failure // nil if it has succeeded
	result   **tensor.Tensor
	duration time.Duration // less than 0 if it never began to wait: then minus the time of its end since base
}

// failure is the error of an operation, and the observer that was told of it while locks of the backend were held.
type failure struct {
	err  error
	told Observer
}

// settler is an Observer that does something about a failure after it was told, see Observer.
type settler interface{ Settle() }

func settle(o Observer) {
	if s, ok := o.(settler); ok {
		s.Settle()
	}
}

// runner runs an operation, see Promise.RunBy.
type runner interface{ Abort(cause error) }

// helper is a runner whose operation Wait can run, see Promise.RunBy.
type helper interface{ Help(ctx context.Context) }

// orderer is a runner that orders streams after its operation, see Promise.RunBy.
type orderer interface{ Order(s Stream) error }

// poller is a runner that ends its operation when it is asked and finds that it is done, see
// Promise.RunBy.
type poller interface{ Poll() }

// ender is a runner that knows whether its operation ends with a context, see Promise.RunBy.
type ender interface {
	EndsWith(ctx context.Context) bool
}

// cancelWithin and lateWithin bound how long Wait outlives its context, cancelled or past its deadline, while the
// operation ends with the same one. Cancelled operations end within milliseconds, unless a function of the program
// holds them up. Late ones first ask the other ranks who is missing.
const (
	cancelWithin = time.Second
	lateWithin   = 300 * time.Millisecond
)

// States of a Work. It has ended from succeeded on.
const (
	pending  uint32 = iota
	observed        // pending, with an observer
	ending          // Complete is at work
	succeeded
	failed
)

// base makes started a monotonic time that fits in one word.
var base = time.Now()

// Wait blocks until the operation has ended and returns its error, as c10d's wait does. ctx bounds
// the waiting only. If ctx ends first, Wait returns an error that wraps ctx's, and the operation
// goes on. If ctx is that of the operation, the operation ends, too: Wait gives it a second, or 0.3 s after ctx's
// deadline, and returns its error, which says who is to blame.
func (w *Work) Wait(ctx context.Context) error {
	if w.state.Load() < succeeded {
		if h, ok := w.runner.(helper); ok {
			h.Help(ctx)
		}
	}
	if w.state.Load() < succeeded {
		select {
		case <-w.Done():
		case <-ctx.Done():
			// If both the operation and the context have ended, the operation's result counts.
			if w.state.Load() < succeeded && !w.endsWith(ctx) {
				err := ctx.Err()
				if cause := context.Cause(ctx); cause != err {
					err = fmt.Errorf("%w: %w", err, cause)
				}
				return &Error{Info: w.Info(), Peer: -1, Err: fmt.Errorf("stopped waiting, the operation goes on: %w", err)}
			}
		}
	}
	if w.state.Load() == failed {
		settle(w.err.told)
	}
	return w.Err()
}

// endsWith waits for an operation that a context has ended together with the wait. It returns
// false if the operation has another context, or does not end.
func (w *Work) endsWith(ctx context.Context) bool {
	e, ok := w.runner.(ender)
	if !ok || !e.EndsWith(ctx) {
		return w.state.Load() >= succeeded
	}
	limit := cancelWithin
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		limit = lateWithin
	}
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-w.Done():
	case <-t.C:
	}
	return w.state.Load() >= succeeded
}

// Synchronize orders s after the outputs of the operation, without blocking the caller where the
// backend can. With a nil stream, or for outputs in CPU memory, it blocks until the operation has
// ended. After it has returned nil the outputs may be used. (c10d's synchronize does nothing for
// CPU tensors and may be called only after completion.)
func (w *Work) Synchronize(s Stream) error {
	if o, ok := w.runner.(orderer); ok && s != nil {
		return o.Order(s)
	}
	return w.Wait(context.Background())
}

// Done is closed when the operation has ended.
func (w *Work) Done() <-chan struct{} {
	if w.state.Load() >= succeeded {
		return ended
	}
	c := w.done.Load()
	if c == nil {
		made := make(chan struct{})
		if c = &made; !w.done.CompareAndSwap(nil, c) {
			c = w.done.Load()
		}
	}
	if w.state.Load() >= succeeded { // end may have looked for done before it was there
		return ended
	}
	return *c
}

// ended is Done's channel for operations that end before Done is called.
var ended = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Err returns the operation's error: nil while it runs and after success.
func (w *Work) Err() error {
	if w.state.Load() != failed {
		return nil
	}
	return w.err.err
}

// polled returns the state, after the runner has looked whether the operation is done.
func (w *Work) polled() uint32 {
	if w.state.Load() < succeeded {
		if p, ok := w.runner.(poller); ok {
			p.Poll()
		}
	}
	return w.state.Load()
}

// IsCompleted reports, without blocking, whether the operation has ended.
func (w *Work) IsCompleted() bool { return w.polled() >= succeeded }

// IsSuccess reports whether the operation has ended without an error. (In
// c10d it is also true while the operation runs.)
func (w *Work) IsSuccess() bool { return w.polled() == succeeded }

// Result returns the output tensors of an operation that has succeeded. Before
// that it returns ErrPending, and the operation's error if it failed.
func (w *Work) Result() ([]*tensor.Tensor, error) {
	switch w.polled() {
	case pending, observed, ending:
		return nil, &Error{Info: w.Info(), Peer: -1, Err: ErrPending}
	case failed:
		return nil, w.Err()
	}
	return unsafe.Slice(w.result, w.results), nil
}

// SourceRank returns the rank, within the group, that a receive came from. It
// is an error for other operations and, for a receive from any rank, before it has ended.
func (w *Work) SourceRank() (int, error) {
	if op := w.Info().Op; op != Recv && op != RecvAnySource {
		return -1, &Error{Info: w.Info(), Peer: -1, Err: errors.New("only a receive has a source rank")}
	}
	if s := w.source.Load(); s > 0 {
		return int(s) - 1, nil
	}
	if err := w.Err(); err != nil {
		return -1, err
	}
	return -1, &Error{Info: w.Info(), Peer: -1, Err: ErrPending}
}

// Observer is told when operations end. See Work.Observe.
type Observer interface {
	// Ended is called once: before the Work shows that it has ended, or from Observe, if that comes later. The
	// times are since Origin.
	// seq is that of Info. began is 0 if the operation never ran. Locks of the backend are held:
	// Ended must return soon and must not call the Work, its group or its backend. If the Observer has a method
	// Settle(), Wait of a failed operation calls it before it returns, without these locks.
	Ended(token uint32, seq uint64, began, ended time.Duration, err error)
}

// Origin is what the times of an Observer count from.
func Origin() time.Time { return base }

// Observe has o told, with token, when the operation ends: at once if it has ended. It returns false if the
// operation, which goes on, has an observer already. Package pg calls it: give pg.Options.Recorder observers
// instead. One goroutine at a time may call it.
func (w *Work) Observe(o Observer, token uint32) bool {
	switch w.state.Load() {
	case observed:
		return false
	case pending:
		w.observer, w.token = o, token
		if w.state.CompareAndSwap(pending, observed) {
			return true
		}
	}
	if w.state.Load() == ending {
		<-w.Done() // only then: Works that have ended share a channel, whose lock ranks of a process would fight for
	}
	began, ended := w.times()
	o.Ended(token, w.seq(), began, ended, w.Err())
	if w.state.Load() == failed {
		settle(o)
	}
	return true
}

// times returns when an operation began that has ended, and when it ended.
func (w *Work) times() (began, ended time.Duration) {
	if began = w.Began(); began == 0 {
		return 0, time.Since(base)
	}
	return began, began + max(w.duration, 0)
}

// Succeeded returns what an Observer is told of an operation that has succeeded, and false if it has not. It asks no
// backend. Package trace calls it, because it costs less than Observe.
func (w *Work) Succeeded() (seq uint64, began, ended time.Duration, ok bool) {
	if w.state.Load() != succeeded {
		return 0, 0, 0, false
	}
	began, ended = w.times()
	return w.seq(), began, ended, true
}

// Began returns when the operation began to run in the backend, since Origin, and 0 if it has not
// begun.
func (w *Work) Began() time.Duration {
	if w.state.Load() >= succeeded && w.duration < 0 { // first: Start may have come while the operation ended
		return -w.duration
	}
	return time.Duration(w.started.Load())
}

// Info returns the operation's description.
func (w *Work) Info() Info {
	i := Info{Op: OpType(w.issued), Seq: w.seq()}
	if m := w.issuer; m != nil {
		i.Group, i.Rank, i.Names = m.Group, m.Rank, m.Names
	}
	return i
}

func (w *Work) seq() uint64 { return w.issued >> opBits }

// opBits are those of an OpType.
const opBits = 8

// Duration returns the time from the operation's begin in the backend to its end, and false while
// it runs. It is 0 for a small operation that did not have to wait.
func (w *Work) Duration() (time.Duration, bool) {
	if w.polled() < succeeded {
		return 0, false
	}
	return max(w.duration, 0), true
}

// Then returns a Work that ends after w, with f's error and w's result. f runs in a new
// goroutine. If w fails, f does not run, and the Work has w's error. If f panics, the Work fails
// with a *PanicError.
func (w *Work) Then(f func(*Work) error) *Work {
	p := new(Promise)
	p.Init(w.issuer, OpType(w.issued), w.seq())
	p.RunBy(w)
	p.Start()
	go func() {
		err := w.Wait(context.Background())
		returned := true
		defer func() {
			if !returned {
				err = Recovered(recover())
			}
			p.w.source.Store(w.source.Load())
			p.Complete(err)
		}()
		if err == nil {
			p.SetResult(unsafe.Slice(w.result, w.results)...)
			returned = false
			err = f(w)
			returned = true
		}
	}()
	return p.Work()
}

// Abort asks the backend to end the operation with cause, which must not be nil. On wires that
// cannot cancel a single operation, such as Gloo's, the whole group ends, on every rank. Abort
// does nothing when the operation has ended.
func (w *Work) Abort(cause error) {
	if cause == nil {
		cause = ErrAborted
	}
	if w.runner != nil && w.state.Load() < succeeded {
		w.runner.Abort(cause)
	}
}

// WaitAll waits for every work and returns the errors of those that failed,
// joined. It stops early only when ctx ends.
func WaitAll(ctx context.Context, works ...*Work) error {
	var errs []error
	for _, w := range works {
		if w == nil {
			continue
		}
		if err := w.Wait(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Promise is the backend's end of a Work. It is exported for backends outside this module: nothing
// else makes a Work. The backend must call Complete once on every path.
type Promise struct{ w Work }

// NewPromise returns the promise of an operation that has just been issued.
func NewPromise(info Info) *Promise {
	p := new(Promise)
	p.Init(&Issuer{info.Group, info.Rank, info.Names}, info.Op, info.Seq)
	return p
}

// Init prepares a zero Promise, for backends that embed it in another struct. The Work is then
// part of that struct. All operations of a rank can share one Issuer, which must not change. Sequence numbers have 56 bits.
func (p *Promise) Init(by *Issuer, op OpType, seq uint64) {
	p.w.issuer, p.w.issued = by, seq<<opBits|uint64(op)
}

// Completed returns a Work that has already ended, for operations with nothing to do.
func Completed(info Info, err error, result ...*tensor.Tensor) *Work {
	p := NewPromise(info)
	p.Start()
	p.SetResult(result...)
	p.Complete(err)
	return p.Work()
}

// Work returns the future that goes to the caller.
func (p *Promise) Work() *Work { return &p.w }

// Info returns what the promise was made with.
func (p *Promise) Info() Info { return p.w.Info() }

// Start marks the beginning of the operation, from which Duration counts. Only the first call counts. An operation
// that succeeds without waiting needs none: it took no time, and reading the clock would be a good part of it.
func (p *Promise) Start() { p.w.started.CompareAndSwap(0, int64(time.Since(base))|1) }

// SetSource sets the rank that a receive came from.
func (p *Promise) SetSource(rank int) { p.w.source.Store(int32(rank) + 1) }

// SetResult sets what Result returns after success. Call it before Complete.
func (p *Promise) SetResult(result ...*tensor.Tensor) {
	p.w.result, p.w.results = unsafe.SliceData(result), uint32(len(result))
}

// RunBy sets what runs the operation. Work.Abort calls r.Abort, which ends the operation with
// cause; cause is not nil. Call RunBy before the caller has the Work. Without it Work.Abort does
// nothing.
//
// If r also has a method Help(context.Context), Work.Wait calls it with its own context before it
// blocks. Help may run the operation, and those before it, in the goroutine that waits, so that no
// worker need be woken. It returns when the operation has ended or there is nothing to run. It may
// continue after ctx has ended only if the end of ctx ends the operation.
//
// If r has a method Order(Stream) error, Synchronize calls it: it orders the stream after the
// operation's outputs. Otherwise Synchronize waits for the end.
//
// If r has a method Poll(), IsCompleted, IsSuccess, Result and Duration call it first. Poll ends the
// operation if it is done, and does not wait.
//
// If r has a method EndsWith(context.Context) bool, Wait calls it with a context that has ended.
// It reports whether the end of that context ends the operation, soon. Wait then waits for that.
func (p *Promise) RunBy(r interface{ Abort(cause error) }) { p.w.runner = r }

// Complete ends the operation. It wraps an error that is not an *Error in one with operation,
// sequence number, group and rank. Only the first call counts; it returns true.
func (p *Promise) Complete(err error) bool {
	w := &p.w
	was := w.state.Load()
	for was < ending && !w.state.CompareAndSwap(was, ending) {
		was = w.state.Load()
	}
	if was >= ending {
		<-w.Done()
		return false
	}
	now := time.Since(base)
	began := time.Duration(w.started.Load())
	if began != 0 {
		w.duration = max(now-began, 0)
	} else if err == nil {
		began = now
		w.duration = min(-now, -1)
	}
	end := succeeded
	if err != nil {
		var have *Error
		if !errors.As(err, &have) {
			err = &Error{Info: w.Info(), Peer: -1, Err: err}
		}
		w.err, end = &failure{err: err}, failed
		if was == observed {
			w.err.told = w.observer
		}
	}
	defer w.end(end) // also if the observer panics
	if was == observed {
		o := w.observer
		w.observer = nil
		o.Ended(w.token, w.seq(), began, now, err)
	}
	return true
}

// end shows that the operation has ended.
func (w *Work) end(state uint32) {
	w.state.Store(state)
	if c := w.done.Load(); c != nil {
		close(*c)
	}
}
