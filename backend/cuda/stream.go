package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/work"
)

type streamsKey struct{}

// callStreams are the streams that a call's context has.
type callStreams struct {
	before []driver.Stream // the operation comes after what they have been given
	in     driver.Stream   // and before what this one is given later; may be nil
}

// WithStreams returns a context for calls whose tensors these streams use: the
// operation comes after what they have been given when the call is made. It
// takes the place of the streams that the tensors' memories have. Without any
// stream it says that nothing has to be waited for.
func WithStreams(ctx context.Context, streams ...driver.Stream) context.Context {
	return context.WithValue(ctx, streamsKey{}, &callStreams{before: streams})
}

// streamsOf returns what WithStreams or InStream put into ctx, nil if they were not called.
func streamsOf(ctx context.Context) *callStreams {
	s, _ := ctx.Value(streamsKey{}).(*callStreams)
	return s
}

// OnStream returns m as memory that s uses: operations on tensors in it come
// after what s has been given when they are called. Tensors made before are not
// concerned.
func OnStream(m driver.Memory, s driver.Stream) driver.Memory {
	if b, ok := m.(bound); ok {
		m = b.Memory
	}
	return bound{m, s}
}

// bound is memory with the stream that uses it.
type bound struct {
	driver.Memory
	stream driver.Stream
}

// Stream returns the stream that uses the memory.
func (b bound) Stream() driver.Stream { return b.stream }

// streamer is memory that knows which stream uses it.
type streamer interface{ Stream() driver.Stream }

var _ work.Stream = driver.Stream(nil)
