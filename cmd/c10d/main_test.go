//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/sockets"
	"github.com/c10d-go/c10d/internal/testcerts"
	"github.com/c10d-go/c10d/internal/torchtest"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store/tcp"
)

// patience bounds every wait of these tests. A process may take tens of seconds
// to import PyTorch.
const patience = 3 * time.Minute

// TestMain makes the test binary the program, or a rank that the program runs.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && (os.Args[1] == "guard" || os.Args[1] == "doctor" || os.Args[1] == "bench"), os.Getenv("C10D_TEST") == "torchrun",
		os.Getenv("C10D_TEST") == "c10d" && os.Getenv("RANK") == "":
		main()
	case os.Getenv("C10D_TEST") == "c10d":
		testRank(os.Args[1:])
	default:
		os.Exit(m.Run())
	}
}

// testRank does one step after the other: "print:TEXT", "fail:RANK:CODE" and so on.
func testRank(steps []string) {
	rank := os.Getenv("RANK")
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "test rank:", err)
			os.Exit(99)
		}
	}
	trapped := make(chan os.Signal, 1)
	for _, step := range steps {
		step = strings.ReplaceAll(step, "%r", rank)
		verb, arg, _ := strings.Cut(step, ":")
		who, what, _ := strings.Cut(arg, ":")
		if strings.HasPrefix(verb, "only-") {
			if verb = verb[len("only-"):]; who != rank {
				continue
			}
			arg = what
		}
		switch verb {
		case "print":
			fmt.Print(strings.ReplaceAll(arg, "|", "\n"))
		case "complain":
			fmt.Fprint(os.Stderr, strings.ReplaceAll(arg, "|", "\n"))
		case "long":
			n, err := strconv.Atoi(arg)
			check(err)
			fmt.Println(strings.Repeat("x", n))
		case "exit":
			code, err := strconv.Atoi(arg)
			check(err)
			os.Exit(code)
		case "die":
			n, err := strconv.Atoi(arg)
			check(err)
			check(syscall.Kill(os.Getpid(), syscall.Signal(n)))
			select {}
		case "reason":
			check(os.WriteFile(os.Getenv("TORCHELASTIC_ERROR_FILE"), []byte(arg), 0o600))
		case "restarted": // exits unless this is the second attempt
			if os.Getenv("TORCHELASTIC_RESTART_COUNT") != "1" {
				os.Exit(5)
			}
		case "child": // a process in the rank's group, which prints its number
			cmd := exec.Command("sleep", "600")
			check(cmd.Start())
			fmt.Println("child", cmd.Process.Pid)
		case "pid":
			fmt.Println("pid", os.Getpid())
		case "hold":
			fmt.Println("pid", os.Getpid())
			time.Sleep(10 * patience)
		case "trap":
			signal.Notify(trapped, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			fmt.Println("pid", os.Getpid())
		case "got": // waits for a signal and says which
			fmt.Println("got", <-trapped)
			signal.Stop(trapped)
		case "ignore":
			signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
		case "store": // all ranks meet in the store that the environment names
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			e, err := launch.Detect(os.Getenv)
			check(err)
			if !e.AgentStore {
				check(fmt.Errorf("no agent's store: %v", e))
			}
			addr, err := e.Address()
			check(err)
			s, err := tcp.New(ctx, addr, tcp.Options{WorldSize: e.Size})
			check(err)
			n, err := s.Add(ctx, "ranks", 1)
			check(err)
			if n == int64(e.Size) {
				check(s.Set(ctx, "all", nil))
			}
			check(s.Wait(ctx, "all"))
			check(s.Close())
			fmt.Println("met", e.Size)
		case "train": // "train:1:panic": rank 1 does that amidst all-reduces
			who, how, _ := strings.Cut(arg, ":")
			check(train(who == rank, how))
		case "sockets": // makes a group and prints the TCP sockets of the rank and of its launcher
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			g, err := pg.Init(ctx, "env://")
			check(err)
			check(pg.Wait(g.AllReduce(ctx, pg.Slice([]float32{1}), pg.Sum())))
			for _, pid := range []int{os.Getpid(), os.Getppid()} {
				all, err := sockets.Of(pid)
				check(err)
				for _, s := range all {
					fmt.Println("socket", s.IsLoopback(), s)
				}
			}
			check(g.Barrier(ctx))
			fmt.Println("wire", g.Explain()[0].Wire+":", g.Explain()[0].Why)
			check(g.Close())
		case "toil": // calls all_reduce until rank 0 finds that a file is gone
			check(toil(arg))
		case "wait": // until the launcher has told the others that a rank has ended
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			s, err := tcp.New(ctx, net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT")))
			check(err)
			check(s.Wait(ctx, launch.EndedKey))
			check(s.Close())
		case "env":
			fmt.Println(arg + "=" + os.Getenv(arg))
		default:
			check(fmt.Errorf("no step %q", step))
		}
	}
	os.Exit(0)
}

// program is a c10d that was started.
type program struct {
	t      *testing.T
	cmd    *exec.Cmd
	stderr messages
	done   chan struct{} // closed when the output has ended and the process has been reaped

	mu    sync.Mutex
	lines []string
	more  chan struct{} // closed and replaced with each line of standard output
}

// messages is what a program writes to standard error. It may be read meanwhile.
type messages struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (m *messages) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.b.Write(b)
}

func (m *messages) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.b.String()
}

func start(t *testing.T, env []string, args ...string) *program {
	t.Helper()
	return startCommand(t, env, exec.Command(must.Get(os.Executable()), args...))
}

func startCommand(t *testing.T, env []string, cmd *exec.Cmd) *program {
	t.Helper()
	p := &program{t: t, cmd: cmd, done: make(chan struct{}), more: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), append(env, "C10D_TEST=c10d", "RANK=")...)
	p.cmd.Stderr = &p.stderr
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		in := bufio.NewReader(out)
		for {
			line, err := in.ReadString('\n')
			p.mu.Lock()
			if line != "" {
				p.lines = append(p.lines, strings.TrimSuffix(line, "\n"))
			}
			close(p.more)
			p.more = make(chan struct{})
			p.mu.Unlock()
			if err != nil {
				break
			}
		}
		p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		<-p.done
	})
	return p
}

// await returns the first n lines of standard output that contain part.
func (p *program) await(n int, part string) []string {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		p.mu.Lock()
		var found []string
		for _, l := range p.lines {
			if strings.Contains(l, part) {
				found = append(found, l)
			}
		}
		more := p.more
		p.mu.Unlock()
		if len(found) >= n {
			return found
		}
		select {
		case <-more:
		case <-p.done:
			p.t.Fatalf("ended with %d of %d lines %q; standard error: %s", len(found), n, part, p.stderr.String())
		case <-timeout:
			p.t.Fatalf("%d of %d lines %q after %v", len(found), n, part, patience)
		}
	}
}

// wait waits for the end and returns the exit code.
func (p *program) wait() int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("still there after %v", patience)
	}
	return p.cmd.ProcessState.ExitCode()
}

func (p *program) output() string { return strings.Join(p.lines, "\n") }

