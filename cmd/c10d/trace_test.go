package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
)

// TestTrace merges the dumps of four ranks.
func TestTrace(t *testing.T) {
	dir := t.TempDir()
	args := []string{"trace", "-o", filepath.Join(dir, "job.json")}
	pgtest.Run(t, 4, func(t *testing.T, g *pg.ProcessGroup) {
		for range 3 {
			if err := pg.AllReduceSlice(t.Context(), g, []float32{1}, backend.Sum()); err != nil {
				t.Error(err)
			}
		}
		f, err := os.Create(filepath.Join(dir, "rank_"+string(rune('0'+g.Rank()))))
		if err == nil {
			_, err = g.Recorder().WriteTo(f)
			f.Close()
		}
		if err != nil {
			t.Error(err)
		}
	})
	dumps, err := filepath.Glob(filepath.Join(dir, "rank_*"))
	require.NoError(t, err)
	var out, errs bytes.Buffer
	require.Zero(t, dispatch(stdio{nil, &out, &errs}, append(args, dumps...)), errs.String())
	require.True(t, strings.HasPrefix(out.String(), "4 dumps of ranks 0-3\n"), out.String())
	require.Equal(t, 3, strings.Count(out.String(), "all_reduce, collective"))

	out.Reset()
	require.Zero(t, dispatch(stdio{nil, &out, &errs}, append([]string{"trace", "-json"}, dumps...)), errs.String())
	var report struct {
		Ranks []int
		Late  []struct{ Op string }
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &report))
	require.Equal(t, []int{0, 1, 2, 3}, report.Ranks)
	require.Len(t, report.Late, 3)
	text, err := os.ReadFile(args[2])
	require.NoError(t, err)
	require.True(t, json.Valid(text))
	require.Equal(t, 12, bytes.Count(text, []byte(`"name":"all_reduce"`)))

	errs.Reset()
	require.Equal(t, 1, dispatch(stdio{nil, &out, &errs}, append([]string{"trace", "-o"}, dumps...)), "rank 0's dump is the value of -o")
	require.Contains(t, errs.String(), "rank_0 is a rank's dump: name another file")
	require.Zero(t, dispatch(stdio{nil, &out, &errs}, append(args, dumps...)), "the dump is still there, and the last trace is replaced")
	errs.Reset()
	require.Equal(t, exitUsage, dispatch(stdio{nil, &out, &errs}, []string{"trace"}))
	require.Contains(t, errs.String(), "no dumps: give the files of all ranks")
	errs.Reset()
	require.Equal(t, 1, dispatch(stdio{nil, &out, &errs}, []string{"trace", args[2]}))
	require.Contains(t, errs.String(), "job.json: byte 1")
}
