package directway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/work"
)

// queue is operations that follow each other on the device: the collectives, or the messages of a lane. Guarded by
// Group.mu.
type queue struct {
	calls    []*Call // that have not left the device, in order
	commands int     // that they have given a stream
	last     *Call   // the last that was enqueued; guarded by the engine's Calls
}

// full reports whether the stream has no room for another operation.
func (q *queue) full() bool { return q.commands > mostFlying }

// forget lets go of the last operation. The caller does not hold d.mu.
func (q *queue) forget(d *Group) {
	if q.last != nil {
		d.mu.Lock()
		q.last.drop()
		d.mu.Unlock()
		q.last = nil
	}
}

// begin adds an operation to those under way, before a stream is given anything: the timer then
// ends it if the driver keeps the caller waiting, or if memory is freed meanwhile.
func (d *Group) begin(c *Call) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.q.calls = append(c.q.calls, c); len(c.q.calls) == 1 {
		d.busy = append(d.busy, c.q)
	}
	d.keepWatch()
}

// keepWatch starts the timer, or has it look soon. The caller holds d.mu.
func (d *Group) keepWatch() {
	d.pause = shortWatch
	if d.watching || d.closed {
		return
	}
	d.watching = true
	if d.watch == nil {
		d.watch = time.AfterFunc(d.pause, d.look)
	} else {
		d.watch.Reset(d.pause)
	}
}

