package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestRunAsProcess1: as process 1 of a container the launcher reaps what its ranks leave behind, shows how they end, and
// takes signals.
func TestRunAsProcess1(t *testing.T) {
	self := must.Get(os.Executable())
	if out, err := exec.Command("unshare", "-p", "-f", "--mount-proc", "true").CombinedOutput(); err != nil {
		t.Skipf("no process namespace: %v: %s", err, out)
	}
	file := filepath.Join(t.TempDir(), "ended")
	script := fmt.Sprintf(`
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (sh -c 'echo x >>%[1]s' &); done
until [ $(wc -l <%[1]s) = 40 ]; do sleep 0.05; done
for i in $(seq 100); do
	n=0
	for f in /proc/[0-9]*/stat; do read -r _ _ state parent _ <$f; [ "$state$parent" = Z1 ] && n=$((n + 1)); done
	[ $n = 0 ] && echo reaped && exec sleep 600
	sleep 0.1
done 2>/dev/null
echo "$n zombies"`, file)
	p := startCommand(t, nil, exec.Command("unshare", "-p", "-f", "--mount-proc", self, "run", "-json", "-n", "2", "--", "sh", "-c", script))
	p.await(2, "reaped")
	// unshare waits for process 1 and takes no signal itself.
	children := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", p.cmd.Process.Pid)))
	var pid int
	must.Get(fmt.Sscan(strings.TrimSpace(string(children)), &pid))
	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))
	require.Equal(t, 128+15, p.wait(), p.stderr.String())
	require.Equal(t, "SIGTERM", p.summary().Signal)
}
