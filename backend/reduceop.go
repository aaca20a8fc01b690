package backend

import (
	"fmt"
	"unsafe"

	"github.com/c10d-go/c10d/internal/reduce"
	"github.com/c10d-go/c10d/tensor"
)

// ReduceKind is a kind of reduction, such as that of Sum(): compare it with Sum().Kind(). The numbers are c10d's.
type ReduceKind uint8

// String returns c10d's name of the kind, in lower case.
func (k ReduceKind) String() string { return reduce.Kind(k).String() }

// ReduceOp is how elements are combined. The zero value is Sum(). The operators are functions, so
// that no program can change them for the others.
//
// Integers wrap. Operators of bools are logical: Sum, Max and BOr are "or", Product, Min and
// BAnd are "and", and BXor is "exclusive or". PyTorch's gloo adds bools as bytes. Min
// and Max of floats keep the local operand where a comparison with NaN decides
// nothing, as gloo does. A pair of operator and dtype without a meaning is
// refused at the call.
type ReduceOp struct {
	kind   reduce.Kind
	factor float64
	custom *customOp
}

type customOp struct {
	name   string
	reduce func(d tensor.DType, dst, src []byte)
	dtype  tensor.DType // Invalid: any
}

// Sum adds.
func Sum() ReduceOp { return ReduceOp{kind: reduce.Sum} }

// Avg adds and divides the sum by the group's size. It is for floats and complex numbers only.
func Avg() ReduceOp { return ReduceOp{kind: reduce.Avg} }

// Product multiplies.
func Product() ReduceOp { return ReduceOp{kind: reduce.Product} }

// Min takes the smallest element.
func Min() ReduceOp { return ReduceOp{kind: reduce.Min} }

// Max takes the largest element.
func Max() ReduceOp { return ReduceOp{kind: reduce.Max} }

// BAnd is the bitwise and.
func BAnd() ReduceOp { return ReduceOp{kind: reduce.BAnd} }

// BOr is the bitwise or.
func BOr() ReduceOp { return ReduceOp{kind: reduce.BOr} }

// BXor is the bitwise exclusive or.
func BXor() ReduceOp { return ReduceOp{kind: reduce.BXor} }

// PreMulSum multiplies each rank's input by factor before the sum. The factor
// may differ between ranks.
func PreMulSum(factor float64) ReduceOp {
	return ReduceOp{kind: reduce.PreMulSum, factor: factor}
}

// Custom combines with a function of the user: dst = f(dst, src) for all the
// elements of two equally long byte slices of dtype d. It must be associative
// and commutative, for the order of the ranks is the algorithm's, and every
// rank must pass the same one.
func Custom(name string, f func(d tensor.DType, dst, src []byte)) ReduceOp {
	return ReduceOp{kind: reduce.Custom, custom: &customOp{name: name, reduce: f}}
}

// CustomOf is Custom for a function of two elements.
func CustomOf[T tensor.Element](name string, f func(a, b T) T) ReduceOp {
	if f == nil {
		return Custom(name, nil)
	}
	size := int(unsafe.Sizeof(*new(T)))
	combine := func(_ tensor.DType, dst, src []byte) {
		n := len(dst) / size
		if n == 0 {
			return
		}
		// Bytes from the wire may lie anywhere; elements are copied out and in.
		for i := 0; i < n; i++ {
			var a, b T
			x, y := dst[i*size:(i+1)*size], src[i*size:(i+1)*size]
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&a)), size), x)
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&b)), size), y)
			a = f(a, b)
			copy(x, unsafe.Slice((*byte)(unsafe.Pointer(&a)), size))
		}
	}
	return ReduceOp{kind: reduce.Custom, custom: &customOp{name: name, reduce: combine, dtype: tensor.DTypeOf[T]()}}
}

// ParseReduceOp returns the operator with a c10d name: "sum", "avg",
// "product", "min", "max", "band", "bor" or "bxor".
func ParseReduceOp(name string) (ReduceOp, error) {
	k, err := reduce.ParseKind(name)
	if err != nil {
		return ReduceOp{}, err
	}
	if k == reduce.PreMulSum || k == reduce.Custom {
		return ReduceOp{}, fmt.Errorf("backend: %q needs an argument; use PreMulSum or Custom", name)
	}
	return ReduceOp{kind: k}, nil
}

// Kind returns the kind of reduction.
func (o ReduceOp) Kind() ReduceKind { return ReduceKind(o.kind) }

// Factor returns the factor of a PreMulSum, 0 for others.
func (o ReduceOp) Factor() float64 { return o.factor }

func (o ReduceOp) String() string {
	switch {
	case o.custom != nil:
		return "custom(" + o.custom.name + ")"
	case o.kind == reduce.PreMulSum:
		return fmt.Sprintf("premul_sum(%v)", o.factor)
	}
	return o.kind.String()
}

// Reduction is an operator made ready for one dtype. The functions work on
// packed elements in the host's byte order; nil ones do nothing.
type Reduction struct {
	Before  func(b []byte)        // applied to a rank's input
	Combine func(dst, src []byte) // dst, the local operand, = dst op src
	After   func(b []byte)        // applied once to the result

	// Join combines any number of operands in one pass, as Combine does for one after the other:
	// dst = (operands[0] op operands[1]) op ... All have one length. dst may be one of the
	// operands. It is nil where one pass is no faster.
	Join func(dst []byte, operands [][]byte)

	// Grain is the size in bytes of the numbers that Combine works on, at whose
	// borders a buffer may be cut. It is the dtype's, but half of that for
	// complex dtypes, whose parts are added one by one: PyTorch hands complex
	// tensors to Gloo as real ones, and cuts them as such. A custom operator
	// gets whole elements.
	Grain int
}

// partOf returns the dtype of a complex dtype's real and imaginary parts, Invalid for others.
func partOf(d tensor.DType) tensor.DType {
	switch d {
	case tensor.Complex64:
		return tensor.Float32
	case tensor.Complex128:
		return tensor.Float64
	}
	return tensor.Invalid
}

// Reduction returns the functions of o for dtype d in a group of size ranks,
// or an error if they mean nothing together.
func (o ReduceOp) Reduction(d tensor.DType, size int) (Reduction, error) {
	if c := o.custom; c != nil {
		if c.reduce == nil {
			return Reduction{}, fmt.Errorf("backend: custom operator %q has no function", c.name)
		}
		if c.dtype != tensor.Invalid && c.dtype != d {
			return Reduction{}, fmt.Errorf("backend: custom operator %q is for %v, not %v", c.name, c.dtype, d)
		}
		return Reduction{Combine: func(dst, src []byte) { c.reduce(d, dst, src) }, Grain: d.Size()}, nil
	}
	combine, err := reduce.Kernel(o.kind, d)
	if err != nil {
		return Reduction{}, err
	}
	part := d
	if half := partOf(d); half != tensor.Invalid {
		part = half
		if combine, err = reduce.Kernel(o.kind, part); err != nil {
			return Reduction{}, err
		}
	}
	r := Reduction{Combine: combine, Join: reduce.Join(o.kind, part), Grain: part.Size()}
	switch o.kind {
	case reduce.Avg:
		r.After, err = reduce.Divide(d, size)
	case reduce.PreMulSum:
		r.Before, err = reduce.PreMul(d, o.factor)
	}
	return r, err
}
