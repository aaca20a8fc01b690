package directway

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// TestConflicts holds that conflicts and meeting find what looking at all pairs finds.
func TestConflicts(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	modes := []driver.Mode{driver.Read, driver.Write, driver.Shared}
	draw := func() (all []driver.Access) {
		kinds := 1 + rng.IntN(len(modes))
		for range rng.IntN(6) {
			all = append(all, driver.Access{Ptr: driver.Ptr(rng.IntN(40)), Len: 1 + rng.IntN(1+rng.IntN(20)), Mode: modes[rng.IntN(kinds)]})
		}
		sortUses(all)
		return all
	}
	found := 0
	for range 20_000 {
		a, b := draw(), draw()
		var want []int
		conflict := false
		for i, x := range a {
			meets := false
			for _, y := range b {
				if x.Ptr < y.Ptr+driver.Ptr(y.Len) && y.Ptr < x.Ptr+driver.Ptr(x.Len) {
					meets = true
					conflict = conflict || x.Mode.Conflicts(y.Mode)
				}
			}
			if meets {
				want = append(want, i)
			}
		}
		var got []int
		for i := range meeting(a, b, 0) {
			got = append(got, i)
		}
		require.Equal(t, want, got, "%v and %v", a, b)
		require.Equal(t, conflict, conflicts(a, b), "%v and %v", a, b)
		if conflict {
			found++
		}
	}
	require.NotZero(t, found)
}
