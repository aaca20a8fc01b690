package cuda_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

// adds has a rank all-reduce a dtype on the device and on the CPU, which must agree.
func (x *rank) adds(d tensor.DType, r int) error {
	return x.allReduces(d, backend.Sum(), []int{100}, r, rand.New(rand.NewPCG(1, uint64(r))))
}

// TestTypesAreLoaded has groups load all kernels when they are made. No call loads any: a group's kernels may wait for a
// rank whose process is loading.
func TestTypesAreLoaded(t *testing.T) {
	for name, s := range map[string]setup{"2 ranks": directly(2), "3 ranks": directly(3), "clusters": clustered(2, 1)} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, s)
			made := w.m.Stats().MadeModules
			for _, d := range []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Int32, tensor.Float64, tensor.Uint8} {
				w.each(func(x *rank, r int) error { return x.adds(d, r) })
			}
			require.Equal(t, made, w.m.Stats().MadeModules)
			w.end()
		})
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

// TestTypeIsRefused has a rank that cannot load the kernels of some dtypes. All ranks reduce every dtype through the host,
// and do not try again.
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
