package agent

import (
	"cmp"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/internal/launch"
)

// States of a rank that had not ended when the launcher ended the job.
const (
	stateRunning = "running"
	stateStopped = "stopped" // by SIGSTOP or a terminal
	stateUnknown = "unknown" // the agent of its node has not reported
)

// blames returns the rank that the group of f noted as the one at fault, -1 if its group did not know. A rank without
// a note, such as one of PyTorch, blames itself.
func (f *Failure) blames(size int) int {
	switch b := f.Blames; {
	case b == nil:
		return f.Rank
	case b.Peer < size:
		return b.Peer
	}
	return -1
}

// suspect is a rank that may be the one at fault.
type suspect struct {
	*Failure
	cut     bool  // it lost an unknown rank
	noted   bool  // groups name it
	namedBy []int // the ranks whose groups noted it, or a rank that failed because of it
}

// judge finds the rank at fault. From each rank that failed it goes to the rank that this
// one names, and on until a rank names no other. These are the suspects. The rules to
// choose one of them, the most important first:
//
//  1. a rank that did not lose an unknown rank
//  2. a rank that groups noted as the reason of their failure
//  3. a rank with a signal or a Go panic
//  4. the rank that most others name
//  5. the rank that ended first
//
// What ranks printed does not count: ranks of PyTorch note nothing, and the first of them to end is the one at fault.
//
// It returns nil if no rank has failed.
func judge(ranks []Failure, size int) *Failure {
	known := make(map[int]*Failure, len(ranks))
	for i := range ranks {
		known[ranks[i].Rank] = &ranks[i]
	}
	suspects := make(map[int]*suspect)
	at := func(r int) *suspect {
		s := suspects[r]
		if s == nil {
			f := known[r]
			if f == nil {
				f = &Failure{Rank: r, LocalRank: -1, State: stateUnknown}
			}
			s = &suspect{Failure: f}
			suspects[r] = s
		}
		return s
	}
	for i := range ranks {
		f := &ranks[i]
		if !f.failed() {
			continue
		}
		if f.blames(size) < 0 {
			at(f.Rank).cut = true
			continue
		}
		s := at(follow(known, f.Rank, size))
		s.noted = s.noted || f.Blames != nil
		if s.Rank != f.Rank {
			s.namedBy = append(s.namedBy, f.Rank)
		}
	}
	var first *suspect
	for _, s := range suspects {
		if first == nil || s.before(first) {
			first = s
		}
	}
	if first == nil {
		return nil
	}
	f := *first.Failure
	slices.Sort(first.namedBy)
	f.NamedBy = first.namedBy
	var said *launch.Blame
	for _, r := range f.NamedBy {
		if b := known[r].Blames; b.Peer == f.Rank && (said == nil || b.Time.Before(said.Time)) {
			said, f.Said = b, b.Message
		}
	}
	return &f
}

// follow goes from a rank to the rank that it names, and so on, and returns the last one. If
// ranks name each other in a circle, it returns the one that the first rank names.
func follow(known map[int]*Failure, rank, size int) int {
	seen := map[int]bool{rank: true}
	for at := rank; ; {
		f := known[at]
		if f == nil || !f.failed() {
			return at
		}
		next := f.blames(size)
		if next < 0 || next == at {
			return at
		}
		if seen[next] {
			return known[rank].blames(size)
		}
		seen[next] = true
		at = next
	}
}

func (s *suspect) before(o *suspect) bool {
	yes := func(a, b bool) int {
		switch {
		case a == b:
			return 0
		case a:
			return -1
		}
		return 1
	}
	return cmp.Or(
		yes(!s.cut, !o.cut),
		yes(s.noted, o.noted),
		yes(s.violent(), o.violent()),
		cmp.Compare(len(o.namedBy), len(s.namedBy)),
		yes(!s.Time.IsZero(), !o.Time.IsZero()),
		s.Time.Compare(o.Time),
		cmp.Compare(s.Rank, o.Rank),
	) < 0
}

// violent reports whether a rank ended by a signal or a Go panic. A traceback does not count: that is how every error
// of Python ends, also of ranks that lost another one.
func (f *Failure) violent() bool {
	return f.Signal != "" || len(f.Crash) > 0 && !strings.HasPrefix(f.Crash[0], traceback) && f.failed()
}

// failed reports whether the rank ended with an error.
func (f *Failure) failed() bool { return f.State == "" && f.ExitCode != 0 }

// readBlame returns what the rank's group noted, nil if nothing.
func readBlame(path string) *launch.Blame {
	b, err := launch.ReadBlame(path)
	if err != nil {
		return nil
	}
	return &b
}
