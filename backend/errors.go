package backend

import (
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/work"
)

// ErrInvalidArgument is matched by the error of every call whose arguments
// were wrong. Nothing was sent and no byte changed.
var ErrInvalidArgument = errors.New("invalid argument")

// ArgumentError tells what was wrong with a call. The wording follows c10d's,
// so that people find what they know.
type ArgumentError struct {
	Backend string
	Op      work.OpType
	What    string
}

func (e *ArgumentError) Error() string {
	return fmt.Sprintf("%s: %v: %s", e.Backend, e.Op, e.What)
}

// Unwrap makes errors.Is(err, ErrInvalidArgument) hold.
func (e *ArgumentError) Unwrap() error { return ErrInvalidArgument }

// UnsupportedError is what a backend says of an operation that it does not
// have. errors.Is(err, errors.ErrUnsupported) holds.
type UnsupportedError struct {
	Backend string
	Op      string
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("backend %s does not support %s", e.Backend, e.Op)
}

// Unwrap makes errors.Is(err, errors.ErrUnsupported) hold.
func (e *UnsupportedError) Unwrap() error { return errors.ErrUnsupported }

// ErrExhausted is matched by the error of Alloc, on all ranks, when one of the ranks that share memory
// has no room. The group stays usable.
var ErrExhausted = errors.New("backend: no shared memory is left")
