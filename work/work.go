package work

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/tensor"
)

// Info is what a Work knows of its operation from the start.
type Info struct {
	Op    OpType
	Seq   uint64 // the operation's number in its group, counted from 0
	Group string // the group's name
	Rank  int    // the rank that issued it
}

// Stream is a queue of device work. The backend of the device knows the type
// behind it.
type Stream interface {
	Device() tensor.Device
}

// Work is the future of one operation. All methods may be called from many
// goroutines. Works come from operations; a backend makes them through a Promise.
type Work struct {
	info    Info
	runner  runner // may be nil
	state   atomic.Uint32
	source  atomic.Int64
	started atomic.Int64 // nanoseconds since base, 0 = not yet

	mu       sync.Mutex
	done     chan struct{} // made when somebody asks for it
	err      error
	result   []*tensor.Tensor
	duration time.Duration
	order    func(Stream) error
}

// runner is what runs an operation, see Promise.RunBy.
type runner interface{ Abort(cause error) }

// helper is a runner whose operation Wait can run, see Promise.RunBy.
type helper interface{ Help(ctx context.Context) }

const (
	pending uint32 = iota
	succeeded
	failed
)

// base makes started a monotonic time that fits in one word.
var base = time.Now()

// Wait blocks until the operation has ended and returns how it ended, as c10d's
// wait does. ctx bounds only the waiting: when it ends first, Wait returns an
// error that wraps ctx's and the operation goes on.
func (w *Work) Wait(ctx context.Context) error {
	if w.state.Load() == pending {
		if h, ok := w.runner.(helper); ok {
			h.Help(ctx)
		}
	}
	if w.state.Load() == pending {
		select {
		case <-w.Done():
		case <-ctx.Done():
			// An operation that has ended wins over a context that has.
			if w.state.Load() == pending {
				err := ctx.Err()
				if cause := context.Cause(ctx); cause != err {
					err = fmt.Errorf("%w: %w", err, cause)
				}
				return &Error{Info: w.info, Peer: -1, Err: fmt.Errorf("stopped waiting, the operation goes on: %w", err)}
			}
		}
	}
	return w.Err()
}

// Synchronize orders s after the outputs of the operation, without blocking
// the caller where the backend can. With a nil stream, or for outputs in CPU
// memory, the caller itself is the stream: it blocks until the operation has ended.
// (c10d's synchronize does nothing for CPU tensors and is legal only after
// completion; here it is always safe to use the outputs after it returned nil.)
func (w *Work) Synchronize(s Stream) error {
	if s != nil {
		w.mu.Lock()
		order := w.order
		w.mu.Unlock()
		if order != nil {
			return order(s)
		}
	}
	return w.Wait(context.Background())
}

