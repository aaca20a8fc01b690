package group

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/c10d-go/c10d/work"
)

// A stream of CUDA's has room for about a thousand commands. A goroutine that gives it more waits in
// the driver, and holds locks there. If the goroutine that would let the stream go on needs these
// locks, nothing moves any more. So an operation gives a stream few commands at a time, however
// large its tensors are, and begins when the operations before it have left enough room.
const (
	// mostCommands is how many commands of one operation a stream has at a time, mostInParts
	// how many if it gets them in parts.
	mostCommands = 256
	mostInParts  = 2 * mostCommands

	// spareCommands is what an operation gives a stream besides what it does for each
	// piece: waits for callers' streams and for earlier operations, and its end.
	spareCommands = 16

	// spreadCommands is the most that it gives a stream for the copies of a broadcast
	// from a rank's first tensor to the others.
	spreadCommands = 64
)

// MostQueued is how many commands a group's earlier operations may have left on a stream
// when the next one is enqueued; a variable for tests.
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
	return max(1, b.chunk/(bytes*width), (n+most-1)/most)
}

// spreads returns how many pieces at a time a rank with m tensors copies from the first
// to the others.
func spreads(pieces, m int) int {
	parts := max(spreadCommands/(2*max(m-1, 1)), 1)
	return (pieces + parts - 1) / parts
}

// room waits until the operation may be enqueued, which gives a stream at most so many
// commands: the more they are, the fewer may be left of earlier operations.
func (o *Operation) room(commands int) error {
	most := max(MostQueued-int64(max(commands-mostCommands, 0)), 0)
	if o.line != o.B.line || o.B.queued.Load() <= most {
		return nil
	}
	return o.poll(func() (bool, error) { return o.B.queued.Load() <= most, nil })
}

// occupy notes how many commands of the operation a stream has at most, until it has
// left the devices.
func (o *Operation) occupy(commands int) {
	if o.line == o.B.line {
		o.commands = commands
		o.B.queued.Add(int64(commands))
	}
}

// Poll waits until done returns true, or the operation cannot go on.
func (o *Operation) poll(done func() (bool, error)) error { return o.B.Poll(o.Ctx, o.timeout, done) }

// Poll waits until done returns true, or until something ends the operation.
func (b *Engine) Poll(ctx context.Context, timeout time.Duration, done func() (bool, error)) error {
	start, pause := time.Now(), 10*time.Microsecond
	for i := 0; ; i++ {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return Canceled(ctx)
		}
		if time.Since(start) > timeout {
			return fmt.Errorf("%w after %v, while it was enqueued", work.ErrTimeout, timeout)
		}
		if err := cmp.Or(b.Broken(), b.CPUErr()); err != nil {
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
