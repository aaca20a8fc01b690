package cuda_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
)

// BenchmarkAllReduce is what the backend and the simulator cost by themselves, in
// a group of one: what goes over no wire.
func BenchmarkAllReduce(b *testing.B) {
	for _, bytes := range []int{1 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprint(bytes), func(b *testing.B) {
			w := newWorld(b, setup{size: 1, sim: sim.Config{NoDelays: true, NoCheck: true}})
			x := w.ranks[0]
			v, err := x.d.Device(0)
			if err != nil {
				b.Fatal(err)
			}
			m, err := v.Alloc(bytes)
			if err != nil {
				b.Fatal(err)
			}
			x.close = append(x.close, m)
			d, err := tensor.OnDevice(tensor.Float32, cuda.OnStream(m, x.stream[0]), bytes/4)
			if err != nil {
				b.Fatal(err)
			}
			ts := []*tensor.Tensor{d}
			b.SetBytes(int64(bytes))
			b.ReportAllocs()
			for b.Loop() {
				k, err := x.b.AllReduce(b.Context(), ts, backend.AllReduceOptions{})
				if err == nil {
					err = k.Synchronize(x.stream[0])
				}
				if err == nil {
					err = k.Wait(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			w.ctx = b.Context()
			w.end()
		})
	}
}

// free is a stream whose launches and events cost nothing, and whose events have passed. It is in a
// capture, so that nobody waits for what kernels tell.
type free struct {
	driver.Stream
	driver.Capturer
}

func (free) Capturing() bool { return true }

func (free) Launch(*driver.Launch) error   { return nil }
func (free) Record() (driver.Event, error) { return passed{}, nil }
func (free) Wait(driver.Event) error       { return nil }

type passed struct{}

func (passed) Done() (bool, error)        { return true, nil }
func (passed) Sync(context.Context) error { return nil }
func (passed) Release()                   {}

// BenchmarkDirectCall is what direct work costs the host beside the driver's calls: an all-reduce in
// a stream of the caller, with and without a wait.
func BenchmarkDirectCall(b *testing.B) {
	for _, wait := range []bool{false, true} {
		b.Run(map[bool]string{false: "call", true: "call and wait"}[wait], func(b *testing.B) {
			o := directly(2)
			o.sim.NoDelays, o.sim.NoCheck = true, true
			w := newWorld(b, o)
			w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
			x := w.ranks[0]
			y, err := x.vector(tensor.Float32, 0, make([]byte, 1<<10))
			require.NoError(b, err)
			ctx, ts := cuda.InStream(x.ctx, free{Stream: x.stream[0]}), []*tensor.Tensor{y.t}
			b.ReportAllocs()
			for b.Loop() {
				k, err := x.b.AllReduce(ctx, ts, backend.AllReduceOptions{})
				if err == nil && wait {
					err = k.Wait(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			w.end()
		})
	}
}
