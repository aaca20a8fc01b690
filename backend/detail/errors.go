package detail

import (
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/work"
)

// MismatchError is the error of calls that differ. Every rank of the group gets one. Nothing of
// the operation was sent, no byte changed, and the group can be used on. errors.Is finds
// work.ErrMismatch.
type MismatchError struct {
	work.Info             // the call on this rank
	Own       Fingerprint // what was said of it
	Others    []Call      // the calls of ranks that differ, by their first rank
}

// Call is a call that differs, and its ranks.
type Call struct {
	Ranks       []int
	Fingerprint Fingerprint
	Known       bool   // Fingerprint is what they said
	What        string // in words
}

// Peer returns the first rank whose call differs.
func (e *MismatchError) Peer() int { return e.Others[0].Ranks[0] }

func (e *MismatchError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "detail: %v: %s", work.ErrMismatch, e.Names.Rank(e.Rank))
	if e.Group != "" {
		b.WriteString(" of " + e.Names.Group(e.Group))
	}
	fmt.Fprintf(&b, " calls %v", e.Own)
	number := false
	for _, c := range e.Others {
		number = number || c.Known && c.Fingerprint.Seq != e.Own.Seq
	}
	if number {
		fmt.Fprintf(&b, " as operation %d", e.Own.Seq)
	}
	for i, c := range e.Others {
		sep := ", but "
		if i > 0 {
			sep = "; "
		}
		fmt.Fprintf(&b, "%s%s %s", sep, e.Names.Say(e.Group, ranks(c.Ranks)), c.What)
		if number && c.Known {
			fmt.Fprintf(&b, " as operation %d", c.Fingerprint.Seq)
		}
	}
	if number && e.onlyNumbers() {
		b.WriteString("; PyTorch counts sends and receives as well, which must then be as many on every rank")
	}
	return b.String()
}

// onlyNumbers reports whether the calls differ only in their sequence numbers.
func (e *MismatchError) onlyNumbers() bool {
	for _, c := range e.Others {
		if !c.Known || c.Fingerprint.String() != e.Own.String() {
			return false
		}
	}
	return true
}

// Unwrap makes errors.Is(err, work.ErrMismatch) hold.
func (e *MismatchError) Unwrap() error { return work.ErrMismatch }

// ranks is "rank 2 calls" or "ranks 1, 2 call". Long lists are cut.
func ranks(rs []int) string {
	if len(rs) == 1 {
		return fmt.Sprintf("rank %d calls", rs[0])
	}
	const show = 8
	var b strings.Builder
	b.WriteString("ranks ")
	for i, r := range rs[:min(len(rs), show)] {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprint(&b, r)
	}
	if len(rs) > show {
		fmt.Fprintf(&b, " and %d more", len(rs)-show)
	}
	return b.String() + " call"
}
