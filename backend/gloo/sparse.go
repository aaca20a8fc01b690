package gloo

import (
	"context"
	"fmt"
	"math"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
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

// CheckSparse returns why AllReduce refuses sparse tensors of one dtype and shape, on any device, nil if it does not.
// A backend that copies tensors to CPU memory asks first.
func (b *Backend) CheckSparse(ts []*tensor.Tensor, op backend.ReduceOp) error {
	return b.checkSparse(ts, op)
}

func (s *session) checkSparse(ts []*tensor.Tensor, op backend.ReduceOp) error {
	switch k := op.Kind(); {
	case k == backend.Sum().Kind(), k == backend.Avg().Kind(), k == backend.PreMulSum(1).Kind() && s.native:
	default:
		return fmt.Errorf("unsupported reduction operation %v (allreduce of sparse tensors only works with ReduceOp.SUM, here with AVG, and on the native wire with PREMUL_SUM)", op)
	}
	t := ts[0]
	if _, err := op.Reduction(t.DType(), s.size); err != nil {
		return err
	}
	for i, x := range ts {
		if x.SparseDims() != t.SparseDims() {
			return fmt.Errorf("tensor %d has %d sparse dimensions, tensor 0 %d", i, x.SparseDims(), t.SparseDims())
		}
	}
	if n, d := t.SparseDims(), t.Dims()-t.SparseDims(); !s.native && (n > maxSparseDims || d > maxSparseDims) {
		return fmt.Errorf("%d sparse and %d dense dimensions; the wire has room for %d each", n, d, maxSparseDims)
	}
	return nil
}

func (q *operation) newSparse() error {
	c, h := &q.reduce, &q.reduce.host
	if err := h.checkSparse(c.Tensors, c.Op); err != nil {
		return err
	}
	red, err := c.Op.Reduction(c.Tensors[0].DType(), h.size)
	if err != nil {
		return err
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
	// below overflows an int64, because the bytes of the dense tensor fit an int.
	most := int64(1)
	for _, d := range shape[:s] {
		most *= int64(d)
	}
	most = min(most, maxEntries)
	nnz := make([]int, size)
	indexBytes, valueBytes := make([]int64, size), make([]int64, size)
	left, announced := int64(math.MaxInt), int64(0) // bytes of all ranks, and of the others
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
		indexBytes[r], valueBytes[r] = n*int64(s)*8, n*int64(row)
		for _, more := range []int64{indexBytes[r], valueBytes[r]} {
			if more > left {
				return w.host.mismatch(r, fmt.Errorf("rank %d announces %d entries: with those of the ranks before it this rank cannot address them", r, n))
			}
			left -= more
			if r != w.host.rank {
				announced += more
			}
		}
		nnz[r] = int(n)
	}
	grows := announced > window
	indices, err := w.gather(mine.Indices().Bytes(), indexBytes, grows)
	if err != nil {
		return err
	}
	values, err := w.gather(mine.Values().Bytes(), valueBytes, grows)
	if err != nil {
		return err
	}
	parts := make([]*tensor.Tensor, size)
	for r, n := range nnz {
		it, err := tensor.FromBytes(tensor.Int64, indices[r], s, n)
		if err != nil {
			return err
		}
		vt, err := tensor.FromBytes(mine.DType(), values[r], append([]int{n}, shape[s:]...)...)
		if err != nil {
			return err
		}
		if parts[r], err = tensor.Sparse(it, vt, shape...); err != nil {
			return w.host.mismatch(r, fmt.Errorf("entries of rank %d: %w", r, err))
		}
	}
	sum, err := tensor.SumSparse(parts...)
	if err != nil {
		return err
	}
	after(w.red, sum.Values().Bytes())
	return w.set(sum.Indices(), sum.Values())
}

// gather returns every rank's block of counts[r] bytes. With grows it takes memory for another rank's block
// only as that arrives.
func (w *sparseWork) gather(mine []byte, counts []int64, grows bool) ([][]byte, error) {
	e := w.host.engine
	if !grows {
		all, err := fresh(int(totalOf(counts)), 1)
		if err != nil {
			return nil, err
		}
		return split(all, counts), e.session.route.allGatherV(e, all, mine, counts)
	}
	blocks := make([][]byte, len(counts))
	blocks[w.host.rank] = mine
	return blocks, e.onSlot(prefixAllGather, func() error { return e.gatherGrowing(blocks, counts) })
}

// gatherGrowing sends the messages of plan.AllGatherV. blocks has this rank's.
func (e *engine) gatherGrowing(blocks [][]byte, counts []int64) error {
	if totalOf(counts) == 0 {
		return nil
	}
	rank, size := e.session.rank, e.session.size
	g := &e.main
	g.begin(&plan.Plan{Requests: 2}, e.slot, nil, nil, nil)
	recv, send := g.reqs[0], g.reqs[1]
	for i := range size - 1 {
		out := (rank - i + size) % size
		in := (out - 1 + size) % size
		recv.Peer, recv.Slot, recv.Grows = (rank-1+size)%size, e.slot, int(counts[in])
		send.Peer, send.Slot, send.Buf = (rank+1)%size, e.slot, blocks[out]
		g.busy[0], g.busy[1] = true, true
		e.mesh.Recv(recv)
		e.mesh.Send(send)
		for k, r := range g.reqs[:2] {
			e.wait(r)
			g.busy[k] = false
			if r == recv {
				blocks[in] = r.Buf
			}
			r.Buf, r.Grows = nil, 0
			if err := r.Err(); err != nil {
				e.drain()
				return e.session.failed(e.mesh, &e.op.called, r, err)
			}
		}
	}
	return nil
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
