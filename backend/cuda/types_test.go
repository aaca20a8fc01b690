package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// adds has a rank all-reduce a dtype on the device and on the CPU, which must agree.
func (x *rank) adds(d tensor.DType, r int) error {
	return x.allReduces(d, backend.Sum(), []int{100}, r, rand.New(rand.NewPCG(1, uint64(r))))
}

// TestTypesAreLoaded says when kernels are loaded. A group loads those that all groups need when it is made. The first
// reduction of another dtype loads the others, unless Options.DTypes has it. Clusters need all. A capture says what to
// do if kernels are missing.
func TestTypesAreLoaded(t *testing.T) {
	for name, s := range map[string]setup{"2 ranks": directly(2), "3 ranks": directly(3), "clusters": clustered(2, 1)} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", early ", early), func(t *testing.T) {
				if early {
					s.options.DTypes = []tensor.DType{tensor.Int64}
				}
				w := newWorld(t, s)
				made := w.m.Stats().MadeModules
				loads := func(n int, f func(x *rank, r int) error) {
					t.Helper()
					w.each(f)
					now := w.m.Stats().MadeModules
					require.Equal(t, n, now-made)
					made = now
				}
				late := s.size * s.size // each process keeps them on all devices
				if early || name == "clusters" {
					late = 0
				}
				for _, d := range []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float16} {
					loads(0, func(x *rank, r int) error { return x.adds(d, r) })
				}
				if late > 0 {
					loads(0, func(x *rank, r int) error {
						y, err := x.vector(tensor.Int32, r, make([]byte, 8))
						if err != nil {
							return err
						}
						in := cuda.InStream(x.ctx, x.stream[r])
						_, err = driver.Capture(x.stream[r], func() error {
							_, err := x.b.AllReduce(in, []*tensor.Tensor{y.t}, backend.AllReduceOptions{})
							return err
						})
						if !errors.Is(err, driver.ErrCapture) {
							return fmt.Errorf("a dtype that is not loaded: %w", err)
						}
						return says(err, "Make the call once before: that connects the ranks and loads the kernels, as Options")
					})
				}
				loads(late, func(x *rank, r int) error { return x.adds(tensor.Int32, r) })
				for _, d := range []tensor.DType{tensor.Int32, tensor.Float64, tensor.Uint8} {
					loads(0, func(x *rank, r int) error { return x.adds(d, r) })
				}
				w.end()
			})
		}
	}
}

// loading is a driver that calls a function before it loads an image.
type loading struct {
	driver.Driver
	before func(image string) error
}

func (d *loading) Device(i int) (driver.Device, error) {
	v, err := d.Driver.Device(i)
	return &loadingDevice{v, d}, err
}

type loadingDevice struct {
	driver.Device
	d *loading
}

func (v *loadingDevice) Load(image []byte) (driver.Module, error) {
	if err := v.d.before(string(image)); err != nil {
		return nil, err
	}
	return v.Device.Load(image)
}

// TestTypeIsRefused has a rank that cannot load the kernels of some dtypes. All ranks reduce these through the host,
// and others by kernels. They do not try again.
func TestTypeIsRefused(t *testing.T) {
	s := directly(3)
	var tries atomic.Int32
	s.vary = func(o *cuda.Options, r int) {
		o.Driver = &loading{o.Driver, func(image string) error {
			if r == 1 && strings.Contains(image, "c10d_direct_others_") {
				tries.Add(1)
				return errors.New("no room for it")
			}
			return nil
		}}
	}
	w := newWorld(t, s)
	for _, d := range []tensor.DType{tensor.Float32, tensor.Int32, tensor.Int64, tensor.BFloat16} {
		w.each(func(x *rank, r int) error { return x.adds(d, r) })
	}
	require.EqualValues(t, 1, tries.Load())
	w.end()
}

// TestTypesAreLoadedInOrder has a rank that comes late to a call. The other one is at the first reduction of another
// dtype already. It loads nothing before the late one has come: CUDA may wait for its kernel of the first call.
func TestTypesAreLoadedInOrder(t *testing.T) {
	s := directly(2)
	var waits, came, early atomic.Bool
	var once sync.Once
	sent := make(chan struct{})
	s.sent = func(_ string, from, _, _ int) {
		if from == 0 && waits.Load() {
			once.Do(func() { close(sent) })
		}
	}
	s.vary = func(o *cuda.Options, r int) {
		o.Driver = &loading{o.Driver, func(image string) error {
			if strings.Contains(image, "c10d_direct_others_") && !came.Load() {
				early.Store(true)
			}
			return nil
		}}
	}
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error {
		must.Do(x.meetDirectly(r))
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, 8)))
		if r == 1 {
			select {
			case <-sent:
			case <-x.ctx.Done():
				return x.ctx.Err()
			}
		}
		v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{y.t}, backend.AllReduceOptions{}))
		if r == 1 {
			came.Store(true)
		}
		waits.Store(true)
		must.Do(x.adds(tensor.Int32, r))
		return v.Wait(x.ctx)
	})
	require.False(t, early.Load())
	w.end()
}
