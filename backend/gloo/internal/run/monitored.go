package run

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/ask"
	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// MonitoredBarrier meets at rank 0, which hears from every rank and then
// answers all. Either all ranks leave it successfully or none does.
func (b *Group) MonitoredBarrier(ctx context.Context, o backend.MonitoredBarrierOptions) error {
	if b.size == 1 {
		return nil
	}
	q := &operation{}
	if err := b.admit(ctx, work.Barrier); err != nil {
		return err
	}
	q.begin(&b.queue, ctx, work.Barrier, o.Timeout)
	q.collective, q.call = true, b.calls
	in, out := b.tag, b.tag+1
	b.tag += 2
	b.calls++
	b.beside = b.calls
	b.progress()
	q.tag, q.print = in, fingerprint{op: opMonitoredBarrier, root: -1}.call()
	b.enter(q)
	b.inflight.Put(q)
	b.p2p.Add(1)
	b.mu.Unlock()
	defer b.p2p.Done()
	defer b.tellDuring(ctx, q)()
	q.Start()
	err := b.monitored(q, in, out)
	if err == nil && b.Shared != nil {
		err = b.inMemory(b.Meshes[0], q.Info(), b.Shared.CompareCalls(ended))
	}
	b.finish(q, err)
	return q.Work().Err()
}

func (b *Group) monitored(q *operation, in, out uint32) error {
	h := &heard{reqs: make([]*transport.Request, b.size), done: make([]bool, b.size)}
	d := b.dueOf(b.meshFor(in), &q.called, 0, time.Now())
	if b.rank == 0 {
		limit := q.timeout
		if deadline, ok := q.ctx.Deadline(); ok {
			limit = min(limit, time.Until(deadline).Round(time.Millisecond))
		}
		d.WaitsFor(anyRank)
		d.Blame = func(d *ask.Operation, v blame.Verdict) { b.blameMissing(d, v, h, limit) }
	} else {
		d.Turn++ // rank 0 names all ranks that are missing
	}
	// A message may have to wait, too: see monitoredSlot.
	t := time.AfterFunc(time.Until(d.Until)-blame.Lead(d.Until.Sub(d.Since)), func() { b.ask(d) })
	defer t.Stop()
	known, cancel := context.WithDeadline(q.ctx, d.Until)
	defer cancel()
	post := func(tag uint32, peer int, send bool, buf []byte) *transport.Request {
		m := b.meshFor(tag)
		r := transport.NewRequest()
		r.Peer, r.Slot, r.Buf = peer, monitoredSlot(known, m, tag, peer), buf
		if send {
			m.Send(r)
		} else {
			m.Recv(r)
		}
		return r
	}
	await := func(tag uint32, r *transport.Request) error {
		m := b.meshFor(tag)
		if len(r.Done()) == 0 {
			moveBySelf(m)
		}
		select {
		case <-r.Done():
		case <-d.Ctx.Done():
			b.giveUp(d)
			<-r.Done()
		}
		if err := r.Err(); err != nil {
			return b.failed(m, q.Info(), r, err)
		}
		return nil
	}
	me := binary.LittleEndian.AppendUint32(nil, uint32(b.rank))
	if b.rank != 0 {
		hello, bye := post(in, 0, true, me), post(out, 0, false, make([]byte, 4))
		err := await(in, hello)
		if e := await(out, bye); err == nil {
			err = e
		}
		return err
	}
	came := make([][]byte, b.size)
	for r := 1; r < b.size; r++ {
		came[r] = make([]byte, 4)
		h.post(r, post(in, r, false, came[r]))
	}
	var first error
	for r := 1; r < b.size; r++ {
		err := await(in, h.reqs[r])
		h.end(r)
		if err != nil && first == nil {
			first = err
		}
	}
	if first != nil {
		return first
	}
	for r := 1; r < b.size; r++ {
		if want := binary.LittleEndian.AppendUint32(nil, uint32(r)); !bytes.Equal(came[r], want) {
			return b.mismatch(b.meshFor(in), q.Info(), r, fmt.Errorf("rank %d said it was rank %d", r, int32(binary.LittleEndian.Uint32(came[r]))))
		}
	}
	var byes []*transport.Request
	for r := 1; r < b.size; r++ {
		byes = append(byes, post(out, r, true, me))
	}
	for _, r := range byes {
		if err := await(out, r); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// heard is which ranks rank 0 has heard in a monitored barrier.
type heard struct {
	mu   sync.Mutex
	reqs []*transport.Request // by rank, nil if not posted
	done []bool               // by rank
}

func (h *heard) post(rank int, r *transport.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reqs[rank] = r
}

func (h *heard) end(rank int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.done[rank] = true
}

// ranks returns the other ranks that have come, and those that have not.
func (h *heard) ranks() (here, missing []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for r := 1; r < len(h.done); r++ {
		if h.done[r] || h.reqs[r] != nil && len(h.reqs[r].Done()) > 0 {
			here = append(here, r)
		} else {
			missing = append(missing, r)
		}
	}
	return here, missing
}

// blameMissing is session.blame for rank 0 of a monitored barrier with a limit. It names every rank that is missing.
func (b *Group) blameMissing(d *ask.Operation, v blame.Verdict, h *heard, limit time.Duration) {
	here, missing := h.ranks()
	if len(missing) == 0 || !errors.Is(d.Cause(), work.ErrTimeout) {
		b.session.blame(d, v)
		return
	}
	if v.Rank < 0 {
		v = blame.Verdict{Rank: missing[0], Other: -1, Why: "nothing else is known of them"}
	}
	b.blameFor(d, v, fmt.Errorf("%w: [Rank 0]: Ranks %s failed to pass monitoredBarrier in %d ms; these came: %s",
		work.ErrTimeout, blame.List(missing), limit.Milliseconds(), blame.List(here)))
}

// monitoredSlot returns the slot of a monitored barrier's messages with peer. PyTorch uses the
// barrier's tags, which count from 0: there they meet messages of the program with the same tag.
// Ranks of this library use slots of their own. On Gloo's wire the peer's first message shows which
// it is: a rank waits for that message until ctx ends. Every peer of a monitored barrier sends one.
func monitoredSlot(ctx context.Context, m transport.Mesh, tag uint32, peer int) uint64 {
	if w, ok := m.(interface {
		SpeaksVersion2(ctx context.Context, peer int) bool
	}); ok && !w.SpeaksVersion2(ctx, peer) {
		return uint64(tag)
	}
	return slotOf(prefixMonitored, tag)
}