// enqueued notes that the operation is on its stream, or why it is not as a whole.
func (d *Group) enqueued(c *Call, err error) {
	var event driver.Event
	unknown := false
	if c.stream != nil && (err != nil || c.launched == 0) {
		var lost error
		if event, lost = c.stream.Record(); lost != nil {
			err = cmp.Or(err, lost)
			event, lost = c.stream.Record() // it has to be known when the stream is done
		}
		if err != nil && lost == nil {
			lost = c.rejoin()
		}
		unknown = lost != nil && c.stream.Err() == nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if errors.Is(err, window.ErrAborted) {
		err = cmp.Or(d.B.Broken(), err) // why the window was aborted
	}
	c.q.commands += c.given
	c.event, c.ends, c.lost = event, c.launched, unknown
	c.over = event == nil && !c.lost && c.ends == 0
	if err == nil {
		if c.ends != 0 && !c.within {
			d.tail = c
		}
		if c.q.last != nil {
			c.q.last.drop()
		}
		c.q.last = c
		c.readers++
		return
	}
	c.err = cmp.Or(c.err, err)
	d.fail(c, err)
	d.sweep(c.q)
}

// rejoin has the stream wait for the group's others, after an error: what they have been given may
// not have been waited for.
func (c *Call) rejoin() (err error) {
	for _, s := range c.d.others {
		err = cmp.Or(err, follow(c.stream, s))
	}
	return err
}

// open returns the operations that have not left the device, collectives first. The caller holds d.mu.
func (d *Group) open() []*Call {
	return slices.AppendSeq(slices.Clone(d.line.calls), d.messages())
}

// messages are those that have not left the device. The caller holds d.mu.
func (d *Group) messages() iter.Seq[*Call] {
	return func(yield func(*Call) bool) {
		for _, q := range d.busy {
			for _, c := range q.calls {
				if c.lane != nil && !yield(c) {
					return
				}
			}
		}
	}
}

// Poll ends the operation if the stream is done with it.
func (c *Call) Poll() { c.polled() }

// polled is Poll, and reports whether the operation has ended.
func (c *Call) polled() bool {
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if !c.ended {
		c.d.sweep(c.q)
	}
	return c.ended
}

// Help waits until the operation has ended, or ctx has. Now and then it looks whether the group has failed.
func (c *Call) Help(ctx context.Context) {
	start := time.Now()
	for i := 1; !c.polled(); i++ {
		if slept := driver.Pause(start); !slept && i%1000 != 0 {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		c.d.check()
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
	if d.closed || !d.graphs.made && !slices.ContainsFunc(d.open(), func(c *Call) bool { return !c.ended }) {
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
	d.checkGraphs()
	d.sweepAll()
	if len(d.busy) == 0 {
		return
	}
	now := time.Now()
	if len(d.line.calls) > 0 && d.line.calls[0].ends != 0 {
		// The kernel tells nothing if its device is lost. The group's own stream knows, and has room.
		if err := d.stream.Err(); err != nil {
			c := d.line.calls[0]
			c.err, c.over = cmp.Or(c.err, err), true
			d.sweep(&d.line)
		}
	}
	for _, c := range d.open() {
		if c.failed.IsZero() && !c.ended {
			if why := c.stopped(); why != nil {
				d.fail(c, why)
			}
		}
	}
	d.sweepAll()
	// What still has not ended leaves its Work without waiting.
	for _, c := range d.open() {
		if !c.ended && !c.failed.IsZero() && now.Sub(c.failed) > Grace {
			c.end()
		}
	}
	d.mark()
}

// mark has the operations end by an event whose kernels may have failed, and so do not tell that they
// have ended. It does not wait: a stream may be full. The caller holds d.mu.
func (d *Group) mark() {
	if len(d.busy) == 0 || d.comm.Err() == nil {
		return
	}
	for _, c := range d.line.calls {
		if c.ends == 0 || c.marked {
			continue
		}
		if c.marked = true; c.event != nil {
			continue
		}
		d.away++
		go func() {
			err := c.record()
			d.mu.Lock()
			defer d.mu.Unlock()
			d.away--
			if err != nil {
				c.lost = c.stream.Err() == nil
				c.over = c.over || !c.lost
			}
			d.sweep(c.q)
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
func (c *Call) stopped() error {
	if err := c.d.B.Over(c.ctx, c.deadline, c.timeout, ""); err != nil {
		return err
	}
	if r, left := c.left(); left {
		return &work.Error{Info: c.Info(), Peer: r, Err: fmt.Errorf("cuda: %w: rank %d closed the group and did not take part", work.ErrPeerLeft, r)}
	}
	if c.lane != nil {
		return c.d.comm.Err() // a kernel that gives up may leave blocks that wait
	}
	return nil
}

// left returns a rank that has closed the group and did not take part in the operation.
func (c *Call) left() (rank int, left bool) {
	if x := c.lane; x != nil {
		n := word(c.d.own, x.peer, wordLeft+4*(1-x.dir)).Load()
		return x.peer, n != 0 && int32(c.number-(n-1)) >= 0
	}
	return c.d.Left(c.number)
}

// Left returns a rank of the engine that has closed the group and did not take part in an operation.
func (d *Group) Left(number uint32) (rank int, left bool) {
	for r := range d.Size() {
		if gone := word(d.own, r, wordGone).Load(); gone != 0 && int32(number-(gone-1)) >= 0 {
			return d.Of(r), true
		}
	}
	return 0, false
}

// fail ends the group because of what an operation ran into, and lets the kernels end. The caller
// holds d.mu. Others may have it meanwhile.
func (d *Group) fail(c *Call, why error) {
	d.window.Abort()
	c.failed = time.Now()
	late := errors.Is(why, work.ErrTimeout) && d.B.Broken() == nil
	var f *window.Failure
	switch {
	case late && c.lane != nil:
		why = c.blamePeer(why)
	case late:
		c.blaming = true
		d.away++
		why = c.blame(why)
		d.away--
		c.blaming = false
	case c.lane != nil && errors.As(why, &f):
		why = &work.Error{Info: c.Info(), Peer: f.Peer, Err: fmt.Errorf("cuda: %w", why)}
	}
	c.failed = time.Now()
	c.err = c.named(why)
	d.B.Fail(fmt.Errorf("the group has failed: %w", c.err), c.err)
	if c.over && !c.ended { // it has left its queue meanwhile, and the group may be closed
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

// blamePeer is blame for a message.
func (c *Call) blamePeer(why error) error {
	did := "received"
	if c.lane.dir == in {
		did = "sent"
	}
	return &work.Error{Info: c.Info(), Peer: c.lane.peer, Err: fmt.Errorf("cuda: %w; rank %d has not %s message %d", why, c.lane.peer, did, c.number)}
}

// behind returns the rank that holds up an operation round the ring in which a rank waits for peer. It is the first one
// back from peer that has not made the call, or peer if all have.
func (d *Group) behind(peer int, number uint32) int {
	order := d.comm.Order()
	at := slices.Index(order, peer)
	for i := range order {
		r := order[(at-i+len(order))%len(order)]
		if r != d.Rank() && int32(word(d.pageOf(r), r, wordMade).Load()-number) <= 0 {
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

// sweepAll is sweep for all queues.
func (d *Group) sweepAll() {
	for _, q := range slices.Clone(d.busy) {
		d.sweep(q)
	}
}

// sweep ends the operations of a queue that the streams are done with; the caller holds d.mu. It asks the first one
// that is not, and none behind it.
func (d *Group) sweep(q *queue) {
	for len(q.calls) > 0 && q.calls[0].done() {
		c := q.calls[0]
		if c.awaitsReason() {
			return
		}
		if c.told || c.lane != nil {
			if c.failing(); c.awaitsPeers() {
				return
			}
			if len(q.calls) == 0 || q.calls[0] != c {
				continue // somebody else has swept meanwhile
			}
		}
		n := copy(q.calls, q.calls[1:])
		q.calls[n] = nil
		if q.calls = q.calls[:n]; n == 0 {
			i := slices.Index(d.busy, q)
			d.busy = slices.Delete(d.busy, i, i+1)
		}
		q.commands -= c.given
		c.finish()
		c.end()
	}
	d.leave()
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
	c.failing()
	c.Complete(c.err)
	if c.outer {
		c.d.B.MessageEnds()
	}
}

// failing ends the group if the operation has failed. A kernel that gave up does not say why. The reason is there, or on
// its way. The caller holds d.mu.
func (c *Call) failing() {
	d := c.d
	if err := cmp.Or(c.err, d.comm.Err()); err != nil && c.failed.IsZero() {
		d.fail(c, cmp.Or(c.err, d.B.Broken(), d.B.CPUErr(), err))
	}
}

// A rank whose kernels have given up may free or reuse tensors, while those of another rank still write to them. So the
// ranks tell each other when their kernels have left the devices. An operation that has failed and told others of its
// memory ends then, or after Grace.

// Grace is group.Grace; a variable for tests.
var Grace = group.Grace

// awaitsPeers reports whether kernels of other ranks may use the memory of an operation that has failed. The caller holds
// d.mu.
func (c *Call) awaitsPeers() bool {
	if d := c.d; c.told && !c.failed.IsZero() && time.Since(c.failed) < Grace {
		d.leave()
		for r := range d.Size() {
			if r != d.Rank() && word(d.own, r, wordQuit).Load() == 0 && word(d.own, r, wordGone).Load() == 0 {
				return true
			}
		}
	}
	return false
}

// leave tells the other ranks that no kernel of this rank is on its device any more, or will be. The caller holds d.mu.
func (d *Group) leave() {
	if w := d.Open.Load(); d.quit || w == nil || !w.Aborted() {
		return
	}
	for _, c := range d.open() {
		if !c.done() {
			return
		}
	}
	d.quit = true
	for _, p := range d.pages {
		word(p, d.Rank(), wordQuit).Store(1)
	}
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

// afterOthers has the operation come after those of other queues that use the same memory. The caller holds the
// engine's Calls.
func (c *Call) afterOthers() error {
	d := c.d
	d.mu.Lock()
	var before []*Call
	for _, q := range d.busy {
		for _, o := range slices.Backward(q.calls) { // they follow each other
			if q != c.q && !o.over && conflicts(o.uses, c.uses) {
				before = append(before, o)
				break
			}
		}
	}
	d.mu.Unlock()
	for _, o := range before {
		if o.stream == c.stream {
			continue
		}
		if err := d.after(c.stream, o); err != nil {
			return err
		}
	}
	return nil
}
