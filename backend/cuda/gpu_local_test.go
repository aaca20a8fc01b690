package cuda_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/tensor"
)

// everyLocal does every operation of a Local on five tensors of every dtype and with every
// operator, with each root in turn.
func everyLocal(t *testing.T, d driver.Driver, counts ...int) {
	const tensors = 5
	ops := append(deviceOps[:len(deviceOps):len(deviceOps)], backend.PreMulSum(2), greatest)
	done := 0
	for _, dt := range tensor.DTypes() {
		for _, n := range counts {
			x := localsOn(t, d, tensors, dt, n, rand.New(rand.NewPCG(uint64(n), uint64(dt))))
			run := func(kind string, op backend.ReduceOp) {
				root := done % tensors
				done++
				require.NoError(t, localProgram(kind, root, op)(x), "%s of %d x %v, root %d, %v", kind, n, dt, root, op)
			}
			run("broadcast", backend.Sum())
			if _, err := backend.Max().Reduction(dt, tensors); err == nil {
				run("from", backend.Sum())
			}
			for _, op := range ops {
				if _, err := op.Reduction(dt, tensors); err != nil {
					continue
				}
				run("reduce", op)
				run("all-reduce", op)
				run("to", op)
			}
			require.NoError(t, x.free())
		}
	}
	t.Logf("%d operations", done)
}

// TestGPULocal uses all devices of the process.
func TestGPULocal(t *testing.T) {
	d := openGPU(t)
	everyLocal(t, d, 1, 1023, 100_003)
	require.NoError(t, d.Close())
}

// TestSimulatedLocal is TestGPULocal on simulated devices, with kernels and without.
func TestSimulatedLocal(t *testing.T) {
	for seed, kernels := range []map[string]sim.Kernel{nil, simkernels.All()} {
		d, err := sim.Open(sim.Config{Devices: 3, Seed: uint64(seed), Kernels: kernels})
		require.NoError(t, err)
		everyLocal(t, d, 255)
		closeSim(t, d)
	}
}
