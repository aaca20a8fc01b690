package hostshm

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// tally counts who did what.
type tally struct{ parts [8]atomic.Int32 }

func (j *tally) Part(i int) { j.parts[i].Add(1) }

// TestCrew: of each job each part is done once, by the time that Do returns, whatever
// part of the crew the jobs before had.
func TestCrew(t *testing.T) {
	for _, eager := range []bool{false, true} {
		c := newCrew(5, eager)
		for n := range 500 {
			parts := 1 + n*7%c.N
			var j tally
			c.Do(parts, &j)
			for i := range j.parts {
				want := int32(0)
				if i < parts {
					want = 1
				}
				require.Equal(t, want, j.parts[i].Load(), "job %d of %d parts, part %d", n, parts, i)
			}
		}
		c.close()
	}
	newCrew(3, true).close() // which has done nothing
}

// TestSharedSlots: the memory is about as large whatever the ranks and chunks, where a
// rank has more than the least and fewer than the most slots.
func TestSharedSlots(t *testing.T) {
	for _, tc := range []struct{ size, chunk, want int }{
		{2, 2 << 20, 21}, {4, 2 << 20, 12}, {8, 2 << 20, 7}, {16, 8 << 20, 4}, {2, 64, 64},
	} {
		require.Equal(t, tc.want, Slots(tc.size, tc.chunk, 4), "%d ranks, chunks of %d", tc.size, tc.chunk)
	}
}
