// Package gorgonia shares the memory of gorgonia.org/tensor's dense tensors with operations of a
// process group.
//
//	w := gt.New(gt.WithShape(3, 4), gt.Of(gt.Float32)) // gt is gorgonia.org/tensor
//	t, err := gorgonia.Tensor(w)
//	work, err := group.AllReduce(ctx, t, pg.Avg())
//	err = work.Wait(ctx) // w has the average
//
// Nothing is copied: an operation reads and writes the elements of the dense tensor. Shapes and
// strides come with it, so slices, transposed tensors and tensors in column-major order work as
// they are. All ranks need the same shape; their strides may differ.
//
// An operation owns the elements from its call until its Work has ended. Until then the program
// must not give the dense tensor back to Gorgonia's pool (ReturnTensor), and must not reshape it.
//
// For memory on a GPU, see package github.com/c10d-go/c10d/backend/cuda/gorgonia.
package gorgonia

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"unsafe"

	// Older versions of this dependency of gorgonia.org/tensor end the program on Go 1.22 and later.
	_ "go4.org/unsafe/assume-no-moving-gc"
	gt "gorgonia.org/tensor"

	"github.com/c10d-go/c10d/tensor"
)

// ErrUnsupported is matched by the errors for tensors whose memory cannot be shared.
var ErrUnsupported = errors.New("gorgonia: the tensor cannot be shared")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

// types are the element types that both packages have. Gorgonia has the narrow floats if the
// program registers them (gt.Register).
var types = map[reflect.Type]tensor.DType{
	reflect.TypeFor[bool]():          tensor.Bool,
	reflect.TypeFor[int8]():          tensor.Int8,
	reflect.TypeFor[int16]():         tensor.Int16,
	reflect.TypeFor[int32]():         tensor.Int32,
	reflect.TypeFor[int64]():         tensor.Int64,
	reflect.TypeFor[uint8]():         tensor.Uint8,
	reflect.TypeFor[uint16]():        tensor.Uint16,
	reflect.TypeFor[uint32]():        tensor.Uint32,
	reflect.TypeFor[uint64]():        tensor.Uint64,
	reflect.TypeFor[float32]():       tensor.Float32,
	reflect.TypeFor[float64]():       tensor.Float64,
	reflect.TypeFor[complex64]():     tensor.Complex64,
	reflect.TypeFor[complex128]():    tensor.Complex128,
	reflect.TypeFor[tensor.F16]():    tensor.Float16,
	reflect.TypeFor[tensor.BF16]():   tensor.BFloat16,
	reflect.TypeFor[tensor.F8E4M3](): tensor.Float8E4M3,
	reflect.TypeFor[tensor.F8E5M2](): tensor.Float8E5M2,
}

// DType returns the dtype of elements of a Gorgonia type. Its int and uint are integers of 64 or
// 32 bits, as the platform has them.
func DType(t gt.Dtype) (tensor.DType, error) {
	typ := t.Type
	switch typ {
	case reflect.TypeFor[int]():
		typ = reflect.TypeFor[int64]()
		if unsafe.Sizeof(int(0)) == 4 {
			typ = reflect.TypeFor[int32]()
		}
	case reflect.TypeFor[uint]():
		typ = reflect.TypeFor[uint64]()
		if unsafe.Sizeof(uint(0)) == 4 {
			typ = reflect.TypeFor[uint32]()
		}
	}
	if d, ok := types[typ]; ok {
		return d, nil
	}
	if typ == nil {
		return tensor.Invalid, unsupported("it has no element type")
	}
	return tensor.Invalid, unsupported("elements are of type %v, want bool, integers, floats or complex numbers", typ)
}

// Tensor returns a tensor over the elements of d, with d's shape and strides. It is the same memory:
// d must not be returned to Gorgonia's pool while the tensor is in use. A masked tensor and memory
// that Go cannot read are refused with ErrUnsupported.
func Tensor(d *gt.Dense) (*tensor.Tensor, error) {
	switch {
	case d == nil:
		return nil, unsupported("it is nil")
	case !d.IsNativelyAccessible():
		return nil, unsupported("Go cannot read its memory: for memory on a GPU, use backend/cuda/gorgonia")
	case len(d.Mask()) > 0 && d.IsMasked():
		return nil, unsupported("it is masked: exchange its elements and its mask separately")
	}
	dtype, err := DType(d.Dtype())
	if err != nil {
		return nil, err
	}
	shape, strides := slices.Clone([]int(d.Shape())), slices.Clone(d.Strides())
	size := int(d.MemSize())
	if size == 0 {
		return tensor.FromBytes(dtype, nil, shape...)
	}
	flat, err := tensor.FromBytes(dtype, unsafe.Slice((*byte)(pointer(d)), size), size/dtype.Size())
	if err != nil {
		return nil, fmt.Errorf("gorgonia: %w", err)
	}
	if len(strides) != len(shape) {
		// Scalars have no strides, and some vectors with a second dimension have one stride.
		if d.RequiresIterator() {
			return nil, unsupported("shape %v has strides %v", d.Shape(), d.Strides())
		}
		strides = gt.Shape(shape).CalcStrides()
	}
	t, err := flat.AsStrided(shape, strides, 0)
	if err != nil {
		return nil, fmt.Errorf("gorgonia: %w", err)
	}
	return t, nil
}

// Tensors returns a tensor for each of ds, for operations of several tensors.
func Tensors(ds ...*gt.Dense) ([]*tensor.Tensor, error) {
	ts := make([]*tensor.Tensor, len(ds))
	for i, d := range ds {
		t, err := Tensor(d)
		if err != nil {
			return nil, fmt.Errorf("tensor %d: %w", i, err)
		}
		ts[i] = t
	}
	return ts, nil
}

// Dense returns a dense tensor of Gorgonia over the elements of t, which must be contiguous, in CPU
// memory and not empty. It is the same memory. Narrow floats get their types of package tensor.
func Dense(t *tensor.Tensor) (*gt.Dense, error) {
	switch {
	case t == nil:
		return nil, unsupported("it is nil")
	case t.Layout() != tensor.Strided || t.Device().Type != tensor.CPU:
		return nil, unsupported("it is %v on %v, want a strided tensor on the CPU", t.Layout(), t.Device())
	case !t.IsContiguous():
		return nil, unsupported("it is not contiguous: shape %v has strides %v; call Contiguous for a copy", t.Shape(), t.Strides())
	case t.Len() == 0:
		return nil, unsupported("it has no elements")
	}
	for typ, dtype := range types {
		if dtype == t.DType() {
			b := t.Bytes()
			elements := reflect.NewAt(reflect.ArrayOf(t.Len(), typ), unsafe.Pointer(unsafe.SliceData(b))).Elem()
			return gt.New(gt.Of(gt.Dtype{Type: typ}), gt.WithShape(t.Shape()...),
				gt.WithBacking(elements.Slice(0, t.Len()).Interface())), nil
		}
	}
	return nil, unsupported("Gorgonia has no type for %v", t.DType())
}

// pointer returns the address of d's first element. Gorgonia gives it as a number; the elements stay
// where they are, because d refers to them.
func pointer(d *gt.Dense) unsafe.Pointer {
	p := d.Uintptr()
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}
