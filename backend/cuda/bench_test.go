package cuda_test

import (
	"fmt"
	"testing"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
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
