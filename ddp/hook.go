package ddp

import (
	"context"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Hook reduces a bucket, c10d's communication hook. DDP calls it when the gradients of the bucket
// are ready and the buckets of lower index are launched, in the same order on every rank. The
// hook starts its communication and returns. The result must be in the bucket's buffer when the
// Work has ended and the steps of After have run. A nil Work means that it is already there.
//
// Gradients are not divided by the group's size: the hook does that. A rank
// that has joined calls the hook with zeros. ctx is Begin's.
//
// A bucket may be on a device (see Buffer). The hook, and the steps of After, then only enqueue
// on the Device's stream. Calls of the group with ctx are ordered after that.
type Hook func(ctx context.Context, b *Bucket) (*work.Work, error)

// AllReduceHook divides the buffer by the group's size and sums it over the
// ranks: the average, as without a hook. On a device the group does both.
func AllReduceHook(ctx context.Context, b *Bucket) (*work.Work, error) {
	if b.dev != nil {
		return b.AllReduce(ctx, pg.Avg())
	}
	b.Divide()
	return b.AllReduce(ctx, pg.Sum())
}

// FP16CompressHook averages in float16: half the bytes of float32, gradients
// rounded to 11 bits, and infinite from 65520 on.
func FP16CompressHook(ctx context.Context, b *Bucket) (*work.Work, error) {
	return compress(ctx, b, tensor.Float16, AllReduceHook)
}

// BF16CompressHook averages in bfloat16: half the bytes of float32, gradients
// rounded to 8 bits, with float32's range.
func BF16CompressHook(ctx context.Context, b *Bucket) (*work.Work, error) {
	return compress(ctx, b, tensor.BFloat16, AllReduceHook)
}

// CompressWrapper runs inner on gradients cast to dtype and casts its result
// back: c10d's fp16_compress_wrapper and bf16_compress_wrapper.
func CompressWrapper(dtype tensor.DType, inner Hook) Hook {
	return func(ctx context.Context, b *Bucket) (*work.Work, error) {
		return compress(ctx, b, dtype, inner)
	}
}

func compress(ctx context.Context, b *Bucket, dtype tensor.DType, inner Hook) (*work.Work, error) {
	if err := b.Cast(dtype); err != nil {
		return nil, err
	}
	return inner(ctx, b)
}

// NoopHook leaves the gradients as they are, to measure the cost of communication, or for ranks
// that average in another way.
func NoopHook(context.Context, *Bucket) (*work.Work, error) { return nil, nil }