// numbers returns the last word of each line as a number.
func numbers(t *testing.T, lines []string) (pids []int) {
	for _, l := range lines {
		f := strings.Fields(l)
		n, err := strconv.Atoi(f[len(f)-1])
		require.NoError(t, err, l)
		pids = append(pids, n)
	}
	return pids
}

// gone waits until no process of pids is there, zombies aside.
func gone(t *testing.T, pids []int) {
	t.Helper()
	require.NotEmpty(t, pids)
	for _, pid := range pids {
		require.Eventually(t, func() bool {
			if runtime.GOOS == "linux" {
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				if err != nil {
					return true
				}
				_, after, _ := strings.Cut(string(stat), ") ")
				return strings.HasPrefix(after, "Z")
			}
			return syscall.Kill(pid, 0) == syscall.ESRCH
		}, patience, 10*time.Millisecond, "process %d is still there", pid)
	}
}

func runRanks(t *testing.T, flags string, steps ...string) *program {
	t.Helper()
	return runRanksWith(t, nil, flags, steps...)
}

// runRanksWith is runRanks with variables for the launcher.
func runRanksWith(t *testing.T, env []string, flags string, steps ...string) *program {
	t.Helper()
	self := must.Get(os.Executable())
	args := append([]string{"run"}, strings.Fields(flags)...)
	return start(t, env, append(append(args, "--", self), steps...)...)
}

// summary is the JSON line at the end.
func (p *program) summary() (s agent.Summary) {
	p.t.Helper()
	require.NotEmpty(p.t, p.lines, p.stderr.String())
	require.NoError(p.t, json.Unmarshal([]byte(p.lines[len(p.lines)-1]), &s))
	return s
}

func TestRunOutput(t *testing.T) {
	p := runRanks(t, "-n 3", "print:one|two %r|", "complain:oh %r|", "print:no end")
	require.Zero(t, p.wait(), p.stderr.String())
	for r := range 3 {
		prefix := fmt.Sprintf("[rank%d] ", r)
		var out []string
		for _, l := range p.lines {
			if strings.HasPrefix(l, prefix) {
				out = append(out, strings.TrimPrefix(l, prefix))
			}
		}
		require.Equal(t, []string{"one", fmt.Sprintf("two %d", r), "no end"}, out)
		require.Contains(t, p.stderr.String(), fmt.Sprintf("[rank%d] oh %[1]d\n", r))
	}
	require.Len(t, p.lines, 9)
	require.NotContains(t, p.output(), "oh")
}

func TestRunLongLines(t *testing.T) {
	const long = 200_000
	p := runRanks(t, "-n 2", fmt.Sprint("long:", long), "print:after|")
	require.Zero(t, p.wait(), p.stderr.String())
	for r := range 2 {
		total := 0
		for _, l := range p.lines {
			if text, ok := strings.CutPrefix(l, fmt.Sprintf("[rank%d] ", r)); ok && text != "after" {
				require.Equal(t, strings.Repeat("x", len(text)), text)
				total += len(text)
			}
		}
		require.Equal(t, long, total)
		require.Contains(t, p.lines, fmt.Sprintf("[rank%d] after", r))
	}
}

func TestRunNoPrefix(t *testing.T) {
	p := runRanks(t, "-n 1 -no-prefix", "print:a|b\r", "complain:c")
	require.Zero(t, p.wait())
	require.Equal(t, "a\nb\r", p.output())
	require.Equal(t, "c", p.stderr.String())
}

func TestRunLogDir(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "logs")
	p := runRanks(t, "-n 2 -max-restarts 1 -log-dir "+dir, "print:out %r|", "complain:err %r|", "restarted")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Empty(t, p.lines)
	for r := range 2 {
		text := must.Get(os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank%d.log", r))))
		require.Contains(t, string(text), "--- restart 1 ---\n")
		_, again, _ := strings.Cut(string(text), "--- restart 1 ---\n")
		require.Contains(t, again, fmt.Sprintf("out %d\n", r))
		require.Contains(t, again, fmt.Sprintf("err %d\n", r))
	}
	p = runRanks(t, "-n 2 -tee -log-dir "+dir, "print:out %r|")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.lines, "[rank1] out 1")
	require.Equal(t, "out 1\n", string(must.Get(os.ReadFile(filepath.Join(dir, "rank1.log")))))
}

// TestRunLogDirFifo: a FIFO in the place of a log stops neither the job nor its end.
func TestRunLogDirFifo(t *testing.T) {
	dir := t.TempDir()
	p := start(t, nil, "run", "-n", "1", "-max-restarts", "1", "-tee", "-log-dir", dir, "--", "/bin/sh", "-c",
		`if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then rm "$0/rank0.log" && mkfifo "$0/rank0.log"; exit 1; fi; echo restarted; exec sleep 600`, dir)
	p.await(1, "[rank0] restarted")
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 128+int(syscall.SIGTERM), p.wait())
}

func TestRunEnvironment(t *testing.T) {
	t.Parallel()
	names := map[string]string{
		"WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_NAME": "default",
		"ROLE_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
		"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "7",
	}
	self := must.Get(os.Executable())
	args := []string{"run", "-n", "2", "-max-restarts", "3", "-run-id", "job", self, "store"}
	for name := range names {
		args = append(args, "env:"+name)
	}
	p := start(t, []string{"TORCH_NCCL_ASYNC_ERROR_HANDLING=7"}, args...)
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.lines, "[rank0] met 2")
	for name, value := range names {
		require.Contains(t, p.lines, "[rank1] "+name+"="+value)
	}

	p = runRanks(t, "-n 1", "env:OMP_NUM_THREADS")
	require.Zero(t, p.wait())
	require.Equal(t, "[rank0] OMP_NUM_THREADS="+os.Getenv("OMP_NUM_THREADS"), p.output())
}

// TestRunPET starts a node as Kubeflow starts torchrun.
func TestRunPET(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())
	p := start(t, []string{"PET_NNODES=1:1", "PET_NPROC_PER_NODE=2", "PET_NODE_RANK=0", "PET_RDZV_ID=kf"}, "run", self, "store", "env:TORCHELASTIC_RUN_ID")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.lines, "[rank1] TORCHELASTIC_RUN_ID=kf")
	p = start(t, []string{"PET_NNODES=1:4"}, "run", self)
	require.Equal(t, exitUsage, p.wait())
	require.Contains(t, p.stderr.String(), `PET_NNODES="1:4" is not a number: give -nnodes`)
	p = start(t, []string{"PET_MASTER_PORT=cpu"}, "run", self)
	require.Equal(t, exitUsage, p.wait())
	require.Contains(t, p.stderr.String(), `PET_MASTER_PORT="cpu" is not a number: give -master-port`)
}

