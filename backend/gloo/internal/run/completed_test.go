package run_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/work"
)

// TestCompleted counts collectives up to the first that has not ended, or that has failed. Sends and
// receives are not counted.
func TestCompleted(t *testing.T) {
	ranks(t, mem.NewFabric(), 2, 1, 2, func(t *testing.T, b *gloo.Backend) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		other := 1 - b.Rank()
		assert.Zero(t, b.Completed())
		for range 2 {
			assert.NoError(t, wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})))
		}
		send, err := b.Send(ctx, vec(1), other, backend.P2POptions{})
		assert.NoError(t, err)
		assert.NoError(t, wait(b.Recv(ctx, vec(1), other, backend.P2POptions{})))
		assert.NoError(t, send.Wait(ctx))
		assert.EqualValues(t, 2, b.Completed())
		if b.Rank() == 1 {
			time.Sleep(time.Second) // virtual: by then rank 0 has cancelled
		} else {
			w, err := b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})
			assert.NoError(t, err)
			assert.EqualValues(t, 2, b.Completed())
			cancel()
			assert.ErrorIs(t, w.Wait(context.Background()), work.ErrCanceled)
		}
		assert.ErrorIs(t, wait(b.Barrier(context.Background(), backend.BarrierOptions{})), work.ErrCanceled)
		assert.EqualValues(t, 2, b.Completed())
	})
}

// TestCompletedEverywhere: what a rank knows of the others without asking them.
func TestCompletedEverywhere(t *testing.T) {
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		bs := connected(t, run.GroupTimeout, same(wire, 3)...)
		onAll(t, bs, func(_ int, b *gloo.Backend) {
			ctx := context.Background()
			known := func(inTurn, otherwise uint64) {
				want := otherwise
				if b.InTurn() {
					want = inTurn
				}
				assert.Equal(t, want, b.CompletedEverywhere())
			}
			for range 3 {
				assert.NoError(t, wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})))
			}
			known(2, 0)
			assert.NoError(t, barrier(b))
			known(3, 3)
			assert.NoError(t, b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{}))
			assert.NoError(t, wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})))
			known(3, 3) // a monitored barrier is not in the queue
			assert.NoError(t, barrier(b))
			assert.NoError(t, wait(b.AllReduce(ctx, list(vec(1)), backend.AllReduceOptions{})))
			known(7, 6)
			assert.EqualValues(t, 8, b.Completed())
		})
	})
}
