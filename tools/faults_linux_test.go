package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/netns"
)

// patience bounds every wait of these tests.
const patience = 3 * time.Minute

// TestFaultsEndBySignal: SIGTERM, as Ctrl-C, leaves no network behind.
func TestFaultsEndBySignal(t *testing.T) {
	for program, from := range netns.Programs {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s command (Debian: %s)", program, from)
		}
	}
	probe, err := netns.New("probe", 1)
	if errors.Is(err, netns.ErrNotPermitted) {
		t.Skip(err)
	}
	require.NoError(t, err)
	probe.Close()
	networks := func() string {
		return string(must.Get(exec.Command("ip", "netns", "list").Output()))
	}
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		self := must.Get(os.Executable())
		cmd := exec.Command(self, "faults", "-python", "", "-parallel", "1", "-wire", "TCP", "-fault", "SIGKILL", "-op", "all_reduce")
		cmd.Env = append(os.Environ(), programVariable+"=1")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		require.NoError(t, cmd.Start())
		bridge := fmt.Sprintf("c10d%d0br", cmd.Process.Pid)
		for until := time.Now().Add(patience); !strings.Contains(networks(), bridge); {
			if time.Now().After(until) {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
				require.Fail(t, "no network", stderr.String())
			}
		}
		require.NoError(t, cmd.Process.Signal(signal))
		_ = cmd.Wait()
		require.Equal(t, 1, cmd.ProcessState.ExitCode(), stderr.String())
		require.NotContains(t, networks(), bridge)
	}
}
