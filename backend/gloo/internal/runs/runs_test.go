package runs_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/gloo/internal/runs"
)

func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// some returns up to n ascending keys of a range.
func some(r *rand.Rand, n int, from, span uint64) []uint64 {
	keys := []uint64{}
	if span == 0 {
		return keys
	}
	for range n {
		keys = append(keys, from+r.Uint64N(span))
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

var spans = []uint64{0, 1, 7, 8, 9, 64, 255, 256, 257, 1000, 1 << 16, 1<<16 + 1, 1 << 32, 1<<32 + 1, 1 << 60, math.MaxInt64}

func TestCode(t *testing.T) {
	r := seeded(t)
	for round := range 4000 {
		span := spans[round%len(spans)]
		from := r.Uint64N(1<<63 - span)
		keys := some(r, r.IntN(400), from, span)
		n := runs.Bytes(len(keys), span)
		require.LessOrEqual(t, n, int64(8*len(keys)))
		if span > 0 && span < 1<<20 {
			require.LessOrEqual(t, uint64(n), span/8+1)
		}
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		runs.Encode(b, keys, from, span)
		got := make([]uint64, len(keys))
		require.NoError(t, runs.Decode(got, b, from, span))
		require.Equal(t, keys, got)
	}
}

func TestDecodeRefuses(t *testing.T) {
	words := func(v ...uint32) []byte {
		var b []byte
		for _, w := range v {
			b = binary.LittleEndian.AppendUint32(b, w)
		}
		return b
	}
	for _, c := range []struct {
		name string
		keys int
		span uint64
		src  []byte
		want string
	}{
		{"too short", 2, 1 << 20, words(1), "in 4 bytes, want 8"},
		{"outside", 2, 1 << 20, words(1, 1<<20), "key 1 is 1048576, outside a range of 1048576"},
		{"twice", 2, 1 << 20, words(5, 5), "key 1 does not come after"},
		{"descending", 3, 1 << 20, words(5, 7, 6), "key 2 does not come after"},
		{"bits outside", 4, 12, []byte{0b111, 0b10000}, "a key outside a range of 12"},
		{"too many bits", 3, 12, []byte{0b111, 0b1000}, "more keys than the 3"},
		{"too few bits", 5, 12, []byte{0b111, 0b1000}, "4 keys, announced were 5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.ErrorContains(t, runs.Decode(make([]uint64, c.keys), c.src, 100, c.span), c.want)
		})
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 2, 0, 0, 0}, 2, uint64(1<<20))
	f.Add([]byte{7, 8}, 4, uint64(12))
	f.Fuzz(func(t *testing.T, src []byte, n int, span uint64) {
		if n < 0 || n > 1<<16 || span > math.MaxInt64 {
			return
		}
		keys := make([]uint64, n)
		if runs.Decode(keys, src, 3, span) != nil {
			return
		}
		again := make([]byte, len(src))
		runs.Encode(again, keys, 3, span)
		require.Equal(t, src, again)
		for i, k := range keys {
			require.Less(t, k-3, span)
			require.True(t, i == 0 || k > keys[i-1])
		}
	})
}

// trace writes down who was combined with whom, so that the order shows.
func trace(dst, src []byte) {
	for i := range dst {
		dst[i] = dst[i]*31 + src[i]
	}
}

func TestMerge(t *testing.T) {
	r := seeded(t)
	var m runs.Merger
	for round := range 2000 {
		span := spans[1+round%(len(spans)-1)]
		from := r.Uint64N(1<<63 - span)
		row := r.IntN(4)
		all := make([][]uint64, 1+r.IntN(9))
		values := make([][]byte, len(all))
		want, order := map[uint64][]byte{}, map[uint64][]byte{}
		dense := 1 + r.IntN(200)
		for i := range all {
			if r.IntN(5) > 0 {
				all[i] = some(r, r.IntN(dense), from, span)
			}
			values[i] = make([]byte, row*len(all[i]))
			for j, k := range all[i] {
				v := values[i][j*row : (j+1)*row]
				for x := range v {
					v[x] = byte(r.Uint32())
				}
				if have, ok := want[k]; ok {
					trace(have, v)
				} else {
					want[k] = slices.Clone(v)
				}
				order[k] = append(order[k], byte(i))
			}
		}
		union := slices.Clone(m.Union(all, from, span))
		require.Len(t, union, len(want))
		require.True(t, slices.IsSorted(union))
		got := make([]byte, row*len(union))
		for i := range got {
			got[i] = 0xee
		}
		m.Sum(got, row, values, trace)
		m.Union(all, from, span)
		once := make([]byte, row*len(union))
		m.SumAtOnce(once, row, values, func(dst []byte, rows [][]byte) {
			copy(dst, rows[0])
			for _, v := range rows[1:] {
				trace(dst, v)
			}
		})
		for i, k := range union {
			sum, there := want[k]
			if !there || !bytes.Equal(sum, got[i*row:(i+1)*row]) {
				require.Failf(t, "wrong sum", "key %d of runs %v: %x, want %x", k, order[k], got[i*row:(i+1)*row], sum)
			}
		}
		require.Equal(t, got, once)
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	r := seeded(t)
	for _, span := range []uint64{1000, 1 << 50} {
		all, values := make([][]uint64, 4), make([][]byte, 4)
		for i := range all {
			all[i] = some(r, 300, 0, span)
			values[i] = make([]byte, 4*len(all[i]))
		}
		var m runs.Merger
		dst := make([]byte, 4*1200)
		run := func() {
			m.Union(all, 0, span)
			m.Sum(dst, 4, values, trace)
			m.Union(all, 0, span)
			m.SumAtOnce(dst, 4, values, func([]byte, [][]byte) {})
		}
		run()
		require.Zero(t, testing.AllocsPerRun(10, run))
		require.Positive(t, m.Size())
	}
}

// BenchmarkUnion has 8 runs of 10 000 keys, by how many bits of the range there
// are for each.
func BenchmarkUnion(b *testing.B) {
	const n, ranks = 10_000, 8
	for _, per := range []uint64{1, 16, 64, 127, 129, 1 << 20} {
		b.Run(fmt.Sprintf("bits=%d", per), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 1))
			span := per * n * ranks
			all := make([][]uint64, ranks)
			for i := range all {
				all[i] = some(r, n, 0, span)
			}
			var m runs.Merger
			for b.Loop() {
				m.Union(all, 0, span)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n*ranks), "ns/key")
		})
	}
}
