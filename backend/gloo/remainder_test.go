package gloo_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
)

// TestLevelsRemainder all-reduces between hosts with equal numbers of ranks. The ranks of a host
// cannot share the elements evenly. Those left over are reduced too.
func TestLevelsRemainder(t *testing.T) {
	onLinux(t)
	ctx := context.Background()
	custom := backend.Custom("add", func(d tensor.DType, dst, src []byte) {
		red, err := backend.Sum().Reduction(d, 1)
		if err == nil {
			red.Combine(dst, src)
		}
	})
	for _, per := range []int{1, 2, 3} {
		t.Run(fmt.Sprintf("%d ranks a host", per), func(t *testing.T) {
			size := 2 * per
			options := make([]gloo.Options, size)
			for r := range options {
				options[r].Host = fmt.Sprint(r % 2)
			}
			bs, errs := connectWith(t, gloo.GroupTimeout, options...)
			for _, err := range errs {
				require.NoError(t, err)
			}
			onAll(t, bs, func(rank int, b *gloo.Backend) {
				for _, tc := range []struct {
					dtype tensor.DType
					op    backend.ReduceOp
				}{
					{tensor.Uint8, backend.Sum()}, {tensor.Float32, backend.Sum()}, {tensor.Complex128, custom},
				} {
					for over := range per + 1 {
						n := (64<<10)/tc.dtype.Size()/per*per + per + over
						filled := func(of func(i int) float64) *tensor.Tensor {
							if tc.dtype == tensor.Complex128 {
								v := make([]complex128, n)
								for i := range v {
									v[i] = complex(of(i), of(i+1))
								}
								x, err := tensor.Of(v, n)
								assert.NoError(t, err)
								return x
							}
							x, err := tensor.New(tc.dtype, n)
							assert.NoError(t, err)
							for i := range n {
								assert.NoError(t, x.SetFloat64(of(i), i))
							}
							return x
						}
						got := filled(func(i int) float64 { return float64((i%5 + 1) * (rank + 1)) })
						want := filled(func(i int) float64 { return float64((i%5 + 1) * size * (size + 1) / 2) })
						if !assert.NoError(t, wait(b.AllReduce(ctx, list(got), backend.AllReduceOptions{Op: tc.op}))) {
							return
						}
						assert.True(t, bytes.Equal(want.Bytes(), got.Bytes()), "rank %d: %d of %v", rank, n, tc.dtype)
					}
				}
			})
		})
	}
}
