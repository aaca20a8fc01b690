package directway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Message is a send or a receive on a lane: one kernel, on the caller's stream (InStream) or on the
// lane's. The Work is part of it. The Call has its commands. It is not among the calls of the group, whose
// end it does not wait for.
type Message struct {
	Call
	lane  *lane
	n     uint32 // of the message in the lane
	outer bool   // it counts as an operation of the engine
}

// HostPost posts a message through the host, to the CPU backend.
type HostPost func(q *group.Operation, h *tensor.Tensor) (*work.Work, error)

// ticket is how a message goes.
type ticket struct {
	w      *work.Work // done: it is on its lane
	f      HostPost   // else the engine posts it so
	refuse func()     // the engine has refused it
}

// Send sends a tensor to another rank, with tag 0. Host posts it to the CPU backend, which is done until
// the lanes are open.
func (d *Group) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions, host HostPost) (*work.Work, error) {
	x, err := d.admit(ctx, work.Send, o, t, dst, out, host)
	if err != nil || x.w != nil {
		return x.w, err
	}
	return x.through(d.B.Message(ctx, work.Send, o, group.Post{Send: true, Peer: dst}, group.From(t), x.f))
}

// Recv receives a tensor of tag 0 from another rank.
func (d *Group) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions, host HostPost) (*work.Work, error) {
	x, err := d.admit(ctx, work.Recv, o, t, src, in, host)
	if err != nil || x.w != nil {
		return x.w, err
	}
	return x.through(d.B.Message(ctx, work.Recv, o, group.Post{Peer: src}, group.To(t), x.f))
}

// RecvAny receives a tensor of tag 0 from the rank that sends first. From receives from a given rank
// through the host. A receive from any rank waits for its source in a goroutine. The kernel of the
// receive writes page-locked memory, because the tensor is claimed like that of any message through the
// host.
func (d *Group) RecvAny(ctx context.Context, t *tensor.Tensor, o backend.P2POptions, host HostPost, from func(src int) HostPost) (*work.Work, error) {
	x, err := d.seek(ctx, o, host, from)
	if err != nil {
		return nil, err
	}
	return x.through(d.B.Message(ctx, work.RecvAnySource, o, group.Post{}, group.To(t), x.f))
}

// through returns what the engine has made of a message.
func (x *ticket) through(w *work.Work, err error) (*work.Work, error) {
	if err != nil {
		x.refuse()
	}
	return w, err
}

// steady waits until the ranks are not settling, and returns with l.mu held. It returns an error, without the
// lock, if ctx or the time is over before.
func (l *lanes) steady(ctx context.Context, timeout time.Duration) error {
	l.mu.Lock()
	if l.state != laneSettling {
		return nil
	}
	limit := time.NewTimer(timeout)
	defer limit.Stop()
	for l.state == laneSettling {
		settled := l.settled
		l.mu.Unlock()
		select {
		case <-settled:
		case <-ctx.Done():
			return group.Canceled(ctx)
		case <-limit.C:
			return fmt.Errorf("%w after %v, while the ranks connected", work.ErrTimeout, timeout)
		}
		l.mu.Lock()
	}
	return nil
}

// unposted is the error of a message that has waited in vain for the ranks to connect.
func (d *Group) unposted(op work.OpType, peer int, err error) error {
	return &work.Error{Info: d.B.Issuer.Info(op, d.B.Seq()), Peer: peer, Err: fmt.Errorf("cuda: not posted: %w", err)}
}

