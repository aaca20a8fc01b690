package ddp_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// What one iteration does not send comes with later ones: the sum of the results approaches the sum of
// the averages. The bias is averaged exactly, and all ranks have the same bits.
func TestPowerSGD(t *testing.T) {
	const rows, cols, iterations = 12, 10, 60
	pgtest.Run(t, 3, func(t *testing.T, g *pg.ProcessGroup) {
		s := must.Get(ddp.NewPowerSGD(ddp.PowerSGDOptions{Start: 2}))
		ps := []ddp.Param{
			{Value: zeros(t, tensor.Float32, rows, cols), Grad: zeros(t, tensor.Float32, rows, cols)},
			{Value: zeros(t, tensor.Float32, rows), Grad: zeros(t, tensor.Float32, rows)},
		}
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{Hook: s.Hook}))
		weight := must.Get(tensor.Data[float32](ps[0].Grad))
		bias := must.Get(tensor.Data[float32](ps[1].Grad))
		sums, want := make([]float64, len(weight)), make([]float64, len(weight))
		for it := range iterations {
			for k := range weight {
				weight[k] = float32((k*k+g.Rank())%7) - 2
				want[k] += float64((k*k)%7+(k*k+1)%7+(k*k+2)%7)/3 - 2
			}
			for k := range bias {
				bias[k] = float32(k + g.Rank())
			}
			require.NoError(t, d.Begin(soon(t)))
			backward(t, d, 2)
			require.NoError(t, d.Finish(soon(t)))
			for k, v := range weight {
				sums[k] += float64(v)
				if it < 2 {
					require.InDelta(t, want[k], sums[k], 1e-5, "not compressed yet")
				}
			}
			for k, v := range bias {
				require.InDelta(t, float32(k+1), v, 1e-5)
			}
		}
		for k := range sums {
			require.InDelta(t, want[k]/iterations, sums[k]/iterations, 0.5)
		}
		before, after := s.Compression()
		require.Equal(t, iterations*(rows*cols+rows), before)
		require.Equal(t, 2*(rows*cols+rows)+(iterations-2)*(rows+cols+rows), after)
		all := make([]float32, g.Size()*len(weight))
		require.NoError(t, pg.Wait(g.AllGatherIntoTensor(soon(t), pg.Slice(all), pg.Slice(weight))))
		for r := range 3 {
			require.Equal(t, weight, all[r*len(weight):][:len(weight)])
		}
	})
}

// A gradient of rank 1 needs no second iteration.
func TestPowerSGDIsExactForItsRank(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		s := must.Get(ddp.NewPowerSGD(ddp.PowerSGDOptions{Start: 2, Rank: 2}))
		p := ddp.Param{Value: zeros(t, tensor.Float32, 16, 16), Grad: zeros(t, tensor.Float32, 16, 16)}
		d := must.Get(ddp.New(soon(t), g, []ddp.Param{p}, ddp.Options{Hook: s.Hook}))
		grad := must.Get(tensor.Data[float32](p.Grad))
		for range 4 {
			for k := range grad {
				grad[k] = float32((k/16 - 3) * (k%16 + g.Rank()))
			}
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Ready(0))
			require.NoError(t, d.Finish(soon(t)))
			for k, v := range grad {
				require.InDelta(t, float64(k/16-3)*(float64(k%16)+0.5), float64(v), 1e-2)
			}
		}
	})
}

// The least gradients are averaged like others: no factor becomes infinite.
func TestPowerSGDTinyGradients(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		s := must.Get(ddp.NewPowerSGD(ddp.PowerSGDOptions{Start: 2}))
		p := ddp.Param{Value: zeros(t, tensor.Float32, 16, 16), Grad: zeros(t, tensor.Float32, 16, 16)}
		d := must.Get(ddp.New(soon(t), g, []ddp.Param{p}, ddp.Options{Hook: s.Hook}))
		for range 5 {
			fill(t, p.Grad, 1e-41)
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Ready(0))
			require.NoError(t, d.Finish(soon(t)))
			require.InEpsilon(t, 1e-41, first(t, p.Grad), 1e-2)
		}
	})
}

