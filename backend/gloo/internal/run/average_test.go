package run_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestScaledLists: an operator that divides the result, or multiplies the inputs, does so for each
// tensor of a list, and once.
func TestScaledLists(t *testing.T) {
	ctx := context.Background()
	const p, n = 3, 3 // ranks, tensors of a list
	values := func(v ...float64) []float64 { return v }
	for _, tc := range []struct {
		name string
		op   backend.ReduceOp
		// What x becomes if each rank adds it, times so many.
		of func(x, times float64) float64
	}{
		{"avg", backend.Avg(), func(x, times float64) float64 { return x * times / p }},
		{"premul_sum", backend.PreMulSum(4), func(x, times float64) float64 { return 4 * x * times }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
				bs := connected(t, run.GroupTimeout, same(wire, p)...)
				onAll(t, bs, func(r int, b *gloo.Backend) {
					for _, d := range []tensor.DType{tensor.Float32, tensor.Float64, tensor.BFloat16} {
						make := func(v []float64) *tensor.Tensor {
							x, err := tensor.New(d, len(v))
							assert.NoError(t, err)
							for i, f := range v {
								assert.NoError(t, x.SetFloat64(f, i))
							}
							return x
						}
						equal := func(what string, x *tensor.Tensor, want ...float64) {
							for i, f := range want {
								got, err := x.Float64At(i)
								assert.NoError(t, err)
								assert.Equal(t, f, got, "%s of %v, rank %d, element %d", what, d, r, i)
							}
						}
						done := func(what string, w *work.Work, err error) bool {
							return assert.NoError(t, wait(w, err), "%s of %v, rank %d", what, d, r)
						}
						ts := list(make(values(3, 6)), make(values(9, 12)), make(values(-3, 0)))
						w, err := b.AllReduce(ctx, ts, backend.AllReduceOptions{Op: tc.op})
						if !done("all_reduce", w, err) {
							return
						}
						for _, x := range ts { // each the sum of all tensors of all ranks
							equal("all_reduce", x, tc.of(9, p), tc.of(18, p))
						}

						ts = list(make(values(3)), make(values(6, 9)), make(values(12)))
						w, err = b.AllReduceCoalesced(ctx, ts, backend.AllReduceOptions{Op: tc.op})
						if !done("all_reduce_coalesced", w, err) {
							return
						}
						equal("all_reduce_coalesced", ts[0], tc.of(3, p))
						equal("all_reduce_coalesced", ts[1], tc.of(6, p), tc.of(9, p))
						equal("all_reduce_coalesced", ts[2], tc.of(12, p))

						x := make(values(3, 6))
						w, err = b.Reduce(ctx, x, backend.ReduceOptions{Op: tc.op, Root: 1})
						if !done("reduce", w, err) {
							return
						}
						if r == 1 {
							equal("reduce", x, tc.of(3, p), tc.of(6, p))
						} else {
							equal("reduce", x, 3, 6)
						}

						ts = list(make(values(3, 6)), make(values(9, 12)), make(values(15, 18)))
						x = make(values(0, 0))
						w, err = b.ReduceScatter(ctx, x, ts, backend.ReduceScatterOptions{Op: tc.op})
						if !done("reduce_scatter", w, err) {
							return
						}
						equal("reduce_scatter", x, tc.of(float64(3+6*r), p), tc.of(float64(6+6*r), p))
						equal("the input of reduce_scatter", ts[2], 15, 18)

						out := list(make(values(0)), make(values(0, 0)))
						in := list(make(values(3, 6, 9)), make(values(3, 6, 9, 12, 15, 18)))
						w, err = b.ReduceScatterTensorCoalesced(ctx, out, in, backend.ReduceScatterOptions{Op: tc.op})
						if !done("reduce_scatter_tensor_coalesced", w, err) {
							return
						}
						equal("reduce_scatter_tensor_coalesced", out[0], tc.of(float64(3+3*r), p))
						equal("reduce_scatter_tensor_coalesced", out[1], tc.of(float64(3+6*r), p), tc.of(float64(6+6*r), p))
						equal("the input of reduce_scatter_tensor_coalesced", in[1], 3, 6, 9, 12, 15, 18)
					}
				})
			})
		})
	}
}
