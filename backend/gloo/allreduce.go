package gloo

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
)

func init() {
	for _, w := range []backend.AllReduceWork{
		{Name: "cpu dense", Device: tensor.CPU, Layout: tensor.Strided, New: newDense},
		{Name: "cpu sparse", Device: tensor.CPU, Layout: tensor.SparseCOO, New: newSparse},
	} {
		if err := backend.RegisterAllReduce(w); err != nil {
			panic(err)
		}
	}
}

// reduceCall is the state of an all-reduce, kept within its operation.
type reduceCall struct {
	backend.AllReduceCall
	host   host
	runner backend.AllReduceRunner
	dense  denseWork
}

// host is what an all-reduce work sees of the backend: its collectives on host
// memory, under the tag of the one operation.
type host struct {
	*session
	op     *operation
	engine *engine // set while the operation runs
}

func (h *host) Rank() int { return h.rank }
func (h *host) Size() int { return h.size }

// AllReduceBytes does not apply r.Before and r.After: a work that joins several
// tensors applies them itself.
func (h *host) AllReduceBytes(_ context.Context, b []byte, d tensor.DType, r backend.Reduction) error {
	if r.Grain == 0 {
		r.Grain = d.Size()
	}
	return h.engine.session.route.allReduce(h.engine, b, r)
}

func (h *host) AllGatherBytes(_ context.Context, out, in []byte) error {
	return h.engine.session.route.allGather(h.engine, out, in)
}

func (h *host) AllGatherVBytes(_ context.Context, out, in []byte, counts []int64) error {
	return h.engine.session.route.allGatherV(h.engine, out, in, counts)
}

func (h *host) mismatch(rank int, err error) error {
	return h.session.mismatch(h.engine.mesh, h.engine.op, rank, err)
}

// denseWork is the all-reduce of strided CPU tensors: this rank's tensors are
// combined first, in order, then the ranks' around a ring.
type denseWork struct {
	host *host
	ts   []*tensor.Tensor
	red  backend.Reduction
}

func newDense(c *backend.AllReduceCall) (backend.AllReduceRunner, error) {
	for i, t := range c.Tensors {
		if t.HasOverlap() {
			return nil, fmt.Errorf("elements of tensor %d (%v with strides %v) overlap in memory", i, t, t.Strides())
		}
	}
	red, err := c.Op.Reduction(c.Tensors[0].DType(), c.Host.Size())
	if err != nil {
		return nil, err
	}
	h, ok := c.Host.(*host)
	if !ok {
		return nil, fmt.Errorf("host is a %T, not gloo's", c.Host)
	}
	w := &h.op.reduce.dense
	*w = denseWork{host: h, ts: c.Tensors, red: red}
	return w, nil
}

func (w *denseWork) Run(ctx context.Context) error {
	e := w.host.engine
	return e.inPlace(w.ts[0], false, func(buf []byte) error {
		before(w.red, buf)
		for _, t := range w.ts[1:] {
			in, err := t.Contiguous()
			if err != nil {
				return err
			}
			if w.red.Before != nil && in == t {
				if in, err = t.Clone(); err != nil {
					return err
				}
			}
			before(w.red, in.Bytes())
			w.red.Combine(buf, in.Bytes())
		}
		if err := w.host.AllReduceBytes(ctx, buf, w.ts[0].DType(), w.red); err != nil {
			return err
		}
		after(w.red, buf)
		for _, t := range w.ts[1:] {
			if err := t.Unpack(buf); err != nil {
				return err
			}
		}
		return nil
	})
}
