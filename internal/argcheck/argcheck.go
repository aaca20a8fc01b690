// Package argcheck checks the arguments of collectives, for backends. Errors are *backend.ArgumentError.
package argcheck

import (
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Checker checks the calls of one rank. A method that has the name of a collective makes all checks of its tensors,
// and of its root if it has one. Operators are checked by Reduction.
type Checker struct {
	Backend    string // name
	Rank, Size int

	// Dense returns why the backend's dense collectives do not take a tensor, nil if they do. It may be nil itself.
	Dense func(op work.OpType, name string, t *tensor.Tensor) error
}

// bad returns an error of a call.
func (c *Checker) bad(op work.OpType, format string, args ...any) error {
	return &backend.ArgumentError{Backend: c.Backend, Op: op, What: fmt.Sprintf(format, args...)}
}

// Root checks the number of a root.
func (c *Checker) Root(op work.OpType, root int) error {
	if root < 0 || root >= c.Size {
		return c.bad(op, "invalid root rank: %d (the group has %d ranks)", root, c.Size)
	}
	return nil
}

// Message checks a send or a receive. The peer of a receive from any rank does not matter.
func (c *Checker) Message(op work.OpType, t *tensor.Tensor, peer int) error {
	switch {
	case op == work.RecvAnySource && c.Size == 1:
		return c.bad(op, "no other rank is in the group")
	case op == work.RecvAnySource:
	case peer < 0 || peer >= c.Size:
		return c.bad(op, "invalid rank %d (the group has %d ranks)", peer, c.Size)
	case peer == c.Rank:
		return c.bad(op, "rank %d cannot send to or receive from itself", peer)
	}
	if err := c.Dense(op, "tensor", t); err != nil || op == work.Send {
		return err
	}
	return c.Overlap(op, []*tensor.Tensor{t}, nil)
}

// Overlap checks that a call's tensors share memory only where they may.
func (c *Checker) Overlap(op work.OpType, out, in []*tensor.Tensor) error {
	if err := backend.CheckMemory(op, c.Rank, out, in); err != nil {
		return c.bad(op, "%v", err)
	}
	return nil
}

// Reduction makes an operator ready for a dtype.
func (c *Checker) Reduction(op work.OpType, r backend.ReduceOp, d tensor.DType) (backend.Reduction, error) {
	red, err := r.Reduction(d, c.Size)
	if err != nil {
		return red, c.bad(op, "%v", err)
	}
	return red, nil
}

// Typed checks that every tensor of a list is dense and of one dtype; shapes may differ. Name is a plural.
func (c *Checker) Typed(op work.OpType, name string, d tensor.DType, ts []*tensor.Tensor) error {
	for i, t := range ts {
		if c.Dense(op, name, t) != nil {
			return c.Dense(op, fmt.Sprintf("%s %d", strings.TrimSuffix(name, "s"), i), t)
		}
		if t.DType() != d {
			return c.bad(op, "invalid tensor type at index %d of %s (expected %v, got %v)", i, name, d, t.DType())
		}
	}
	return nil
}

// like checks that every tensor of a list is dense and of one dtype and shape.
func (c *Checker) like(op work.OpType, name string, want *tensor.Tensor, ts []*tensor.Tensor) error {
	if err := c.Typed(op, name, want.DType(), ts); err != nil {
		return err
	}
	for i, t := range ts {
		if !t.SameShape(want) {
			return c.bad(op, "invalid tensor size at index %d of %s (expected %v, got %v)",
				i, name, want.Shape(), t.Shape())
		}
	}
	return nil
}

// several checks a list of tensors of one dtype that may not be empty.
func (c *Checker) several(op work.OpType, name string, ts []*tensor.Tensor) error {
	if err := c.Dense(op, strings.TrimSuffix(name, "s")+" 0", ts[0]); err != nil {
		return err
	}
	return c.Typed(op, name, ts[0].DType(), ts)
}

// listed checks that a list has a tensor for each rank.
func (c *Checker) listed(op work.OpType, name string, n int) error {
	if n != c.Size {
		return c.bad(op, "invalid %s tensor list (expected length %d, got %d)", name, c.Size, n)
	}
	return nil
}

// parts checks that dimension 0 of whole is Size times that of part, and that their other dimensions are equal. Whole
// may also have the shape [Size, part...].
func (c *Checker) parts(op work.OpType, whole, part *tensor.Tensor) error {
	if whole.DType() != part.DType() {
		return c.bad(op, "dtypes differ: %v and %v", whole.DType(), part.DType())
	}
	w, p := whole.Shape(), part.Shape()
	joined := len(p) > 0 && len(w) == len(p) && w[0] == p[0]*c.Size && slices.Equal(w[1:], p[1:])
	if !joined && (len(w) == 0 || w[0] != c.Size || !slices.Equal(w[1:], p)) {
		return c.bad(op, "shape %v is not shape %v times %d along dimension 0, and not %[3]d of them stacked",
			w, p, c.Size)
	}
	return nil
}

// Broadcast checks a broadcast.
func (c *Checker) Broadcast(ts []*tensor.Tensor, o backend.BroadcastOptions) error {
	const op = work.Broadcast
	if err := c.Root(op, o.Root); err != nil {
		return err
	}
	if len(ts) == 0 {
		return c.bad(op, "invalid root tensor: %d (requires non-empty tensor list)", o.RootTensor)
	}
	if o.RootTensor < 0 || o.RootTensor >= len(ts) {
		return c.bad(op, "invalid root tensor: %d (there are %d)", o.RootTensor, len(ts))
	}
	if err := c.Dense(op, "tensor 0", ts[0]); err != nil {
		return err
	}
	if err := c.like(op, "tensors", ts[0], ts); err != nil {
		return err
	}
	return c.Overlap(op, ts, nil)
}

// AllReduce checks that the tensors of an all_reduce have one layout, dtype and shape. They may be sparse.
func (c *Checker) AllReduce(ts []*tensor.Tensor) error {
	const op = work.AllReduce
	if len(ts) == 0 {
		return c.bad(op, "requires non-empty tensor list")
	}
	for i, t := range ts {
		switch {
		case t == nil:
			return c.bad(op, "tensor %d is nil", i)
		case t.Layout() != ts[0].Layout():
			return c.bad(op, "invalid tensor layout at index %d (expected %v, got %v)", i, ts[0].Layout(), t.Layout())
		case t.DType() != ts[0].DType():
			return c.bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, ts[0].DType(), t.DType())
		case !t.SameShape(ts[0]):
			return c.bad(op, "invalid tensor size at index %d (expected %v, got %v)", i, ts[0].Shape(), t.Shape())
		}
	}
	return c.Overlap(op, ts, nil)
}

