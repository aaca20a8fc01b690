package pg

import (
	"errors"
	"time"

	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/membership"
	"github.com/c10d-go/c10d/work"
)

// Errors that errors.Is finds.
var (
	ErrNotMember     = errors.New("pg: this rank is not a member of the group")
	ErrClosed        = work.ErrClosed          // the group was closed on this rank
	ErrNoLauncher    = launch.ErrNone          // Init has no launcher, rank and size
	ErrDuplicateRank = meet.ErrTwice           // two processes were started as one rank
	ErrSizeMismatch  = meet.ErrDiffer          // ranks were started with different sizes, or rank 0 no longer waits
	ErrStaleKeys     = meet.ErrStale           // the store has PyTorch's keys of an earlier run
	ErrEvicted       = membership.ErrEvicted   // the next epoch leaves this rank out: close the group, or Join a later one
	ErrTooFew        = membership.ErrTooFew    // fewer than Min members are there: Reconfigure may be called again
	ErrNoMembers     = membership.ErrNoMembers // all members of the group that Join waits for have ended
	ErrGroupMismatch = errors.New("ranks called NewGroup or SplitRanks with different lists of ranks")
)

// MeetingError says why the ranks of a job did not meet in the store.
type MeetingError struct {
	Rank, Size int
	After      time.Duration
	Missing    []int    // ranks that did not come, as far as this rank knows; ascending
	Seen       []string // what else is known of the first of Missing; may be empty
	Stopped    []int    // ranks that came and no longer answer
	Err        error    // of a context or a store, or one of the package's
}

func (e *MeetingError) Error() string { return (*meet.Error)(e).Error() }

// Unwrap returns the cause.
func (e *MeetingError) Unwrap() error { return e.Err }

// Timeout reports whether time ran out.
func (e *MeetingError) Timeout() bool { return (*meet.Error)(e).Timeout() }

// GroupFault says why a group could not be made, by the first rank that failed. Ranks are those of the default group.
type GroupFault struct {
	Rank int    // the rank at fault, -1 if it is not known
	By   int    // the rank that says so, -1 if the store does
	Gone bool   // Rank's connection to the store has ended
	Late bool   // time ran out: the error matches context.DeadlineExceeded
	Text string // why

	text string // with the rank that noticed it
}

func (f *GroupFault) Error() string { return f.text }

// unmade is the error of a call that made no group, for the program: it finds the public types in it.
type unmade struct{ error }

func (u unmade) Unwrap() error { return u.error }

// As finds the public form of an internal error.
func (u unmade) As(target any) bool {
	switch to := target.(type) {
	case **MeetingError:
		var e *meet.Error
		if errors.As(u.error, &e) {
			*to = (*MeetingError)(e)
			return true
		}
	case **GroupFault:
		var f *meet.Fault
		if errors.As(u.error, &f) {
			*to = &GroupFault{Rank: f.Rank, By: f.By, Gone: f.Gone, Late: f.Late, Text: f.Text, text: f.Error()}
			return true
		}
	}
	return false
}

// public returns err for the program.
func public(err error) error {
	if err == nil {
		return nil
	}
	return unmade{err}
}
