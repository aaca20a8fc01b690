package gloo_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// BenchmarkQueued calls so many collectives on each of two ranks, and then waits for them. An operation is one collective.
func BenchmarkQueued(b *testing.B) {
	ctx := context.Background()
	for _, queued := range []int{16, 1000, 16000} {
		b.Run(fmt.Sprint(queued), func(b *testing.B) {
			bs, errs := connectWith(b, gloo.GroupTimeout, gloo.Options{}, gloo.Options{})
			for _, err := range errs {
				require.NoError(b, err)
			}
			rank := func(g *gloo.Backend) {
				works := make([]*work.Work, 0, queued)
				ts := []*tensor.Tensor{of(b, make([]float32, 1), 1)}
				for left := b.N; left > 0; left -= queued {
					works = works[:0]
					for range min(left, queued) {
						w, err := g.AllReduce(ctx, ts, backend.AllReduceOptions{})
						assert.NoError(b, err)
						works = append(works, w)
					}
					for _, w := range works {
						assert.NoError(b, w.Wait(ctx))
					}
				}
			}
			b.ReportAllocs()
			b.ResetTimer()
			var all sync.WaitGroup
			for _, g := range bs {
				all.Go(func() { rank(g) })
			}
			all.Wait()
		})
	}
}
