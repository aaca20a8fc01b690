package trace

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
)

// Job is the dumps of a job's ranks, merged.
type Job struct {
	Run      string     `json:"run,omitempty"`     // as File.Run
	Name     string     `json:"job,omitempty"`     // as File.Job
	Attempt  int        `json:"attempt,omitempty"` // as File.Attempt
	Ranks    []int      `json:"ranks"`             // that have a dump
	Missing  []int      `json:"missing,omitempty"` // members of groups without a dump
	Stuck    []Stuck    `json:"stuck,omitempty"`
	Messages []Message  `json:"messages,omitempty"` // sends and receives that have not ended, or have failed
	Late     []Late     `json:"late,omitempty"`     // the most expensive first
	Blame    []RankLate `json:"blame,omitempty"`
	Shifts   []Shift    `json:"shifts,omitempty"`

	said    string // the run, for people; "" if the dumps do not name it
	files   []*File
	members map[string][]int
	present map[string][]int // members with a dump, in order
	partial map[int]bool     // ranks whose dumps have lost operations
}

// Stuck is a collective that has not ended on some rank.
type Stuck struct {
	Group     string `json:"group"`
	Op        string `json:"op"`
	Number    int64  `json:"number"`               // of the collective in its group
	Waiting   []int  `json:"waiting,omitempty"`    // ranks that are in it or have failed in it
	NotCalled []int  `json:"not_called,omitempty"` // ranks that have not called it
	Lost      []int  `json:"lost,omitempty"`       // ranks whose dump does not have the call any more, if they have called it
	Differ    string `json:"differ,omitempty"`     // if ranks have called different operations or sizes
	Error     string `json:"error,omitempty"`      // of the first rank that has one
}

// Message is the sends or the receives of a rank with one peer that have not ended, or have failed.
type Message struct {
	Group string `json:"group"`
	Op    string `json:"op"` // such as "send 0->1", with ranks of the group
	Rank  int    `json:"rank"`
	Calls int    `json:"calls"`           // how many there are
	Error string `json:"error,omitempty"` // of the first one that has one
}

// Late is a collective that a rank called later than all others.
type Late struct {
	Group  string        `json:"group"`
	Op     string        `json:"op"`
	Number int64         `json:"number"`
	Rank   int           `json:"rank"`
	By     time.Duration `json:"by_ns"` // after the rank before it
}

// RankLate sums up how late a rank was.
type RankLate struct {
	Rank  int           `json:"rank"`
	Times int           `json:"times"` // how often it was last
	Total time.Duration `json:"total_ns"`
	Of    int           `json:"of"` // collectives that all its group has called
}

// Shift is what was added to the times of a rank, because its host's clock differs from rank
// Ranks[0]'s.
type Shift struct {
	Rank int           `json:"rank"`
	By   time.Duration `json:"by_ns"`
}

type callKey struct {
	group  string
	number int64
}

// run returns the run of a dump, "" if it does not say it.
func (f *File) run() string {
	if f.Run == "" && f.named {
		return fmt.Sprintf("attempt %d of job %q", f.Attempt, f.Job)
	}
	return f.Run
}

// said describes the run of a dump, for people.
func (f *File) said() string {
	var parts []string
	if f.Run != "" {
		parts = append(parts, "run "+short(f.Run))
	}
	if f.Job != "" || f.Attempt > 0 {
		parts = append(parts, fmt.Sprintf("attempt %d", f.Attempt))
	}
	if f.Job != "" {
		parts = append(parts, fmt.Sprintf("job %q", f.Job))
	}
	return strings.Join(parts, ", ")
}

