package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Host is what a backend offers to the works that run an all-reduce: its
// collectives on host memory, all under the tag of the one operation that the
// work belongs to. Calls block until done and must be made one after the
// other, in the same order on every rank.
type Host interface {
	Rank() int
	Size() int

	// AllReduceBytes combines packed elements of every rank, in place. What
	// r.Before and r.After do is left to the caller.
	AllReduceBytes(ctx context.Context, b []byte, d tensor.DType, r Reduction) error

	// AllGatherBytes copies every rank's in, all of one length, to out in rank order.
	AllGatherBytes(ctx context.Context, out, in []byte) error

	// AllGatherVBytes is AllGatherBytes where rank i's in has counts[i] bytes.
	AllGatherVBytes(ctx context.Context, out, in []byte, counts []int64) error
}

// AllReduceCall is one all-reduce on its way to a work.
type AllReduceCall struct {
	Tensors []*tensor.Tensor // at least one; all of one layout, dtype, device and shape
	Op      ReduceOp
	Host    Host
}

// AllReduceRunner is one all-reduce ready to run. Run is called once, from a
// worker of the backend, and returns when the host's part is done. A runner
// whose result is ordered by a stream also has Synchronize, as work.Work has it.
type AllReduceRunner interface {
	Run(ctx context.Context) error
}

// StreamRunner is a runner that orders streams after its result.
type StreamRunner interface {
	AllReduceRunner
	Synchronize(s work.Stream) error
}

// AllReduceWork is a way of doing an all-reduce for tensors of one device type
// and layout. This is c10d's registry of gloo all-reduce works, with the reason
// for each choice within reach.
type AllReduceWork struct {
	Name   string
	Device tensor.DeviceType
	Layout tensor.Layout

	// Rank orders the works of one device and layout: the highest that is
	// usable is taken. Two of one device and layout must not have the same.
	Rank int

	// Usable returns nil if the work can do the call, else the reason why not.
	// A nil Usable is always usable. It must give the same answer on every rank.
	Usable func(c *AllReduceCall) error

	// New checks the call and makes it ready, in the caller's goroutine. An
	// error means that nothing was sent and no byte changed.
	New func(c *AllReduceCall) (AllReduceRunner, error)
}

var works struct {
	sync.RWMutex
	list []AllReduceWork
}

// RegisterAllReduce makes a way of doing an all-reduce known.
func RegisterAllReduce(w AllReduceWork) error {
	if w.Name == "" || w.New == nil {
		return errors.New("backend: an all-reduce work needs a name and a constructor")
	}
	works.Lock()
	defer works.Unlock()
	for _, o := range works.list {
		if o.Device == w.Device && o.Layout == w.Layout && (o.Rank == w.Rank || o.Name == w.Name) {
			return fmt.Errorf("backend: all-reduce work %q clashes with %q for %v %v", w.Name, o.Name, w.Device, w.Layout)
		}
	}
	works.list = append(works.list, w)
	slices.SortStableFunc(works.list, func(a, b AllReduceWork) int { return cmp.Compare(b.Rank, a.Rank) })
	return nil
}

// AllReduceWorks returns the works for a device type and a layout, the best
// first. What ChooseAllReduce takes is the first that is usable.
func AllReduceWorks(d tensor.DeviceType, l tensor.Layout) []AllReduceWork {
	works.RLock()
	defer works.RUnlock()
	var list []AllReduceWork
	for _, w := range works.list {
		if w.Device == d && w.Layout == l {
			list = append(list, w)
		}
	}
	return list
}

// ChooseAllReduce returns the work that does the call.
func ChooseAllReduce(c *AllReduceCall) (AllReduceWork, error) {
	t := c.Tensors[0]
	works.RLock()
	defer works.RUnlock()
	var no []string
	for _, w := range works.list {
		if w.Device != t.Device().Type || w.Layout != t.Layout() {
			continue
		}
		if w.Usable == nil {
			return w, nil
		}
		err := w.Usable(c)
		if err == nil {
			return w, nil
		}
		no = append(no, w.Name+": "+err.Error())
	}
	if no != nil {
		return AllReduceWork{}, fmt.Errorf("backend: no all-reduce work for %v: %s", t, strings.Join(no, "; "))
	}
	return AllReduceWork{}, fmt.Errorf("backend: unsupported layout %v on device type %v", t.Layout(), t.Device().Type)
}
