package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend/gloo"
)

// Trial is a job that goes on after every fault. Its ranks are processes on this host. They run
// random operations, check each result, and reconfigure their group after each error.
type Trial struct {
	Wire   Wire
	Store  StoreKind
	Seed   uint64
	Ranks  int // at the beginning
	Detail bool
	Soak   bool // rank 0 lives as long as the job, and all say what they use
	Events []Event
	Within time.Duration // a Reconfigure may take so long, if no fault comes meanwhile; 0 means any time
}

// Event is something that happens in a Trial.
type Event struct {
	Fault Fault
	After time.Duration // since the event before
	Pick  int           // chooses the process among those that it can happen to
}

// Events that are no faults of a Case.
const (
	Newcomer Fault = "newcomer"
	Resume   Fault = "SIGCONT" // of the process that has stopped
)

const (
	// trialTimeout is the timeout of a trial's operations.
	trialTimeout = 2 * time.Second

	// leastRanks are not killed: with two of them all operations have a peer.
	leastRanks = 2

	// trialLimit is how long after the last event a trial hangs.
	trialLimit = 90 * time.Second
)

// RandomTrial draws a trial on a wire and a store. One seed always gives the same trial.
func RandomTrial(w Wire, s StoreKind, seed uint64) Trial {
	r := rand.New(rand.NewPCG(seed, 2))
	t := Trial{Wire: w, Store: s, Seed: seed, Ranks: 3 + r.IntN(3), Detail: r.IntN(4) == 0}
	kinds := []Fault{Kill, Stop, Panic, Exit, Cancel, Newcomer}
	for range 3 + r.IntN(3) {
		e := Event{Fault: kinds[r.IntN(len(kinds))], After: time.Duration(r.IntN(600)) * time.Millisecond, Pick: r.IntN(1 << 16)}
		t.Events = append(t.Events, e)
		if e.Fault == Stop { // it comes back before its time is over, or too late
			t.Events = append(t.Events, Event{Fault: Resume, After: time.Duration(r.IntN(5000)) * time.Millisecond})
		}
	}
	return t
}

func (t *Trial) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, %s, %s store, %d ranks", t.Seed, t.Wire, t.Store, t.Ranks)
	if t.Detail {
		b.WriteString(", DETAIL")
	}
	b.WriteString(":")
	for _, e := range t.Events {
		fmt.Fprintf(&b, " %v %s,", e.After, e.Fault)
	}
	return strings.TrimSuffix(b.String(), ",")
}

// said is a line of a rank of a Trial.
type said struct {
	Epoch   int64   `json:"epoch"`
	Members []int64 `json:"members,omitempty"` // their names, by rank: the rank works in this epoch
	Wrong   string  `json:"wrong,omitempty"`   // a result
	Ends    string  `json:"ends,omitempty"`    // why the rank cannot go on
	Done    bool    `json:"done,omitempty"`    // it has ended as it was told
	Left    string  `json:"left,omitempty"`    // what it left behind
	Use     *Use    `json:"use,omitempty"`     // at the beginning of the epoch, in a soak
	Change  *Change `json:"change,omitempty"`  // how the epoch before ended
}

// Outcome is what became of a Trial.
type Outcome struct {
	Wire     Wire      `json:"wire"`
	Store    StoreKind `json:"store"`
	Seed     uint64    `json:"seed"`
	Epochs   int       `json:"epochs"`
	Changes  []Change  `json:"changes,omitempty"` // of all processes
	Problems []string  `json:"problems,omitempty"`

	// Of a soak:
	Happened map[Fault]int `json:"happened,omitempty"`
	Uses     []Use         `json:"uses,omitempty"` // of rank 0, epoch after epoch
}

// trial is a Trial that runs.
type trial struct {
	*Trial
	url     string // of the store
	out     *Outcome
	live    []*trialRank // that are to say that they are done
	stopped *trialRank
	silent  []span // when a process stood still; the last one may not have ended
	names   int
	views   map[int64][]int64
}

type trialRank struct {
	*process
	name  int
	works chan struct{} // closed with its first line
	done  chan struct{} // closed at the end of its output; then the rest is set
	said  []said
	err   error
	ends  span // from its fault to its end
}

// Run runs a trial. The error says why it could not be tried.
func (t *Trial) Run(ctx context.Context) (*Outcome, error) {
	url, stop, err := t.Store.serve(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	x := &trial{Trial: t, url: url, out: &Outcome{Wire: t.Wire, Store: t.Store, Seed: t.Seed, Happened: make(map[Fault]int)}, views: make(map[int64][]int64)}
	var all []*trialRank
	defer func() {
		for _, r := range all {
			r.cmd.Process.Kill()
			<-r.done
			r.cmd.Wait()
		}
	}()
	begin := func() error {
		r, err := x.start()
		if err == nil {
			all = append(all, r)
		}
		return err
	}
	for range t.Ranks {
		if err := begin(); err != nil {
			return nil, err
		}
	}
	for _, r := range all {
		select {
		case <-r.works:
		case <-r.done:
			return nil, fmt.Errorf("process %d has ended before the first fault: %v", r.name, r.said)
		case <-time.After(startIn):
			return nil, fmt.Errorf("process %d before the first fault: %w", r.name, errHangs)
		}
	}
	for _, e := range t.Events {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(e.After):
		}
		if e.Fault == Newcomer {
			x.out.Happened[Newcomer]++
			err = begin()
		} else {
			err = x.happen(e)
		}
		if err != nil {
			return nil, err
		}
	}
	x.end()
	var faults []span
	for _, r := range all {
		if x.judge(r); !r.ends.from.IsZero() {
			faults = append(faults, r.ends)
		}
	}
	for _, s := range x.silent {
		faults = append(faults, span{s.to, s.to})
	}
	for _, r := range all {
		for _, s := range r.said {
			if s.Change != nil {
				x.changed(r, s.Change, faults, x.silent)
			}
		}
	}
	x.out.Epochs = len(x.views)
	return x.out, nil
}

