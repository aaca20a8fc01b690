package ddp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// adam is an optimizer of elements.
type adam struct {
	m, v []float32
	t    int
}

func (a *adam) update(values, grads []float32) error {
	if a.m == nil {
		a.m, a.v = make([]float32, len(values)), make([]float32, len(values))
	}
	a.t++
	c1, c2 := 1-math.Pow(0.9, float64(a.t)), 1-math.Pow(0.999, float64(a.t))
	for i, g := range grads {
		a.m[i] = 0.9*a.m[i] + 0.1*g
		a.v[i] = 0.999*a.v[i] + 0.001*g*g
		values[i] -= float32(0.01 * (float64(a.m[i]) / c1) / (math.Sqrt(float64(a.v[i])/c2) + 1e-8))
	}
	return nil
}

// model returns parameters of uneven lengths, and their slices.
func model(t *testing.T, rank int, lengths []int) (values, grads [][]float32, params []Param) {
	for i, n := range lengths {
		v := make([]float32, n)
		for k := range v {
			v[k] = float32(rank+1) * float32(i+k) / 7
		}
		values, grads = append(values, v), append(grads, make([]float32, n))
	}
	return values, grads, must.Get(Params(values, grads))
}

// Sharded training gives the parameters of DDP with the same optimizer, to within rounding: the sums
// of gradients have another order, and Adam's steps are 0.01 long.
func TestShardedIsDDP(t *testing.T) {
	lengths := []int{7, 1, 0, 13, 30, 2}
	for _, size := range []int{1, 2, 3, 4} {
		for _, limit := range []int{defaultBucketCap, 80} {
			t.Run(fmt.Sprintf("%d ranks, pieces of %d bytes", size, limit), func(t *testing.T) {
				pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
					ctx := t.Context()
					plain, plainGrads, ps := model(t, g.Rank(), lengths)
					d := must.Get(New(ctx, g, ps))
					sharded, shardedGrads, qs := model(t, g.Rank(), lengths)
					var mine adam
					s := must.Get(newSharded(ctx, g, qs, mine.update, limit))
					require.Equal(t, plain, sharded, "rank 0's parameters")

					states := make([]adam, len(lengths))
					for it := range 20 {
						require.NoError(t, d.Begin(ctx))
						for i := range plain {
							for k := range plain[i] {
								plainGrads[i][k] = plain[i][k] - float32(k+g.Rank()*it)
								shardedGrads[i][k] = plainGrads[i][k]
							}
							require.NoError(t, d.Ready(i))
						}
						require.NoError(t, d.Finish(ctx))
						for i := range plain {
							require.NoError(t, states[i].update(plain[i], plainGrads[i]))
						}
						require.NoError(t, s.Step(ctx))
					}
					for i := range plain {
						require.InDeltaSlice(t, plain[i], sharded[i], 1e-5)
					}
					// 53 elements: a rank's state has 1/n of them, rounded up for each piece.
					require.LessOrEqual(t, len(mine.m), 53/size+len(s.pieces))
					if limit == defaultBucketCap {
						require.Len(t, mine.m, (53+size-1)/size)
					} else {
						require.Len(t, s.pieces, 3)
					}
					all := make([]float32, size*len(sharded[4]))
					require.NoError(t, pg.Wait(g.AllGatherIntoTensor(ctx, pg.Slice(all), pg.Slice(sharded[4]))))
					for r := range size {
						require.Equal(t, sharded[4], all[30*r:30*r+30], "all ranks have the same bits")
					}
				})
			})
		}
	}
}

func TestShardedRefuses(t *testing.T) {
	pgtest.Run(t, 1, func(t *testing.T, g *pg.ProcessGroup) {
		ctx := t.Context()
		_, _, ps := model(t, 0, []int{3})
		_, err := NewShardedOptimizer[float32](ctx, g, ps, nil)
		require.ErrorContains(t, err, "needs an update")
		update := func([]float32, []float32) error { return errors.New("broken") }
		_, err = NewShardedOptimizer(ctx, g, ps, func([]float64, []float64) error { return nil })
		require.ErrorContains(t, err, "parameter 0 (0)")
		bare := []Param{{Name: "w", Value: ps[0].Value}}
		_, err = NewShardedOptimizer(ctx, g, bare, update)
		require.ErrorContains(t, err, "parameter 0 (w): has no gradient")
		wide := must.Get(tensor.New(tensor.Float32, 2, 3))
		view, err := wide.Transpose(0, 1)
		require.NoError(t, err)
		_, err = NewShardedOptimizer(ctx, g, []Param{{Value: view, Grad: view}}, update)
		require.ErrorContains(t, err, "not contiguous")
		s := must.Get(NewShardedOptimizer(ctx, g, ps, update))
		require.ErrorContains(t, s.Step(ctx), "broken")
		require.ErrorIs(t, s.Step(context.Background()), ErrFailed)
	})
}
