package cuda

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// ToDevice returns a tensor with the elements of v in memory of the device of s. Without a shape it has one dimension.
// It returns when the elements are there. Operations on the tensor come after what s has been given, as with OnStream.
// Free frees it. d is the Driver of s. If ctx ends first, page-locked memory stays in use until d is closed.
func ToDevice[T tensor.Element](ctx context.Context, d driver.Driver, s driver.Stream, v []T, shape ...int) (*tensor.Tensor, error) {
	host, err := tensor.Of(v, shape...)
	if err != nil {
		return nil, err
	}
	gpu, err := d.Device(s.Device().Index)
	if err != nil {
		return nil, err
	}
	n := host.ByteLen()
	mem, err := gpu.Alloc(n)
	if err != nil {
		return nil, err
	}
	t, err := tensor.OnDevice(host.DType(), OnStream(mem, s), host.Shape()...)
	if err == nil {
		err = through(ctx, d, s, n, func(locked driver.HostMemory) error {
			driver.HostAccess(d, "ToDevice", driver.Writes(locked.Ptr(), n))
			copy(locked.Bytes(), host.Bytes())
			return s.Copy(mem.Ptr(), locked.Ptr(), n)
		}, nil)
	}
	if err != nil {
		mem.Close()
		return nil, err
	}
	return t, nil
}

// ToHost returns the elements of a contiguous tensor in device memory, as they are after what s has been given. Let
// Work.Synchronize order s after an operation first. d is the Driver of s, as in ToDevice.
func ToHost[T tensor.Element](ctx context.Context, d driver.Driver, s driver.Stream, t *tensor.Tensor) ([]T, error) {
	mem, ok := t.Memory().(driver.Memory)
	if dt := tensor.DTypeOf[T](); !ok || !t.IsContiguous() || t.DType() != dt {
		return nil, fmt.Errorf("cuda: ToHost: the tensor is %v, not a contiguous one of %v in device memory", t, dt)
	}
	n, from := t.ByteLen(), mem.Ptr()+driver.Ptr(t.Offset()*t.DType().Size())
	v := make([]T, t.Len())
	err := through(ctx, d, s, n, func(locked driver.HostMemory) error {
		return s.Copy(locked.Ptr(), from, n)
	}, func(locked driver.HostMemory) error {
		driver.HostAccess(d, "ToHost", driver.Reads(locked.Ptr(), n))
		host, err := tensor.Of(v)
		if err != nil {
			return err
		}
		return host.Unpack(locked.Bytes()[:n])
	})
	if err != nil {
		return nil, err
	}
	return v, nil
}

// Free frees a tensor of ToDevice. Operations with it, and what their streams were given, must have ended.
func Free(t *tensor.Tensor) error {
	mem, ok := t.Memory().(driver.Memory)
	if !ok {
		return fmt.Errorf("cuda: Free: %v is not in device memory", t)
	}
	return mem.Close()
}

// through gives enqueue n bytes of page-locked memory, waits for s, and calls after.
func through(ctx context.Context, d driver.Driver, s driver.Stream, n int, enqueue, after func(driver.HostMemory) error) error {
	if n == 0 {
		return nil
	}
	locked, err := d.AllocHost(n)
	if err != nil {
		return err
	}
	if err := enqueue(locked); err != nil {
		locked.Close()
		return err
	}
	passed, err := s.Record()
	if err != nil {
		return err
	}
	defer passed.Release()
	if err := passed.Sync(ctx); err != nil {
		return err
	}
	if after != nil {
		if err := after(locked); err != nil {
			return err
		}
	}
	return locked.Close()
}