// AllReduceCoalesced checks a coalesced all_reduce.
func (c *Checker) AllReduceCoalesced(ts []*tensor.Tensor) error {
	const op = work.AllReduceCoalesced
	if len(ts) == 0 {
		return c.bad(op, "requires non-empty tensor list")
	}
	if err := c.several(op, "tensors", ts); err != nil {
		return err
	}
	return c.Overlap(op, ts, nil)
}

// Reduce checks a reduce.
func (c *Checker) Reduce(t *tensor.Tensor, o backend.ReduceOptions) error {
	const op = work.Reduce
	if err := c.Root(op, o.Root); err != nil {
		return err
	}
	if err := c.Dense(op, "tensor", t); err != nil {
		return err
	}
	return c.Overlap(op, []*tensor.Tensor{t}, nil)
}

// AllGather checks an all_gather; even is whether all inputs have one shape.
func (c *Checker) AllGather(out []*tensor.Tensor, in *tensor.Tensor, even bool) error {
	const op = work.AllGather
	if err := c.Dense(op, "input", in); err != nil {
		return err
	}
	if err := c.outputs(op, out, in, even); err != nil {
		return err
	}
	return c.Overlap(op, out, []*tensor.Tensor{in})
}

// outputs checks the outputs of the ranks' inputs.
func (c *Checker) outputs(op work.OpType, out []*tensor.Tensor, in *tensor.Tensor, even bool) error {
	if err := c.listed(op, "output", len(out)); err != nil {
		return err
	}
	if even {
		return c.like(op, "outputs", in, out)
	}
	if err := c.Typed(op, "outputs", in.DType(), out); err != nil {
		return err
	}
	if !out[c.Rank].SameShape(in) {
		return c.bad(op, "output %d has shape %v, this rank's input %v", c.Rank, out[c.Rank].Shape(), in.Shape())
	}
	return nil
}

