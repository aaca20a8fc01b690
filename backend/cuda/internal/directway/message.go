package directway

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// A send or a receive on a lane is one kernel, on the caller's stream (InStream) or on the lane's. It is a Call in the
// queue of its lane, and waits for no collective.

// HostPost posts a message through the host, to the CPU backend.
type HostPost func(q *group.Operation, h *tensor.Tensor) (*work.Work, error)

// ticket is how a message goes.
type ticket struct {
	w      *work.Work // done: it is on its lane
	f      HostPost   // else the engine posts it so
	refuse func()     // the engine has refused it
}

// Message sends a tensor with tag 0, or receives one. Host posts it to the CPU backend, which is done until the lanes are
// open. From is that of a receive from a given rank.
//
// A receive from any rank waits for its source in a goroutine. The kernel of the receive writes page-locked memory,
// because the tensor is claimed like that of any message through the host.
func (d *Group) Message(ctx context.Context, op work.OpType, t *tensor.Tensor, peer int, o backend.P2POptions, host HostPost, from func(src int) HostPost) (w *work.Work, err error) {
	x, leg := ticket{}, group.To
	switch op {
	case work.Send:
		leg = group.From
		x, err = d.admit(ctx, op, o, t, peer, out, host)
	case work.Recv:
		x, err = d.admit(ctx, op, o, t, peer, in, host)
	default:
		x, err = d.seek(ctx, o, host, from)
	}
	if err != nil || x.w != nil {
		return x.w, err
	}
	if w, err = d.B.Message(ctx, op, o, group.Post{Send: op == work.Send, Peer: peer}, leg(t), x.f); err != nil {
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
	captured := driver.CallCaptured(ctx)
	if behind || lane.deferred > 0 || !captured && d.full(lane) || !d.simple(t) {
		lane.deferred++
		return ticket{f: d.later(lane), refuse: func() { d.refusedLane(lane) }}, nil
	}
	info, timeout, err := d.B.Admit(ctx, op, o.Timeout)
	if err != nil {
		return x, err
	}
	m := d.newMessage(ctx, info, lane, time.Now().Add(timeout), timeout)
	m.outer, m.captured = true, captured
	m.has(t)
	if !captured {
		d.B.MessageBegins()
		m.post(nil)
		return ticket{w: m.Work()}, nil
	}
	lane.next-- // it has no number in its lane: the host does not know how many there will be
	if err := d.record(m); err != nil {
		return x, err
	}
	d.B.MessageBegins()
	m.Complete(nil)
	d.B.MessageEnds()
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
			case int32(word(d.own, p, wordSent).Load()-x.next) > 0:
				w = d.postStaged(x, q, h)
				d.sought()
				return true, nil
			case word(d.own, p, wordLeft+4*out).Load() != 0:
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
			if d.full(x) {
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
	m.streams = nil // those of the message are the engine's matter
	m.staged, m.bytes = q.MessageAt(), h.ByteLen()
	m.Parts = append(m.Parts, Part{})
	m.post(nil)
	return m.Work()
}

// spareCommands is how many commands a message has besides those that pace counts: waits and events.
const spareCommands = 3

// newMessage returns the next message of a lane. The caller holds the engine's Calls.
func (d *Group) newMessage(ctx context.Context, info work.Info, x *lane, deadline time.Time, timeout time.Duration) *Call {
	m := d.NewCall()
	m.q, m.lane, m.number, m.given = &x.queue, x, x.next, spareCommands
	x.next++
	m.init(ctx, info, deadline, timeout)
	if x.dir == in {
		m.SetSource(x.peer)
	}
	return m
}

// has gives a message its tensor.
func (m *Call) has(t *tensor.Tensor) {
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
