package group

import (
	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// CanCombine reports whether kernels combine a tensor with others.
func (b *Engine) CanCombine(op backend.ReduceOp, t *tensor.Tensor) bool {
	if name, _ := kernels.Combine(op.Kind(), t.DType()); name == "" || Lacks(b.Driver) != nil {
		return false
	}
	return b.Packer(t.Device().Index).Err == nil
}

// Within makes the operation one of the rank's devices alone, on contiguous tensors of the same form: nothing goes
// through the host. Op combines the elements of all into those of the first, in their order, unless it is nil. All get
// the first one's, down Spread's tree.
func (o *Operation) Within(ts []*tensor.Tensor, op *backend.ReduceOp) {
	o.Whole, o.Legs = true, Legs(To, ts...)
	o.fillWithin = func(to Commander) error {
		all := make([]*place.Place, len(ts))
		for i := range all {
			all[i] = o.Legs[i].Dst[0]
		}
		n := ts[0].ByteLen()
		switch {
		case n == 0:
			return nil
		case len(ts) == 1:
			// For who orders a stream after the operation, and by it after the caller's.
			to.Copy(all[0].Up, o.staging.Ptr(), all[0].At(0), 1)
			return nil
		case op != nil:
			if err := o.combine(to, all, *op); err != nil {
				return err
			}
		}
		Spread(to, all, 0, n)
		return nil
	}
}

// combine combines the elements of all places into those of the first, on its device. Elements of other devices come
// there by turns to two places.
func (o *Operation) combine(to Commander, all []*place.Place, op backend.ReduceOp) (err error) {
	first, t := all[0], all[0].T
	var inbox [2]driver.Ptr
	for i, p := range all[1:] {
		from := p.At(0)
		if p.Dev != first.Dev {
			at := &inbox[i%2]
			if *at == 0 {
				if *at, err = o.Scratch(first.Dev, t.ByteLen()); err != nil {
					return err
				}
			}
			to.Copy(p.Up, *at, from, t.ByteLen())
			from = *at
		}
		launch, err := o.B.Packer(first.Dev).Combine(op, t.DType(), first.At(0), from, t.Len())
		if err != nil {
			return err
		}
		to.Launch(first.Up, launch)
	}
	return nil
}
