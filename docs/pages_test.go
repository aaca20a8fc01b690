// Package docs tests the commands in the documents.
package docs

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
)

// block is a block of commands and, if one follows, that of lines which they print.
var block = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?")

// sbatch and srun stand in for Slurm's programs. They understand what examples/slurm uses, and play
// all nodes on this host.
const (
	sbatch = `#!/bin/bash
script=${@: -1}
value() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
nodes=$(value nodes) each=$(value ntasks-per-node)
export SLURM_NNODES=$nodes SLURM_NTASKS=$((nodes * each)) SLURM_CPUS_PER_TASK=$(value cpus-per-task)
export SLURM_TASKS_PER_NODE="$each(x$nodes)" SLURM_JOB_ID=7 SLURM_STEP_RESV_PORTS=PORT SLURM_JOB_NODELIST=127.0.0.1
exec bash "$script"
`
	srun = `#!/bin/bash
each=$((SLURM_NTASKS / SLURM_NNODES))
for ((r = 0; r < SLURM_NTASKS; r++)); do
	SLURM_STEP_ID=0 SLURM_PROCID=$r SLURM_NODEID=$((r / each)) SLURM_LOCALID=$((r % each)) "${@: -1}" | sed "s/^/$r: /" &
	ranks+=($!)
done
for r in "${ranks[@]}"; do wait $r || exit; done
`
)

// TestPages runs the blocks of commands in these documents ("sh"), each in a shell of its own, in the
// root of the tree. Lines of a block "text" below one must be among those that the commands print.
func TestPages(t *testing.T) {
	for _, program := range []string{"bash", "mpirun", "mpiexec", "torchrun"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
				require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
			}
			t.Skip("a program of the pages is not installed: ", err)
		}
	}
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	pages, err := filepath.Glob("*.md")
	require.NoError(t, err)
	blocks := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, b := range block.FindAllStringSubmatch(string(text), -1) {
			blocks++
			t.Run(page+"/"+firstLine(b[1]), func(t *testing.T) { runBlock(t, root, b[1], b[2]) })
		}
	}
	require.NotZero(t, blocks)
}

func runBlock(t *testing.T, root, commands, want string) {
	// Another job may have the port of the pages.
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	commands, want = strings.ReplaceAll(commands, "29500", port), strings.ReplaceAll(want, "29500", port)

	bin := t.TempDir()
	for name, text := range map[string]string{"sbatch": strings.Replace(sbatch, "PORT", port, 1), "srun": srun} {
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+filepath.Join(root, "bin")+":"+os.Getenv("PATH"),
		// mpirun refuses root and more ranks than CPUs. Two that make its folder in one place at the
		// same moment fail by themselves.
		"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_orte_tmpdir_base="+bin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 10 * time.Second
	require.NoError(t, cmd.Run(), "%s\n%s", commands, &out)
	for line := range strings.Lines(want) {
		require.Contains(t, "\n"+out.String(), "\n"+line, commands)
	}
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
