//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/bytesize"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// TestBenchChecksEveryOperation measures each operation briefly, its results checked.
func TestBenchChecksEveryOperation(t *testing.T) {
	for _, op := range benchOps() {
		t.Run(op, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
				b := bench{tensors: coalesced, ops: list{op}, begin: 4, end: 1024, factor: 16, iters: 3, warmup: 1, repeat: 2, json: true, check: true}
				var out bytes.Buffer
				require.NoError(t, b.series(t.Context(), g, nil, tensor.Float32, pg.Sum(), stdio{out: &out}))
				lines := strings.Split(strings.TrimSpace(out.String()), "\n")
				if g.Rank() != 0 {
					require.Empty(t, out.String())
					return
				}
				want := 3
				if op == "barrier" {
					want = 1 // it has no sizes
				}
				require.Len(t, lines, want)
				for _, l := range lines {
					var r record
					require.NoError(t, json.Unmarshal([]byte(l), &r))
					require.Equal(t, op, r.Op)
					require.Equal(t, 3, r.World)
					require.Equal(t, 3, r.Iters)
					require.Positive(t, r.P50)
					require.GreaterOrEqual(t, r.P99, r.P50)
					require.GreaterOrEqual(t, r.Spread, 1.0)
				}
			})
		})
	}
}

// TestBenchAlloc: the results are right, and the records and the header say which tensors they are of.
func TestBenchAlloc(t *testing.T) {
	for _, json := range []bool{false, true} {
		pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
			b := bench{tensors: coalesced, ops: benchOps(), sizes: sizeList{256 << 10}, iters: 2, repeat: 1, json: json, check: true, alloc: true}
			var out bytes.Buffer
			require.NoError(t, b.series(t.Context(), g, nil, tensor.Float32, pg.Sum(), stdio{out: &out}))
			switch {
			case g.Rank() != 0:
			case json:
				require.Equal(t, len(b.ops), strings.Count(out.String(), `"alloc":true`))
			default:
				require.Contains(t, out.String(), "# tensors of Alloc, in ")
				require.Regexp(t, `(?m)^# average bus bandwidth: [0-9.]+ GB/s\n\z`, out.String())
			}
		})
	}
}

// TestBenchTune measures a table that groups can use.
func TestBenchTune(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "table")
	p := start(t, nil, "bench", "-world", "2", "-tune", file, "-op", "broadcast,all_gather_into_tensor", "-sizes", "64,4K", "-n", "3", "-repeat", "1")
	require.Zero(t, p.wait(), p.stderr.String())
	table := must.Get(choice.Load(file))
	require.Contains(t, table.Command(), "c10d bench")
	require.Contains(t, table.Command(), "-sizes=64,4K")
	found := map[string]bool{}
	for _, r := range table.Rows() {
		require.Equal(t, "tcp", r.Wire)
		require.Equal(t, 2, r.Ranks)
		require.Positive(t, r.Time)
		found[fmt.Sprint(r.Op, " ", r.Bytes)] = true
	}
	require.Equal(t, map[string]bool{"broadcast 64": true, "broadcast 4096": true, "all_gather 32": true, "all_gather 2048": true}, found)
	p = start(t, []string{"C10D_TABLE=" + file}, "doctor", "-world", "2", "-wire", "tcp", "-links=false")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), "broadcast")
}

// TestBenchTuneKeepsItsWork: sizes whose blocks are equally large are measured once, and a file that cannot be
// written does not lose the table.
func TestBenchTuneKeepsItsWork(t *testing.T) {
	p := start(t, nil, "bench", "-world", "2", "-tune", filepath.Join(t.TempDir(), "missing", "table"), "-op", "all_gather_into_tensor", "-sizes", "64,65", "-n", "3", "-repeat", "1")
	require.NotZero(t, p.wait())
	require.Contains(t, p.stderr.String(), "no such file or directory: the table is on standard output instead")
	table := must.Get(choice.Parse(strings.NewReader(p.output())))
	for _, r := range table.Rows() {
		require.EqualValues(t, 32, r.Bytes)
	}
	require.NotEmpty(t, table.Rows())
}

