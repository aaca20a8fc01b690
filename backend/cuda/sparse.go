package cuda

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// SparseWork is the name of the work for sparse tensors. The entries go to page-locked memory, through the sparse
// all-reduce of the CPU backend, and to new device memory. Every group can do it. Its priority is 0, among the works
// for sparse tensors.
const SparseWork = "sparse"

// sparse is an all-reduce of sparse tensors, of which some may be in CPU memory.
type sparse struct {
	b       *Backend
	ts      []*tensor.Tensor
	entries []entries // of ts
	op      backend.ReduceOp
}

// entries are coordinates and values.
type entries struct{ at, values *tensor.Tensor }

// allowsSparse returns nil if the CPU backend adds such tensors, else the reason why not.
func (a *allReduce) allowsSparse() error {
	if c, ok := a.b.g.CPU.(interface {
		CheckSparse([]*tensor.Tensor, backend.ReduceOp) error
	}); ok {
		return c.CheckSparse(a.ts, a.op)
	}
	return nil
}

// allReduceSparse starts SparseWork.
func (b *Backend) allReduceSparse(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions, print board.Call) (*work.Work, error) {
	const op = work.AllReduce
	if c := place.StreamsOf(ctx); c != nil && c.In != nil && driver.Capturing(c.In) {
		return nil, fmt.Errorf("cuda: %v in a capture: %w: nobody knows how many entries the sum of sparse tensors will have", op, driver.ErrCapture)
	}
	s := &sparse{b: b, ts: append([]*tensor.Tensor(nil), ts...), op: o.Op}
	q := &group.Operation{Print: print, Whole: true, Makes: true, Call: s.run}
	var onCPU []*tensor.Tensor
	for i, t := range ts {
		e := entries{t.Indices(), t.Values()}
		s.entries = append(s.entries, e)
		if inCPU(t) {
			onCPU = append(onCPU, e.at, e.values)
			continue
		}
		if err := b.dense(op, fmt.Sprintf("the indices of tensor %d", i), e.at); err != nil {
			return nil, err
		}
		if err := b.dense(op, fmt.Sprintf("the values of tensor %d", i), e.values); err != nil {
			return nil, err
		}
		q.Legs = append(q.Legs, group.From(e.at), group.From(e.values))
	}
	if err := b.mixed.Await(ctx, onCPU); err != nil {
		if _, _, refused := b.g.Admit(ctx, op, 0); refused != nil {
			err = refused
		}
		return nil, err
	}
	return b.g.Issue(ctx, op, o.Timeout, q, s.ts...)
}

// run is the host's part. Staged has the entries of the device tensors.
func (s *sparse) run(q *group.Operation, staged []*tensor.Tensor) error {
	all := make([]*tensor.Tensor, len(s.ts))
	for i, t := range s.ts {
		e, err := s.entries[i], error(nil)
		if !inCPU(t) {
			if e, err = e.over(staged[0].Bytes(), staged[1].Bytes()); err != nil {
				return err
			}
			staged = staged[2:]
		}
		if all[i], err = tensor.Sparse(e.at, e.values, t.Shape()...); err != nil {
			return fmt.Errorf("tensor %d: %w", i, err)
		}
	}
	w, err := s.b.g.CPU.AllReduce(q.Ctx, all, backend.AllReduceOptions{Op: s.op, Timeout: q.Left()})
	if err := q.Wait(w, err); err != nil {
		return err
	}
	sums := make([]entries, len(all))
	for i, t := range s.ts {
		sums[i] = entries{all[i].Indices(), all[i].Values()}
		if inCPU(t) {
			continue
		}
		if sums[i], err = sums[i].onDevice(q, t.Device().Index); err != nil {
			return fmt.Errorf("memory for the %d entries of the sum: %w", all[i].NNZ(), err)
		}
	}
	for i, t := range s.ts {
		if err := t.SetSparse(sums[i].at, sums[i].values, true); err != nil {
			return err
		}
	}
	q.Gives()
	return nil
}

// over returns entries like e whose bytes are in CPU memory.
func (e entries) over(at, values []byte) (u entries, err error) {
	if u.at, err = tensor.FromBytes(tensor.Int64, at, e.at.Shape()...); err == nil {
		u.values, err = tensor.FromBytes(e.values.DType(), values, e.values.Shape()...)
	}
	return u, err
}

// onDevice returns a copy of entries in new memory.
func (e entries) onDevice(q *group.Operation, dev int) (u entries, err error) {
	of := func(t *tensor.Tensor) *tensor.Tensor {
		var m *group.Made
		if err == nil {
			m, err = q.Make(dev, t.Bytes())
		}
		if err != nil {
			return nil
		}
		t, err = tensor.OnDevice(t.DType(), m, t.Shape()...)
		return t
	}
	u.at, u.values = of(e.at), of(e.values)
	return u, err
}
