package store

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// handle is the common part of this package's stores: a name for errors, a timeout, and Close.
type handle struct {
	name    string
	timeout atomic.Int64
	closing sync.Once
	closed  chan struct{}
}

func (h *handle) init(name string) {
	h.name, h.closed = name, make(chan struct{})
}

// Timeout returns the limit of a wait whose context has no deadline.
func (h *handle) Timeout() time.Duration {
	if d := time.Duration(h.timeout.Load()); d != 0 {
		return d
	}
	return DefaultTimeout
}

// SetTimeout changes that limit for calls that begin later.
func (h *handle) SetTimeout(d time.Duration) { h.timeout.Store(int64(d)) }

func (h *handle) isClosed() bool {
	select {
	case <-h.closed:
		return true
	default:
		return false
	}
}

// begin returns why an operation cannot start.
func (h *handle) begin(ctx context.Context) error {
	if h.isClosed() {
		return ErrClosed
	}
	return ctx.Err()
}

// pause returns nil once ready is closed or has a value, else the error that ended the wait. ctx
// comes from WithTimeout.
func pause[T any](ctx context.Context, h *handle, ready <-chan T) error {
	select {
	case <-ready:
		return nil
	case <-h.closed:
		return ErrClosed
	case <-ctx.Done():
		return WaitErr(ctx)
	}
}

// fail makes the error of an operation; start is when it began, zero if it does not wait.
func (h *handle) fail(op string, err error, start time.Time, keys ...string) error {
	e := &Error{Store: h.name, Op: op, Keys: keys, Err: err}
	if e.Timeout() && !start.IsZero() {
		e.After = time.Since(start)
	}
	return e
}
