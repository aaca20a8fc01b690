//go:build unix

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
)

// initVariable makes the test binary a process that reaps orphans, and runs its arguments as a command.
const initVariable = "C10D_TEST_INIT"

func TestMain(m *testing.M) {
	if os.Getenv(initVariable) != "" {
		asInit(os.Args[1:])
	}
	goleak.VerifyTestMain(m)
}

// sh is a job of shells.
func sh(n int, script string) Job {
	return Job{Procs: n, Command: []string{"/bin/sh", "-c", script}}
}

func run(t *testing.T, j Job) (*Summary, string, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	t.Setenv("TMPDIR", t.TempDir())
	var out, errs bytes.Buffer
	j.Stdout, j.Stderr = &out, &errs
	return must.Get(Run(ctx, j)), out.String(), errs.String()
}

func TestRun(t *testing.T) {
	s, out, errs := run(t, sh(2, `echo $RANK; echo e$RANK >&2`))
	require.True(t, s.OK)
	require.Empty(t, s.Report())
	require.ElementsMatch(t, []string{"[rank0] 0\n", "[rank1] 1\n"}, strings.SplitAfter(out, "\n")[:2])
	require.ElementsMatch(t, []string{"[rank0] e0\n", "[rank1] e1\n"}, strings.SplitAfter(errs, "\n")[:2])
	s, _, errs = run(t, sh(2, `[ -d "$C10D_SCRATCH_DIR" ] && touch "$C10D_SCRATCH_DIR/$RANK" && until [ -e "$C10D_SCRATCH_DIR/$((1 - RANK))" ]; do :; done`))
	require.True(t, s.OK, "the ranks share no directory: %s", errs)
	require.Empty(t, must.Get(os.ReadDir(os.Getenv("TMPDIR"))))
}

// TestRunDescriptors checks that jobs leave no descriptors open.
func TestRunDescriptors(t *testing.T) {
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc: ", err)
		}
		return len(fds)
	}
	run(t, sh(1, "true")) // opens what the runtime keeps
	before := count()
	for range 3 {
		run(t, sh(3, "exit $RANK"))
	}
	require.Eventually(t, func() bool { return count() <= before }, time.Minute, 5*time.Millisecond)
}

func TestRunContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	j := sh(2, "echo up; exec sleep 600")
	up := make(chan struct{}, 2)
	j.Stdout = writerFunc(func([]byte) { up <- struct{}{} })
	j.MaxRestarts = 5
	go func() {
		<-up
		<-up
		cancel()
	}()
	s := must.Get(Run(ctx, j))
	require.Equal(t, 128+int(syscall.SIGTERM), s.ExitCode)
	require.Equal(t, "SIGTERM", s.First.Signal)
	require.Zero(t, s.Restarts)
}

// TestRunClearsLogs: a log directory has files of this run alone.
func TestRunClearsLogs(t *testing.T) {
	j := sh(2, "true")
	j.LogDir = t.TempDir()
	for _, name := range []string{"rank0.error.json", "rank7.error.json", "rank7.log", "rank07.log", "rank1.error.json.old", "rankx.error.json"} {
		require.NoError(t, os.WriteFile(filepath.Join(j.LogDir, name), []byte("{}"), 0o666))
	}
	require.True(t, must.Get(Run(t.Context(), j)).OK)
	left, err := os.ReadDir(j.LogDir)
	require.NoError(t, err)
	var names []string
	for _, f := range left {
		names = append(names, f.Name())
	}
	require.Equal(t, []string{"rank0.log", "rank07.log", "rank1.error.json.old", "rank1.log", "rankx.error.json"}, names)

	// The other node of a job, whose ranks are 0 and 1, may have written there already.
	a := &agent{Job: Job{LogDir: j.LogDir, Procs: 2}, base: 2, size: 4}
	for rank := range 5 {
		require.NoError(t, os.WriteFile(filepath.Join(j.LogDir, errorName(rank)), []byte("{}"), 0o666))
	}
	require.NoError(t, a.openLogs())
	for _, log := range a.logs {
		log.Close()
	}
	for rank := range 5 {
		_, err := os.Stat(filepath.Join(j.LogDir, errorName(rank)))
		require.Equal(t, rank < 2, err == nil, rank)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }

// TestRunSlowOutput: what a rank has written by its end is not lost where it is
// not taken for a while.
func TestRunSlowOutput(t *testing.T) {
	j := sh(1, `for i in 0 1 2 3 4 5 6 7 8 9; do echo $i$(head -c 4000 /dev/zero | tr '\0' x); done`)
	var out bytes.Buffer
	j.Stdout = writerFunc(func(p []byte) {
		if out.Len() == 0 {
			time.Sleep(drain + time.Second/2)
		}
		out.Write(p)
	})
	require.True(t, must.Get(Run(context.Background(), j)).OK)
	require.Equal(t, 10, strings.Count(out.String(), "\n"))
}

// TestRunLostOutput: output that cannot be written is missed.
func TestRunLostOutput(t *testing.T) {
	full := errors.New("the disk is full")
	j := sh(1, "echo a; echo b")
	var said []string
	j.Logf = func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }
	j.Stdout = brokenWriter{full}
	require.True(t, must.Get(Run(context.Background(), j)).OK)
	require.Equal(t, []string{"output of the ranks is lost: the disk is full"}, said)
}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

