package faults

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Change is a call of Reconfigure by one process of a Trial.
type Change struct {
	Begun  time.Time `json:"begun"`
	Ended  time.Time `json:"ended"`
	Error  string    `json:"error,omitempty"`
	During During    `json:"during,omitempty"`
}

// During is what happened during a Change.
type During string

const (
	Undisturbed During = ""
	FaultCame   During = "a fault"
	Silence     During = "a process that stood still" // stopped before the Change, or in it
)

// span is a time.
type span struct{ from, to time.Time }

func (s span) meets(c *Change) bool { return !s.from.After(c.Ended) && !s.to.Before(c.Begun) }

func (c *Change) took() time.Duration { return c.Ended.Sub(c.Begun) }

// changed notes the changes of a process, and which of them took too long.
func (x *trial) changed(r *trialRank, c *Change, faults, silences []span) {
	meets := func(s span) bool { return s.meets(c) }
	limit := x.Within
	switch {
	case slices.ContainsFunc(faults, meets):
		c.During, limit = FaultCame, 0
	case slices.ContainsFunc(silences, meets):
		c.During, limit = Silence, limit+comeIn
	}
	x.out.Changes = append(x.out.Changes, *c)
	if x.Within > 0 && limit > 0 && c.took() > limit {
		x.problem("process %d reconfigured for %v, from %s on, with the error %q; meanwhile: %s",
			r.name, c.took().Round(time.Millisecond), c.Begun.Format(clock), c.Error, cmp.Or(string(c.During), "nothing"))
	}
}

// clock shows a moment of a trial.
const clock = "15:04:05.000"

// ChangesTable returns a Markdown table of how long Reconfigure took in trials.
func ChangesTable(all []*Outcome) string {
	var b strings.Builder
	b.WriteString("| store | meanwhile | calls | median | 99 of 100 within | longest |\n|---|---|---|---|---|---|\n")
	for _, store := range StoreKinds {
		for _, during := range []During{Undisturbed, Silence, FaultCame} {
			var took []time.Duration
			for _, x := range all {
				for _, c := range x.Changes {
					if x.Store == store && c.During == during {
						took = append(took, c.took())
					}
				}
			}
			if len(took) == 0 {
				continue
			}
			slices.Sort(took)
			at := func(n, of int) time.Duration { return took[min(len(took)*n/of, len(took)-1)].Round(time.Millisecond) }
			fmt.Fprintf(&b, "| %s | %s | %d | %v | %v | %v |\n", store, cmp.Or(string(during), "nothing"), len(took), at(1, 2), at(99, 100), at(1, 1))
		}
	}
	return b.String()
}
