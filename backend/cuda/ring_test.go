package cuda

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHops runs the steps of all ranks on plain numbers: every element is the sum
// of all ranks' at the end, no rank sends more than its share, and the ring does
// not stand still (F-11).
func TestHops(t *testing.T) {
	for size := 1; size <= 9; size++ {
		for _, n := range []int{0, 1, 2, size, size + 1, 16*size - 1, 64*size + 3, 500} {
			t.Run(fmt.Sprintf("%d ranks, %d elements", size, n), func(t *testing.T) {
				const grain, unit = 16, 4
				plans, data, sent := make([][]hop, size), make([][]int, size), make([]int, size)
				for r := range size {
					hops(r, size, n, grain, unit, func(h hop) { plans[r] = append(plans[r], h) })
					data[r] = make([]int, n)
					for i := range data[r] {
						data[r][i] = 1 << r
					}
				}
				type link struct {
					queue     [][]int
					full, got int // messages so far
				}
				links := make([]link, size) // to the right of each
				at := make([]int, size)
				for moved := true; moved; {
					moved = false
					for r := range size {
						if at[r] == len(plans[r]) {
							continue
						}
						h := plans[r][at[r]]
						left, right := &links[around(r-1, size)], &links[r]
						if h.take && len(left.queue) == 0 || h.pass && right.full-right.got == ringSlots {
							continue
						}
						require.Positive(t, h.hi-h.lo)
						require.LessOrEqual(t, h.hi-h.lo, grain)
						require.Zero(t, h.lo%unit)
						x := append([]int(nil), data[r][h.lo:h.hi]...)
						if h.take {
							y := left.queue[0]
							left.queue, left.got = left.queue[1:], left.got+1
							require.Len(t, y, len(x))
							for i := range x {
								if h.combine {
									x[i] += y[i]
								} else {
									x[i] = y[i]
								}
							}
						}
						if h.whole {
							require.Equal(t, 1<<size-1, x[0])
						}
						if h.keep {
							copy(data[r][h.lo:], x)
						}
						if h.pass {
							right.queue, right.full = append(right.queue, x), right.full+1
							sent[r] += len(x)
						}
						at[r]++
						moved = true
					}
				}
				for r := range size {
					require.Equal(t, len(plans[r]), at[r], "rank %d stands still", r)
					require.Empty(t, links[r].queue)
					for _, x := range data[r] {
						require.Equal(t, 1<<size-1, x)
					}
					share := 2 * (size - 1) * n / size
					require.LessOrEqual(t, sent[r], share+2*size*unit, "rank %d", r)
				}
			})
		}
	}
}

func TestCollapsed(t *testing.T) {
	for _, c := range []struct{ shape, strides, wantShape, wantStrides []int }{
		{[]int{2, 3, 4}, []int{12, 4, 1}, []int{24}, []int{1}},
		{[]int{4, 1, 3}, []int{1, 9, 4}, []int{4, 3}, []int{1, 4}},
		{[]int{2, 3, 4}, []int{24, 4, 1}, []int{2, 12}, []int{24, 1}},
		{[]int{1, 1}, []int{5, 7}, nil, nil},
	} {
		s, u := collapsed(c.shape, c.strides)
		require.Equal(t, c.wantShape, s)
		require.Equal(t, c.wantStrides, u)
	}
}
