package backend

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// CheckMemory refuses a call whose tensors share memory where they must not. Every backend calls it before it
// sends a byte, when it has checked shapes and dtypes. Out are the tensors that the call writes, in those that it
// only reads. Lists of lists are joined. An entry may be nil.
//
//   - Inputs may share memory with each other, and so may two elements of one input.
//   - Outputs may not share memory: not two of them, and not two elements of one.
//   - An input and an output may be the same elements in the same order where the operation would copy this rank's
//     own part onto itself. They may not share memory otherwise. These are the calls in place of c10d and NCCL.
//
// The calls in place, and the same elements in each, for rank r:
//
//   - broadcast, reduce, all_reduce, coalesced: each tensor is input and output
//   - all_gather: the input and output r
//   - all_gather_into_tensor: the input and part r of the output
//   - all_gather_coalesced: input i and output i of list r
//   - all_gather_into_tensor, coalesced: input i and part r of output i
//   - gather, on the root: the input and output r
//   - scatter, on the root: the output and input r
//   - reduce_scatter: the output and input r
//   - reduce_scatter_tensor: the output and part r of the input
//   - reduce_scatter_tensor, coalesced: output i and part r of input i
//   - all_to_all, all_to_all_single: none
//   - a batch of sends and receives: none
//
// Views of one array that have no element in common, such as its columns, share no memory: see
// tensor.Tensor.Overlaps. Two calls that use the same memory at a time are up to the caller.
func CheckMemory(op work.OpType, rank int, out, in []*tensor.Tensor) error {
	c := memoryCheck{op, rank, out, in}
	for i, t := range out {
		if t != nil && t.HasOverlap() {
			return fmt.Errorf("elements of %s (%v with strides %v) overlap in memory", c.name(use{i, true}), t, t.Strides())
		}
	}
	switch {
	case len(out) == 0 || len(out) == 1 && len(in) == 0:
		return nil
	case len(out) == 1 && len(in) == 1:
		return c.pair(use{0, true}, use{0, false})
	}
	var room [16]extent
	all := appendExtents(appendExtents(room[:0], out, true), in, false)
	slices.SortFunc(all, func(a, b extent) int { return cmp.Compare(a.from, b.from) })
	for i, a := range all {
		for _, b := range all[i+1:] {
			if b.from >= a.to {
				break
			}
			if err := c.pair(a.use, b.use); err != nil {
				return err
			}
		}
	}
	return nil
}

// memoryCheck is one call of CheckMemory.
type memoryCheck struct {
	op      work.OpType
	rank    int
	out, in []*tensor.Tensor
}

// use is the place of a tensor in the lists.
type use struct {
	i   int
	out bool
}

// extent is the range of addresses of a tensor.
type extent struct {
	use
	from, to uint64
}

func appendExtents(all []extent, ts []*tensor.Tensor, out bool) []extent {
	for i, t := range ts {
		if t != nil {
			from, to := t.Range()
			all = append(all, extent{use{i, out}, from, to})
		}
	}
	return all
}

// at returns a tensor.
func (c *memoryCheck) at(u use) *tensor.Tensor {
	if u.out {
		return c.out[u.i]
	}
	return c.in[u.i]
}

// pair checks two tensors of the call.
func (c *memoryCheck) pair(a, b use) error {
	s, t := c.at(a), c.at(b)
	if !a.out && !b.out || s == nil || t == nil || !s.Overlaps(t) {
		return nil
	}
	if a.out && (!b.out || b.i < a.i) {
		a, b = b, a // an input before an output
	}
	if a.out || c.inPlace() == neither {
		return fmt.Errorf("%s and %s overlap in memory: pass tensors that do not", c.name(a), c.name(b))
	}
	if c.own(b.i, a.i) {
		return nil
	}
	return fmt.Errorf("%s and %s overlap in memory, and are not the same elements of this rank's own part: %s", c.name(a), c.name(b), c.form())
}

