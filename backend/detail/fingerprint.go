package detail

import (
	"fmt"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Fingerprint describes a rank's collective before it runs.
type Fingerprint struct {
	Op work.OpType

	// Seq is how many operations the rank has issued before. Some PyTorch's ranks do not send it.
	Seq uint64

	// Tensors are those whose types and shapes must agree. It is empty for operations where ranks
	// may have different ones.
	Tensors []Tensor

	// Root and Operator (a backend.ReduceKind) are -1 where the operation has none. PyTorch's
	// ranks do not send them.
	Root, Operator int
}

// Tensor describes a tensor in a fingerprint: PyTorch's numbers of its dtype and device type, and
// its shape.
type Tensor struct {
	DType, Device int64
	Shape         []int64
}

// of describes tensors. With asReal, complex numbers are pairs of real ones, as PyTorch's front
// end passes them in some operations.
func of(ts []*tensor.Tensor, asReal bool) []Tensor {
	var all []Tensor
	for _, t := range ts {
		d, pair := t.DType(), false
		if asReal && d.IsComplex() {
			pair = true
			if d = tensor.Float32; t.DType() == tensor.Complex128 {
				d = tensor.Float64
			}
		}
		x := Tensor{DType: int64(d.TorchCode()), Device: int64(t.Device().Type)}
		for i := range t.Dims() {
			x.Shape = append(x.Shape, int64(t.Dim(i)))
		}
		if pair {
			x.Shape = append(x.Shape, 2)
		}
		all = append(all, x)
	}
	return all
}

// form is the format of a group's fingerprints.
type form struct {
	numbered bool // with the sequence number
	own      bool // with root and operator: ranks of this library alone
}

// formIn returns the form of a group's control group in st. PyTorch up to 2.0 sends no sequence number.
func formIn(st store.Store) form { return form{numbered: !store.IsTorch1(st)} }

// head is how many numbers come before those of the tensors.
func (m form) head() int {
	if m.numbered {
		return 3
	}
	return 2
}

// tail is how many come after them.
func (m form) tail() int {
	if m.own {
		return 2
	}
	return 0
}

// words is the fingerprint as PyTorch sends it: the operation, its number, the number of tensors,
// their dtypes, their devices, and then for each tensor the number of dimensions and the
// dimensions.
func (f Fingerprint) words(m form) []int64 {
	w := []int64{int64(f.Op)}
	if m.numbered {
		w = append(w, int64(f.Seq))
	}
	w = append(w, int64(len(f.Tensors)))
	for _, t := range f.Tensors {
		w = append(w, t.DType)
	}
	for _, t := range f.Tensors {
		w = append(w, t.Device)
	}
	for _, t := range f.Tensors {
		w = append(w, int64(len(t.Shape)))
		w = append(w, t.Shape...)
	}
	if m.own {
		w = append(w, int64(f.Root), int64(f.Operator))
	}
	return w
}

// parse is the inverse of words, for another rank's fingerprint.
func parse(w []int64, m form) (Fingerprint, error) {
	whole := w
	bad := func(format string, args ...any) (Fingerprint, error) {
		return Fingerprint{}, fmt.Errorf("detail: %v is no fingerprint: %s", whole[:min(len(whole), 32)], fmt.Sprintf(format, args...))
	}
	head, tail := m.head(), m.tail()
	if len(w) < head+tail {
		return bad("%d numbers, want at least %d", len(w), head+tail)
	}
	if w[0] < 0 || w[0] > 255 {
		return bad("operation %d", w[0])
	}
	f := Fingerprint{Op: work.OpType(w[0]), Root: -1, Operator: -1}
	if m.numbered {
		f.Seq = uint64(w[1])
	}
	if m.own {
		last := w[len(w)-2:]
		if last[0] < -1 || last[0] > 1<<30 || last[1] < -1 || last[1] > 255 {
			return bad("root %d, operator %d", last[0], last[1])
		}
		f.Root, f.Operator = int(last[0]), int(last[1])
		w = w[:len(w)-2]
	}
	n := w[head-1]
	w = w[head:]
	if n < 0 || n > int64(len(w)/3) {
		return bad("%d tensors in %d numbers", n, len(w))
	}
	f.Tensors = make([]Tensor, n)
	for i := range f.Tensors {
		f.Tensors[i].DType, f.Tensors[i].Device = w[i], w[int(n)+i]
	}
	w = w[2*n:]
	for i := range f.Tensors {
		if len(w) == 0 || w[0] < 0 || w[0] > int64(len(w)-1) {
			return bad("the shape of tensor %d is cut off", i)
		}
		f.Tensors[i].Shape = slices.Clone(w[1 : 1+w[0]])
		w = w[1+w[0]:]
	}
	if len(w) > 0 {
		return bad("%d numbers too many", len(w))
	}
	if n == 0 {
		f.Tensors = nil
	}
	return f, nil
}

// String is the operation as an error shows it, without its number:
// "all_reduce of float32 [2 3] on cpu", "reduce with max of int32 [7] on cpu, root 2".
func (f Fingerprint) String() string {
	var b strings.Builder
	b.WriteString(f.Op.String())
	if f.Operator >= 0 {
		fmt.Fprintf(&b, " with %v", backend.ReduceKind(f.Operator))
	}
	for i, t := range f.Tensors {
		sep := " of "
		if i > 0 {
			sep = ", "
		}
		fmt.Fprintf(&b, "%s%s %v on %s", sep, dtypeName(t.DType), t.Shape, deviceName(t.Device))
	}
	if f.Root >= 0 {
		fmt.Fprintf(&b, ", root %d", f.Root)
	}
	return b.String()
}

func dtypeName(code int64) string {
	for _, d := range tensor.DTypes() {
		if int64(d.TorchCode()) == code {
			return d.String()
		}
	}
	return fmt.Sprintf("dtype %d of PyTorch", code)
}

func deviceName(code int64) string {
	if code < 0 || code > 255 {
		return fmt.Sprintf("device type %d of PyTorch", code)
	}
	return tensor.DeviceType(code).String()
}

// ofLength describes the calls whose fingerprint can have n numbers. A PyTorch rank sends no more
// when lengths differ.
func ofLength(n int64, m form) string {
	head := int64(m.head() + m.tail())
	switch {
	case n == head:
		return "an operation whose tensors are not compared (barrier, all_to_all, coalesced ones)"
	case n >= head+3:
		s := "s"
		if n == head+4 {
			s = ""
		}
		return fmt.Sprintf("an operation on a tensor of %d dimension%s, or on several of fewer", n-head-3, s)
	}
	return fmt.Sprintf("an operation with a fingerprint of %d numbers", n)
}