// admit decides how a message goes, and enqueues it if it can go now.
func (d *Group) admit(ctx context.Context, op work.OpType, o backend.P2POptions, t *tensor.Tensor, peer, dir int, host HostPost) (x ticket, err error) {
	if ctx.Err() != nil {
		return ticket{f: host, refuse: func() {}}, nil // the engine refuses it
	}
	l := &d.lanes
	if err := l.steady(ctx, d.B.Limit(o.Timeout)); err != nil {
		if ctx.Err() != nil {
			return ticket{f: host, refuse: func() {}}, nil // the engine refuses it
		}
		return x, d.unposted(op, peer, err)
	}
	if l.state != laneOpen || l.hosted[dir][peer] > 0 {
		before := l.state == laneHosted
		l.count(dir, peer, before, 1)
		l.mu.Unlock()
		return ticket{f: host, refuse: func() { d.refused(dir, peer, before) }}, nil
	}
	l.mu.Unlock()
	d.B.Calls.Lock()
	defer d.B.Calls.Unlock()
	lane := l.all[dir][peer]
	if lane == nil { // closed
		return ticket{f: host, refuse: func() {}}, nil
	}
	l.mu.Lock()
	behind := dir == in && l.seeking > 0
	l.mu.Unlock()
	if captured(ctx) && !behind && lane.deferred == 0 && d.simple(t) {
		x.w, err = d.captureMessage(ctx, op, lane, t)
		return x, err
	}
	if behind || lane.deferred > 0 || lane.commands.Load() > laneCommands || !d.simple(t) {
		lane.deferred++
		return ticket{f: d.later(lane), refuse: func() { d.refusedLane(lane) }}, nil
	}
	info, timeout, err := d.B.Admit(ctx, op, o.Timeout)
	if err != nil {
		return x, err
	}
	m := d.newMessage(ctx, info, lane, time.Now().Add(timeout), timeout)
	m.outer = true
	m.has(t)
	d.B.MessageBegins()
	d.post(m, func() error { return m.enqueueMessage() })
	return ticket{w: m.Work()}, nil
}

// count counts a message through the host: one more while the ranks have not connected, and one less that
// is left afterwards. The caller holds l.mu.
func (l *lanes) count(dir, peer int, before bool, n uint32) {
	switch {
	case before:
		l.hosted[dir][peer] += n
	case l.state == laneOpen:
		l.hosted[dir][peer] -= n
	}
}

// refused takes back what was counted for a message that the engine has refused.
func (d *Group) refused(dir, peer int, before bool) {
	l := &d.lanes
	_ = l.steady(context.Background(), math.MaxInt64) // the ranks connect, or their time is over
	told := before && l.state == laneOpen
	if !told {
		l.count(dir, peer, before, ^uint32(0))
	}
	l.mu.Unlock()
	if told {
		d.B.Abort(fmt.Errorf("cuda: a message to or from rank %d was cancelled while the ranks connected", peer))
	}
}

func (d *Group) refusedLane(x *lane) {
	d.B.Calls.Lock()
	defer d.B.Calls.Unlock()
	x.deferred--
}

// mostPacks is how many kernels may bring the elements of a message in order.
const mostPacks = 8

// simple reports whether a message's tensor is on the group's device and costs few commands there.
func (d *Group) simple(t *tensor.Tensor) bool {
	if t.ByteLen() == 0 {
		return true
	}
	if t.Device().Index != d.Dev {
		return false
	}
	if t.IsContiguous() {
		return true
	}
	if d.B.Packer(d.Dev).Err != nil {
		return false
	}
	packs := 0
	place.Of(t).InOrder(0, func(kernels.Layout, driver.Ptr, driver.Ptr, int) { packs++ })
	return packs <= mostPacks
}

// seek decides how a receive from any rank goes.
func (d *Group) seek(ctx context.Context, o backend.P2POptions, host HostPost, from func(src int) HostPost) (ticket, error) {
	l := &d.lanes
	if err := l.steady(ctx, d.B.Limit(o.Timeout)); err != nil {
		return ticket{}, d.unposted(work.RecvAnySource, -1, err)
	}
	defer l.mu.Unlock()
	if l.state != laneOpen {
		if l.state == laneHosted {
			l.any = true
		}
		return ticket{f: host, refuse: func() {}}, nil
	}
	for p, n := range l.hosted[in] {
		if n > 0 {
			// That rank has sent a message through the host, before the ranks connected.
			l.count(in, p, false, 1)
			return ticket{f: from(p), refuse: func() { d.refused(in, p, false) }}, nil
		}
	}
	l.seeking++
	return ticket{f: d.found, refuse: d.sought}, nil
}

// sought ends what seek has begun.
func (d *Group) sought() {
	d.lanes.mu.Lock()
	defer d.lanes.mu.Unlock()
	d.lanes.seeking--
}