// The kinds of operations: which of an input and an output is a rank's own part of the other.
const (
	neither = iota
	input
	output
)

func (c *memoryCheck) inPlace() int {
	switch c.op {
	case work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced, work.Gather:
		return input
	case work.Scatter, work.ReduceScatter, work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced:
		return output
	}
	return neither
}

// sides returns the tensors that may be a rank's own part, and those that have such parts.
func (c *memoryCheck) sides() (part, whole []*tensor.Tensor) {
	if c.inPlace() == input {
		return c.in, c.out
	}
	return c.out, c.in
}

// own reports whether output o and input i are a call in place.
func (c *memoryCheck) own(o, i int) bool {
	part, whole := c.sides()
	p, w := i, o
	if c.inPlace() == output {
		p, w = o, i
	}
	if len(part) < len(whole) { // a list has this rank's part as a tensor
		return w == c.rank*len(part)+p && sameElements(part[p], whole[w])
	}
	return p == w && isPart(part[p], whole[w], c.rank) && !whole[w].HasOverlap()
}

// isPart reports whether part is part r of whole along dimension 0, which may be a dimension of the ranks.
func isPart(part, whole *tensor.Tensor, r int) bool {
	if part.IsContiguous() && whole.IsContiguous() {
		from, _ := whole.Range()
		at, _ := part.Range()
		return part.DType() == whole.DType() && at == from+uint64(r)*uint64(part.ByteLen())
	}
	var own *tensor.Tensor
	var err error
	switch {
	case whole.Dims() == part.Dims()+1:
		own, err = whole.Select(0, r)
	case part.Dims() > 0:
		own, err = whole.Slice(0, r*part.Dim(0), (r+1)*part.Dim(0))
	default:
		own = whole
	}
	return err == nil && sameElements(part, own)
}

// sameElements reports whether s and t have the same elements in the same order.
func sameElements(s, t *tensor.Tensor) bool {
	from, to := s.Range()
	at, end := t.Range()
	switch {
	case from != at || to != end || s.DType() != t.DType():
		return false
	case s.IsContiguous() && t.IsContiguous():
		return true
	case !s.SameShape(t):
		return false
	}
	a, b := s.Strides(), t.Strides()
	for i := range a {
		if s.Dim(i) == 1 {
			a[i], b[i] = 0, 0
		}
	}
	return slices.Equal(a, b)
}

// name is how a message calls a tensor.
func (c *memoryCheck) name(u use) string {
	list, name := c.in, "input"
	if u.out {
		list, name = c.out, "output"
	}
	switch c.op {
	case work.Broadcast, work.AllReduce, work.AllReduceCoalesced, work.Reduce, work.Recv, work.RecvAnySource:
		name = "tensor"
	case work.Coalesced: // a batch of messages
		if u.out {
			return fmt.Sprintf("the receive of operation %d", u.i)
		}
		return fmt.Sprintf("the send of operation %d", u.i)
	case work.AllGatherCoalesced:
		if k := len(c.in); u.out && len(c.out) > k {
			return fmt.Sprintf("output %d of list %d", u.i%k, u.i/k)
		}
	}
	if len(list) == 1 {
		return "the " + name
	}
	return fmt.Sprintf("%s %d", name, u.i)
}

// form says what a call in place is.
func (c *memoryCheck) form() string {
	short, long := "input", "output"
	if c.inPlace() == output {
		short, long = long, short
	}
	switch part, whole := c.sides(); {
	case len(part) == 1 && len(whole) == 1:
		return fmt.Sprintf("in place, the %s is part %d of the %s", short, c.rank, long)
	case len(part) == len(whole):
		return fmt.Sprintf("in place, %s i is part %d of %s i", short, c.rank, long)
	case len(part) == 1:
		return fmt.Sprintf("in place, the %s is %s %d", short, long, c.rank)
	}
	return fmt.Sprintf("in place, %s i is %s i of list %d", short, long, c.rank)
}
