package trace

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// WriteTorch writes the dumps in the form that PyTorch's analyzer takes, to files rank_0, rank_1 and so on of
// a directory:
//
//	torchfrtrace DIR -p rank_
//
// The analyzer of PyTorch 2.11 takes dumps of NCCL's groups. It refuses the names of Gloo's operations,
// and does not find Gloo's groups, whose dumps do not name them. WriteTorch names operations as NCCL's are, and
// describes each group that has operations. Operations that have ended are completed. Gloo's messages are left
// out, since their dumps do not tell the peer. WriteTorch does not write to a file that was read.
func (j *Job) WriteTorch(dir string) error {
	if err := ownfile.MkdirAll(dir); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	to := func(f *File) string { return filepath.Join(dir, fmt.Sprint("rank_", f.Rank)) }
	for _, f := range j.files {
		was, err := os.Stat(f.Name)
		now, err2 := os.Stat(to(f))
		if err == nil && err2 == nil && os.SameFile(was, now) {
			return fmt.Errorf("trace: %s is the dump itself: choose another directory than %s", f.Name, dir)
		}
	}
	for _, f := range j.files {
		d, err := j.torch(f)
		if err != nil {
			return fmt.Errorf("trace: %s: %w", f.Name, err)
		}
		b := append(pickle([]byte{opProto, 2}, d), opStop)
		if err := ownfile.Replace(to(f), b); err != nil {
			return fmt.Errorf("trace: %w", err)
		}
	}
	return nil
}

// torch returns a dump as WriteTorch has it.
func (j *Job) torch(f *File) (dict, error) {
	var config dict
	entries := []any{}
	known := make(map[string]bool)
	budget := 64 * f.bytes // values and letters
	for i, v := range items(f.top["entries"]) {
		e := f.Entries[i]
		if (e.Op == "send" || e.Op == "recv") && e.P2P {
			continue
		}
		one, err := copied(v, &budget, 0)
		if err != nil {
			return nil, err
		}
		d, ok := one.(dict)
		if !ok {
			return nil, errors.New("an entry is no dict")
		}
		for k, p := range d {
			switch p.key {
			case "profiling_name":
				d[k].value = profilingPrefix + e.Op
			case "state":
				d[k].value = e.State
			}
		}
		entries = append(entries, d)
		if !known[e.Group] {
			known[e.Group] = true
			ranks := strings.ReplaceAll(fmt.Sprint(j.members[e.Group]), " ", ", ")
			if budget -= len(ranks); budget < 0 {
				return nil, errors.New("its groups have too many ranks")
			}
			config = append(config, pair{e.Group, dict{{"name", e.Group}, {"desc", e.described}, {"ranks", ranks}}})
		}
	}
	status, err := copied(f.top["pg_status"], &budget, 0)
	if err != nil {
		return nil, err
	}
	d := dict{
		{"version", text(f.top["version"])}, {"pg_config", config}, {"pg_status", status}, {"entries", entries},
		{"rank", int64(f.Rank)}, {"host_name", f.Host},
	}
	if f.named {
		d = append(d, pair{"run", f.Run}, pair{"job", f.Job}, pair{"attempt", int64(f.Attempt)})
	}
	return d, nil
}

// copied makes a value of unpickle one that pickle takes. Budget is how many values and letters it may have: a
// list can be an item of many others, or of itself.
func copied(v any, budget *int, depth int) (any, error) {
	if *budget--; *budget < 0 || depth > 20 {
		return nil, errors.New("values contain each other too often")
	}
	all := func(list []any) ([]any, error) {
		out := make([]any, len(list))
		for i, x := range list {
			var err error
			if out[i], err = copied(x, budget, depth+1); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	switch v := v.(type) {
	case *pylist:
		return all(v.items)
	case tuple:
		list, err := all(v)
		return tuple(list), err
	case *pydict:
		d := dict{}
		for _, key := range slices.Sorted(maps.Keys(v.items)) {
			*budget -= len(key)
			x, err := copied(v.items[key], budget, depth+1)
			if err != nil {
				return nil, err
			}
			d = append(d, pair{key, x})
		}
		return d, nil
	case string:
		*budget -= len(v)
		return v, nil
	case nil, bool, int64, float64:
		return v, nil
	}
	return nil, fmt.Errorf("a value is a %T", v)
}
