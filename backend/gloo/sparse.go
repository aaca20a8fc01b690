package gloo

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
)

// sparseWork is the all-reduce of sparse CPU tensors.
type sparseWork struct {
	host *host
	ts   []*tensor.Tensor
	kind backend.ReduceKind
	red  backend.Reduction
}

// maxSparseDims is how many sparse dimensions, and how many dense ones, the
// nine numbers have room for.
const maxSparseDims = 4

func (q *operation) newSparse() error {
	c, h := &q.reduce, &q.reduce.host
	switch k := c.Op.Kind(); {
	case k == backend.Sum().Kind(), k == backend.Avg().Kind(), k == backend.PreMulSum(1).Kind() && h.native:
	default:
		return fmt.Errorf("unsupported reduction operation %v (allreduce of sparse tensors only works with ReduceOp.SUM, here with AVG, and on the native wire with PREMUL_SUM)", c.Op)
	}
	t := c.Tensors[0]
	red, err := c.Op.Reduction(t.DType(), h.size)
	if err != nil {
		return err
	}
	for i, x := range c.Tensors {
		if x.SparseDims() != t.SparseDims() {
			return fmt.Errorf("tensor %d has %d sparse dimensions, tensor 0 %d", i, x.SparseDims(), t.SparseDims())
		}
	}
	if s, d := t.SparseDims(), t.Dims()-t.SparseDims(); !h.native && (s > maxSparseDims || d > maxSparseDims) {
		return fmt.Errorf("%d sparse and %d dense dimensions; the wire has room for %d each", s, d, maxSparseDims)
	}
	c.runner = &sparseWork{host: h, ts: c.Tensors, kind: c.Op.Kind(), red: red}
	q.run, q.needsAll = runAllReduce, true
	return nil
}

func (w *sparseWork) Run(ctx context.Context) error {
	mine, err := tensor.SumSparse(w.ts...)
	if err != nil {
		return err
	}
	if w.host.native {
		return w.runNative(mine)
	}
	return w.runGloo(ctx, mine)
}

// runGloo sends Gloo's messages in PyTorch's order: nine numbers from each rank,
// then the indices, then the values. All ranks add up all entries.
func (w *sparseWork) runGloo(ctx context.Context, mine *tensor.Tensor) error {
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
	// Ranks coalesce first, so no rank has more entries than there are coordinates. No product
	// below overflows an int64.
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
	after(w.red, sum.Values().Bytes())
	return w.set(sum.Indices(), sum.Values())
}

// set gives all tensors the result, the first one without a copy.
func (w *sparseWork) set(indices, values *tensor.Tensor) error {
	for i, t := range w.ts {
		var err error
		if i > 0 {
			if indices, err = indices.Clone(); err == nil {
				values, err = values.Clone()
			}
		}
		if err == nil {
			err = t.SetSparse(indices, values, true)
		}
		if err != nil {
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
