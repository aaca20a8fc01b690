package faults

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/script"
)

// Fault is what happens.
type Fault string

const (
	Kill     Fault = "SIGKILL"
	Stop     Fault = "SIGSTOP"
	Panic    Fault = "panic"
	Exit     Fault = "exit without Close"
	Cancel   Fault = "cancelled context"
	Cut      Fault = "link cut"
	Vanish   Fault = "host vanished"
	Restart  Fault = "host restarted"
	SlowRank Fault = "slow rank"
	SlowLink Fault = "slow link"
	Store    Fault = "store dead"
)

// Faults are all faults, in the order of the table.
var Faults = []Fault{Kill, Stop, Panic, Exit, Cancel, Cut, Vanish, Restart, SlowRank, SlowLink, Store}

// onNetwork reports whether the fault needs a network between the ranks.
func (f Fault) onNetwork() bool {
	return slices.Contains([]Fault{Cut, Vanish, Restart, SlowRank, SlowLink}, f)
}

// isSlow reports whether the fault shows only where much data move.
func (f Fault) isSlow() bool { return f == SlowRank || f == SlowLink }

// Timeout returns the timeout of operations. Some faults show when it ends. The others show before,
// with a timeout that is long enough for the 15 s after which TCP gives a host up.
func (f Fault) Timeout() time.Duration {
	if f == Stop || f == Cut || f.isSlow() {
		return 2 * time.Second
	}
	return 30 * time.Second
}

// Wire is what carries the messages.
type Wire string

const (
	Memory Wire = "shared memory"
	TCP    Wire = "native TCP"
	Gloo   Wire = "Gloo's wire"
	Torch  Wire = "PyTorch gloo" // PyTorch's ranks, over Gloo's wire
)

// Wires are all wires, in the order of the table.
var Wires = []Wire{Memory, TCP, Gloo, Torch}

// Operations are the operations of the table. A rank also sends to the next rank and receives from
// the one before (send_recv).
var Operations = []string{"all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all_single", "send_recv", "barrier", monitored}

// monitored is the operation that no script has.
const monitored = "monitored_barrier"

// Case is one fault under one script.
type Case struct {
	Fault  Fault
	Wire   Wire
	Op     string // the operation of Lines, for the record
	Lines  []script.Line
	Hosts  []int // the host of each rank
	Detail bool
	Victim int           // rank, or the lower end of the link
	Other  int           // the higher end
	After  time.Duration // from the start of the script to the fault
	GoOn   bool          // the survivors reconfigure their group, if they are a majority
}

// hosts puts each of size ranks on a host of its own, or all on one.
func hosts(w Wire, size int) []int {
	all := make([]int, size)
	for r := range all {
		if w != Memory {
			all[r] = r
		}
	}
	return all
}

// tooSlow stands for a rank that blames nobody and shows the answers of the others.
const tooSlow = "nobody: too slow"

// Culprits returns what ranks may blame. Without any, the job has to go on.
func (c *Case) Culprits() (names []string) {
	on := func(host int) (ranks []int) {
		for r, h := range c.Hosts {
			if h == host {
				ranks = append(ranks, r)
			}
		}
		return ranks
	}
	here, there := on(c.Hosts[c.Victim]), on(c.Hosts[c.Other])
	switch c.Fault {
	case Store:
	case SlowRank, SlowLink:
		names = []string{tooSlow}
	case Cut:
		for _, a := range here {
			for _, b := range there {
				names = append(names, link(a, b))
			}
		}
	case Vanish, Restart: // of the whole host
		for _, a := range here {
			names = append(names, rank(a))
		}
	default:
		names = []string{rank(c.Victim)}
	}
	return names
}

func rank(r int) string    { return fmt.Sprintf("rank %d", r) }
func link(a, b int) string { return fmt.Sprintf("link between %d and %d", min(a, b), max(a, b)) }

func (c *Case) String() string {
	s := fmt.Sprintf("%s, %s, %s, hosts %v", c.Fault, c.Wire, c.Op, c.Hosts)
	if c.Detail {
		s += ", DETAIL"
	}
	return fmt.Sprintf("%s: %s after %v", s, strings.Join(c.Culprits(), " or "), c.After.Round(time.Millisecond))
}

// Record is what became of a Case.
type Record struct {
	Fault     Fault    `json:"fault"`
	Wire      Wire     `json:"wire"`
	Op        string   `json:"op"`
	Ranks     int      `json:"ranks"`
	Timeout   float64  `json:"timeout_s"`
	Survivors int      `json:"survivors"`
	Named     int      `json:"named"`            // survivors that blame the culprit; of a dead store, those that go on
	Seconds   float64  `json:"seconds"`          // from the fault to the last survivor's error
	Blames    []string `json:"blames,omitempty"` // what else survivors blame
	Nobody    int      `json:"nobody,omitempty"` // survivors whose errors blame nobody
	Says      string   `json:"says,omitempty"`   // an error
	Rest      int      `json:"rest,omitempty"`   // survivors that reconfigure
	Back      int      `json:"back,omitempty"`   // of them, those that complete an all_reduce then
	NotBack   []string `json:"not_back,omitempty"`
	Wrong     []string `json:"wrong,omitempty"` // results that were wrong
	Left      []string `json:"left,omitempty"`  // what ranks left behind
	Hangs     []int    `json:"hangs,omitempty"` // ranks without an error long after the fault

	Logs []string `json:"logs,omitempty"` // of all ranks, if one blames anything but the culprit

	BackSeconds float64 `json:"back_s,omitempty"` // from the fault to the end of that all_reduce on the last of them
}

// Problems returns what must not happen: a wrong verdict, wrong data, a hang, a leak.
func (r *Record) Problems() (all []string) {
	for _, b := range r.Blames {
		all = append(all, "wrong verdict: "+b)
	}
	if r.Nobody > 0 {
		all = append(all, fmt.Sprintf("%d ranks blame nobody: %s", r.Nobody, r.Says))
	}
	all = slices.Concat(all, r.NotBack, r.Wrong, r.Left)
	for _, rank := range r.Hangs {
		all = append(all, fmt.Sprintf("rank %d hangs", rank))
	}
	return all
}
