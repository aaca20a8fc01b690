package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Device is a device with parameters and one of its streams: the trainer's, which computes the
// gradients and the optimizer's step. Package ddp/gpu makes one for a driver of package
// backend/cuda/driver.
//
// All calls but Alloc enqueue on the stream and return. They are in order with the trainer's
// commands on that stream.
//
// A Device may also have a method InStream(context.Context) context.Context. Calls of the group
// with that context are commands of the stream: they also come before its later commands. DDP makes
// the last all-reduce of an iteration with it, unless there is a Hook.
//
// A Device may have a method Cast(dst, src *tensor.Tensor) error, which enqueues dst = src, rounded to
// the dtype of dst. The tensors are contiguous. Bucket.Cast, and with it the hooks that compress, need it.
type Device interface {
	// ID returns the device, as tensors name it.
	ID() tensor.Device

	// Alloc returns n bytes of the device's memory, n at least 1. DDP frees memory that it no
	// longer uses. DDP has no Close, so the maker of the Device frees the rest.
	Alloc(n int) (tensor.Memory, error)

	// Free frees memory of Alloc once the stream has finished its commands.
	Free(m tensor.Memory) error

	// Copy enqueues dst = src. The tensors have one dtype and number of elements, and no gaps,
	// and their elements are in the same order.
	Copy(dst, src *tensor.Tensor) error

	// Zero enqueues zeros for a contiguous tensor.
	Zero(t *tensor.Tensor) error

	// Stream returns the stream.
	Stream() work.Stream

	// Context returns a context for calls of the group. They are ordered after the stream's
	// commands.
	Context(ctx context.Context) context.Context
}

// inStreamer is a Device that can make a call of the group one command of its stream.
type inStreamer interface {
	// InStream returns a context for calls of the group. They come after the stream's earlier
	// commands and before its later ones.
	InStream(ctx context.Context) context.Context
}

// caster is a Device that casts.
type caster interface {
	Cast(dst, src *tensor.Tensor) error
}

// context returns the context for the all-reduce of a bucket on a device. When the last bucket is
// launched all gradients are ready, and the stream has nothing to compute beside the all-reduce. It
// is then part of the stream, which saves an event each way. A hook may go on after its all-reduce.
func (b *Bucket) context(ctx context.Context) context.Context {
	if dev, ok := b.dev.(inStreamer); ok && b.IsLast() && b.d.o.Hook == nil {
		return dev.InStream(ctx)
	}
	return b.dev.Context(ctx)
}

// Errors of helpers for hooks.
var (
	errDivideOnDevice = errors.New("ddp: only gradients in CPU memory can be divided; on a device reduce with pg.Avg()")
	errCastOnDevice   = errors.New("ddp: gradients on a device can be cast only if Options.Device has a method Cast(dst, src *tensor.Tensor) error")
)

// deviceOf returns the Device that has t, nil for CPU memory.
func (d *DDP) deviceOf(t *tensor.Tensor) Device {
	if t.Device().Type == tensor.CPU {
		return nil
	}
	return d.o.Device
}

// placed checks a tensor of the model.
func (d *DDP) placed(t *tensor.Tensor) error {
	if t == nil || t.Device().Type == tensor.CPU {
		return onHost(t)
	}
	switch dev := d.o.Device; {
	case t.Layout() != tensor.Strided:
		return fmt.Errorf("%v is not strided", t)
	case dev == nil:
		return fmt.Errorf("%v is not in CPU memory, and there is no Options.Device", t)
	case t.Device() != dev.ID():
		return fmt.Errorf("%v is neither in CPU memory nor on Options.Device, which is %v", t, dev.ID())
	case t.HasOverlap() || t.Len() > 0 && !dense(t):
		return fmt.Errorf("elements of %v with strides %v overlap or leave gaps, which they must not on a device", t, t.Strides())
	}
	return nil
}

