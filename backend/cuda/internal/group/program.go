package group

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Program is an operation that has commands and a host's part of its own. The engine orders it among
// the others, watches its time and its context, and ends it.
type Program interface {
	// Stage gives the places of the operation's legs their streams, and gets memory with Pin and Scratch. Operations are
	// staged in the order of the calls.
	Stage(o *Operation) error

	// Fill adds the commands, at most mostCommands on a stream, and turns of the host. It is not
	// called if the operation has no legs.
	Fill(o *Operation, b *edges.Batch) error

	// Run does the host's part. After an error the engine ends the turns and the group.
	Run(o *Operation) error

	// Err returns why the outcome is of no use, though Run and the streams have ended well.
	Err() error
}

// Streams returns the two streams of collectives on a device.
func (b *Engine) Streams(dev int) (down, up driver.Stream, err error) {
	if down, err = b.line.stream(b, b.line.down, dev, "down"); err == nil {
		up, err = b.line.stream(b, b.line.up, dev, "up")
	}
	return down, up, err
}

// Turns returns the line of the host's turns of collectives.
func (b *Engine) Turns() *edges.Host { return b.line.host }

// Begin blocks until turn number turn of the operation's batch is the host's. If ctx.Err returns an
// error first, that is returned.
func (o *Operation) Begin(ctx context.Context, turn int) error { return o.pending.Begin(ctx, turn) }

// End ends a turn.
func (o *Operation) End(turn int) { o.pending.End(turn) }

// Apart says that the ranks form several clusters: devices of different ones do not reach each other,
// and their ranks share no memory.
func (b *Engine) Apart(clusters int) {
	b.OneHost = false
	if b.Unreachable == nil {
		b.Unreachable = fmt.Errorf("the ranks form %d clusters", clusters)
	}
}

// Spoiler is a Program, or a way, whose kernels send to other ranks. An operation that has failed lets its streams go on, and
// they send what the host has not written. Spoil tells the others before that.
type Spoiler interface{ Spoil() }

// way has operations that do not go through the engine's streams.
type way interface {
	// Before tells f which streams have operations that use the same memory as one in these places will.
	Before(f func(s driver.Stream, access ...driver.Access), places []*place.Place)

	// Abort ends all operations: the group has failed.
	Abort()

	// Close waits until all operations have left the devices, and frees what the way has.
	Close() error
}

// onHost orders operations on tensors in CPU memory among those whose results are copied there.
type onHost interface {
	// Await waits for the collectives that write what an operation uses.
	Await(ctx context.Context, uses ...[]*tensor.Tensor) error

	// Writes notes what a collective that has been issued writes.
	Writes(w *work.Work, results []*tensor.Tensor)
}
