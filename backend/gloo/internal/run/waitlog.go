package run

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/work"
)

// tellOfOldest writes to the log while the oldest of some operations waits long for other ranks. mu guards both
// watch and what oldest reads.
func (b *Group) tellOfOldest(mu *sync.Mutex, watch *oldestWatch, oldest func() (o *called, peer int)) {
	mu.Lock()
	o, peer := oldest()
	var w *work.Work
	if o != nil {
		w = o.Work()
	}
	if !watch.look(w) {
		mu.Unlock()
		return
	}
	c := o.wait(peer, watch.since)
	b.asking.Add(1)
	mu.Unlock()
	defer b.asking.Done()
	if text, attrs := b.missing(c); text != "" && !w.IsCompleted() {
		waiting.Write(context.Background(), b.log, text, attrs, c.Since, c.Until)
	}
}

// oldestCollective returns the oldest collective under way, nil if there is none. b.mu is held.
func (b *Group) oldestCollective() (o *called, peer int) {
	if b.inflight.Len() == 0 {
		return nil, anyRank
	}
	return &b.inflight.At(0).called, anyRank
}

// tellDuring writes about o, which is not queued, until the returned function is called.
func (b *Group) tellDuring(ctx context.Context, o *operation) (stop func()) {
	c := o.wait(-1, time.Now())
	ctx, cancel := context.WithDeadline(waiting.WithFirst(ctx, b.oldest.first), c.Until)
	end := waiting.Start(ctx, b.log, func(context.Context) (string, []slog.Attr) { return b.missing(c) })
	return func() {
		end()
		cancel()
	}
}

// stopTelling returns when nothing is written any more. b.mu is not held.
func (b *Group) stopTelling() {
	b.mu.Lock()
	b.oldest.Stop()
	b.mu.Unlock()
	b.messages.mu.Lock()
	b.messages.oldest.Stop()
	b.messages.mu.Unlock()
	b.asking.Wait()
}

// missing asks the other ranks how far they are and says whom c waits for.
func (b *Group) missing(c blame.Call) (text string, attrs []slog.Attr) {
	health := b.meshFor(c.Tag).Diagnose(blame.AskFor)
	if b.fault() != nil {
		return "", nil
	}
	attrs = []slog.Attr{slog.String("op", c.Op.String()), slog.Uint64("seq", c.Seq)}
	text, _, each := blame.Waiting(c, b.rank, b.checks, health)
	if len(each) > 0 {
		attrs = append(attrs, slog.String("missing", waiting.Some(each)))
	}
	return text, attrs
}

// Probe implements backend.Prober.
func (b *Group) Probe() backend.Probe {
	var calls []blame.Call
	b.mu.Lock()
	if b.oldest.Stopped() {
		b.mu.Unlock()
		return backend.Probe{}
	}
	b.asking.Add(1)
	if o, peer := b.oldestCollective(); o != nil {
		calls = append(calls, o.wait(peer, time.Time{}))
	}
	b.mu.Unlock()
	defer b.asking.Done()
	b.messages.mu.Lock()
	if o, peer := b.messages.oldestLate(); o != nil {
		calls = append(calls, o.wait(peer, time.Time{}))
	}
	b.messages.mu.Unlock()
	if b.fault() != nil || len(b.Meshes) == 0 {
		return backend.Probe{}
	}
	health := b.Meshes[0].Diagnose(blame.AskFor)
	if b.fault() != nil {
		return backend.Probe{}
	}
	var p backend.Probe
	for _, c := range calls {
		text, ranks, why := blame.Waiting(c, b.rank, b.checks, health)
		p.Waits = append(p.Waits, backend.Wait{Op: c.Op.String(), Seq: c.Seq, Text: text, Ranks: ranks, Why: why})
	}
	p.Links = b.links(health)
	return p
}

// links returns the states of this rank's connections.
func (b *Group) links(health []transport.Health) []backend.State {
	own := make(map[int]transport.Link)
	if b.rank < len(health) {
		for _, l := range health[b.rank].Links {
			own[l.Peer] = l
		}
	}
	var all []backend.State
	for _, h := range health {
		if h.Rank == b.rank {
			continue
		}
		l := own[h.Rank]
		all = append(all, backend.State{
			Rank: h.Rank, Answered: h.Answered, Left: h.Departed, Calls: h.Issued, RTT: l.RTT, Quiet: l.Quiet, Rate: l.Rate,
		})
	}
	return all
}

// waitsFor says for whom this rank waits, and in what, for other ranks that ask. The mesh may hold locks.
func (b *Group) waitsFor() transport.Waiting {
	w := transport.Waiting{Op: transport.NoOp, Peers: make(map[int]transport.Needs)}
	add := func(q *message) {
		switch {
		case q.Peer() < 0:
		case q.Info().Op == work.Send:
			w.Peers[q.Peer()] |= transport.NeedsSend
		default:
			w.Peers[q.Peer()] |= transport.NeedsRecv
		}
	}
	b.messages.mu.Lock()
	for q := b.messages.head; q != nil; q = q.next {
		add(q)
	}
	for q := range b.messages.late {
		add(q)
	}
	b.messages.mu.Unlock()
	if g := b.Memory; g != nil {
		if r, ok := g.WaitsFor(); ok {
			if b.members != nil {
				r = b.members[r]
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
func (b *Group) Foreign() []int {
	for _, m := range b.Meshes {
		if f, ok := m.(interface{ Foreign() []int }); ok {
			if ranks := f.Foreign(); len(ranks) > 0 {
				return ranks
			}
		}
	}
	return nil
}