// Runs separates dumps by their run, the one that began last at the end. A launcher that restarts a job begins a new
// run. Dumps that do not name their run, as PyTorch's, belong to the only run that others name, or else are one of their
// own.
func Runs(files []*File) [][]*File {
	by := make(map[string][]*File)
	for _, f := range files {
		by[f.run()] = append(by[f.run()], f)
	}
	if unnamed := by[""]; len(by) == 2 && unnamed != nil {
		return [][]*File{slices.Clone(files)}
	}
	began := func(run []*File) (first time.Time) {
		for _, f := range run {
			for i := range f.Entries {
				if c := f.Entries[i].Called; first.IsZero() || c.Before(first) {
					first = c
				}
			}
		}
		return first
	}
	return slices.SortedFunc(maps.Values(by), func(a, b []*File) int {
		return cmp.Or(began(a).Compare(began(b)), strings.Compare(a[0].Name, b[0].Name))
	})
}

// Merge compares the dumps of a job's ranks in one run. Dumps of several runs are an error: Runs separates them.
//
// Clocks of hosts differ. If dumps name different hosts, Merge shifts the times of a host. It takes collectives
// that no rank leaves before all have come, and the median of the differences between their ends.
func Merge(files []*File) (*Job, error) {
	j := &Job{files: slices.SortedFunc(slices.Values(files), func(a, b *File) int { return cmp.Compare(a.Rank, b.Rank) })}
	if runs := Runs(j.files); len(runs) > 1 {
		a, b := runs[len(runs)-2][0], runs[len(runs)-1][0]
		return nil, fmt.Errorf("trace: %s is of %s, and %s of %s: give the dumps of one run", a.Name, cmp.Or(a.said(), "no known run"), b.Name, cmp.Or(b.said(), "no known run"))
	}
	for _, f := range j.files {
		if f.run() != "" {
			j.Run, j.Name, j.Attempt, j.said = f.Run, f.Job, f.Attempt, f.said()
			break
		}
	}
	j.members = make(map[string][]int)
	for i, f := range j.files {
		if i > 0 && j.files[i-1].Rank == f.Rank {
			return nil, fmt.Errorf("trace: %s and %s are both of rank %d: give the dumps of one run", j.files[i-1].Name, f.Name, f.Rank)
		}
		j.Ranks = append(j.Ranks, f.Rank)
		for group, ranks := range f.Groups {
			if len(ranks) > 0 {
				j.members[group] = ranks
			}
		}
	}
	j.addUnnamed()
	j.present = make(map[string][]int)
	lists := make(map[*int][]int) // one list can be that of many groups
	for group, ranks := range j.members {
		list, ok := lists[&ranks[0]]
		if !ok {
			for _, r := range ranks {
				if _, has := slices.BinarySearch(j.Ranks, r); has {
					list = append(list, r)
				} else {
					j.Missing = append(j.Missing, r)
				}
			}
			slices.Sort(list)
			list = slices.Compact(list)
			lists[&ranks[0]] = list
		}
		j.present[group] = list
	}
	slices.Sort(j.Missing)
	j.Missing = slices.Compact(j.Missing)
	calls, last := j.calls()
	j.align(calls)
	blame := make(map[int]*RankLate)
	for _, f := range j.files {
		blame[f.Rank] = &RankLate{Rank: f.Rank}
	}
	for _, key := range slices.SortedFunc(maps.Keys(calls), func(a, b callKey) int {
		return cmp.Or(strings.Compare(a.group, b.group), cmp.Compare(a.number, b.number))
	}) {
		j.look(key, calls[key], last, blame)
	}
	j.findMessages()
	slices.SortStableFunc(j.Late, func(a, b Late) int { return cmp.Compare(b.By, a.By) })
	for _, r := range j.Ranks {
		if blame[r].Of > 0 {
			j.Blame = append(j.Blame, *blame[r])
		}
	}
	slices.SortStableFunc(j.Blame, func(a, b RankLate) int { return cmp.Compare(b.Total, a.Total) })
	return j, nil
}

// addUnnamed adds the members of groups that no dump describes. PyTorch's Gloo describes groups without their
// names, and only the last one. So that may be the default group. Others have the ranks that have called them.
func (j *Job) addUnnamed() {
	unnamed := j.members[""]
	delete(j.members, "")
	callers := make(map[string][]int)
	for _, f := range j.files {
		for _, e := range f.Entries {
			if _, ok := j.members[e.Group]; ok {
				continue
			}
			if e.described == "default_pg" && len(unnamed) > 0 {
				j.members[e.Group] = unnamed
			} else if all := callers[e.Group]; len(all) == 0 || all[len(all)-1] != f.Rank {
				callers[e.Group] = append(all, f.Rank)
			}
		}
	}
	for group, ranks := range callers {
		if _, ok := j.members[group]; !ok {
			j.members[group] = ranks
		}
	}
}

