package group

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
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

// TestOverwritten holds that no chunk leaves the host once a rank has let its streams
// go on, though all ranks have combined their shares of it.
func TestOverwritten(t *testing.T) {
	ranks := make([]*hostshm.Exchange, 3)
	r, err := region.New(hostshm.Bytes(len(ranks), 2, 100))
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Leave()) }()
	for i := range ranks {
		ranks[i] = &hostshm.Exchange{Rank: i, Size: len(ranks), Slots: 2, Chunk: hostshm.SlotAlign, Region: r}
	}
	s := &shared{x: ranks[0]}
	why := &reason{after: 3, err: errors.New("the reason")}
	for i, x := range ranks {
		if i > 0 {
			why := *why
			require.ErrorIs(t, s.combined(0, &why), why.err, "not all have combined")
		}
		x.Count(hostshm.WordDone, 1)
	}
	require.NoError(t, s.combined(0, why))
	ranks[2].Fail()
	require.ErrorIs(t, s.combined(0, why), why.err)
	require.Negative(t, why.after, "it waited for the reason")
	for _, x := range ranks {
		require.True(t, x.Failed())
	}
}

// TestBatchOf compares with what enqueue does.
func TestBatchOf(t *testing.T) {
	batch := 0
	for from, many := 0, firstBatch; from < mostPieces; from, many = from+many, 2*many {
		for k := from; k < from+many; k++ {
			require.Equal(t, batch, batchOf(k), "chunk %d", k)
		}
		batch++
	}
}

// TestWords holds that the words of ranks, with what they call, do not lie on each
// other or on the slots.
func TestWords(t *testing.T) {
	const size, slots, chunk = 5, 3, 5000
	r, err := region.New(hostshm.Bytes(size, slots, chunk))
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Leave()) }()
	at := make(map[int]bool)
	take := func(from, n int) {
		for i := from; i < from+n; i++ {
			require.False(t, at[i], "byte %d is used twice", i)
			require.Less(t, i, len(r.Bytes))
			at[i] = true
		}
	}
	for rank := range size {
		x := &hostshm.Exchange{Rank: rank, Size: size, Slots: slots, Chunk: hostshm.RoundUp(chunk, hostshm.SlotAlign), Region: r}
		for kind := range hostshm.WordKinds {
			take(x.Word(kind, rank), 4)
		}
		for number := range uint64(2) {
			c := board.Said{1<<63 | uint64(rank)<<32 | number, 7 << 40}
			take(x.Said(rank, number), 16)
			x.Call(number, 10*number, c)
			require.Equal(t, c, x.Called(rank, number))
			require.Equal(t, uint32(10*number+1), driver.LoadWord(r.Bytes, x.Word(hostshm.WordCalled, rank)))
		}
		for c := range uint64(slots) {
			take(x.In(rank, c), chunk)
			if rank == 0 {
				take(x.Out(c), chunk)
			}
		}
	}
}
