package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/work"
)

// WithStreams returns a context for calls whose tensors these streams use. The operation comes
// after all commands that the streams have at the time of the call. It takes the place of the
// streams that the tensors' memories have. Without any stream it says that nothing has to be
// waited for.
func WithStreams(ctx context.Context, streams ...driver.Stream) context.Context {
	return driver.WithCallStreams(ctx, &driver.CallStreams{Before: streams})
}

// Beside is WithStreams for operations that run beside other kernels of the caller, such as the
// all-reduce of gradients beside a backward pass. Direct work then takes 16 multiprocessors. That suffices for
// most of the bandwidth of long sums and averages of two ranks, and for less of that of others. Without it, kernels
// for large tensors fill the device until they end. All ranks need the same.
func Beside(ctx context.Context, streams ...driver.Stream) context.Context {
	return driver.WithCallStreams(ctx, &driver.CallStreams{Before: streams, Beside: true})
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

// Whole returns the memory itself.
func (b bound) Whole() driver.Memory { return b.Memory }

// Stream returns the stream that uses the memory.
func (b bound) Stream() driver.Stream { return b.stream }

var _ work.Stream = driver.Stream(nil)

// InStream returns a context for calls that are part of a stream. The operation comes after what s
// has been given before, and what s is given later comes after the operation. Direct work runs on s
// itself, and the call is one launch. In c10d async_op=False has that effect. S has to stay open until the
// operation has ended. Work.Synchronize with another stream waits for what s has been given by then.
//
// Without it an operation runs on a stream of the group, beside later work of the caller's streams.
func InStream(ctx context.Context, s driver.Stream) context.Context {
	return driver.WithCallStreams(ctx, &driver.CallStreams{Before: []driver.Stream{s}, In: s})
}
