package torchtest

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestPrograms: a program has the command's arguments, files, environment and folder, PyTorch, and the command its end.
func TestPrograms(t *testing.T) {
	Need(t)
	const text = `
import os, sys, torch.distributed as dist
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), sys.stdin.read(), dist.is_available(), dist.get_debug_level().name)
print("error", file=sys.stderr)
sys.exit(int(os.environ["CODE"]))
`
	file := filepath.Join(t.TempDir(), "program.py")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	for _, program := range [][]string{{"-c", text, "a b", "c"}, {file, "a b", "c"}} {
		for _, code := range []string{"0", "3"} {
			cmd := Command(t.Context(), t, program...)
			cmd.Dir = t.TempDir()
			cmd.Env = append(os.Environ(), "WORD=word", "CODE="+code, "TORCH_DISTRIBUTED_DEBUG=DETAIL")
			cmd.Stdin = strings.NewReader("input")
			var out, errs strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &errs
			err := cmd.Run()
			require.Equal(t, code == "0", err == nil, "%v: %s", err, &errs)
			require.Equal(t, code, map[int]string{0: "0", 3: "3"}[cmd.ProcessState.ExitCode()])
			require.Equal(t, "['a b', 'c'] word "+cmd.Dir+" input True DETAIL\n", out.String())
			require.Equal(t, "error\n", errs.String())
		}
	}
}

// TestKill: a program ends with its command.
func TestKill(t *testing.T) {
	cmd := Command(context.Background(), t, "-c", "import time; print('there', flush=True); time.sleep(600)")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewReader(out)
	must.Get(lines.ReadString('\n'))
	require.NoError(t, cmd.Process.Kill())
	_, err = lines.ReadString('\n') // the program has closed it
	require.Error(t, err)
	must.As[*exec.ExitError](t, cmd.Wait())
}
