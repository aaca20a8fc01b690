package ddp_test

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
)

// gradient is element k of parameter p's gradient on a rank in an iteration.
func gradient(seed uint64, iteration, rank, p, k int) float64 {
	h := fnv.New64a()
	fmt.Fprint(h, seed, iteration, rank, p, k)
	return float64(int64(h.Sum64()))/math.MaxInt64*4 + 0.25
}

// mean is the average of the gradients by one process that has all the data.
func mean(seed uint64, size, iteration, p, k int, has func(rank int) bool) float64 {
	sum := 0.0
	for r := range size {
		if has(r) {
			sum += gradient(seed, iteration, r, p, k)
		}
	}
	return sum / float64(size)
}

// ulp is how far one rounding moves a value near 1.
var ulp = map[tensor.DType]float64{
	tensor.Float64: 0x1p-53, tensor.Float32: 0x1p-24, tensor.Float16: 0x1p-11, tensor.BFloat16: 0x1p-8,
}

type randomModel struct {
	params []ddp.Param
	noGrad []bool
}

// newRandomModel is the same on every rank, but for the parameters' values.
func newRandomModel(t *testing.T, seed uint64, rank int, views bool) randomModel {
	rnd := rand.New(rand.NewPCG(seed, 1))
	dtypes := []tensor.DType{tensor.Float32, tensor.Float32, tensor.Float64, tensor.BFloat16, tensor.Float16}
	var m randomModel
	for i := range 3 + rnd.IntN(12) {
		dt := dtypes[rnd.IntN(len(dtypes))]
		shape := make([]int, rnd.IntN(4))
		for k := range shape {
			shape[k] = rnd.IntN(7)
		}
		p := ddp.Param{Name: fmt.Sprintf("layer%d", i), Value: zeros(t, dt, shape...), NoGrad: i > 0 && rnd.IntN(6) == 0}
		transposed := len(shape) > 1 && rnd.IntN(3) == 0
		if transposed {
			v := must.Get(p.Value.Transpose(0, 1))
			p.Value = v
		}
		fill(t, p.Value, float64(100*rank+i))
		if !p.NoGrad && !views {
			p.Grad = zeros(t, dt, p.Value.Shape()...)
			if rnd.IntN(3) == 0 && len(shape) > 1 { // strides other than the parameter's
				g := zeros(t, dt, p.Value.Dim(1), p.Value.Dim(0), 2)
				if len(shape) == 2 {
					half := must.Get(g.Select(2, 1))
					p.Grad = must.Get(half.Transpose(0, 1))
				}
			}
		}
		m.params = append(m.params, p)
		m.noGrad = append(m.noGrad, p.NoGrad)
	}
	return m
}

// each calls f with every index of a tensor and its number in row-major order.
func each(shape []int, f func(k int, index []int)) {
	index := make([]int, len(shape))
	n := 1
	for _, d := range shape {
		n *= d
	}
	for k := range n {
		rest := k
		for i := len(shape) - 1; i >= 0; i-- {
			index[i] = rest % shape[i]
			rest /= shape[i]
		}
		f(k, index)
	}
}

// Every rank ends with the gradients of one process that has all the data, whatever the model,
// the options and the order of readiness.
func TestAverageEqualsSingleProcess(t *testing.T) {
	base := rand.Uint64()
	t.Logf("seed %d", base)
	hook := ddp.AllReduceHook
	modes := map[string]ddp.Options{
		"default":       {},
		"small buckets": {FirstBucket: 40, BucketCap: 200},
		"views":         {GradientAsBucketView: true, FirstBucket: 64, BucketCap: 300},
		"find unused":   {FindUnused: true, FirstBucket: 40, BucketCap: 200},
		"static":        {StaticGraph: true, FirstBucket: 40, BucketCap: 200},
		"hook":          {Hook: hook, FirstBucket: 40, BucketCap: 200},
		"views, hook":   {Hook: hook, GradientAsBucketView: true},
		"views, unused": {FindUnused: true, GradientAsBucketView: true, BucketCap: 100},
	}
	for name, o := range modes {
		for size := 1; size <= 5; size++ {
			t.Run(fmt.Sprintf("%s/%d ranks", name, size), func(t *testing.T) {
				seed := base + uint64(size)
				pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
					m := newRandomModel(t, seed, g.Rank(), o.GradientAsBucketView)
					d := must.Get(ddp.New(soon(t), g, m.params, o))
					for i, p := range m.params {
						each(p.Value.Shape(), func(_ int, index []int) {
							v := must.Get(p.Value.Float64At(index...))
							require.Equal(t, float64(i), v, "rank 0's value of parameter %d", i)
						})
					}
					for it := range 5 {
						trainOnce(t, d, g, m, seed, it, o)
					}
				})
			})
		}
	}
}

func trainOnce(t *testing.T, d *ddp.DDP, g *pg.ProcessGroup, m randomModel, seed uint64, it int, o ddp.Options) {
	size := g.Size()
	has := func(p int) func(rank int) bool {
		return func(rank int) bool {
			switch {
			case m.noGrad[p]:
				return false
			case o.FindUnused: // anew in each iteration
				return gradient(seed, it, rank, p, -1) > 0
			case o.StaticGraph: // forever; the same on all ranks, as graphs are
				return p%3 != 1
			}
			return true
		}
	}
	require.NoError(t, d.Begin(soon(t)))
	order := rand.New(rand.NewPCG(seed, uint64(100*it+g.Rank()))).Perm(len(m.params))
	for _, p := range order {
		if m.noGrad[p] {
			continue
		}
		grad := m.params[p].Grad
		if o.GradientAsBucketView {
			grad = d.GradView(p)
		}
		fill(t, grad, -77)
		if !has(p)(g.Rank()) {
			continue
		}
		each(grad.Shape(), func(k int, index []int) {
			require.NoError(t, grad.SetFloat64(gradient(seed, it, g.Rank(), p, k), index...))
		})
		require.NoError(t, d.Ready(p))
	}
	require.NoError(t, d.Finish(soon(t)))
	ranks := make([]int, size)
	for r := range ranks {
		ranks[r] = r
	}
	for p, prm := range m.params {
		if prm.NoGrad {
			continue
		}
		grad := prm.Grad
		if o.GradientAsBucketView {
			grad = d.GradView(p)
		}
		used := slices.ContainsFunc(ranks, has(p))
		each(grad.Shape(), func(k int, index []int) {
			got := must.Get(grad.Float64At(index...))
			switch {
			case used:
				// Each rank's input, share and partial sum may be off by half
				// a unit of values up to 8.
				tolerance := 8 * float64(3*size) * ulp[grad.DType()]
				require.InDelta(t, mean(seed, size, it, p, k, has(p)), got, tolerance, "iteration %d, parameter %d, element %v", it, p, index)
			case o.GradientAsBucketView:
				require.Zero(t, got)
			default:
				require.Equal(t, -77.0, got, "a gradient that nobody computed was touched")
			}
		})
	}
}