func TestRunFirstFailure(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		step    string
		code    int
		signal  string
		message string
	}{
		{name: "exit code", step: "only-exit:1:7", code: 7},
		{name: "signal", step: "only-die:1:9", code: 128 + 9, signal: "SIGKILL"},
		{name: "torchrun's error file", step: `only-reason:1:{"message":{"message":"E: x","extraInfo":{"py_callstack":"Traceback: x","timestamp":"1"}}}`, code: 3, message: "Traceback: x"},
		{name: "its message alone", step: `only-reason:1:{"message":"text"}`, code: 3, message: "text"},
		{name: "an error file of another form", step: `only-reason:1:oops`, code: 3, message: "oops"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := runRanks(t, "-n 3 -json", "only-complain:1:first|second|last", c.step, "only-exit:1:3", "hold")
			require.Equal(t, c.code, p.wait(), p.stderr.String())
			s := p.summary()
			require.False(t, s.OK)
			require.Equal(t, []int{3, 0, c.code}, []int{s.Ranks, s.Restarts, s.ExitCode})
			require.NotNil(t, s.First)
			f := s.First
			require.Equal(t, []int{1, 1, c.code}, []int{f.Rank, f.LocalRank, f.ExitCode})
			require.Equal(t, c.signal, f.Signal)
			require.Equal(t, c.message, f.Message)
			require.Equal(t, []string{"first", "second", "last"}, f.Stderr)
			require.Empty(t, s.Others)
			require.Contains(t, p.stderr.String(), "c10d run: rank 1 of 3 failed first\n  ended with  "+map[bool]string{true: "signal " + c.signal, false: fmt.Sprint("exit code ", c.code)}[c.signal != ""]+"\n")
			if c.message != "" {
				require.Contains(t, p.stderr.String(), "message     "+c.message)
				require.Empty(t, f.ErrorFile)
			}
			gone(t, []int{f.PID})
		})
	}
}

// TestRunOthers: the summary lists ranks that ended by themselves, but not ranks that the
// launcher ended.
func TestRunOthers(t *testing.T) {
	p := runRanks(t, "-n 3 -json", "only-trap:0", "store", "only-exit:1:3", "only-got:0", "only-exit:0:6", "hold")
	require.Equal(t, 3, p.wait(), p.stderr.String())
	s := p.summary()
	require.Equal(t, 1, s.First.Rank)
	require.Len(t, s.Others, 1)
	require.Equal(t, []int{0, 6}, []int{s.Others[0].Rank, s.Others[0].ExitCode})
	require.Regexp(t, `  also        rank 0 at [0-9:.]+, exit code 6`, p.stderr.String())
}

// TestRunEndsOthers: after a failure the launcher ends the other ranks with the processes
// that they started, also ranks that ignore SIGTERM.
func TestRunEndsOthers(t *testing.T) {
	t.Parallel()
	p := runRanks(t, "-n 3 -grace 100ms", "ignore", "child", "pid", "store", "only-exit:2:4", "hold")
	require.Equal(t, 4, p.wait())
	gone(t, numbers(t, p.await(3, "child")))
	gone(t, numbers(t, p.await(3, "pid")))
	require.Contains(t, p.stderr.String(), "killing the ranks that are left after 100ms")
}

func TestRunLeavesNothing(t *testing.T) {
	p := runRanks(t, "-n 2", "child")
	require.Zero(t, p.wait(), p.stderr.String())
	gone(t, numbers(t, p.await(2, "child")))
}

func TestRunForwardsSignals(t *testing.T) {
	// What this process does not catch and nohup ignores, its children would ignore too.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	defer signal.Stop(caught)
	for sig, name := range map[syscall.Signal]string{syscall.SIGINT: "interrupt", syscall.SIGTERM: "terminated", syscall.SIGHUP: "hangup"} {
		t.Run(name, func(t *testing.T) {
			p := runRanks(t, "-n 2 -json", "trap", "got", "only-exit:1:6")
			p.await(2, "pid")
			require.NoError(t, p.cmd.Process.Signal(sig))
			require.Equal(t, 6, p.wait())
			require.Contains(t, p.output(), "[rank0] got "+name)
			require.Contains(t, p.output(), "[rank1] got "+name)
			require.Contains(t, p.summary().Signal, "SIG")
		})
	}
	t.Run("default action, no restart", func(t *testing.T) {
		p := runRanks(t, "-n 2 -max-restarts 5", "hold")
		pids := numbers(t, p.await(2, "pid"))
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
		require.Equal(t, 128+15, p.wait())
		gone(t, pids)
	})
	t.Run("graceful", func(t *testing.T) {
		p := runRanks(t, "-n 2", "trap", "got")
		p.await(2, "pid")
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
		require.Zero(t, p.wait())
	})
	t.Run("twice", func(t *testing.T) {
		p := runRanks(t, "-n 2", "trap", "got", "hold")
		pids := numbers(t, p.await(2, "pid"))
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGINT))
		p.await(2, "got")
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGINT))
		require.Equal(t, 128+9, p.wait())
		gone(t, pids)
	})
}

// TestRunKilled kills the launcher, with no chance to clean up.
func TestRunKilled(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	p := runRanks(t, "-n 3", "ignore", "child", "hold")
	children := numbers(t, p.await(3, "child"))
	ranks := numbers(t, p.await(3, "pid"))
	require.NoError(t, p.cmd.Process.Kill())
	gone(t, ranks)
	gone(t, children)
	require.Eventually(t, func() bool {
		left, err := os.ReadDir(os.Getenv("TMPDIR"))
		return err == nil && len(left) == 0
	}, patience, 10*time.Millisecond)
}

// TestRunQuit: SIGQUIT shows the stacks of the ranks and of the launcher.
func TestRunQuit(t *testing.T) {
	t.Parallel()
	p := runRanks(t, "-n 2", "pid", "hold")
	pids := numbers(t, p.await(4, "pid"))
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGQUIT))
	require.Equal(t, 2, p.wait())
	text := p.stderr.String()
	for _, line := range []string{"[rank0] SIGQUIT: quit\n", "[rank1] SIGQUIT: quit\n", "[rank1] goroutine ", "[rank0] goroutine ", "\nSIGQUIT: quit\n", "\ngoroutine "} {
		require.Contains(t, text, line)
	}
	require.Greater(t, strings.Index(text, "\nSIGQUIT: quit\n"), strings.LastIndex(text, "[rank"), "the launcher's stacks are last")
	gone(t, pids)
}

// TestRunErrorFile: the error file of a failed rank is kept where the user wants to have logs.
func TestRunErrorFile(t *testing.T) {
	dir := t.TempDir()
	p := runRanks(t, "-n 2 -json -log-dir "+dir, "only-reason:1:{\"message\":\"text\"}", "only-exit:1:3", "hold")
	require.Equal(t, 3, p.wait(), p.stderr.String())
	f := p.summary().First
	require.Equal(t, filepath.Join(dir, "rank1.error.json"), f.ErrorFile)
	text := must.Get(os.ReadFile(f.ErrorFile))
	require.Equal(t, `{"message":"text"}`, string(text))
	require.Contains(t, p.stderr.String(), "  error       text\n")
	require.Len(t, must.Get(os.ReadDir(dir)), 3, "two logs and the error file")
}

