package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDeath kills ranks and launchers in the middle of a training that would
// take hours, and checks who is blamed and that nothing
// stays behind. It finds the ranks in /proc.
func TestDeath(t *testing.T) {
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		rank   int // -1: the launcher
		device string
		want   string
	}{
		{"rank killed", syscall.SIGKILL, 2, onCPU, "ddp: rank 2: signal: killed (of 3 ranks)"},
		{"rank 0 killed", syscall.SIGKILL, 0, onCPU, "ddp: rank 0: signal: killed (of 3 ranks)"},
		{"rank killed, on devices", syscall.SIGKILL, 2, onSim, "ddp: rank 2: signal: killed (of 3 ranks)"},
		{"launcher interrupted", syscall.SIGINT, -1, onCPU, "ddp: interrupted"},
		{"launcher interrupted, on devices", syscall.SIGINT, -1, onSim, "ddp: interrupted"},
		{"launcher killed", syscall.SIGKILL, -1, onCPU, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := program(t, "-nproc", "3", "-epochs", "1000000", "-device", c.device)
			// A copy of a pipe would make Wait last until every rank has closed it.
			says, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
			require.NoError(t, err)
			defer says.Close()
			cmd.Stderr = says
			require.NoError(t, cmd.Start())
			read := func() string {
				b, err := os.ReadFile(says.Name())
				require.NoError(t, err)
				return string(b)
			}
			require.Eventually(t, func() bool { return strings.Contains(read(), "epoch ") }, limit, 10*time.Millisecond)
			ranks := children(t, cmd.Process.Pid)
			require.Len(t, ranks, 3)
			victim := cmd.Process.Pid
			if c.rank >= 0 {
				victim = ranks[c.rank]
			}
			require.NoError(t, syscall.Kill(victim, c.signal))
			require.Error(t, cmd.Wait())
			require.Contains(t, read(), c.want)
			for rank, pid := range ranks {
				require.Eventually(t, func() bool { return !runs(pid) }, limit, 10*time.Millisecond, "rank %d stays", rank)
			}
		})
	}
}

// children returns the ranks' process ids by rank.
func children(t *testing.T, pid int) map[int]int {
	t.Helper()
	all, err := os.ReadDir("/proc")
	require.NoError(t, err)
	ranks := make(map[int]int)
	for _, e := range all {
		child, err := strconv.Atoi(e.Name())
		if err != nil || stat(child, 1) != strconv.Itoa(pid) {
			continue
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", child))
		require.NoError(t, err)
		for _, v := range strings.Split(string(env), "\x00") {
			if rank, ok := strings.CutPrefix(v, "RANK="); ok {
				n, err := strconv.Atoi(rank)
				require.NoError(t, err)
				ranks[n] = child
			}
		}
	}
	return ranks
}

// stat returns a field behind the name in /proc/PID/stat: 0 is the state, 1 the parent.
func stat(pid, field int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))[field]
}

func runs(pid int) bool {
	state := stat(pid, 0)
	return state != "" && state != "Z" && state != "X"
}
