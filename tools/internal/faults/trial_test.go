package faults

import (
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestSoak runs a short soak on each wire.
func TestSoak(t *testing.T) {
	if _, err := exec.LookPath("kill"); err != nil || runtime.GOOS != "linux" {
		t.Skip("signals of Unix, and Linux's /proc, are needed: not promised")
	}
	for _, w := range []Wire{Memory, TCP, Gloo} {
		soak := RandomSoak(w, 1, 5*time.Second)
		t.Run(soak.String(), func(t *testing.T) {
			t.Parallel()
			x := must.Get(soak.Run(t.Context()))
			require.Empty(t, x.Problems)
			t.Logf("%d epochs", x.Epochs)
		})
	}
}
