package pg

import (
	"context"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Work is the future of an operation.
type Work = work.Work

// Tensor is an array over a slice or device memory.
type Tensor = tensor.Tensor

// CallOptions are the options of a collective.
type CallOptions struct {
	// Timeout counts from when the operation begins, after earlier ones; 0 means the group's. The call's context
	// counts from the call. The operation ends at most 0.3 s after either, or a tenth of the time if that is more.
	Timeout time.Duration
}

// P2POptions are the options of messages, which match by tag, in order.
type P2POptions struct {
	Tag     uint32
	Timeout time.Duration // as in CallOptions
}

// BarrierOptions are the options of Barrier.
type BarrierOptions struct {
	Device  tensor.DeviceType // whose backend it is for, in a group that has several
	Timeout time.Duration     // as in CallOptions
}

// Wait waits for what a call has started: pg.Wait(g.AllReduce(ctx, t, op)).
func Wait(w *work.Work, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(context.Background())
}

// ReduceOp combines elements; the zero value is Sum(). Integers wrap.
type ReduceOp = backend.ReduceOp

// Sum adds.
func Sum() ReduceOp { return backend.Sum() }

// Avg divides the sum by the group's size, for floats and complex numbers.
func Avg() ReduceOp { return backend.Avg() }

// Product multiplies.
func Product() ReduceOp { return backend.Product() }

// Min takes the smallest element.
func Min() ReduceOp { return backend.Min() }

// Max takes the largest element.
func Max() ReduceOp { return backend.Max() }

// BAnd is the bitwise and.
func BAnd() ReduceOp { return backend.BAnd() }

// BOr is the bitwise or.
func BOr() ReduceOp { return backend.BOr() }

// BXor is the bitwise exclusive or.
func BXor() ReduceOp { return backend.BXor() }

// PreMulSum multiplies each rank's input by its factor before the sum.
func PreMulSum(factor float64) ReduceOp { return backend.PreMulSum(factor) }

// Custom combines with f, associative, commutative and the same everywhere.
func Custom[T tensor.Element](name string, f func(a, b T) T) ReduceOp {
	return backend.CustomOf(name, f)
}

// Slice returns a tensor over v, which belongs to operations until they end.
func Slice[T tensor.Element](v []T) *tensor.Tensor {
	t, err := tensor.Of(v)
	if err != nil {
		panic(err) // the shape is the length
	}
	return t
}

// Slices returns a tensor over each slice. Their lengths may differ.
func Slices[T tensor.Element](vs ...[]T) []*tensor.Tensor {
	ts := make([]*tensor.Tensor, len(vs))
	for i, v := range vs {
		ts[i] = Slice(v)
	}
	return ts
}

// Parts returns tensors over n equal parts of v, none if v is nil.
func Parts[T tensor.Element](v []T, n int) []*tensor.Tensor {
	if v == nil {
		return nil
	}
	ts := make([]*tensor.Tensor, n)
	for i := range ts {
		ts[i] = Slice(v[len(v)*i/n : len(v)*(i+1)/n])
	}
	return ts
}

// lists are lists of one tensor, which a backend copies before its call returns.
var lists = sync.Pool{New: func() any { return new([1]*tensor.Tensor) }}

// listOf returns a list of t. Give it to putList when the call has returned.
func listOf(t *tensor.Tensor) *[1]*tensor.Tensor {
	ts := lists.Get().(*[1]*tensor.Tensor)
	ts[0] = t
	return ts
}

func putList(ts *[1]*tensor.Tensor) {
	ts[0] = nil
	lists.Put(ts)
}
