package cuda

import (
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// Caster casts tensors on a device from one floating-point dtype to another: float16, bfloat16, float32
// and float64, of different sizes. Its methods may be called from many goroutines.
type Caster struct {
	device    driver.Device
	module    driver.Module
	functions map[string]driver.Function
}

// NewCaster loads the kernels of a device. That may wait for what the device has been given.
func NewCaster(d driver.Device) (*Caster, error) {
	var names []string
	kernels.EachCast(func(_, _ tensor.DType, name string) { names = append(names, name) })
	m, all, err := kernels.Open(d, kernels.PTX, names...)
	if err != nil {
		return nil, fmt.Errorf("cuda: kernels that cast: %w", err)
	}
	return &Caster{d, m, all}, nil
}

// Cast enqueues dst = src on a stream of the device. Elements are rounded to the nearest number, and to
// float32 on the way. The tensors lie on the device, are contiguous and have the same number of elements.
func (c *Caster) Cast(s driver.Stream, dst, src *tensor.Tensor) error {
	if dst == nil || src == nil || dst.Len() != src.Len() || !dst.IsContiguous() || !src.IsContiguous() ||
		dst.Device() != c.device.ID() || src.Device() != c.device.ID() {
		return fmt.Errorf("cuda: Cast: %w: %v to %v, want contiguous tensors of one length on %v", driver.ErrInvalid, src, dst, c.device.ID())
	}
	name := kernels.Cast(dst.DType(), src.DType())
	if name == "" {
		return fmt.Errorf("cuda: Cast: %w: there is no kernel from %v to %v", driver.ErrInvalid, src.DType(), dst.DType())
	}
	if dst.Len() == 0 {
		return nil
	}
	out, in := place.Start(dst), place.Start(src)
	return s.Launch(&driver.Launch{
		Function: c.functions[name], Grid: kernels.Blocks(min(dst.ByteLen(), src.ByteLen())), Block: driver.Dim{X: kernels.Block},
		Args:   new(driver.Args).Ptr(out).Ptr(in).Uint64(uint64(dst.Len())),
		Access: []driver.Access{driver.Writes(out, dst.ByteLen()), driver.Reads(in, src.ByteLen())},
	})
}

// Close unloads the kernels. Launches must have ended. It may be called more than once.
func (c *Caster) Close() error { return c.module.Close() }
