package run

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

func TestDescribe(t *testing.T) {
	sum, avg, max := backend.Sum(), backend.Avg(), backend.Max()
	f := tensor.Float32
	for want, print := range map[string]fingerprint{
		"all_reduce(sum) of float32[5]":              {op: work.AllReduce, with: &sum, dtype: f, root: -1, elements: 5, sized: true},
		"all_reduce(max) of float32[0]":              {op: work.AllReduceCoalesced, with: &max, dtype: f, root: -1, sized: true},
		"all_reduce of a sparse tensor":              {op: work.AllReduce, root: -1, sparse: true},
		"broadcast of float32[7] from root 0":        {op: work.Broadcast, dtype: f, elements: 7, sized: true},
		"scatter of int64[1] from root 3":            {op: work.Scatter, dtype: tensor.Int64, root: 3, elements: 1, sized: true},
		"reduce(avg) of float32[2] to root 1":        {op: work.Reduce, with: &avg, dtype: f, root: 1, elements: 2, sized: true},
		"gather of float32 to root 1":                {op: work.Gather, dtype: f, root: 1},
		"all_to_all of float32":                      {op: work.AllToAllSingle, dtype: f, root: -1},
		"barrier":                                    {op: work.Barrier, root: -1},
		"monitored_barrier":                          {op: opMonitoredBarrier, root: -1},
		"Alloc":                                      {op: opAlloc, root: -1},
		"all_gather of float32[3]":                   fingerprint{op: work.AllGather, dtype: f, root: -1}.blocks([]int64{12, 12}),
		"reduce_scatter(sum) of float32[1073741824]": {op: work.ReduceScatter, with: &sum, dtype: f, root: -1, elements: 1 << 30, sized: true},
	} {
		require.Equal(t, want, Describe(print.call().What))
		require.NotZero(t, print.call().What[0])
	}
	uneven := fingerprint{op: work.AllGather, dtype: f, root: -1}.blocks([]int64{12, 16}).call()
	require.Regexp(t, `^all_gather of float32\[7\] in parts \(digest of their sizes [0-9a-f]{4}\)$`, Describe(uneven.What))
	other := fingerprint{op: work.AllGather, dtype: f, root: -1}.blocks([]int64{16, 12}).call()
	require.NotEqual(t, Describe(uneven.What), Describe(other.What))
	whole := fingerprint{op: work.ReduceScatter, dtype: f, root: -1}.blocks([]int64{16, 16}).call()
	parted := fingerprint{op: work.ReduceScatter, dtype: f, root: -1}.parted([]int64{4, 4}, 2).call()
	require.NotEqual(t, whole.What, parted.What, "one tensor of 8 elements and two of 4")
}

// Whatever another rank sends can be shown.
func FuzzDescribe(f *testing.F) {
	for range 20 {
		f.Add(rand.Uint64(), rand.Uint64())
	}
	f.Fuzz(func(t *testing.T, a, b uint64) {
		require.NotEmpty(t, Describe([2]uint64{a, b}))
	})
}
