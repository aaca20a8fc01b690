package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/work"
)

type streamsKey struct{}

// WithStreams returns a context for calls whose tensors these streams use: the
// operation comes after what they have been given when the call is made. It
// takes the place of the streams that the tensors' memories have. Without any
// stream it says that nothing has to be waited for.
func WithStreams(ctx context.Context, streams ...driver.Stream) context.Context {
	return context.WithValue(ctx, streamsKey{}, streams)
}

// streamsOf returns what WithStreams put into ctx.
func streamsOf(ctx context.Context) ([]driver.Stream, bool) {
	s, ok := ctx.Value(streamsKey{}).([]driver.Stream)
	return s, ok
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
