package plan

import (
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// all holds an all-reduce algorithm against what it means, for groups of the
// given sizes and for each number of elements, and calls f for every one.
func all(t *testing.T, name string, sizes []int, counts func(size int) []int64, f func(c Call, plans []*Plan)) {
	rng := rand.New(rand.NewPCG(10, 14))
	a := must.Get(Lookup(OpAllReduce, name))
	for _, size := range sizes {
		for _, n := range counts(size) {
			c := Call{Size: size, Bytes: 8 * n, Elem: 8}
			if a.Chunks {
				c.Chunk = []int64{8, 100, 1 << 20}[rng.IntN(3)]
			}
			check(t, a, c, nil, rng)
			plans := make([]*Plan, size)
			for r := range plans {
				k := c
				k.Rank = r
				plans[r] = a.Plan(k)
			}
			f(c, plans)
		}
	}
}

// sent returns how many messages and bytes a plan sends, and whether to one rank only.
func sent(p *Plan, to int) (messages int, bytes int64, only bool) {
	only = true
	for _, s := range p.Steps {
		if s.Kind == Send {
			messages++
			bytes += s.Len
			only = only && int(s.Peer) == to
		}
	}
	return messages, bytes, only
}

func upTo(n int, more ...int) (sizes []int) {
	for i := range n {
		sizes = append(sizes, i+1)
	}
	return append(sizes, more...)
}

// TestF10Ring: every rank sends to one neighbour, and no more than the ring that
// passes on whole tensors: (P-1)S (F-10).
func TestF10Ring(t *testing.T) {
	counts := func(size int) []int64 {
		if size == 3 && testsize.Of(false, true, true) {
			return []int64{1, 4, 64, 100, 1000, 10000}
		}
		return []int64{1, 4, 100}
	}
	toOne := func(c Call, plans []*Plan) {
		for r, p := range plans {
			_, bytes, only := sent(p, (r+c.Size-1)%c.Size)
			require.True(t, only, "%+v, rank %d", c, r)
			require.LessOrEqual(t, bytes, int64(c.Size-1)*max(c.Bytes, 8), "%+v, rank %d", c, r)
		}
	}
	all(t, "ring", upTo(15), counts, func(c Call, plans []*Plan) {
		toOne(c, plans)
		toOne(c, group(c.Size, func(r int) *Plan { return AllReduceRing(r, c.Size, c.Bytes, c.Elem) }))
	})
}

// TestF11RingChunked: 2(P-1)/P of the bytes but for rounding to elements, in
// chunks, with none and with fewer elements than ranks, and no message that has
// nothing to say (F-11).
func TestF11RingChunked(t *testing.T) {
	counts := func(size int) []int64 { return []int64{0, 1, int64(size) - 1, int64(size), 100} }
	all(t, "ring", upTo(15), counts, func(c Call, plans []*Plan) {
		for r, p := range plans {
			n := c.Bytes / c.Elem
			block := (n + int64(c.Size) - 1) / int64(c.Size) * c.Elem
			chunk := max(c.Chunk/c.Elem*c.Elem, c.Elem)
			block += (block + chunk - 1) / chunk * c.Elem // each chunk may be an element longer
			messages, bytes, _ := sent(p, 0)
			require.LessOrEqual(t, bytes, 2*int64(c.Size-1)*block, "%+v, rank %d", c, r)
			require.GreaterOrEqual(t, bytes, 2*(c.Bytes-block), "%+v, rank %d", c, r)
			if n == 0 || c.Size == 1 {
				require.Zero(t, messages, "%+v", c)
			}
			for _, s := range p.Steps {
				if s.Kind == Send {
					require.Positive(t, s.Len, "%+v, rank %d", c, r)
					require.LessOrEqual(t, s.Len, chunk, "%+v, rank %d", c, r)
				}
			}
		}
	})
}

// TestF12HalvingDoubling: groups of any size, and 2 log2 P messages a rank where
// that is a power of two (F-12).
func TestF12HalvingDoubling(t *testing.T) {
	counts := func(size int) []int64 { return []int64{0, 1, 4, 64, int64(size)} }
	all(t, "halving-doubling", upTo(9, 13, 16, 24, 32), counts, func(c Call, plans []*Plan) {
		if c.Size&(c.Size-1) != 0 || c.Bytes < int64(c.Size)*c.Elem {
			return
		}
		for r, p := range plans {
			messages, bytes, _ := sent(p, 0)
			require.Equal(t, 2*bits.Len(uint(c.Size-1)), messages, "%+v, rank %d", c, r)
			if c.Bytes%(int64(c.Size)*c.Elem) == 0 {
				require.Equal(t, 2*(c.Bytes-c.Bytes/int64(c.Size)), bytes, "%+v, rank %d", c, r)
			}
		}
	})
}

// TestF14Bcube: groups of powers of 2, 3 and 4 and others, also with fewer
// elements than a rank has peers (F-14). A step is with all that differ in one
// factor.
func TestF14Bcube(t *testing.T) {
	counts := func(size int) []int64 { return []int64{0, 1, 2, int64(size) / 2, int64(size) + 1, 100} }
	all(t, "bcube", upTo(27), counts, func(c Call, plans []*Plan) {
		for r, p := range plans {
			messages, bytes, _ := sent(p, 0)
			// The factors of two and what is left.
			twos := bits.TrailingZeros(uint(c.Size))
			odd := c.Size >> twos
			require.LessOrEqual(t, messages, 2*(twos+odd-1), "%+v, rank %d", c, r)
			n := c.Bytes / c.Elem
			block := (n + int64(c.Size) - 1) / int64(c.Size) * c.Elem
			require.LessOrEqual(t, bytes, 2*(int64(c.Size-1)*block+int64(c.Size)*c.Elem), "%+v, rank %d", c, r)
		}
	})
}

// TestF36Around: a block goes around a ring of any size, from any rank on, and the result goes on until all have it. With
// a block from each rank on, a rank sends 2(P-1) messages (F-36).
func TestF36Around(t *testing.T) {
	rng := rand.New(rand.NewPCG(10, 36))
	for size := 1; size <= 17; size++ {
		messages := make([]int, size)
		for first := range size {
			for _, n := range []int64{0, 1, 5} {
				c := Call{Size: size, Bytes: 8 * n, Elem: 8}
				mems := memories(OpAllReduce, c, rng)
				var want []uint64
				for k := range size {
					for i, x := range words(mems[(first+k)%size].out) {
						if k == 0 {
							want = append(want, x)
						} else {
							want[i] = mix(x, want[i])
						}
					}
				}
				plans := group(size, func(r int) *Plan { return AllReduceAround(r, size, first, 8*n) })
				require.NoError(t, newSimulation(plans, mems, eachWord(mix), rng).run())
				for r := range size {
					require.Equal(t, want, append([]uint64(nil), words(mems[r].out)...), "%d bytes from rank %d of %d on, rank %d", 8*n, first, size, r)
					sends, _, only := sent(plans[r], (r+1)%size)
					require.True(t, only)
					if n == 1 {
						messages[r] += sends
					}
				}
			}
		}
		for _, n := range messages {
			require.Equal(t, 2*(size-1), n)
		}
	}
}
