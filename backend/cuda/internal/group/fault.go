package group

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/work"
)

// Asks is the context of a wait for a device: it has ended when the function returns an error.
type Asks func() error

func (Asks) Deadline() (time.Time, bool) { return time.Time{}, false }
func (Asks) Done() <-chan struct{}       { return nil }
func (Asks) Value(any) any               { return nil }
func (f Asks) Err() error                { return f() }

// AskDriver returns why the operation has to end, as Ask, and asks its devices too.
func (o *Operation) AskDriver() error {
	if err := o.Ask(); err != nil {
		return err
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		if l.Src != nil && l.Src.Down != nil {
			if err := l.Src.Down.Err(); err != nil {
				return err
			}
		}
		for _, d := range l.Dst {
			if err := d.Up.Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Over returns why something that has a context and a deadline has to end, nil if it may go on. Where is added to the
// text of a timeout, and may be empty.
func (b *Engine) Over(ctx context.Context, deadline time.Time, timeout time.Duration, where string) error {
	return cmp.Or(expired(ctx, deadline, timeout, where), b.Broken(), b.CPUErr())
}

// expired is Over as far as the group does not matter.
func expired(ctx context.Context, deadline time.Time, timeout time.Duration, where string) error {
	if ctx.Err() != nil {
		return Canceled(ctx)
	}
	if time.Now().After(deadline) {
		return fmt.Errorf("%w after %v%s", work.ErrTimeout, timeout, where)
	}
	return nil
}

func (o *Operation) expired() error { return expired(o.Ctx, o.deadline, o.timeout, o.blocked()) }

// Enqueued reports whether the operation's commands have been enqueued, or will not be.
func (o *Operation) Enqueued() bool { return o.issued.Load() }

// blocked says if a call of the driver keeps the caller waiting while the operation is enqueued.
func (o *Operation) blocked() string {
	if !o.driving.Load() {
		return ""
	}
	why := "a stream is full, or a profiler or debugger makes launches block"
	if v := os.Getenv("CUDA_LAUNCH_BLOCKING"); v != "" && v != "0" {
		why = "CUDA_LAUNCH_BLOCKING is " + v
	}
	return ", in a call of the driver that has not returned: " + why
}

// Canceled says why a context ended.
func Canceled(ctx context.Context) error {
	kind := work.ErrCanceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		kind = work.ErrTimeout
	}
	if cause := context.Cause(ctx); cause != ctx.Err() {
		return fmt.Errorf("%w: %w: %w", kind, ctx.Err(), cause)
	}
	return fmt.Errorf("%w: %w", kind, ctx.Err())
}

// Left returns what is left of the operation's time; an operation of the CPU
// backend takes 0 for its default.
func (o *Operation) Left() time.Duration { return max(time.Until(o.deadline), time.Nanosecond) }

// Wait waits for the host's part of a piece.
func (o *Operation) Wait(w *work.Work, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(context.Background())
}

// Abort ends the group because of this operation.
func (o *Operation) Abort(cause error) { o.B.Abort(cause) }

// Abort ends every operation with cause, on every rank.
func (b *Engine) Abort(cause error) {
	if cause == nil {
		cause = work.ErrAborted
	}
	b.Fail(&aborted{b.Rank, cause}, cause)
}

// aborted is the end of a group that a rank has aborted.
type aborted struct {
	rank  int
	cause error
}

func (e *aborted) Error() string { return fmt.Sprintf("%v: %v", work.ErrAborted, e.cause) }

func (e *aborted) Unwrap() []error { return []error{work.ErrAborted, e.cause} }

// Fail ends the group. Operations of this rank end with err, and the other ranks are told cause.
func (b *Engine) Fail(err, cause error) {
	b.fault.CompareAndSwap(nil, &err)
	if left := b.cut.Load(); left != nil {
		cause = left // an operation that Close has ended may be here first
	}
	b.CPU.Abort(cause)
	for _, w := range b.Ways {
		w.Abort()
	}
}

// Revoke ends the group if the context of this rank's last operation had ended before the call. The
// operation was not started, so the rank could call it again. Revoke is for a rank that does not: the
// others may wait for it.
func (b *Engine) Revoke() {
	b.Mu.Lock()
	err := b.uncalled
	if err != nil && err.Seq != b.seq {
		err = nil
	}
	b.Mu.Unlock()
	if err != nil && b.Broken() == nil {
		b.Fail(fmt.Errorf("the group has failed: %w", err), err)
	}
}

// Broken returns what ended the group, nil while it works.
func (b *Engine) Broken() error {
	if e := b.fault.Load(); e != nil {
		return *e
	}
	return nil
}

// CPUErr returns what ended the group of the host's part, if its backend says so.
func (b *Engine) CPUErr() error {
	if e, ok := b.CPU.(interface{ Err() error }); ok {
		return e.Err()
	}
	return nil
}

// Named makes an error that names this operation.
func (o *Operation) named(err error) error { return o.B.Named(o.Info(), err, o.crowd) }

// Named makes an error that names an operation. The CPU backend's has its own numbers. Crowd is
// asked for what may have held up an operation that was not done in time.
func (b *Engine) Named(info work.Info, err error, crowd func() string) error {
	if b.cut.Load() != nil {
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	peer := b.culprit(err)
	crowding := ""
	if errors.Is(err, work.ErrTimeout) && !strings.Contains(err.Error(), crowded) {
		crowding = crowd() // unless another rank has said so
	}
	var inner *work.Error
	if errors.As(err, &inner) {
		if inner.Info == info {
			if crowding == "" {
				return err
			}
			return &work.Error{Info: inner.Info, Peer: inner.Peer, Err: fmt.Errorf("%w%s", inner.Err, crowding)}
		}
		if inner.Group == b.Issuer.Group+CPUGroup {
			err = fmt.Errorf("on the host: %w", inner.Err)
		}
	}
	return &work.Error{Info: info, Peer: peer, Err: fmt.Errorf("cuda: %w%s", err, crowding)}
}

// culprit returns the rank that caused an error, as the other ranks are told; -1 if
// none or not known.
func (b *Engine) culprit(err error) int {
	var own *aborted
	var first *work.Error
	var panicked *work.PanicError
	switch {
	case errors.As(err, &own):
		return own.rank // a rank of this process may have aborted the group, and its error come here as it is
	case errors.As(err, &first):
		return first.Peer
	case errors.As(err, &panicked):
		return b.Rank
	}
	return -1
}

const crowded = "in which those that wait for other ranks hold up others"

// crowd is for an operation that was not done in time. It says which device of it has more streams than
// queues: another operation may have held it up there, and waited itself for another rank.
func (o *Operation) crowd() (crowd string) {
	look := func(p *place.Place) { crowd = cmp.Or(o.B.Crowd(p.Dev), crowd) }
	for i := range o.Legs {
		o.Legs[i].each(look)
	}
	return crowd
}

// Crowd is the operations' for one device.
func (b *Engine) Crowd(dev int) string {
	v, err := b.Driver.Device(dev)
	if err != nil {
		return ""
	}
	if q, ok := v.(driver.Queuer); ok {
		if streams, queues := q.Queues(); streams > queues {
			return fmt.Sprintf("; the %d streams of device %d share %d queues, %s", streams, dev, queues, crowded)
		}
	}
	return ""
}

// Ask returns why the operation has to end, nil while it may go on.
func (o *Operation) Ask() error {
	o.mu.Lock()
	err := o.feedErr
	o.mu.Unlock()
	return cmp.Or(err, o.B.Over(o.Ctx, o.deadline, o.timeout, o.blocked()))
}
