package run_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// Large collectives are left to the caller once he has the habit of waiting for them at
// once, and end all the same when he gives it up.
func TestWhoRunsLargeCollectives(t *testing.T) {
	const enough = 10000 // a worker may be done before anybody waits
	large := func(b *gloo.Backend) (err error) {
		defer must.Catch(&err)
		x := must.Get(tensor.New(tensor.Uint8, 1<<18))
		return wait(b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{}))
	}
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		t.Run("waits at once", func(t *testing.T) {
			defer run.SetAtOnce(time.Hour)()
			bs := connected(t, run.GroupTimeout, same(wire, 2)...)
			for n := 0; bs[0].Streak() < run.Habit || bs[1].Streak() < run.Habit; n++ {
				var wg sync.WaitGroup
				for _, b := range bs {
					wg.Go(func() { assert.NoError(t, large(b)) })
				}
				run.Finish(t, "all ranks", &wg)
				if t.Failed() || !assert.Less(t, n, enough) {
					return
				}
			}
			for _, b := range bs {
				x, err := tensor.New(tensor.Uint8, 1<<18)
				assert.NoError(t, err)
				w, err := b.AllReduce(context.Background(), list(x), backend.AllReduceOptions{})
				assert.NoError(t, err)
				defer func() {
					must.Receive(t, "an all-reduce", w.Done())
					assert.NoError(t, w.Err())
				}()
				assert.Zero(t, b.Streak())
			}
		})
		t.Run("waits late", func(t *testing.T) {
			defer run.SetAtOnce(0)()
			var wg sync.WaitGroup
			for _, b := range connected(t, run.GroupTimeout, same(wire, 2)...) {
				wg.Go(func() {
					for range 2 * run.Habit {
						assert.NoError(t, large(b))
						assert.Zero(t, b.Streak())
					}
				})
			}
			run.Finish(t, "all ranks", &wg)
		})
	})
}
