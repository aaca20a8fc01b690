package agent

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/launch"
)

// States of a rank that had not ended when the launcher ended the job.
const (
	stateRunning = "running"
	stateStopped = "stopped" // by SIGSTOP or a terminal
	stateUnknown = "unknown" // the agent of its node has not reported
)

// blaming finds the rank that a line of an error names as the one at fault. It knows the
// errors of this library and of PyTorch's monitored barrier.
var blaming = regexp.MustCompile(`\b[Rr]ank (\d+)\b(?: \(global rank (\d+)\))?[^:;,\n]{0,60}?\b(?:died|left|panicked|crashed|ended|stopped|aborted|cancelled|did not|has not|sent (?:a message|bytes)|published no|failed to pass monitoredBarrier)\b`)

// subgroup finds the group of a failed operation. Ranks in the errors of groups other than
// the default group have other numbers, and their global ranks behind these.
var subgroup = regexp.MustCompile(`of group "([^"]*)"`)

// cutOff finds errors of a rank that lost another rank and does not know which.
var cutOff = regexp.MustCompile(`(?i)connection (?:closed|reset) by peer|broken pipe|timed out waiting|socket timeout|some rank `)

// waitingLine finds the lines that internal/waiting logs while a rank waits. They name ranks that
// may come later, and are no reason for an end.
var waitingLine = regexp.MustCompile(`\bc10d: .*\bwaited\b`)

// evidence is the reason of a rank's end, as far as it is known.
type evidence struct {
	peer   int  // the rank that it names; -1 if none
	noted  bool // by its group, not found in its output
	victim bool // it failed because of another rank, known or not
}

// evidenceOf reads the note of the rank's group, or else the rank's output.
func evidenceOf(f *Failure, size int) evidence {
	within := func(r int) bool { return r >= 0 && r < size }
	if b := f.Blames; b != nil {
		if within(b.Peer) {
			return evidence{peer: b.Peer, noted: true, victim: b.Peer != f.Rank}
		}
		return evidence{peer: -1, noted: true, victim: true}
	}
	for _, line := range f.reasons() {
		if m := blaming.FindStringSubmatch(line); m != nil {
			if g := subgroup.FindStringSubmatch(line); m[2] == "" && g != nil && g[1] != "0" {
				return evidence{peer: -1, victim: true}
			}
			if r, err := strconv.Atoi(cmp.Or(m[2], m[1])); err == nil && within(r) {
				return evidence{peer: r, victim: r != f.Rank}
			}
		}
		if cutOff.MatchString(line) {
			return evidence{peer: -1, victim: true}
		}
	}
	return evidence{peer: -1}
}

// reasons are the lines that may say why a rank failed, the most telling first: its
// panic, its error file, its last words.
func (f *Failure) reasons() []string {
	var all []string
	if len(f.Crash) > 0 {
		for _, line := range f.Crash {
			if strings.HasPrefix(line, "goroutine ") {
				break // calls follow
			}
			all = append(all, line)
		}
		return append(all, strings.Split(f.Message, "\n")...)
	}
	all = strings.Split(f.Message, "\n")
	const lastWords = 5
	for _, line := range slices.Backward(f.Stderr) {
		if len(all) > lastWords {
			break
		}
		if strings.TrimSpace(line) != "" && !waitingLine.MatchString(line) {
			all = append(all, line)
		}
	}
	return all
}

// suspect is a rank that may be the one at fault.
type suspect struct {
	*Failure
	cut     bool  // it lost an unknown rank
	noted   bool  // groups name it
	namedBy []int // the ranks that failed because of it, by what they say
}

// judge finds the rank at fault. From each rank that failed it goes to the rank that this
// one names, and on until a rank names no other. These are the suspects. The rules to
// choose one of them, the most important first:
//
//  1. a rank that did not lose an unknown rank
//  2. a rank that groups noted as the reason of their failure
//  3. a rank with a signal, a panic or a traceback
//  4. the rank that most others name
//  5. the rank that ended first
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
		e := evidenceOf(f, size)
		if !e.victim || e.peer < 0 {
			s := at(f.Rank)
			s.cut = e.victim
			s.noted = s.noted || e.noted && !e.victim
			continue
		}
		s := at(follow(known, f.Rank, size))
		s.namedBy = append(s.namedBy, f.Rank)
		s.noted = s.noted || e.noted
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
	var said *Failure
	for _, r := range f.NamedBy {
		if o := known[r]; evidenceOf(o, size).peer == f.Rank && (said == nil || o.noticed().Before(said.noticed())) {
			said = o
		}
	}
	if said != nil {
		f.Said = said.said()
	}
	return &f
}

// follow goes from a rank to the rank that it names, and so on, and returns the last one. If
// ranks name each other in a circle, it returns the one that the first rank names.
func follow(known map[int]*Failure, rank, size int) int {
	seen := map[int]bool{rank: true}
	next := evidenceOf(known[rank], size).peer
	for at := next; ; {
		f := known[at]
		if f == nil || !f.failed() {
			return at
		}
		e := evidenceOf(f, size)
		if !e.victim || e.peer < 0 {
			return at
		}
		if seen[e.peer] {
			return next
		}
		seen[at] = true
		at = e.peer
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

// violent reports whether a rank ended by a signal, a panic or a traceback.
func (f *Failure) violent() bool { return f.Signal != "" || len(f.Crash) > 0 && f.failed() }

// noticed returns the time when the rank failed because of another one.
func (f *Failure) noticed() time.Time {
	if f.Blames != nil {
		return f.Blames.Time
	}
	return f.Time
}

// said returns the line in which a rank names another one.
func (f *Failure) said() string {
	if f.Blames != nil {
		return f.Blames.Message
	}
	for _, line := range f.reasons() {
		if blaming.MatchString(line) {
			return line
		}
	}
	return ""
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
