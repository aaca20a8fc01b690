package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

var (
	// ErrGeneration: ranks publish their addresses in different forms.
	ErrGeneration = errors.New("ranks of two generations of PyTorch, up to 2.0 and later, cannot be in one group")

	// ErrWire: a rank does not listen for Gloo's wire (Native.Only), and another one needs it.
	ErrWire = errors.New("the ranks have no wire in common")

	// ErrAddress: a rank published an invalid address, or one to which this rank cannot
	// connect.
	ErrAddress = errors.New("unusable address")
)

// Missing is a rank that is not connected when Connect gives up.
type Missing struct {
	Rank int
	Host string         // its host name, if it told
	Addr netip.AddrPort // where it listens, if it told
	What string         // what it did not do: "published no address", "did not connect", ...
	Last string         // what else is known of it, see Config.LastSeen
}

func (m Missing) String() string { return m.within("") }

// within is String with a time limit.
func (m Missing) within(limit string) string {
	s := fmt.Sprintf("rank %d", m.Rank)
	switch {
	case m.Host != "" && m.Addr.IsValid():
		s += fmt.Sprintf(" (host %s, %v)", m.Host, m.Addr)
	case m.Addr.IsValid():
		s += fmt.Sprintf(" (%v)", m.Addr)
	case m.Host != "":
		s += fmt.Sprintf(" (host %s)", m.Host)
	}
	s += " " + m.What + limit
	if m.Last != "" {
		s += " (" + m.Last + ")"
	}
	return s
}

// Error is why the ranks of a group could not be connected. It unwraps to the cause: a
// context's error, a *transport.Fault, a store's error, ErrGeneration, ErrWire, ErrAddress or a
// network error.
type Error struct {
	Rank, Size int
	After      time.Duration
	Missing    []Missing // ascending; only one if that rank is the cause
	Err        error

	lacks []int            // with which this rank is not connected although they run
	fault *transport.Fault // what the other ranks are told
}

// Unconnected returns the ranks that this one could not connect with in time, although they run, as far as the others
// know.
func (e *Error) Unconnected() []int { return e.lacks }

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rendezvous: rank %d of %d: ", e.Rank, e.Size)
	for i, m := range e.Missing {
		if i == 8 {
			fmt.Fprintf(&b, "%d more ranks are missing; ", len(e.Missing)-i)
			break
		}
		limit := ""
		if e.Timeout() {
			limit = fmt.Sprintf(" within %v", e.After.Round(time.Millisecond))
		}
		b.WriteString(m.within(limit))
		b.WriteString("; ")
	}
	s := strings.TrimSuffix(b.String(), "; ")
	if len(e.Missing) > 0 {
		s += ": "
	}
	return s + e.Err.Error()
}

// Unwrap returns the cause, and the *transport.Fault that the other ranks are told. If time has run out on another rank first,
// it has run out here too.
func (e *Error) Unwrap() []error {
	switch {
	case e.fault == nil:
		return []error{e.Err}
	case e.fault.Kind == transport.FaultTimeout:
		return []error{e.Err, e.fault, context.DeadlineExceeded}
	}
	return []error{e.Err, e.fault}
}

// Timeout reports whether time ran out, so that an Error is a net.Error.
func (e *Error) Timeout() bool { return errors.Is(e.Err, context.DeadlineExceeded) }

// Temporary is there for net.Error; it reports the same as Timeout.
func (e *Error) Temporary() bool { return e.Timeout() }

// peerFailure is the end of a rendezvous that one peer has caused.
type peerFailure struct {
	Missing
	kind transport.FaultKind
	err  error
}

func (c *peerFailure) Error() string { return c.Missing.String() + ": " + c.err.Error() }
func (c *peerFailure) Unwrap() error { return c.err }
