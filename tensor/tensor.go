package tensor

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"unsafe"
)

// Tensor is an n-dimensional array over memory that it does not own, or a sparse one made of two
// such arrays. Its dtype, shape, strides and memory never change, only its elements. The
// exception is SetSparse, which replaces the entries of a sparse tensor.
//
// Several goroutines may read a Tensor. Writing needs exclusive access to the elements, as with a
// slice. An operation of a process group owns the elements from its call until its Work has
// ended.
//
// The zero value is not usable: call Of, New, FromBytes, OnDevice or Sparse.
type Tensor struct {
	dtype   DType
	layout  Layout
	device  Device
	shape   []int
	strides []int  // in elements; may be 0 or negative
	data    []byte // strided CPU: the whole storage
	mem     Memory // strided, not CPU: the whole storage
	offset  int    // first element, in elements from the storage's start
	count   int    // elements
	contig  bool
	sparse  *coo
}

// ErrInvalid is matched by the error of every call whose arguments were wrong.
var ErrInvalid = errors.New("tensor: invalid argument")

// Error says which argument of a call was wrong, and why.
type Error struct {
	Op   string // the call: "Of", "Slice", ...
	What string // what was wrong, with the offending values
}

func (e *Error) Error() string { return "tensor: " + e.Op + ": " + e.What }

// Unwrap makes errors.Is(err, ErrInvalid) hold.
func (e *Error) Unwrap() error { return ErrInvalid }

// invalid formats an Error. Slices that a caller passed in go into args as
// clones: an argument of fmt escapes, and every call's shape would be allocated.
func invalid(op, format string, args ...any) error {
	return &Error{Op: op, What: fmt.Sprintf(format, args...)}
}

// Of returns a contiguous tensor of the given shape over data, without a copy. The shape's count
// must equal len(data). Of(data), without a shape, has one dimension. An empty shape that is not
// nil makes a scalar, so that Of(data, t.Shape()...) always has t's shape.
func Of[T Element](data []T, shape ...int) (*Tensor, error) {
	var zero T
	if shape == nil {
		shape = []int{len(data)}
	}
	n, err := countOf("Of", shape)
	if err != nil {
		return nil, err
	}
	if n != len(data) {
		return nil, invalid("Of", "shape %v has %d elements, the slice has %d", slices.Clone(shape), n, len(data))
	}
	var b []byte
	if len(data) > 0 {
		b = unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(zero)))
	}
	return contiguous(DTypeOf[T](), Device{}, b, nil, shape, n), nil
}

// New returns a contiguous CPU tensor of zeros.
func New(dtype DType, shape ...int) (*Tensor, error) {
	n, err := checkedCount("New", dtype, shape)
	if err != nil {
		return nil, err
	}
	return contiguous(dtype, Device{}, alloc(n*dtype.Size()), nil, shape, n), nil
}

// alloc returns n zero bytes aligned for every element type.
func alloc(n int) []byte {
	if n == 0 {
		return nil
	}
	words := make([]complex128, (n+15)/16)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
}

// cast returns b as elements; b is aligned, as every tensor's storage is.
func cast[T Element](b []byte) []T {
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(zero)))
}

// FromBytes returns a contiguous tensor over b, without a copy. Elements are in the host's byte
// order. The length of b must be the shape's count times the element's size. b must be aligned
// like a slice of that element type. Bytes of a Bool tensor must be 0 or 1, because Data returns
// them as Go bools.
func FromBytes(dtype DType, b []byte, shape ...int) (*Tensor, error) {
	n, err := checkedCount("FromBytes", dtype, shape)
	if err != nil {
		return nil, err
	}
	if n*dtype.Size() != len(b) {
		return nil, invalid("FromBytes", "%v of shape %v takes %d bytes, got %d", dtype, slices.Clone(shape), n*dtype.Size(), len(b))
	}
	if align := alignOf(dtype); len(b) > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(b)))%align != 0 {
		return nil, invalid("FromBytes", "bytes are not aligned to %d as %v needs", align, dtype)
	}
	return contiguous(dtype, Device{}, b, nil, shape, n), nil
}

