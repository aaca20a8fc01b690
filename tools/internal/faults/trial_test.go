package faults

import (
	"flag"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

var trials = flag.Int("faults.trials", 1, "`n` trials on each wire")

// TestTrials runs jobs that go on after several faults. "tools faults -trials 300" runs more.
func TestTrials(t *testing.T) {
	if _, err := exec.LookPath("kill"); err != nil || runtime.GOOS == "windows" {
		t.Skip("signals of Unix are needed")
	}
	for _, w := range []Wire{Memory, TCP, Gloo} {
		for seed := range uint64(*trials) {
			trial := RandomTrial(w, seed)
			t.Run(trial.String(), func(t *testing.T) {
				t.Parallel()
				x := must.Get(trial.Run(t.Context()))
				require.Empty(t, x.Problems)
				t.Logf("%d epochs", x.Epochs)
			})
		}
	}
}

// TestRandomTrialIsRepeatable: a seed says all of a trial.
func TestRandomTrialIsRepeatable(t *testing.T) {
	for seed := range uint64(200) {
		a, b := RandomTrial(TCP, seed), RandomTrial(TCP, seed)
		require.Equal(t, a, b)
		require.NotEmpty(t, a.Events)
	}
}
