package group

import (
	"context"
	"runtime"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// A stream of CUDA's has room for about a thousand commands. A goroutine that gives it more waits in
// the driver, and holds locks there. If the goroutine that would let the stream go on needs these
// locks, nothing moves any more. So an operation gives a stream few commands at a time, however
// large its tensors are, and begins when the operations before it have left enough room.
const (
	// mostCommands is how many commands of one operation a stream gets at a time.
	mostCommands = 256

	// spareCommands is the number of an operation's commands on a stream besides those of its pieces: waits for callers'
	// streams and for earlier operations, and its end.
	spareCommands = 16

	// spreadCommands is the most that it gives a stream for the copies of a broadcast
	// from a rank's first tensor to the others.
	spreadCommands = 64
)

// MostQueued is how many commands of a group's operations may be left on a stream when it gets more; a
// variable for tests.
var MostQueued int64 = 2 * mostCommands

// PiecesOf returns in how many pieces an operation goes at most that copies so many
// tensors, the same on every rank. For a piece a stream waits, copies, and writes a word
// or records an event. Operations of very many tensors go in a few pieces all the same, because
// the host needs memory for a piece. The streams then get them in parts.
func PiecesOf(width int) int {
	return max((mostCommands-spareCommands)/(width+3), DefaultSlots)
}

// Chunks returns in how many pieces an operation with one leg goes.
func (b *Engine) Chunks(l *Leg) int {
	grain := b.grain(l.size(), 1, l.N)
	return max(1, (l.N-1)/grain+1)
}

// grain returns how many of n elements a piece has, which take so many bytes each, of
// each of width tensors.
func (b *Engine) grain(bytes, width, n int) int {
	most := PiecesOf(width)
	return max(1, b.Chunk/(bytes*width), (n+most-1)/most)
}

// spreads returns how many pieces at a time a rank with m tensors copies from the first
// to the others.
func spreads(pieces, m int) int {
	parts := max(spreadCommands/(2*max(m-1, 1)), 1)
	return (pieces + parts - 1) / parts
}

// room waits until the operation, or its next part, may be enqueued.
func (o *Operation) room() error {
	if o.line != o.B.line {
		return nil
	}
	return o.poll(func() (bool, error) {
		for ; o.gone < len(o.parts); o.gone++ {
			p := o.parts[o.gone]
			if done, err := p.Done(); !done || err != nil {
				return false, err
			}
			o.occupy(-p.Calls())
		}
		return o.B.queued.Load() <= MostQueued, nil
	})
}

// occupy notes that a stream has at most so many more commands of the operation. They count until
// they are done, or the operation has left the devices.
func (o *Operation) occupy(commands int) {
	if o.line == o.B.line {
		o.commands += commands
		o.B.queued.Add(int64(commands))
	}
}

// poll waits until done returns true, or the operation cannot go on.
func (o *Operation) poll(done func() (bool, error)) error {
	return o.B.Poll(o.Ctx, o.timeout, func() (bool, error) {
		ok, err := done()
		if ok || err != nil {
			return ok, err
		}
		return false, o.expired()
	})
}

// Poll waits until done returns true, or until something ends the operation.
func (b *Engine) Poll(ctx context.Context, timeout time.Duration, done func() (bool, error)) error {
	deadline, pause := time.Now().Add(timeout), 10*time.Microsecond
	for i := 0; ; i++ {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if err := b.Over(ctx, deadline, timeout, ", while it was enqueued"); err != nil {
			return err
		}
		if i < 200 {
			runtime.Gosched()
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, 100*time.Microsecond)
	}
}

// Drained waits until streams have done all that they were given; false if ctx ends first.
func Drained(ctx context.Context, streams []driver.Stream) bool {
	for _, s := range streams {
		if s.Err() != nil {
			continue
		}
		e, err := s.Record()
		if err == nil {
			err = e.Sync(ctx)
			e.Release()
		}
		if err != nil && s.Err() == nil {
			return false
		}
	}
	return true
}
