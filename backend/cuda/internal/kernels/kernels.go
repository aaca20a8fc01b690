package kernels

import (
	_ "embed"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// PTX has the kernels, for devices of compute capability 8.0 and later.
//
//go:embed kernels.ptx
var PTX []byte

const (
	// Copy is c10d_copy(out, push, a pointers, n uint64): out[i] = push[i] = a[i] for n
	// bytes. One of out and push may be 0.
	Copy = "c10d_copy"

	// Pack and Unpack are c10d_pack(packed, spread pointers, layout Layout): they
	// bring elements that lie anyhow in row-major order, and put them back.
	Pack   = "c10d_pack"
	Unpack = "c10d_unpack"

	// Exchange is c10d_exchange(x, in, out pointers, n uint64, arrived, release, taken
	// pointers, count uint32, limit uint64), a launch of one block. It copies n bytes at x to in and sets
	// the word arrived to count. It waits until the word release has come to count. Then it
	// copies out to x and sets the word taken. After limit nanoseconds it ends without that, so that a
	// host that is stopped does not keep the device.
	Exchange = "c10d_exchange"
)

var (
	numbers = []tensor.DType{
		tensor.Float32, tensor.Float64, tensor.Float16, tensor.BFloat16,
		tensor.Int8, tensor.Uint8, tensor.Int32, tensor.Int64,
	}
	operators = []backend.ReduceOp{
		backend.Sum(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor(),
	}
)

// Combine returns the name of the kernel that combines elements of a dtype, and its number of an operator; "" if there
// is none. c10d_combine_float32(into, from pointers, n uint64, op uint32) does into[i] = into[i] op from[i] for n
// elements. The number of Avg is that of Sum.
func Combine(k backend.ReduceKind, d tensor.DType) (name string, op uint32) {
	if avg := backend.Avg().Kind(); k == avg && d.IsFloat() {
		k = backend.Sum().Kind()
	}
	i := slices.IndexFunc(operators, func(o backend.ReduceOp) bool { return o.Kind() == k })
	if i < 0 || !slices.Contains(numbers, d) || i > maxOperator && d.IsFloat() {
		return "", 0
	}
	return "c10d_combine_" + d.String(), uint32(i)
}

// maxOperator is the number of the last operator of floats.
const maxOperator = 3

// EachCombine calls f for every kernel of Combine.
func EachCombine(f func(d tensor.DType, name string)) {
	for _, d := range numbers {
		name, _ := Combine(backend.Sum().Kind(), d)
		f(d, name)
	}
}

// Operator returns the operator of a number.
func Operator(op uint32) backend.ReduceOp { return operators[op] }

// Cast returns the name of the kernel that casts elements, "" if there is none. For example,
// c10d_cast_bfloat16_float32(out, a pointers, n uint64) does out[i] = a[i] for n elements: a has float32, and
// out has bfloat16. Elements are rounded to float32 on the way.
func Cast(to, from tensor.DType) string {
	for _, d := range [2]tensor.DType{to, from} {
		switch d {
		case tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64:
		default:
			return ""
		}
	}
	if to.Size() == from.Size() {
		return ""
	}
	return "c10d_cast_" + to.String() + "_" + from.String()
}

// EachCast calls f for every kernel of Cast.
func EachCast(f func(to, from tensor.DType, name string)) {
	for _, to := range numbers {
		for _, from := range numbers {
			if name := Cast(to, from); name != "" {
				f(to, from, name)
			}
		}
	}
}

// Names returns the names of all kernels.
func Names() []string {
	all := []string{Copy, Pack, Unpack, Exchange}
	EachCast(func(_, _ tensor.DType, name string) { all = append(all, name) })
	EachCombine(func(_ tensor.DType, name string) { all = append(all, name) })
	return all
}

// Block is the number of threads that launches have; Grid the most blocks. Pieces
// of a few MiB take less than that many: a thread has 16 bytes at a time.
const (
	Block = 512
	Grid  = 1024
)

// Blocks returns the grid for n bytes.
func Blocks(n int) driver.Dim {
	const bytes = 16 * Block
	return driver.Dim{X: uint32(min(max((n+bytes-1)/bytes, 1), Grid))}
}

// MostDims is how many dimensions a Layout can have.
const MostDims = 8

// Layout is how elements lie in memory.
type Layout struct {
	Size           int   // of an element, in bytes
	Shape, Strides []int // at most MostDims; strides in elements
}

// Append appends the layout to the parameters of a launch.
func (l Layout) Append(a *driver.Args) *driver.Args {
	var b [8 * (2 + 2*MostDims)]byte
	n := 1
	put := func(i int, v int64) { binary.NativeEndian.PutUint64(b[8*i:], uint64(v)) }
	first := MostDims - len(l.Shape)
	for d := range MostDims {
		shape, stride := 1, 0
		if d >= first {
			shape, stride = l.Shape[d-first], l.Strides[d-first]
		}
		n *= shape
		put(2+d, int64(shape))
		put(2+MostDims+d, int64(stride))
	}
	put(0, int64(n))
	put(1, int64(l.Size))
	return a.Struct(b[:], 8)
}

// ParseLayout reads what Append wrote, for kernels in Go.
func ParseLayout(b []byte) (l Layout, n int) {
	get := func(i int) int { return int(binary.NativeEndian.Uint64(b[8*i:])) }
	l.Size = get(1)
	for d := range MostDims {
		l.Shape = append(l.Shape, get(2+d))
		l.Strides = append(l.Strides, get(2+MostDims+d))
	}
	return l, get(0)
}

// Open loads an image on a device, and returns the kernels of these names in it.
func Open(v driver.Device, image []byte, names ...string) (driver.Module, map[string]driver.Function, error) {
	m, err := v.Load(image)
	if err != nil {
		return nil, nil, err
	}
	all := make(map[string]driver.Function, len(names))
	for _, name := range names {
		if all[name], err = m.Function(name); err != nil {
			return nil, nil, errors.Join(err, m.Close())
		}
	}
	return m, all, nil
}
