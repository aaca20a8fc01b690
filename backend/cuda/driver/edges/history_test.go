package edges_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/internal/must"
)

// TestHistory compares what a history remembers with a list of uses for each byte.
func TestHistory(t *testing.T) {
	const bytes, first = 6000, driver.Ptr(1 << 40)
	modes := []driver.Mode{driver.Read, driver.Write, driver.Shared}
	eachSeed(t, 4, func(t *testing.T, seed uint64) {
		rng := random(t, seed)
		var h edges.History
		plain := make([][]edges.Use, bytes)
		most := 0
		access := func(longest int) (a driver.Access, lo, hi int) {
			lo = rng.IntN(bytes)
			hi = min(lo+1+rng.IntN(longest), bytes)
			return driver.Access{Ptr: first + driver.Ptr(lo), Len: hi - lo, Mode: modes[rng.IntN(len(modes))]}, lo, hi
		}
		compare := func(longest int) {
			a, lo, hi := access(longest)
			want := make(map[edges.Use]bool)
			for _, uses := range plain[lo:hi] {
				for _, u := range uses {
					if u.Mode.Conflicts(a.Mode) {
						want[u] = true
					}
				}
			}
			require.Equal(t, want, h.Conflicts(a), "%v", a)
			n := must.Get(h.Segments())
			most = max(most, n)
		}
		remember := func(a driver.Access, lo, hi int, u edges.Use) {
			h.Add(a, u)
			u.Mode = a.Mode
			for i := lo; i < hi; i++ {
				plain[i] = slices.DeleteFunc(slices.Clone(plain[i]), func(o edges.Use) bool {
					same := o.Mode == u.Mode && o.Lane == u.Lane && o.Alone == u.Alone
					return same || !u.Alone && u.Mode == driver.Write
				})
				plain[i] = append(plain[i], u)
			}
		}
		for index := range uint64(300) {
			u := edges.Use{Lane: rng.IntN(4), Index: index, Alone: rng.IntN(5) == 0}
			switch rng.IntN(8) {
			case 0: // elements that lie apart, in order or from the last one
				stride, n := 2+rng.IntN(9), rng.IntN(400)
				lo, mode := rng.IntN(bytes), modes[rng.IntN(len(modes))]
				back := rng.IntN(2) == 0
				for k := range n {
					if back {
						k = n - 1 - k
					}
					if at := lo + k*stride; at < bytes {
						remember(driver.Access{Ptr: first + driver.Ptr(at), Len: 1, Mode: mode}, at, at+1, u)
					}
				}
			case 1:
				lane, before := rng.IntN(4), uint64(rng.IntN(int(index)+1))
				drop := func(u edges.Use) bool { return u.Lane == lane || u.Index < before }
				h.Drop(drop)
				for i := range plain {
					plain[i] = slices.DeleteFunc(plain[i], drop)
				}
			default:
				a, lo, hi := access([]int{3, 50, bytes}[rng.IntN(3)])
				remember(a, lo, hi, u)
			}
			compare([]int{5, 100, bytes}[rng.IntN(3)])
		}
		require.Greater(t, most, 500, "segments")
	})
}
