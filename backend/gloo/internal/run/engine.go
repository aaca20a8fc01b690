package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// engine runs one operation at a time. A backend has as many as it runs
// collectives at a time, and uses them again and again.
type engine struct {
	session *session
	route   route
	byList  listRoute // nil unless the route takes lists
	mesh    transport.Mesh
	awaited *transport.Request // while this goroutine drives the mesh
	timer   *time.Timer
	recvs   []*transport.Request // to be posted
	sends   []*transport.Request
	main    progress                      // of the plan that run executes
	between []*progress                   // of steps between clusters
	free    []*progress                   // those of them without a step
	chunks  []*progress                   // by chunk: a list of those with a step
	meeting *callback.Registry[*progress] // of those steps, unless a StageCall has its own
	cluster clusterCall
	packed  []byte // for tensors that are not contiguous, and for joined ones
	joined  []byte // for blocks that lie apart
	blocks  []byte // for such of operands
	lengths []int64
	lists   [2][][]byte
	stop    func() error
	sparse  *[2][]byte // gathered indices and values; nil until there is a sparse tensor

	// Of the operation being run:
	ctx      context.Context
	op       *operation
	since    time.Time      // when the operation first had to wait; zero before
	deadline time.Time      // see until
	armed    stage          // what the timer is set to
	told     bool           // the rank that is waited for has been told of the operation
	asks     *ask.Operation // the other ranks are asked why the operation takes so long
	tag      uint32
	slot     uint64
}

func newEngine(s *session, r route, lists listRoute) *engine {
	t := time.NewTimer(time.Hour)
	t.Stop()
	e := &engine{session: s, route: r, byList: lists, timer: t, meeting: callback.NewRegistry[*progress]()}
	e.stop = e.over
	return e
}

// begin readies the engine for an operation.
func (e *engine) begin(o *operation) {
	e.ctx, e.op = o.ctx, o
	if g := e.session.Memory; g != nil {
		g.Begin(uint32(o.call), o.print.History)
	}
	e.useTag(o.tag)
	e.since = time.Time{}
	e.told, e.asks = false, nil
}

// until returns when the operation's time is over. The time begins to run when the operation first
// has to wait: reading the clock takes a good part of a small one.
func (e *engine) until() time.Time {
	if e.since.IsZero() {
		e.since = time.Now()
		e.deadline = e.op.until(e.since)
	}
	return e.deadline
}

// askAt returns when the other ranks are asked why the operation takes so long.
func (e *engine) askAt() time.Time {
	until := e.until()
	return until.Add(-blame.Lead(until.Sub(e.since)))
}

// ask makes this rank ask the others, and ends the group when the time of the operation is over. The operation waits for rank
// peer, or for an unknown one if peer is -1.
func (e *engine) ask(peer int) {
	if e.asks == nil {
		e.until()
		e.asks = e.session.dueOf(e.mesh, &e.op.called, peer, e.since)
		e.session.ask(e.asks)
	}
}

// stage is what an engine that waits does next.
type stage uint8

const (
	nothing  stage = iota
	announce       // send the description of the operation to the rank that it waits for
	question       // ask the other ranks
	fail           // end the group
)

// announceAfter is how long an operation waits for a rank before it sends that rank its
// description. Ranks that disagree usually notice by their first messages. Two ranks that both
// wait, because they mean different roots, send none.
const announceAfter = 20 * time.Millisecond

// next returns what is next in a wait for peer. The timer delivers when that is. It is set only when somebody has
// to wait.
func (e *engine) next(peer int) (stage, <-chan time.Time) {
	if e.armed == announce && !e.told {
		return announce, e.timer.C
	}
	at, s := e.until(), fail
	switch soon := time.Now().Add(announceAfter); {
	case peer == ownRank:
	case !e.told && soon.Before(e.askAt()):
		at, s = soon, announce
	case e.asks != nil:
		e.asks.WaitsFor(peer)
		return nothing, nil
	default:
		at, s = e.askAt(), question
	}
	if e.armed != s {
		e.timer.Reset(time.Until(at))
		e.armed = s
	}
	return s, e.timer.C
}

