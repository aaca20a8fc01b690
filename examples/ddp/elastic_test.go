//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store/tcp"
)

var kills = flag.Int("elastic.kills", 3, "TestElastic kills and replaces `n` ranks")

// stepTime makes a training last for two minutes, or until the file of paced exists. On a busy host ranks take so long to
// die and come back.
const stepTime = "1s"

// trainers are the processes of an elastic training.
type trainers struct {
	t       *testing.T
	init    string
	env     []string
	live    []*exec.Cmd
	sizes   chan int // of the group, after each change
	mu      sync.Mutex
	log     bytes.Buffer
	reports chan string
	done    sync.WaitGroup
}

// changed finds the line that rank 0 writes when the group has changed.
var changed = regexp.MustCompile(`step \d+: (\d+) ranks, members`)

// note takes a line that a rank writes.
func (j *trainers) note(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.log.WriteString(line)
	if m := changed.FindStringSubmatch(line); m != nil {
		n, _ := strconv.Atoi(m[1])
		j.sizes <- n
	}
}

func (j *trainers) start(rank int, args ...string) {
	cmd := program(j.t, append([]string{"-elastic", "-init", j.init, "-timeout", "20s", "-step-time", stepTime}, args...)...)
	cmd.Env = append(append(cmd.Env, j.env...), "RANK="+strconv.Itoa(rank))
	errs, err := cmd.StderrPipe()
	require.NoError(j.t, err)
	var out bytes.Buffer
	cmd.Stdout = &out
	require.NoError(j.t, cmd.Start())
	j.done.Go(func() {
		for lines := bufio.NewScanner(errs); lines.Scan(); {
			j.note(fmt.Sprintf("%d: %s\n", cmd.Process.Pid, lines.Text()))
		}
		cmd.Wait()
		j.reports <- out.String()
	})
	j.t.Cleanup(func() { cmd.Process.Kill() })
	j.live = append(j.live, cmd)
}

// reach waits until the group has a size.
func (j *trainers) reach(size int) {
	j.t.Helper()
	late := time.After(time.Minute)
	for {
		select {
		case n := <-j.sizes:
			if n == size {
				return
			}
		case <-late:
			j.mu.Lock()
			defer j.mu.Unlock()
			require.Fail(j.t, "the group does not change", "to %d ranks:\n%s", size, j.log.String())
		}
	}
}

// await waits for a text.
func (j *trainers) await(text string) {
	j.t.Helper()
	require.Eventually(j.t, func() bool {
		j.mu.Lock()
		defer j.mu.Unlock()
		return strings.Contains(j.log.String(), text)
	}, time.Minute, 5*time.Millisecond)
}

// TestElastic kills ranks of a training, and starts others in their place. The training loses no step
// and counts none twice. Its result is that of an undisturbed one.
func TestElastic(t *testing.T) {
	t.Parallel()
	const epochs = 6
	flag := fmt.Sprint("-epochs=", epochs)
	undisturbed := demo(t, 4, flag)
	for _, name := range []string{"tcp", "redis"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &trainers{t: t, init: "env://", sizes: make(chan int, 1000), reports: make(chan string, 1000)}
			server, err := tcp.Listen(t.Context(), "127.0.0.1:0")
			require.NoError(t, err)
			defer server.Close()
			host, port, _ := strings.Cut(server.Addr().String(), ":")
			fast := filepath.Join(t.TempDir(), "fast")
			j.env = []string{paced + "=" + fast, "WORLD_SIZE=3", "MASTER_ADDR=" + host, "MASTER_PORT=" + port, "TORCHELASTIC_USE_AGENT_STORE=True"}
			if name == "redis" {
				j.init = startRedis(t) + "?prefix=elastic"
			}
			for rank := range 3 {
				j.start(rank, flag)
			}
			random := must.Rand(t)
			j.start(0, flag, "-join") // the fourth
			j.reach(4)
			for range *kills {
				k := random.IntN(len(j.live))
				time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond) // any moment of a step
				require.NoError(t, j.live[k].Process.Signal(syscall.SIGKILL))
				j.live = append(j.live[:k], j.live[k+1:]...)
				j.reach(3)
				j.start(0, flag, "-join")
				j.reach(4)
			}
			require.NoError(t, os.WriteFile(fast, nil, 0o644))
			j.done.Wait()
			close(j.reports)
			var text string
			for r := range j.reports {
				text += r
			}
			require.NotEmpty(t, text, "%s", j.log.String())
			r := parseReport(t, []byte(text))
			require.Equal(t, 4, r.Ranks)
			require.True(t, r.ParamsIdentical)
			require.Equal(t, epochs*1438, r.Images, "each image once in each epoch\n%s", j.log.String())
			require.InDelta(t, undisturbed.Accuracy, r.Accuracy, 0.01)
			require.InDelta(t, undisturbed.Loss, r.Loss, 0.01)
		})
	}
}