// TestRunInElasticJob: the ranks do not take the variables of the rank that runs the launcher.
func TestRunInElasticJob(t *testing.T) {
	t.Setenv("C10D_ELASTIC", "1:2")
	t.Setenv("C10D_JOIN", "1")
	t.Setenv("C10D_EPOCH_FILE", "/no/such")
	s, out, _ := run(t, sh(1, `echo "<$C10D_ELASTIC$C10D_JOIN$C10D_EPOCH_FILE>"`))
	require.True(t, s.OK)
	require.Equal(t, "[rank0] <>\n", out)
}

// TestRunEscape runs a rank whose output a process holds open that left its group.
func TestRunEscape(t *testing.T) {
	setsid, err := exec.LookPath("setsid")
	if err != nil {
		t.Skip("no setsid: ", err)
	}
	pidFile := filepath.Join(t.TempDir(), "pid")
	s, _, _ := run(t, sh(1, fmt.Sprintf(`%s sh -c 'echo $$ >%s; exec sleep 600' & until [ -s %[2]s ]; do sleep 0.01; done; exit 3`, setsid, pidFile)))
	require.Equal(t, 3, s.ExitCode)
	text := must.Get(os.ReadFile(pidFile))
	require.NoError(t, syscall.Kill(must.Get(strconv.Atoi(strings.TrimSpace(string(text)))), syscall.SIGKILL))
}

func TestRunRefuses(t *testing.T) {
	good := sh(1, "true")
	for want, change := range map[string]func(*Job){
		"agent: no command":                    func(j *Job) { j.Command = nil },
		"agent: 0 ranks on this node":          func(j *Job) { j.Procs = 0 },
		"agent: node 1 is not within 1 nodes":  func(j *Job) { j.NodeRank = 1 },
		"agent: node 0 is not within -1 nodes": func(j *Job) { j.Nodes = -1 },
		"agent: 2 nodes need the address and port of node 0 (-master-addr, -master-port)": func(j *Job) { j.Nodes = 2 },
		"agent: no port 65536":               func(j *Job) { j.MasterPort = 65536 },
		"agent: -1 restarts":                 func(j *Job) { j.MaxRestarts = -1 },
		"agent: tee without a log directory": func(j *Job) { j.Tee = true },
		`agent: the guard: fork/exec /no/such: no such file or directory`: func(j *Job) { j.Guard = []string{"/no/such"} },
		`agent: fork/exec /no/such: no such file or directory`:            func(j *Job) { j.Command = []string{"/no/such"} },
	} {
		j := good
		change(&j)
		require.EqualError(t, must.Err(Run(context.Background(), j)), want)
	}
}

func TestErrorMessage(t *testing.T) {
	for text, want := range map[string]string{
		"": "",
		`{"message":{"message":"m","extraInfo":{"py_callstack":"stack"}}}`: "stack",
		`{"message":{"message":"m"}}`:                                      "m",
		`{"message":"m"}`:                                                  "m",
		`{"message":{}}`:                                                   `{"message":{}}`,
		`{"message":7}`:                                                    `{"message":7}`,
		`[]`:                                                               `[]`,
		strings.Repeat("x", 100_000):                                       strings.Repeat("x", 64<<10),
	} {
		require.Equal(t, want, errorMessage([]byte(text)))
	}
}

func TestTail(t *testing.T) {
	var o rankOutput
	o.record([]byte("out\n"), false)
	require.Empty(t, o.lastLines())
	for _, piece := range []string{"a", "b\n", "\nc\nd", strings.Repeat("d", 2*tailWidth)} {
		o.record([]byte(piece), true)
	}
	require.Equal(t, []string{"ab", "", "c", strings.Repeat("d", tailWidth)}, o.lastLines())
	for i := range 100 {
		o.record([]byte(fmt.Sprintf("\n%d", i)), true)
	}
	lines := o.lastLines()
	require.Len(t, lines, tailLines)
	require.Equal(t, "99", lines[tailLines-1])
}

func TestPrefix(t *testing.T) {
	require.Equal(t, "[rank12] ", prefix(12, false))
	seen := make(map[string]bool)
	for r := range 6 {
		color, _, _ := strings.Cut(prefix(r, true), "[rank")
		seen[color] = true
	}
	require.Len(t, seen, 6)
}

// TestGuardForgets checks that the guard kills only what it still watches.
func TestGuardForgets(t *testing.T) {
	var pids []int
	for range 2 {
		cmd := exec.Command("sleep", "600")
		setGroup(cmd)
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		pids = append(pids, cmd.Process.Pid)
	}
	outlive(strings.NewReader(fmt.Sprintf("+%d\n+%d\n-%d\n\nx\n+0\n+1\n+x\n", pids[0], pids[1], pids[1])))
	require.Eventually(t, func() bool {
		var ws syscall.WaitStatus
		pid, _ := syscall.Wait4(pids[0], &ws, syscall.WNOHANG, nil)
		return pid == pids[0] && ws.Signal() == syscall.SIGKILL
	}, time.Minute, 5*time.Millisecond)
	require.NoError(t, syscall.Kill(pids[1], 0), "the guard killed what it was told to forget")
}