// useTag makes the following steps run under a tag; operations that use
// several tags call it again.
func (e *engine) useTag(tag uint32) {
	e.tag = tag
	e.mesh = e.session.meshFor(tag)
	e.slot = slotOf(e.op.prefix, tag)
}

// end lets go of the operation.
func (e *engine) end() {
	if e.armed != nothing {
		e.timer.Stop()
		e.armed = nothing
	}
	e.ctx, e.op, e.mesh, e.awaited = nil, nil, nil, nil
	for _, l := range e.lists {
		clear(l)
	}
	e.main.end()
	for _, g := range e.between {
		g.end()
	}
	if cap(e.packed) > keepScratch {
		e.packed = nil
	}
	if cap(e.joined) > keepScratch {
		e.joined = nil
	}
	if cap(e.blocks) > keepScratch {
		e.blocks = nil
	}
}

// run executes a plan. Out is changed in place; in may be nil. When it returns,
// with or without an error, nobody touches the buffers any more.
func (e *engine) run(p *plan.Plan, out, in []byte, combine func(dst, src []byte)) error {
	g := &e.main
	g.begin(p, e.slot, nil, out, in)
	if err := e.advance(g, combine); err != nil {
		e.drain()
		return err
	}
	return nil
}

// advance executes the next steps of a plan: all of them, or those of a step between clusters up to
// one that has to wait.
func (e *engine) advance(g *progress, combine func(dst, src []byte)) error {
	bufs, steps := &g.bufs, g.plan.Steps
	for ; g.next < len(steps); g.next++ {
		s := &steps[g.next]
		switch s.Kind {
		case plan.Send, plan.Recv:
			r := g.reqs[s.Req]
			r.Peer, r.Slot, r.Buf = int(s.Peer), g.slot, bufs[s.Buf][s.Off:s.Off+s.Len]
			if g.peers != nil {
				r.Peer = g.peers[s.Peer]
			}
			g.busy[s.Req] = true
			if g.meeting != nil {
				m := g.posts[s.Req]
				m.meeting = g.meeting
				g.meeting.Post(&m.key)
			}
			if s.Kind == plan.Send {
				e.sends = append(e.sends, r)
			} else {
				e.recvs = append(e.recvs, r)
			}
			if next := g.next + 1; next == len(steps) || steps[next].Kind > plan.Recv {
				if m := e.session.TCP; m != nil && e.messages() == nil {
					m.Post(e.recvs, e.sends)
				} else {
					for _, r := range e.recvs {
						e.mesh.Recv(r)
					}
					for _, r := range e.sends {
						e.mesh.Send(r)
					}
				}
				e.recvs, e.sends = e.recvs[:0], e.sends[:0]
			}
		case plan.Wait:
			r := g.reqs[s.Req]
			if g.meeting == nil {
				e.wait(r)
			} else if !g.meeting.Expect(&g.posts[s.Req].key) {
				return nil
			}
			g.busy[s.Req], r.Buf = false, nil // the program may free its tensors
			if err := r.Err(); err != nil {
				return e.session.failed(e.mesh, e.op.Info(), r, err)
			}
		case plan.Reduce:
			combine(bufs[s.Buf][s.Off:s.Off+s.Len], bufs[s.Src][s.SrcOff:s.SrcOff+s.Len])
		case plan.Copy:
			copy(bufs[s.Buf][s.Off:s.Off+s.Len], bufs[s.Src][s.SrcOff:s.SrcOff+s.Len])
		}
	}
	return nil
}

// wait waits for the end of r, or ends the whole group when the operation's time or context ends.
func (e *engine) wait(r *transport.Request) {
	e.awaited = r
	if h, ok := e.mesh.(transport.Poller); ok && !e.Finished() {
		h.PollUntil(e)
	}
	select {
	case <-r.Done():
	default:
		e.sleep(r.Done(), nil, r.Peer)
	}
}

