// Package work has c10d's Work: the future that every operation of a process group returns.
//
// An operation is issued in one place and waited for in another:
//
//	w, err := g.AllReduce(ctx, grad, pg.Sum())
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
// A Work is pending until it has succeeded or failed, and never changes after that. Done is
// closed when it ends, so a Work fits in a select. The operation's memory belongs to the backend
// while the Work is pending and to the caller afterwards, even after a failure.
//
// # Errors
//
// A failed Work has an *Error with the operation, its sequence number, the group, the rank, and
// the peer at fault. errors.Is finds one of the sentinels in it: ErrTimeout, ErrPeerDied,
// ErrPeerLeft, ErrCanceled, ErrAborted, ErrMismatch, ErrCorrupted, ErrPanicked or ErrClosed. On the rank that
// panicked, the cause is a *PanicError, with the panic's value and stack. If a link is to blame and no
// rank, the cause is a *LinkError.
//
// # For authors of backends
//
// A program needs none of these, and an object that it makes itself runs no operation: [Promise], [NewPromise],
// [Completed], [Issuer], [Names], [Recovered], [ErrExited], [Observer], [Origin], [Work.Observe], [Work.Succeeded] and
// [Work.Began].
//
// A backend makes a Promise, gives its Work to the caller, and completes it on every path. A Work
// without RunBy cannot be aborted. Without a method Order of the runner, Synchronize waits for the end.
package work