// Write is for the output of agents.
func (j *trainers) Write(line []byte) (int, error) {
	j.note(string(line))
	return len(line), nil
}

// TestElasticLaunchers: two launchers start the ranks. Each starts the ranks that fail again, and not
// the others.
func TestElasticLaunchers(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"tcp", "redis"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &trainers{t: t, sizes: make(chan int, 1000)}
			pids, fast := t.TempDir(), filepath.Join(t.TempDir(), "fast")
			self, err := os.Executable()
			require.NoError(t, err)
			init := "env://"
			if name == "redis" {
				init = startRedis(t)
			}
			host, port, _ := net.SplitHostPort(freeport.Loopback(t))
			job := agent.Job{
				Command: []string{self, "-elastic", "-epochs", "5", "-init", init, "-step-time", stepTime, "-timeout", "20s"},
				Procs:   2, Nodes: 2, MasterAddr: host, Least: 2, Most: 4, MaxRestarts: 2, Stderr: j,
				Env:  append(os.Environ(), asProgram+"=1", pidsIn+"="+pids, paced+"="+fast),
				Logf: func(format string, args ...any) { j.note(fmt.Sprintf("launcher: "+format+"\n", args...)) },
			}
			job.MasterPort, err = strconv.Atoi(port)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			var out [2]bytes.Buffer
			var done sync.WaitGroup
			for node := range out {
				mine := job
				mine.NodeRank, mine.Stdout, mine.NoPrefix = node, &out[node], true
				done.Go(func() {
					s, err := agent.Run(ctx, mine)
					if err != nil || !s.OK || s.Restarts != 1 {
						t.Errorf("node %d: %v, %+v", node, err, s)
					}
				})
			}
			for i, rank := range []string{"3", "0"} {
				if i == 0 {
					j.await("the training has begun") // all are in the group
				}
				text, err := os.ReadFile(filepath.Join(pids, rank))
				require.NoError(t, err)
				pid, err := strconv.Atoi(string(text))
				require.NoError(t, err)
				require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
				j.reach(4)
			}
			require.NoError(t, os.WriteFile(fast, nil, 0o644))
			done.Wait()
			r := parseReport(t, append(out[0].Bytes(), out[1].Bytes()...))
			require.Equal(t, 4, r.Ranks)
			require.True(t, r.ParamsIdentical)
			require.Equal(t, 5*1438, r.Images)
			log := j.log.String()
			for _, want := range []string{
				"launcher: rank 3 failed (signal SIGKILL): it is started again", "launcher: rank 3: restart 1 of 2",
				"launcher: rank 0 failed (signal SIGKILL): it is started again", "launcher: rank 0: restart 1 of 2",
				" 3 left", "4 came (rank 3 of this launcher)", " 0 left", "5 came (rank 0 of this launcher)", // why, if nobody came at once
			} {
				require.Contains(t, log, want)
			}
		})
	}
}
