//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestBars tells which bars hold: factors beside a peer, times alone, of the fastest
// record of any work, and what was not measured.
func TestBars(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
		return name
	}
	records := func(rs ...record) string {
		var b bytes.Buffer
		for _, r := range rs {
			r.DType, r.World = "float32", 2
			require.NoError(t, json.NewEncoder(&b).Encode(r))
		}
		return b.String()
	}
	ours := write("ours", records(
		record{System: "c10d-go", Op: "all_reduce", Size: 4, P50: 2},
		record{System: "c10d-go", Op: "all_reduce", Size: 1024, P50: 3},
		record{System: "c10d-go", Op: "barrier", P50: 1},
		record{System: "c10d-go", Op: "all_reduce", Device: "cuda", Work: "host", Size: 4, P50: 100},
		record{System: "c10d-go", Op: "all_reduce", Device: "cuda", Work: "device", Size: 4, P50: 5},
	))
	peer := write("peer", records(
		record{System: "other", Op: "all_reduce", Size: 4, P50: 9},
		record{System: "other", Op: "all_reduce", Size: 1024, P50: 9},
		record{System: "other", Op: "barrier", P50: 1},
		record{System: "other", Op: "all_reduce", Device: "cuda", Size: 4, P50: 40},
	))
	bars := write("bars", `# what has to hold
all_reduce 2 4,1K other 4x   # 4.5x and 3x
all_reduce,broadcast 2 4 - 2us

barrier 2,3 - other 1x
`)
	run := func(args ...string) string {
		var out, errs bytes.Buffer
		require.Zero(t, dispatch(stdio{out: &out, err: &errs}, append([]string{"bench", "-load", ours, "-beside", peer}, args...)), errs.String())
		return out.String()
	}
	text := run("-bars", bars)
	for _, want := range []string{
		`(?m)^all_reduce +2 +4 +other +4x +4\.50x +holds$`,
		`(?m)^all_reduce +2 +1K +other +4x +3\.00x +missed$`,
		`(?m)^all_reduce +2 +4 +- +2us +2\.00us +holds$`,
		`(?m)^barrier +2 +- +other +1x +1\.00x +holds$`,
		`(?m)^# 3 of 4 bars hold; 2 more were not measured$`,
	} {
		require.Regexp(t, want, text)
	}
	require.NotContains(t, text, "broadcast")
	gpu := write("gpu", "all_reduce 2 4 other 8x")
	require.Regexp(t, `(?m)^all_reduce +2 +4 +other +8x +8\.00x +holds$`, run("-bars", gpu, "-device", "cuda"))

	var out, errs bytes.Buffer
	require.Zero(t, dispatch(stdio{out: &out, err: &errs}, []string{"bench", "-bars", bars}), errs.String())
	require.Equal(t, "2 all_reduce 4\n2 all_reduce 1024\n2 broadcast 4\n2 barrier 0\n3 barrier 0\n", out.String(), "each case once")

	for line, want := range map[string]string{
		"":                             "no bar in it",
		"all_reduce 2 4 other":         "line 1: 4 words",
		"all_reduce 2 4 other 2":       `"2" is not a factor`,
		"all_reduce 2 4 other -2x":     `"-2x" is not a factor`,
		"all_reduce 2 4 - 2x":          "a factor has a peer",
		"all_reduce 2 4 other 2us":     "a time has none",
		"all_reduce 2 4,x other 2x":    `"x" is not a size`,
		"all_reduce two 4 other 2x":    `"two" is not a number of ranks`,
		"#\nall_induce 2 4 other 2x":   `line 2: unknown operation "all_induce"`,
		"all_reduce 2 4 other 2x more": "line 1: 6 words",
	} {
		require.ErrorContains(t, must.Err(loadBars(write("bad", line), "float32", "")), want)
	}
	require.ErrorIs(t, must.Err(loadBars(filepath.Join(dir, "none"), "float32", "")), os.ErrNotExist)
}

// TestPeersScript runs bench/peers.sh with this program and two scripts as peers, one of which
// ends early. Systems take turns, and bars are compared with the records.
func TestPeersScript(t *testing.T) {
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
	bars := write("bars", "all_reduce 2 4,64 torch-gloo 2x\nbarrier 2 - torch-nccl 2x\nall_reduce 2 4 torch-nccl 2x\n")
	p := startCommand(t, []string{
		"C10D=" + self, "PYTHON=" + python, "BARS=" + bars, "DEVICE=sim", "OUT=" + filepath.Join(dir, "out"), "PASSES=1", "BUDGET=0.01", "GO=none",
	}, exec.Command("../../bench/peers.sh"))
	require.Zero(t, p.wait(), p.stderr.String())
	asked := must.Get(os.ReadFile(filepath.Join(dir, "asked")))
	require.Equal(t, "gloo 2 all_reduce 4\nnccl 2 all_reduce 4\ngloo 2 all_reduce 64\ngloo 2 barrier 0\n", string(asked))
	require.Contains(t, p.stderr.String(), "# pass 1 of 1, case 3 of 3, after ")
	require.Contains(t, p.stderr.String(), "# torch-nccl has ended")
	require.Regexp(t, `(?m)^all_reduce +2 +64 +torch-gloo +2x +[0-9.]+x +holds$`, p.output())
	require.Contains(t, p.output(), "# 3 of 3 bars hold; 1 more were not measured")
	require.FileExists(t, filepath.Join(dir, "out", "c10d-go.jsonl"))

	p = startCommand(t, []string{
		"C10D=" + self, "PYTHON=" + filepath.Join(dir, "none"), "DEVICE=sim", "SIZES=4", "OUT=" + filepath.Join(dir, "late"), "WITHIN=0",
	}, exec.Command("../../bench/peers.sh"))
	require.NotZero(t, p.wait(), "nothing was measured")
	require.Contains(t, p.stderr.String(), "# 0 s are over: 0 cases of pass 1 were measured")
	require.Contains(t, p.stderr.String(), "# no PyTorch at ")
}
