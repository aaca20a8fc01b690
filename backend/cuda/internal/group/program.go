package group

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
)

// Program is an operation that has commands and a host's part of its own. The engine orders it among
// the others, watches its time and its context, and ends it.
type Program interface {
	// Stage gives the places of the operation's legs their streams, and gets memory. After an error
	// it has got none. Operations are staged in the order of the calls.
	Stage(o *Operation) error

	// Fill adds the commands, at most mostCommands on a stream, and turns of the host. It is not
	// called if the operation has no legs.
	Fill(o *Operation, b *edges.Batch) error

	// Run does the host's part. After an error the engine ends the turns and the group.
	Run(o *Operation) error

	// Err returns why the outcome is of no use, though Run and the streams have ended well.
	Err() error

	// Release gives back what Stage has got: nothing uses it any more. Stage may not have been
	// called.
	Release(o *Operation)
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

// Stopped returns why the operation has to end, nil while it may go on.
func (o *Operation) Stopped() error { return stopped{o}.Err() }

// Apart says that the ranks form several clusters: devices of different ones do not reach each other,
// and their ranks share no memory.
func (b *Engine) Apart(clusters int) {
	b.oneHost = false
	if b.Unreachable == nil {
		b.Unreachable = fmt.Errorf("the ranks form %d clusters", clusters)
	}
}