// AllGatherIntoTensor checks an all_gather into one tensor.
func (c *Checker) AllGatherIntoTensor(out, in *tensor.Tensor) error {
	const op = work.AllGatherIntoTensor
	if err := c.Dense(op, "input", in); err != nil {
		return err
	}
	if err := c.Dense(op, "output", out); err != nil {
		return err
	}
	if err := c.parts(op, out, in); err != nil {
		return err
	}
	return c.Overlap(op, []*tensor.Tensor{out}, []*tensor.Tensor{in})
}

// AllGatherCoalesced checks a coalesced all_gather. It returns the outputs in one list, rank after rank.
func (c *Checker) AllGatherCoalesced(out [][]*tensor.Tensor, in []*tensor.Tensor) (joined []*tensor.Tensor, err error) {
	const op = work.AllGatherCoalesced
	if len(in) == 0 {
		return nil, c.bad(op, "requires non-empty input tensor list")
	}
	if err := c.several(op, "inputs", in); err != nil {
		return nil, err
	}
	if len(out) != c.Size {
		return nil, c.bad(op, "output lists should be equal to world size (%d, got %d)", c.Size, len(out))
	}
	joined = make([]*tensor.Tensor, 0, c.Size*len(in))
	for r, list := range out {
		if len(list) != len(in) {
			return nil, c.bad(op, "invalid output size of list %d: (expected length %d, got %d)", r, len(in), len(list))
		}
		if err := c.Typed(op, "outputs", in[0].DType(), list); err != nil {
			return nil, err
		}
		for i, t := range list {
			if !t.SameShape(in[i]) {
				return nil, c.bad(op, "invalid size of output tensor at index %d of list %d (expected %v, got %v)",
					i, r, in[i].Shape(), t.Shape())
			}
		}
		joined = append(joined, list...)
	}
	return joined, c.Overlap(op, joined, in)
}

// AllGatherIntoTensorCoalesced checks a coalesced all_gather into tensors. It returns their parts, rank after rank.
func (c *Checker) AllGatherIntoTensorCoalesced(out, in []*tensor.Tensor) (joined []*tensor.Tensor, err error) {
	const op = work.AllGatherCoalesced
	if len(in) == 0 {
		return nil, c.bad(op, "requires non-empty input tensor list")
	}
	if len(out) != len(in) {
		return nil, c.bad(op, "requires input/output tensor lists to have the same length (%d and %d)",
			len(in), len(out))
	}
	if err := c.several(op, "inputs", in); err != nil {
		return nil, err
	}
	if err := c.Typed(op, "outputs", in[0].DType(), out); err != nil {
		return nil, err
	}
	for i := range in {
		if err := c.parts(op, out[i], in[i]); err != nil {
			return nil, err
		}
	}
	if err := c.Overlap(op, out, in); err != nil {
		return nil, err
	}
	joined = make([]*tensor.Tensor, c.Size*len(in))
	for i, t := range out {
		parts, err := c.Cut(op, t, nil)
		if err != nil {
			return nil, err
		}
		for r, part := range parts {
			joined[r*len(in)+i] = part
		}
	}
	return joined, nil
}

