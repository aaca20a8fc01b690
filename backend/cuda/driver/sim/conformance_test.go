package sim_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// dirVariable tells a child process where the simulated host's memory is.
const dirVariable = "C10D_SIM_DIR"

func TestMain(m *testing.M) {
	drivertest.Child(func() (driver.Driver, error) {
		return sim.Open(sim.Config{Devices: 2, Dir: os.Getenv(dirVariable), Kernels: kernels()})
	})
	goleak.VerifyTestMain(m)
}

// TestConformance runs the suite on simulated GPUs.
func TestConformance(t *testing.T) {
	for seed := range testsize.Of[uint64](1, 1, 5) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			drivertest.Run(t, drivertest.Config{
				Open: func(t *testing.T) driver.Driver {
					return must.Get(sim.Open(sim.Config{Devices: 2, Seed: seed, Kernels: kernels()}))
				},
				MaxAllocs: -1,
			})
		})
	}
}

// TestConformanceProcesses runs it on GPUs whose memory is in files, with
// another process.
func TestConformanceProcesses(t *testing.T) {
	dir := t.TempDir()
	m, err := sim.New(sim.Config{Dir: dir})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.NoError(t, m.Close())
	drivertest.Run(t, drivertest.Config{
		Open: func(t *testing.T) driver.Driver {
			return must.Get(sim.Open(sim.Config{Devices: 2, Dir: dir, Kernels: kernels()}))
		},
		Child:     func(*testing.T, driver.Driver) []string { return []string{dirVariable + "=" + dir} },
		MaxAllocs: -1,
	})
}