// member is a rank in a group.
type member struct {
	group string
	rank  int
}

// known is up to which collective of a group the dump of a rank tells whether the rank has called it.
type known struct {
	called int64 // has called this one, and those before it
	others bool  // may have called others after it, which the dump does not have
}

// calls returns the collectives by rank, and what each rank's dump tells of those that it does not have.
func (j *Job) calls() (calls map[callKey]map[int]*Entry, last map[member]known) {
	calls, last = make(map[callKey]map[int]*Entry), make(map[member]known)
	j.partial = make(map[int]bool)
	for _, f := range j.files {
		whole := f.whole()
		j.partial[f.Rank] = whole > 0
		for group, n := range f.Calls {
			last[member{group, f.Rank}] = known{n, false}
		}
		for i := range f.Entries {
			e := &f.Entries[i]
			if e.P2P {
				continue
			}
			key, m := callKey{e.Group, e.Collective}, member{e.Group, f.Rank}
			if calls[key] == nil {
				calls[key] = make(map[int]*Entry)
			}
			calls[key][f.Rank] = e
			if k := last[m]; e.Collective > k.called {
				_, counted := f.Calls[e.Group]
				last[m] = known{e.Collective, !counted && e.Record < whole-1}
			}
		}
	}
	return calls, last
}

// whole returns from which record on the dump has all operations of the rank. A ring loses the oldest ones, but can
// keep some that are pending.
func (f *File) whole() int64 {
	all := make([]int64, len(f.Entries))
	for i := range f.Entries {
		all[i] = f.Entries[i].Record
	}
	slices.Sort(all)
	if len(all) == 0 {
		return 0
	}
	from := all[len(all)-1]
	for _, r := range slices.Backward(all) {
		if r < from-1 {
			break
		}
		from = r
	}
	return from
}

// together are the operations that no rank leaves before all have come.
var together = []string{"all_reduce", "allreduce_coalesced", "all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base", "all_to_all", "all_reduce_barrier"}

// align shifts the times of other hosts than that of the first file.
func (j *Job) align(calls map[callKey]map[int]*Entry) {
	for i, f := range j.files {
		at := j.files[0]
		if i == 0 || f.Host == "" || at.Host == "" || f.Host == at.Host {
			continue
		}
		var apart []time.Duration
		for _, by := range calls {
			a, b := by[at.Rank], by[f.Rank]
			if a != nil && b != nil && slices.Contains(together, a.Op) && a.State == "completed" && b.State == "completed" && !a.Ended.IsZero() && !b.Ended.IsZero() {
				apart = append(apart, a.Ended.Sub(b.Ended))
			}
		}
		if len(apart) == 0 {
			continue
		}
		slices.Sort(apart)
		by := apart[len(apart)/2]
		for k := range f.Entries {
			e := &f.Entries[k]
			e.Called = e.Called.Add(by)
			if !e.Ended.IsZero() {
				e.Ended = e.Ended.Add(by)
			}
		}
		j.Shifts = append(j.Shifts, Shift{f.Rank, by})
	}
}

