//go:build cuda && linux

package gorgonia

import (
	"fmt"
	"math/bits"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/libcuda"
	"github.com/c10d-go/c10d/tensor"
)

// Options is how the driver is opened. The zero value is for programs that work
// in the devices' primary contexts.
type Options struct {
	// Contexts are those that the program has made for itself, by the device's
	// number. The devices' memory and streams then are of these contexts. They
	// stay the program's, and must live until the Driver is closed. A device
	// without one has its primary context.
	Contexts map[int]cu.CUContext
}

// Open returns the driver.
func Open(o Options) (driver.Driver, error) {
	contexts := make(map[int]libcuda.Context)
	for i, c := range o.Contexts {
		if c == (cu.CUContext{}) {
			return nil, invalid("Open", i, "no context")
		}
		contexts[i] = libcuda.Context(handle(c))
	}
	d, err := libcuda.New(api{}, contexts)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func invalid(call string, device int, format string, args ...any) error {
	return &driver.Error{Call: call, Device: device, Err: fmt.Errorf("%w: "+format, append([]any{driver.ErrInvalid}, args...)...)}
}

// wrapped is cu's types that are a pointer of CUDA's and nothing else.
type wrapped interface {
	cu.CUContext | cu.Stream | cu.Event | cu.Module | cu.Function
}

// handle returns the pointer in one of cu's types.
func handle[T wrapped](v T) uintptr {
	return *(*uintptr)(unsafe.Pointer(&v))
}

// wrap returns one of cu's types for a pointer.
func wrap[T wrapped](h uintptr) T { return *(*T)(unsafe.Pointer(&h)) }

// Stream returns a program's stream as one of this module, on a device of this
// package's driver; the stream is of the device's context. Closing it ends the
// loan, and no more. cu.NoStream is the device's default stream.
func Stream(v driver.Device, s cu.Stream) (driver.Stream, error) {
	return v.BorrowStream(handle(s))
}

// Memory returns n bytes at a program's pointer as memory of this module. The
// program must not free them before the Memory is closed, which ends the loan.
func Memory(v driver.Device, p cu.DevicePtr, n int64) (driver.Memory, error) {
	return v.Borrow(driver.Ptr(p), int(n))
}

// Tensor returns a contiguous tensor over what lies at a program's pointer. The
// program must not free it before Return.
func Tensor(v driver.Device, p cu.DevicePtr, dtype tensor.DType, shape ...int) (*tensor.Tensor, error) {
	const call = "Tensor"
	n := uint64(dtype.Size())
	for _, d := range shape {
		hi, lo := bits.Mul64(n, uint64(max(d, 0)))
		if hi != 0 || lo > 1<<62 || d < 0 {
			return nil, invalid(call, v.ID().Index, "%v of shape %v", dtype, shape)
		}
		n = lo
	}
	if n == 0 {
		p = 0
	}
	m, err := Memory(v, p, int64(n))
	if err != nil {
		return nil, err
	}
	t, err := tensor.OnDevice(dtype, m, shape...)
	if err != nil {
		m.Close()
		return nil, err
	}
	return t, nil
}

// Return ends the loan of a tensor that Tensor made.
func Return(t *tensor.Tensor) error {
	m, ok := t.Memory().(driver.Memory)
	if !ok {
		return invalid("Return", -1, "a tensor on %v that Tensor did not make", t.Device())
	}
	return m.Close()
}

// CUStream returns a stream as cu has it.
func CUStream(s driver.Stream) cu.Stream { return wrap[cu.Stream](s.Handle()) }

// CUDevicePtr returns the address of memory as cu has it.
func CUDevicePtr(p driver.Ptr) cu.DevicePtr { return cu.DevicePtr(p) }

// CUContext returns the context in which the device's memory and streams are.
func CUContext(v driver.Device) (cu.CUContext, error) {
	w, ok := v.(*libcuda.Device)
	if !ok {
		return cu.CUContext{}, invalid("CUContext", v.ID().Index, "a device of another driver")
	}
	return wrap[cu.CUContext](uintptr(w.Context())), nil
}
