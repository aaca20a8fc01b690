//go:build unix

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPlan prints what a job has kept in its directory of plans.
func TestPlan(t *testing.T) {
	dir := t.TempDir()
	p := start(t, []string{"C10D_PLANS=" + dir}, "bench", "-world", "3", "-clusters", "sim,sim/cpu", "-sizes", "5000", "-n", "1", "-repeat", "1", "-w", "1")
	require.Zero(t, p.wait(), p.stderr.String())
	files, err := filepath.Glob(filepath.Join(dir, "all_reduce-5000-rank2-*.plan"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	var out, errs bytes.Buffer
	require.Zero(t, dispatch(stdio{out: &out, err: &errs}, append([]string{"plan"}, files...)), errs.String())
	require.Regexp(t, `(?s)^# .*rank2-.*: all_reduce of 5000 bytes, rank 2, .*between clusters: chunk 0, all_reduce of ranks \[`, out.String())

	require.NoError(t, os.WriteFile(files[0], []byte("{}\n"), 0o644))
	require.Equal(t, 1, dispatch(stdio{out: &out, err: &errs}, []string{"plan", files[0]}))
	require.Contains(t, errs.String(), files[0]+": cluster: the plan is damaged")
	require.Equal(t, exitUsage, dispatch(stdio{out: &out, err: &errs}, []string{"plan"}))
}
