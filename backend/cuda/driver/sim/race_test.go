//go:build race

package sim_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
)

const racyVariable = "C10D_SIM_RACY"

// TestRaceDetector has another process run a program that lacks an order, with
// the checker off: Go's race detector sees it too, for the streams have nothing
// in common but the memory.
func TestRaceDetector(t *testing.T) {
	if racy := os.Getenv(racyVariable); racy != "" {
		// The detector remembers little: it sees most runs, not each.
		for seed := range uint64(20) {
			lacking(t, racy == "no", seed)
		}
		return
	}
	for _, racy := range []string{"yes", "no"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRaceDetector$")
		cmd.Env = append(os.Environ(), racyVariable+"="+racy)
		out, err := cmd.CombinedOutput()
		if racy == "no" {
			require.NoError(t, err, "%s", out)
			continue
		}
		require.Error(t, err)
		require.Contains(t, string(out), "DATA RACE")
	}
}

// lacking runs two streams on the same memory, with much between that could order
// them by chance: events of others, allocations, and the host's own calls.
func lacking(t *testing.T, ordered bool, seed uint64) {
	h := open(t, sim.Config{NoCheck: true, Seed: seed})
	a, b, c := h.stream(0, "a"), h.stream(0, "b"), h.stream(0, "c")
	x, y := h.alloc(0, 1000), h.alloc(0, 1000)
	require.NoError(t, c.Memset(y.Ptr(), 1, 1000))
	h.order(a, c)
	h.order(b, c)
	require.NoError(t, a.Memset(x.Ptr(), 1, 1000))
	if ordered {
		h.order(b, a)
	}
	h.alloc(0, 10)
	require.NoError(t, b.Memset(x.Ptr(), 2, 1000))
	h.order(c, b)
	require.NoError(t, h.m.Quiesce(h.ctx))
	h.wait(c)
	require.NoError(t, h.close())
}
