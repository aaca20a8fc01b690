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
	"github.com/c10d-go/c10d/tensor"
)

// TestBenchChecksEveryOperation measures each operation briefly, its results checked.
func TestBenchChecksEveryOperation(t *testing.T) {
	for _, op := range benchOps() {
		t.Run(op, func(t *testing.T) {
			pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
				b := bench{op: op, begin: 4, end: 1024, factor: 16, iters: 3, warmup: 1, repeat: 2, json: true, check: true}
				var out bytes.Buffer
				require.NoError(t, b.series(t.Context(), g, tensor.Float32, backend.Sum, &out))
				lines := strings.Split(strings.TrimSpace(out.String()), "\n")
				if g.Rank() != 0 {
					require.Empty(t, out.String())
					return
				}
				require.Len(t, lines, 3)
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

// TestBenchFindsWrongResults lets one rank contribute what it should not.
func TestBenchFindsWrongResults(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		c, err := newCase("all_reduce", g, tensor.Float32, backend.Sum, 64)
		require.NoError(t, err)
		wrong := g.Rank()
		require.ErrorContains(t, c.check(t.Context(), 2*wrong, g.Size()), "wrong result: element 0 is 4, want 3")
	})
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]int{"0": 0, "4": 4, "1k": 1 << 10, "64K": 64 << 10, "3M": 3 << 20, "2G": 2 << 30} {
		var b byteSize
		require.NoError(t, b.Set(text))
		require.Equal(t, want, int(b))
		require.Equal(t, strings.ToUpper(text), b.String())
	}
	for _, text := range []string{"", "K", "-1", "1T", "1.5M", "100000G", "9223372036854775807K"} {
		var b byteSize
		require.Error(t, b.Set(text), text)
	}
}

func TestBenchBesideAPeer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "peer.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(`{"system":"other","op":"all_reduce","dtype":"float32","size":64,"world":2,"time_us_p50":1e9}
{"system":"other","op":"all_reduce","dtype":"float32","size":64,"world":2,"time_us_p50":1e8}
{"system":"other","op":"broadcast","dtype":"float32","size":16,"world":2,"time_us_p50":1}
`), 0o644))
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		b := bench{op: "all_reduce", begin: 16, end: 64, factor: 4, iters: 2, warmup: 1, repeat: 1, beside: file}
		var out bytes.Buffer
		require.NoError(t, b.series(t.Context(), g, tensor.Float32, backend.Sum, &out))
		if g.Rank() == 0 {
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			require.Len(t, lines, 4)
			require.Contains(t, lines[1], "other    ratio")
			require.NotContains(t, lines[2], "x")
			require.Contains(t, lines[3], " 100000000.0 ")
		}
		b.op = "reduce"
		require.ErrorContains(t, b.series(t.Context(), g, tensor.Float32, backend.Sum, &out), "has no record of reduce")
	})
}
