package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

type nobody struct{ backend.Backend }

func (nobody) Name() string { return "nobody" }

// TestTraceOfTwoRuns: dumps of different runs have reports of their own.
func TestTraceOfTwoRuns(t *testing.T) {
	dir := t.TempDir()
	var dumps []string
	for i, run := range []string{"first", "second"} {
		name := filepath.Join(dir, "rank_"+strconv.Itoa(i))
		r := trace.New()
		group := r.Join(trace.Member{Name: "0", Rank: i, Ranks: []int{0, 1}, Run: run})
		var c trace.Call
		c.Begin(group, nobody{}, work.AllReduce, nil, nil, -1, 0)
		_, _ = c.Issued(work.Completed(work.Info{}, nil), nil)
		f := must.Get(os.Create(name))
		must.Get(r.WriteTo(f))
		require.NoError(t, f.Close())
		dumps = append(dumps, name)
	}
	var out, errs bytes.Buffer
	require.Zero(t, dispatch(stdio{nil, &out, &errs}, append([]string{"trace", "-o", filepath.Join(dir, "job.json")}, dumps...)), errs.String())
	require.True(t, strings.HasPrefix(out.String(), "The dumps are of 2 runs, which are not compared. The last one alone is written.\n\n1 dump of ranks 0\nrun first\n"), out.String())
	require.Contains(t, out.String(), "\n\n1 dump of ranks 1\nrun second\n")
	text := must.Get(os.ReadFile(filepath.Join(dir, "job.json")))
	require.Equal(t, 1, bytes.Count(text, []byte(`"name":"all_reduce"`)))

	out.Reset()
	require.Zero(t, dispatch(stdio{nil, &out, &errs}, append([]string{"trace", "-json"}, dumps...)), errs.String())
	var runs [2]struct{ Run string }
	d := json.NewDecoder(&out)
	for i := range runs {
		require.NoError(t, d.Decode(&runs[i]))
	}
	require.Equal(t, "first", runs[0].Run)
	require.Equal(t, "second", runs[1].Run)
}

// TestTrace merges the dumps of four ranks.
func TestTrace(t *testing.T) {
	dir := t.TempDir()
	args := []string{"trace", "-o", filepath.Join(dir, "job.json")}
	pgtest.Run(t, 4, func(t *testing.T, g *pg.ProcessGroup) {
		for range 3 {
			if err := pg.Wait(g.AllReduce(t.Context(), pg.Slice([]float32{1}), pg.Sum())); err != nil {
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
	dumps := must.Get(filepath.Glob(filepath.Join(dir, "rank_*")))
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
	text := must.Get(os.ReadFile(args[2]))
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
