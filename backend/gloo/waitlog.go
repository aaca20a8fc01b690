package gloo

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/recheck"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/work"
)

// waitLog writes to the log while an operation waits long for other ranks: about the oldest
// collective, and about the oldest send or receive. Receives from any rank name nobody to
// wait for, so nothing is written about them.
type waitLog struct {
	options backend.Options
	first   time.Duration
	running sync.WaitGroup // lines being written

	collectives oldestWatch // under Backend.mu

	mu       sync.Mutex
	messages oldestWatch
	late     map[*message]struct{} // that have watchers
}

// oldestWatch notices that the oldest of some operations has stayed the same. It looks ticks times
// before the first line.
type oldestWatch struct {
	recheck.Timer
	first    time.Duration
	oldest   *future
	since    time.Time
	due      time.Time     // for a line
	interval time.Duration // between lines
}

const ticks = 8

// start begins to look, if no look is due.
func (w *oldestWatch) start(oldest *future) {
	if !w.Pending && !w.Stopped() {
		w.After(w.first / ticks)
		w.begin(oldest)
	}
}

func (w *oldestWatch) begin(oldest *future) {
	w.oldest, w.since, w.interval = oldest, time.Now(), w.first
	w.due = w.since.Add(w.first)
}

// look takes note of the oldest operation, nil if there is none, and reports whether a line is due.
func (w *oldestWatch) look(oldest *future) bool {
	if oldest == nil || w.Stopped() {
		w.Rest()
		w.oldest = nil
		return false
	}
	w.After(w.first / ticks)
	if oldest != w.oldest {
		w.begin(oldest)
	}
	now := time.Now()
	if now.Before(w.due) {
		return false
	}
	w.interval = waiting.Next(w.interval)
	w.due = now.Add(w.interval)
	return true
}

func (s *waitLog) init(ctx context.Context, b *Backend, o backend.Options) {
	s.options, s.first = o, waiting.First(ctx)
	s.collectives.first, s.collectives.Check = s.first, b.lookAtCollectives
	s.messages.first, s.messages.Check = s.first, b.lookAtMessages
}

// logger returns the logger of o. Its lines name the group and this rank.
func logger(o backend.Options) *slog.Logger {
	return o.Names.Logger(o.Logger, o.Group, o.Rank)
}

// lookAtCollectives is a timer's function.
func (b *Backend) lookAtCollectives() {
	s := &b.waits
	oldest := func() (*operation, *future) {
		if b.inflight.Len() == 0 {
			return nil, nil
		}
		return b.inflight.At(0), b.inflight.At(0).future
	}
	b.mu.Lock()
	o, f := oldest()
	if !s.collectives.look(f) {
		b.mu.Unlock()
		return
	}
	w := waitOf(&o.called, -1, s.collectives.since)
	s.running.Add(1)
	b.mu.Unlock()
	defer s.running.Done()
	s.tell(b, w, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		_, now := oldest()
		return now == f
	})
}

// watch notes a send or a receive that has taken more than some milliseconds.
func (s *waitLog) watch(q *message) {
	if q.peer() < 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.late == nil {
		s.late = make(map[*message]struct{})
	}
	s.late[q] = struct{}{}
	s.messages.start(q.future)
}

// forget ends watch.
func (s *waitLog) forget(q *message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.late, q)
}

// lookAtMessages is a timer's function.
func (b *Backend) lookAtMessages() {
	s := &b.waits
	s.mu.Lock()
	var q *message
	var f *future
	for x := range s.late {
		if q == nil || x.Info().Seq < q.Info().Seq {
			q, f = x, x.future
		}
	}
	if !s.messages.look(f) {
		s.mu.Unlock()
		return
	}
	w := waitOf(&q.called, q.peer(), s.messages.since)
	s.running.Add(1)
	s.mu.Unlock()
	defer s.running.Done()
	s.tell(b, w, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		_, still := s.late[q]
		return still
	})
}

