//go:build unix

package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

func TestNextPause(t *testing.T) {
	const quick = time.Second
	var all []time.Duration
	last := time.Duration(0)
	for range 11 {
		last = nextPause(last, quick)
		all = append(all, last)
	}
	const ms = time.Millisecond
	require.Equal(t, []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms, 25600 * ms, longestPause, longestPause}, all)
	require.Equal(t, firstPause, nextPause(longestPause, healthyAfter))
}

// TestRunPauses: ranks that fail at once are started again after growing pauses, which the log tells.
func TestRunPauses(t *testing.T) {
	j := sh(1, "exit 3")
	j.MaxRestarts = 3
	var said []string
	j.Logf = func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }
	begun := time.Now()
	s, _, _ := run(t, j)
	require.Equal(t, 3, s.Restarts)
	require.GreaterOrEqual(t, time.Since(begun), 700*time.Millisecond)
	require.Equal(t, []string{
		"rank 0 failed (exit code 3); restart 1 of 3 in 100ms",
		"rank 0 failed (exit code 3); restart 2 of 3 in 200ms",
		"rank 0 failed (exit code 3); restart 3 of 3 in 400ms",
	}, said)
}

// TestRunPauseEnds: a signal ends the pause, and no rank is started again.
func TestRunPauseEnds(t *testing.T) {
	for name, elastic := range map[string]bool{"all": false, "elastic": true} {
		t.Run(name, func(t *testing.T) {
			starts := filepath.Join(t.TempDir(), "starts")
			j := sh(1, fmt.Sprintf("echo x >>%s; exit 3", starts))
			j.MaxRestarts = 100
			if elastic {
				j.Least, j.Most = 1, 1
			}
			signals := make(chan os.Signal, 1)
			j.Signals = signals
			var once sync.Once
			j.Logf = func(format string, args ...any) {
				if text := fmt.Sprintf(format, args...); strings.Contains(text, "800ms") {
					once.Do(func() { signals <- syscall.SIGTERM })
				}
			}
			s, _, _ := run(t, j)
			require.Equal(t, "SIGTERM", s.Signal)
			require.NotZero(t, s.ExitCode)
			require.Equal(t, 4, strings.Count(string(must.Get(os.ReadFile(starts))), "x"))
		})
	}
}

// TestPauseOfNodes: a signal on any node ends the pause on all.
func TestPauseOfNodes(t *testing.T) {
	const nodes = 3
	for signalled := range nodes {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		shared := store.NewHash()
		defer shared.Close()
		shared.SetTimeout(-1)
		var all errgroup.Group
		for n := range nodes {
			signals := make(chan os.Signal, 1)
			if n == signalled {
				signals <- syscall.SIGTERM
			}
			a := &agent{Job: Job{Nodes: nodes, NodeRank: n, Procs: 1, MasterAddr: "127.0.0.1", Signals: signals, Logf: t.Logf}, nodes: shared, base: n, size: nodes}
			all.Go(func() error {
				end, _, _, err := a.attempt(ctx, 1, time.Hour)
				if err == nil && (!end.Last || end.First == nil || end.First.Rank != signalled || end.First.Signal != "SIGTERM") {
					err = fmt.Errorf("node %d: %+v", n, end)
				}
				return err
			})
		}
		require.NoError(t, all.Wait())
	}
}