// found waits until a rank has sent what no receive is posted for, and receives that. The engine has
// posted the receives before this one.
func (d *Group) found(q *group.Operation, h *tensor.Tensor) (w *work.Work, err error) {
	err = d.await(q, "no rank has sent", func() (bool, error) {
		d.B.Calls.Lock()
		defer d.B.Calls.Unlock()
		left := 0
		for p, x := range d.lanes.all[in] {
			switch {
			case x == nil:
			case int32(sentWord(d.own, p).Load()-x.next) > 0:
				w = d.postStaged(x, q, h)
				d.sought()
				return true, nil
			case leftWord(d.own, p, out).Load() != 0:
				left++
			}
		}
		if left == d.Size()-1 {
			return false, fmt.Errorf("%w: all other ranks have closed the group, and sent nothing more", work.ErrPeerLeft)
		}
		return false, nil
	})
	return w, err
}

// later posts a message when its lane has room. The engine has posted those before it.
func (d *Group) later(x *lane) HostPost {
	return func(q *group.Operation, h *tensor.Tensor) (w *work.Work, err error) {
		err = d.await(q, "earlier messages have not left the device", func() (bool, error) {
			d.check()
			d.checkMessages()
			if x.commands.Load() > laneCommands {
				return false, nil
			}
			d.B.Calls.Lock()
			defer d.B.Calls.Unlock()
			x.deferred--
			w = d.postStaged(x, q, h)
			return true, nil
		})
		return w, err
	}
}

// await is Engine.Poll, and says what did not come.
func (d *Group) await(q *group.Operation, what string, done func() (bool, error)) error {
	err := d.B.Poll(q.Ctx, q.Left(), done)
	if errors.Is(err, work.ErrTimeout) && q.Ctx.Err() == nil && d.B.Broken() == nil {
		return fmt.Errorf("%w: %s", work.ErrTimeout, what)
	}
	return err
}

// postStaged enqueues a message whose bytes are in page-locked memory of an operation of the engine. The
// caller holds the engine's Calls.
func (d *Group) postStaged(x *lane, q *group.Operation, h *tensor.Tensor) *work.Work {
	m := d.newMessage(q.Ctx, q.Info(), x, time.Now().Add(q.Left()), q.Left())
	d.post(m, func() (err error) {
		if m.stream, err = d.streamOf(x); err == nil {
			err = m.begin()
		}
		if err != nil {
			return err
		}
		return m.launchMessage(q.MessageAt(), h.ByteLen(), direct.Into{})
	})
	return m.Work()
}

// newMessage returns the next message of a lane. The caller holds the engine's Calls.
func (d *Group) newMessage(ctx context.Context, info work.Info, x *lane, deadline time.Time, timeout time.Duration) *Message {
	m := &Message{lane: x, n: x.next}
	x.next++
	m.d, m.ctx, m.deadline, m.timeout = d, ctx, deadline, timeout
	m.Call.Parts, m.uses = m.one[:0], m.two[:0]
	m.Init(&d.B.Issuer, info.Op, info.Seq)
	m.RunBy(m)
	if x.dir == in {
		m.SetSource(x.peer)
	}
	return m
}

// has gives a message its tensor.
func (m *Message) has(t *tensor.Tensor) {
	p := Part{N: t.Len()}
	m.sole[0] = t
	if m.lane.dir == out {
		p.In = m.sole[:1]
	} else {
		p.Out = m.sole[:1]
		m.SetResult(t)
	}
	m.Parts = append(m.Parts, p)
}

// post starts a message, which enqueue gives its stream. The caller holds the engine's Calls.
func (d *Group) post(m *Message, enqueue func() error) {
	m.Start()
	pool.Underway.Add(1)
	d.mu.Lock()
	d.lanes.open = append(d.lanes.open, m)
	d.watchMessages()
	d.mu.Unlock()
	d.posted(m, enqueue())
}

// enqueueMessage gives the stream all commands.
func (m *Message) enqueueMessage() error {
	d, s := m.d, place.StreamsOf(m.ctx)
	own, err := d.streamOf(m.lane)
	if err != nil {
		return err
	}
	d.mapOthers()
	m.collect()
	m.stream = own
	if s != nil && s.In != nil && s.In.Device().Index == d.Dev {
		m.stream = s.In
	}
	if err := m.begin(); err != nil {
		return err
	}
	if err := m.afterCallers(s); err != nil {
		return err
	}
	if err := m.afterOthers(); err != nil {
		return err
	}
	if err := m.transferMessage(); err != nil {
		return err
	}
	if s != nil && s.In != nil && s.In != m.stream {
		return follow(s.In, m.stream)
	}
	return nil
}