// start starts a process. Those after the first Ranks join.
func (x *trial) start() (*trialRank, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	how := role{Job: x.url, Name: x.names, Ranks: x.Ranks, Detail: x.Detail, Timeout: trialTimeout, Soak: x.Soak}
	switch x.Wire {
	case Memory:
		how.Wire = gloo.WireNative
	case TCP:
		how.Wire = gloo.WireTCP
	default:
		how.Wire = gloo.WireGloo
	}
	p, err := start(exec.Command(self, "faults"), how, "GLOO_SOCKET_IFNAME=lo")
	if err != nil {
		return nil, err
	}
	r := &trialRank{process: p, name: x.names, works: make(chan struct{}), done: make(chan struct{})}
	go r.listen()
	x.names++
	x.live = append(x.live, r)
	return r, nil
}

// listen notes what a rank says.
func (r *trialRank) listen() {
	defer close(r.done)
	defer func() { r.ends.to = time.Now() }()
	for line := range r.lines {
		var s said
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			r.err = fmt.Errorf("process %d says %q: %w", r.name, line, err)
			continue
		}
		if r.said = append(r.said, s); len(r.said) == 1 {
			close(r.works)
		}
	}
}

// happen makes an event happen.
func (x *trial) happen(e Event) error {
	if e.Fault == Resume {
		return x.resume()
	}
	able := slices.DeleteFunc(slices.Clone(x.live), func(r *trialRank) bool { return r == x.stopped })
	if e.Fault != Cancel && len(able) <= leastRanks || e.Fault == Stop && x.stopped != nil {
		return nil
	}
	if x.Soak && e.Fault != Stop && e.Fault != Cancel {
		able = slices.DeleteFunc(able, func(r *trialRank) bool { return r.name == 0 })
	}
	victim := able[e.Pick%len(able)]
	x.out.Happened[e.Fault]++
	switch e.Fault {
	case Stop:
		x.stopped = victim
		x.silent = append(x.silent, span{from: time.Now()})
		return victim.signal("STOP")
	case Kill:
		x.bury(victim)
		return victim.cmd.Process.Kill()
	case Cancel:
		fmt.Fprintln(victim.in, cmdCancel)
	case Panic:
		x.bury(victim)
		fmt.Fprintln(victim.in, cmdPanic)
	case Exit:
		x.bury(victim)
		fmt.Fprintln(victim.in, cmdExit)
	}
	return nil
}

// resume lets the process go on that has stopped, if there is one.
func (x *trial) resume() error {
	r := x.stopped
	if r == nil {
		return nil
	}
	x.stopped = nil
	x.silent[len(x.silent)-1].to = time.Now()
	return r.signal("CONT")
}

// bury forgets a rank that ends.
func (x *trial) bury(victim *trialRank) {
	victim.ends.from = time.Now()
	x.live = slices.DeleteFunc(x.live, func(r *trialRank) bool { return r == victim })
}

// end tells the ranks to end, and waits for them.
func (x *trial) end() {
	if err := x.resume(); err != nil {
		x.problem("the process that has stopped cannot go on: %v", err)
	}
	for _, r := range x.live {
		fmt.Fprintln(r.in, cmdEnd)
	}
	late, cancel := context.WithTimeout(context.Background(), trialLimit)
	defer cancel()
	for _, r := range x.live {
		select {
		case <-r.done:
		case <-late.Done():
			x.problem("process %d hangs", r.name)
		}
	}
}

func (x *trial) problem(format string, args ...any) {
	x.out.Problems = append(x.out.Problems, fmt.Sprintf(format, args...))
}

// judge checks what a rank has said.
func (x *trial) judge(r *trialRank) {
	r.cmd.Process.Kill()
	<-r.done
	r.cmd.Wait()
	if r.err != nil {
		x.problem("%v", r.err)
	}
	done := false
	for _, s := range r.said {
		switch have, ok := x.views[s.Epoch]; {
		case s.Members == nil:
		case !ok:
			x.views[s.Epoch] = s.Members
		case !slices.Equal(have, s.Members):
			x.problem("epoch %d has two views: %v, and %v on process %d", s.Epoch, have, s.Members, r.name)
		}
		if s.Wrong != "" {
			x.problem("process %d, epoch %d: %s", r.name, s.Epoch, s.Wrong)
		}
		if s.Ends != "" {
			x.problem("process %d, epoch %d, cannot go on: %s", r.name, s.Epoch, s.Ends)
		}
		if s.Left != "" {
			x.problem("process %d left %s", r.name, s.Left)
		}
		done = done || s.Done
		if s.Use != nil && r.name == 0 {
			x.out.Uses = append(x.out.Uses, *s.Use)
		}
	}
	if slices.Contains(x.live, r) && !done {
		x.problem("process %d has ended: %s", r.name, r.stderr)
	}
}