// Gather checks a gather; even is whether all inputs have one shape.
func (c *Checker) Gather(out []*tensor.Tensor, in *tensor.Tensor, root int, even bool) error {
	const op = work.Gather
	if err := c.Root(op, root); err != nil {
		return err
	}
	if err := c.Dense(op, "input", in); err != nil {
		return err
	}
	if c.Rank == root {
		if err := c.outputs(op, out, in, even); err != nil {
			return err
		}
	} else if len(out) != 0 {
		return c.bad(op, "requires empty output on non-root (rank %d, root %d)", c.Rank, root)
	}
	return c.Overlap(op, out, []*tensor.Tensor{in})
}

// Scatter checks a scatter.
func (c *Checker) Scatter(out *tensor.Tensor, in []*tensor.Tensor, root int) error {
	const op = work.Scatter
	if err := c.Root(op, root); err != nil {
		return err
	}
	if err := c.Dense(op, "output", out); err != nil {
		return err
	}
	if c.Rank == root {
		if err := c.listed(op, "input", len(in)); err != nil {
			return err
		}
		if err := c.like(op, "inputs", out, in); err != nil {
			return err
		}
	} else if len(in) != 0 {
		return c.bad(op, "requires empty input on non-root (rank %d, root %d)", c.Rank, root)
	}
	return c.Overlap(op, []*tensor.Tensor{out}, in)
}

// ReduceScatter checks a reduce_scatter.
func (c *Checker) ReduceScatter(out *tensor.Tensor, in []*tensor.Tensor) error {
	const op = work.ReduceScatter
	if err := c.Dense(op, "output", out); err != nil {
		return err
	}
	if err := c.listed(op, "input", len(in)); err != nil {
		return err
	}
	if err := c.Typed(op, "inputs", out.DType(), in); err != nil {
		return err
	}
	if !in[c.Rank].SameShape(out) {
		return c.bad(op, "input %d has shape %v, this rank's output %v", c.Rank, in[c.Rank].Shape(), out.Shape())
	}
	return c.Overlap(op, []*tensor.Tensor{out}, in)
}

// ReduceScatterTensors checks a reduce_scatter of tensors, coalesced or not.
func (c *Checker) ReduceScatterTensors(op work.OpType, out, in []*tensor.Tensor) error {
	if len(in) == 0 || len(out) != len(in) {
		return c.bad(op, "requires non-empty input/output tensor lists of the same length (%d and %d)",
			len(in), len(out))
	}
	for i := range in {
		if err := c.Dense(op, "input", in[i]); err != nil {
			return err
		}
		if err := c.Dense(op, "output", out[i]); err != nil {
			return err
		}
		if err := c.parts(op, in[i], out[i]); err != nil {
			return err
		}
		if in[i].DType() != in[0].DType() {
			return c.bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, in[0].DType(), in[i].DType())
		}
	}
	return c.Overlap(op, out, in)
}

// AllToAll checks an all_to_all.
func (c *Checker) AllToAll(out, in []*tensor.Tensor) error {
	const op = work.AllToAll
	if err := c.listed(op, "output", len(out)); err != nil {
		return err
	}
	if err := c.listed(op, "input", len(in)); err != nil {
		return err
	}
	if err := c.several(op, "inputs", in); err != nil {
		return err
	}
	if err := c.Typed(op, "outputs", in[0].DType(), out); err != nil {
		return err
	}
	if !in[c.Rank].SameShape(out[c.Rank]) {
		return c.bad(op, "input %d has shape %v, output %d %v", c.Rank, in[c.Rank].Shape(), c.Rank, out[c.Rank].Shape())
	}
	return c.Overlap(op, out, in)
}

