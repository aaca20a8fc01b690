package blame

import (
	"context"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// Canceled says why a context ended. A context that ended by its deadline is a timeout, whatever
// its cause.
func Canceled(ctx context.Context) error {
	err := ctx.Err()
	if errors.Is(err, context.DeadlineExceeded) {
		if cause := context.Cause(ctx); cause != err {
			return fmt.Errorf("%w: %w: %w", work.ErrTimeout, err, cause)
		}
		return fmt.Errorf("%w: %w", work.ErrTimeout, err)
	}
	return &cancellation{err: err, cause: context.Cause(ctx)}
}

// cancellation is the end of a context that was cancelled.
type cancellation struct{ err, cause error }

func (c *cancellation) Error() string {
	if c.cause != c.err {
		return fmt.Sprintf("%v: %v: %v", work.ErrCanceled, c.err, c.cause)
	}
	return fmt.Sprintf("%v: %v", work.ErrCanceled, c.err)
}

func (c *cancellation) Unwrap() []error { return []error{work.ErrCanceled, c.err, c.cause} }

// Words is what other ranks are told: the cause that the program gave, or nothing.
func (c *cancellation) Words() string {
	if c.cause != c.err {
		return c.cause.Error()
	}
	return ""
}

// Departure is the cause of a fault with which a rank ends its own group in Close.
type Departure struct{ Words string }

func (d *Departure) Error() string { return d.Words }

// sentinels are work's errors for the kinds of faults.
var sentinels = map[transport.FaultKind]error{
	transport.FaultPeerDied: work.ErrPeerDied, transport.FaultPeerLeft: work.ErrPeerLeft,
	transport.FaultTimeout: work.ErrTimeout, transport.FaultCanceled: work.ErrCanceled,
	transport.FaultAborted: work.ErrAborted, transport.FaultMismatch: work.ErrMismatch,
	transport.FaultProtocol: work.ErrMismatch, transport.FaultPanicked: work.ErrPanicked,
	transport.FaultCorrupted: work.ErrCorrupted, transport.FaultLink: work.ErrTimeout,
}

// KindOf returns the kind of a fault whose cause is err.
func KindOf(err error) transport.FaultKind {
	var was *transport.Fault
	if errors.As(err, &was) {
		return was.Kind
	}
	for _, k := range []transport.FaultKind{
		transport.FaultPanicked, transport.FaultPeerDied, transport.FaultPeerLeft,
		transport.FaultTimeout, transport.FaultCanceled, transport.FaultMismatch, transport.FaultCorrupted,
	} {
		if errors.Is(err, sentinels[k]) {
			return k
		}
	}
	return transport.FaultAborted
}

// Error is the error of an operation of rank self in a group that has failed with f, or was closed if that is nil.
func Error(info work.Info, self int, f *transport.Fault) *work.Error {
	var left *Departure
	if f == nil || f.Rank == self && errors.As(f.Err, &left) {
		return &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	where := ""
	if f.Op != transport.NoOp && f.Op != transport.Uncalled && (f.Op != uint8(info.Op) || f.Seq != info.Seq) {
		where = fmt.Sprintf(" (in %v seq %d)", work.OpType(f.Op), f.Seq)
	}
	kind := sentinels[f.Kind]
	if f.Kind.OfLink() {
		kind = &work.LinkError{Ranks: [2]int{min(f.Rank, f.Reporter), max(f.Rank, f.Reporter)}, Err: kind}
	}
	return &work.Error{Info: info, Peer: f.Culprit(), Err: &fault{what: f.Error() + where, kind: kind, f: f}}
}

// fault is the cause of an operation's error in a failed group. errors.Is finds the sentinel of
// package work in it, errors.As the transport.Fault.
type fault struct {
	what string
	kind error
	f    *transport.Fault
}

func (e *fault) Error() string { return e.what }

func (e *fault) Unwrap() []error { return []error{e.kind, e.f} }

// Fault is what rank self tells the other ranks of its verdict. cause is the error that made it look
// for one.
func (v Verdict) Fault(self int, cause error) *transport.Fault {
	f := transport.NewFault(transport.FaultTimeout, v.Rank, self, fmt.Errorf("%w; %s", cause, v.Why))
	if v.Other >= 0 {
		f.Kind, f.Reporter, f.Err = transport.FaultLink, v.Other, &relayed{f.Err, v.Why}
	}
	return f
}

// FaultBy returns the fault for an abort by rank self, of a group of size ranks, with a cause. Backends above this one
// abort it when an operation of theirs fails. If the cause is such an operation's error, the fault takes its kind
// and its Peer.
func FaultBy(cause error, self, size int) transport.Fault {
	f := transport.Fault{Kind: transport.FaultAborted, Rank: self, Reporter: self, Op: transport.NoOp, Err: cause}
	var e *work.Error
	var was *transport.Fault
	switch {
	case cause == nil || cause == work.ErrAborted:
		f.Err = nil
	case errors.As(cause, &e) && e.Peer >= 0 && e.Peer < size:
		kind, told := KindOf(e), errors.As(e, &was) && was.Reporter < size
		if e.Peer == self && !told && blamesOthers(kind) {
			break // other ranks said nothing of the kind
		}
		f.Kind, f.Rank = kind, e.Peer
		if kind != transport.FaultMismatch { // which the backend above tells on every rank before it closes this one
			f.Op, f.Seq = uint8(e.Op), e.Seq
		}
		first := &transport.Fault{Err: e.Err}
		if told {
			first, f.Reporter = was, was.Reporter
		}
		f.Err = &relayed{cause, first.Words()}
	case errors.As(cause, &was) && was.Kind == transport.FaultTimeout && was.Rank < 0 && was.Reporter < size,
		errors.As(cause, &was) && was.Kind.OfLink() && was.Rank < size && was.Reporter < size:
		f = *was // no rank is to blame
	case e == nil && errors.As(cause, &was) && was.Rank >= 0 && was.Rank < size: // of a rendezvous
		f.Kind, f.Rank, f.Reporter = was.Kind, was.Rank, was.Reporter
		f.Err = &relayed{cause, was.Words()}
	case errors.Is(cause, work.ErrMismatch):
		f.Kind = transport.FaultMismatch
	}
	return f
}

// blamesOthers reports whether a fault of kind k can only be another rank's.
func blamesOthers(k transport.FaultKind) bool {
	return k == transport.FaultPeerDied || k == transport.FaultTimeout || k == transport.FaultProtocol
}

// relayed is the cause of an abort after another fault. It keeps that fault's words.
type relayed struct {
	error
	words string
}

func (r *relayed) Unwrap() error { return r.error }

// Words returns the words of the first fault.
func (r *relayed) Words() string { return r.words }
