package directway

import (
	"cmp"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// A call that is part of a stream (InStream) which is captured becomes part of the graph: its kernels and
// copies, and no event. The counters of the kernels are in device memory, so replays and eager calls may
// follow each other in any order that is the same on all ranks. The host does nothing for a replay. It does
// not know of one either, so a replay has no time of its own. A timer looks whether the group has failed.

// graphs is what captured calls leave.
type graphs struct {
	held []driver.Memory // which graphs use until the group closes; guarded by the engine's Calls
	made bool            // there is a captured call; guarded by Group.mu
}

var errCaptureDevice = fmt.Errorf("cuda: %w: a tensor of the call is on another device than the group's kernels", driver.ErrCapture)

// watchGraphs has the timer end the kernels of replays when the group has failed.
func (d *Group) watchGraphs() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.graphs.made = true
	d.keepWatch()
}

// checkGraphs ends the kernels of replays if the group has failed, or a rank has closed it. That rank has ended its own
// replays, and will have no more. The caller holds d.mu.
func (d *Group) checkGraphs() {
	if d.graphs.made && !d.closed && !d.window.Aborted() && (cmp.Or(d.B.Broken(), d.B.CPUErr()) != nil || d.absent()) {
		d.window.Abort()
	}
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
	defer d.mu.Unlock()
	if d.graphs.made {
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
