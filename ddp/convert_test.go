package ddp

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

var floats = []tensor.DType{
	tensor.Float64, tensor.Float32, tensor.BFloat16, tensor.Float16, tensor.Float8E4M3, tensor.Float8E5M2,
}

// randomTensor has more elements than one piece, and no round number of them.
func randomTensor(t *testing.T, dt tensor.DType) *tensor.Tensor {
	rnd := rand.New(rand.NewPCG(1, uint64(dt)))
	x := must.Get(tensor.New(dt, 2*piece+37))
	for i := range x.Len() {
		require.NoError(t, x.SetFloat64(rnd.NormFloat64()*10, i))
	}
	require.NoError(t, x.SetFloat64(math.NaN(), 5))
	require.NoError(t, x.SetFloat64(0, 6))
	return x
}

// eachElement requires dst[i] to be want(src[i]) rounded to dst's type.
func eachElement(t *testing.T, dst, src *tensor.Tensor, want func(v float64) float64) {
	t.Helper()
	ref := must.Get(tensor.New(dst.DType(), dst.Len()))
	for i := range src.Len() {
		require.NoError(t, ref.SetFloat64(want(must.Get(src.Float64At(i))), i))
	}
	require.Equal(t, ref.Bytes(), dst.Bytes())
}

func TestScaleAndDivide(t *testing.T) {
	for _, dt := range floats {
		t.Run(dt.String(), func(t *testing.T) {
			src := randomTensor(t, dt)
			dst := must.Get(tensor.New(dt, src.Len()))
			single := dt != tensor.Float64
			round := func(v float64) float64 {
				if single {
					return float64(float32(v))
				}
				return v
			}
			scale(dst, src, 3)
			eachElement(t, dst, src, func(v float64) float64 { return round(v * round(1.0/3)) })
			divide(dst, src, 3)
			eachElement(t, dst, src, func(v float64) float64 { return round(v / 3) })
		})
	}
	for _, dt := range []tensor.DType{tensor.Complex64, tensor.Complex128} {
		t.Run(dt.String(), func(t *testing.T) {
			src := must.Get(tensor.New(dt, 9))
			parts := must.Get(src.ViewAsReal())
			require.NoError(t, parts.Fill(6))
			require.NoError(t, parts.SetFloat64(-12, 4, 1))
			for _, f := range []func(dst, src *tensor.Tensor, n int){scale, divide} {
				dst := must.Get(tensor.New(dt, 9))
				f(dst, src, 4)
				got := must.Get(dst.ViewAsReal())
				for i := range 9 {
					for k, want := range []float64{1.5, 1.5} {
						if i == 4 && k == 1 {
							want = -3
						}
						require.Equal(t, want, must.Get(got.Float64At(i, k)))
					}
				}
			}
		})
	}
}

func TestConvert(t *testing.T) {
	for _, from := range floats {
		for _, to := range floats {
			src := randomTensor(t, from)
			dst := must.Get(tensor.New(to, src.Len()))
			convert(dst, src)
			eachElement(t, dst, src, func(v float64) float64 {
				if to == tensor.Float64 || from == tensor.Float64 {
					return float64(float32(v)) // through float32
				}
				return v
			})
		}
	}
}

func TestKernelsAllocateNothing(t *testing.T) {
	src := randomTensor(t, tensor.Float32)
	half := randomTensor(t, tensor.Float16)
	require.Zero(t, testing.AllocsPerRun(10, func() {
		convert(half, src)
		convert(src, half)
		scale(half, half, 3)
		divide(src, src, 3)
	}))
}
