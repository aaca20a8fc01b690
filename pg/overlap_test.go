package pg_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestBatchesOverlap: a batch whose tensors share memory is refused, or right. Two ranks exchange pieces of their memory.
func TestBatchesOverlap(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const length, pieces, rounds = 60, 3, 100
	type piece struct{ at, n int }
	refused := 0
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		ctx, me, common := t.Context(), g.Rank(), rand.New(rand.NewPCG(seed, 0))
		for range rounds {
			var sent, received [2][]piece
			var wrong [2]bool
			for range pieces {
				n := common.IntN(5)
				for r := range 2 {
					sent[r] = append(sent[r], piece{common.IntN(length - n), n})
					received[r] = append(received[r], piece{common.IntN(length - n), n})
				}
			}
			for r := range 2 {
				used := make([]bool, length)
				for _, p := range received[r] {
					for k := range p.n {
						wrong[r] = wrong[r] || used[p.at+k]
						used[p.at+k] = true
					}
				}
				for _, p := range sent[r] {
					wrong[r] = wrong[r] || slices.Contains(used[p.at:p.at+p.n], true)
				}
			}
			if wrong[0] || wrong[1] {
				if me == 0 {
					refused++
				}
				if !wrong[me] {
					continue // the other rank sends nothing
				}
			}
			memory := func(r int) []int32 {
				v := make([]int32, length)
				for i := range v {
					v[i] = int32(1000*r + i)
				}
				return v
			}
			v, want := memory(me), memory(me)
			whole := of(t, v, length)
			view := func(p piece) *tensor.Tensor {
				return must.Get(whole.Slice(0, p.at, p.at+p.n))
			}
			var ops []pg.P2P
			for i := range pieces {
				ops = append(ops, pg.P2P{Send: view(sent[me][i]), Peer: 1 - me}, pg.P2P{Recv: view(received[me][i]), Peer: 1 - me})
				if from, to := sent[1-me][i], received[me][i]; !wrong[me] {
					copy(want[to.at:to.at+to.n], memory(1 - me)[from.at:])
				}
			}
			works, err := g.BatchISendIRecv(ctx, ops)
			if wrong[me] {
				require.ErrorIs(t, err, backend.ErrInvalidArgument)
				require.ErrorContains(t, err, "overlap in memory")
				require.Empty(t, works)
			} else {
				require.NoError(t, err)
				require.NoError(t, work.WaitAll(ctx, works...))
			}
			require.Equal(t, want, v)
		}
	})
	require.Positive(t, refused)
	require.Less(t, refused, rounds)
}

// TestOverlapIsRefused: functions for slices and coalesced calls refuse what the backend refuses.
func TestOverlapIsRefused(t *testing.T) {
	for _, size := range []int{2, 3} {
		pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
			ctx, n := t.Context(), g.Size()
			v := make([]int64, 2*n)
			for i := range v {
				v[i] = int64(i)
			}
			const root = 1
			if g.Rank() == root {
				err := pg.Wait(g.Scatter(ctx, pg.Slice(v[1:3]), pg.Parts(v, n), root))
				assert.ErrorContains(t, err, "overlap in memory, and are not the same elements of this rank's own part: in place, the output is input 1")
				err = pg.Wait(g.Scatter(ctx, pg.Slice(v[:2]), pg.Parts(v, n), root))
				assert.ErrorIs(t, err, backend.ErrInvalidArgument)
				assert.NoError(t, pg.Wait(g.Scatter(ctx, pg.Slice(v[2:4]), pg.Parts(v, n), root)))
				assert.Equal(t, []int64{2, 3}, v[2:4])
			} else {
				own := make([]int64, 2)
				assert.NoError(t, pg.Wait(g.Scatter(ctx, pg.Slice(own), nil, root)))
				assert.Equal(t, []int64{int64(2 * g.Rank()), int64(2*g.Rank() + 1)}, own)
			}
			x := of(t, v, 2*n)
			_, err := g.AllToAllSingle(ctx, x, x, nil, nil)
			assert.ErrorContains(t, err, "all_to_all_single: the input and the output overlap in memory")
			c := g.Coalesce()
			c.AllReduce(x, pg.Sum())
			c.AllReduce(x, pg.Sum())
			_, err = c.End(ctx)
			assert.ErrorContains(t, err, "tensor 0 and tensor 1 overlap in memory")
		})
	}
}
