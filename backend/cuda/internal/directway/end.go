package directway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/work"
)

// Poll ends the operation if the stream is done with it.
func (c *Call) Poll() { c.polled() }

// polled is Poll, and reports whether the operation has ended.
func (c *Call) polled() bool {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	c.d.sweep()
	return c.ended
}

// Help waits until the operation has ended, or ctx has.
func (c *Call) Help(ctx context.Context) {
	c.d.help(ctx, c.polled, c.d.check)
}

// help waits until ended, or until ctx has. Now and then it looks whether the group has failed.
func (d *Group) help(ctx context.Context, ended func() bool, look func()) {
	start := time.Now()
	for i := 1; !ended(); i++ {
		if slept := driver.Pause(start); !slept && i%1000 != 0 {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		look()
	}
}

// shortWatch and longWatch are how often the timer looks for operations that nobody waits for: soon
// after a call, and later ever more seldom.
const (
	shortWatch = time.Millisecond
	longWatch  = 20 * time.Millisecond
)

// look is what the timer does.
func (d *Group) look() {
	d.check()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || !slices.ContainsFunc(d.calls, func(c *Call) bool { return !c.ended }) {
		d.watching = false
		return
	}
	d.pause = min(2*d.pause, longWatch)
	d.watch.Reset(d.pause)
}

// check ends operations that cannot go on: their context or their time has ended, the group has
// failed, or the timer finds their device lost.
func (d *Group) check() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweep()
	if len(d.calls) == 0 {
		return
	}
	now := time.Now()
	if c := d.calls[0]; c.ends != 0 {
		// The kernel tells nothing if its device is lost. The group's own stream knows, and has room.
		if err := d.stream.Err(); err != nil {
			c.err, c.over = cmp.Or(c.err, err), true
			d.sweep()
		}
	}
	for i := 0; i < len(d.calls); i++ {
		if c := d.calls[i]; c.failed.IsZero() {
			if why := c.stopped(now); why != nil {
				d.fail(c, why)
				i = -1 // others may have had d.mu meanwhile
			}
		}
	}
	d.sweep()
	// What still has not ended leaves its Work without waiting.
	for _, c := range d.calls {
		if !c.ended && !c.failed.IsZero() && now.Sub(c.failed) > group.Grace {
			c.end()
		}
	}
	d.mark()
}

// mark has the operations end by an event whose kernels may have failed, and so do not tell that they
// have ended. It does not wait: a stream may be full. The caller holds d.mu.
func (d *Group) mark() {
	if len(d.calls) == 0 || d.comm.Err() == nil {
		return
	}
	for _, c := range d.calls {
		if c.ends == 0 || c.marked {
			continue
		}
		if c.marked = true; c.event != nil {
			continue
		}
		go func() {
			err := c.record()
			d.mu.Lock()
			defer d.mu.Unlock()
			if err != nil {
				c.lost = c.stream.Err() == nil
				c.over = c.over || !c.lost
			}
			d.sweep()
		}()
	}
}

// record gives the operation an event, unless it has one or has ended. Its stream may be full: the caller
// does not hold d.mu.
func (c *Call) record() error {
	d := c.d
	d.mu.Lock()
	skip := c.over || c.event != nil || d.comm.Ended(c.ends)
	d.mu.Unlock()
	if skip {
		return nil
	}
	event, err := c.stream.Record()
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.over || c.event != nil {
		event.Done()
		event.Release()
		return nil
	}
	c.event = event
	return nil
}

// stopped returns why the operation has to end, nil if it may go on.
func (c *Call) stopped(now time.Time) error {
	switch {
	case c.ctx.Err() != nil:
		return group.Canceled(c.ctx)
	case now.After(c.deadline):
		return fmt.Errorf("%w after %v", work.ErrTimeout, c.timeout)
	}
	if err := cmp.Or(c.d.B.Broken(), c.d.B.CPUErr()); err != nil {
		return err
	}
	if r, left := c.d.left(c.number); left {
		return &work.Error{Info: c.Info(), Peer: r, Err: fmt.Errorf("cuda: %w: rank %d closed the group and did not take part", work.ErrPeerLeft, r)}
	}
	return nil
}

// left returns a rank that has closed the group and did not take part in an operation.
func (d *Group) left(number uint32) (rank int, left bool) {
	for r := range d.Size() {
		if gone := goneWord(d.own, r).Load(); gone != 0 && int32(number-(gone-1)) >= 0 {
			return d.Of(r), true
		}
	}
	return 0, false
}

// wordEach keeps the ranks' words on lines of their own.
const wordEach = 64

// madeWord is where a rank writes to its own page how many direct operations it has made.
func madeWord(p *region.Region) *atomic.Uint32 { return p.Word(madeLine) }

// madeLine comes after what lanes and ranks have in a page.
const madeLine = 2 << 10

// goneWord is where a rank writes that it has unmapped the memory of the page's owner: the number
// of direct operations it has made, plus one.
func goneWord(p *region.Region, rank int) *atomic.Uint32 { return p.Word(rank * wordEach) }

// fail ends the group because of what an operation ran into, and lets the kernels end. The caller
// holds d.mu. Others may have it meanwhile.
func (d *Group) fail(c *Call, why error) {
	d.window.Abort()
	c.failed = time.Now()
	if errors.Is(why, work.ErrTimeout) && d.B.Broken() == nil {
		c.blaming = true
		why = c.blame(why)
		c.blaming = false
	}
	c.failed = time.Now()
	c.err = c.named(why)
	d.B.Fail(fmt.Errorf("the group has failed: %w", c.err), c.err)
	if c.over && !c.ended { // it has left d.calls meanwhile, and the group may be closed
		c.ended = true
		c.Complete(c.err)
	}
}