func alignOf(d DType) uintptr {
	if d.IsComplex() {
		return uintptr(d.Size() / 2)
	}
	return uintptr(d.Size())
}

// OnDevice returns a contiguous tensor over device memory.
func OnDevice(dtype DType, mem Memory, shape ...int) (*Tensor, error) {
	n, err := checkedCount("OnDevice", dtype, shape)
	if err != nil {
		return nil, err
	}
	if mem == nil {
		return nil, invalid("OnDevice", "nil memory")
	}
	if n*dtype.Size() != mem.Len() {
		return nil, invalid("OnDevice", "%v of shape %v takes %d bytes, the memory has %d", dtype, slices.Clone(shape), n*dtype.Size(), mem.Len())
	}
	return contiguous(dtype, mem.Device(), nil, mem, shape, n), nil
}

func contiguous(dtype DType, dev Device, b []byte, mem Memory, shape []int, n int) *Tensor {
	// One array for shape and strides: a tensor costs two allocations.
	dims := make([]int, 2*len(shape))
	t := &Tensor{
		dtype: dtype, device: dev, data: b, mem: mem, count: n, contig: true,
		shape: dims[:len(shape):len(shape)], strides: dims[len(shape):],
	}
	copy(t.shape, shape)
	fillStrides(t.strides, shape)
	return t
}

func fillStrides(strides, shape []int) {
	step := 1
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = step
		step *= max(shape[i], 1)
	}
}

func checkedCount(op string, dtype DType, shape []int) (int, error) {
	if !dtype.Valid() {
		return 0, invalid(op, "invalid dtype %v", dtype)
	}
	n, err := countOf(op, shape)
	if err == nil && n > math.MaxInt/16 {
		err = invalid(op, "shape %v is too large", slices.Clone(shape))
	}
	return n, err
}

func countOf(op string, shape []int) (int, error) {
	n, empty := 1, false
	for i, d := range shape {
		if d < 0 {
			return 0, invalid(op, "dimension %d of shape %v is negative", i, slices.Clone(shape))
		}
		if d == 0 {
			empty = true
			continue
		}
		if n > math.MaxInt/d {
			return 0, invalid(op, "shape %v is too large", slices.Clone(shape))
		}
		n *= d
	}
	if empty {
		return 0, nil
	}
	return n, nil
}

// DType returns the element type.
func (t *Tensor) DType() DType { return t.dtype }

// Device returns where the elements live.
func (t *Tensor) Device() Device { return t.device }

// Layout returns how the elements are stored.
func (t *Tensor) Layout() Layout { return t.layout }

// Dims returns the number of dimensions; a scalar has none.
func (t *Tensor) Dims() int { return len(t.shape) }

// Dim returns the size of dimension i.
func (t *Tensor) Dim(i int) int { return t.shape[i] }

// Shape returns a copy of the shape.
func (t *Tensor) Shape() []int { return slices.Clone(t.shape) }

// SameShape reports whether t and o have equal shapes.
func (t *Tensor) SameShape(o *Tensor) bool { return slices.Equal(t.shape, o.shape) }

// Strides returns a copy of the strides, in elements; nil for a sparse tensor.
func (t *Tensor) Strides() []int { return slices.Clone(t.strides) }

// Len returns the number of elements, for a sparse tensor those of its dense shape.
func (t *Tensor) Len() int { return t.count }

// ByteLen returns the bytes that the elements take when packed.
func (t *Tensor) ByteLen() int { return t.count * t.dtype.Size() }

// Offset returns the first element's distance from the storage's start, in elements.
func (t *Tensor) Offset() int { return t.offset }

// Memory returns the storage of a tensor on a device, nil for a CPU tensor.
func (t *Tensor) Memory() Memory { return t.mem }

// IsContiguous reports whether the elements lie one after the other in row-major order.
func (t *Tensor) IsContiguous() bool { return t.contig && t.layout == Strided }

