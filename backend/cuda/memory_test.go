package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/overlaptest"
	"github.com/c10d-go/c10d/tensor"
)

// TestSharedMemory: a call whose inputs and outputs share memory is refused, or right. The calls go by kernels, through
// the host and among clusters. Some tensors are in CPU memory, and some ranks have no device.
func TestSharedMemory(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		o := drawSetup(rng, seed, s, 1+rng.IntN(4))
		o.options.Chunk = 16 + rng.IntN(4000)
		var lack []int
		if seed%8 == 3 || seed%8 == 5 {
			lack = third(rng, o.size)
		}
		o = withoutDevices(o, lack...)
		w := newWorld(t, o)
		var calls []*overlaptest.Call
		for _, name := range overlaptest.Names {
			calls = append(calls, overlaptest.Draw(rng, name, o.size))
		}
		w.each(func(x *rank, r int) error {
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			for i, c := range calls {
				onCPU := func() bool { return slices.Contains(lack, r) || seed%2 == 1 && rng.IntN(2) == 0 }
				if err := x.sharing(c, rng, onCPU); err != nil {
					x.b.Abort(err) // the other ranks do not wait for this one
					return fmt.Errorf("call %d, %v: %w", i, c, err)
				}
			}
			return nil
		})
		w.end()
	})
}

// sharing makes a rank's call, if the other ranks can make theirs or this one is refused.
func (x *rank) sharing(c *overlaptest.Call, rng *rand.Rand, onCPU func() bool) (err error) {
	r := x.b.Rank()
	if c.AnyRefused() && !c.Refused(r) {
		return nil
	}
	memory, want := c.Before(r), c.After(r)
	if c.Refused(r) {
		want = c.Before(r)
	}
	var arenas [overlaptest.Arenas]*tensor.Tensor
	var device [overlaptest.Arenas]driver.Memory
	s := x.stream
	for a, v := range memory {
		if onCPU() {
			if arenas[a], err = tensor.Of(v, len(v)); err != nil {
				return err
			}
			continue
		}
		if device[a], err = x.upload(s[0], v); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, device[a].Close()) }()
		if arenas[a], err = tensor.OnDevice(tensor.Int32, cuda.OnStream(device[a], s[0]), len(v)); err != nil {
			return err
		}
	}
	seq := x.b.Seq()
	w, err := c.Run(x.ctx, x.b, arenas)
	switch {
	case !c.Refused(r):
		if err != nil {
			return err
		}
		if err := w.Wait(x.ctx); err != nil {
			return err
		}
	case !errors.Is(err, backend.ErrInvalidArgument) || !strings.Contains(err.Error(), "overlap in memory") || x.b.Seq() != seq:
		return fmt.Errorf("want a call that is refused, got %w", err)
	}
	for a := range arenas {
		if device[a] != nil {
			if w != nil {
				if err := w.Synchronize(s[0]); err != nil {
					return err
				}
			}
			if memory[a], err = x.download(s[0], device[a]); err != nil {
				return err
			}
		}
		if !slices.Equal(memory[a], want[a]) {
			return fmt.Errorf("wrong elements in arena %d", a)
		}
	}
	return nil
}

// upload returns memory of a device with elements.
func (x *rank) upload(s driver.Stream, v []int32) (_ driver.Memory, err error) {
	defer must.Catch(&err)
	dev := must.Get(x.d.Device(0))
	n := max(4*len(v), 4)
	m := must.Get(dev.Alloc(n))
	return m, x.throughHost(n, func(h driver.HostMemory) error {
		driver.HostAccess(x.d, "filling", driver.Writes(h.Ptr(), n))
		copy(int32s(h), v)
		return s.Copy(m.Ptr(), h.Ptr(), n)
	}, s, nil)
}

// download returns the elements of memory.
func (x *rank) download(s driver.Stream, m driver.Memory) (v []int32, err error) {
	err = x.throughHost(m.Len(), func(h driver.HostMemory) error { return s.Copy(h.Ptr(), m.Ptr(), m.Len()) }, s, func(h driver.HostMemory) {
		driver.HostAccess(x.d, "comparing", driver.Reads(h.Ptr(), m.Len()))
		v = slices.Clone(int32s(h))
	})
	return v, err
}

// throughHost runs commands of a stream that use page-locked memory.
func (x *rank) throughHost(n int, f func(h driver.HostMemory) error, s driver.Stream, then func(h driver.HostMemory)) error {
	h, err := x.d.AllocHost(n)
	if err != nil {
		return err
	}
	if err = f(h); err == nil {
		var e driver.Event
		if e, err = s.Record(); err == nil {
			err = e.Sync(x.ctx)
			e.Release()
		}
	}
	if err == nil && then != nil {
		then(h)
	}
	return errors.Join(err, h.Close())
}

func int32s(h driver.HostMemory) []int32 {
	b := h.Bytes()
	return unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}
