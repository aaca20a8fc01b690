package membership

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// ID is a member's number. It stays the same in all epochs.
type ID int

// View says who is in an epoch.
type View struct {
	Epoch int  `json:"epoch"`
	IDs   []ID `json:"ids"` // by rank

	// First is the number of members in epoch 0: the first joiner has this id.
	First int `json:"first"`

	// MinDone is the least number of collectives that a member of the epoch before has completed,
	// MaxDone the largest. They count from the beginning of that epoch. Members that are gone are
	// not counted.
	MinDone uint64 `json:"min_done"`
	MaxDone uint64 `json:"max_done"`

	// Left are the members of the epoch before that are not in this one.
	Left []Absent `json:"left,omitempty"`

	// Short is not nil if too few members were there. IDs are then those of the epoch before.
	Short *Short `json:"short,omitempty"`

	// Joiners have the ids from First up to First+Joiners-1. Pending are those not yet taken in.
	Joiners int  `json:"joiners,omitempty"`
	Pending []ID `json:"pending,omitempty"`
}

// Absent is a member that is not in a view.
type Absent struct {
	ID  ID     `json:"id"`
	Why string `json:"why"`
}

func (a Absent) String() string { return fmt.Sprintf("member %d: %s", a.ID, a.Why) }

// Short says why an epoch has too few members.
type Short struct {
	Present []ID `json:"present"` // members and joiners that were there
	Need    int  `json:"need"`
}

// First returns the view of epoch 0, which no store has.
func First(size int) View {
	v := View{First: size, IDs: make([]ID, size)}
	for i := range v.IDs {
		v.IDs[i] = ID(i)
	}
	return v
}

// Has reports whether a member is in the view.
func (v *View) Has(id ID) bool { return slices.Contains(v.IDs, id) }

// ErrEvicted is matched by the error of a member that is not in the next epoch.
var ErrEvicted = errors.New("evicted from the group")

// EvictedError is the error of a member that the view leaves out.
type EvictedError struct {
	Self ID
	View View
}

func (e *EvictedError) Error() string {
	why := "it is not among the members"
	for _, a := range e.View.Left {
		if a.ID == e.Self {
			why = a.Why
		}
	}
	return fmt.Sprintf("member %d was %v in epoch %d: %s", e.Self, ErrEvicted, e.View.Epoch, why)
}

// Unwrap returns ErrEvicted.
func (e *EvictedError) Unwrap() error { return ErrEvicted }

// ErrNoMembers is matched by the error of a process that waits to join a group whose members have all ended.
var ErrNoMembers = errors.New("no member is left: all have died, or have left the group")

// ErrTooFew is matched by the error of members that are too few for the next epoch.
var ErrTooFew = errors.New("too few members")

// ShortError is the error of members that are too few. They may call Decide again, with View as
// the base.
type ShortError struct{ View View }

func (e *ShortError) Error() string {
	missing := make([]string, len(e.View.Left))
	for i, a := range e.View.Left {
		missing[i] = a.String()
	}
	said := fmt.Sprintf("%v for epoch %d: %d of at least %d", ErrTooFew, e.View.Epoch, len(e.View.Short.Present), e.View.Short.Need)
	if len(missing) == 0 {
		return said + "; no newcomer waits"
	}
	return said + "; missing: " + strings.Join(missing, "; ")
}

// Unwrap returns ErrTooFew.
func (e *ShortError) Unwrap() error { return ErrTooFew }

// vote is what a member writes.
type vote struct {
	Done     uint64        `json:"done"`
	Suspects []ID          `json:"suspects,omitempty"`
	Settle   time.Duration `json:"settle,omitempty"`
	Cause    string        `json:"cause,omitempty"`
	Lacks    []ID          `json:"lacks,omitempty"`
	Min      int           `json:"min,omitempty"`
	Max      int           `json:"max,omitempty"`
}

const (
	// gone is the vote, or the application, of a member that has left or died. One that gave up adds why; it may vote again.
	gone   = "gone"
	gaveUp = gone + ": it gave up: "

	// waiting is the application of a joiner, and its answer to a leader that asks.
	waiting = "waiting"
	asks    = "?"
)

// A will with the vote has to fit into 4 KiB: maxCause bounds the text in it, mostLacks the members that it lacks.
const (
	maxCause  = 512
	mostLacks = 256
)

func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // numbers and strings
	}
	return string(b)
}

// hasEnded reports whether a vote or an application is that of a process that has ended, or has given up.
func hasEnded(vote string) bool { return vote == gone || strings.HasPrefix(vote, gaveUp) }

// brief makes a text short, and one line.
func brief(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.ToValidUTF8(text[:min(len(text), maxCause)], "")
}

func voteKey(epoch int, id ID) string { return fmt.Sprintf("vote/%d/%d", epoch, id) }
func leadKey(epoch int) string        { return fmt.Sprintf("lead/%d", epoch) }
func viewKey(epoch int) string        { return fmt.Sprintf("%s%d", viewPrefix, epoch) }
func joinKey(id ID) string            { return fmt.Sprintf("join/%d", id) }

// callKey wakes joiners: a leader asks who waits, or has written a view.
func callKey(epoch int) string { return fmt.Sprintf("call/%d", epoch) }

func answerKey(epoch int, id ID) string { return fmt.Sprintf("join/%d/%d", id, epoch) }

const (
	viewPrefix = "view/"
	joinersKey = "joiners" // how many ids were given to joiners
	latestKey  = "latest"  // an epoch that has a view; there may be later ones
)

func parseView(text string, epoch int) (v View, err error) {
	if err := json.Unmarshal([]byte(text), &v); err != nil || v.Epoch != epoch || len(v.IDs) == 0 {
		return v, fmt.Errorf("membership: key %q holds %.80q, which is no view of epoch %d", viewKey(epoch), text, epoch)
	}
	return v, nil
}
