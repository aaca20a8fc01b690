package meet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/c10d-go/c10d/store"
)

var (
	// ErrStale is matched by the error of a rank that finds its PyTorch key before it has written
	// it.
	ErrStale = errors.New("keys of an earlier run are in the store")

	// ErrTwice is matched by the error of ranks of which one has two processes.
	ErrTwice = errors.New("started twice")

	// ErrDiffer is matched by the error of ranks of different sizes, and of ranks whose rank 0
	// gave up.
	ErrDiffer = errors.New("the ranks are not of one run")
)

// Kinds of faults that match an error.
const (
	kindTwice  = "twice"
	kindDiffer = "differ"
)

var kinds = map[string]error{kindTwice: ErrTwice, kindDiffer: ErrDiffer}

// Fault is why ranks do not meet, or why a group cannot be made. Its ranks are those of the default group, because the
// ranks may not agree on the group's.
type Fault struct {
	Rank    int    `json:"rank"`              // which is at fault, -1 if unknown
	By      int    `json:"by"`                // the rank that says so, -1 if the store does
	Gone    bool   `json:"gone,omitempty"`    // Rank's connection to the store has ended
	Late    bool   `json:"late,omitempty"`    // time ran out
	Missing []int  `json:"missing,omitempty"` // ranks that have not come then
	Stopped []int  `json:"stopped,omitempty"` // ranks that have come and do not answer
	Kind    string `json:"kind,omitempty"`    // the caller's name for the kind of error
	Text    string `json:"text"`

	place int // Rank's place in the group, counted from 1; 0 if it has none
	by    int // By's place
}

func (f *Fault) Error() string {
	if f.By < 0 || f.By == f.Rank || kinds[f.Kind] != nil || f.Late && strings.HasPrefix(f.Text, rankText(f.By, f.By)) {
		return f.Text
	}
	return fmt.Sprintf("%s (noticed by %s)", f.Text, rankText(cmp.Or(f.by, f.By+1)-1, f.By))
}

// rankText names a rank of a group, which is another one of the default group.
func rankText(rank, global int) string {
	if rank == global {
		return fmt.Sprintf("rank %d", rank)
	}
	return fmt.Sprintf("rank %d (global rank %d)", rank, global)
}

// Culprit returns the rank at fault as the group numbers it, -1 if it is unknown or no member.
func (f *Fault) Culprit() int { return f.place - 1 }

// Is makes a fault whose time ran out match the error of a deadline, and others that of their kind.
func (f *Fault) Is(target error) bool {
	return f.Late && (target == context.DeadlineExceeded || target == store.ErrTimeout) || kinds[f.Kind] == target
}

func (r record) process() string { return fmt.Sprintf("pid %d on host %s", r.PID, r.Host) }

// twice is the fault of a rank with two processes.
func twice(first, second record) *Fault {
	return &Fault{Rank: first.Rank, By: first.Rank, Kind: kindTwice, Text: fmt.Sprintf(
		"rank %d was started twice: %s and %s; give each process a rank of its own, and each run a prefix of its own",
		first.Rank, first.process(), second.process())}
}

// differ is the fault of two ranks that cannot be in one run.
func differ(zero, r record) *Fault {
	return &Fault{Rank: r.Rank, By: r.Rank, Kind: kindDiffer, Text: fmt.Sprintf(
		"rank %d (%s) was started with a world of %d ranks, rank 0 (%s) with one of %d",
		r.Rank, r.process(), r.Size, zero.process(), zero.Size)}
}

// Error is the error of Meet. It unwraps to a context's or store's error, a *Fault, or one of this
// package's.
type Error struct {
	Rank, Size int
	After      time.Duration
	Missing    []int    // ranks that did not come, as far as this rank knows; ascending
	Seen       []string // what else is known of the first of Missing; may be empty
	Stopped    []int    // ranks that came and no longer answer
	Err        error
}

// mostNamed is how many missing ranks an error names.
const mostNamed = 8

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rendezvous: rank %d of %d: ", e.Rank, e.Size)
	for i, r := range e.Missing {
		if i == mostNamed {
			fmt.Fprintf(&b, "%d more ranks are missing; ", len(e.Missing)-i)
			break
		}
		fmt.Fprintf(&b, "rank %d has not called Init", r)
		if e.Timeout() {
			fmt.Fprintf(&b, " within %v", e.After.Round(time.Millisecond))
		}
		if i < len(e.Seen) && e.Seen[i] != "" {
			fmt.Fprintf(&b, " (%s)", e.Seen[i])
		}
		b.WriteString("; ")
	}
	for _, r := range e.Stopped[:min(len(e.Stopped), mostNamed)] {
		fmt.Fprintf(&b, "rank %d has called Init and does not answer: it has stopped, or its host is away; ", r)
	}
	s := strings.TrimSuffix(b.String(), "; ")
	if len(e.Missing)+len(e.Stopped) > 0 {
		s += ": "
	}
	return s + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Timeout reports whether time ran out. It is part of net.Error.
func (e *Error) Timeout() bool {
	return errors.Is(e.Err, context.DeadlineExceeded) || errors.Is(e.Err, store.ErrTimeout)
}

// Temporary is part of net.Error. It reports the same as Timeout.
func (e *Error) Temporary() bool { return e.Timeout() }