// during writes about o, which is not queued, until the returned function is called.
func (s *waitLog) during(ctx context.Context, b *Backend, o *operation) (stop func()) {
	w := waitOf(&o.called, -1, time.Now())
	ctx, cancel := context.WithDeadline(waiting.WithFirst(ctx, s.first), w.Until)
	end := waiting.Start(ctx, logger(s.options), func(context.Context) (string, []slog.Attr) { return s.missing(b, w) })
	return func() {
		end()
		cancel()
	}
}

// stop returns when nothing is written any more. b.mu is not held.
func (s *waitLog) stop(b *Backend) {
	b.mu.Lock()
	s.collectives.Stop()
	b.mu.Unlock()
	s.mu.Lock()
	s.messages.Stop()
	s.mu.Unlock()
	s.running.Wait()
}

// wait describes an operation that waits.
type wait struct {
	blame.Call
	seq   uint64
	since time.Time
}

// waitOf describes an operation, which must not have ended. Peer is that of a send or a receive, else -1.
func waitOf(o *called, peer int, since time.Time) wait {
	i := o.Info()
	c := blame.Call{Op: i.Op, Collective: o.collective, Number: o.call, Tag: o.tag, Peer: peer, Until: o.until(since)}
	return wait{Call: c, seq: i.Seq, since: since}
}

// tell writes a line about w, unless it has ended by then.
func (s *waitLog) tell(b *Backend, w wait, still func() bool) {
	text, attrs := s.missing(b, w)
	if text != "" && still() {
		waiting.Write(context.Background(), logger(s.options), text, attrs, w.since, w.Until)
	}
}

// missing asks the other ranks how far they are and says whom w waits for.
func (s *waitLog) missing(b *Backend, w wait) (text string, attrs []slog.Attr) {
	health := b.meshFor(w.Tag).Diagnose(blame.AskFor)
	if b.fault() != nil {
		return "", nil
	}
	attrs = []slog.Attr{slog.String("op", w.Op.String()), slog.Uint64("seq", w.seq)}
	text, _, each := blame.Waiting(w.Call, b.rank, b.checks, health)
	if len(each) > 0 {
		attrs = append(attrs, slog.String("missing", waiting.Some(each)))
	}
	return text, attrs
}

// waitsFor says for whom this rank waits, and in what, for other ranks that ask. The mesh may hold locks.
func (b *Backend) waitsFor() transport.Waiting {
	w := transport.Waiting{Op: noOp, Peers: make(map[int]transport.Needs)}
	add := func(q *message) {
		switch {
		case q.peer() < 0:
		case q.Info().Op == work.Send:
			w.Peers[q.peer()] |= transport.NeedsSend
		default:
			w.Peers[q.peer()] |= transport.NeedsRecv
		}
	}
	b.messages.mu.Lock()
	for q := b.messages.head; q != nil; q = q.next {
		add(q)
	}
	b.messages.mu.Unlock()
	b.waits.mu.Lock()
	for q := range b.waits.late {
		add(q)
	}
	b.waits.mu.Unlock()
	if g := b.memory(); g != nil {
		if r, ok := g.WaitsFor(); ok {
			if b.clusters != nil {
				r = b.clusters.members[r]
			}
			w.Peers[r] |= transport.NeedsData
		}
	}
	// A call that posts to the mesh holds the lock. It is then not known what the rank is in.
	if b.mu.TryLock() {
		if b.inflight.Len() > 0 {
			w.Op = uint8(b.inflight.At(0).Info().Op)
		}
		b.mu.Unlock()
	}
	return w
}

// Foreign returns the ranks that have shown that they are not of this library but PyTorch's.
// A rank shows that with its first message to this one.
func (b *Backend) Foreign() []int {
	for _, m := range b.meshes {
		if f, ok := m.(interface{ Foreign() []int }); ok {
			if ranks := f.Foreign(); len(ranks) > 0 {
				return ranks
			}
		}
	}
	return nil
}