// TestRunTorchrun starts ranks with torchrun's spellings.
func TestRunTorchrun(t *testing.T) {
	t.Parallel()
	for _, flags := range []string{
		"--nproc_per_node 2 --nnodes=1 --node_rank 0 --master_addr 127.0.0.1 --rdzv_id job --max_restarts 1 --no-python",
		"--standalone --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=job --rdzv-endpoint=elsewhere:1 --max-restarts=1",
		"--nproc_per_node=2 --nnodes=1:1 --rdzv_backend static --rdzv_endpoint=127.0.0.1:0 --run_id job --max_restarts=1",
	} {
		p := runRanks(t, flags, "store", "env:TORCHELASTIC_RUN_ID", "env:TORCHELASTIC_MAX_RESTARTS", "env:WORLD_SIZE")
		require.Zero(t, p.wait(), p.stderr.String())
		for _, line := range []string{"TORCHELASTIC_RUN_ID=job", "TORCHELASTIC_MAX_RESTARTS=1", "WORLD_SIZE=2"} {
			require.Contains(t, p.lines, "[rank1] "+line, flags)
		}
	}
	for flags, want := range map[string]string{
		"--nproc_per_node gpu true":                     "c10d run does not count devices: give the number of ranks",
		"--nproc-per-node x true":                       "want a number of ranks",
		"--nnodes 1:4 true":                             "give one number of nodes",
		"-elastic 4:2 true":                             `"4:2" is no range of ranks, such as 2:4`,
		"-elastic 0:2 true":                             `"0:2" is no range of ranks, such as 2:4`,
		"--rdzv_backend etcd true":                      "c10d run has no etcd",
		"--nnodes 2 --rdzv_endpoint h:1 true":           "-rdzv-endpoint with -nnodes 2 needs -node-rank too",
		"--rdzv-endpoint h:x true":                      `-rdzv-endpoint "h:x" has no port within 0 and 65535`,
		"--rdzv-endpoint h:1 --master_addr h true":      "stands for -master-addr and -master-port: give either",
		"-master-addr tcp://h:1 true":                   `-master-addr="tcp://h:1" is a URL: give the host alone`,
		"--standalone --nnodes 2 true":                  "-standalone is for one node",
		"-nnodes 0 true":                                "there must be at least 1 node",
		"-rdzv-timeout -5s true":                        "-rdzv-timeout -5s: it must be positive",
		"--redirects 3 true":                            "this is a flag of torchrun; use -log-dir",
		"--rdzv_conf timeout=9 true":                    "use -rdzv-timeout",
		"--monitor_interval 5 true":                     "leave it out",
		"-m package":                                    "python3 -m MODULE",
		"--log_dir " + t.TempDir() + " --tee 3 program": `-tee takes no value, and no program is called "3"`,
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, dispatch(stdio{nil, &out, &errs}, strings.Fields("run "+flags)), flags)
		require.Contains(t, errs.String(), want, flags)
	}
	var out, errs bytes.Buffer
	require.Equal(t, 1, dispatch(stdio{nil, &out, &errs}, []string{"run", "no-such.py"}))
	require.Contains(t, errs.String(), "name its interpreter: c10d run -n 2 -- python3 no-such.py")
}

func TestRunRestarts(t *testing.T) {
	t.Parallel()
	p := runRanks(t, "-n 2 -max-restarts 2 -json", "store", "restarted", "print:done %r|")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.lines, "[rank0] done 0")
	s := p.summary()
	require.True(t, s.OK)
	require.Equal(t, 1, s.Restarts)
	require.Contains(t, p.stderr.String(), "restart 1 of 2")

	p = runRanks(t, "-n 2 -max-restarts 2 -json", "only-exit:1:8", "hold")
	require.Equal(t, 8, p.wait())
	require.Equal(t, 2, p.summary().Restarts)
}

// TestRunLoopback has the ranks of one host, and their launcher, listen and connect
// within it.
func TestRunLoopback(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("looks into /proc")
	}
	self := must.Get(os.Executable())
	for wire, want := range map[string]string{"auto": "native", "tcp": "native", "gloo": "gloo"} {
		p := start(t, []string{"C10D_WIRE=" + wire, "GLOO_SOCKET_IFNAME="}, "run", "-n", "4", "--", self, "sockets")
		require.Zero(t, p.wait(), p.stderr.String())
		require.Contains(t, p.output(), "[rank3] wire "+want)
		require.Contains(t, p.output(), "socket true listens on 127.0.0.1:")
		require.NotContains(t, p.output(), "socket false")
	}
}

// TestRunWithSecrets has the launcher's stores and the ranks use TLS, and nobody without it gets in.
func TestRunWithSecrets(t *testing.T) {
	t.Parallel()
	cert, key, ca := testcerts.Files(t)
	flags := fmt.Sprintf("-tls-cert %s -tls-key %s -tls-ca %s", cert, key, ca)
	for r, p := range nodes(t, flags, "sockets", "env:MASTER_PORT", "env:C10D_TLS_CERT") {
		require.Zero(t, p.wait(), p.stderr.String())
		require.Contains(t, p.output(), fmt.Sprintf("[rank%d] wire native: all ranks have it, and TLS", r))
		require.Contains(t, p.lines, fmt.Sprintf("[rank%d] C10D_TLS_CERT=%s", r, cert))
	}

	p := runRanks(t, "-n 1 "+flags, "env:MASTER_PORT", "hold")
	_, port, _ := strings.Cut(p.await(1, "MASTER_PORT=")[0], "=")
	p.await(1, "pid")
	secrets := credentials.Files{Cert: cert, Key: key, CA: ca}
	secure, err := secrets.Load()
	require.NoError(t, err)
	noCert := &tls.Config{RootCAs: secure.RootCAs}
	open := func(o tcp.Options, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		s, err := tcp.New(ctx, "127.0.0.1:"+port, o)
		if err == nil {
			err = s.Set(ctx, "k", nil)
			s.Close()
		}
		return err
	}
	require.NoError(t, open(tcp.Options{TLS: secure}, patience))
	require.ErrorContains(t, open(tcp.Options{}, patience), "the server speaks TLS")
	require.ErrorContains(t, open(tcp.Options{TLS: noCert}, patience), "the server refuses this side's TLS or certificate")
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	p.wait()
}

// TestStoreTLS has c10d store speak TLS 1.3, and with authorities ask for a certificate.
func TestStoreTLS(t *testing.T) {
	t.Parallel()
	cert, key, ca := testcerts.Files(t)
	_, secure, err := credentials.Files{Cert: cert, Key: key, CA: ca}.Configs()
	require.NoError(t, err)
	noCert := &tls.Config{RootCAs: secure.RootCAs}
	old := secure.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	open := func(addr string, c *tls.Config) error {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		conn, err := new(tls.Dialer).DialContext(ctx, "tcp", addr)
		if err == nil {
			conn.Close()
			return errors.New("a certificate of no authority was taken")
		}
		d := tls.Dialer{Config: c}
		if conn, err = d.DialContext(ctx, "tcp", addr); err != nil {
			return err
		}
		conn.Close()
		s, err := tcp.New(ctx, addr, tcp.Options{TLS: c})
		if err == nil {
			err = s.Set(ctx, "k", nil)
			s.Close()
		}
		return err
	}
	args := []string{"store", "-listen", "127.0.0.1:0", "-tls-cert", cert, "-tls-key", key}
	p := start(t, nil, args...)
	addr := strings.Fields(p.await(1, "listening on ")[0])[2]
	require.NoError(t, open(addr, noCert))
	require.ErrorContains(t, open(addr, old), "protocol version")
	p = start(t, nil, append(args, "-tls-ca", ca)...)
	addr = strings.Fields(p.await(1, "listening on ")[0])[2]
	require.NoError(t, open(addr, secure))
	require.ErrorContains(t, open(addr, noCert), "certificate")
}

