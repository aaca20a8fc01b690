package cuda_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// byHost has all ranks sum a tensor, which goes by way, and not from device to device for a reason.
func byHost(t *testing.T, s setup, way string, reasons ...string) {
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error {
		for range 2 {
			p := must.Get(x.pairOf(random(t, uint64(r)), tensor.Float32, r, flat(300), true))
			must.Do(x.allReduced(p))
		}
		c := x.does(work.AllReduce)
		if c.Algorithm != way {
			return fmt.Errorf("it goes by %s: %s", c.Algorithm, c.Why)
		}
		for _, reason := range reasons {
			if !strings.Contains(c.Why, reason) {
				return fmt.Errorf("it goes by %s: %q does not say %q", c.Algorithm, c.Why, reason)
			}
		}
		return nil
	})
	w.end()
}

// TestPeerAccessThatLies has devices that are said to reach each other, but lose what one writes to another. The
// ranks find out when they connect, and go another way.
func TestPeerAccessThatLies(t *testing.T) {
	s := directly(3)
	s.sim.Topology.Loses = func(from, to int) bool { return from == 2 && to == 0 }
	byHost(t, s, cuda.RingWork, "rank 2", "does not come", "rank 0", "ring of the ranks [0 2 1]")
	s.sim.Topology.Loses = func(from, to int) bool { return from == 2 || to == 2 }
	byHost(t, s, cuda.ClustersWork, "does not come", "the devices of ranks 0-1 reach each other")
	s.sim.Topology.Loses = func(from, to int) bool { return true }
	byHost(t, s, cuda.HostWork, "rank 0", "does not come", "rank 1")
	s = clustered(2, 2)
	s.sim.Topology.Loses = func(from, to int) bool { return from == 1 }
	byHost(t, s, cuda.ClustersWork)
}

// TestNoPeerAccess switches kernels that write to other devices off.
func TestNoPeerAccess(t *testing.T) {
	t.Setenv("C10D_CUDA_P2P", "0")
	byHost(t, directly(2), cuda.HostWork, "C10D_CUDA_P2P is 0")
	byHost(t, clustered(2, 2), cuda.ClustersWork)
	t.Setenv("C10D_CUDA_P2P", "off")
	_, err := cuda.New(t.Context(), backend.Options{Size: 1})
	require.ErrorContains(t, err, `C10D_CUDA_P2P is "off", want 0 or 1`)
}