// blame says for whom the kernel waited. It has just been told to end, and reports that then. The caller holds
// d.mu, and others have it between two looks.
func (c *Call) blame(why error) error {
	d, comm := c.d, c.d.comm
	var stuck *window.Failure
	for end := time.Now().Add(ReportLimit); !errors.As(comm.Err(), &stuck); {
		if c.event == nil && c.ends == 0 || time.Now().After(end) {
			return fmt.Errorf("%w, waiting for the device", why)
		}
		if (c.over || c.done()) && !errors.As(comm.Err(), &stuck) {
			return fmt.Errorf("%w, waiting for the device", why)
		}
		d.mu.Unlock()
		time.Sleep(50 * time.Microsecond)
		d.mu.Lock()
	}
	peer := stuck.Peer
	if len(c.Parts) > 0 && c.Parts[0].Form.Ring {
		peer = d.behind(peer, c.number)
	}
	why = fmt.Errorf("cuda: %w; the device of rank %d has not done its part", why, peer)
	return &work.Error{Info: c.Info(), Peer: peer, Err: why}
}

// behind returns the rank that holds up an operation round the ring in which a rank waits for peer. It is the first one
// back from peer that has not made the call, or peer if all have.
func (d *Group) behind(peer int, number uint32) int {
	order := d.comm.Order()
	at := slices.Index(order, peer)
	for i := range order {
		r := order[(at-i+len(order))%len(order)]
		if r != d.Rank() && int32(madeWord(d.pageOf(r)).Load()-number) <= 0 {
			return r
		}
	}
	return peer
}

// ReportLimit bounds how long a kernel may take to report that it was told to end; a variable for tests.
var ReportLimit = time.Second

// named makes an error that names this operation.
func (c *Call) named(err error) error {
	return c.d.B.Named(c.Info(), err, func() string { return c.d.B.Crowd(c.d.Dev) })
}

// sweep ends the operations that the streams are done with; the caller holds d.mu.
func (d *Group) sweep() {
	for len(d.calls) > 0 && d.calls[0].done() {
		c := d.calls[0]
		n := copy(d.calls, d.calls[1:])
		d.calls[n] = nil
		d.calls = d.calls[:n]
		d.commands -= c.given
		c.finish()
		c.end()
	}
}

// done reports whether the stream is done with an operation that has been enqueued.
func (c *Call) done() bool {
	switch {
	case c.over || c.lost:
		return c.over
	case c.ends != 0 && c.d.comm.Ended(c.ends):
		return true
	case c.event == nil || c.ends != 0 && !c.marked:
		return false
	}
	done, err := c.event.Done()
	c.asked = true
	if err != nil {
		c.err = cmp.Or(c.err, err)
	}
	return done || err != nil
}

// finish gives back what the operation has, which has left the device.
func (c *Call) finish() {
	c.over = true
	c.readers++
	c.drop()
	for _, e := range c.paces {
		e.Done() // the last ones have not been asked yet
		e.Release()
	}
	for _, m := range c.held {
		c.d.B.Scratch.Put(m.Device().Index, m)
	}
	for _, p := range c.trees {
		p.Done() // the tracker forgets what has ended
		p.Release()
	}
	c.paces, c.held, c.trees = nil, nil, nil
	pool.Underway.Add(-1)
}

// end ends the Work. The caller holds d.mu.
func (c *Call) end() {
	if c.ended || c.blaming {
		return
	}
	c.ended = true
	d := c.d
	if err := cmp.Or(c.err, d.comm.Err()); err != nil && c.failed.IsZero() {
		// A kernel that gave up does not say why. The reason is there, or on its way.
		d.fail(c, cmp.Or(c.err, d.B.Broken(), d.B.CPUErr(), err))
	}
	c.Complete(c.err)
}

// after has a stream wait for an operation.
func (d *Group) after(s driver.Stream, c *Call) error {
	d.mu.Lock()
	unmarked := c.event == nil && c.ends != 0
	d.mu.Unlock()
	if unmarked {
		if err := c.record(); errors.Is(err, driver.ErrClosed) {
			// Nobody can wait for a stream that has been closed, but the caller.
			return d.B.Poll(context.Background(), c.timeout, func() (bool, error) { return d.comm.Ended(c.ends), d.comm.Err() })
		} else if err != nil {
			return err
		}
	}
	d.mu.Lock()
	event := c.event
	if c.over || event == nil {
		d.mu.Unlock()
		return nil
	}
	c.readers++
	d.mu.Unlock()
	err := s.Wait(event) // s may be full: without the lock
	d.mu.Lock()
	defer d.mu.Unlock()
	c.asked = true
	c.drop()
	return err
}

// drop ends one use of the operation's event; the caller holds d.mu.
func (c *Call) drop() {
	if c.readers--; c.readers == 0 && c.over && c.event != nil {
		if !c.asked {
			c.event.Done() // the simulator reports events that nobody asks or waits for
		}
		c.event.Release()
		c.event = nil
	}
}

// release is drop for who does not hold d.mu.
func (c *Call) release() {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	c.drop()
}
