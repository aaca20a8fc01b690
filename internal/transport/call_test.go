package transport_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/transport"
)

// A history tells all sequences of a few calls from each other, and from their beginnings.
func TestHistory(t *testing.T) {
	words := [][2]uint64{{1, 0}, {0, 1}, {1 << 63, 5}, {5, 1 << 63}}
	seen := map[uint64][]int{}
	var walk func(last transport.Call, path []int)
	walk = func(last transport.Call, path []int) {
		for i, w := range words {
			c := transport.Call{What: w}
			c.Follow(last.What, last.History)
			now := append(path[:len(path):len(path)], i)
			require.Equal(t, last.What, c.Before)
			require.NotContains(t, seen, c.History, "%v", now)
			seen[c.History] = now
			if len(now) < 5 {
				walk(c, now)
			}
		}
	}
	walk(transport.Call{}, nil)
}

func TestDisagreement(t *testing.T) {
	want := "transport: the ranks disagree on the operation: as collective number 3 rank 1 called a, rank 2 called b"
	require.EqualError(t, transport.Disagree(3, 1, "a", 2, "b"), want)
	require.EqualError(t, transport.Disagree(3, 2, "b", 1, "a"), want)
	d := transport.Disagree(3, 1, "a", 2, "a")
	d.Earlier = true
	require.EqualError(t, d, "transport: the ranks disagree on an operation: rank 1 and rank 2 both called a as collective number 3, but an earlier call of theirs differs")
}
