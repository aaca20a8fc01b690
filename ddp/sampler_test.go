package ddp

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestSamplerShards checks, for many numbers of ranks, that the ranks' parts of every
// step are together the single process's, each image once an epoch.
func TestSamplerShards(t *testing.T) {
	const images, epoch = 103, 3
	for _, batch := range []int{1, 7, 16, 103, 200} {
		single := must.Get(NewDistributedSampler(images, batch, 0, 1, 9))
		single.SetEpoch(epoch)
		for ranks := 1; ranks <= 9; ranks++ {
			t.Run(fmt.Sprintf("batch %d ranks %d", batch, ranks), func(t *testing.T) {
				var all []int
				for step := range single.Steps() {
					var got []int
					smallest, largest := images, 0
					for rank := range ranks {
						s := must.Get(NewDistributedSampler(images, batch, rank, ranks, 9))
						s.SetEpoch(epoch)
						require.Equal(t, single.Steps(), s.Steps())
						b := s.Batch(step)
						require.Equal(t, single.Batch(step).Global, b.Global)
						require.InEpsilon(t, float64(ranks)/float64(b.Global), b.Scale, 1e-6)
						smallest, largest = min(smallest, len(b.Indices)), max(largest, len(b.Indices))
						for k, i := range b.Indices {
							// DistributedSampler's rule: place r, r+N, ... of the list.
							place := slices.Index(single.order, i)
							require.Equal(t, rank, place%ranks)
							if k > 0 {
								require.Equal(t, slices.Index(single.order, b.Indices[k-1])+ranks, place)
							}
						}
						got = append(got, b.Indices...)
					}
					require.LessOrEqual(t, largest-smallest, 1)
					require.ElementsMatch(t, single.Batch(step).Indices, got)
					all = append(all, got...)
				}
				slices.Sort(all)
				require.Len(t, slices.Compact(all), images)
			})
		}
	}
}

func TestSamplerShuffles(t *testing.T) {
	a, _ := NewDistributedSampler(50, 50, 0, 1, 1)
	b, _ := NewDistributedSampler(50, 50, 0, 1, 2)
	order := func(s *DistributedSampler, epoch int) []int { s.SetEpoch(epoch); return s.Batch(0).Indices }
	require.Equal(t, order(a, 4), order(a, 4))
	require.NotEqual(t, order(a, 4), order(a, 5))
	require.NotEqual(t, order(a, 4), order(b, 4))
}

func TestSamplerRefuses(t *testing.T) {
	for _, c := range [][4]int{{0, 1, 0, 1}, {1, 0, 0, 1}, {1, 1, 1, 1}, {1, 1, -1, 1}, {1, 1, 0, 0}} {
		_, err := NewDistributedSampler(c[0], c[1], c[2], c[3], 0)
		require.Error(t, err, "%v", c)
	}
}
