package agent

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/must"
)

// asInit is the main function of a process that takes the place of process 1 for what its children leave behind.
func asInit(command []string) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM)
	err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	code := 0
	if err == nil {
		code, err = Init(command, signals)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 99
	}
	os.Exit(code)
}

// children returns the states of the processes whose parent is a process, by process.
func children(t *testing.T, parent int) map[int]string {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	found := make(map[int]string)
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(text), ") ")
		if f := strings.Fields(after); len(f) > 1 && f[1] == strconv.Itoa(parent) {
			pid := must.Get(strconv.Atoi(filepath.Base(filepath.Dir(path))))
			found[pid] = f[0]
		}
	}
	return found
}

// TestInit: orphans are reaped, signals are passed on, and the command's exit code is that of the process.
func TestInit(t *testing.T) {
	self := must.Get(os.Executable())
	file := filepath.Join(t.TempDir(), "ended")
	cmd := exec.Command(self, "/bin/sh", "-c", fmt.Sprintf(`
trap 'exit 7' TERM
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (sh -c 'echo x >>%s' &); done
while :; do sleep 0.05; done`, file))
	cmd.Env = append(os.Environ(), initVariable+"=1")
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		for pid := range children(t, cmd.Process.Pid) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		cmd.Process.Kill()
	})
	require.Eventually(t, func() bool {
		text, _ := os.ReadFile(file)
		return strings.Count(string(text), "x") == 20 && len(children(t, cmd.Process.Pid)) == 1
	}, time.Minute, 10*time.Millisecond, "orphans that have ended are left: %v", children(t, cmd.Process.Pid))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.Error(t, cmd.Wait())
	require.Equal(t, 7, cmd.ProcessState.ExitCode())
}

func TestInitOfASignal(t *testing.T) {
	self := must.Get(os.Executable())
	for script, want := range map[string]int{"kill -9 $$": 137, "exit 0": 0} {
		cmd := exec.Command(self, "/bin/sh", "-c", script)
		cmd.Env = append(os.Environ(), initVariable+"=1")
		_ = cmd.Run()
		require.Equal(t, want, cmd.ProcessState.ExitCode(), script)
	}
	out, err := exec.Command("env", initVariable+"=1", self, "/no/such").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "/no/such: no such file or directory")
}
