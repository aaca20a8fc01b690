package gpu_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/ddp"
	"github.com/c10d-go/c10d/ddp/gpu"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestCompress: a hook that compresses averages rounded gradients.
func TestCompress(t *testing.T) {
	for _, narrow := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		t.Run(narrow.String(), func(t *testing.T) {
			withKernels(t, 1, func(t *testing.T, m machine) {
				run(t, m, 2, func(x *rank) error { return x.compress(narrow) })
			})
		})
	}
}

func (x *rank) compress(narrow tensor.DType) error {
	params := must.Get(x.model(true))
	// A bucket without elements.
	none := must.Get(x.tensor(tensor.Float32, 0))
	params = append(params, ddp.Param{Name: "none", Value: none, Grad: none})
	buckets := 0
	d := must.Get(ddp.New(x, x.g, params, ddp.Options{
		Device: x.own, BucketCap: 40, FirstBucket: 40,
		Hook: ddp.CompressWrapper(narrow, func(ctx context.Context, b *ddp.Bucket) (*work.Work, error) {
			if b.Buffer().DType() != narrow {
				return nil, fmt.Errorf("bucket of %v", b.Buffer())
			}
			buckets++
			return ddp.AllReduceHook(ctx, b)
		}),
	}))
	for it := range 3 {
		must.Do(d.Begin(x))
		for i := range slices.Backward(params) {
			// The fraction is lost.
			must.Do(x.set(params[i].Grad, func(int) float64 { return float64((1+x.rank)*(1+it)+i) + 1.0/4096 }))
			must.Do(d.Ready(i))
		}
		must.Do(d.Finish(x))
		for i := range params {
			want := 1.5*float64(1+it) + float64(i)
			if err := x.expect(fmt.Sprintf("iteration %d, gradient %d", it, i), params[i].Grad, func(int) float64 { return want }); err != nil {
				return err
			}
		}
	}
	if buckets < 6 {
		return fmt.Errorf("the hook ran %d times", buckets)
	}
	return d.Wait(x)
}

// TestCast compares casts on a device with those of package tensor, for any bits, lengths and places.
func TestCast(t *testing.T) {
	dtypes := []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64}
	withKernels(t, 1, func(t *testing.T, m machine) {
		run(t, m, 1, func(x *rank) error {
			rng := rand.New(rand.NewPCG(1, 2))
			for _, from := range dtypes {
				for _, to := range dtypes {
					for _, n := range []int{1, 7, 64, 3001} {
						must.Do(x.cast(rng, to, from, n, rng.IntN(4)))
					}
				}
			}
			return nil
		})
	})
}

// cast casts n elements that begin at an element of their memory.
func (x *rank) cast(rng *rand.Rand, to, from tensor.DType, n, at int) error {
	whole := must.Get(x.tensor(from, at+n))
	src := must.Get(whole.Slice(0, at, at+n))
	whole = must.Get(x.tensor(to, at+n))
	dst := must.Get(whole.Slice(0, at, at+n))
	if err := x.own.Cast(dst, src); from.Size() == to.Size() {
		if !errors.Is(err, driver.ErrInvalid) {
			return fmt.Errorf("%v to %v: %v", from, to, err)
		}
		return nil
	}
	values := make([]float64, n)
	must.Do(x.set(src, func(i int) float64 {
		v := any64(rng, from)
		values[i] = v
		return v
	}))
	must.Do(x.own.Cast(dst, src))
	got := must.Get(x.values(dst))
	want := must.Get(tensor.New(to, 1))
	for i, v := range values {
		must.Do(want.SetFloat64(float64(float32(v)), 0))
		w := must.Get(want.Float64At(0))
		if g := got[i]; math.Float64bits(g) != math.Float64bits(w) && !(math.IsNaN(g) && math.IsNaN(w)) {
			return fmt.Errorf("%v from %v to %v became %v, want %v", v, from, to, g, w)
		}
	}
	return nil
}

// any64 returns the value of random bits of a dtype.
func any64(rng *rand.Rand, d tensor.DType) float64 {
	b := binary.NativeEndian.AppendUint64(nil, rng.Uint64())
	if d == tensor.Float64 && rng.IntN(2) == 0 { // most others are infinite or zero as float32
		return float64(math.Float32frombits(rng.Uint32())) * (1 + rng.Float64()/1e6)
	}
	t, err := tensor.FromBytes(d, b[:d.Size()], 1)
	if err != nil {
		panic(err)
	}
	v, err := t.Float64At(0)
	if err != nil {
		panic(err)
	}
	return v
}

// TestCastRefused: what cannot be cast has an error that names it.
func TestCastRefused(t *testing.T) {
	withKernels(t, 1, func(t *testing.T, m machine) {
		run(t, m, 1, func(x *rank) error {
			a := must.Get(x.tensor(tensor.Float32, 4))
			b := must.Get(x.tensor(tensor.BFloat16, 5))
			whole := must.Get(x.tensor(tensor.Int8, 4))
			cpu := must.Get(tensor.New(tensor.BFloat16, 4))
			for _, dst := range []*tensor.Tensor{nil, b, whole, cpu, a} {
				if err := x.own.Cast(dst, a); !errors.Is(err, driver.ErrInvalid) {
					return fmt.Errorf("to %v: %v", dst, err)
				}
			}
			other := must.Get(gpu.New(x.device, x.stream))
			must.Do(other.Close())
			if err := other.Cast(a, a); !errors.Is(err, driver.ErrClosed) {
				return fmt.Errorf("after Close: %v", err)
			}
			return nil
		})
	})
}
