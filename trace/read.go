package trace

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// File is a dump: of this library, or of PyTorch's flight recorder.
type File struct {
	Name    string
	Rank    int    // in the default group; in a job with epochs the number that the rank keeps in all of them
	Host    string // "" if the dump does not say it
	Groups  map[string][]int
	Entries []Entry

	// Run is a name that all ranks of a run share and no other run has. Job is the launcher's name for the job, and
	// Attempt how often the launcher had restarted it. PyTorch's dumps do not say them, and Run is "" in a job with
	// PyTorch ranks.
	Run     string
	Job     string
	Attempt int

	// Calls is how many collectives the rank has called, by group. PyTorch's dumps do not say it, nor do dumps for groups
	// that the rank has left.
	Calls map[string]int64

	named bool           // the dump says its job and attempt
	top   map[string]any // the dump itself
	bytes int
}

// Entry is an operation in a dump.
type Entry struct {
	Record     int64 // numbers the operations of the rank from 0
	Group      string
	Op         string // PyTorch's name, such as all_reduce or "send 0->1"
	P2P        bool
	Collective int64 // how many collectives of the group it is, or follows
	Sizes      string
	Route      string
	State      string // scheduled, started or completed
	Error      string
	Called     time.Time
	Ended      time.Time // zero if it was pending, and if the dump does not say when it ended

	described string // the description of the group
}

// maxDump is the most bytes of a dump: 13 KB for each of 20000 operations.
const maxDump = 256 << 20

// ReadFile reads a dump from a regular file of at most 256 MiB: see Parse.
func ReadFile(name string) (*File, error) {
	data, err := ownfile.Read(name, maxDump+1)
	if err == nil && len(data) > maxDump {
		err = fmt.Errorf("%s has more than %d bytes, and is no dump", name, maxDump)
	}
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	return Parse(name, data)
}

// Parse reads a dump. If the dump does not say its rank, the rank is the number at the end of its name, as with
// PyTorch's dumps.
func Parse(name string, data []byte) (*File, error) {
	f, err := parse(name, data)
	if err != nil {
		return nil, fmt.Errorf("trace: %s: %w", name, err)
	}
	return f, nil
}

// noDigit tells what separates numbers.
func noDigit(r rune) bool { return r < '0' || '9' < r }

func parse(name string, data []byte) (*File, error) {
	top, err := unpickle(data)
	if err != nil {
		return nil, err
	}
	d := fields(top)
	if d["entries"] == nil || d["pg_config"] == nil {
		return nil, errors.New("not a dump of a flight recorder: it has no entries or no pg_config")
	}
	f := &File{Name: name, Groups: make(map[string][]int), Calls: make(map[string]int64), top: d, bytes: len(data)}
	f.Host, _ = d["host_name"].(string)
	f.Run, f.Job = text(d["run"]), text(d["job"])
	if attempt, ok := d["attempt"].(int64); ok {
		f.named, f.Attempt = true, int(attempt)
	}
	if rank, ok := d["rank"].(int64); ok {
		f.Rank = int(rank)
	} else if f.Rank, err = strconv.Atoi(name[strings.LastIndexFunc(name, noDigit)+1:]); err != nil {
		return nil, errors.New("it does not say its rank: its name must end with the rank's number")
	}
	lists := make(map[string][]int) // one text can be that of many groups
	for group, v := range fields(d["pg_config"]) {
		ranks, _ := fields(v)["ranks"].(string)
		list, ok := lists[ranks]
		if !ok {
			for _, n := range strings.FieldsFunc(ranks, noDigit) {
				if r, err := strconv.Atoi(n); err == nil {
					list = append(list, r)
				}
			}
			lists[ranks] = list
		}
		if len(list) > 0 {
			f.Groups[group] = list
		}
	}
	for _, v := range fields(d["pg_status"]) {
		s := fields(v)
		if calls, ok := s["last_enqueued_collective"].(int64); ok && s["name"] != nil {
			f.Calls[text(s["name"])] = max(calls, 0)
		}
	}
	budget := 16 * len(data) // bytes of entries: one entry, or one text, can be that of many
	for _, v := range items(d["entries"]) {
		e := fields(v)
		x := Entry{State: text(e["state"]), Error: text(e["error"]), Route: text(e["route"]), Sizes: sizes(e["input_sizes"])}
		if names := items(e["process_group"]); len(names) > 0 {
			x.Group, x.described = text(names[0]), text(names[len(names)-1])
		}
		var by string
		by, x.Op, _ = strings.Cut(text(e["profiling_name"]), ":")
		x.Record, _ = e["record_id"].(int64)
		x.P2P, _ = e["is_p2p"].(bool)
		x.Collective, _ = e["collective_seq_id"].(int64)
		x.Called = at(e["time_created_ns"])
		x.Ended = at(e["time_discovered_completed_ns"])
		if x.Ended.IsZero() {
			x.Ended = at(e["time_failed_ns"])
		}
		if by == "gloo" {
			// PyTorch's Gloo says only that an operation has ended, not how, and not in its state.
			if x.State == "scheduled" && e["retired"] == true {
				x.State = "completed"
			}
			x.Op = cmp.Or(glooNames[x.Op], x.Op)
		}
		budget -= 256 + len(x.State) + len(x.Error) + len(x.Route) + len(x.Sizes) + len(x.Group) + len(x.described) + len(x.Op)
		if budget < 0 {
			return nil, fmt.Errorf("entry %d and those before it are larger than %d bytes can be: they repeat each other", len(f.Entries), len(data))
		}
		if x.Group == "" || x.Op == "" || x.Called.IsZero() {
			return nil, fmt.Errorf("entry %d has no process_group, profiling_name or time_created_ns", len(f.Entries))
		}
		f.Entries = append(f.Entries, x)
	}
	return f, nil
}

// glooNames are NCCL's names of operations that have other ones in dumps of Gloo.
var glooNames = map[string]string{"barrier": "all_reduce_barrier", "sparse_all_reduce": "all_reduce"}

// fields returns the items of a dict, none if v is none.
func fields(v any) map[string]any {
	if d, ok := v.(*pydict); ok {
		return d.items
	}
	return nil
}

// items returns those of a list or a tuple, none if v is neither.
func items(v any) []any {
	switch v := v.(type) {
	case *pylist:
		return v.items
	case tuple:
		return v
	}
	return nil
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

// at is a time in nanoseconds, zero if v is none.
func at(v any) time.Time {
	if n, ok := v.(int64); ok && n > 0 {
		return time.Unix(0, n)
	}
	return time.Time{}
}

// sizes writes a list of sizes like Python, at most 3 of them with at most 8 dimensions: [[2, 3]]. One list can be
// that of many entries.
func sizes(v any) string {
	var all []string
	for i, s := range items(v) {
		if i == 3 {
			all = append(all, "...")
			break
		}
		var dims []string
		for i, d := range items(s) {
			if i == 8 {
				dims = append(dims, "...")
				break
			}
			n, _ := d.(int64) // anything else might contain itself
			dims = append(dims, fmt.Sprint(n))
		}
		all = append(all, "["+strings.Join(dims, ", ")+"]")
	}
	return "[" + strings.Join(all, ", ") + "]"
}
