package cuda

import (
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// Caster casts tensors on a device from one floating-point dtype to another: float16, bfloat16, float32
// and float64, of different sizes. Its methods may be called from many goroutines.
type Caster struct {
	device driver.Device

	mu        sync.Mutex
	module    driver.Module
	functions map[string]driver.Function
}

// NewCaster loads the kernels of a device. That may wait for what the device has been given.
func NewCaster(d driver.Device) (*Caster, error) {
	m, err := d.Load(kernels.PTX)
	if err != nil {
		return nil, fmt.Errorf("cuda: kernels that cast: %w", err)
	}
	return &Caster{device: d, module: m, functions: make(map[string]driver.Function)}, nil
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
	f, err := c.function(name)
	if err != nil {
		return fmt.Errorf("cuda: Cast: %w", err)
	}
	out, in := place.Start(dst), place.Start(src)
	return s.Launch(&driver.Launch{
		Function: f, Grid: kernels.Blocks(min(dst.ByteLen(), src.ByteLen())), Block: driver.Dim{X: kernels.Block},
		Args:   new(driver.Args).Ptr(out).Ptr(in).Uint64(uint64(dst.Len())),
		Access: []driver.Access{driver.Writes(out, dst.ByteLen()), driver.Reads(in, src.ByteLen())},
	})
}

func (c *Caster) function(name string) (driver.Function, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.module == nil {
		return nil, driver.ErrClosed
	}
	f, ok := c.functions[name]
	if !ok {
		var err error
		if f, err = c.module.Function(name); err != nil {
			return nil, err
		}
		c.functions[name] = f
	}
	return f, nil
}

// Close unloads the kernels. Launches must have ended. It may be called more than once.
func (c *Caster) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.module
	if c.module = nil; m == nil {
		return nil
	}
	return m.Close()
}
