package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// post is what sends, and receives, have to keep the order of: those of one tag
// match in the order of the calls.
type post struct {
	send bool
	peer int // of a send; receives of a tag may be from anybody
	tag  uint32
}

// takeLine returns a line that nobody uses. Messages have lines of their own:
// one that is not there yet must hold up neither collectives nor other messages.
func (b *Backend) takeLine() (*line, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closing || b.draining {
		return nil, work.ErrClosed
	}
	var l *line
	if n := len(b.lines); n > 0 {
		l = b.lines[n-1]
		b.lines = b.lines[:n-1]
	} else {
		var err error
		if l, err = b.newLine(); err != nil {
			return nil, err
		}
	}
	b.p2p.Add(1)
	b.open.Add(1)
	return l, nil
}

func (b *Backend) giveLine(l *line) {
	b.mu.Lock()
	b.lines = append(b.lines, l)
	b.mu.Unlock()
	b.open.Add(-1)
	b.p2p.Done()
}

// message starts a send or a receive, past the collectives. f posts it to the CPU
// backend.
func (b *Backend) message(ctx context.Context, op work.OpType, o backend.P2POptions, key post, l leg, f func(q *operation, t *tensor.Tensor) (*work.Work, error)) (*work.Work, error) {
	var earlier chan struct{}
	mine := make(chan struct{})
	var source *work.Work
	q := &operation{legs: []leg{l}, whole: true}
	q.call = func(q *operation, ts []*tensor.Tensor) error {
		if earlier != nil {
			<-earlier
		}
		w, err := f(q, ts[0])
		b.done(key, mine)
		source = w
		return q.wait(w, err)
	}
	b.calls.Lock()
	defer b.calls.Unlock()
	if err := b.admit(ctx, op, o.Timeout, q); err != nil {
		return nil, err
	}
	if op == work.Recv {
		q.SetSource(key.peer)
	}
	line, err := b.takeLine()
	if err != nil {
		return nil, q.named(err)
	}
	q.line = line
	var result []*tensor.Tensor
	for _, d := range l.dst {
		result = append(result, d.t)
	}
	q.post = func() {
		b.mu.Lock()
		earlier = b.posted[key.order()]
		b.posted[key.order()] = mine
		b.mu.Unlock()
		go func() {
			err := q.run()
			b.done(key, mine)
			if err != nil {
				q.failed(err)
			} else if r, err := source.SourceRank(); op == work.RecvAnySource && err == nil {
				q.SetSource(r)
			}
			q.end()
			b.giveLine(line)
		}()
	}
	if err := b.launch(q, result); err != nil {
		b.giveLine(line)
		return nil, err
	}
	if !q.queued {
		q.post()
	}
	return q.Work(), nil
}

// order returns the key without what does not matter for the order.
func (p post) order() post {
	if !p.send {
		p.peer = 0
	}
	return p
}

// done says that a message was posted, or never will be.
func (b *Backend) done(key post, mine chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
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

// tagged checks a user's tag. Those from 2^31 on, which c10d cannot have, are the
// backend's own.
func tagged(op work.OpType, tag uint32) error {
	if tag >= ownTags {
		return bad(op, "invalid tag %d (want less than 2^31)", tag)
	}
	return nil
}

func (b *Backend) peer(op work.OpType, t *tensor.Tensor, rank int, tag uint32, r role) error {
	if err := tagged(op, tag); err != nil {
		return err
	}
	if rank < 0 || rank >= b.size {
		return bad(op, "invalid rank %d (the group has %d ranks)", rank, b.size)
	}
	if rank == b.rank {
		return bad(op, "rank %d cannot send to or receive from itself", rank)
	}
	return b.dense(op, "tensor", r, t)
}

// Send sends t once it is on the host, past the collectives.
func (b *Backend) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Send, t, dst, o.Tag, input); err != nil {
		return nil, err
	}
	return b.message(ctx, work.Send, o, post{true, dst, o.Tag}, from(t), func(q *operation, h *tensor.Tensor) (*work.Work, error) {
		return b.cpu.Send(q.ctx, h, dst, backend.P2POptions{Tag: o.Tag, Timeout: q.left()})
	})
}

// Recv receives into t by way of the host.
func (b *Backend) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	if err := b.peer(work.Recv, t, src, o.Tag, output); err != nil {
		return nil, err
	}
	return b.message(ctx, work.Recv, o, post{false, src, o.Tag}, to(t), func(q *operation, h *tensor.Tensor) (*work.Work, error) {
		return b.cpu.Recv(q.ctx, h, src, backend.P2POptions{Tag: o.Tag, Timeout: q.left()})
	})
}

// RecvAnySource receives from whoever sends first on the tag.
func (b *Backend) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	const op = work.RecvAnySource
	if b.size == 1 {
		return nil, bad(op, "no other rank is in the group")
	}
	if err := tagged(op, o.Tag); err != nil {
		return nil, err
	}
	if err := b.dense(op, "tensor", output, t); err != nil {
		return nil, err
	}
	return b.message(ctx, op, o, post{false, 0, o.Tag}, to(t), func(q *operation, h *tensor.Tensor) (*work.Work, error) {
		return b.cpu.RecvAnySource(q.ctx, h, backend.P2POptions{Tag: o.Tag, Timeout: q.left()})
	})
}
