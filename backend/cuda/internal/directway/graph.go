package directway

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
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

// captured reports whether a call is part of a stream that is captured.
func captured(ctx context.Context) bool {
	s := place.StreamsOf(ctx)
	return s != nil && s.In != nil && driver.Capturing(s.In)
}

// capture makes a collective part of a graph. The Work has ended when it returns. An error leaves the group
// as it was. The capture may have a part of the call then, and must be given up.
func (d *Group) capture(ctx context.Context, op work.OpType, c *Call, print board.Call, result ...*tensor.Tensor) (*work.Work, error) {
	b := d.B
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, _, err := b.Admit(ctx, op, 0)
	if err != nil {
		return nil, err
	}
	c.Init(&b.Issuer, info.Op, info.Seq)
	c.SetResult(result...)
	err = d.record(ctx, c, func() (err error) {
		for i := range c.Parts {
			err = cmp.Or(err, c.do(&c.Parts[i]))
		}
		return err
	})
	if err != nil {
		return nil, c.named(err)
	}
	d.Next()
	print.Op = op
	err = b.Enter(ctx, info, print)
	b.Issued(c.Work())
	c.Complete(err)
	return c.Work(), nil
}

// captureMessage makes a message part of a graph. It has no number in its lane: the host does not know how
// many there will be. The caller holds the engine's Calls.
func (d *Group) captureMessage(ctx context.Context, op work.OpType, x *lane, t *tensor.Tensor) (*work.Work, error) {
	info, _, err := d.B.Admit(ctx, op, 0)
	if err != nil {
		return nil, err
	}
	m := d.newMessage(ctx, info, x, time.Time{}, 0)
	x.next--
	m.has(t)
	if err := d.record(ctx, &m.Call, m.transferMessage); err != nil {
		return nil, m.named(err)
	}
	d.B.MessageBegins()
	m.Complete(nil)
	d.B.MessageEnds()
	return m.Work(), nil
}

// record gives the captured stream the commands of a call, and keeps the memory that they use.
func (d *Group) record(ctx context.Context, c *Call, do func() error) error {
	c.ctx, c.captured, c.stream = ctx, true, place.StreamsOf(ctx).In
	if c.stream.Device().Index != d.Dev {
		return errCaptureDevice
	}
	c.Start()
	pool.Underway.Add(1) // nothing is freed meanwhile
	defer pool.Underway.Add(-1)
	err := do()
	d.graphs.held, c.held = append(d.graphs.held, c.held...), nil
	d.watchGraphs()
	return err
}

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
		if goneWord(d.own, r).Load() != 0 {
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
