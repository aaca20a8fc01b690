package cuda

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
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

// TestAllReduceInParts all-reduces up to 8 GiB on a stream that only takes notes. The
// commands grow with the bytes, some ten for each slot that they fill, but the stream has
// few at a time. Every step of the plan is there once and in order.
func TestAllReduceInParts(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("memory of this size has no address here")
	}
	for _, c := range []struct{ n, chunk int }{{100, 16}, {5000, 16}, {100_001, 64}, {1 << 28, 4 << 20}, {2*gib + 5, 4 << 20}} {
		for _, size := range []int{2, 3, 8} {
			t.Run(fmt.Sprintf("%d elements in slots of %d, %d ranks", c.n, c.chunk, size), func(t *testing.T) {
				d, err := sim.Open(sim.Config{})
				require.NoError(t, err)
				b := &Backend{rank: 1, size: size, tracker: edges.New(d)}
				b.line, err = b.newLine()
				require.NoError(t, err)
				s := &deep{}
				const base = driver.Ptr(1 << 40)
				ten, err := tensor.OnDevice(tensor.Float32, huge{base, 4 * c.n}, c.n)
				require.NoError(t, err)
				o := &operation{b: b, ctx: t.Context(), timeout: time.Hour, line: b.line}
				w := &deviceWork{op: o, ring: ringOf(t, b, d, s, c.chunk), places: []*place{placeOf(ten)}, by: 1}
				o.device = w
				o.pending, err = w.run(b.tracker.Batch())
				require.NoError(t, err)

				rounds, steps := (4*c.n+size*c.chunk-1)/(size*c.chunk), 0
				hops(1, size, c.n, c.chunk/4, 4, func(h hop) {
					require.Less(t, steps, len(s.reads))
					require.Equal(t, base+driver.Ptr(4*h.lo), s.reads[steps].Ptr)
					require.Equal(t, 4*(h.hi-h.lo), s.reads[steps].Len)
					steps++
				})
				require.Len(t, s.reads, steps)
				require.LessOrEqual(t, steps, rounds*(2*size-1))
				parts := len(o.parts) + 1
				require.LessOrEqual(t, s.commands, rounds*(10*size-9)+parts*spareCommands)
				require.LessOrEqual(t, s.deepest, mostOnRing)
				require.LessOrEqual(t, o.commands, w.most())
				if s.commands > mostOnRing {
					require.Greater(t, parts, 1)
					require.Greater(t, s.deepest, mostOnRing/2, "the stream has enough to do")
				}
				require.NoError(t, o.pending.Sync(t.Context()))
				w.ended()
				o.pending.Release()
				require.NoError(t, b.tracker.Close())
			})
		}
	}
}
