package gloo

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/plan"
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

// host is what an all-reduce work sees of the backend: its collectives on host
// memory, under the tag of the one operation.
type host struct {
	backend *Backend
	engine  *engine // set while the operation runs
}

func (h *host) Rank() int { return h.backend.rank }
func (h *host) Size() int { return h.backend.size }

// AllReduceBytes does not apply r.Before and r.After: a work that joins several
// tensors applies them itself.
func (h *host) AllReduceBytes(_ context.Context, b []byte, d tensor.DType, r backend.Reduction) error {
	if r.Grain == 0 {
		r.Grain = d.Size()
	}
	return h.engine.run(h.backend.allReducePlan(int64(len(b)), r), b, nil, r.Combine)
}

func (h *host) AllGatherBytes(_ context.Context, out, in []byte) error {
	return h.gather(plan.AllGather(h.Rank(), h.Size(), int64(len(in))), out, in)
}

func (h *host) AllGatherVBytes(_ context.Context, out, in []byte, counts []int64) error {
	return h.gather(plan.AllGatherV(h.Rank(), counts), out, in)
}

// gather runs p on the all-gathers' slot, as Gloo does within an all-reduce too.
func (h *host) gather(p *plan.Plan, out, in []byte) error {
	e := h.engine
	before := e.slot
	defer func() { e.slot = before }()
	e.slot = slotOf(prefixAllGather, e.tag)
	return e.run(p, out, in, nil)
}

func (h *host) mismatch(rank int, err error) error {
	return h.backend.mismatch(h.engine.mesh, h.engine.op, rank, err)
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
	return &denseWork{host: h, ts: c.Tensors, red: red}, nil
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

// sparseWork is the all-reduce of sparse CPU tensors, with Gloo's messages in
// PyTorch's order: nine numbers from each rank, then the indices, then the values.
type sparseWork struct {
	host *host
	ts   []*tensor.Tensor
	div  func([]byte)
}

// maxSparseDims is how many sparse dimensions, and how many dense ones, the
// nine numbers have room for.
const maxSparseDims = 4

func newSparse(c *backend.AllReduceCall) (backend.AllReduceRunner, error) {
	h, ok := c.Host.(*host)
	if !ok {
		return nil, fmt.Errorf("host is a %T, not gloo's", c.Host)
	}
	if k := c.Op.Kind(); k != backend.Sum.Kind() && k != backend.Avg.Kind() {
		return nil, fmt.Errorf("unsupported reduction operation %v (allreduce of sparse tensors only works with ReduceOp.SUM, and here with AVG)", c.Op)
	}
	t := c.Tensors[0]
	red, err := c.Op.Reduction(t.DType(), c.Host.Size())
	if err != nil {
		return nil, err
	}
	for i, x := range c.Tensors {
		if x.SparseDims() != t.SparseDims() {
			return nil, fmt.Errorf("tensor %d has %d sparse dimensions, tensor 0 %d", i, x.SparseDims(), t.SparseDims())
		}
	}
	if s, d := t.SparseDims(), t.Dims()-t.SparseDims(); s > maxSparseDims || d > maxSparseDims {
		return nil, fmt.Errorf("%d sparse and %d dense dimensions; the wire has room for %d each", s, d, maxSparseDims)
	}
	return &sparseWork{host: h, ts: c.Tensors, div: red.After}, nil
}

func (w *sparseWork) Run(ctx context.Context) error {
	mine, err := tensor.SumSparse(w.ts...)
	if err != nil {
		return err
	}
	size, s, shape := w.host.Size(), mine.SparseDims(), mine.Shape()

	var meta [2*maxSparseDims + 1]int64
	for i, d := range shape {
		if i < s {
			meta[i] = int64(d)
		} else {
			meta[maxSparseDims+i-s] = int64(d)
		}
	}
	meta[2*maxSparseDims] = int64(mine.NNZ())
	all := make([]int64, len(meta)*size)
	if err := w.host.AllGatherBytes(ctx, bytesOf(all), bytesOf(meta[:])); err != nil {
		return err
	}
	row := mine.DType().Size()
	for _, d := range shape[s:] {
		row *= d
	}
	// Ranks coalesce first, so that nobody has more entries than there are
	// coordinates. (With that, no product below leaves an int64.)
	most := int64(1)
	for _, d := range shape[:s] {
		most *= int64(d)
	}
	most = min(most, maxEntries)
	nnz := make([]int, size)
	indexBytes, valueBytes := make([]int64, size), make([]int64, size)
	entries := 0
	for r := range size {
		theirs := all[r*len(meta) : (r+1)*len(meta)]
		for i := range 2 * maxSparseDims {
			if theirs[i] != meta[i] {
				//lint:ignore ST1005 PyTorch's wording
				return w.host.mismatch(r, fmt.Errorf("Sparse dimensions do not match: rank %d has %v, this rank %v", r, theirs[:2*maxSparseDims], meta[:2*maxSparseDims]))
			}
		}
		n := theirs[2*maxSparseDims]
		if n < 0 || n > most {
			return w.host.mismatch(r, fmt.Errorf("rank %d announces %d entries, of at most %d", r, n, most))
		}
		nnz[r] = int(n)
		entries += int(n)
		indexBytes[r], valueBytes[r] = n*int64(s)*8, n*int64(row)
	}
	indices := make([]int64, entries*s)
	if err := w.host.AllGatherVBytes(ctx, bytesOf(indices), mine.Indices().Bytes(), indexBytes); err != nil {
		return err
	}
	values, err := tensor.New(mine.DType(), append([]int{entries}, shape[s:]...)...)
	if err != nil {
		return err
	}
	if err := w.host.AllGatherVBytes(ctx, values.Bytes(), mine.Values().Bytes(), valueBytes); err != nil {
		return err
	}
	parts := make([]*tensor.Tensor, size)
	first := 0
	for r, n := range nnz {
		it, err := tensor.Of(indices[first*s:(first+n)*s], s, n)
		if err != nil {
			return err
		}
		vt, err := values.Slice(0, first, first+n)
		if err != nil {
			return err
		}
		if parts[r], err = tensor.Sparse(it, vt, shape...); err != nil {
			return w.host.mismatch(r, fmt.Errorf("entries of rank %d: %w", r, err))
		}
		first += n
	}
	sum, err := tensor.SumSparse(parts...)
	if err != nil {
		return err
	}
	if w.div != nil {
		w.div(sum.Values().Bytes())
	}
	for _, t := range w.ts {
		c, err := sum.Clone()
		if err != nil {
			return err
		}
		if err := t.SetSparse(c.Indices(), c.Values(), true); err != nil {
			return err
		}
	}
	return nil
}

// maxEntries bounds what one rank can make the others allocate.
const maxEntries = 1 << 31

func bytesOf(v []int64) []byte {
	t, err := tensor.Of(v, len(v))
	if err != nil {
		panic(err) // the shape is the length
	}
	return t.Bytes()
}
