package run_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/tensor"
)

// BenchmarkEmbedding all-reduces the gradient of an embedding, as a training step does. Each of 4 ranks has one row for
// each token of its batch. Words are drawn by Zipf's law. Rows of the same word are not added up yet.
func BenchmarkEmbedding(b *testing.B) {
	const ranks = 4
	for _, how := range []string{"memory", "tcp"} {
		for _, c := range []struct{ words, row, tokens int }{{30_000, 64, 512}, {50_000, 128, 4096}, {250_000, 256, 8192}} {
			b.Run(fmt.Sprintf("how=%s/words=%d/row=%d/tokens=%d", how, c.words, c.row, c.tokens), func(b *testing.B) {
				benchmarkEmbedding(b, sparseGroups(ranks)[how], c.words, c.row, c.tokens)
			})
		}
	}
}

func benchmarkEmbedding(b *testing.B, options []gloo.Options, words, row, tokens int) {
	bs, errs := connectWith(b, run.GroupTimeout, options...)
	for _, err := range errs {
		require.NoError(b, err)
	}
	grads := make([]func() *tensor.Tensor, len(bs))
	for r := range bs {
		zipf := rand.NewZipf(rand.New(rand.NewPCG(1, uint64(r))), 1.1, 2, uint64(words-1))
		keys := make([]int64, tokens)
		for i := range keys {
			keys[i] = int64(zipf.Uint64())
		}
		at, values := of(b, keys, 1, tokens), of(b, make([]float32, tokens*row), tokens, row)
		grads[r] = func() *tensor.Tensor {
			t, err := tensor.Sparse(at, values, words, row)
			if err != nil {
				b.Error(err)
			}
			return t
		}
	}
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for r, g := range bs {
		wg.Go(func() {
			for range b.N {
				if err := wait(g.AllReduce(context.Background(), list(grads[r]()), backend.AllReduceOptions{})); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