// look says what is to be said of a collective.
func (j *Job) look(key callKey, by map[int]*Entry, last map[member]known, blame map[int]*RankLate) {
	var called []int
	s := Stuck{Group: key.group, Number: key.number}
	for _, r := range j.present[key.group] {
		e := by[r]
		if e == nil {
			k, ok := last[member{key.group, r}]
			if k.called >= key.number || k.others || !ok && j.partial[r] {
				s.Lost = append(s.Lost, r)
			} else {
				s.NotCalled = append(s.NotCalled, r)
			}
			continue
		}
		called = append(called, r)
		if s.Op == "" {
			s.Op = e.Op
		} else if s.Op != e.Op && s.Differ == "" {
			s.Differ = fmt.Sprintf("rank %d called %s, rank %d %s", called[0], s.Op, r, e.Op)
		}
		if e.State != "completed" {
			s.Waiting = append(s.Waiting, r)
			s.Error = cmp.Or(s.Error, e.Error)
		}
	}
	if len(s.NotCalled) > 0 && slices.Contains(together, s.Op) {
		// Who has ended without the others has failed, also if the dump does not say so.
		for _, r := range called {
			if e := by[r]; e.State == "completed" && e.Ended.IsZero() {
				s.Waiting = append(s.Waiting, r)
			}
		}
		slices.Sort(s.Waiting)
	}
	if len(s.Waiting) > 0 || s.Differ != "" {
		j.Stuck = append(j.Stuck, s)
	}
	if len(called) < 2 || len(called) != len(j.members[key.group]) {
		return
	}
	slices.SortStableFunc(called, func(a, b int) int { return by[a].Called.Compare(by[b].Called) })
	for _, r := range called {
		blame[r].Of++
	}
	rank := called[len(called)-1]
	late := by[rank].Called.Sub(by[called[len(called)-2]].Called)
	blame[rank].Times++
	blame[rank].Total += late
	j.Late = append(j.Late, Late{key.group, by[rank].Op, key.number, rank, late})
}

// findMessages finds sends and receives that have not ended. Dumps of PyTorch, which name no host, do not tell: there
// those of a batch stay scheduled.
func (j *Job) findMessages() {
	at := make(map[Message]int)
	for _, f := range j.files {
		for i := range f.Entries {
			e := &f.Entries[i]
			if !e.P2P || e.State == "completed" || f.Host == "" {
				continue
			}
			key := Message{Group: e.Group, Op: e.Op, Rank: f.Rank}
			k, ok := at[key]
			if !ok {
				k = len(j.Messages)
				at[key], j.Messages = k, append(j.Messages, key)
			}
			m := &j.Messages[k]
			m.Calls++
			m.Error = cmp.Or(m.Error, e.Error)
		}
	}
}

// Print writes the report for people, with at most n late calls. What a terminal would obey becomes question marks.
func (j *Job) Print(w io.Writer, n int) error {
	b := new(strings.Builder)
	fmt.Fprintf(b, "%s of ranks %s", count(len(j.Ranks), "dump"), list(j.Ranks))
	for group := range j.members {
		if strings.Contains(group, "@") {
			b.WriteString(" (numbers that ranks keep in all epochs)")
			break
		}
	}
	b.WriteString("\n")
	if j.said != "" {
		b.WriteString(j.said + "\n")
	}
	if len(j.Missing) > 0 {
		fmt.Fprintf(b, "no dump of ranks %s\n", list(j.Missing))
	}
	for _, s := range j.Shifts {
		fmt.Fprintf(b, "the clock of rank %d's host was shifted by %v\n", s.Rank, s.By)
	}
	for _, s := range j.Stuck {
		fmt.Fprintf(b, "stuck: %s, collective %d of group %q\n", s.Op, s.Number-1, s.Group)
		if s.Differ != "" {
			fmt.Fprintf(b, "  ranks disagree: %s\n", s.Differ)
		}
		if len(s.NotCalled) > 0 {
			fmt.Fprintf(b, "  not called by ranks %s\n", list(s.NotCalled))
		}
		if len(s.Lost) > 0 {
			fmt.Fprintf(b, "  the dumps of ranks %s no longer have operations that old\n", list(s.Lost))
		}
		if len(s.Waiting) > 0 {
			fmt.Fprintf(b, "  not ended on ranks %s\n", list(s.Waiting))
		}
		if s.Error != "" {
			fmt.Fprintf(b, "  %s\n", s.Error)
		}
	}
	for _, m := range j.Messages {
		fmt.Fprintf(b, "stuck: %s of group %q, %s\n  not ended on rank %d\n", m.Op, m.Group, count(m.Calls, "call"), m.Rank)
		if m.Error != "" {
			fmt.Fprintf(b, "  %s\n", m.Error)
		}
	}
	if len(j.Blame) > 0 {
		fmt.Fprintf(b, "how often each rank called last, and how long the others waited for it alone:\n")
		for _, r := range j.Blame {
			fmt.Fprintf(b, "  rank %-4d %6d of %-6d %v\n", r.Rank, r.Times, r.Of, r.Total.Round(time.Microsecond))
		}
		fmt.Fprintf(b, "the latest calls:\n")
	}
	for _, l := range j.Late[:min(n, len(j.Late))] {
		fmt.Fprintf(b, "  rank %-4d %10v  %s, collective %d of group %q\n", l.Rank, l.By.Round(time.Microsecond), l.Op, l.Number-1, l.Group)
	}
	_, err := io.WriteString(w, strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, b.String()))
	return err
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// list writes ranks, runs of them as 3-7.
func list(ranks []int) string {
	var parts []string
	for i := 0; i < len(ranks); {
		k := i
		for k+1 < len(ranks) && ranks[k+1] == ranks[k]+1 {
			k++
		}
		part := fmt.Sprint(ranks[i])
		if k > i {
			part += fmt.Sprintf("-%d", ranks[k])
		}
		parts, i = append(parts, part), k+1
	}
	return strings.Join(parts, ", ")
}

