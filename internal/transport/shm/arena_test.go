package shm

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestHeap allocates and releases at random. Allocations are aligned and do not overlap, and
// free memory is in as few spans as possible.
func TestHeap(t *testing.T) {
	const size = 64 * page
	rng := must.Rand(t)
	h := heap{free: []span{{0, size}}}
	var live []span
	taken := func(at int) bool {
		return slices.ContainsFunc(live, func(s span) bool { return s.at <= at && at < s.at+s.n })
	}
	refused := 0
	for range 2000 {
		if len(live) > 0 && rng.IntN(5) < 2 {
			i := rng.IntN(len(live))
			h.release(live[i])
			live = slices.Delete(live, i, i+1)
		} else {
			n, align := (1+rng.IntN(8))*page, page<<rng.IntN(4)
			at, ok := h.alloc(n, align)
			if ok {
				require.Zero(t, at%align)
				require.LessOrEqual(t, at+n, size)
				for p := at; p < at+n; p += page {
					require.False(t, taken(p))
				}
				live = append(live, span{at, n})
			} else {
				refused++
				for from := 0; from+n <= size; from += align {
					free := true
					for p := from; p < from+n; p += page {
						free = free && !taken(p)
					}
					require.False(t, free, "%d bytes at %d are free", n, from)
				}
			}
		}
		var want []span
		for p := 0; p < size; p += page {
			switch {
			case taken(p):
			case len(want) > 0 && want[len(want)-1].at+want[len(want)-1].n == p:
				want[len(want)-1].n += page
			default:
				want = append(want, span{p, page})
			}
		}
		require.True(t, slices.Equal(want, h.free), "%v, want %v", h.free, want)
	}
	require.NotZero(t, refused)
}

// TestShown: a place that a rank tells is looked up in its arena, and only there.
func TestShown(t *testing.T) {
	g := &Group{arenas: [][]byte{make([]byte, 100), make([]byte, 200)}}
	require.Len(t, g.arenaBytes(1, inArena|150, 50), 50)
	require.Len(t, g.arenaBytes(0, inArena|100, 0), 0)
	for _, at := range []uint64{150, inArena | 151, inArena | 201, ^uint64(0)} {
		require.Nil(t, g.arenaBytes(1, at, 50))
	}
	g.arenas = nil
	require.Nil(t, g.arenaBytes(0, inArena, 1))
}
