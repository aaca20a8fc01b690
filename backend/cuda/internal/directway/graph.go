package directway

import (
	"cmp"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// A call that is part of a stream (InStream) which is captured becomes part of the graph: its kernels and
// copies, and no event. The counters of the kernels are in device memory, so replays and eager calls may
// follow each other in any order that is the same on all ranks. The host does nothing for a replay. It does
// not know of one either, so a replay has no time of its own. A timer looks whether the group has failed.

// graphs is what captured calls leave. Guarded by the engine's Calls, the timer by Group.mu.
type graphs struct {
	held  []driver.Memory // which graphs use until the group closes
	watch *time.Timer
}

// graphWatch is how often the timer looks.
const graphWatch = 100 * time.Millisecond

var errCaptureDevice = fmt.Errorf("cuda: %w: a tensor of the call is on another device than the group's kernels", driver.ErrCapture)

// watchGraphs has a timer end the kernels of replays when the group has failed.
func (d *Group) watchGraphs() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.graphs.watch != nil || d.closed {
		return
	}
	d.graphs.watch = time.AfterFunc(graphWatch, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		switch {
		case d.closed:
		case cmp.Or(d.B.Broken(), d.B.CPUErr()) != nil:
			d.window.Abort()
		default:
			if d.absent() {
				d.window.Abort() // it has ended its own replays, and will have no more
				return
			}
			d.graphs.watch.Reset(graphWatch)
		}
	})
}

// absent reports whether a rank has closed the group.
func (d *Group) absent() bool {
	for r := range d.Size() {
		if word(d.own, r, wordGone).Load() != 0 {
			return true
		}
	}
	return false
}

// endGraphs ends the kernels of replays that still wait, because the group is closed. The caller has ended
// its own.
func (d *Group) endGraphs() {
	d.mu.Lock()
	watch := d.graphs.watch
	d.mu.Unlock()
	if watch != nil {
		watch.Stop()
		d.window.Abort()
	}
}

// freeGraphs gives back the memory of captured calls. No graph may be launched any more.
func (d *Group) freeGraphs() {
	for _, m := range d.graphs.held {
		d.B.Scratch.Put(m.Device().Index, m)
	}
	d.graphs.held = nil
}
