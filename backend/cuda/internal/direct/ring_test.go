package direct_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/tensor"
)

// Tests of calls round a ring on simulated devices. ring_model_test.go has a model of the real protocol.

// ringSetup is that of ranks which map the next one's memory only.
func ringSetup(ranks int) setup {
	u := simulated(ranks)
	u.window = window.Options{RingChannels: 1, Next: true}
	u.most = 9000 // of two slots and more
	return u
}

// ringHost is a simulated host whose devices reach those for which reach says so.
func ringHost(t *testing.T, ranks int, seed uint64, reach func(a, b int) bool) *sim.Machine {
	t.Helper()
	m, err := sim.New(sim.Config{
		Devices: ranks, Seed: seed, Kernels: simkernels.All(),
		Topology: sim.Topology{NoPeer: func(a, b int) bool { return !reach(a, b) }},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// beside reports whether two of so many devices are next to each other.
func beside(ranks int) func(a, b int) bool {
	return func(a, b int) bool { return (a-b+ranks)%ranks == 1 || (b-a+ranks)%ranks == 1 }
}

func everywhere(int, int) bool { return true }

// TestRing has random calls round rings: of devices that reach their neighbours only, all but one pair, or all of them.
func TestRing(t *testing.T) {
	for _, c := range []struct {
		name  string
		ranks int
		reach func(a, b int) bool
	}{
		{"neighbours only", 4, beside(4)},
		{"neighbours only", 6, beside(6)},
		{"neighbours only", 8, beside(8)},
		{"one missing pair", 4, func(a, b int) bool { return a+b != 1 }},
		{"all", 2, everywhere},
		{"all", 3, everywhere},
		{"all", 12, everywhere},
		{"all", 16, everywhere},
	} {
		for _, apart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s of %d, apart %v", c.name, c.ranks, apart), func(t *testing.T) {
				u := ringSetup(c.ranks)
				if c.ranks > 8 {
					u.rounds /= 4
				}
				threads(t, u, drivers(t, ringHost(t, c.ranks, uint64(c.ranks), c.reach), c.ranks, apart), jobs["check"])
			})
		}
	}
}

// TestRingBesideMesh has random calls, some round the ring of a window whose ranks reach all others.
func TestRingBesideMesh(t *testing.T) {
	for _, ranks := range []int{2, 4, 8} {
		u := simulated(ranks)
		u.window.RingChannels = 2
		u.rounds *= 2
		threads(t, u, drivers(t, machine(t, ranks, 3), ranks, ranks == 4), jobs["check"])
	}
}

// TestRingSeeds has few random calls with each of many orders in which the devices do their work.
func TestRingSeeds(t *testing.T) {
	for seed := range testsize.Of(4, 4, 40) {
		ranks := []int{4, 6, 8, 12}[seed%4]
		reach := beside(ranks)
		if ranks == 12 {
			reach = everywhere
		}
		u := ringSetup(ranks)
		u.rounds, u.most = 1, 5000
		threads(t, u, drivers(t, ringHost(t, ranks, uint64(seed), reach), ranks, seed%3 > 0), jobs["check"])
	}
}

// TestRingReplays replays a captured all_reduce that goes round a ring, with eager ones of other sizes between.
func TestRingReplays(t *testing.T) {
	u := ringSetup(4)
	d := drivers(t, ringHost(t, 4, 5, beside(4)), 4, true)
	threads(t, u, d, func(m *member) error { return replay(m, 3000, 50) })
}

// TestRingFailure has ranks that wait for one that does not come, and ranks that are aborted. They name the one before
// them, for which they wait.
func TestRingFailure(t *testing.T) {
	const ranks = 4
	for _, aborts := range []bool{false, true} {
		u := ringSetup(ranks)
		if !aborts {
			u.direct.Limit = 10 * time.Millisecond
		}
		host := func(t *testing.T) []driver.Driver {
			return drivers(t, ringHost(t, ranks, 1, beside(ranks)), ranks, false)
		}
		virtually(t, u, host, func(m *member) error {
			mem := must.Get(m.v.Alloc(1 << 10))
			defer mem.Close()
			must.Do(errors.Join(m.s.Memset(mem.Ptr(), 1, 1<<10), m.sync(), m.meet()))
			sum := func() error {
				return m.c.AllReduce(m.s, mem.Ptr(), mem.Ptr(), 4, tensor.Int64, backend.Sum(), direct.Form{Ring: true})
			}
			if m.rank != 1 {
				must.Do(sum())
				if aborts {
					m.w.Abort()
				}
				order := m.c.Order()
				before := order[(slices.Index(order, m.rank)+ranks-1)%ranks]
				err := m.sync()
				var f *window.Failure
				if !errors.As(err, &f) || f.Rank != m.rank || f.Peer != before || f.Aborted != aborts {
					return fmt.Errorf("a wait for rank %d: %w", before, err)
				}
				if err := sum(); !errors.As(err, &f) {
					return fmt.Errorf("a call after a failure: %w", err)
				}
			}
			must.Do(m.w.Reset(m.ctx, m.tell))
			return errors.Join(sum(), m.sync(), m.meet())
		})
	}
}

// TestRingShape holds that a launch has no more warps than channels and tiles, and no more blocks than it may.
func TestRingShape(t *testing.T) {
	for _, n := range []int{1, 2048, 2049, 16 << 10, 1 << 20, 5 << 20, 1 << 30} {
		for _, channels := range []int{1, 3, 8, 100, 2048} {
			for _, blocks := range []int{1, 2, 16, 128} {
				s := direct.RingShape(n, blocks, channels)
				tiles := (n + window.RingSlotBytes - 1) / window.RingSlotBytes
				require.LessOrEqual(t, s.Channels(), min(channels, tiles))
				require.LessOrEqual(t, s.Blocks, blocks)
				require.Positive(t, s.Channels())
				require.LessOrEqual(t, s.Threads, 512)
				if min(channels, tiles)%16 == 0 {
					require.Equal(t, min(channels, tiles, 16*blocks), s.Channels())
				}
			}
		}
	}
}

// TestNoRing holds that a call round a ring that is not there is refused.
func TestNoRing(t *testing.T) {
	threads(t, simulated(2), drivers(t, machine(t, 2, 1), 2, true), func(m *member) error {
		var p driver.Ptr = 1 << 20
		if err := m.c.AllReduce(m.s, p, p, 1, tensor.Int8, backend.Sum(), direct.Form{Ring: true}); err == nil {
			return errors.New("a ring that is not there")
		}
		return nil
	})
}