// nodes starts a c10d run for each of two nodes, with 1 and 2 ranks.
func nodes(t *testing.T, flags string, steps ...string) (all [2]*program) {
	return nodesOf(t, [2]int{1, 2}, flags, steps...)
}

// nodesOf is nodes with so many ranks on each.
func nodesOf(t *testing.T, ranks [2]int, flags string, steps ...string) (all [2]*program) {
	t.Helper()
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	return nodesAt(t, port, ranks, flags, steps...)
}

// nodesAt is nodesOf with the port of the launchers' store.
func nodesAt(t *testing.T, port string, ranks [2]int, flags string, steps ...string) (all [2]*program) {
	t.Helper()
	for n := range all {
		all[n] = runRanks(t, fmt.Sprintf("-json -n %d -nnodes 2 -node-rank %d -master-addr 127.0.0.1 -master-port %s %s", ranks[n], n, port, flags), steps...)
	}
	return all
}

func TestRunNodes(t *testing.T) {
	t.Parallel()
	all := nodes(t, "", "store", "print:node %r|")
	for _, p := range all {
		require.Zero(t, p.wait(), p.stderr.String())
		require.Equal(t, 3, p.summary().Ranks)
	}
	require.Equal(t, all[0].summary().RunID, all[1].summary().RunID)
	require.Contains(t, all[0].lines, "[rank0] met 3")
	require.Contains(t, all[1].lines, "[rank1] met 3")
	require.Contains(t, all[1].lines, "[rank2] met 3")
}

func TestRunNodesFail(t *testing.T) {
	t.Parallel()
	all := nodes(t, "-max-restarts 1", "store", "restarted", "only-exit:2:9", "hold")
	for _, p := range all {
		require.Equal(t, 9, p.wait(), p.stderr.String())
		s := p.summary()
		require.Equal(t, 1, s.Restarts)
		require.Equal(t, 2, s.First.Rank)
		require.Contains(t, p.stderr.String(), "rank 2 of 3 failed first")
	}
}

// TestRunElasticNodeDies: the job goes on without the ranks of a node whose launcher is killed.
func TestRunElasticNodeDies(t *testing.T) {
	t.Parallel()
	all := nodes(t, "-elastic 1:3", "trap", "got")
	pid := numbers(t, all[0].await(1, "pid"))
	others := numbers(t, all[1].await(2, "pid"))
	require.NoError(t, all[1].cmd.Process.Kill())
	gone(t, others)
	require.NoError(t, syscall.Kill(pid[0], syscall.SIGTERM))
	require.Zero(t, all[0].wait(), all[0].stderr.String())
	require.True(t, all[0].summary().OK)
	require.Contains(t, all[0].stderr.String(), "the launcher of node 1 has ended, and its ranks with it")
}

// TestRunElasticSignal: the launcher ends when a signal has ended its ranks, and starts none again.
func TestRunElasticSignal(t *testing.T) {
	t.Parallel()
	for step, code := range map[string]int{"got": 0, "hold": 143} {
		p := runRanks(t, "-n 2 -elastic 1:2 -json", map[string]string{"got": "trap", "hold": "print:|"}[step], step)
		p.await(2, "pid")
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
		require.Equal(t, code, p.wait(), p.stderr.String())
		require.Zero(t, p.summary().Restarts)
	}
}

// TestRunElasticSizes: the ranks of all nodes have to be within the range.
func TestRunElasticSizes(t *testing.T) {
	p := runRanks(t, "-n 2 -elastic 3:4", "hold")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "the nodes start 2 ranks (-n times -nnodes), and the job has at least 3 and at most 4 (-elastic)")
}

func TestRunNodeAgentDies(t *testing.T) {
	t.Parallel()
	all := nodes(t, "", "hold")
	pids := append(numbers(t, all[0].await(1, "pid")), numbers(t, all[1].await(2, "pid"))...)
	require.NoError(t, all[0].cmd.Process.Kill())
	require.Equal(t, 1, all[1].wait())
	require.Contains(t, all[1].stderr.String(), "the agent of node 0 is gone")
	gone(t, pids)
}

// TestRunOtherAgentDies: the job does not wait for a node whose launcher is killed, even if the ranks of
// all others have ended with 0.
func TestRunOtherAgentDies(t *testing.T) {
	t.Parallel()
	all := nodes(t, "-max-restarts 1 -grace 1s", "trap", "only-got:0:", "hold")
	pid := numbers(t, all[0].await(1, "pid"))
	others := numbers(t, all[1].await(2, "pid"))
	require.NoError(t, all[1].cmd.Process.Kill())
	gone(t, others)
	require.Equal(t, 1, all[0].wait())
	require.Contains(t, all[0].stderr.String(), "the agent of node 1 has ended, and its ranks with it")
	require.Zero(t, all[0].summary().Restarts)
	gone(t, pid)
}

// TestRunNodesSignal: after a signal on one node there is no further attempt on any.
func TestRunNodesSignal(t *testing.T) {
	t.Parallel()
	all := nodes(t, "-max-restarts 3", "hold")
	all[0].await(1, "pid")
	all[1].await(2, "pid")
	require.NoError(t, all[1].cmd.Process.Signal(syscall.SIGTERM))
	for _, p := range all {
		require.Equal(t, 143, p.wait(), p.stderr.String())
		require.Zero(t, p.summary().Restarts)
	}
}

// TestRunNodesSignalDone: ranks of one node take a signal and end with 0. Its launcher waits for the others for the grace
// period, and they go on.
func TestRunNodesSignalDone(t *testing.T) {
	t.Parallel()
	all := nodes(t, "-grace 2s", "trap", "got")
	pid := numbers(t, all[0].await(1, "pid"))
	others := numbers(t, all[1].await(2, "pid"))
	require.NoError(t, all[1].cmd.Process.Signal(syscall.SIGTERM))
	gone(t, others)
	require.Equal(t, 143, all[1].wait(), all[1].stderr.String())
	require.NotContains(t, all[1].stderr.String(), "killing")
	require.NoError(t, syscall.Kill(pid[0], syscall.SIGTERM))
	require.Zero(t, all[0].wait(), all[0].stderr.String())
}

// TestRunNodesSignalFail: one node gets a signal, and its ranks end with 0. Then a rank of another node fails,
// because it has lost them. There is no further attempt.
func TestRunNodesSignalFail(t *testing.T) {
	t.Parallel()
	all := nodes(t, "-max-restarts 3", "only-trap:1:", "only-trap:2:", "only-got:1:", "only-got:2:", "only-exit:1:0", "only-exit:2:0", "hold")
	pid := numbers(t, all[0].await(1, "pid"))
	others := numbers(t, all[1].await(2, "pid"))
	require.NoError(t, all[1].cmd.Process.Signal(syscall.SIGTERM))
	gone(t, others)
	require.NoError(t, syscall.Kill(pid[0], syscall.SIGKILL))
	require.Equal(t, 137, all[0].wait(), all[0].stderr.String())
	require.Zero(t, all[0].summary().Restarts)
	require.NotContains(t, all[0].stderr.String(), "restart")
	require.Equal(t, 137, all[1].wait(), all[1].stderr.String())
}

