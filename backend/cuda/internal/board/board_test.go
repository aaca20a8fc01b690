package board

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ranks returns the boards of ranks that have opened each other's.
func ranks(t *testing.T, numbers ...int) map[int]*Board {
	t.Helper()
	all, names := make(map[int]*Board), make(map[int]string)
	for _, r := range numbers {
		all[r], names[r] = New()
		t.Cleanup(func() { require.NoError(t, all[r].Close()) })
	}
	for r, b := range all {
		others := make(map[int]string)
		for o, name := range names {
			if o != r {
				others[o] = name
			}
		}
		b.Open(r, others)
		require.NoError(t, b.Why)
	}
	for _, b := range all {
		require.NoError(t, b.Hide())
	}
	return all
}

// sum is a call, and others are calls that differ from it in one thing each.
var (
	sum    = Call{Op: work.AllReduce, With: Reducing(backend.Sum()), DType: tensor.Float32, N: 40, Root: -1}
	others = map[string]Call{
		"operation": {Op: work.Reduce, With: sum.With, DType: sum.DType, N: sum.N, Root: -1},
		"operator":  {Op: sum.Op, With: Reducing(backend.Max()), DType: sum.DType, N: sum.N, Root: -1},
		"dtype":     {Op: sum.Op, With: sum.With, DType: tensor.Int32, N: sum.N, Root: -1},
		"elements":  {Op: sum.Op, With: sum.With, DType: sum.DType, N: 41, Root: -1},
		"root":      {Op: sum.Op, With: sum.With, DType: sum.DType, N: sum.N, Root: 0},
		"sparse":    {Op: sum.Op, With: sum.With, DType: sum.DType, N: sum.N, Root: -1, Sparse: true},
	}
)

// TestCalls: the second of two neighbours is told what the first has called, if that differs in anything.
func TestCalls(t *testing.T) {
	all := ranks(t, 0, 1)
	number := uint64(0)
	agree := func(r int, c Call) {
		t.Helper()
		_, _, ok := all[r].Enter(number, c.Said())
		require.True(t, ok)
	}
	for name, other := range others {
		for first := range 2 {
			agree(first, sum)
			agree(1-first, sum)
			number++
			agree(first, sum)
			peer, theirs, ok := all[1-first].Enter(number, other.Said())
			require.False(t, ok, name)
			require.Equal(t, first, peer)
			require.Equal(t, sum.Said(), theirs)
			number++
		}
	}
	// Ranks may mix calls that the hosts do alike.
	for op, as := range calledAs {
		agree(0, Call{Op: op, N: 3, Root: -1})
		agree(1, Call{Op: as, N: 3, Root: -1})
		number++
	}
}

// TestNeighbours: each rank reads the ranks before and after it on its host, of any numbers. So one
// rank that differs is found out by a rank that comes after it, whichever it is.
func TestNeighbours(t *testing.T) {
	for _, numbers := range [][]int{{3}, {0, 1}, {0, 1, 2}, {1, 4, 6, 9}, {0, 2, 3, 5, 8}} {
		all := ranks(t, numbers...)
		for i, r := range numbers {
			var read, want []int
			for _, p := range all[r].peers {
				read = append(read, p.rank)
			}
			n := len(numbers)
			if n > 1 {
				want = slices.Compact([]int{numbers[(i+n-1)%n], numbers[(i+1)%n]})
			}
			require.Equal(t, want, read, "rank %d of %v", r, numbers)
		}
		for number, odd := range numbers {
			var found bool
			for _, r := range numbers {
				c := sum
				if r == odd {
					c = others["root"]
				}
				_, _, ok := all[r].Enter(uint64(number), c.Said())
				found = found || !ok
			}
			require.Equal(t, len(numbers) > 1, found, "rank %d of %v", odd, numbers)
		}
	}
}

