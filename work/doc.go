// Package work holds the future that every operation of a process group
// returns, c10d's Work.
//
// An operation is issued in one place and waited for in another:
//
//	w, err := g.AllReduce(ctx, grads, backend.AllReduceOptions{})
//	if err != nil {
//		return err // the call was wrong; nothing was sent
//	}
//	// ... compute something else ...
//	if err := w.Wait(ctx); err != nil {
//		return err // what happened on the wire, naming operation, number and rank
//	}
//
// # Two contexts
//
// The context of the call bounds the operation: when it ends, the operation
// fails on every rank. The context of Wait bounds only the waiting.
//
// # States
//
// A Work is pending until it has succeeded or failed, and never changes after
// that. Done is closed at the change, so a Work fits in a select. The memory
// that the operation used belongs to the backend while the Work is pending and
// to the caller afterwards, also when the operation failed.
//
// # Errors
//
// A failed Work has an *Error with the operation, its sequence number, the
// group, the rank, and the peer whose fault it was. What callers branch on are
// the sentinels: ErrTimeout, ErrPeerDied, ErrPeerLeft, ErrCanceled, ErrAborted,
// ErrMismatch, ErrPanicked and ErrClosed, all found by errors.Is. On the rank that panicked, the
// cause is a *PanicError, with the panic's value and stack.
//
// # Making a Work
//
// A backend makes a Promise, gives its Work to the caller, and completes it on
// every path. What the backend does not say, the Work does not claim: a Work
// without RunBy cannot be aborted, one without OnSynchronize is synchronised
// by waiting.
package work
