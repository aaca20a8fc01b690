package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestKernelsAreThere holds that a group finds its kernels loaded when its first operation
// begins. Groups on the same devices share them, and they are gone with the driver.
func TestKernelsAreThere(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Devices: 2, Kernels: simkernels.All()}))
	made := func() int { return d.Machine().Stats().MadeModules }
	for _, group := range []string{"a", "b"} {
		w := sharing{group: group, size: 3, room: 64 << 10}.world(t, d)
		require.Equal(t, 2, made(), "one a device")
		w.each(func(x *rank, r int) error {
			return x.allReduces(tensor.Float32, backend.Sum(), []int{100}, r, rand.New(rand.NewPCG(1, uint64(r))))
		})
		require.Equal(t, cuda.HostWork, w.ranks[0].b.Explain().Choices[0].Algorithm)
		require.Equal(t, 2, made(), "none by an operation")
		w.end()
	}
	require.Zero(t, d.Machine().Stats().Modules)
	require.NoError(t, d.Close())
}

// half is a driver that has two devices of four.
type half struct {
	driver.Driver
	kept atomic.Int32
}

func (h *half) Count() int { return 2 }

func (h *half) Keep(image []byte, functions ...string) { h.kept.Add(1) }

// TestKernelsOfPairsAreThere is TestKernelsAreThere for ranks of which each sees two devices, not all the
// same. There are as many devices as ranks, so the kernels of direct work are loaded before the first
// operation.
func TestKernelsOfPairsAreThere(t *testing.T) {
	for name, pairs := range map[string]int32{"all see the same": 1, "two pairs": 2} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			defer cuda.SetVisibleDevices(func() string { return fmt.Sprint(asked.Add(1) % pairs) })()
			s := directly(4)
			var all [4]*half
			s.vary = func(o *cuda.Options, r int) {
				all[r] = &half{Driver: o.Driver}
				o.Driver = all[r]
			}
			w := newWorld(t, s)
			for _, h := range all {
				require.Equal(t, pairs > 1, h.kept.Load() > 1, "besides those that bring elements in order")
			}
			w.end()
		})
	}
}

// TestOwnDevice has eight ranks dealt out to two hosts in turn, whose tensors are in CPU memory. Each rank's
// copies go to a device of its own on its host.
func TestOwnDevice(t *testing.T) {
	var turn [8]chan struct{}
	for r := range turn {
		turn[r] = make(chan struct{})
	}
	close(turn[0])
	var asked atomic.Int32
	defer cuda.SetHostIdentity(func() [32]byte {
		n := asked.Add(1) - 1 // once in a rank, and again after they have met
		if n < 7 {
			defer close(turn[n+1])
		}
		return [32]byte{byte(n % 2)}
	})()
	s := setup{size: 8, sim: sim.Config{Devices: 4, Kernels: simkernels.All()}}
	s.vary = func(_ *cuda.Options, r int) { <-turn[r] }
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error {
		if dev := x.b.OwnDevice(); dev != r/2 {
			return fmt.Errorf("it has device %d of its host, want %d", dev, r/2)
		}
		return nil
	})
	w.end()
}

// TestPackKernelsAreThere is TestKernelsAreThere for a group of several hosts, in which
// kernels only bring elements in order.
func TestPackKernelsAreThere(t *testing.T) {
	var hosts atomic.Int32
	defer cuda.SetHostIdentity(func() [32]byte { return [32]byte{byte(hosts.Add(1))} })()
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1, Kernels: simkernels.All()}})
	before := w.m.Stats()
	require.Equal(t, 2, before.MadeModules, "one a process")
	w.each(func(x *rank, r int) error {
		x.layout = new(int)
		*x.layout = 3
		p := program{name: "all_reduce", dtype: tensor.Float64, n: []int{500, 0, 0}}
		return x.collectives([]program{p}, rand.New(rand.NewPCG(1, uint64(r))), r)
	})
	after := w.m.Stats()
	require.Equal(t, 2, after.MadeModules)
	require.Less(t, after.Operations-before.Operations, 100, "kernels, not copies")
	w.end()
}
