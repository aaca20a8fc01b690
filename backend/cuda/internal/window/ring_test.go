package window_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
)

const none = math.MaxUint16

// links returns those of ranks, where f says how good they are.
func links(ranks int, f func(a, b int) uint16) (all [][]uint16) {
	for a := range ranks {
		var row []uint16
		for b := range ranks {
			x := uint16(0)
			if a != b {
				x = f(a, b)
			}
			row = append(row, x)
		}
		all = append(all, row)
	}
	return all
}

// TestRingOrder holds which order the ranks of some machines have.
func TestRingOrder(t *testing.T) {
	pairs := func(want ...string) func(a, b int) uint16 {
		return func(a, b int) uint16 {
			for _, s := range want {
				if s == fmt.Sprint(min(a, b), max(a, b)) {
					return 0
				}
			}
			return none
		}
	}
	for name, c := range map[string]struct {
		links [][]uint16
		want  []int
	}{
		"all alike":      {links(5, func(int, int) uint16 { return 3 }), []int{0, 1, 2, 3, 4}},
		"two ranks":      {links(2, func(int, int) uint16 { return 0 }), []int{0, 1}},
		"a missing pair": {links(4, func(a, b int) uint16 { return none * uint16(one(a+b == 1)) }), []int{0, 2, 1, 3}},
		"a cube": {links(8, pairs("0 1", "1 2", "2 3", "0 3", "4 5", "5 6", "6 7", "4 7", "0 4", "1 5", "2 6", "3 7")),
			[]int{0, 1, 2, 3, 7, 6, 5, 4}},
		"one way round":   {links(4, func(a, b int) uint16 { return none * uint16(one(b != (a+3)%4)) }), []int{0, 3, 2, 1}},
		"two sockets":     {links(6, func(a, b int) uint16 { return uint16(one(a%2 != b%2)) }), []int{0, 2, 4, 1, 3, 5}},
		"the best links":  {links(4, func(a, b int) uint16 { return uint16(one((a-b)*(a-b) != 4)) }), []int{0, 2, 1, 3}},
		"a chain":         {links(4, func(a, b int) uint16 { return none * uint16(one((a-b)*(a-b) != 1)) }), nil},
		"three of a pair": {links(3, func(a, b int) uint16 { return none * uint16(one(a+b == 1)) }), nil},
	} {
		require.Equal(t, c.want, window.RingOrder(c.links), name)
	}
}

