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
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/torchtest"
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
// root of the tree. The first block of a page runs before the others. Lines of a block "text" below one must be among those that the commands print.
func TestPages(t *testing.T) {
	for _, program := range []string{"bash", "mpirun", "mpiexec", "torchrun"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
				require.NoError(t, err, "C10D_REQUIRE_SERVICES is set")
			}
			t.Skip("a program of the pages is not installed: ", err)
		}
	}
	root := must.Get(filepath.Abs(".."))
	pages := must.Get(filepath.Glob("*.md"))
	blocks := 0
	for _, page := range pages {
		text := must.Get(os.ReadFile(page))
		for i, b := range block.FindAllStringSubmatch(string(text), -1) {
			blocks++
			t.Run(page+"/"+firstLine(b[1]), func(t *testing.T) {
				if i > 0 { // the first block of a page may build what the others start
					t.Parallel() // they wait for processes
				}
				runBlock(t, root, b[1], b[2])
			})
		}
	}
	require.NotZero(t, blocks)
}

func runBlock(t *testing.T, root, commands, want string) {
	bin := t.TempDir()
	for name, text := range map[string]string{"sbatch": strings.Replace(sbatch, "PORT", port(t), 1), "srun": srun} {
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755))
	}
	runIn(t, root, bin+":"+filepath.Join(root, "bin"), commands, want)
}

// port returns a free port.
func port(t *testing.T) string {
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	return port
}

// runIn runs commands in a directory, with more directories of programs, and looks for the lines want in what they
// print.
func runIn(t *testing.T, dir, bin, commands, want string) {
	// Other jobs may have the ports of the pages.
	for _, taken := range []string{"29500", "6060"} {
		free := port(t)
		commands, want = strings.ReplaceAll(commands, taken, free), strings.ReplaceAll(want, taken, free)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"),
		// mpirun refuses root and more ranks than CPUs. Two that make its folder in one place at the
		// same moment fail by themselves.
		"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "OMPI_MCA_rmaps_base_oversubscribe=1", "OMPI_MCA_orte_tmpdir_base="+t.TempDir())
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

var (
	readmeGo     = regexp.MustCompile("(?s)```go\n(func main\\(\\) \\{\n.*?)```")
	readmePython = regexp.MustCompile("(?s)```python\n(.*?)```")
	readmeBlock  = regexp.MustCompile("(?s)```\n(\\$ .*?)```")
)

// TestReadme runs the programs of README.md as it says, on one host and beside PyTorch ranks, and compares what they
// print.
func TestReadme(t *testing.T) {
	t.Parallel()
	root := must.Get(filepath.Abs(".."))
	readme := string(must.Get(os.ReadFile(filepath.Join(root, "README.md"))))
	must.Do(os.MkdirAll(filepath.Join(root, "bin"), 0o755))
	dir := must.Get(os.MkdirTemp(filepath.Join(root, "bin"), "_readme")) // in the module, and not in ./...
	t.Cleanup(func() { os.RemoveAll(dir) })
	program := "package main\n\nimport (\n\t\"context\"\n\t\"fmt\"\n\t\"log\"\n\n\t\"github.com/c10d-go/c10d/pg\"\n)\n\n" + readmeGo.FindStringSubmatch(readme)[1]
	must.Do(os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o644))
	must.Do(os.WriteFile(filepath.Join(dir, "sum.py"), []byte(readmePython.FindStringSubmatch(readme)[1]), 0o644))
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, "./cmd/c10d")
	build.Dir = root
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	ran := 0
	for _, b := range readmeBlock.FindAllStringSubmatch(readme, -1) {
		if strings.Contains(b[1], "10.0.0.") {
			continue // two hosts: docs/launchers.md has the same with names of hosts
		}
		var commands, want string
		for line := range strings.Lines(b[1]) {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				commands += command
			} else {
				want += line
			}
		}
		t.Run(firstLine(commands), func(t *testing.T) {
			if strings.Contains(commands, "python3") {
				// PATH may lead to a Python without PyTorch.
				require.NoError(t, os.Symlink(torchtest.Interpreter(t), filepath.Join(bin, "python3")))
			}
			runIn(t, dir, bin, commands, want)
		})
		ran++
	}
	require.Equal(t, 2, ran, "blocks of commands with their output")
}
