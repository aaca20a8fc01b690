package reduce

import (
	"fmt"
	"maps"
	"sync"
	"unsafe"

	"github.com/c10d-go/c10d/tensor"
)

// Func combines element by element: dst = dst op src, where dst is the local operand and src the
// received one. Both have the same length, a whole number of elements. They may be the same
// slice, but must not overlap in part.
//
// It panics on wrong lengths: going on would send a wrong result to other ranks.
type Func func(dst, src []byte)

// Kernel returns the function that combines elements of dtype d. Avg and
// PreMulSum combine as Sum does. The error is an [*UnsupportedError].
func Kernel(k Kind, d tensor.DType) (Func, error) {
	if err := supported(k, d); err != nil {
		return nil, err
	}
	if k == Avg || k == PreMulSum {
		k = Sum
	}
	return kernels[k][d], nil
}

type pair struct {
	kind  Kind
	dtype tensor.DType
}

// fast has the functions that replace portable loops.
type fast struct {
	name                  string
	kernels               map[pair]Func
	joiners               map[pair]joiner
	dividers, multipliers map[tensor.DType]scaler
}

// inAssembly has, for each loop, the fastest that this processor can run.
var inAssembly = func() fast {
	best := fast{
		kernels:     make(map[pair]Func),
		joiners:     make(map[pair]joiner),
		dividers:    make(map[tensor.DType]scaler),
		multipliers: make(map[tensor.DType]scaler),
	}
	for _, f := range assemblies() {
		maps.Copy(best.kernels, f.kernels)
		maps.Copy(best.joiners, f.joiners)
		maps.Copy(best.dividers, f.dividers)
		maps.Copy(best.multipliers, f.multipliers)
	}
	return best
}()

// kernels is the dispatch table of all supported combinations except Avg and PreMulSum.
var kernels = func() (t [len(kindNames)][dtypes]Func) {
	all := portable()
	maps.Copy(all, inAssembly.kernels)
	for p, f := range all {
		t[p.kind][p.dtype] = f
	}
	return t
}()

// dtypes is more than the number of any dtype.
const dtypes = 32

// portable returns the table of the loops in Go, the reference for all others.
func portable() map[pair]Func {
	t := make(map[pair]Func)
	addInteger[uint8](t, tensor.Uint8)
	addInteger[int8](t, tensor.Int8)
	addInteger[uint16](t, tensor.Uint16)
	addInteger[int16](t, tensor.Int16)
	addInteger[uint32](t, tensor.Uint32)
	addInteger[int32](t, tensor.Int32)
	addInteger[uint64](t, tensor.Uint64)
	addInteger[int64](t, tensor.Int64)
	add(t, tensor.Float32, map[Kind]func(dst, src []float32){Sum: sum[float32], Product: product[float32]})
	add(t, tensor.Float32, map[Kind]func(dst, src []uint32){Min: minF32, Max: maxF32})
	add(t, tensor.Float64, map[Kind]func(dst, src []float64){Sum: sum[float64], Product: product[float64]})
	add(t, tensor.Float64, map[Kind]func(dst, src []uint64){Min: minF64, Max: maxF64})
	add(t, tensor.Complex64, map[Kind]func(dst, src []float32){Sum: sum[float32]})
	add(t, tensor.Complex128, map[Kind]func(dst, src []float64){Sum: sum[float64]})
	add(t, tensor.BFloat16, map[Kind]func(dst, src []uint16){Sum: sumBF16, Product: productBF16, Min: minBF16, Max: maxBF16})
	add(t, tensor.Float16, map[Kind]func(dst, src []uint16){Sum: sumF16, Product: productF16, Min: minF16, Max: maxF16})
	add(t, tensor.Float8E4M3, tabulated(tensor.F8E4M3.Float32, tensor.F8E4M3From))
	add(t, tensor.Float8E5M2, tabulated(tensor.F8E5M2.Float32, tensor.F8E5M2From))
	add(t, tensor.Bool, map[Kind]func(dst, src []byte){
		Sum: orBool, Max: orBool, BOr: orBool,
		Product: andBool, Min: andBool, BAnd: andBool,
		BXor: xorBool,
	})
	return t
}