// TestFarAhead: a call is compared while its rank is fewer than rememberCalls calls ahead. Later the board
// has a later call in its place, which is compared when the neighbour has come there.
func TestFarAhead(t *testing.T) {
	all := ranks(t, 0, 1)
	last := uint64(rememberCalls)
	for number := range last {
		_, _, ok := all[0].Enter(number, sum.Said())
		require.True(t, ok)
	}
	peer, theirs, ok := all[1].Enter(0, others["root"].Said())
	require.False(t, ok)
	require.Equal(t, 0, peer)
	require.Equal(t, sum.Said(), theirs)

	_, _, ok = all[0].Enter(last, others["root"].Said())
	require.True(t, ok)
	for number := range last {
		_, _, ok := all[1].Enter(number, sum.Said())
		require.True(t, ok, "call %d", number)
	}
	_, theirs, ok = all[1].Enter(last, sum.Said())
	require.False(t, ok)
	require.Equal(t, others["root"].Said(), theirs)
}

// TestHalfWritten: a call whose rank is still writing it is not compared. That rank looks when it has.
func TestHalfWritten(t *testing.T) {
	all := ranks(t, 0, 1)
	_, _, ok := all[0].Enter(0, others["root"].Said())
	require.True(t, ok)
	entry(all[0].own, 0)[0].Store(0)
	_, _, ok = all[1].Enter(0, sum.Said())
	require.True(t, ok)
	_, _, ok = all[0].Enter(0, others["root"].Said())
	require.False(t, ok)
}

// TestAbsent: a rank without a page, or with one that cannot be read, is left out. The boards say which
// rank that is, and the others are compared.
func TestAbsent(t *testing.T) {
	own, name := New()
	other, theirs := New()
	short := must.Get(region.New(region.PageSize / 2))
	defer func() { require.NoError(t, errors.Join(own.Close(), other.Close(), short.Leave())) }()
	for wrong, why := range map[string]string{"": "there is none", "nobody": "nobody", short.Name: fmt.Sprint(region.PageSize / 2)} {
		b := &Board{own: own.own}
		b.Open(1, map[int]string{0: wrong, 2: theirs})
		require.ErrorContains(t, b.Why, "the page of rank 0 cannot be read: ")
		if wrong == "" || wrong == short.Name {
			require.ErrorContains(t, b.Why, why)
		}
		require.Len(t, b.peers, 1)
		require.Equal(t, 2, b.peers[0].rank)
		require.NoError(t, b.peers[0].page.Leave())
	}

	before := region.Before
	defer func() { region.Before = before }()
	region.Before = func(string, int) error { return errors.New("refused") }
	none, nothing := New()
	require.Empty(t, nothing)
	require.ErrorContains(t, none.Why, "this rank has no page for others to read: refused")
	none.Open(0, map[int]string{1: name})
	_, _, ok := none.Enter(0, sum.Said())
	require.True(t, ok)
	require.NoError(t, errors.Join(none.Hide(), none.Close(), none.Close()))
}

// TestHostileBytes: whatever a neighbour's page has, calls go on. A call is compared with it only if
// it has the call's number, and its bytes can be shown.
func TestHostileBytes(t *testing.T) {
	all := ranks(t, 0, 1)
	rng := rand.New(rand.NewPCG(1, 2))
	page := all[0].own.Bytes
	for round := range 200 {
		number := rng.Uint64()
		switch round {
		case 0:
			number = 0
		case 1:
			number = 1<<64 - 2
		}
		for i := range len(page) / 8 {
			binary.NativeEndian.PutUint64(page[8*i:], rng.Uint64())
		}
		_, _, ok := all[1].Enter(number, sum.Said())
		require.True(t, ok, "the page has no call with number %d", number)
		e := entry(all[0].own, number)
		e[0].Store(number + 1)
		_, theirs, ok := all[1].Enter(number, sum.Said())
		require.False(t, ok)
		require.Equal(t, Said{e[1].Load(), e[2].Load()}, theirs)
		err := Disagree(number, 1, sum.Said(), 0, theirs)
		require.ErrorIs(t, err, work.ErrMismatch)
		require.ErrorContains(t, err, "rank 1 called all_reduce (sum) of 40 elements of float32, rank 0 called ")
	}
}

// FuzzSaid: any two words can be shown, and a call that ranks can make is shown as it was.
func FuzzSaid(f *testing.F) {
	for _, c := range others {
		f.Add(c.Said()[0], c.Said()[1])
	}
	f.Add(uint64(0), uint64(0))
	f.Add(^uint64(0), ^uint64(0))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		if s := (Said{a, b}).String(); s == "" || strings.Contains(s, "%!") {
			t.Errorf("%#x %#x is shown as %q", a, b, s)
		}
	})
}
