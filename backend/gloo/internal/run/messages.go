package run

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/begun"
	"github.com/c10d-go/c10d/internal/lazytimer"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Send posts t for rank dst at once, past the queue. Its slot is the tag itself.
func (b *Group) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	if err := b.args.Message(work.Send, t, dst); err != nil {
		return nil, err
	}
	buf := t.Bytes()
	if buf == nil && t.Len() > 0 {
		packed, err := t.Clone()
		if err != nil {
			return nil, bad(work.Send, "%v", err)
		}
		buf = packed.Bytes()
	}
	return b.p2pOp(ctx, work.Send, o, dst, buf, nil)
}

// Recv posts a receive from rank src at once, past the queue.
func (b *Group) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	return b.receive(ctx, work.Recv, t, src, o)
}

// RecvAnySource posts a receive from whoever sends first on the tag.
func (b *Group) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	return b.receive(ctx, work.RecvAnySource, t, -1, o)
}

func (b *Group) receive(ctx context.Context, op work.OpType, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	if err := b.args.Message(op, t, src); err != nil {
		return nil, err
	}
	if buf := t.Bytes(); buf != nil || t.Len() == 0 {
		return b.p2pOp(ctx, op, o, src, buf, t)
	}
	packed, err := tensor.New(t.DType(), t.Shape()...)
	if err != nil {
		return nil, bad(op, "%v", err)
	}
	return b.p2pOp(ctx, op, o, src, packed.Bytes(), t)
}

// p2pOp posts a send (out is nil) or a receive into buf, which is out's own
// memory or a packed stand-in for it.
func (b *Group) p2pOp(ctx context.Context, op work.OpType, o backend.P2POptions, peer int, buf []byte, out *tensor.Tensor) (*work.Work, error) {
	if err := b.admit(ctx, op); err != nil {
		return nil, err
	}
	q := b.messages.fresh
	if q == nil {
		q = new(message)
	}
	q.Promise, q.group, q.mesh, q.out = &q.own, b, b.meshOfMessages(o.Tag), out
	b.begin(&q.called, ctx, op, o.Timeout)
	q.RunBy(q)
	q.tag = o.Tag
	b.p2p.Add(1)
	q.r.Peer, q.r.Slot, q.r.Buf, q.r.Owner = peer, uint64(o.Tag), buf, q
	if op == work.Recv {
		q.SetSource(peer)
	}
	q.Start()
	// Posted under the lock: calls match in the order in which they were made.
	switch op {
	case work.Send:
		q.mesh.Send(&q.r)
	case work.Recv:
		q.mesh.Recv(&q.r)
	default:
		q.mesh.RecvAny(&q.r)
	}
	b.messages.fresh = new(message)
	b.mu.Unlock()
	if !q.Finished() {
		began := q.Work().Began()
		if c, ok := ctx.(*begun.Context); ok {
			began = c.Since.Sub(work.Origin())
		}
		if q.deadline = began + q.timeout; q.deadline < began {
			q.deadline = math.MaxInt64
		}
		b.messages.add(q)
	}
	return q.Work(), nil
}

// message is a send or a receive on its way. No goroutine waits for it, unless
// a caller does; the request tells it that it has ended.
type message struct {
	called
	own      work.Promise
	group    *Group
	r        transport.Request
	mesh     transport.Mesh
	out      *tensor.Tensor
	room     [1]*tensor.Tensor // for the result
	deadline time.Duration     // since work.Origin

	// Under messages.mu:
	next, before *message
	since        uint32 // checks when it was posted
	listed       bool
	over         bool
	unwatch      func() bool // stops watching the context
	limit        *time.Timer
}

// messages are the sends and receives whose contexts and deadlines nobody watches yet: watching
// costs more than most messages take. A message that is still there at the second check after its
// post is moved by the mesh itself, since perhaps nobody waits for it. A message that takes long is
// watched.
type messages struct {
	fresh *message // for the next call; made while the peer works on the last one. Under queue.mu

	mu      sync.Mutex
	head    *message
	last    *message
	recheck lazytimer.Timer
	checks  uint32
	posts   uint64        // since the last check
	pause   time.Duration // before the next check; at least waiterFirst

	late   map[*message]struct{} // that have watchers and name a rank
	oldest oldestWatch           // of those
}

// watchAfter is how long a message may take without watchers, unless a caller
// waits for it.
const watchAfter = 10 * time.Millisecond

// add has q checked, unless it has ended.
func (s *messages) add(q *message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.over {
		return
	}
	q.listed, q.since = true, s.checks
	if q.before = s.last; s.last != nil {
		s.last.next = q
	} else {
		s.head = q
	}
	s.last = q
	s.posts++
	s.recheck.Within(max(s.pause, waiterFirst))
}

// unlist forgets q. s.mu is held.
func (s *messages) unlist(q *message) {
	if !q.listed {
		return
	}
	q.listed = false
	if q.before != nil {
		q.before.next = q.next
	} else {
		s.head = q.next
	}
	if q.next != nil {
		q.next.before = q.before
	} else {
		s.last = q.before
	}
	q.next, q.before = nil, nil
}

