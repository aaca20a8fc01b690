package shm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCPUsOf(t *testing.T) {
	for text, want := range map[string]int{
		"max 100000\n":    maxCPUs,
		"200000 100000\n": 2,
		"150000 100000":   2,
		"1000 100000":     1,
		"4294967295 1":    maxCPUs,
		"1 0":             maxCPUs,
		"-1 100000":       maxCPUs,
		"":                maxCPUs,
	} {
		require.Equal(t, want, cpusOf(text), "%q", text)
	}
	require.Positive(t, quota())
}

func TestShares(t *testing.T) {
	for _, elem := range []int{1, 2, 3, 4, 8, 12, 16, 63, 64} {
		u := unit(elem)
		require.Zero(t, u%64)
		require.Zero(t, u%elem)
		require.LessOrEqual(t, u, minShare)
		for ranks := 1; ranks <= 9; ranks++ {
			for _, n := range []int{0, elem, 7 * elem, u, u + elem, 8 * u, 100*u - elem} {
				at := 0
				for r := range ranks {
					lo, hi := share(n, r, ranks, u)
					require.Equal(t, at, lo)
					require.LessOrEqual(t, lo, hi)
					require.LessOrEqual(t, hi-lo, (n/u/ranks+1)*u)
					require.Zero(t, hi%elem)
					at = hi
				}
				require.Equal(t, n, at)
			}
		}
	}
}
