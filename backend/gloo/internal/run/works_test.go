package run_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
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
	register := func(name string, d tensor.DeviceType, priority int, can func(ts []*tensor.Tensor, op backend.ReduceOp) error) {
		require.NoError(t, run.RegisterTestWork(run.TestWork{
			Name: name, Device: d, Priority: priority, Can: can,
			New: func([]*tensor.Tensor, run.Host) (func(context.Context) error, error) {
				taken.Store(name)
				return func(context.Context) error { return nil }, nil
			},
		}))
	}
	n := int(registrations.Add(1))
	device := tensor.DeviceType(60 + n)
	x := must.Get(tensor.OnDevice(tensor.Float32, foreign{device}, 2))
	ranks(t, mem.NewFabric(), 1, 1, 0, func(t *testing.T, b *gloo.Backend) {
		reduce := func(x *tensor.Tensor, op backend.ReduceOp) error {
			return wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{Op: op}))
		}
		require.ErrorContains(t, reduce(x, backend.Sum()), fmt.Sprintf("unsupported layout strided on device type device(%d)", 60+n))
		cannot := errors.New("no peer access")
		register("direct", device, 2, func([]*tensor.Tensor, backend.ReduceOp) error { return cannot })
		require.ErrorContains(t, reduce(x, backend.Sum()), "direct: no peer access")
		register("staged", device, -5, nil)
		require.NoError(t, reduce(x, backend.Sum()))
		require.Equal(t, "staged", taken.Load())
		cannot = nil
		require.NoError(t, reduce(x, backend.Sum()))
		require.Equal(t, "direct", taken.Load())

		mine := backend.CustomOf("mine", func(a, b float32) float32 { return a })
		isMine := func(_ []*tensor.Tensor, op backend.ReduceOp) error {
			if op != mine {
				return errors.New("for a test")
			}
			return nil
		}
		taken.Store("")
		register(fmt.Sprint("not above gloo's ", n), tensor.CPU, -n, isMine)
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
	x := must.Get(tensor.OnDevice(tensor.Float32, foreign{device}, 2))
	more := 0
	made := func(why string) func([]*tensor.Tensor, run.Host) (func(context.Context) error, error) {
		return func([]*tensor.Tensor, run.Host) (func(context.Context) error, error) { return nil, errors.New(why) }
	}
	require.NoError(t, run.RegisterTestWork(run.TestWork{
		Name: "registers", Device: device, Priority: 1, New: made("cannot be"),
		Can: func([]*tensor.Tensor, backend.ReduceOp) error {
			more--
			w := run.TestWork{Name: fmt.Sprint("more ", -more), Device: device, Priority: more, New: made("made by Can")}
			return errors.Join(errors.New("registers another"), run.RegisterTestWork(w))
		},
	}))
	ranks(t, mem.NewFabric(), 1, 1, 0, func(t *testing.T, b *gloo.Backend) {
		for _, want := range []string{"registers another", "made by Can"} {
			_, err := b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})
			require.ErrorContains(t, err, want)
		}
	})
}
