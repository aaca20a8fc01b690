package cuda

import (
	"cmp"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// SparseWork is the name of the work for sparse tensors. The entries go to page-locked memory, through the sparse
// all-reduce of the CPU backend, and to new device memory. Every group can do it. Its priority is 0, among the works
// for sparse tensors.
const SparseWork = "sparse"

// SparseDirectWork is the name of the work for sums of sparse tensors where DirectWork is possible. The devices add the
// entries, and fetch those of each other. Its priority is 200.
const SparseDirectWork = "sparse_direct"

// sparse is an all-reduce of sparse tensors, of which some may be in CPU memory.
type sparse struct {
	b       *Backend
	ts      []*tensor.Tensor
	entries []entries // of ts
	at      []int     // where the coordinates are near the group's device
	values  []int     // where the values are
	op      backend.ReduceOp
}

// entries are coordinates and values.
type entries struct{ at, values *tensor.Tensor }

// sparseWay is SparseWork, or SparseDirectWork.
type sparseWay struct{ direct bool }

// Meet connects the ranks for SparseDirectWork, once.
func (w sparseWay) Meet(c *call) error {
	if !w.direct || w.could(c) != nil {
		return nil // Can has the reason
	}
	return cmp.Or(c.b.entriesOn(c.out), c.b.direct.Ready(c.ctx, c.op, c.device(), c.print))
}

// could returns why the works do not add such tensors, as far as this needs no device.
func (w sparseWay) could(c *call) (err error) {
	if x, ok := c.b.g.CPU.(interface {
		CheckSparse([]*tensor.Tensor, backend.ReduceOp) error
	}); ok {
		err = x.CheckSparse(c.out, c.reduce)
	}
	if err != nil || !w.direct {
		return err
	}
	if err = c.b.direct.CanMesh(); err != nil {
		return err
	}
	d := c.out[0].DType()
	if _, ok := kernels.CooAdds(d); !ok || c.reduce.Kind() != backend.Sum().Kind() {
		return fmt.Errorf("no kernel for %v of sparse tensors of %v", c.reduce, d)
	}
	return nil
}

// Can implements way.
func (w sparseWay) Can(c *call) error {
	if err := w.could(c); err != nil || !w.direct {
		return err
	}
	return c.b.direct.Mesh()
}

// OnDevice implements way. Tensors in CPU memory stay there.
func (sparseWay) OnDevice(*call) bool { return false }

// How implements way.
func (w sparseWay) How(c *call) string {
	if w.direct {
		return "each device adds its entries, fetches those of the other devices, and adds all; the hosts tell each " +
			"other how many there are"
	}
	return "entries go by way of page-locked memory through backend " + c.b.g.CPU.Name() + ", and the result to new device memory"
}

// entriesOn checks where the entries of tensors are.
func (b *Backend) entriesOn(ts []*tensor.Tensor) error {
	for i, t := range ts {
		if inCPU(t) {
			continue
		}
		if err := b.dense(work.AllReduce, fmt.Sprintf("the indices of tensor %d", i), t.Indices()); err != nil {
			return err
		}
		if err := b.dense(work.AllReduce, fmt.Sprintf("the values of tensor %d", i), t.Values()); err != nil {
			return err
		}
	}
	return nil
}

// Issue implements way.
func (w sparseWay) Issue(call *call) (*work.Work, error) {
	b, ctx, op, ts := call.b, call.ctx, call.op, call.out
	if driver.CallCaptured(ctx) {
		return nil, fmt.Errorf("cuda: %v in a capture: %w: nobody knows how many entries the sum of sparse tensors will have", op, driver.ErrCapture)
	}
	if err := b.entriesOn(ts); err != nil {
		return nil, err
	}
	s := &sparse{b: b, ts: append([]*tensor.Tensor(nil), ts...), op: call.reduce}
	q := &group.Operation{Print: call.print, Whole: true, Makes: true, Call: s.run}
	var onCPU []*tensor.Tensor
	for _, t := range ts {
		e := entries{t.Indices(), t.Values()}
		s.entries = append(s.entries, e)
		if inCPU(t) {
			onCPU = append(onCPU, e.at, e.values)
			continue
		}
		q.Legs = append(q.Legs, group.From(e.at), group.From(e.values))
	}
	if err := b.mixed.Await(ctx, onCPU); err != nil {
		if _, _, refused := b.g.Admit(ctx, op, 0); refused != nil {
			err = refused
		}
		return nil, err
	}
	if w.direct {
		q.Near, q.Call = s.near(), s.runDirect
	}
	return b.g.Issue(ctx, op, call.timeout, q, s.ts...)
}

// near finds places for the entries on the device of the group's kernels: first the coordinates of each tensor, then
// the values of all, one after the other.
func (s *sparse) near() *group.Near {
	n := &group.Near{Dev: s.b.direct.Dev}
	s.at, s.values = make([]int, len(s.ts)), make([]int, len(s.ts))
	for i, e := range s.entries {
		s.at[i] = n.Bytes
		n.Bytes += e.at.ByteLen()
	}
	n.Bytes = group.Align(n.Bytes)
	for i, e := range s.entries {
		s.values[i] = n.Bytes
		if n.Bytes += e.values.ByteLen(); !inCPU(s.ts[i]) {
			n.At = append(n.At, s.at[i], s.values[i])
		}
	}
	return n
}

// runDirect is the host's part of SparseDirectWork.
func (s *sparse) runDirect(q *group.Operation, _ []*tensor.Tensor) error {
	t, at := s.ts[0], func(i int) driver.Ptr { return q.Near.Ptr + driver.Ptr(i) }
	dims := t.SparseDims()
	x := &directway.Sparse{
		What:  fmt.Sprintf("%v of %v%v with %d sparse dimensions", s.op, t.DType(), t.Shape(), dims),
		Shape: t.Shape()[:dims], Row: 1, Values: at(s.values[0]),
	}
	x.Added, _ = kernels.CooAdds(t.DType())
	for _, n := range t.Shape()[dims:] {
		x.Row *= n
	}
	for i, e := range s.entries {
		x.NNZ, x.At = append(x.NNZ, s.ts[i].NNZ()), append(x.At, at(s.at[i]))
		if !inCPU(s.ts[i]) {
			continue
		}
		if err := cmp.Or(q.Put(q.Near.Dev, at(s.at[i]), e.at.Bytes()), q.Put(q.Near.Dev, at(s.values[i]), e.values.Bytes())); err != nil {
			return err
		}
	}
	y, err := s.b.direct.SumSparse(q, x)
	if err != nil {
		return err
	}
	sums := make([]entries, len(s.ts))
	for i, t := range s.ts {
		at, err := copied(q, t.Device(), tensor.Int64, y.At, dims, y.NNZ)
		if err != nil {
			return err
		}
		values, err := copied(q, t.Device(), t.DType(), y.Values, append([]int{y.NNZ}, t.Shape()[dims:]...)...)
		if err != nil {
			return err
		}
		sums[i] = entries{at, values}
	}
	return s.set(q, sums)
}

// copied returns a copy in new memory of a tensor that is near the group's device.
func copied(q *group.Operation, to tensor.Device, d tensor.DType, from driver.Ptr, shape ...int) (*tensor.Tensor, error) {
	bytes := d.Size()
	for _, n := range shape {
		bytes *= n
	}
	if to.Type == tensor.CPU {
		t, err := tensor.New(d, shape...)
		if err == nil {
			err = q.Fetch(q.Near.Dev, t.Bytes(), from)
		}
		return t, err
	}
	m, err := q.New(to.Index, bytes)
	if err != nil {
		return nil, fmt.Errorf("memory for the sum: %w", err)
	}
	if bytes > 0 {
		err = q.Do(q.Near.Dev, func(c *group.AtOnce, s driver.Stream) { c.Copy(s, m.Ptr(), from, bytes) })
	}
	if err != nil {
		return nil, err
	}
	return tensor.OnDevice(d, m, shape...)
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
	return s.set(q, sums)
}

// set gives the tensors their sums.
func (s *sparse) set(q *group.Operation, sums []entries) error {
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