// TestRunNodesSignalZero: the ranks of node 0 have ended with 0, and its launcher gets a signal. All end soon.
func TestRunNodesSignalZero(t *testing.T) {
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	all := nodesAt(t, port, [2]int{1, 2}, "", "pid", "only-exit:0:0", "hold")
	all[1].await(4, "pid")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	st := must.Get(tcp.New(ctx, "127.0.0.1:"+port))
	require.NoError(t, st.Wait(ctx, "attempt/0/done/0"), "the launcher has not taken its exit code")
	require.NoError(t, st.Close())
	start := time.Now()
	require.NoError(t, all[0].cmd.Process.Signal(syscall.SIGTERM))
	for _, p := range all {
		require.Equal(t, 143, p.wait(), p.stderr.String())
	}
	require.Less(t, time.Since(start), 8*time.Second)
}

// TestRunEndsBeforeInit: a rank ends with code 0 before pg.Init. The others name it at once, and so does the launcher.
func TestRunEndsBeforeInit(t *testing.T) {
	t.Parallel()
	steps := []string{"only-exit:1:0", "train"}
	const want = ") ended with exit code 0 before all ranks had called Init"
	one := func(flags string, steps ...string) [2]*program {
		return [2]*program{runRanks(t, "-json -n 3 "+flags, steps...)}
	}
	for name, start := range map[string]func() [2]*program{
		"one node": func() [2]*program { return one("", steps...) },
		"restart":  func() [2]*program { return one("-max-restarts 1", steps...) },
		"elastic":  func() [2]*program { return one("-elastic 1:3", steps...) },
		"node 0":   func() [2]*program { return nodesOf(t, [2]int{2, 1}, "", steps...) },
		"node 1":   func() [2]*program { return nodesOf(t, [2]int{1, 2}, "", steps...) },
	} {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			all := start()
			for i, p := range all {
				if p == nil {
					continue
				}
				require.NotZero(t, p.wait(), p.stderr.String())
				s := p.summary()
				require.Equal(t, 1, s.First.Rank, "node %d: %+v", i, s.First)
				require.Zero(t, s.First.ExitCode)
				require.Contains(t, p.stderr.String(), want)
			}
			require.Less(t, time.Since(begun), time.Minute, "the ranks' timeout")
		})
	}
}

// TestRunNotAllCallInit: a rank that ends early is no fault in a program whose ranks do not wait for it.
func TestRunNotAllCallInit(t *testing.T) {
	p := runRanks(t, "-n 3", "only-exit:1:0", "wait", "only-exit:2:0", "print:done %r|")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Equal(t, []string{"[rank0] done 0"}, p.lines)
	require.Empty(t, p.stderr.String())
}

// TestRunIDs: launchers with different names of the job do not meet. Node 0 goes on to wait for its own.
func TestRunIDs(t *testing.T) {
	t.Parallel()
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	node := func(n int, id string) *program {
		return runRanks(t, fmt.Sprintf("-nnodes 2 -node-rank %d -master-addr 127.0.0.1 -master-port %s%s", n, port, id), "store", "env:TORCHELASTIC_RUN_ID")
	}
	zero, other := node(0, " -run-id a"), node(1, " -run-id b")
	require.Equal(t, 1, other.wait())
	require.Contains(t, other.stderr.String(), `node 0 has another -run-id`)
	require.Contains(t, other.stderr.String(), `the store's job is "a", the client's is "b"`)
	one := node(1, "")
	require.Zero(t, one.wait(), one.stderr.String())
	require.Zero(t, zero.wait(), zero.stderr.String())
	require.Contains(t, one.lines, "[rank1] TORCHELASTIC_RUN_ID=a")

	zero, one = node(0, ""), node(1, " -run-id b")
	require.Equal(t, 1, one.wait())
	require.Contains(t, one.stderr.String(), "node 0 was started without -run-id, and this node with -run-id b")
	require.Equal(t, 1, zero.wait())
}

// TestRunNodesDiffer: launchers with different numbers do not begin.
func TestRunNodesDiffer(t *testing.T) {
	t.Parallel()
	for want, flags := range map[string][2]string{
		"-nnodes 3, and this node with 2":                             {"-nnodes 2", "-nnodes 3"},
		"-max-restarts 1, and this node with 2":                       {"-nnodes 2 -max-restarts 2", "-nnodes 2 -max-restarts 1"},
		"-elastic 1:2, and this node with 0:0 (0:0 is none)":          {"-nnodes 2", "-nnodes 2 -elastic 1:2"},
		"-elastic 2:3, and this node with 2:2 (0:0 is none): all nod": {"-nnodes 2 -elastic 2", "-nnodes 2 -elastic 2:3"},
	} {
		_, port, err := net.SplitHostPort(freeport.Loopback(t))
		require.NoError(t, err)
		var all [2]*program
		for n, f := range flags {
			all[n] = runRanks(t, fmt.Sprintf("%s -node-rank %d -master-addr 127.0.0.1 -master-port %s", f, n, port), "hold")
		}
		for _, p := range all {
			require.Equal(t, 1, p.wait())
		}
		require.Contains(t, all[0].stderr.String(), "node 1 was started with "+want)
		require.Contains(t, all[1].stderr.String(), "node 0 was started with ")
	}
}

// TestRunNodesNoProgram: a node on which the program cannot be started ends the job on all nodes.
func TestRunNodesNoProgram(t *testing.T) {
	t.Parallel()
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	self := must.Get(os.Executable())
	var all [2]*program
	for n, name := range []string{self, "/no/such"} {
		all[n] = start(t, nil, "run", "-json", "-nnodes", "2", "-max-restarts", "2", "-node-rank", strconv.Itoa(n), "-master-addr", "127.0.0.1", "-master-port", port, "--", name, "hold")
	}
	require.Equal(t, 127, all[0].wait(), all[0].stderr.String())
	require.Zero(t, all[0].summary().Restarts)
	require.Equal(t, 1, all[1].wait())
}

// TestRunElasticNodeSignal: a signal on one node ends the ranks there. The others go on.
func TestRunElasticNodeSignal(t *testing.T) {
	t.Parallel()
	for step, code := range map[string]int{"got": 0, "hold": 143} {
		all := nodes(t, "-elastic 1:3", map[string]string{"got": "trap", "hold": "print:pid 0|"}[step], step)
		all[0].await(1, "pid")
		all[1].await(2, "pid")
		require.NoError(t, all[1].cmd.Process.Signal(syscall.SIGTERM))
		require.Equal(t, code, all[1].wait(), all[1].stderr.String())
		require.Eventually(t, func() bool {
			return strings.Contains(all[0].stderr.String(), "the launcher of node 1 has ended, and its ranks with it")
		}, time.Minute, 10*time.Millisecond)
		require.NoError(t, all[0].cmd.Process.Signal(syscall.SIGTERM))
		require.Equal(t, code, all[0].wait(), all[0].stderr.String())
		require.NotContains(t, all[0].stderr.String(), "restart")
	}
}