// begin orders the message after the one before it in the lane.
func (m *Message) begin() error {
	if last := m.lane.last; last != nil && last.stream != m.stream {
		return m.d.after(m.stream, &last.Call)
	}
	return nil
}

// afterOthers orders the message after other operations that use its memory.
func (m *Message) afterOthers() error {
	d := m.d
	if err := d.B.After(m.stream, m.uses...); err != nil {
		return err
	}
	d.mu.Lock()
	var last *Call
	for _, c := range d.calls { // they follow each other on the device
		if c.stream != m.stream && conflicts(c.uses, m.uses) {
			last = c
		}
	}
	d.mu.Unlock()
	if last != nil {
		if err := d.after(m.stream, last); err != nil {
			return err
		}
	}
	return d.afterOpen(m.stream, m.uses, m)
}

// transferMessage sends the tensor, or receives it.
func (m *Message) transferMessage() error {
	p := &m.Parts[0]
	if m.lane.dir == out {
		at, err := m.bring(p.In)
		if err != nil {
			return err
		}
		return m.launchMessage(at, length(p.In), direct.Into{})
	}
	at, n, whole := m.d.inOrder(p.Out)
	if !whole {
		var err error
		n = length(p.Out)
		if at, err = m.scratch(m.d.Dev, n); err != nil {
			return err
		}
	}
	if err := m.launchMessage(at, n, m.into(p.Out, at, m.lane.peer)); err != nil || whole {
		return err
	}
	return m.putBack(p.Out, at)
}

// launchMessage launches the kernel, which reads or writes n bytes. Into is for those that it writes.
func (m *Message) launchMessage(at driver.Ptr, n int, into direct.Into) error {
	x, d := m.lane, m.d
	if x.dir == in {
		return cmp.Or(x.l.Recv(m.stream, at, n, into), m.pace())
	}
	if err := cmp.Or(x.l.Send(m.stream, at, n), m.pace()); err != nil || m.captured {
		return err
	}
	sentWord(d.pageOf(x.peer), d.Rank()).Store(m.n + 1)
	return nil
}

// spareCommands is how many commands a message has beside those that pace counts: waits and events.
const spareCommands = 6

// cost is how many commands of a lane's room a message takes.
func (m *Message) cost() int64 { return int64(m.given + spareCommands) }

// posted notes that a message is on its stream, or why it is not.
func (d *Group) posted(m *Message, err error) {
	var event driver.Event
	if m.stream != nil {
		var lost error
		if event, lost = m.stream.Record(); lost != nil {
			err = cmp.Or(err, lost)
			event, lost = m.stream.Record() // it has to be known when the stream is done
		}
		m.lost = lost != nil && m.stream.Err() == nil
	}
	x := m.lane
	x.commands.Add(m.cost())
	d.mu.Lock()
	defer d.mu.Unlock()
	if errors.Is(err, window.ErrAborted) {
		err = cmp.Or(d.B.Broken(), err) // why the window was aborted
	}
	m.event, m.over = event, false
	if event == nil && !m.lost {
		m.finishMessage()
	}
	if err == nil {
		if x.last != nil {
			x.last.drop()
		}
		x.last = m
		m.readers++
		return
	}
	m.err = cmp.Or(m.err, err)
	d.failMessage(m, err)
	d.sweepMessages()
}

// arrived reports whether the stream is done with a message that has been enqueued. The caller holds
// d.mu.
func (m *Message) arrived() bool {
	if m.over || m.event == nil || m.lost {
		return m.over
	}
	done, err := m.event.Done()
	if err != nil {
		m.err = cmp.Or(m.err, err)
	}
	return done || err != nil
}

// finishMessage gives back what a message has, which has left the device. The caller holds d.mu.
func (m *Message) finishMessage() {
	m.finish()
	m.lane.commands.Add(-m.cost())
}

// sweepMessages ends the messages that the streams are done with. It asks the first of each lane that is
// not done, and none behind it. The caller holds d.mu.
func (d *Group) sweepMessages() {
	if len(d.lanes.open) == 0 {
		return
	}
	var stop [2][window.MostRanks]bool
	kept := d.lanes.open[:0]
	for _, m := range d.lanes.open {
		x := m.lane
		if stop[x.dir][x.peer] || !m.arrived() {
			stop[x.dir][x.peer] = true
			kept = append(kept, m)
			continue
		}
		if !m.over {
			m.finishMessage()
		}
		m.endMessage()
	}
	clear(d.lanes.open[len(kept):])
	d.lanes.open = kept
}

