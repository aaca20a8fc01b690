//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestPeersScript runs bench/peers.sh with this program and two scripts as peers, one of which
// ends early. Systems take turns, and bars are compared with the records.
func TestPeersScript(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(name, []byte(text), 0o755))
		return name
	}
	// python bench/torch_gloo.py --cases - --backend gloo --device cuda ...
	python := write("python", `#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi
echo
while read -r world op size; do
	echo "$5 $world $op $size" >>"`+filepath.Join(dir, "asked")+`"
	printf '{"system":"torch-%s","op":"%s","dtype":"float32","size":%s,"world":%s,"device":"sim","time_us_p50":1e12}\n\n' "$5" "$op" "$size" "$world"
	if [ "$5" = nccl ]; then exit 3; fi
done
`)
	bars := write("bars", "all_reduce 2 4,64 torch-gloo 2x\nbarrier 2 - torch-nccl 2x\nall_reduce 2 4 torch-nccl 2x\nall_reduce 2 4 - 0.0001us # too fast\n")
	p := startCommand(t, []string{
		"C10D=" + self, "PYTHON=" + python, "BARS=" + bars, "DEVICE=sim", "OUT=" + filepath.Join(dir, "out"), "PASSES=1", "BUDGET=0.01", "GO=none",
	}, exec.Command("../../bench/peers.sh"))
	require.Zero(t, p.wait(), p.stderr.String())
	asked := must.Get(os.ReadFile(filepath.Join(dir, "asked")))
	require.Equal(t, "gloo 2 all_reduce 4\nnccl 2 all_reduce 4\ngloo 2 all_reduce 64\ngloo 2 barrier 0\n", string(asked))
	require.Contains(t, p.stderr.String(), "# pass 1 of 1, case 3 of 3, after ")
	require.Contains(t, p.stderr.String(), "# torch-nccl has ended")
	require.Regexp(t, `(?m)^all_reduce +2 +64 +torch-gloo +2x +[0-9.]+x +holds$`, p.output())
	require.Regexp(t, `(?m)^all_reduce +2 +4 - +0\.0001us +[0-9.]+us +missed$`, p.output())
	require.Contains(t, p.output(), "# 3 of 4 bars hold; 1 more were not measured")
	require.FileExists(t, filepath.Join(dir, "out", "c10d-go.jsonl"))

	p = startCommand(t, []string{
		"C10D=" + self, "PYTHON=" + filepath.Join(dir, "none"), "DEVICE=sim", "SIZES=4", "OUT=" + filepath.Join(dir, "late"), "WITHIN=0",
	}, exec.Command("../../bench/peers.sh"))
	require.NotZero(t, p.wait(), "nothing was measured")
	require.Contains(t, p.stderr.String(), "# 0 s are over: 0 cases of pass 1 were measured")
	require.Contains(t, p.stderr.String(), "# no PyTorch at ")
}
