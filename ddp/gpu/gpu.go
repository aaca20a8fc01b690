package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Device is a ddp.Device for a device and a stream of package driver. Many goroutines may use it;
// commands are in the order of their calls.
type Device struct {
	device driver.Device
	stream driver.Stream

	mu     sync.Mutex
	closed bool
	live   map[driver.Memory]bool
	freed  []retired
	caster *cuda.Caster // nil until something is cast
}

// retired is memory that the stream may still use.
type retired struct {
	m    driver.Memory
	over driver.Event
}

var _ ddp.Device = (*Device)(nil)

// New returns the Device for a stream of d, on which the trainer launches its kernels. The caller
// closes both.
func New(d driver.Device, stream driver.Stream) (*Device, error) {
	if d == nil || stream == nil {
		return nil, errors.New("gpu: New needs a device and a stream of it")
	}
	if have := stream.Device(); have != d.ID() {
		return nil, fmt.Errorf("gpu: the stream is one of %v, want one of %v", have, d.ID())
	}
	return &Device{device: d, stream: stream, live: make(map[driver.Memory]bool)}, nil
}

// ID returns the device.
func (v *Device) ID() tensor.Device { return v.device.ID() }

// Stream returns the stream.
func (v *Device) Stream() work.Stream { return v.stream }

// Context returns cuda.Beside of ctx and the stream.
func (v *Device) Context(ctx context.Context) context.Context {
	return cuda.Beside(ctx, v.stream)
}

// InStream returns cuda.InStream of ctx and the stream.
func (v *Device) InStream(ctx context.Context) context.Context { return cuda.InStream(ctx, v.stream) }

// Alloc returns n bytes of device memory.
func (v *Device) Alloc(n int) (tensor.Memory, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return nil, fmt.Errorf("gpu: Alloc: %w", driver.ErrClosed)
	}
	if err := v.reap(); err != nil {
		return nil, err
	}
	m, err := v.device.Alloc(n)
	if err != nil {
		return nil, err
	}
	v.live[m] = true
	return m, nil
}

// Free frees memory of Alloc, in a later call of Alloc, once the stream has finished its commands and no operation of
// the process is under way.
func (v *Device) Free(m tensor.Memory) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	mem, ok := m.(driver.Memory)
	if !ok || !v.live[mem] {
		return fmt.Errorf("gpu: Free: %w: a %T that Alloc has not returned", driver.ErrInvalid, m)
	}
	over, err := v.stream.Record()
	if err != nil {
		return err
	}
	delete(v.live, mem)
	v.freed = append(v.freed, retired{mem, over})
	return nil
}

// reap closes memory that the stream no longer uses, unless operations are under way. CUDA may wait then for their
// kernels, and these for other ranks.
func (v *Device) reap() (err error) {
	if len(v.freed) > 0 {
		pool.Alone(0, func() { err = v.closeFreed() })
	}
	return err
}

func (v *Device) closeFreed() error {
	for len(v.freed) > 0 {
		r := v.freed[0]
		over, err := r.over.Done()
		if err != nil || !over {
			return err
		}
		v.freed = v.freed[1:]
		r.over.Release()
		if err := r.m.Close(); err != nil {
			return err
		}
	}
	return nil
}

// Copy enqueues dst = src.
func (v *Device) Copy(dst, src *tensor.Tensor) error {
	if dst.DType() != src.DType() || dst.Len() != src.Len() {
		return fmt.Errorf("gpu: Copy: %w: %v to %v", driver.ErrInvalid, src, dst)
	}
	to, err := Ptr(dst)
	if err != nil {
		return err
	}
	from, err := Ptr(src)
	if err != nil {
		return err
	}
	return v.stream.Copy(to, from, dst.ByteLen())
}

// Cast enqueues dst = src, rounded to the dtype of dst; see [cuda.Caster].
func (v *Device) Cast(dst, src *tensor.Tensor) error {
	c, err := v.casts()
	if err != nil {
		return err
	}
	return c.Cast(v.stream, dst, src)
}

// casts returns what casts. The kernels are loaded in the first call.
func (v *Device) casts() (*cuda.Caster, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return nil, fmt.Errorf("gpu: Cast: %w", driver.ErrClosed)
	}
	if v.caster == nil {
		c, err := cuda.NewCaster(v.device)
		if err != nil {
			return nil, err
		}
		v.caster = c
	}
	return v.caster, nil
}

// Zero enqueues zeros.
func (v *Device) Zero(t *tensor.Tensor) error {
	p, err := Ptr(t)
	if err != nil {
		return err
	}
	return v.stream.Memset(p, 0, t.ByteLen())
}

// Close frees the memory that DDP still has. The stream's commands and the group's operations
// must have ended. It may be called more than once.
func (v *Device) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closed = true
	var errs []error
	for _, r := range v.freed {
		_, err := r.over.Done()
		r.over.Release()
		errs = append(errs, err, r.m.Close())
	}
	for m := range v.live {
		errs = append(errs, m.Close())
	}
	if v.caster != nil {
		errs = append(errs, v.caster.Close())
	}
	v.freed = nil
	clear(v.live)
	return errors.Join(errs...)
}

// Ptr returns the address of a tensor's first element, for kernels.
func Ptr(t *tensor.Tensor) (driver.Ptr, error) {
	if t != nil {
		if m, ok := t.Memory().(interface{ Ptr() driver.Ptr }); ok {
			return m.Ptr() + driver.Ptr(t.Offset()*t.DType().Size()), nil
		}
	}
	return 0, fmt.Errorf("gpu: %w: %v does not lie in memory of package driver", driver.ErrInvalid, t)
}
