package group

import (
	"context"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
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
// A message that does not come must hold up neither collectives nor other messages. So no
// stream of the group waits for it. The group's messages share two streams a device. A
// stream gets a message's copies once nothing has to be waited for: of a send, when the
// tensor is ready, and of a receive, when the host has the bytes. Until then the host has
// claimed the tensor, and streams that use it later wait for the host.
func (b *Engine) Message(ctx context.Context, op work.OpType, o backend.P2POptions, key Post, l Leg, f func(q *Operation, t *tensor.Tensor) (*work.Work, error)) (*work.Work, error) {
	var earlier chan struct{}
	mine := make(chan struct{})
	var source *work.Work
	q := &Operation{Legs: []Leg{l}, Whole: true, line: b.messages}
	q.Call = func(q *Operation, ts []*tensor.Tensor) error {
		if earlier != nil {
			<-earlier
		}
		w, err := f(q, ts[0])
		b.done(key, mine)
		source = w
		return q.Wait(w, err)
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
	host, err := b.Tracker.Host(fmt.Sprintf("%v seq %d", op, q.Info().Seq))
	if err != nil {
		return nil, q.named(err)
	}
	q.claim = host
	var result []*tensor.Tensor
	for _, d := range l.Dst {
		result = append(result, d.T)
	}
	if err := b.launch(q, result); err != nil {
		host.Close()
		return nil, err
	}
	q.beforeStream()
	b.Mu.Lock()
	earlier = b.posted[key.order()]
	b.posted[key.order()] = mine
	b.Mu.Unlock()
	b.p2p.Add(1)
	b.open.Add(1)
	go func() {
		err := q.run()
		b.done(key, mine)
		if err != nil {
			q.failed(err)
		} else if r, err := source.SourceRank(); op == work.RecvAnySource && err == nil {
			q.SetSource(r)
		}
		q.end()
		if q.over {
			host.Close()
		}
		b.open.Add(-1)
		b.p2p.Done()
	}()
	return q.Work(), nil
}

// enqueueClaim claims a message's memory, after what the caller's streams and other
// operations do with it.
func (o *Operation) enqueueClaim(places []*place.Place) (err error) {
	batch := o.B.Tracker.Batch()
	o.prologue(batch, places...)
	access := driver.Writes
	if o.Legs[0].Src != nil {
		access = driver.Reads
	}
	all := o.line.accesses[:0]
	for _, p := range places {
		p.Uses(func(x place.Span) { all = append(all, access(p.Base+driver.Ptr(x.Off), x.N)) })
	}
	o.claimed = batch.Claim(o.claim, all...)
	o.line.accesses = all
	o.pending, err = batch.Run()
	return err
}

// runMessage sends what it copies to the host, or copies from there what it receives.
func (o *Operation) runMessage() error {
	staging := o.staging.Bytes()
	shadows := make([]*tensor.Tensor, 1)
	if err := o.shadow(shadows, staging[:o.slot], 0); err != nil {
		return err
	}
	if o.Legs[0].Src == nil {
		driver.HostAccess(o.B.Driver, "receiving", driver.Writes(o.staging.Ptr(), o.staging.Len()))
		if err := o.Call(o, shadows); err != nil {
			return err
		}
		if err := o.unpackRaw(); err != nil {
			return err
		}
	}
	if err := o.pending.Begin(stopped{o}, o.claimed); err != nil {
		return err
	}
	c := &atOnce{o: o}
	if o.Legs[0].Src != nil {
		o.pack(c)
		o.allDown(c)
	} else {
		o.allUp(c)
		o.unpack(c)
	}
	if err := c.wait(); err != nil {
		return err
	}
	o.pending.End(o.claimed)
	if o.Legs[0].Src == nil {
		return nil
	}
	driver.HostAccess(o.B.Driver, "sending", driver.Writes(o.staging.Ptr(), o.staging.Len()))
	if err := o.packRaw(); err != nil {
		return err
	}
	return o.Call(o, shadows)
}

// commander takes the copies and kernels of an operation through the host.
type commander interface {
	Copy(s driver.Stream, dst, src driver.Ptr, n int)
	launch(s driver.Stream, l *driver.Launch)
}

// atOnce gives a message's commands to its stream at once, at most mostCommands at a time.
// Messages of other goroutines use the stream too. None of its commands waits for a rank.
type atOnce struct {
	o    *Operation
	s    driver.Stream // the only one of a message
	n    int           // commands since the last word
	word uint32        // the last
	err  error
}

func (c *atOnce) Copy(s driver.Stream, dst, src driver.Ptr, n int) {
	c.add(s, func() error { return s.Copy(dst, src, n) })
}

func (c *atOnce) launch(s driver.Stream, l *driver.Launch) {
	c.add(s, func() error { return s.Launch(l) })
}

func (c *atOnce) add(s driver.Stream, f func() error) {
	if c.n == mostCommands {
		c.err = c.wait()
	}
	if c.err == nil {
		c.s, c.err = s, f()
		c.n++
	}
}

// Wait waits until the stream has done what it was given. An operation that has to end
// waits a little longer, because the copies still use the tensor.
func (c *atOnce) wait() error {
	if c.n == 0 {
		return c.err
	}
	o := c.o
	if c.word++; c.word == 1 {
		o.staging.Store32(o.word, 0)
	}
	o.flying = true
	if err := c.s.WriteValue(o.staging.Ptr()+driver.Ptr(o.word), c.word); err != nil {
		return err
	}
	c.n = 0
	if err := driver.AwaitWord(&ending{o: o}, o.staging, o.word, c.word, driver.AtLeast); err != nil {
		return fmt.Errorf("copying between device and host: %w", err)
	}
	o.flying = false
	return c.err
}

// ending is stopped, grace later.
type ending struct {
	o     *Operation
	since time.Time // of the end
}

func (*ending) Deadline() (time.Time, bool) { return time.Time{}, false }
func (*ending) Done() <-chan struct{}       { return nil }
func (*ending) Value(any) any               { return nil }

func (e *ending) Err() error {
	err := stopped{e.o}.Err()
	if err != nil && e.since.IsZero() {
		e.since = time.Now()
	}
	if err == nil || time.Since(e.since) < Grace {
		return nil
	}
	return err
}

// order returns the key without what does not matter for the order.
func (p Post) order() Post {
	if !p.Send {
		p.Peer = 0
	}
	return p
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
