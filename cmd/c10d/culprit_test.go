//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// stopTimeout is the limit of the operation that a stopped rank of train does not call.
const stopTimeout = 5 * time.Second

// train is a rank as users write them. After some all-reduces the culprit does how.
func train(culprit bool, how string) (err error) {
	ctx := context.Background()
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{Timeout: time.Minute}})
	if err != nil {
		return err
	}
	defer g.Close()
	v := []float32{1, 2, 3}
	t, err := tensor.Of(v, len(v))
	if err != nil {
		return err
	}
	for step := 0; ; step++ {
		if culprit && step == 3 {
			switch how {
			case "panic":
				v[step]++
			case "exit":
				fmt.Fprintln(os.Stderr, "the disk is full")
				os.Exit(7)
			case "return": // as if the rank had done all its steps
				g.Close()
				os.Exit(0)
			case "kill", "stop":
				err := syscall.Kill(os.Getpid(), map[string]syscall.Signal{"kill": syscall.SIGKILL, "stop": syscall.SIGSTOP}[how])
				if err == nil {
					select {} // the signal may take effect a moment later
				}
				return err
			}
		}
		limit := patience
		if how == "stop" && step >= 3 {
			limit = stopTimeout
		}
		w, err := g.AllReduce(ctx, t, pg.Sum(), pg.CallOptions{Timeout: limit})
		if err != nil {
			return err
		}
		if err := w.Wait(ctx); err != nil {
			return err
		}
	}
}

// TestRunCulprit: the launcher names the rank at fault, whichever ends first, and shows
// what it printed: on one node, with a log directory, and on two nodes.
func TestRunCulprit(t *testing.T) {
	const culprit, panicked = 1, "panic: runtime error: index out of range [3] with length 3"
	for _, c := range []struct {
		how, want string
		code      int
		error     string
	}{
		{how: "panic", want: "failed first\n  ended with  exit code 2\n", code: 2, error: panicked},
		{how: "exit", want: "failed first\n  ended with  exit code 7\n", code: 7, error: "the disk is full"},
		{how: "return", want: "failed first\n  ended with  exit code 0\n", code: 99},
		{how: "kill", want: "failed first\n  ended with  signal SIGKILL\n", code: 128 + 9},
		{how: "stop", want: "is at fault\n  state       stopped; the launcher ended it\n", code: 99},
	} {
		check := func(t *testing.T, p *program) {
			require.Equal(t, c.code, p.wait(), p.stderr.String())
			s := p.summary()
			require.Equal(t, culprit, s.First.Rank, p.stderr.String())
			require.Contains(t, p.stderr.String(), fmt.Sprintf("rank %d of 4 %s", culprit, c.want))
			switch {
			case c.error != "":
				require.Contains(t, p.stderr.String(), "  error       "+c.error+"\n")
			case c.how != "kill": // a signal says enough: on busy CPUs no rank names it in the 200 ms that the launcher waits
				require.NotEmpty(t, s.First.NamedBy, p.stderr.String())
			}
		}
		for i := range testsize.Of(1, 1, 5) {
			step := fmt.Sprintf("train:%d:%s", culprit, c.how)
			t.Run(fmt.Sprintf("%s/%d", c.how, i), func(t *testing.T) {
				t.Parallel()
				tmp := t.TempDir()
				p := runRanksWith(t, []string{"TMPDIR=" + tmp}, "-json -n 4", step)
				check(t, p)
				if c.error == panicked {
					require.Contains(t, p.stderr.String(), "[rank1] "+panicked+"\n")
					require.Contains(t, p.stderr.String(), "[rank1] goroutine ")
				}
				require.Empty(t, must.Get(os.ReadDir(tmp)))
			})
			t.Run(fmt.Sprintf("%s/log-dir/%d", c.how, i), func(t *testing.T) {
				if c.error == "" && !testsize.Long() {
					return // the log is empty
				}
				t.Parallel()
				tmp, dir := t.TempDir(), t.TempDir()
				p := runRanksWith(t, []string{"TMPDIR=" + tmp}, "-json -n 4 -log-dir "+dir, step)
				check(t, p)
				log := filepath.Join(dir, "rank1.log")
				require.Contains(t, p.stderr.String(), "  log         "+log+"\n")
				text := must.Get(os.ReadFile(log))
				require.Contains(t, string(text), c.error)
				if c.error == panicked {
					require.Contains(t, string(text), "goroutine ")
				}
				for _, folder := range []string{tmp, dir} {
					require.Empty(t, must.Get(filepath.Glob(filepath.Join(folder, "*c10d*"))))
				}
			})
			t.Run(fmt.Sprintf("%s/nodes/%d", c.how, i), func(t *testing.T) {
				t.Parallel()
				// The culprit is alone on node 0, or one of two on node 1.
				for _, on := range [][2]int{{1, 3}, {2, 2}}[:testsize.Of(1, 1, 2)] {
					for _, p := range nodesOf(t, on, "", step) {
						check(t, p)
					}
				}
			})
		}
	}
}

// TestReport shows a summary whole.
func TestReport(t *testing.T) {
	at := time.Date(2026, 7, 1, 12, 30, 0, 0, time.UTC)
	s := agent.Summary{Ranks: 4, First: &agent.Failure{
		Rank: 1, LocalRank: 1, Host: "h", PID: 42, ExitCode: 2, Time: at, Error: "panic: oops", Log: "logs/rank1.log",
		Crash: []string{"panic: oops", "", "goroutine 1 [running]:"}, Stderr: []string{"main.go:3", "exit status 2"},
		NamedBy: []int{0, 2}, Said: "rank 1 left the group",
	}, Others: []agent.Failure{{Rank: 0, ExitCode: 1, Time: at.Add(-5 * time.Millisecond), Error: "rank 1 left the group"}}}
	require.Equal(t, strings.TrimPrefix(`
rank 1 of 4 failed first
  ended with  exit code 2
  error       panic: oops
  time        2026-07-01 12:30:00.000 UTC
  where       host h, local rank 1, pid 42
  log         logs/rank1.log
  named by    rank 0, 2: rank 1 left the group
  crash       panic: oops
`+"              "+`
              goroutine 1 [running]:
  also        rank 0 at 12:29:59.995, exit code 1: rank 1 left the group
`, "\n"), s.Report())
}