// TestRunNodeAgain: a launcher dies while the others are not all there, and is started again.
func TestRunNodeAgain(t *testing.T) {
	t.Parallel()
	for _, elastic := range []string{"", " -elastic 1:3"} {
		_, port, err := net.SplitHostPort(freeport.Loopback(t))
		require.NoError(t, err)
		node := func(n int) *program {
			return runRanks(t, fmt.Sprintf("-json -nnodes 3 -node-rank %d -master-addr 127.0.0.1 -master-port %s%s", n, port, elastic), "store")
		}
		zero, one := node(0), node(1)
		st := must.Get(tcp.New(t.Context(), "127.0.0.1:"+port))
		require.NoError(t, st.Wait(t.Context(), "node/1"))
		require.NoError(t, one.cmd.Process.Kill())
		<-one.done
		require.NoError(t, st.Close())
		for _, p := range []*program{zero, node(1), node(2)} {
			require.Zero(t, p.wait(), p.stderr.String())
			require.NotContains(t, p.stderr.String(), "has ended")
		}
	}
}

func TestRunNodeMissing(t *testing.T) {
	t.Parallel()
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	args := "-nnodes 2 -node-rank 0 -master-addr 127.0.0.1 -master-port " + port
	p := runRanks(t, args+" -rdzv-timeout 5s", "hold")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "c10d run: waiting for node 1 of 2, for at most 5s\n")
	require.Contains(t, p.stderr.String(), "not all 2 nodes came within 5s: waiting for node 1 of 2")
	require.Empty(t, p.lines)
}

// TestRunBrackets meets at an IPv6 address in brackets, as URLs have it.
func TestRunBrackets(t *testing.T) {
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("no IPv6: ", err)
	} else {
		l.Close()
	}
	for _, flags := range []string{"-master-addr [::1]", "-rdzv-endpoint [::1]:0"} {
		p := runRanks(t, flags+" -n 2", "store", "print:done %r|")
		require.Zero(t, p.wait(), p.stderr.String())
		require.Contains(t, p.lines, "[rank1] done 1", flags)
	}
}

// TestRunPyTorch runs PyTorch's ranks, one of which then fails as torchrun's do.
func TestRunPyTorch(t *testing.T) {
	t.Parallel()
	// The rank that fails leaves by itself: threads of gloo may abort or keep a
	// process that takes its leave.
	const script = `
import os, time, traceback, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    t = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(t)
    print("sum", t.item(), flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    time.sleep(600) # until the launcher ends it
try:
    main()
except ValueError:
    traceback.print_exc()
    os._exit(1)
`
	p := start(t, []string{"GLOO_SOCKET_IFNAME=lo"}, "run", "-n", "3", "-json", "--", torchtest.Interpreter(t), "-c", script)
	require.Equal(t, 1, p.wait(), p.stderr.String())
	for r := range 3 {
		require.Contains(t, p.lines, fmt.Sprintf("[rank%d] sum 6.0", r))
	}
	f := p.summary().First
	require.Equal(t, 1, f.Rank)
	require.Contains(t, f.Message, "ValueError: on purpose")
}

// TestRunNohup checks that SIGHUP stays ignored where it was.
func TestRunNohup(t *testing.T) {
	self := must.Get(os.Executable())
	p := startCommand(t, nil, exec.Command("/bin/sh", "-c", `trap "" HUP; exec "$0" run "$0" pid hold`, self))
	p.await(2, "pid")
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGHUP))
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 128+15, p.wait())
	require.NotContains(t, p.stderr.String(), "SIGHUP")
}

func TestRunUsage(t *testing.T) {
	for args, want := range map[string]string{
		"run":                             "no command to run: c10d run -n 2 -- PROGRAM",
		"run -n 0 true":                   "-n 0: there must be at least 1 rank",
		"run -tee true":                   "-tee needs -log-dir",
		"run -no-such true":               "no flag -no-such\nsee",
		"store x":                         `unexpected argument "x"`,
		"store -tls-cert a":               "give both -tls-cert and -tls-key, or neither",
		"version x":                       `unexpected argument "x"`,
		"no-such":                         `no command "no-such"`,
		"":                                "Usage: c10d COMMAND",
		"help no-such":                    `no command "no-such"`,
		"store -listen nowhere -x":        "no flag -x\nsee",
		"bnech":                           `no command "bnech": did you mean bench?`,
		"bench -wrld 2":                   "no flag -wrld: did you mean -world?",
		"bench -worl 2":                   "no flag -worl: did you mean -world?",
		"run -n2 true":                    "no flag -n2: did you mean -n 2?",
		"run -N 2 true":                   "no flag -N: did you mean -n?",
		"bench -op allreduce":             `unknown -op "allreduce": did you mean all_reduce?`,
		"store -tls-ca a":                 "-tls-ca needs -tls-cert and -tls-key",
		"run -tls-key a true":             "give both -tls-cert and -tls-key, or neither",
		"run -tls-cert a -tls-key a true": "need -tls-ca",
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, dispatch(stdio{nil, &out, &errs}, strings.Fields(args)), args)
		require.Contains(t, errs.String(), want, args)
		require.Empty(t, out.String(), args)
	}
	for args, want := range map[string]string{
		"run no-such-program":                      "executable file not found",
		"run ./main_test.go":                       "the file is not executable: chmod +x ./main_test.go, or name its interpreter",
		"run -nnodes 2 true":                       "2 nodes need the address and port of node 0",
		"run -nnodes 2 -node-rank 2 true":          "node 2 is not within 2 nodes",
		"store -tls-secret /no/such":               "no such file",
		"run -tls-secret /no/such true":            "no such file",
		"store -tls-cert /no/such -tls-key /no":    "no such file",
		"store -listen 127.0.0.1:0:0":              "too many colons",
		"store -listen 127.0.0.1:0 -max-memory -1": "must not be negative",
	} {
		var out, errs bytes.Buffer
		require.Equal(t, 1, dispatch(stdio{nil, &out, &errs}, strings.Fields(args)), args)
		require.Contains(t, errs.String(), want, args)
	}
}

func TestHelp(t *testing.T) {
	for _, args := range []string{"help", "help help", "-h", "help run", "run -h", "help store", "help version", "version", "--version"} {
		var out, errs bytes.Buffer
		require.Zero(t, dispatch(stdio{nil, &out, &errs}, strings.Fields(args)), args)
		require.Empty(t, errs.String(), args)
		require.Contains(t, out.String(), "c10d ", args)
		require.NotContains(t, out.String(), "guard", args)
	}
}

