package gloo

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/lag"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/work"
)

// await ends a request that no engine waits for, posted to or from peer. A
// message that has come wins over a context that has ended.
func (b *Backend) await(m transport.Mesh, o *called, r *transport.Request, peer int) error {
	t := time.NewTimer(o.timeout)
	defer t.Stop()
	select {
	case <-r.Done():
	default:
		moveBySelf(m)
		select {
		case <-r.Done():
		case <-o.ctx.Done():
			b.giveUp(m, o, peer, canceled(o.ctx))
			<-r.Done()
		case <-t.C:
			b.giveUp(m, o, peer, tooLate(o))
			<-r.Done()
		}
	}
	if err := r.Err(); err != nil {
		return b.failed(m, o, r, err)
	}
	return nil
}

// MonitoredBarrier meets at rank 0, which hears from every rank and then
// answers all. Either all ranks leave it successfully or none does.
func (b *Backend) MonitoredBarrier(ctx context.Context, o backend.MonitoredBarrierOptions) error {
	if b.size == 1 {
		return nil
	}
	q := &operation{}
	if err := b.admit(ctx, work.Barrier); err != nil {
		return err
	}
	q.begin(b, ctx, work.Barrier, o.Timeout)
	q.op = q
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
	defer b.waits.during(ctx, b, q)()
	q.Start()
	err := b.monitored(q, in, out)
	if err == nil && b.shared != nil {
		err = b.inMemory(b.meshes[0], q.Info(), b.shared.CompareCalls(0))
	}
	b.finish(q, err)
	return q.Work().Err()
}

func (b *Backend) monitored(q *operation, in, out uint32) error {
	if deadline, ok := q.ctx.Deadline(); ok {
		q.timeout = min(q.timeout, time.Until(deadline).Round(time.Millisecond))
	}
	known, cancel := context.WithTimeout(q.ctx, q.timeout)
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
	me := binary.LittleEndian.AppendUint32(nil, uint32(b.rank))
	if b.rank != 0 {
		hello, bye := post(in, 0, true, me), post(out, 0, false, make([]byte, 4))
		err := b.await(b.meshFor(in), &q.called, hello, 0)
		if e := b.await(b.meshFor(out), &q.called, bye, 0); err == nil {
			err = e
		}
		return err
	}
	came := make([][]byte, b.size)
	reqs := make([]*transport.Request, b.size)
	for r := 1; r < b.size; r++ {
		came[r] = make([]byte, 4)
		reqs[r] = post(in, r, false, came[r])
	}
	if err := b.hearAll(known, q, reqs, b.meshFor(in)); err != nil {
		return err
	}
	for r := 1; r < b.size; r++ {
		if want := binary.LittleEndian.AppendUint32(nil, uint32(r)); !bytes.Equal(came[r], want) {
			return b.mismatch(b.meshFor(in), &q.called, r, fmt.Errorf("rank %d said it was rank %d", r, int32(binary.LittleEndian.Uint32(came[r]))))
		}
	}
	for r := 1; r < b.size; r++ {
		reqs[r] = post(out, r, true, me)
	}
	var first error
	for r := 1; r < b.size; r++ {
		if err := b.await(b.meshFor(out), &q.called, reqs[r], r); err != nil && first == nil {
			first = err
		}
	}
	return first
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

// hearAll is rank 0's first half of a monitored barrier. Its error names every
// rank that is missing when late, which is q's context with its timeout, has ended.
func (b *Backend) hearAll(late context.Context, q *operation, reqs []*transport.Request, m transport.Mesh) error {
	var missing, here []int
	var failed error
	for r := 1; r < b.size; r++ {
		select {
		case <-reqs[r].Done():
		default:
			moveBySelf(m)
			select {
			case <-reqs[r].Done():
			case <-late.Done():
				if errors.Is(late.Err(), context.DeadlineExceeded) {
					missing = append(missing, r)
					continue
				}
				b.giveUp(m, &q.called, r, canceled(q.ctx))
				<-reqs[r].Done()
			}
		}
		here = append(here, r)
		if err := reqs[r].Err(); err != nil && failed == nil {
			failed = b.failed(m, &q.called, reqs[r], err)
		}
	}
	if len(missing) == 0 {
		return failed
	}
	b.asking <- struct{}{}
	defer func() { <-b.asking }()
	v := diagnose(m, lag.Watch, b.evidence(&q.called, missing[0]))
	if v.rank < 0 {
		v = verdict{rank: missing[0], other: -1, why: "nothing else is known of them"}
	}
	b.blame(m, &q.called, v, fmt.Errorf("%w: [Rank 0]: Ranks %s failed to pass monitoredBarrier in %d ms; these came: %s",
		work.ErrTimeout, list(missing), q.timeout.Milliseconds(), list(here)))
	for _, r := range missing {
		<-reqs[r].Done()
	}
	if failed != nil {
		return failed
	}
	return b.faultError(q.Info(), m.Fault())
}
