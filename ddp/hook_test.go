package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/pg/pgtest"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// The result of a compressed average differs from the true one by the rounding
// of each share, of its division and of each partial sum.
func TestCompressionAccuracy(t *testing.T) {
	seed := must.Seed(t)
	for name, tc := range map[string]struct {
		hook ddp.Hook
		ulp  float64
	}{
		"all-reduce": {ddp.AllReduceHook, ulp[tensor.Float32]},
		"float16":    {ddp.FP16CompressHook, ulp[tensor.Float16]},
		"bfloat16":   {ddp.BF16CompressHook, ulp[tensor.BFloat16]},
		"wrapper":    {ddp.CompressWrapper(tensor.Float16, ddp.AllReduceHook), ulp[tensor.Float16]},
		"two steps":  {ddp.CompressWrapper(tensor.Float32, ddp.CompressWrapper(tensor.BFloat16, ddp.AllReduceHook)), ulp[tensor.BFloat16]},
	} {
		for _, dt := range []tensor.DType{tensor.Float32, tensor.Float64} {
			for size := 1; size <= 4; size++ {
				t.Run(fmt.Sprintf("%s/%v/%d ranks", name, dt, size), func(t *testing.T) {
					const n = 1500
					pgtest.Run(t, size, func(t *testing.T, g *pg.ProcessGroup) {
						p := ddp.Param{Value: zeros(t, dt, n), Grad: zeros(t, dt, n)}
						d := must.Get(ddp.New(soon(t), g, []ddp.Param{p}, ddp.Options{Hook: tc.hook}))
						for it := range 3 {
							for k := range n {
								require.NoError(t, p.Grad.SetFloat64(gradient(seed, it, g.Rank(), 0, k), k))
							}
							require.NoError(t, d.Begin(soon(t)))
							require.NoError(t, d.Ready(0))
							require.NoError(t, d.Finish(soon(t)))
							worst := 0.0
							for k := range n {
								got := must.Get(p.Grad.Float64At(k))
								want := mean(seed, size, it, 0, k, func(int) bool { return true })
								worst = max(worst, got-want, want-got)
							}
							// Values are below 4.25, so a rounding is off by at most 8 ulp/2.
							require.LessOrEqual(t, worst, 4*tc.ulp*float64(2+size))
							if tc.ulp > ulp[tensor.Float32] {
								require.Positive(t, worst, "it was compressed")
							}
						}
					})
				})
			}
		}
	}
}

// What a compressing hook sends is half as long.
func TestCompressionOnTheWire(t *testing.T) {
	rec := &recorder{Group: newInstant()}
	ps := vectors(t, 6)
	narrow, cplx := zeros(t, tensor.Float16, 3), zeros(t, tensor.Complex64, 2)
	ps = append(ps, ddp.Param{Value: narrow, Grad: zeros(t, tensor.Float16, 3)}, ddp.Param{Value: cplx, Grad: zeros(t, tensor.Complex64, 2)})
	d := must.Get(ddp.New(soon(t), rec, ps, ddp.Options{Hook: ddp.BF16CompressHook}))
	rec.take()
	require.Equal(t, []string{"all_reduce complex64[2] sum", "all_reduce float16[3] sum", "all_reduce bfloat16[6] sum"}, iterate(t, d, rec, 3))
}

// A hook sees the bucket's parts and decides what the result is.
func TestOwnHook(t *testing.T) {
	var seen []int
	var order []string
	hook := func(ctx context.Context, b *ddp.Bucket) (*work.Work, error) {
		seen = append(seen, b.Index())
		if b.IsLast() != (b.Index() == 1) || b.IsSparse() {
			return nil, errors.New("not what was expected")
		}
		grads, values := b.Gradients(), b.Values()
		for k := range b.Params() {
			if !grads[k].SameShape(values[k]) {
				return nil, fmt.Errorf("gradient %d is %v", k, grads[k])
			}
			if err := grads[k].Fill(float64(10 * b.Params()[k])); err != nil {
				return nil, err
			}
		}
		copied, err := b.Buffer().Clone()
		if err != nil {
			return nil, err
		}
		b.SetBuffer(copied) // the bucket's own memory is not the result
		for _, name := range []string{"first", "second"} {
			b.After(func(b *ddp.Bucket) (err error) {
				defer must.Catch(&err)
				order = append(order, name)
				return b.Buffer().SetFloat64(must.Get(b.Buffer().Float64At(0))+1, 0)
			})
		}
		return b.AllReduce(ctx, pg.Max())
	}
	ps := vectors(t, 2, 3, 1)
	d, err := ddp.New(soon(t), newInstant(), ps, ddp.Options{Hook: hook, FirstBucket: 4, BucketCap: 100, FindUnused: true})
	require.NoError(t, err)
	require.Equal(t, [][]int{{1, 2}, {0}}, d.Buckets())
	require.NoError(t, d.Begin(soon(t)))
	backward(t, d, 3)
	require.NoError(t, d.Finish(soon(t)))
	require.Equal(t, []int{0, 1}, seen)
	require.Equal(t, []string{"second", "first", "second", "first"}, order)
	require.Equal(t, 2.0, first(t, ps[0].Grad))
	require.Equal(t, 12.0, first(t, ps[1].Grad))
	require.Equal(t, 20.0, first(t, ps[2].Grad))
}

