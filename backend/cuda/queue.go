package cuda

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/work"
)

// A stream of CUDA's has room for about a thousand commands. Who gives it more waits in
// the driver, with locks that those need who would let the stream go on. So an operation
// gives it few at a time, however large its tensors are, and begins when those before it
// have left enough room.
const (
	// mostCommands is how many commands of one operation a stream has at a time, mostInParts
	// how many if it gets them in parts, mostOnRing if they stay on the devices: half as many
	// took 8 to 14 percent longer with 256 MiB there.
	mostCommands = 256
	mostInParts  = 2 * mostCommands
	mostOnRing   = 2 * mostCommands

	// spareCommands is what an operation gives a stream besides what it does for each
	// piece: waits for callers' streams and for earlier operations, and its end.
	spareCommands = 16

	// spreadCommands is the most that it gives a stream for the copies of a broadcast
	// from a rank's first tensor to the others.
	spreadCommands = 64
)

// mostQueued is how many commands a group's earlier operations may have left on a stream
// when the next one is enqueued; a variable for tests.
var mostQueued int64 = 2 * mostCommands

// piecesOf returns in how many pieces an operation goes at most that copies so many
// tensors, the same on every rank. For a piece a stream waits, copies, and writes a word
// or records an event. Operations of very many tensors go in a few pieces all the same,
// for what is on its way has to lie on the host, and get to the streams in parts.
func piecesOf(width int) int {
	return max((mostCommands-spareCommands)/(width+3), defaultSlots)
}

// grain returns how many of n elements a piece has, which take so many bytes each, of
// each of width tensors.
func (b *Backend) grain(bytes, width, n int) int {
	most := piecesOf(width)
	return max(1, b.options.Chunk/(bytes*width), (n+most-1)/most)
}

// spreads returns how many pieces at a time a rank with m tensors copies from the first
// to the others.
func spreads(pieces, m int) int {
	parts := max(spreadCommands/(2*max(m-1, 1)), 1)
	return (pieces + parts - 1) / parts
}

// room waits until the operation may be enqueued, which gives a stream at most so many
// commands: the more they are, the fewer may be left of earlier operations.
func (o *operation) room(commands int) error {
	most := max(mostQueued-int64(max(commands-mostCommands, 0)), 0)
	if o.line != o.b.line || o.b.queued.Load() <= most {
		return nil
	}
	return o.poll(func() (bool, error) { return o.b.queued.Load() <= most, nil })
}

// occupy notes how many commands of the operation a stream has at most, until it has
// left the devices.
func (o *operation) occupy(commands int) {
	if o.line == o.b.line {
		o.commands = commands
		o.b.queued.Add(int64(commands))
	}
}

// poll waits until done returns true, or the operation cannot go on.
func (o *operation) poll(done func() (bool, error)) error { return o.b.poll(o.ctx, o.timeout, done) }

// poll waits until done returns true, or until something ends the operation.
func (b *Backend) poll(ctx context.Context, timeout time.Duration, done func() (bool, error)) error {
	start, pause := time.Now(), 10*time.Microsecond
	for i := 0; ; i++ {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return canceled(ctx)
		}
		if time.Since(start) > timeout {
			return fmt.Errorf("%w after %v, while it was enqueued", work.ErrTimeout, timeout)
		}
		if err := cmp.Or(b.broken(), b.cpuErr()); err != nil {
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

// hopCommands is the most that a step of the ring gives the stream.
const hopCommands = 5

// mostParts is how many parts of one operation a stream has at a time. With two of them
// the ring's is left without work while the next one is made: all-reduces of 1 GiB took
// 9.2 ms between two H200 then, with four 7.9 ms.
const mostParts = 4

// run enqueues all of the work. What is too much for the stream goes in parts.
func (w *deviceWork) run(batch *edges.Batch) (p *edges.Pending, err error) {
	w.batch = batch
	if err = w.fill(); err == nil {
		p, err = w.batch.Run()
	}
	o, commands := w.op, 0
	if n := len(o.parts); n > 0 && p == nil {
		p, o.parts = o.parts[n-1], o.parts[:n-1]
	}
	for _, q := range o.parts {
		commands += q.Calls()
	}
	if p != nil {
		commands += p.Calls()
	}
	o.occupy(min(commands, mostOnRing))
	return p, err
}

// most returns how many commands a stream nearly always has at a time at most: a round of
// an all-reduce takes fewer than ten a rank, a piece of a broadcast hopCommands, bringing
// a tensor and putting it back some four.
func (w *deviceWork) most() int {
	per := w.ring.b.size * w.ring.chunk
	rounds := (w.places[0].t.ByteLen() + per - 1) / per
	return min(rounds*2*hopCommands*w.ring.b.size+4*len(w.places)+spareCommands, mostOnRing)
}

// hop adds a step to the work.
func (w *deviceWork) hop(h hop, x driver.Ptr, es int, step driver.Function, by int) {
	if w.fits(hopCommands) {
		w.ring.hop(w.batch, h, x, es, step, by)
	}
}

// fits makes room for n commands: if the batch has none, that goes to the streams first,
// and so what comes last is never nothing. It returns false if nothing more is enqueued.
func (w *deviceWork) fits(n int) bool {
	if w.err == nil && w.batch.Len()+n > mostOnRing/mostParts-spareCommands {
		w.err = w.part()
	}
	return w.err == nil
}

// part enqueues what is in the batch, waits until the streams have room for another part,
// and begins that.
func (w *deviceWork) part() error {
	r, o := w.ring, w.op
	r.count()
	p, err := w.batch.Run()
	r.used = 0
	if p != nil {
		o.parts = append(o.parts, p)
	}
	if err != nil {
		return err
	}
	if n := len(o.parts); n >= mostParts {
		if err := o.poll(o.parts[n-mostParts].Done); err != nil {
			return err
		}
	}
	w.batch = o.b.tracker.Batch()
	if len(w.begins) > 0 {
		// A batch forgets what callers' streams did that nothing in it comes after.
		o.prologue(w.batch, w.begins...)
	}
	return nil
}