func addInteger[T integer](t map[pair]Func, d tensor.DType) {
	add(t, d, map[Kind]func(dst, src []T){Sum: sum[T], Product: product[T], Min: minInt[T], Max: maxInt[T]})
	add(t, d, map[Kind]func(dst, src []byte){BAnd: and, BOr: or, BXor: xor})
}

// add enters loops for dtype d, over T, which an element consists of.
func add[T any](t map[pair]Func, d tensor.DType, loops map[Kind]func(dst, src []T)) {
	for k, loop := range loops {
		t[pair{k, d}] = bounded(d.Size(), loop)
	}
}

const (
	// piece is how many bytes a loop works on at a time. That takes 0.02 to 0.8 ms
	// (BenchmarkKernel).
	piece = 1 << 20

	// step is the unit of lengths for loops in assembly, in bytes: a vector of AVX-512, two of
	// AVX2, four of NEON.
	step = 64

	// block is how many unaligned bytes are copied at a time, both operands
	// within a first-level cache.
	block = 8 << 10
)

// blocks holds aligned copies of unaligned operands.
var blocks = sync.Pool{New: func() any { return new([2][block / 8]uint64) }}

// bounded returns the Func that runs loop over bytes of elements of size bytes,
// which consist of one T or more.
func bounded[T any](size int, loop func(dst, src []T)) Func {
	return func(dst, src []byte) {
		checkLengths(dst, src, size)
		if !aligned[T](dst) || !aligned[T](src) {
			copied(dst, src, loop)
			return
		}
		for len(dst) > 0 {
			n := min(len(dst), piece)
			accessed(dst[:n], src[:n])
			loop(view[T](dst[:n]), view[T](src[:n]))
			dst, src = dst[n:], src[n:]
		}
	}
}

// stepped returns the Func that runs loop, in assembly, over whole steps. The bytes after the
// last step are copied to a separate step, and the results back.
func stepped(size int, loop func(dst, src []byte)) Func {
	return func(dst, src []byte) {
		checkLengths(dst, src, size)
		for len(dst) >= step {
			n := min(len(dst), piece) &^ (step - 1)
			accessed(dst[:n], src[:n])
			loop(dst[:n], src[:n])
			dst, src = dst[n:], src[n:]
		}
		if len(dst) > 0 {
			var a, b [step]byte
			copy(a[:], dst)
			copy(b[:], src)
			loop(kept(&a), kept(&b))
			copy(dst, a[:])
		}
	}
}

// kept returns a as a slice and keeps it on the stack. The compiler would move it to
// the heap, because it cannot know that loops in assembly keep no pointers.
//
// While the address is a number, the stack must not grow: the number would stay as it is. Hence the
// directives. Without them, builds with the race detector call a checker of pointers in between.
//
//go:nosplit
//go:nocheckptr
func kept(a *[step]byte) []byte {
	address := uintptr(unsafe.Pointer(a))
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), step)
}

func checkLengths(dst, src []byte, size int) {
	if len(dst) != len(src) || len(dst)%size != 0 {
		panic(fmt.Sprintf("reduce: %d bytes and %d bytes of elements of %d", len(dst), len(src), size))
	}
}

func copied[T any](dst, src []byte, loop func(dst, src []T)) {
	buf := blocks.Get().(*[2][block / 8]uint64)
	defer blocks.Put(buf)
	for len(dst) > 0 {
		n := min(len(dst), block)
		a, b := bytesOf(&buf[0])[:n], bytesOf(&buf[1])[:n]
		copy(a, dst)
		copy(b, src)
		loop(view[T](a), view[T](b))
		copy(dst, a)
		dst, src = dst[n:], src[n:]
	}
}

// each is bounded for functions of one operand.
func each[T any](size int, loop func(b []T)) func(b []byte) {
	f := bounded(size, func(dst, _ []T) { loop(dst) })
	return func(b []byte) { f(b, b) }
}

func bytesOf(words *[block / 8]uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(words)), block)
}

func aligned[T any](b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%unsafe.Alignof(*new(T)) == 0
}

// view returns b, which is aligned, as elements.
func view[T any](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(*new(T))))
}