// String describes the tensor without its elements: "float32[3 5]", followed by device and layout
// unless they are the CPU and strided.
func (t *Tensor) String() string {
	s := fmt.Sprintf("%v%v", t.dtype, t.shape)
	if t.device.Type != CPU {
		s += "@" + t.device.String()
	}
	if t.layout != Strided {
		s += " " + t.layout.String()
	}
	return s
}

// Bytes returns the elements of a contiguous CPU tensor as bytes, without a copy, in the host's
// byte order. For other tensors it returns nil; use Pack. Bytes written into a Bool tensor must
// be 0 or 1 (see FromBytes).
func (t *Tensor) Bytes() []byte {
	if !t.IsContiguous() || t.device.Type != CPU {
		return nil
	}
	es := t.dtype.Size()
	return t.data[t.offset*es : (t.offset+t.count)*es : (t.offset+t.count)*es]
}

// Data returns the elements of a contiguous CPU tensor, without a copy.
func Data[T Element](t *Tensor) ([]T, error) {
	if want := DTypeOf[T](); want != t.dtype {
		return nil, invalid("Data", "the tensor holds %v, not %v", t.dtype, want)
	}
	if !t.IsContiguous() || t.device.Type != CPU {
		return nil, invalid("Data", "%v is not contiguous in CPU memory", t)
	}
	if t.count == 0 {
		return []T{}, nil
	}
	return cast[T](t.Bytes()), nil
}

// view returns a tensor over t's storage; the caller has checked the range.
func (t *Tensor) view(shape, strides []int, offset int) *Tensor {
	n := 1
	for _, d := range shape {
		n *= d
	}
	v := &Tensor{
		dtype: t.dtype, device: t.device, data: t.data, mem: t.mem,
		shape: shape, strides: strides, offset: offset, count: n,
	}
	v.contig = n == 0 || isDense(shape, strides)
	return v
}

func isDense(shape, strides []int) bool {
	step := 1
	for i := len(shape) - 1; i >= 0; i-- {
		if shape[i] != 1 && strides[i] != step {
			return false
		}
		step *= shape[i]
	}
	return true
}

func (t *Tensor) needStrided(op string) error {
	if t.layout != Strided {
		return invalid(op, "%v is not strided", t)
	}
	return nil
}

func (t *Tensor) needDim(op string, dim int) error {
	if err := t.needStrided(op); err != nil {
		return err
	}
	if dim < 0 || dim >= len(t.shape) {
		return invalid(op, "no dimension %d in %v", dim, t)
	}
	return nil
}

// Slice returns a view of elements [from, to) of dimension dim.
func (t *Tensor) Slice(dim, from, to int) (*Tensor, error) {
	if err := t.needDim("Slice", dim); err != nil {
		return nil, err
	}
	if from < 0 || to < from || to > t.shape[dim] {
		return nil, invalid("Slice", "range [%d, %d) is not within dimension %d of %v", from, to, dim, t)
	}
	shape := slices.Clone(t.shape)
	shape[dim] = to - from
	return t.view(shape, t.strides, t.clampOffset(shape, t.offset+from*t.strides[dim])), nil
}

// clampOffset keeps the offset of an empty view within the storage.
func (t *Tensor) clampOffset(shape []int, offset int) int {
	if slices.Contains(shape, 0) {
		return t.offset
	}
	return offset
}

// Select returns a view of element index of dimension dim, without that dimension.
func (t *Tensor) Select(dim, index int) (*Tensor, error) {
	if err := t.needDim("Select", dim); err != nil {
		return nil, err
	}
	if index < 0 || index >= t.shape[dim] {
		return nil, invalid("Select", "no element %d in dimension %d of %v", index, dim, t)
	}
	shape := slices.Delete(slices.Clone(t.shape), dim, dim+1)
	strides := slices.Delete(slices.Clone(t.strides), dim, dim+1)
	return t.view(shape, strides, t.clampOffset(shape, t.offset+index*t.strides[dim])), nil
}

