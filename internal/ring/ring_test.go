package ring

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestQueue compares the queue with a slice, after random calls. Places without an item are nil.
func TestQueue(t *testing.T) {
	r := must.Rand(t)
	var q Queue[*int]
	var want []*int
	for range 20_000 {
		switch n := len(want); {
		case n == 0 || r.IntN(200) >= n+r.IntN(100):
			x := new(int)
			q.Put(x)
			want = append(want, x)
		case r.IntN(4) == 0:
			i := r.IntN(n)
			require.Same(t, want[i], q.Remove(i))
			want = slices.Delete(want, i, i+1)
		default:
			require.Same(t, want[0], q.Take())
			want = want[1:]
		}
		require.Equal(t, len(want), q.Len())
		require.True(t, slices.Equal(want, slices.Collect(q.All())))
		for i, x := range want {
			require.Same(t, x, q.At(i))
		}
		kept := slices.DeleteFunc(slices.Clone(q.places), func(x *int) bool { return x == nil })
		require.Len(t, kept, len(want))
	}
	require.Greater(t, len(q.places), 32)
	require.Panics(t, func() { q.At(q.Len()) })
	require.Panics(t, func() { q.At(-1) })
	require.Panics(t, func() { new(Queue[int]).Take() })
}

// TestAllocs: a queue that has been as long allocates nothing.
func TestAllocs(t *testing.T) {
	var q Queue[int]
	for range 5 {
		q.Put(0)
	}
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		q.Put(1)
		q.Take()
	}))
}
