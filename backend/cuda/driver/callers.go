package driver

import "context"

// CallStreams are the streams that the caller of a group's operation uses its tensors with.
type CallStreams struct {
	Before []Stream // the operation comes after what they have been given
	In     Stream   // and before what this one is given later; may be nil
	Beside bool     // it leaves multiprocessors to kernels that they are given later
}

type callStreams struct{}

// WithCallStreams returns a context with c. Programs call cuda.InStream and its relatives.
func WithCallStreams(ctx context.Context, c *CallStreams) context.Context {
	return context.WithValue(ctx, callStreams{}, c)
}

// CallStreamsOf returns what WithCallStreams put into ctx, nil if nothing did.
func CallStreamsOf(ctx context.Context) *CallStreams {
	c, _ := ctx.Value(callStreams{}).(*CallStreams)
	return c
}

// Streamer is memory that knows which stream uses it.
type Streamer interface{ Stream() Stream }

// Enterer is a Device for libraries that work on the device of the calling thread, such as NCCL.
type Enterer interface {
	// Enter ties the goroutine to its thread and makes the device current there. Leave takes both back.
	Enter() (leave func(), err error)
}
