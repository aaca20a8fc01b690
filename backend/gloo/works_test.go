package gloo_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/allreduce"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/tensor"
)

// foreign is the memory of a device type that gloo does not know.
type foreign struct{ tensor.DeviceType }

func (f foreign) Device() tensor.Device { return tensor.Device{Type: f.DeviceType} }
func (foreign) Len() int                { return 8 }

// registrations counts the tests that registered works: a registry has no way to take them back, and
// a test may run more than once.
var registrations atomic.Int32

// TestRegisteredWorks: a call goes to the registered work of the highest priority that can do it. On
// the CPU only a work of a higher priority than gloo's own comes first.
func TestRegisteredWorks(t *testing.T) {
	var taken atomic.Value // the name of the work that was made last
	register := func(name string, d tensor.DeviceType, priority int, can func(c *allreduce.Call) error) {
		require.NoError(t, allreduce.Register(allreduce.Work{
			Name: name, Device: d, Priority: priority, Can: can,
			New: func(*allreduce.Call) (allreduce.Runner, error) {
				taken.Store(name)
				return runner(func(context.Context) error { return nil }), nil
			},
		}))
	}
	n := int(registrations.Add(1))
	device := tensor.DeviceType(60 + n)
	x, err := tensor.OnDevice(tensor.Float32, foreign{device}, 2)
	require.NoError(t, err)
	ranks(t, mem.NewFabric(), 1, 1, 0, func(t *testing.T, b *gloo.Backend) {
		reduce := func(x *tensor.Tensor, op backend.ReduceOp) error {
			return wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{Op: op}))
		}
		require.ErrorContains(t, reduce(x, backend.Sum()), fmt.Sprintf("unsupported layout strided on device type device(%d)", 60+n))
		cannot := errors.New("no peer access")
		register("direct", device, 2, func(*allreduce.Call) error { return cannot })
		require.ErrorContains(t, reduce(x, backend.Sum()), "direct: no peer access")
		register("staged", device, -5, nil)
		require.NoError(t, reduce(x, backend.Sum()))
		require.Equal(t, "staged", taken.Load())
		cannot = nil
		require.NoError(t, reduce(x, backend.Sum()))
		require.Equal(t, "direct", taken.Load())

		mine := backend.CustomOf("mine", func(a, b float32) float32 { return a })
		isMine := func(c *allreduce.Call) error {
			if c.Op != mine {
				return errors.New("for a test")
			}
			return nil
		}
		taken.Store("")
		register(fmt.Sprint("not above gloo's ", n), tensor.CPU, 1-n, isMine)
		require.NoError(t, reduce(vec(1), mine))
		require.Empty(t, taken.Load())
		above := fmt.Sprint("above gloo's ", n)
		register(above, tensor.CPU, 2+n, isMine)
		require.NoError(t, reduce(vec(1), mine))
		require.Equal(t, above, taken.Load())
	})
}

// TestCanMayRegister: nothing is locked while a work says whether it can do a call.
func TestCanMayRegister(t *testing.T) {
	device := tensor.DeviceType(60 + registrations.Add(1))
	x, err := tensor.OnDevice(tensor.Float32, foreign{device}, 2)
	require.NoError(t, err)
	more := 0
	require.NoError(t, allreduce.Register(allreduce.Work{
		Name: "registers", Device: device, Priority: 1,
		Can: func(c *allreduce.Call) error {
			more--
			w := allreduce.Work{Name: fmt.Sprint("more ", -more), Device: device, Priority: more}
			w.New = func(*allreduce.Call) (allreduce.Runner, error) { return nil, errors.New("made by Can") }
			return errors.Join(errors.New("registers another"), allreduce.Register(w))
		},
		New: func(*allreduce.Call) (allreduce.Runner, error) { return nil, errors.New("cannot be") },
	}))
	ranks(t, mem.NewFabric(), 1, 1, 0, func(t *testing.T, b *gloo.Backend) {
		for _, want := range []string{"registers another", "made by Can"} {
			_, err := b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})
			require.ErrorContains(t, err, want)
		}
	})
}