// TestHelpGroups: each command that takes flags has an example, whose flags exist, and help lists each flag once.
func TestHelpGroups(t *testing.T) {
	for name, c := range commands {
		fs := flag.NewFlagSet(name, flag.ContinueOnError)
		c.setup(fs)
		var known []string
		visible(fs).VisitAll(func(f *flag.Flag) { known = append(known, f.Name) })
		if c.hidden || len(known) == 0 {
			continue
		}
		words := strings.Fields(c.example)
		require.Greater(t, len(words), 2, name)
		require.Equal(t, []string{"c10d", name}, words[:2])
		require.NoError(t, fs.Parse(words[2:]), c.example)
		for _, g := range c.groups {
			require.Subset(t, known, strings.Fields(g.flags), name)
		}
		var out bytes.Buffer
		c.usage(&out, fs)
		for _, f := range known {
			require.Len(t, regexp.MustCompile(`(?m)^  -`+regexp.QuoteMeta(f)+`\b[^-]`).FindAllString(out.String()+"\n", -1), 1, "c10d %s -%s", name, f)
		}
	}
}

// TestFlagsNameTheirValues: a flag's placeholder is the kind of its value.
func TestFlagsNameTheirValues(t *testing.T) {
	kinds := strings.Fields(`algorithms bandwidth bytes devices directory duration factor file files generation host hosts host:port kind min:max n
		name numbers operations operator order port rank seed size sizes type URL wire`)
	for name, c := range commands {
		fs := flag.NewFlagSet(name, flag.ContinueOnError)
		c.setup(fs)
		fs.VisitAll(func(f *flag.Flag) {
			if kind, _ := flag.UnquoteUsage(f); kind != "" && f.Usage != hidden {
				require.Contains(t, kinds, kind, "c10d %s -%s", name, f.Name)
			}
		})
	}
}

// TestNoLauncher: programs that find no launcher say how to start them.
func TestNoLauncher(t *testing.T) {
	for _, v := range []string{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} {
		t.Setenv(v, "")
	}
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, nil, 0o600))
	for args, want := range map[string]string{
		"bench":                  "`c10d run -n 2 -- PROGRAM`; or have this command start 2 ranks here: -world 2",
		"doctor":                 "`c10d run -n 2 -- PROGRAM`; or have this command start 2 ranks here: -world 2",
		"rank -script " + script: "`c10d run -n 2 -- PROGRAM`; or name the others by -init tcp://HOST:PORT?rank=R&world_size=N",
	} {
		var out, errs bytes.Buffer
		require.Equal(t, 1, dispatch(stdio{nil, &out, &errs}, strings.Fields(args)), args)
		require.Contains(t, errs.String(), want, args)
	}
}

// TestWireVariable: commands leave the wire to C10D_WIRE unless -wire is given.
func TestWireVariable(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, nil, 0o600))
	for _, args := range []string{"bench -sizes 4 -n 1", "doctor -device cpu", "rank -script " + script} {
		for flags, want := range map[string]string{"": `gloo: unknown wire "nonsense"`, " -wire auto": ""} {
			t.Setenv("C10D_WIRE", "nonsense") // -wire sets it
			var out, errs bytes.Buffer
			code := dispatch(stdio{nil, &out, &errs}, strings.Fields(args+flags+" -init file://"+filepath.Join(t.TempDir(), "store")+"?rank=0&world_size=1"))
			require.Equal(t, want == "", code == 0, "%s: %s", args+flags, errs.String())
			require.Contains(t, errs.String(), want, args)
		}
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, credentials.WriteSecret(secret))
	secure := must.Get(credentials.Files{Secret: secret}.Load())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, c := range []struct {
		flags  string
		client tcp.Options
	}{{flags: ""}, {flags: "-tls-secret " + secret, client: tcp.Options{TLS: secure}}} {
		p := start(t, nil, append([]string{"store", "-listen", "127.0.0.1:0", "-stats", "1h"}, strings.Fields(c.flags)...)...)
		addr := strings.Fields(p.await(1, "listening on ")[0])[2]
		for range 2 { // the data outlive the clients
			s := must.Get(tcp.New(ctx, addr, c.client))
			must.Get(s.Add(ctx, "n", 1))
			require.NoError(t, s.Close())
		}
		s := must.Get(tcp.New(ctx, addr, c.client))
		require.EqualValues(t, 3, must.Get(s.Add(ctx, "n", 1)))
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
		require.Zero(t, p.wait(), p.stderr.String())
		require.Contains(t, p.output(), "closed")
		require.Contains(t, p.stderr.String(), "1 keys")
		require.NoError(t, s.Close())
	}
}

func TestStoreJSON(t *testing.T) {
	p := start(t, nil, "store", "-listen", "127.0.0.1:0", "-json", "-stats", "10ms")
	var event struct{ Event, Addr string }
	require.NoError(t, json.Unmarshal([]byte(p.await(1, "listening")[0]), &event))
	_, port, err := net.SplitHostPort(event.Addr)
	require.NoError(t, err)
	require.NotEqual(t, "0", port)
	var f statistics
	require.NoError(t, json.Unmarshal([]byte(p.await(1, `"stats"`)[0]), &f))
	require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
	require.Zero(t, p.wait())
	require.Equal(t, `{"event":"closed"}`, p.lines[len(p.lines)-1])
}

// toil calls all_reduce until rank 0 finds that a file is gone. The file has the name of a phase. When that
// changes, each rank prints how long the calls of the phase before took.
func toil(path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	defer cancel()
	g, err := pg.Init(ctx, "env://")
	if err != nil {
		return err
	}
	defer g.Close()
	fmt.Println("pid", os.Getpid())
	var phase string
	var took []time.Duration
	for calls := 1; ; calls++ {
		now, err := os.ReadFile(path)
		if string(now) != phase && len(took) > 0 {
			slices.Sort(took)
			fmt.Println("phase", phase, len(took), "calls, slowest and p99", took[len(took)-1], took[len(took)*99/100])
			took = took[:0]
		}
		phase = string(now)
		v := []float32{float32(g.Rank()), 0}
		if err != nil && g.Rank() == 0 {
			v[1] = 1
		}
		begun := time.Now()
		if err := pg.Wait(g.AllReduce(ctx, pg.Slice(v), pg.Sum())); err != nil {
			return err
		}
		took = append(took, time.Since(begun))
		if want := float32(g.Size()*(g.Size()-1)) / 2; v[0] != want {
			return fmt.Errorf("call %d: the sum is %v, want %v", calls, v[0], want)
		}
		if calls == 1 {
			fmt.Println("toiling")
		}
		if v[1] > 0 {
			return nil
		}
		time.Sleep(5 * time.Millisecond) // leaves the CPUs to others
	}
}

// TestStoreWithoutReader: a store whose output nobody reads any more goes on.
func TestStoreWithoutReader(t *testing.T) {
	self := must.Get(os.Executable())
	cmd := exec.Command(self, "store", "-listen", "127.0.0.1:0", "-json", "-stats", "1ms")
	cmd.Env = append(os.Environ(), "C10D_TEST=c10d", "RANK=")
	out := must.Get(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	line := must.Get(bufio.NewReader(out).ReadBytes('\n'))
	var listening struct{ Addr string }
	require.NoError(t, json.Unmarshal(line, &listening))
	require.NoError(t, out.Close())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := must.Get(tcp.New(ctx, listening.Addr, tcp.Options{WorldSize: 1}))
	defer s.Close()
	for begun := time.Now(); time.Since(begun) < 100*time.Millisecond; { // statistics are due all the time
		require.NoError(t, s.Set(ctx, "k", nil))
	}
}
