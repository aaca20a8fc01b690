package main

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/netns"
)

// TestFaultsEndBySignal: SIGTERM, as Ctrl-C, leaves no network behind.
func TestFaultsEndBySignal(t *testing.T) {
	for program, from := range netns.Programs {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s command (Debian: %s)", program, from)
		}
	}
	probe, err := netns.New("probe", 1)
	if err != nil {
		t.Skipf("network namespaces are not permitted here: %v", err)
	}
	probe.Close()
	networks := func() string {
		out, err := exec.Command("ip", "netns", "list").Output()
		require.NoError(t, err)
		return string(out)
	}
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		p := start(t, nil, "faults", "-python", "", "-parallel", "1", "-wire", "TCP", "-fault", "SIGKILL", "-op", "all_reduce")
		bridge := fmt.Sprintf("c10d%d0br", p.cmd.Process.Pid)
		for until := time.Now().Add(patience); !strings.Contains(networks(), bridge); {
			require.True(t, time.Now().Before(until), "no network: %s", p.stderr.String())
		}
		require.NoError(t, p.cmd.Process.Signal(signal))
		require.Equal(t, 1, p.wait(), p.stderr.String())
		require.NotContains(t, networks(), bridge)
	}
}
