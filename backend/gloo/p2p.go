package gloo

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/transport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Send posts t for rank dst at once, past the queue. Its slot is the tag itself.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Send, t, dst, input); err != nil {
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
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Recv, t, src, output); err != nil {
		return nil, err
	}
	return b.receive(ctx, work.Recv, t, src, o)
}

// RecvAnySource posts a receive from whoever sends first on the tag.
func (b *Backend) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	if b.size == 1 {
		return nil, bad(work.RecvAnySource, "no other rank is in the group")
	}
	if err := dense(work.RecvAnySource, "tensor", output, t); err != nil {
		return nil, err
	}
	return b.receive(ctx, work.RecvAnySource, t, -1, o)
}

func (b *Backend) receive(ctx context.Context, op work.OpType, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	if buf := t.Bytes(); buf != nil || t.Len() == 0 {
		return b.p2pOp(ctx, op, o, src, buf, t)
	}
	packed, err := tensor.New(t.DType(), t.Shape()...)
	if err != nil {
		return nil, bad(op, "%v", err)
	}
	return b.p2pOp(ctx, op, o, src, packed.Bytes(), t)
}

func (b *Backend) peer(op work.OpType, t *tensor.Tensor, rank int, r role) error {
	if rank < 0 || rank >= b.size {
		return bad(op, "invalid rank %d (the group has %d ranks)", rank, b.size)
	}
	if rank == b.rank {
		return bad(op, "rank %d cannot send to or receive from itself", rank)
	}
	return dense(op, "tensor", r, t)
}

// p2pOp posts a send (out is nil) or a receive into buf, which is out's own
// memory or a packed stand-in for it.
func (b *Backend) p2pOp(ctx context.Context, op work.OpType, o backend.P2POptions, peer int, buf []byte, out *tensor.Tensor) (*work.Work, error) {
	q := &operation{}
	if err := b.admit(ctx, op, q); err != nil {
		return nil, err
	}
	q.begin(b, ctx, op, o.Timeout)
	q.tag = o.Tag
	b.p2p.Add(1)
	r := transport.NewRequest()
	r.Peer, r.Slot, r.Buf = peer, uint64(o.Tag), buf
	mesh := b.meshFor(o.Tag)
	if op == work.Recv {
		q.SetSource(peer)
	}
	q.Start()
	// Posted under the lock: calls match in the order in which they were made.
	switch op {
	case work.Send:
		mesh.Send(r)
	case work.Recv:
		mesh.Recv(r)
	default:
		mesh.RecvAny(r)
	}
	b.mu.Unlock()
	go func() {
		defer b.p2p.Done()
		err := b.await(mesh, q, r, peer)
		if err == nil && out != nil {
			q.SetSource(r.Peer)
			q.SetResult(out)
			if own := out.Bytes(); own == nil && out.Len() > 0 {
				err = out.Unpack(buf)
			}
			if err == nil {
				err = cleanBools(one(out))
			}
		}
		q.Complete(err)
	}()
	return q.Work(), nil
}

// await ends a request that no engine waits for, posted to or from peer. A
// message that has come wins over a context that has ended.
func (b *Backend) await(m transport.Mesh, o *operation, r *transport.Request, peer int) error {
	t := time.NewTimer(o.timeout)
	defer t.Stop()
	select {
	case <-r.Done():
	default:
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
	if err := b.admit(ctx, work.Barrier, q); err != nil {
		return err
	}
	q.begin(b, ctx, work.Barrier, o.Timeout)
	q.collective, q.call = true, b.calls
	in, out := b.tag, b.tag+1
	b.tag += 2
	b.calls++
	b.progress()
	b.p2p.Add(1)
	b.mu.Unlock()
	defer b.p2p.Done()
	q.Start()
	err := b.monitored(q, in, out)
	b.finish(q, err)
	return q.Work().Err()
}

func (b *Backend) monitored(q *operation, in, out uint32) error {
	post := func(tag uint32, peer int, send bool, buf []byte) *transport.Request {
		r := transport.NewRequest()
		r.Peer, r.Slot, r.Buf = peer, uint64(tag), buf
		if m := b.meshFor(tag); send {
			m.Send(r)
		} else {
			m.Recv(r)
		}
		return r
	}
	me := binary.LittleEndian.AppendUint32(nil, uint32(b.rank))
	if b.rank != 0 {
		hello, bye := post(in, 0, true, me), post(out, 0, false, make([]byte, 4))
		err := b.await(b.meshFor(in), q, hello, 0)
		if e := b.await(b.meshFor(out), q, bye, 0); err == nil {
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
	if err := b.hearAll(q, reqs, b.meshFor(in)); err != nil {
		return err
	}
	for r := 1; r < b.size; r++ {
		if want := binary.LittleEndian.AppendUint32(nil, uint32(r)); !bytes.Equal(came[r], want) {
			return b.mismatch(b.meshFor(in), q, r, fmt.Errorf("rank %d said it was rank %d", r, int32(binary.LittleEndian.Uint32(came[r]))))
		}
	}
	for r := 1; r < b.size; r++ {
		reqs[r] = post(out, r, true, me)
	}
	var first error
	for r := 1; r < b.size; r++ {
		if err := b.await(b.meshFor(out), q, reqs[r], r); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (b *Backend) meshFor(tag uint32) transport.Mesh { return b.meshes[tag%uint32(len(b.meshes))] }

// hearAll is rank 0's first half of a monitored barrier. Its error names every
// rank that is missing when the time is over.
func (b *Backend) hearAll(q *operation, reqs []*transport.Request, m transport.Mesh) error {
	if deadline, ok := q.ctx.Deadline(); ok {
		q.timeout = min(q.timeout, time.Until(deadline).Round(time.Millisecond))
	}
	late, cancel := context.WithTimeout(q.ctx, q.timeout)
	defer cancel()
	var missing, here []int
	var failed error
	for r := 1; r < b.size; r++ {
		select {
		case <-reqs[r].Done():
		default:
			select {
			case <-reqs[r].Done():
			case <-late.Done():
				if errors.Is(late.Err(), context.DeadlineExceeded) {
					missing = append(missing, r)
					continue
				}
				b.giveUp(m, q, r, canceled(q.ctx))
				<-reqs[r].Done()
			}
		}
		here = append(here, r)
		if err := reqs[r].Err(); err != nil && failed == nil {
			failed = b.failed(m, q, reqs[r], err)
		}
	}
	if len(missing) == 0 {
		return failed
	}
	err := fmt.Errorf("%w: [Rank 0]: Ranks %s failed to pass monitoredBarrier in %d ms; these came: %s",
		work.ErrTimeout, list(missing), q.timeout.Milliseconds(), list(here))
	b.fail(m, q, err, missing[0])
	for _, r := range missing {
		<-reqs[r].Done()
	}
	if failed != nil {
		return failed
	}
	return &work.Error{Info: q.Info(), Peer: missing[0], Err: err}
}

// list formats ranks as "1, 3", or "none".
func list(ranks []int) string {
	if len(ranks) == 0 {
		return "none"
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(ranks), " ", ", "), "[]")
}
