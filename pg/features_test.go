package pg_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// gathered gathers x of every rank along an axis into one new tensor. extents are those of the
// ranks.
func gathered(t *testing.T, g *pg.ProcessGroup, x *tensor.Tensor, axis int, extents []int) *tensor.Tensor {
	shape, total := x.Shape(), 0
	for _, e := range extents {
		total += e
	}
	shape[axis] = total
	whole := must.Get(tensor.New(x.DType(), shape...))
	outs, at := make([]*tensor.Tensor, len(extents)), 0
	for r, e := range extents {
		outs[r] = must.Get(whole.Slice(axis, at, at+e))
		at += e
	}
	if slices.Max(extents) == slices.Min(extents) {
		require.NoError(t, wait(g.AllGather(t.Context(), outs, x)))
		return whole
	}
	// All-gather takes tensors of one shape only, as Gloo's does.
	require.NoError(t, wait(g.AllToAll(t.Context(), outs, slices.Repeat([]*tensor.Tensor{x}, len(extents)))))
	return whole
}

// numbered returns a tensor of a rank whose elements are all different.
func numbered(t *testing.T, rank int, shape ...int) *tensor.Tensor {
	n := 1
	for _, d := range shape {
		n *= d
	}
	v := make([]int64, n)
	for i := range v {
		v[i] = int64(1000*rank + i)
	}
	return of(t, v, shape...)
}

// requireGathered compares whole with the ranks' numbered tensors, element by element.
func requireGathered(t *testing.T, whole *tensor.Tensor, axis int, shapes [][]int) {
	at := 0
	for r, shape := range shapes {
		part := must.Get(whole.Slice(axis, at, at+shape[axis]))
		at += shape[axis]
		require.Equal(t, data[int64](t, numbered(t, r, shape...)), data[int64](t, part), "rank %d", r)
	}
}

// F-42: tensors of one shape are gathered along any axis, into the slices of one tensor.
func TestF42AllGatherOnAnyAxis(t *testing.T) {
	const n = 3
	pgtest.Run(t, n, func(t *testing.T, g *pg.ProcessGroup) {
		for axis, shapes := range [][]int{{2, 3, 2}, {2, 3, 2}, {2, 3, 2}} {
			x := numbered(t, g.Rank(), shapes...)
			extents, all := make([]int, n), make([][]int, n)
			for r := range n {
				extents[r], all[r] = shapes[axis], shapes
			}
			requireGathered(t, gathered(t, g, x, axis, extents), axis, all)
		}
	})
}

// F-43: tensors whose extents along the axis differ or are zero: the extents are gathered first.
// Other differences are an error.
func TestF43AllGatherOfAnyShape(t *testing.T) {
	const n = 4
	pgtest.Run(t, n, func(t *testing.T, g *pg.ProcessGroup) {
		for axis := range 2 {
			shapes := make([][]int, n)
			for r := range n {
				shapes[r] = []int{2, 3}
				shapes[r][axis] = (r + 2) % n // one is zero
			}
			x := numbered(t, g.Rank(), shapes[g.Rank()]...)
			own := of(t, []int64{int64(x.Dim(axis))}, 1)
			all := must.Get(tensor.New(tensor.Int64, n))
			require.NoError(t, wait(g.AllGatherIntoTensor(t.Context(), all, own)))
			extents := make([]int, n)
			for r, e := range data[int64](t, all) {
				extents[r] = int(e)
			}
			requireGathered(t, gathered(t, g, x, axis, extents), axis, shapes)
		}
	})
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		x := numbered(t, g.Rank(), 2, 3+g.Rank()) // each expects the other's to be like its own
		outs := []*tensor.Tensor{numbered(t, 0, 2, 3+g.Rank()), numbered(t, 0, 2, 3+g.Rank())}
		require.ErrorIs(t, wait(g.AllGather(t.Context(), outs, x)), work.ErrMismatch)
	})
}

// F-46: 10^4 messages by key, sent and received in different orders.
func TestF46MessagesByKey(t *testing.T) {
	const keys = 10_000
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		order := rand.New(rand.NewPCG(seed, uint64(g.Rank()))).Perm(keys)
		works := make([]*work.Work, keys)
		got := make([]*tensor.Tensor, keys)
		for _, k := range order {
			x := of(t, []int64{int64(k), int64(k) * 7}, 2)
			var err error
			if got[k] = x; g.Rank() == 0 {
				works[k], err = g.Send(t.Context(), x, 1, pg.P2POptions{Tag: uint32(k)})
			} else {
				clear(data[int64](t, x))
				works[k], err = g.Recv(t.Context(), x, 0, pg.P2POptions{Tag: uint32(k)})
			}
			require.NoError(t, err)
		}
		for k, w := range works {
			require.NoError(t, w.Wait(t.Context()))
			require.Equal(t, []int64{int64(k), int64(k) * 7}, data[int64](t, got[k]))
		}
	})
}
