package group

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Post tells which messages have an order: sends to a peer, or receives, of one tag match
// in the order of the calls.
type Post struct {
	Send bool
	Peer int // of a send; receives of a tag may be from anybody
	Tag  uint32
}

// Message starts a send or a receive. f posts it to the CPU backend.
//
// A message that does not come must hold up neither collectives nor other messages. So no stream
// of the group waits for it. The group's messages share two streams a device. A stream gets a
// message's copies when they need not wait: those of a send when the tensor is ready, those of a
// receive when the host has the bytes. Until then the host has claimed the tensor, and streams
// that use it later wait for the host.
func (b *Engine) Message(ctx context.Context, op work.OpType, o backend.P2POptions, key Post, l Leg, f func(q *Operation, t *tensor.Tensor) (*work.Work, error)) (*work.Work, error) {
	if err := Captured(ctx, op); err != nil {
		return nil, err
	}
	var earlier chan struct{}
	mine := make(chan struct{})
	var source *work.Work
	q := &Operation{Legs: []Leg{l}, Whole: true, line: b.messages}
	q.Call = func(q *Operation, ts []*tensor.Tensor) error {
		if err := q.behind(earlier); err != nil {
			return err
		}
		w, err := f(q, ts[0])
		b.done(key, mine)
		source = w
		return q.Wait(w, err)
	}
	if err := b.awaitHost(ctx, op, q); err != nil {
		return nil, err
	}
	b.Calls.Lock()
	defer b.Calls.Unlock()
	info, timeout, err := b.Admit(ctx, op, o.Timeout)
	if err != nil {
		return nil, err
	}
	q.init(b, ctx, info, timeout)
	if op == work.Recv {
		q.SetSource(key.Peer)
	}
	result := slices.Clone(l.hostDst)
	for _, d := range l.Dst {
		result = append(result, d.T)
	}
	free := func() {}
	if !q.onHost() {
		host, err := b.Tracker.Host(fmt.Sprintf("%v seq %d", op, q.Info().Seq))
		if err != nil {
			return nil, q.named(err)
		}
		q.claim, free = host, func() { host.Close() }
	}
	if err := b.launch(q, result); err != nil {
		free()
		return nil, err
	}
	b.Mu.Lock()
	earlier = b.posted[key.order()]
	b.posted[key.order()] = mine
	b.Mu.Unlock()
	b.p2p.Add(1)
	b.open.Add(1)
	serve := func() {
		err := q.run()
		b.done(key, mine)
		if err != nil {
			q.failed(err)
		} else if r, err := source.SourceRank(); op == work.RecvAnySource && err == nil {
			q.SetSource(r)
		}
		q.end()
		if q.over {
			free()
		}
		b.open.Add(-1)
		b.p2p.Done()
	}
	q.serve = func() { go serve() }
	b.pass(q)
	q.beforeStream()
	return q.Work(), nil
}

// behind waits until an earlier message was posted, or never will be.
func (o *Operation) behind(earlier <-chan struct{}) error {
	if earlier == nil {
		return nil
	}
	limit := time.NewTimer(o.Left())
	defer limit.Stop()
	select {
	case <-earlier:
		return nil
	case <-limit.C:
		return fmt.Errorf("%w after %v, behind an earlier message that was not posted", work.ErrTimeout, o.timeout)
	case <-o.Ctx.Done():
		return Canceled(o.Ctx)
	}
}

// done says that a message was posted, or never will be.
func (b *Engine) done(key Post, mine chan struct{}) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	select {
	case <-mine:
		return
	default:
	}
	close(mine)
	if b.posted[key.order()] == mine {
		delete(b.posted, key.order())
	}
}

// MessageBegins notes a send or a receive that does not go through the engine's streams. The caller holds
// b.Calls.
func (b *Engine) MessageBegins() {
	b.Mu.Lock()
	b.seq++
	b.Mu.Unlock()
	b.p2p.Add(1)
	b.open.Add(1)
}

// MessageEnds notes its end.
func (b *Engine) MessageEnds() {
	b.open.Add(-1)
	b.p2p.Done()
}

// MessageAt returns where the elements of a message's tensor are on the host, in order.
func (o *Operation) MessageAt() driver.Ptr { return o.staging.Ptr() + driver.Ptr(o.at[0]) }

// order returns the key without what does not matter for the order.
func (p Post) order() Post {
	if !p.Send {
		p.Peer = 0
	}
	return p
}
