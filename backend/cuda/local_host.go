package cuda

import (
	"context"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ReduceTo combines all tensors into dst, which is in CPU memory and the
// operation's until the Work has ended; the tensors keep what they have. The host
// combines, in Reduce's order.
func (l *Local) ReduceTo(ctx context.Context, dst *tensor.Tensor, ts []*tensor.Tensor, op backend.ReduceOp) (*work.Work, error) {
	const kind = work.Reduce
	o, err := l.begin(ctx, kind, ts, 0)
	if err != nil {
		return nil, err
	}
	red, err := op.Reduction(ts[0].DType(), len(ts))
	if err != nil {
		return nil, bad(kind, "%v", err)
	}
	switch {
	case dst == nil:
		return nil, bad(kind, "the destination is nil")
	case dst.Device().Type != tensor.CPU || dst.Layout() != tensor.Strided:
		return nil, bad(kind, "the destination is %v, want a dense tensor in CPU memory", dst)
	case dst.DType() != ts[0].DType() || !dst.SameShape(ts[0]):
		return nil, bad(kind, "cannot reduce %v into %v", ts[0], dst)
	case dst.HasOverlap():
		return nil, bad(kind, "elements of the destination (%v with strides %v) overlap in memory", dst, dst.Strides())
	}
	o.result = []*tensor.Tensor{dst}
	return l.issue(o, func(b *edges.Batch) error {
		if o.bytes == 0 {
			return nil
		}
		if err := o.onHost(b, red, nil); err != nil {
			return err
		}
		combine := o.part
		o.part = func() error {
			if err := combine(); err != nil {
				return err
			}
			return dst.Unpack(o.pinned.Bytes()[:o.bytes])
		}
		return nil
	})
}