// A value that is not finite, on one rank and in one iteration, spoils that iteration alone. Later averages are those
// without a hook, with the same bits on all ranks.
func TestPowerSGDForgetsWhatIsNotFinite(t *testing.T) {
	const rows, cols, bad, iterations = 16, 12, 4, 8
	inf, largest := float32(math.Inf(1)), float32(math.MaxFloat32)
	spoil := func(v float32, elements ...int) func(rank int, grads [][]float32) {
		return func(rank int, grads [][]float32) {
			if rank == 1 {
				for _, k := range elements {
					grads[0][k] = v
				}
			}
		}
	}
	for name, spoil := range map[string]func(rank int, grads [][]float32){
		"infinite":     spoil(inf, 3),
		"negative":     spoil(-inf, 3),
		"both":         func(rank int, grads [][]float32) { grads[0][3] = inf * float32(1-2*rank) },
		"not a number": spoil(float32(math.NaN()), 3),
		"last element": spoil(inf, rows*cols-1),
		"whole row":    spoil(-inf, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
		"first sum overflows": func(_ int, grads [][]float32) {
			for k := range grads[0] {
				grads[0][k] = largest
			}
		},
		"second sum overflows": func(_ int, grads [][]float32) {
			for k := range rows {
				grads[0][k*cols+1] = largest
			}
		},
		"bias infinite":      func(rank int, grads [][]float32) { grads[1][2] = inf * float32(rank*2-1) },
		"bias not a number":  func(_ int, grads [][]float32) { grads[1][2] = float32(math.NaN()) },
		"sum of the bias":    func(_ int, grads [][]float32) { grads[1][0] = largest },
		"another matrix too": func(rank int, grads [][]float32) { grads[0][0], grads[2][5] = inf, -inf },
	} {
		t.Run(name, func(t *testing.T) {
			pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
				s := must.Get(ddp.NewPowerSGD(ddp.PowerSGDOptions{Start: 2, Rank: 2}))
				var ps []ddp.Param
				var grads [][]float32
				for _, shape := range [][]int{{rows, cols}, {rows}, {cols, 4, 5}} {
					ps = append(ps, ddp.Param{Value: zeros(t, tensor.Float32, shape...), Grad: zeros(t, tensor.Float32, shape...)})
					v := must.Get(tensor.Data[float32](ps[len(ps)-1].Grad))
					grads = append(grads, v)
				}
				d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{Hook: s.Hook}))
				for it := range iterations {
					want := make([][]float32, len(grads))
					for i, v := range grads {
						width := len(v) / ps[i].Grad.Dim(0)
						for k := range v { // of rank 1, which compression does not change
							row, col := float32(k/width%5-2), float32(k%width%7+it)
							v[k] = row * (col + float32(g.Rank()))
							want[i] = append(want[i], row*(col+0.5))
						}
					}
					if it == bad {
						spoil(g.Rank(), grads)
					}
					require.NoError(t, d.Begin(soon(t)))
					backward(t, d, len(ps))
					require.NoError(t, d.Finish(soon(t)))
					finite := true
					for i, v := range grads {
						for k, x := range v {
							finite = finite && x-x == 0
							if it != bad {
								require.InDelta(t, want[i][k], x, 1e-2, "iteration %d, element %d of gradient %d", it, k, i)
							}
						}
						bits := make([]uint32, len(v)) // NaN is not equal to itself
						for k, x := range v {
							bits[k] = math.Float32bits(x)
						}
						all := make([]uint32, g.Size()*len(bits))
						require.NoError(t, pg.Wait(g.AllGatherIntoTensor(soon(t), pg.Slice(all), pg.Slice(bits))))
						require.Equal(t, all[:len(v)], all[len(v):], "iteration %d", it)
					}
					require.Equal(t, it != bad, finite, "iteration %d", it)
				}
			})
		})
	}
}

func TestPowerSGDRefuses(t *testing.T) {
	_, err := ddp.NewPowerSGD(ddp.PowerSGDOptions{Start: 1})
	require.ErrorContains(t, err, "Start 1: they must be at least 1 and 2")
	require.ErrorContains(t, must.Err(ddp.NewPowerSGD(ddp.PowerSGDOptions{Rank: -1})), "Rank is -1")
}

// After its start gradients are averaged in pairs, and every second step the parameters over all.
func TestPostLocalSGD(t *testing.T) {
	pgtest.Run(t, 4, func(t *testing.T, g *pg.ProcessGroup) {
		pair := must.Get(g.NewSubgroups(t.Context(), 2))
		ps := vectors(t, 3)
		d := must.Get(ddp.New(soon(t), g, ps, ddp.Options{Hook: ddp.PostLocalSGDHook(pair, 1)}))
		a := must.Get(ddp.NewPeriodicAverager(g, ps, 2, 1))
		local := []float64{0.5, 2.5}[g.Rank()/2]
		for it, want := range []float64{1.5, local, local, local} {
			fill(t, ps[0].Grad, float64(g.Rank()))
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Ready(0))
			require.NoError(t, d.Finish(soon(t)))
			require.Equal(t, want, first(t, ps[0].Grad), "iteration %d", it)
			fill(t, ps[0].Value, first(t, ps[0].Grad))
			require.NoError(t, a.Average(soon(t)))
			value := want
			if it%2 == 1 {
				value = 1.5
			}
			require.Equal(t, value, first(t, ps[0].Value), "iteration %d", it)
		}
	})
	require.ErrorContains(t, must.Err(ddp.NewPeriodicAverager(newInstant(), nil, 0, 0)), "period is 0")
}