// messages returns the mesh if it moves data only for those who ask, else nil: see namedRoute.
func (e *engine) messages() MessageMesh {
	if d := e.session.Direct; d != nil && e.mesh == transport.Mesh(d) {
		return d
	}
	return nil
}

// ownRank is the peer of a wait for this rank itself.
const ownRank = -2

// sleep waits for done or failed. The group ends when the operation's time or context ends while
// it waits for peer, which may be anyRank or ownRank.
func (e *engine) sleep(done, failed <-chan struct{}, peer int) {
	e.told = peer < 0
	canceled := e.ctx.Done()
	if d := e.messages(); d != nil {
		d.MoveInBackground()
	}
	for {
		s, due := e.next(peer)
		select {
		case <-done:
			return
		case <-failed:
			return
		case <-canceled:
			canceled = nil
			e.giveUp(peer)
			continue
		case <-due:
		}
		switch e.armed = nothing; s {
		case announce:
			e.told = true
			if m := e.session.TCP; m != nil && e.session.Shared == nil {
				m.Announce(peer, e.tag)
			}
		case question:
			e.ask(peer)
		case fail:
			e.session.fail(e.mesh, e.op.Info(), fmt.Errorf("%w after %v: its data were not ready on rank %d", work.ErrTimeout, e.op.timeout, e.session.rank), e.session.rank)
			select {
			case <-done:
			case <-failed:
			}
			return
		}
	}
}

// giveUp ends the group because the context of the operation has ended.
func (e *engine) giveUp(peer int) {
	s := e.session
	switch cause := blame.Canceled(e.ctx); {
	case !errors.Is(cause, work.ErrTimeout):
		s.fail(e.mesh, e.op.Info(), cause, s.rank)
	case peer == ownRank:
		s.fail(e.mesh, e.op.Info(), fmt.Errorf("%w: its data were not ready on rank %d", cause, s.rank), s.rank)
	default:
		e.ask(peer)
	}
}

// Finished implements transport.Waiter.
func (e *engine) Finished() bool {
	if e.awaited == nil {
		return e.cluster.meeting.Due()
	}
	return len(e.awaited.Done()) > 0
}

// drain waits for what is still posted. The mesh has failed by now, so nothing is pending for long.
func (e *engine) drain() {
	for i, posted := range e.main.busy {
		if posted {
			<-e.main.reqs[i].Done()
			e.main.busy[i] = false
		}
	}
	for k, g := range e.chunks {
		for ; g != nil; g = e.chunks[k] {
			g.meeting.Settle()
			e.release(k)
		}
	}
}

// release takes the first step off the list of a chunk.
func (e *engine) release(chunk int) {
	g := e.chunks[chunk]
	e.chunks[chunk] = g.then
	g.step, g.then = nil, nil
	e.free = append(e.free, g)
}

// reduction is backend.Reduction with nil functions left out of the way.
func before(r backend.Reduction, b []byte) {
	if r.Before != nil {
		r.Before(b)
	}
}

func after(r backend.Reduction, b []byte) {
	if r.After != nil {
		r.After(b)
	}
}

// onSlot runs a collective within another one on a slot of its own, as Gloo does
// with all-gathers within an all-reduce.
func (e *engine) onSlot(prefix uint8, run func() error) error {
	before := e.slot
	defer func() { e.slot = before }()
	e.slot = slotOf(prefix, e.tag)
	return run()
}

// over returns why the operation has to end, nil while it may go on. It is what
// waits in shared memory ask.
func (e *engine) over() error {
	select {
	case <-e.mesh.Failed():
		return e.mesh.Fault()
	case <-e.ctx.Done():
		if e.giveUp(anyRank); e.mesh.Fault() != nil {
			return e.mesh.Fault()
		}
	default:
		if e.asks == nil && !time.Now().Before(e.askAt()) {
			e.ask(anyRank)
		}
	}
	return nil
}

// shared turns the error of a collective in shared memory into the operation's.
func (e *engine) shared(err error) error {
	if err == nil {
		return nil
	}
	return e.session.inMemory(e.mesh, e.op.Info(), err)
}