// checkMessages sees to the messages that were there at the last check.
func (b *Group) checkMessages() {
	s := &b.messages
	s.mu.Lock()
	late, now := false, time.Since(work.Origin())
	for q := s.head; q != nil && q.since != s.checks; {
		late = late || q.since == s.checks-1
		next := q.next
		if left := q.deadline - now; left < watchAfter || left < q.timeout-watchAfter {
			s.unlist(q)
			q.watch()
		}
		q = next
	}
	s.checks++
	switch {
	case late:
		s.pause = waiterFirst
	case s.posts > 0: // they were waited for at once
		s.pause = min(2*max(s.pause, waiterFirst), watchAfter/2)
	}
	switch pause := s.recheck.Pause; {
	case s.posts > 0:
		s.recheck.After(max(s.pause, waiterFirst))
	case s.head != nil:
		s.recheck.After(min(2*pause, watchAfter/2))
	default:
		s.recheck.Rest()
	}
	s.posts = 0
	s.mu.Unlock()
	switch {
	case !late:
	case b.Direct != nil:
		b.Direct.MoveInBackground()
	default:
		for _, m := range b.Meshes {
			moveBySelf(m)
		}
	}
}

// watch ends the group when the message's context or time ends. messages.mu is held.
func (q *message) watch() {
	b, since := q.group, work.Origin().Add(q.Work().Began())
	if q.ctx.Done() != nil {
		b.p2p.Add(1)
		q.unwatch = context.AfterFunc(q.ctx, func() {
			defer b.p2p.Done()
			if b.Direct != nil {
				b.Direct.PollOnce() // a message that has come wins
			}
			if !q.Finished() {
				b.giveUp(b.dueOf(q.mesh, &q.called, q.Peer(), since))
			}
		})
	}
	b.p2p.Add(1)
	until := q.until(since)
	q.limit = time.AfterFunc(time.Until(until)-blame.Lead(until.Sub(since)), func() {
		defer b.p2p.Done()
		if !q.Finished() {
			b.ask(b.dueOf(q.mesh, &q.called, q.Peer(), since))
		}
	})
	if s := &b.messages; q.Peer() >= 0 {
		if s.late == nil {
			s.late = make(map[*message]struct{})
		}
		s.late[q] = struct{}{}
		s.oldest.start(q.Work())
	}
}

// oldestLate returns the oldest send or receive that takes long, nil if there is none. A receive from any rank names
// nobody to wait for, so it does not count. s.mu is held.
func (s *messages) oldestLate() (o *called, peer int) {
	for q := range s.late {
		if o == nil || q.Info().Seq < o.Info().Seq {
			o, peer = &q.called, q.Peer()
		}
	}
	return o, peer
}

// Peer implements hostmesh.Peered.
func (q *message) Peer() int {
	if q.Info().Op == work.RecvAnySource {
		return anyRank
	}
	return q.r.Peer
}

// Help makes messages go on while the caller waits.
func (q *message) Help(ctx context.Context) {
	if d := q.group.Direct; d != nil {
		d.PollUntil(q, ctx.Done())
	} else if h, ok := q.mesh.(transport.Poller); ok {
		h.PollUntil(q)
	}
}

// Abort ends the group because of this message.
func (q *message) Abort(cause error) {
	info := q.Info()
	q.group.abort(cause, &info)
}

// EndsWith reports whether the message ends with ctx.
func (q *message) EndsWith(ctx context.Context) bool { return q.ctx.Done() == ctx.Done() }

// Finished implements shm.Waiter and transport.Waiter.
func (q *message) Finished() bool { return q.Work().IsCompleted() }

// Expired implements shm.Waiter.
func (q *message) Expired() bool {
	return q.ctx.Err() != nil || time.Since(work.Origin()) >= q.deadline
}

// Ended implements transport.Owner.
func (q *message) Ended(r *transport.Request) {
	b := q.group
	s := &b.messages
	s.mu.Lock()
	q.over = true
	s.unlist(q)
	delete(s.late, q)
	s.mu.Unlock()
	if q.unwatch != nil && q.unwatch() {
		b.p2p.Done()
	}
	if q.limit != nil && q.limit.Stop() {
		b.p2p.Done()
	}
	// The mesh is not to be asked nor held up in here.
	if r.Err() != nil || q.out != nil && q.out.Bytes() == nil {
		go q.finish()
	} else {
		q.finish()
	}
}

// finish ends the operation.
func (q *message) finish() {
	defer q.group.p2p.Done()
	err := q.r.Err()
	if err != nil {
		err = q.group.failed(q.mesh, q.Info(), &q.r, err)
		q.group.tellFirst()
	} else if q.out != nil {
		if q.Peer() < 0 {
			q.SetSource(q.r.Peer)
		}
		q.room[0] = q.out
		q.SetResult(q.room[:]...)
		if own := q.out.Bytes(); own == nil && q.out.Len() > 0 {
			err = q.out.Unpack(q.r.Buf)
		}
		if err == nil {
			err = cleanBools(q.room[:])
		}
	}
	q.Complete(err)
}