func TestNoopHook(t *testing.T) {
	ps := vectors(t, 2, 3)
	rec := &recorder{Group: newInstant()}
	d := must.Get(ddp.New(soon(t), rec, ps, ddp.Options{Hook: ddp.NoopHook}))
	rec.take()
	fill(t, ps[1].Grad, 4)
	require.Empty(t, iterate(t, d, rec, 2))
	require.Equal(t, 4.0, first(t, ps[1].Grad))
}

func TestErrorOfAHook(t *testing.T) {
	broken := errors.New("broken")
	for name, hook := range map[string]ddp.Hook{
		"call": func(context.Context, *ddp.Bucket) (*work.Work, error) { return nil, broken },
		"work": func(context.Context, *ddp.Bucket) (*work.Work, error) {
			return work.Completed(work.Info{}, broken), nil
		},
		"after": func(_ context.Context, b *ddp.Bucket) (*work.Work, error) {
			b.After(func(*ddp.Bucket) error { return broken })
			return nil, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := must.Get(ddp.New(soon(t), newInstant(), vectors(t, 2), ddp.Options{Hook: hook}))
			require.NoError(t, d.Begin(soon(t)))
			err := d.Ready(0)
			if err == nil {
				err = d.Finish(soon(t))
			}
			require.ErrorIs(t, err, broken)
			be := must.As[*ddp.BucketError](t, err)
			require.Equal(t, ddp.BucketError{Bucket: 0, Indices: []int{0}, Names: []string{"p0"}, Err: be.Err}, *be)
		})
	}
}

// Ranks add up memory, so gradients lie in it as PyTorch lays them: with the
// parameter's strides if these leave no gaps, else in row-major order.
func TestLayoutOfABucket(t *testing.T) {
	transposed := must.Get(zeros(t, tensor.Float32, 3, 2).Transpose(0, 1))
	gaps := must.Get(zeros(t, tensor.Float32, 2, 3, 2).Select(2, 0))
	backwards, err := zeros(t, tensor.Float32, 8).AsStrided([]int{2, 3}, []int{-1, 3}, 1)
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		value *tensor.Tensor
		want  []float32
	}{
		"transposed": {transposed, []float32{0, 3, 1, 4, 2, 5}},
		"gaps":       {gaps, []float32{0, 1, 2, 3, 4, 5}},
		"backwards":  {backwards, []float32{0, 1, 2, 3, 4, 5}},
	} {
		t.Run(name, func(t *testing.T) {
			grad, err := tensor.Of([]float32{0, 1, 2, 3, 4, 5}, 2, 3)
			require.NoError(t, err)
			var got []float32
			hook := func(_ context.Context, b *ddp.Bucket) (*work.Work, error) {
				data, err := tensor.Data[float32](b.Buffer())
				got = append(got, data...)
				return nil, err
			}
			d, err := ddp.New(soon(t), newInstant(), []ddp.Param{{Value: tc.value, Grad: grad}}, ddp.Options{Hook: hook})
			require.NoError(t, err)
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Ready(0))
			require.NoError(t, d.Finish(soon(t)))
			require.Equal(t, tc.want, got)
		})
	}
}

func TestHookWithAWrongResult(t *testing.T) {
	for name, hook := range map[string]ddp.Hook{
		"length": func(_ context.Context, b *ddp.Bucket) (*work.Work, error) {
			b.SetBuffer(zeros(t, tensor.Float32, 1))
			return nil, nil
		},
		"dtype": func(_ context.Context, b *ddp.Bucket) (*work.Work, error) {
			b.SetBuffer(zeros(t, tensor.Float64, 2))
			return nil, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := must.Get(ddp.New(soon(t), newInstant(), vectors(t, 2), ddp.Options{Hook: hook}))
			require.NoError(t, d.Begin(soon(t)))
			require.NoError(t, d.Ready(0))
			require.ErrorContains(t, d.Finish(soon(t)), "expected float32[2]")
		})
	}
	d, err := ddp.New(soon(t), newInstant(), vectors(t, 2), ddp.Options{Hook: ddp.CompressWrapper(tensor.Int8, ddp.AllReduceHook)})
	require.NoError(t, err)
	require.NoError(t, d.Begin(soon(t)))
	require.ErrorContains(t, d.Ready(0), "cannot cast gradients to int8")
}

func TestSparseBucketsPassHooks(t *testing.T) {
	pgtest.Run(t, 2, func(t *testing.T, g *pg.ProcessGroup) {
		value := zeros(t, tensor.Float32, 4)
		fill(t, value, float64(2+4*g.Rank()))
		grad := must.Get(tensor.FromDense(value, 1))
		d, err := ddp.New(soon(t), g, []ddp.Param{{Value: value, Grad: grad}}, ddp.Options{Hook: ddp.FP16CompressHook})
		require.NoError(t, err)
		require.NoError(t, d.Begin(soon(t)))
		require.NoError(t, d.Ready(0))
		require.NoError(t, d.Finish(soon(t)))
		require.Equal(t, 4.0, first(t, must.Get(grad.Dense())))
	})
}
