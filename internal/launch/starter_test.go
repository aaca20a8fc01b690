package launch

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestStarter finds hydra's process among a rank's ancestors in a process file system that it writes.
func TestStarter(t *testing.T) {
	host := must.Get(os.Hostname())
	root := t.TempDir()
	process := func(pid, parent int, name, began string, args ...string) {
		dir := filepath.Join(root, strconv.Itoa(pid))
		require.NoError(t, os.Mkdir(dir, 0o755))
		stat := strconv.Itoa(pid) + " (" + name + ") S " + strconv.Itoa(parent) + strings.Repeat(" 1", 17) + " " + began + " 0 0\n"
		require.NoError(t, os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cmdline"), []byte(strings.Join(args, "\x00")+"\x00"), 0o600))
	}
	process(1, 0, "init", "1")
	process(10, 1, "hydra_pmi_proxy", "700", "hydra_pmi_proxy", "--control-port", "n1:4321", "--rmk", "user")
	process(11, 10, "sh) 1 (x", "701", "sh", "--control-port", "n1:9")
	process(12, 11, "rank", "702")
	process(20, 1, "hydra_pmi_proxy", "800", "hydra_pmi_proxy", "--usize", "-1") // Intel MPI's
	process(30, 12, "mpispawn", "900", "mpispawn", "0")
	process(40, 40, "its own parent", "1")
	require.NoError(t, os.Mkdir(filepath.Join(root, "50"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(root, "50", "stat"), []byte("50 (hydra_pmi_proxy) S 1"), 0o600))

	for _, c := range []struct {
		name       string
		pid        int
		here, wide string // the job's name if all ranks are on this host, and else
	}{
		{"the proxy", 10, host + "/10.700", "n1:4321"},
		{"a script's child", 12, host + "/10.700", "n1:4321"},
		{"no address of mpiexec", 20, host + "/20.800", ""},
		{"mpirun_rsh within hydra", 30, host + "/30.900", ""},
		{"no starter", 1, "", ""},
		{"a circle", 40, "", ""},
		{"a short line", 50, "", ""},
		{"no process", 99, "", ""},
	} {
		s := starterOf(root, c.pid)
		require.Equal(t, c.here, s.job(true), c.name)
		require.Equal(t, c.wide, s.job(false), c.name)
	}
	require.Equal(t, starter{}, starterOf(filepath.Join(root, "none"), 12))
}