func one(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// TestRingOrderIsBest compares random orders with all permutations. There is one if there can be, and its worst link
// is as good as it can be.
func TestRingOrderIsBest(t *testing.T) {
	worst := func(l [][]uint16, order []int) (w uint16) {
		for i, a := range order {
			w = max(w, l[a][order[(i+1)%len(order)]])
		}
		return w
	}
	for seed := range uint64(300) {
		g := rand.New(rand.NewPCG(seed, 1))
		ranks := 2 + g.IntN(5)
		l := links(ranks, func(int, int) uint16 { return []uint16{0, 1, 2, none, none}[g.IntN(5)] })
		best := uint16(none)
		var permute func(order []int)
		permute = func(order []int) {
			if len(order) == ranks {
				best = min(best, worst(l, order))
			}
			for r := range ranks {
				if !slices.Contains(order, r) {
					permute(append(slices.Clone(order), r))
				}
			}
		}
		permute([]int{0})
		order := window.RingOrder(l)
		if best == none {
			require.Nil(t, order, "seed %d", seed)
			continue
		}
		require.Equal(t, best, worst(l, order), "seed %d", seed)
		require.ElementsMatch(t, window.RingOrder(links(ranks, func(int, int) uint16 { return 0 })), order)
	}
}

// TestRingOrderEnds has ranks in two sets of unequal size, with links between the sets only. They have no ring, and
// very many beginnings of one.
func TestRingOrderEnds(t *testing.T) {
	require.Nil(t, window.RingOrder(links(16, func(a, b int) uint16 { return none * uint16(one((a < 7) == (b < 7))) })))
}

// TestCliques holds which ranks of some machines reach each other.
func TestCliques(t *testing.T) {
	apart := func(ranks int, f func(a, b int) bool) [][]uint16 {
		return links(ranks, func(a, b int) uint16 { return none * uint16(one(f(a, b))) })
	}
	for name, c := range map[string]struct {
		links [][]uint16
		want  []int
	}{
		"two quads":        {apart(8, func(a, b int) bool { return a/4 != b/4 }), []int{0, 0, 0, 0, 1, 1, 1, 1}},
		"in turn, and one": {apart(5, func(a, b int) bool { return a%2 != b%2 }), []int{0, 1, 0, 1, 0}},
		"a link between":   {apart(6, func(a, b int) bool { return a/3 != b/3 && a+b != 3 }), []int{0, 0, 0, 1, 1, 1}},
		"a chain":          {apart(4, func(a, b int) bool { return (a-b)*(a-b) != 1 }), []int{0, 0, 1, 1}},
		"a star":           {apart(4, func(a, b int) bool { return a != 2 && b != 2 }), []int{0, 1, 0, 2}},
		"one way":          {apart(4, func(a, b int) bool { return a/2 != b/2 || a == 1 && b == 0 }), []int{1, 2, 0, 0}},
		"nine":             {apart(10, func(a, b int) bool { return a == 0 || b == 0 }), []int{1, 0, 0, 0, 0, 0, 0, 0, 0, 2}},
		"nobody":           {apart(16, func(a, b int) bool { return true }), nil},
	} {
		require.Equal(t, c.want, window.Cliques(c.links), name)
	}
}

// ringWindows makes windows of a ring.
func (h host) ringWindows(t *testing.T) (all []*window.Window) {
	t.Helper()
	for r := range h.d {
		o := h.options(t, r, r)
		o.RingChannels, o.Next = 2, true
		w := must.Get(window.New(t.Context(), o))
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		all = append(all, w)
	}
	return all
}

// TestConnectRing holds that a rank has mapped the memory of the next one alone. All ranks have the same order. It goes
// over devices that reach each other, and not only say so.
func TestConnectRing(t *testing.T) {
	beside := func(n int) func(a, b int) bool {
		return func(a, b int) bool { return (a-b+n)%n == 1 || (b-a+n)%n == 1 }
	}
	for _, c := range []struct {
		name  string
		ranks int
		topo  sim.Topology
		want  []int
	}{
		{"all", 12, sim.Topology{}, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}},
		{"neighbours", 6, sim.Topology{NoPeer: func(a, b int) bool { return !beside(6)(a, b) }}, []int{0, 1, 2, 3, 4, 5}},
		{"a missing pair", 4, sim.Topology{NoPeer: func(a, b int) bool { return a+b == 1 }}, []int{0, 2, 1, 3}},
		{"a pair that lies", 4, sim.Topology{Loses: func(a, b int) bool { return a+b == 1 }}, []int{0, 2, 1, 3}},
		{"links", 4, sim.Topology{Rank: func(a, b int) int { return one(a%2 != b%2) }}, []int{0, 2, 1, 3}},
	} {
		for _, apart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, apart %v", c.name, apart), func(t *testing.T) {
				h := newHost(t, sim.Config{Devices: c.ranks, NoCheck: true, Topology: c.topo}, c.ranks, apart)
				all := h.ringWindows(t)
				require.NoError(t, errors.Join(connect(t, all)...))
				for r, w := range all {
					x, channels, ok := w.Ring()
					require.True(t, ok)
					require.Equal(t, 2, channels)
					require.Equal(t, c.want, x.Order)
					require.Equal(t, r, x.At(x.Place))
					next, _, _ := all[x.At(x.Place+1)].Ring()
					access := w.Access(nil)
					require.Len(t, access, 3, "its own memory, the words of the host, and the memory of the next rank")
					if !apart {
						require.Equal(t, next.Slots, x.NextSlots)
						require.Equal(t, next.Flags, x.NextFlags)
					}
					n := 2 * window.RingDepth(c.ranks)
					require.Equal(t, make([]byte, 4*n+8), read(t, h.d[r], w.Device(), x.Flags, 4*n+8))
					require.Equal(t, x.Flags, x.Slots+driver.Ptr(n*window.RingSlotBytes))
				}
				for _, w := range all {
					require.NoError(t, w.Detach())
				}
			})
		}
	}
}

// TestNoRing holds that all ranks say why there is no ring, and leave nothing open.
func TestNoRing(t *testing.T) {
	for _, apart := range []bool{false, true} {
		alone := sim.Topology{NoPeer: func(a, b int) bool { return a == 2 || b == 2 }}
		h := newHost(t, sim.Config{Devices: 4, NoCheck: true, Topology: alone}, 4, apart)
		all := h.ringWindows(t)
		for _, err := range connect(t, all) {
			require.ErrorContains(t, err, "no ring of the ranks: these ranks' devices do not reach those of others: "+
				"0 that of 2, 1 that of 2, 2 that of 0, 2 that of 1, and of 2 more pairs")
		}
		_, _, ok := all[0].Ring()
		require.False(t, ok)
	}
}
