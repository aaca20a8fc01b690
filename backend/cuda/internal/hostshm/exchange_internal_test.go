package hostshm

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/internal/must"
)

// reason is told after so many questions.
type reason struct {
	after int
	err   error
}

func (r *reason) Ask() error {
	if r.after--; r.after < 0 {
		return r.err
	}
	return nil
}

func (r *reason) AskDriver() error { return nil }

// exchanges are those of so many ranks.
func exchanges(t *testing.T, size, slots, chunk int) []*Exchange {
	r := must.Get(region.New(Bytes(size, slots, chunk)))
	t.Cleanup(func() { require.NoError(t, r.Leave()) })
	all := make([]*Exchange, size)
	for i := range all {
		all[i] = &Exchange{Rank: i, Size: size, Slots: slots, Chunk: RoundUp(chunk, SlotAlign), Region: r}
	}
	return all
}

// TestOverwritten holds that no chunk leaves the host once a rank has let its streams
// go on, though all ranks have combined their shares of it.
func TestOverwritten(t *testing.T) {
	ranks := exchanges(t, 3, 2, 100)
	why := &reason{after: 3, err: errors.New("the reason")}
	for i, x := range ranks {
		if i > 0 {
			why := *why
			behind, err := ranks[0].Await(&why, WordDone, 1)
			require.ErrorIs(t, err, why.err, "not all have combined")
			require.Equal(t, i, behind)
		}
		x.Count(WordDone, 1)
	}
	must.Get(ranks[0].Await(why, WordDone, 1))
	ranks[2].Fail()
	must.Get(ranks[0].Await(why, WordArrived, 0))
	behind, err := ranks[0].Await(why, WordDone, 1)
	require.ErrorIs(t, err, why.err)
	require.Equal(t, -1, behind)
	require.Negative(t, why.after, "it waited for the reason")
	for _, x := range ranks {
		require.True(t, x.Failed())
	}
}

// TestWords holds that the words of ranks, with what they call, do not lie on each
// other or on the slots.
func TestWords(t *testing.T) {
	const size, slots, chunk = 5, 3, 5000
	ranks := exchanges(t, size, slots, chunk)
	bytes := ranks[0].Region.Bytes
	at := make(map[int]bool)
	take := func(from, n int) {
		for i := from; i < from+n; i++ {
			require.False(t, at[i], "byte %d is used twice", i)
			require.Less(t, i, len(bytes))
			at[i] = true
		}
	}
	for rank, x := range ranks {
		for kind := range WordKinds {
			take(x.Word(kind, rank), 4)
		}
		take(x.Said(rank), 16)
		c := board.Said{1<<63 | uint64(rank)<<32, 7 << 40}
		x.Call(uint64(10*rank), c)
		require.Equal(t, c, x.Called(rank))
		require.Equal(t, uint32(10*rank+1), driver.LoadWord(bytes, x.Word(WordCalled, rank)))
		for c := range uint64(slots) {
			take(x.In(rank, c), chunk)
			if rank == 0 {
				take(x.Out(c), chunk)
			}
		}
	}
}