// Done is closed when the operation has ended.
func (w *Work) Done() <-chan struct{} {
	if w.state.Load() != pending {
		return ended
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state.Load() != pending {
		return ended
	}
	if w.done == nil {
		w.done = make(chan struct{})
	}
	return w.done
}

// ended is the channel of every operation that has ended before it was asked for one.
var ended = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Err returns how the operation ended: nil while it runs and when it succeeded.
func (w *Work) Err() error {
	if w.state.Load() != failed {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// IsCompleted reports, without blocking, whether the operation has ended.
func (w *Work) IsCompleted() bool { return w.state.Load() != pending }

// IsSuccess reports whether the operation has ended without an error. (In
// c10d it is also true while the operation runs.)
func (w *Work) IsSuccess() bool { return w.state.Load() == succeeded }

// Result returns the output tensors of an operation that has succeeded. Before
// that it returns ErrPending, and the operation's error if it failed.
func (w *Work) Result() ([]*tensor.Tensor, error) {
	switch w.state.Load() {
	case pending:
		return nil, &Error{Info: w.info, Peer: -1, Err: ErrPending}
	case failed:
		return nil, w.Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.result, nil
}

// SourceRank returns the rank, within the group, that a receive came from. It
// is an error for other operations and, for a receive from any rank, before it has ended.
func (w *Work) SourceRank() (int, error) {
	if w.info.Op != Recv && w.info.Op != RecvAnySource {
		return -1, &Error{Info: w.info, Peer: -1, Err: errors.New("only a receive has a source rank")}
	}
	if s := w.source.Load(); s >= 0 {
		return int(s), nil
	}
	if err := w.Err(); err != nil {
		return -1, err
	}
	return -1, &Error{Info: w.info, Peer: -1, Err: ErrPending}
}

// Info returns what was known of the operation from the start.
func (w *Work) Info() Info { return w.info }

// Duration returns the time from when the backend began the operation to when
// it ended; false while it runs.
func (w *Work) Duration() (time.Duration, bool) {
	if w.state.Load() == pending {
		return 0, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.duration, true
}

// Then returns a Work that ends after w with f's error. If w fails, f does not
// run and the error is passed on. The result is w's. f runs in a goroutine of its own. If it
// panics, the Work fails with a *PanicError.
func (w *Work) Then(f func(*Work) error) *Work {
	p := NewPromise(w.info)
	p.RunBy(w)
	p.Start()
	go func() {
		err := w.Wait(context.Background())
		returned := true
		defer func() {
			if !returned {
				err = Recovered(recover())
			}
			if s := w.source.Load(); s >= 0 {
				p.SetSource(int(s))
			}
			p.Complete(err)
		}()
		if err == nil {
			p.SetResult(w.result...)
			returned = false
			err = f(w)
			returned = true
		}
	}()
	return p.Work()
}

// Abort asks the backend to end the operation with cause, which must not be
// nil. On wires that cannot take a single operation back (Gloo's), the whole
// group ends with it, on every rank. It does nothing when the operation has ended.
func (w *Work) Abort(cause error) {
	if cause == nil {
		cause = ErrAborted
	}
	if w.runner != nil && w.state.Load() == pending {
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
	p.Init(info)
	return p
}

// Init makes a zero Promise ready, for backends that keep it inside a struct of
// their own. The Work is then part of that struct.
func (p *Promise) Init(info Info) {
	p.w.info = info
	p.w.source.Store(-1)
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
func (p *Promise) Info() Info { return p.w.info }

// Start marks the beginning of the operation, from which Duration counts.
func (p *Promise) Start() { p.w.started.Store(int64(time.Since(base)) | 1) }

// SetSource sets the rank that a receive came from.
func (p *Promise) SetSource(rank int) { p.w.source.Store(int64(rank)) }

// SetResult sets what Result returns after success.
func (p *Promise) SetResult(result ...*tensor.Tensor) {
	p.w.mu.Lock()
	p.w.result = result
	p.w.mu.Unlock()
}

// RunBy sets what runs the operation. Work.Abort calls r.Abort, which ends the operation with
// cause; cause is not nil. RunBy has to be called before anybody has the Work. Without it Work.Abort
// does nothing.
//
// If r also has a method Help(context.Context), Work.Wait calls it with its own context before it
// blocks. Help may run the operation, and others before it, in the goroutine of whoever waits, which
// saves the wake-up of another. It returns when the operation has ended or when it can do nothing.
// It may go on after the end of ctx only if that end ends the operation too.
func (p *Promise) RunBy(r interface{ Abort(cause error) }) { p.w.runner = r }

// OnSynchronize sets how a stream is ordered after the operation's outputs.
func (p *Promise) OnSynchronize(f func(Stream) error) {
	p.w.mu.Lock()
	p.w.order = f
	p.w.mu.Unlock()
}

// Complete ends the operation. An error that is no *Error is wrapped in one,
// so that it names operation, sequence number, group and rank. Only the first
// call counts; it returns true.
func (p *Promise) Complete(err error) bool {
	w := &p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state.Load() != pending {
		return false
	}
	if started := w.started.Load(); started != 0 {
		w.duration = time.Since(base) - time.Duration(started)
	}
	if err != nil {
		var have *Error
		if !errors.As(err, &have) {
			err = &Error{Info: w.info, Peer: -1, Err: err}
		}
		w.err = err
		w.state.Store(failed)
	} else {
		w.state.Store(succeeded)
	}
	if w.done != nil {
		close(w.done)
	}
	return true
}