// gradOn checks a dense gradient of a parameter on a device.
func (p *param) gradOn(grad *tensor.Tensor) error {
	if v := p.Value; grad.Device() != v.Device() || !slices.Equal(grad.Strides(), v.Strides()) {
		return p.errorf("expected a gradient on %v with strides %v, got %v with strides %v", v.Device(), v.Strides(), grad, grad.Strides())
	}
	return nil
}

// describe is a tensor as text that is the same on every rank, without the number of its device.
func describe(t *tensor.Tensor) string {
	if t.Device().Type == tensor.CPU {
		return t.String()
	}
	return fmt.Sprintf("%v%v@%v", t.DType(), t.Shape(), t.Device().Type)
}

// flat returns n zeros of like's dtype in the memory of its device.
func (d *DDP) flat(like *tensor.Tensor, n int) (*tensor.Tensor, error) {
	return zeros(d.deviceOf(like), like.DType(), n)
}

// zeros returns n zeros in the memory of a device; nil is the CPU.
func zeros(dev Device, dtype tensor.DType, n int) (*tensor.Tensor, error) {
	if dev == nil || n == 0 {
		return tensor.New(dtype, n)
	}
	m, err := dev.Alloc(n * dtype.Size())
	if err != nil {
		return nil, err
	}
	t, err := tensor.OnDevice(dtype, m, n)
	if err != nil {
		return nil, errors.Join(err, dev.Free(m))
	}
	return t, dev.Zero(t)
}

// free frees a tensor of flat.
func (d *DDP) free(t *tensor.Tensor) error {
	if t == nil || t.Memory() == nil {
		return nil
	}
	return d.o.Device.Free(t.Memory())
}

// fillOn is fill on a device: the collective divides.
func (b *Bucket) fillOn(p *param) error {
	s := &b.slots[p.slot]
	switch {
	case s.flat.Len() == 0:
		return nil
	case !p.touched:
		return b.dev.Zero(s.flat)
	case b.d.o.GradientAsBucketView:
		return nil
	}
	return b.copyOn(s.flat, p.grad)
}

// copyOn enqueues dst = src. A bucket without elements is not on its device.
func (b *Bucket) copyOn(dst, src *tensor.Tensor) error {
	if dst.Len() == 0 {
		return nil
	}
	return b.dev.Copy(dst, src)
}

// average is the operator of a bucket whose collective divides.
func (d *DDP) average() pg.ReduceOp {
	if d.join.on && d.join.o.DivideByActive {
		return pg.PreMulSum(1 / float64(d.divisor))
	}
	return pg.Avg()
}

// flight is a collective on device tensors. The stream is ordered after it, and its error has not
// been checked yet.
type flight struct {
	work *work.Work
	wrap func(error) error
}

// after makes dev's stream wait for a collective.
func (d *DDP) after(dev Device, w *work.Work, wrap func(error) error) error {
	if err := w.Synchronize(dev.Stream()); err != nil {
		return err
	}
	d.flying = append(d.flying, flight{w, wrap})
	return nil
}

// landed removes the collectives that have ended and returns the error of the first that failed.
func (d *DDP) landed() error {
	for len(d.flying) > 0 && d.flying[0].work.IsCompleted() {
		if err := d.land(); err != nil {
			return err
		}
	}
	return nil
}

// land removes the oldest collective and returns its error.
func (d *DDP) land() error {
	f := d.flying[0]
	d.flying = slices.Delete(d.flying, 0, 1)
	if err := f.work.Err(); err != nil {
		return f.wrap(err)
	}
	return nil
}

// Wait blocks until the collectives of all finished iterations have ended. With parameters on a
// device, Finish only orders the stream after them, and a later Begin or Finish returns their
// error. Call Wait before results leave the program, for example before a checkpoint. With
// parameters in CPU memory it returns at once.
func (d *DDP) Wait(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	return d.wait(ctx)
}

func (d *DDP) wait(ctx context.Context) error {
	for len(d.flying) > 0 {
		f := d.flying[0]
		if err := f.work.Wait(ctx); err != nil && !f.work.IsCompleted() {
			return f.wrap(err) // ctx has ended; the operation goes on
		}
		if err := d.land(); err != nil {
			return d.fail(err)
		}
	}
	return nil
}
