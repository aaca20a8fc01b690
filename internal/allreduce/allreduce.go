// Package allreduce is the registry of ways of doing an all-reduce, by device type and layout. It is PyTorch's registry
// of gloo all-reduce works, with the reason for each choice within reach.
//
// The backends' own works are not registered. Their priorities are:
//
//	gloo  dense tensors, and sparse ones  0
//	cuda  through the host, and sparse    0
//	cuda  through several clusters        100
//	cuda  one kernel of each rank         200
//
// A backend's own work comes before a registered one of the same priority.
package allreduce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
)

// Collectives are what a backend offers to a registered all-reduce work: its own
// collectives on host memory, all under the tag of the one operation that the
// work belongs to. Calls block until done and must be made one after the
// other, in the same order on every rank.
type Collectives interface {
	Rank() int
	Size() int

	// AllReduceBytes combines packed elements of every rank, in place. What
	// r.Before and r.After do is left to the caller.
	AllReduceBytes(ctx context.Context, b []byte, d tensor.DType, r backend.Reduction) error

	// AllGatherBytes copies every rank's in, all of one length, to out in rank order.
	AllGatherBytes(ctx context.Context, out, in []byte) error

	// AllGatherVBytes is AllGatherBytes where rank i's in has counts[i] bytes.
	AllGatherVBytes(ctx context.Context, out, in []byte, counts []int64) error
}

// Call is one all-reduce on its way to a work.
type Call struct {
	Tensors     []*tensor.Tensor // at least one; all of one layout, dtype, device and shape
	Op          backend.ReduceOp
	Collectives Collectives
}

// Runner is one all-reduce ready to run. The backend calls Run once, from a
// worker, and Run returns when the host's part is done. A runner whose result is
// ordered by a stream also has the method Synchronize(work.Stream) error, with the
// meaning that work.Work.Synchronize has.
type Runner interface {
	Run(ctx context.Context) error
}

// Work declares a way of doing an all-reduce for tensors of one device type and layout.
type Work struct {
	Name   string
	Device tensor.DeviceType
	Layout tensor.Layout

	// Priority orders the works of one device type and layout: a call goes to the work of the
	// highest priority that can do it. No two have the same.
	Priority int

	// Can returns nil if the work can do the call, else the reason why not. It must give the same
	// answer on every rank without asking the others: it does not communicate. A nil Can
	// stands for a work that can do every call. A rank whose tensors are in CPU memory asks too, where
	// those of other ranks are on devices.
	Can func(c *Call) error

	// New checks the call and makes it ready, in the caller's goroutine. An
	// error means that nothing was sent and no byte changed.
	New func(c *Call) (Runner, error)
}

// worksKey is what works are looked up by.
type worksKey struct {
	device tensor.DeviceType
	layout tensor.Layout
}

// works are the registered works, those of the highest priority first. A change replaces the map and
// the list in it, so readers need no lock.
var works struct {
	sync.Mutex // of those who change it
	byKey      atomic.Pointer[map[worksKey][]Work]
}

// Register makes a way of doing an all-reduce known to all groups, on every rank alike.
func Register(w Work) error {
	if w.Name == "" || w.New == nil {
		return errors.New("allreduce: a work needs a name and a constructor")
	}
	if w.Can == nil {
		w.Can = func(*Call) error { return nil }
	}
	works.Lock()
	defer works.Unlock()
	key := worksKey{w.Device, w.Layout}
	for _, o := range Works(w.Device, w.Layout) {
		if o.Priority == w.Priority || o.Name == w.Name {
			return fmt.Errorf("allreduce: work %q clashes with %q for %v %v", w.Name, o.Name, w.Device, w.Layout)
		}
	}
	all := make(map[worksKey][]Work)
	if old := works.byKey.Load(); old != nil {
		maps.Copy(all, *old)
	}
	list := append(slices.Clone(all[key]), w)
	slices.SortFunc(list, func(a, b Work) int { return cmp.Compare(b.Priority, a.Priority) })
	all[key] = slices.Clip(list)
	works.byKey.Store(&all)
	return nil
}

// Works returns the registered works for a device type and a layout, the highest priority
// first. All have a Can. The list is shared: do not change it.
func Works(d tensor.DeviceType, l tensor.Layout) []Work {
	all := works.byKey.Load()
	if all == nil {
		return nil
	}
	return (*all)[worksKey{d, l}]
}
