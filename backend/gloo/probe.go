package gloo

import (
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
)

// Probe implements backend.Prober.
func (b *Backend) Probe() backend.Probe {
	s := &b.waits
	var waits []wait
	b.mu.Lock()
	if s.collectives.Stopped() {
		b.mu.Unlock()
		return backend.Probe{}
	}
	s.running.Add(1)
	if b.inflight.Len() > 0 {
		waits = append(waits, waitOf(&b.inflight.At(0).called, -1, time.Time{}))
	}
	b.mu.Unlock()
	defer s.running.Done()
	if q := s.oldestMessage(); q != nil {
		waits = append(waits, *q)
	}
	if b.fault() != nil || len(b.meshes) == 0 {
		return backend.Probe{}
	}
	health := b.meshes[0].Diagnose(blame.AskFor)
	if b.fault() != nil {
		return backend.Probe{}
	}
	var p backend.Probe
	for _, w := range waits {
		text, ranks, why := blame.Waiting(w.Call, b.rank, b.checks, health)
		p.Waits = append(p.Waits, backend.Wait{Op: w.Op.String(), Seq: w.seq, Text: text, Ranks: ranks, Why: why})
	}
	p.Links = b.links(health)
	return p
}

// oldestMessage returns the oldest send or receive that takes long, nil if there is none.
func (s *waitLog) oldestMessage() *wait {
	s.mu.Lock()
	defer s.mu.Unlock()
	var q *message
	for x := range s.late {
		if q == nil || x.Info().Seq < q.Info().Seq {
			q = x
		}
	}
	if q == nil {
		return nil
	}
	w := waitOf(&q.called, q.peer(), time.Time{})
	return &w
}

// links returns the states of this rank's connections.
func (b *Backend) links(health []transport.Health) []backend.State {
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