// AllToAllSingle checks an all_to_all of one tensor. It returns how many rows of the tensors belong to each rank.
func (c *Checker) AllToAllSingle(out, in *tensor.Tensor, outSplits, inSplits []int) (recv, send []int64, err error) {
	const op = work.AllToAllSingle
	if err := c.Dense(op, "input", in); err != nil {
		return nil, nil, err
	}
	if err := c.Dense(op, "output", out); err != nil {
		return nil, nil, err
	}
	if in.DType() != out.DType() {
		return nil, nil, c.bad(op, "dtypes differ: input %v, output %v", in.DType(), out.DType())
	}
	if send, err = c.splits(op, "input", in, inSplits); err != nil {
		return nil, nil, err
	}
	if recv, err = c.splits(op, "output", out, outSplits); err != nil {
		return nil, nil, err
	}
	if n, m := send[c.Rank]*RowBytes(in), recv[c.Rank]*RowBytes(out); n != m {
		return nil, nil, c.bad(op, "rank %d sends itself %d bytes but receives %d", c.Rank, n, m)
	}
	return recv, send, c.Overlap(op, []*tensor.Tensor{out}, []*tensor.Tensor{in})
}

// AllToAllParts is AllToAllSingle, and returns each rank's part of the tensors.
func (c *Checker) AllToAllParts(out, in *tensor.Tensor, outSplits, inSplits []int) (outs, ins []*tensor.Tensor, err error) {
	recv, send, err := c.AllToAllSingle(out, in, outSplits, inSplits)
	if err == nil {
		ins, err = c.Cut(work.AllToAllSingle, in, send)
	}
	if err == nil {
		outs, err = c.Cut(work.AllToAllSingle, out, recv)
	}
	return outs, ins, err
}

// RowBytes returns the bytes of a row along dimension 0, 0 if there is none.
func RowBytes(t *tensor.Tensor) int64 { return int64(t.ByteLen() / max(t.Dim(0), 1)) }

// splits returns the sizes along dimension 0 of each rank's part of t.
func (c *Checker) splits(op work.OpType, name string, t *tensor.Tensor, splits []int) ([]int64, error) {
	if t.Dims() == 0 {
		return nil, c.bad(op, "%s has no dimension 0 to split", name)
	}
	rows := make([]int64, c.Size)
	if len(splits) == 0 {
		if t.Dim(0)%c.Size != 0 {
			return nil, c.bad(op, "Tensor's dim 0 does not divide equally across group size: %s has %d for %d ranks",
				name, t.Dim(0), c.Size)
		}
		for i := range rows {
			rows[i] = int64(t.Dim(0) / c.Size)
		}
		return rows, nil
	}
	if len(splits) != c.Size {
		return nil, c.bad(op, "Number of tensor splits not equal to group size: %s has %d for %d ranks",
			name, len(splits), c.Size)
	}
	sum := 0
	for i, s := range splits {
		if s < 0 || s > t.Dim(0) {
			return nil, c.bad(op, "split %d of %s is %d, not within dimension 0 of %d", i, name, s, t.Dim(0))
		}
		sum += s
		rows[i] = int64(s)
	}
	if sum != t.Dim(0) {
		return nil, c.bad(op, "Split sizes doesn't match total dim 0 size: %s has %d, the splits sum to %d",
			name, t.Dim(0), sum)
	}
	return rows, nil
}

// Cut returns the ranks' parts of t along dimension 0, of so many rows each. Nil means parts of one size.
func (c *Checker) Cut(op work.OpType, t *tensor.Tensor, rows []int64) ([]*tensor.Tensor, error) {
	parts, at := make([]*tensor.Tensor, c.Size), 0
	for i := range parts {
		n := t.Dim(0) / c.Size
		if rows != nil {
			n = int(rows[i])
		}
		part, err := t.Slice(0, at, at+n)
		if err != nil {
			return nil, c.bad(op, "%v", err)
		}
		parts[i], at = part, at+n
	}
	return parts, nil
}
