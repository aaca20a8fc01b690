package trace

import (
	"cmp"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/work"
)

// Member describes a group and this rank's place in it.
type Member struct {
	Name        string // of the group; unique in a job, each epoch has another
	Description string
	Epoch       int
	Rank        int   // in the group
	Ranks       []int // the members' ranks in the default group, by rank in this group
	Numbers     []int // the members' numbers, by rank in this group: see pg.View.IDs; nil if these are Ranks
	Timeout     time.Duration

	Prompt bool // calls return soon, and are recorded when the backend has them: see backend.Prompt

	// Run is a name that all ranks of a run share and no other run has; "" if there is none, as with PyTorch ranks in the
	// job. Job is the launcher's name for the job, and Attempt how often the launcher has restarted it. Dumps have them.
	Run     string
	Job     string
	Attempt int

	// Logger gets a line if the dump of the failed group cannot be written. Nil means slog.Default().
	Logger *slog.Logger

	// Explain describes the backends. Probe asks their other ranks how far they are, for at most half
	// a second. Both may be nil. Probe may be called as long as the rank is in the group, and while it
	// leaves.
	Explain func() []backend.Explanation
	Probe   func() []backend.Probe
}

// Group is a group that a Recorder records.
type Group struct {
	Member
	ID     int         // numbers the recorder's groups from 0
	failed atomic.Bool // an operation has failed
	routes map[way][]route

	recorder    *Recorder
	prompt      bool   // Member's
	collectives uint64 // called so far, as messages; guarded by recorder.lock, as what follows
	messages    uint64
}

// way is an operation of a backend.
type way struct{ backend, op string }

// route is how an operation goes up to a size.
type route struct {
	upTo int64 // -1 for any
	text string
}

// Join begins to record a group. It returns nil if r is Off. Package pg calls it.
func (r *Recorder) Join(m Member) *Group {
	if r.options.Entries == 0 {
		return nil
	}
	if m.Numbers == nil {
		m.Numbers = m.Ranks
	}
	g := &Group{Member: m, recorder: r, prompt: m.Prompt, routes: make(map[way][]route)}
	var explained []backend.Explanation
	if m.Explain != nil {
		explained = m.Explain()
	}
	for _, e := range explained {
		var links []string
		for _, l := range e.Links {
			if !slices.Contains(links, l.Transport) {
				links = append(links, l.Transport)
			}
		}
		slices.Sort(links)
		by := cmp.Or(e.DeviceLink, strings.Join(links, "+"), "none") // none: a group of one rank
		for _, c := range e.Choices {
			w := way{e.Backend, c.Op}
			g.routes[w] = append(g.routes[w], route{c.UpTo, by + ": " + c.Algorithm})
		}
		g.routes[way{backend: e.Backend}] = []route{{-1, by}}
	}
	r.lock.Lock()
	defer r.lock.Unlock()
	if r.entries == nil {
		r.entries = make([]entry, r.options.Entries)
		if r.options.Stacks {
			r.stacks = make([]stack, r.options.Entries)
		}
	}
	g.ID = r.joined
	r.joined++
	r.groups = append(r.groups, g)
	return g
}

// Calls returns how many collectives, and how many sends and receives, this rank has called.
func (g *Group) Calls() (collectives, messages uint64) {
	g.recorder.lock.Lock()
	defer g.recorder.lock.Unlock()
	return g.collectives, g.messages
}

// Leave ends the recording of a group. What is recorded stays. It waits for a dump that is being written, as Settle does.
func (g *Group) Leave() {
	if g == nil {
		return
	}
	r := g.recorder
	r.lock.Lock()
	r.groups = slices.DeleteFunc(r.groups, func(x *Group) bool { return x == g })
	r.lock.Unlock()
	r.Settle()
}

// route returns how the group does an operation. See Operation.Route.
func (g *Group) route(backend string, op work.OpType, bytes int64) string {
	for _, r := range g.routes[way{backend, family(op)}] {
		if r.upTo < 0 || bytes <= r.upTo {
			return r.text
		}
	}
	if all := g.routes[way{backend: backend}]; len(all) > 0 {
		return all[0].text
	}
	return ""
}

// Label names the group in metrics: by its description, or by its name without the epoch if it has none. So new
// epochs begin no new series. It is valid UTF-8, which metrics need.
func (g *Group) Label() string {
	name, _, _ := strings.Cut(g.Name, "@")
	return strings.ToValidUTF8(cmp.Or(g.Description, name), "\uFFFD")
}

// Load is what the groups of one Label have under way.
type Load struct {
	Label   string
	Epoch   int           // of the newest group
	Pending int           // operations that have not ended
	Oldest  time.Duration // since the oldest of these was called
}

// Loads returns the load of each label, for metrics.
func (r *Recorder) Loads() []Load {
	var all []Load
	at := make(map[string]int)
	of := func(g *Group) *Load {
		label := g.Label()
		i, ok := at[label]
		if !ok {
			i = len(all)
			at[label], all = i, append(all, Load{Label: label})
		}
		return &all[i]
	}
	for _, g := range r.Groups() {
		of(g).Epoch = g.Epoch
	}
	for _, o := range r.Operations() {
		if o.Ended.IsZero() {
			l := of(o.Group)
			l.Pending++
			l.Oldest = max(l.Oldest, time.Since(o.Called))
		}
	}
	return all
}

// Recorder returns the recorder that records the group.
func (g *Group) Recorder() *Recorder { return g.recorder }

// family returns the operation whose algorithm op has.
func family(op work.OpType) string {
	switch op {
	case work.AllReduceCoalesced:
		op = work.AllReduce
	case work.AllGatherIntoTensor, work.AllGatherCoalesced:
		op = work.AllGather
	case work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced:
		op = work.ReduceScatter
	case work.AllToAllSingle:
		op = work.AllToAll
	}
	return op.String()
}
