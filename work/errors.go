package work

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
)

var (
	// ErrTimeout is matched by the error of an operation that ran out of time. That error is also
	// a net.Error whose Timeout method returns true.
	ErrTimeout error = timeoutError{}

	// ErrPeerDied is matched when an operation needed a rank that had ended without closing the group.
	ErrPeerDied = errors.New("peer died")

	// ErrPeerLeft is matched when an operation needed a rank that had closed the group.
	ErrPeerLeft = errors.New("peer left the group")

	// ErrCanceled is matched when an operation's context was cancelled, on any rank.
	ErrCanceled = errors.New("operation cancelled")

	// ErrAborted is matched when a rank aborted a Work or its group.
	ErrAborted = errors.New("aborted")

	// ErrMismatch is matched when ranks called different operations.
	ErrMismatch = errors.New("ranks disagree on the operation")

	// ErrCorrupted is matched when bytes were changed on the way between two ranks.
	ErrCorrupted = errors.New("bytes were changed on the way")

	// ErrPanicked is matched when a function that an operation called on a rank, such as a custom operator,
	// panicked.
	ErrPanicked = errors.New("panicked")

	// ErrClosed is matched when the group was closed on this rank.
	ErrClosed = errors.New("group closed")

	// ErrPending is returned by Result and SourceRank before the operation has ended.
	ErrPending = errors.New("the operation has not ended")
)

// LinkError is the cause of an operation's error if two ranks are alive and the link between them is
// to blame. Error.Peer is -1 then.
type LinkError struct {
	Ranks [2]int // within the group, the lower one first
	Err   error  // ErrTimeout if the link is broken, ErrCorrupted if bytes were changed
}

func (e *LinkError) Error() string {
	return fmt.Sprintf("link between %d and %d", e.Ranks[0], e.Ranks[1])
}

// Unwrap returns Err.
func (e *LinkError) Unwrap() error { return e.Err }

type timeoutError struct{}

func (timeoutError) Error() string   { return "timed out" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// Error describes a failed operation: the operation, the group and rank, the rank at fault, and
// the cause. errors.Is finds the sentinels of this package in it. Its text also has the ranks' numbers in the default
// group, if Names has them.
type Error struct {
	Info
	Peer int // the rank, within the group, that caused the failure; -1 if none or not known
	Err  error
}

func (e *Error) Error() string {
	s := fmt.Sprintf("work: %v seq %d on %s", e.Op, e.Seq, e.Names.Rank(e.Rank))
	if e.Group != "" {
		s += " of " + e.Names.Group(e.Group)
	}
	return s + ": " + e.Names.said(e.Group, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Timeout reports whether time ran out. It is part of net.Error.
func (e *Error) Timeout() bool {
	return errors.Is(e.Err, ErrTimeout) || errors.Is(e.Err, context.DeadlineExceeded)
}

// Temporary is part of net.Error. It reports the same as Timeout.
func (e *Error) Temporary() bool { return e.Timeout() }

// PanicError is the cause of an operation's error if a function that it called, such as a custom
// operator, panicked or called runtime.Goexit. Only the rank of the panic has it. errors.Is finds
// ErrPanicked in it, and Value if that is an error.
type PanicError struct {
	Value any    // the argument of panic, ErrExited if the function called runtime.Goexit
	Stack []byte // of the goroutine that panicked
}

// ErrExited is the Value of a PanicError when a function called runtime.Goexit, as
// testing.T.FailNow does.
var ErrExited = errors.New("the function called runtime.Goexit")

// Recovered makes a PanicError from the value that recover returned and the stack of the calling
// goroutine. A deferred function calls it. A nil value means runtime.Goexit.
func Recovered(value any) *PanicError {
	if value == nil {
		value = ErrExited
	}
	return &PanicError{Value: value, Stack: debug.Stack()}
}

// Error returns the value and, after an empty line, the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n\n%s", e.Value, e.Stack) }

// Words returns the value alone, which the other ranks' errors show.
func (e *PanicError) Words() string { return fmt.Sprint(e.Value) }

// Unwrap returns ErrPanicked, and Value if it is an error.
func (e *PanicError) Unwrap() []error {
	if err, ok := e.Value.(error); ok {
		return []error{ErrPanicked, err}
	}
	return []error{ErrPanicked}
}