// endMessage ends the Work. The caller holds d.mu.
func (m *Message) endMessage() {
	if m.ended {
		return
	}
	m.ended = true
	d := m.d
	if err := cmp.Or(m.err, d.comm.Err()); err != nil && m.failed.IsZero() {
		d.failMessage(m, cmp.Or(m.err, d.B.Broken(), d.B.CPUErr(), err))
	}
	m.Complete(m.err)
	if m.outer {
		d.B.MessageEnds()
	}
}

// failMessage ends the group because of what a message ran into. The caller holds d.mu.
func (d *Group) failMessage(m *Message, why error) {
	d.window.Abort()
	var f *window.Failure
	switch {
	case errors.Is(why, work.ErrTimeout) && d.B.Broken() == nil:
		did := "received"
		if m.lane.dir == in {
			did = "sent"
		}
		why = &work.Error{Info: m.Info(), Peer: m.lane.peer, Err: fmt.Errorf("cuda: %w; rank %d has not %s message %d", why, m.lane.peer, did, m.n)}
	case errors.As(why, &f):
		why = &work.Error{Info: m.Info(), Peer: f.Peer, Err: fmt.Errorf("cuda: %w", why)}
	}
	m.failed = time.Now()
	m.err = m.named(why)
	d.B.Fail(fmt.Errorf("the group has failed: %w", m.err), m.err)
}

// left reports whether the peer has closed the group and takes no part in the message.
func (m *Message) left() bool {
	n := leftWord(m.d.own, m.lane.peer, 1-m.lane.dir).Load()
	return n != 0 && int32(m.n-(n-1)) >= 0
}

// why returns why a message has to end, nil if it may go on.
func (m *Message) why(now time.Time) error {
	d := m.d
	switch {
	case m.ctx.Err() != nil:
		return group.Canceled(m.ctx)
	case now.After(m.deadline):
		return fmt.Errorf("%w after %v", work.ErrTimeout, m.timeout)
	}
	if err := cmp.Or(d.B.Broken(), d.B.CPUErr()); err != nil {
		return err
	}
	if m.left() {
		p := m.lane.peer
		return &work.Error{Info: m.Info(), Peer: p, Err: fmt.Errorf("cuda: %w: rank %d closed the group and did not take part", work.ErrPeerLeft, p)}
	}
	// A kernel that gives up may leave blocks that wait.
	return d.comm.Err()
}

// checkMessages ends messages that cannot go on.
func (d *Group) checkMessages() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweepMessages()
	now := time.Now()
	for _, m := range d.lanes.open {
		if m.failed.IsZero() {
			if why := m.why(now); why != nil {
				d.failMessage(m, why)
			}
		}
	}
	d.sweepMessages()
	for _, m := range d.lanes.open {
		if !m.ended && !m.failed.IsZero() && now.Sub(m.failed) > group.Grace {
			m.endMessage()
		}
	}
}

// watchMessages has a timer look for messages that nobody waits for. The caller holds d.mu.
func (d *Group) watchMessages() {
	if d.lanes.watching {
		return
	}
	d.lanes.watching = true
	pause := shortWatch
	var watch *time.Timer
	watch = time.AfterFunc(time.Hour, func() {
		d.checkMessages()
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.closed || !slices.ContainsFunc(d.lanes.open, func(m *Message) bool { return !m.ended }) {
			d.lanes.watching = false
			return
		}
		pause = min(2*pause, longWatch)
		watch.Reset(pause)
	})
	watch.Reset(pause)
}

// Poll ends the message if the stream is done with it.
func (m *Message) Poll() { m.polledMessage() }

// polledMessage is Poll, and reports whether the message has ended.
func (m *Message) polledMessage() bool {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	if !m.ended {
		m.d.sweepMessages()
	}
	return m.ended
}

// Help waits until the message has ended, or ctx has. It asks the event.
func (m *Message) Help(ctx context.Context) { m.d.help(ctx, m.polledMessage, m.d.checkMessages) }