// TestBenchTuneHidesTheStore: the table does not have the URL of the store, which may have a password.
func TestBenchTuneHidesTheStore(t *testing.T) {
	dir := t.TempDir()
	file, store := filepath.Join(dir, "table"), filepath.Join(dir, "correct-horse")
	var ranks []*program
	for rank := range 2 {
		ranks = append(ranks, start(t, nil, "bench", "-init", fmt.Sprintf("file://%s?rank=%d&world_size=2", store, rank),
			"-tune", file, "-op", "broadcast", "-sizes", "64", "-n", "3", "-repeat", "1"))
	}
	for _, p := range ranks {
		require.Zero(t, p.wait(), p.stderr.String())
	}
	text := must.Get(os.ReadFile(file))
	require.Contains(t, string(text), "-op=broadcast")
	require.NotContains(t, string(text), "correct-horse")
}

// TestBenchFindsWrongResults lets one rank contribute what it should not.
func TestBenchFindsWrongResults(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		c := must.Get(newCase((*gpu)(nil).tensor, "all_reduce", g, nil, tensor.Float32, pg.Sum(), 64, false, coalesced))
		wrong := g.Rank()
		require.ErrorContains(t, c.check(t.Context(), 2*wrong), "wrong result: element 0 is 4, want 3")
	})
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]int{"0": 0, "4": 4, "1k": 1 << 10, "64K": 64 << 10, "3M": 3 << 20, "1G": 1 << 30} {
		var b bytesize.Size
		require.NoError(t, b.Set(text))
		require.Equal(t, want, int(b))
		require.Equal(t, strings.ToUpper(text), b.String())
	}
	for _, text := range []string{"", "K", "-1", "1T", "1.5M", "100000G", "9223372036854775807K"} {
		var b bytesize.Size
		require.Error(t, b.Set(text), text)
	}
}

func TestBenchSizes(t *testing.T) {
	b := bench{tensors: coalesced, begin: 4, end: 1 << 10, factor: 16}
	require.Equal(t, []int{4, 64, 1024}, b.sizesOf("reduce"))
	require.Equal(t, []int{0}, b.sizesOf("barrier"))
	require.NoError(t, b.sizes.Set("4,1K,64K"))
	require.Equal(t, []int{4, 1024, 65536}, b.sizesOf("reduce"))
	require.Equal(t, "4,1K,64K", b.sizes.String())
	require.Error(t, b.sizes.Set("4,,8"))
	zero := bench{tensors: coalesced, begin: 0, end: 4, factor: 2}
	require.Equal(t, []int{0, 1, 2, 4}, zero.sizesOf("reduce"))
	large := bench{tensors: coalesced, begin: 4, end: 8, factor: math.MaxInt/2 + 1} // four times that is 0
	require.Equal(t, []int{4}, large.sizesOf("reduce"))
}

// TestBenchFlags holds what cannot be done to errors that say so.
func TestBenchFlags(t *testing.T) {
	for want, args := range map[string][]string{
		`unknown -op "nothing"`:      {"-op", "all_reduce,nothing"},
		"-f must be at least 2":      {"-f", "1"},
		"-alloc is for tensors":      {"-alloc", "-tune", "x"},
		`unexpected argument "more"`: {"more"},
		"empty part":                 {"-op", "all_reduce,,reduce"},
		"-dtype: tensor: unknown":    {"-world", "2", "-dtype", "nothing"},
		"-reduce: reduce: unknown":   {"-world", "2", "-reduce", "nothing"},
		"-json is for records":       {"-json", "-tune", "x"},
	} {
		var out, errs bytes.Buffer
		require.NotZero(t, dispatch(stdio{out: &out, err: &errs}, append([]string{"bench"}, args...)))
		require.Contains(t, errs.String(), want)
	}
	b := bench{tensors: coalesced, ops: list{"all"}, factor: 2, repeat: 1}
	require.NoError(t, b.complete())
	require.EqualValues(t, benchOps(), b.ops)
}

// TestProgress shows nothing in the first second, and then leaves no rest of a
// line behind.
func TestProgress(t *testing.T) { synctest.Test(t, testProgress) }

func testProgress(t *testing.T) {
	var out bytes.Buffer
	p := &progress{out: &out, began: time.Now()}
	p.show("early")
	p.clear()
	require.Empty(t, out.String())
	p.began = time.Now().Add(-time.Hour)
	p.show("size %d", 1)
	require.Equal(t, "\r1h0m0s  size 1\r", out.String())
	out.Reset()
	p.show("too soon")
	require.Empty(t, out.String())
	p.clear()
	require.Equal(t, "\r"+strings.Repeat(" ", len("1h0m0s  size 1"))+"\r", out.String())
	out.Reset()
	p.clear()
	require.Empty(t, out.String())
	var none *progress
	none.show("nothing")
	none.clear()
}
