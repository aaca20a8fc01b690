// Package registry has the works of a backend: the ways in which it can do a kind of call. It is PyTorch's registry of
// gloo all-reduce works, for all operations and with the reason for each choice within reach.
package registry

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Work is a way to do calls of one kind.
type Work[W any] struct {
	Name string

	// Priority orders the works of a kind: a call goes to the work of the highest priority that can do it. No two of a
	// kind have the same.
	Priority int

	Do W // what the backend calls
}

// Table has the works of a backend by the kind K of a call, such as its operation and its tensors' layout. The zero Table
// is empty. Its methods may be called from many goroutines.
type Table[K comparable, W any] struct {
	adding sync.Mutex
	rows   atomic.Pointer[map[K][]Work[W]] // a change replaces the map and its lists, so readers need no lock
}

// Add adds a work for some kinds of calls.
func (t *Table[K, W]) Add(w Work[W], kinds ...K) error {
	if w.Name == "" {
		return errors.New("registry: a work needs a name")
	}
	t.adding.Lock()
	defer t.adding.Unlock()
	rows := make(map[K][]Work[W])
	if old := t.rows.Load(); old != nil {
		maps.Copy(rows, *old)
	}
	for _, k := range kinds {
		for _, o := range rows[k] {
			if o.Priority == w.Priority || o.Name == w.Name {
				return fmt.Errorf("registry: work %q clashes with %q for %v", w.Name, o.Name, k)
			}
		}
		list := append(slices.Clone(rows[k]), w)
		slices.SortFunc(list, func(a, b Work[W]) int { return cmp.Compare(b.Priority, a.Priority) })
		rows[k] = slices.Clip(list)
	}
	t.rows.Store(&rows)
	return nil
}

// Of returns the works for a kind of call, the highest priority first. The list is shared: do not change it.
func (t *Table[K, W]) Of(k K) []Work[W] {
	if rows := t.rows.Load(); rows != nil {
		return (*rows)[k]
	}
	return nil
}

// Refusals say why works do not do a call.
type Refusals []string

// Add adds a work. Works that follow each other for the same reason are named together.
func (r *Refusals) Add(name string, why error) {
	text := ": " + why.Error()
	if last := len(*r) - 1; last >= 0 && strings.HasSuffix((*r)[last], text) {
		(*r)[last] += ", nor " + name
		return
	}
	*r = append(*r, name+text)
}