// Transpose returns a view with dimensions a and b exchanged.
func (t *Tensor) Transpose(a, b int) (*Tensor, error) {
	if err := t.needDim("Transpose", a); err != nil {
		return nil, err
	}
	if err := t.needDim("Transpose", b); err != nil {
		return nil, err
	}
	shape, strides := slices.Clone(t.shape), slices.Clone(t.strides)
	shape[a], shape[b] = shape[b], shape[a]
	strides[a], strides[b] = strides[b], strides[a]
	return t.view(shape, strides, t.offset), nil
}

// Reshape returns a view of a contiguous tensor with another shape of the same count. One
// dimension may be -1; it is computed from the rest.
func (t *Tensor) Reshape(shape ...int) (*Tensor, error) {
	if err := t.needStrided("Reshape"); err != nil {
		return nil, err
	}
	if !t.contig {
		return nil, invalid("Reshape", "%v with strides %v is not contiguous", t, t.strides)
	}
	want := slices.Clone(shape)
	if hole := slices.Index(want, -1); hole >= 0 {
		want[hole] = 1
		n, err := countOf("Reshape", want)
		if err != nil {
			return nil, err
		}
		if n == 0 || t.count%n != 0 {
			return nil, invalid("Reshape", "cannot work out -1 in %v for the %d elements of %v", slices.Clone(shape), t.count, t)
		}
		want[hole] = t.count / n
	}
	n, err := countOf("Reshape", want)
	if err != nil {
		return nil, err
	}
	if n != t.count {
		return nil, invalid("Reshape", "%v has %d elements, shape %v has %d", t, t.count, slices.Clone(shape), n)
	}
	strides := make([]int, len(want))
	fillStrides(strides, want)
	return t.view(want, strides, t.offset), nil
}

// AsStrided returns a view with any shape and strides over t's storage, the offset counted from
// the storage's start, as PyTorch's as_strided. It is an error if an element would lie outside
// the storage. Unlike PyTorch's, strides may be negative. Elements may overlap; writes to
// overlapping elements are undefined (see HasOverlap).
func (t *Tensor) AsStrided(shape, strides []int, offset int) (*Tensor, error) {
	const op = "AsStrided"
	if err := t.needStrided(op); err != nil {
		return nil, err
	}
	if len(shape) != len(strides) {
		return nil, invalid(op, "%d dimensions but %d strides", len(shape), len(strides))
	}
	n, err := checkedCount(op, t.dtype, shape)
	if err != nil {
		return nil, err
	}
	if !within(t.storageLen(), n, shape, strides, offset) {
		return nil, invalid(op, "shape %v with strides %v at %d leaves the storage of %d elements",
			slices.Clone(shape), slices.Clone(strides), offset, t.storageLen())
	}
	return t.view(slices.Clone(shape), slices.Clone(strides), offset), nil
}

// within reports whether a view of n elements stays in a storage of limit.
func within(limit, n int, shape, strides []int, offset int) bool {
	if n == 0 {
		return offset >= 0 && offset <= limit
	}
	if offset < 0 || offset >= limit {
		return false
	}
	lo, hi := offset, offset
	for i, s := range strides {
		if shape[i] == 1 || s == 0 {
			continue
		}
		// The quotient is 0 for every stride beyond limit, the most negative
		// number, which has no opposite, included.
		if shape[i]-1 > limit/abs(s) {
			return false
		}
		if s > 0 {
			hi += (shape[i] - 1) * s
		} else {
			lo += (shape[i] - 1) * s
		}
		if lo < 0 || hi >= limit {
			return false
		}
	}
	return lo >= 0 && hi < limit
}

func (t *Tensor) storageLen() int {
	if t.mem != nil {
		return t.mem.Len() / t.dtype.Size()
	}
	return len(t.data) / t.dtype.Size()
}

// Contiguous returns t itself if it is contiguous, else a packed copy.
func (t *Tensor) Contiguous() (*Tensor, error) {
	if t.IsContiguous() {
		return t, nil
	}
	return t.Clone()
}