// event is one of Chrome's trace event format, which Perfetto reads.
type event struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Cat   string         `json:"cat,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	TS    float64        `json:"ts"`  // microseconds
	Dur   float64        `json:"dur"` // microseconds; an X without it is no event for Perfetto
	Args  map[string]any `json:"args,omitempty"`
}

// WriteChrome writes the operations of all ranks in Chrome's trace event format, which ui.perfetto.dev
// opens: a process for each rank, with a thread for each group. Operations that overlap are on
// threads of their own. Those that have not ended go on to the end of the trace. Those whose end the dump does
// not tell have no length.
func (j *Job) WriteChrome(w io.Writer) error {
	var from, to time.Time
	for _, f := range j.files {
		for _, e := range f.Entries {
			if from.IsZero() || e.Called.Before(from) {
				from = e.Called
			}
			if last := later(e.Called, e.Ended); last.After(to) {
				to = last
			}
		}
	}
	events := []event{}
	for _, f := range j.files {
		title := fmt.Sprintf("rank %d", f.Rank)
		if f.Host != "" {
			title += " on " + f.Host
		}
		events = append(events,
			event{Name: "process_name", Phase: "M", PID: f.Rank, Args: map[string]any{"name": title}},
			event{Name: "process_sort_index", Phase: "M", PID: f.Rank, Args: map[string]any{"sort_index": f.Rank}})
		type lane struct {
			group string
			free  time.Time
		}
		var lanes []lane
		for _, e := range f.Entries {
			end := e.Ended
			switch {
			case end.IsZero() && e.State == "completed":
				end = e.Called
			case end.IsZero():
				end = to
			}
			tid := slices.IndexFunc(lanes, func(l lane) bool { return l.group == e.Group && !l.free.After(e.Called) })
			if tid < 0 {
				tid = len(lanes)
				lanes = append(lanes, lane{group: e.Group})
				events = append(events, event{Name: "thread_name", Phase: "M", PID: f.Rank, TID: tid, Args: map[string]any{"name": "group " + e.Group}})
			}
			lanes[tid].free = end
			args := map[string]any{"collective": e.Collective, "sizes": e.Sizes, "state": e.State}
			if e.Route != "" {
				args["route"] = e.Route
			}
			if e.Error != "" {
				args["error"] = e.Error
			}
			events = append(events, event{
				Name: e.Op, Phase: "X", Cat: "c10d", PID: f.Rank, TID: tid, Args: args,
				TS: micros(e.Called.Sub(from)), Dur: micros(end.Sub(e.Called)),
			})
		}
	}
	return json.NewEncoder(w).Encode(map[string]any{"traceEvents": events, "displayTimeUnit": "ms"})
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
