package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestDirectPlaces: the kernels of all groups of a process but the largest fit on a device at once. Later
// groups have smaller ones, and those for which there is no room go through the host until others have closed.
func TestDirectPlaces(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Devices: 2, Kernels: simkernels.All(), NoCheck: true, Memory: 64 << 20}))
	// The devices have 132 multiprocessors. The largest kernel has 128 blocks, the second 32, the others 16.
	// Three have two lanes of a block for messages; devices of so little memory have no larger ones.
	const most, taken = 7, 32 + 5*16 + 3*2
	open := func(name string) *world {
		w := sharing{size: 2, room: 1 << 20, group: name}.world(t, d)
		w.each(func(x *rank, r int) error {
			return x.allReduces(tensor.Float32, backend.Sum(), []int{100}, r, rand.New(rand.NewPCG(1, uint64(r))))
		})
		return w
	}
	does := func(w *world) backend.Choice { return w.ranks[0].b.Explain().Choices[0] }
	var worlds []*world
	for i := range most {
		worlds = append(worlds, open(fmt.Sprint("group ", i)))
		require.Equal(t, cuda.DirectWork, does(worlds[i]).Algorithm)
	}
	late := open("late")
	require.Equal(t, cuda.HostWork, does(late).Algorithm)
	require.Contains(t, does(late).Why, fmt.Sprintf("rank 0: kernels of other groups of this process, but the largest, take %d blocks", taken))
	require.Contains(t, does(late).Why, "on the 132 multiprocessors of device 0")
	late.end()
	worlds[0].end()
	again := open("again")
	require.Equal(t, cuda.DirectWork, does(again).Algorithm)
	for _, w := range append(worlds[1:], again) {
		w.end()
	}
	require.NoError(t, d.Close())
}
