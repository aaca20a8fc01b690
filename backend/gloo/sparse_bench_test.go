package gloo_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
)

// BenchmarkSparse compares the forms, with all ranks in one process: rows of so many
// floats, each rank with that many of 1000 coordinates.
func BenchmarkSparse(b *testing.B) {
	for _, ranks := range []int{2, 4, 8} {
		for _, how := range []string{"memory", "tcp", "two levels"} {
			for _, c := range []struct{ coords, row int }{{1 << 10, 16}, {1 << 15, 64}, {1 << 19, 1}, {1 << 20, 64}} {
				for _, permille := range []int{1, 10, 100, 250, 500, 1000} {
					n := c.coords * permille / 1000
					if n == 0 || n*c.row > 1<<22 {
						continue
					}
					for _, form := range sparseForms[1:] {
						b.Run(fmt.Sprintf("ranks=%d/how=%s/coords=%d/row=%d/permille=%d/form=%s", ranks, how, c.coords, c.row, permille, form), func(b *testing.B) {
							options := sparseGroups(ranks)[how]
							for r := range options {
								options[r].Sparse = form
							}
							benchmarkSparse(b, options, c.coords, c.row, n)
						})
					}
				}
			}
		}
	}
}

func benchmarkSparse(b *testing.B, options []gloo.Options, coords, row, n int) {
	bs, errs := connectWith(b, gloo.GroupTimeout, options...)
	for _, err := range errs {
		require.NoError(b, err)
	}
	ts := make([]*tensor.Tensor, len(bs))
	at, values := make([]*tensor.Tensor, len(bs)), make([]*tensor.Tensor, len(bs))
	for r := range bs {
		rows := rand.New(rand.NewPCG(1, uint64(r))).Perm(coords)[:n]
		slices.Sort(rows)
		keys := make([]int64, n)
		for i, k := range rows {
			keys[i] = int64(k)
		}
		at[r], values[r] = of(b, keys, 1, n), of(b, make([]float32, n*row), n, row)
		var err error
		ts[r], err = tensor.Sparse(at[r], values[r], coords, row)
		require.NoError(b, err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for r, g := range bs {
		wg.Go(func() {
			for range b.N {
				if err := ts[r].SetSparse(at[r], values[r], true); err != nil {
					b.Error(err)
				}
				if err := wait(g.AllReduce(context.Background(), list(ts[r]), backend.AllReduceOptions{})); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
