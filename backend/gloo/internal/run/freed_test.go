package run_test

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/tensor"
)

// TestTensorsAreFreed: once operations have ended, nothing in an idle group keeps the memory of their tensors.
func TestTensorsAreFreed(t *testing.T) {
	const p, n = 3, 600_000 // floats; long enough for other connections
	ctx := context.Background()
	onEveryWire(t, func(t *testing.T, wire gloo.Wire) {
		t.Parallel()
		bs := connected(t, run.GroupTimeout, same(wire, p)...)
		var made, freed atomic.Int64
		tracked := func(n int) *tensor.Tensor {
			v := make([]float32, n)
			made.Add(1)
			runtime.AddCleanup(&v[0], func(struct{}) { freed.Add(1) }, struct{}{})
			return of(t, v, n)
		}
		onAll(t, bs, func(r int, b *gloo.Backend) {
			right, left := (r+1)%p, (r+p-1)%p
			assert.NoError(t, wait(b.AllReduce(ctx, list(tracked(n)), backend.AllReduceOptions{})))
			assert.NoError(t, wait(b.Broadcast(ctx, list(tracked(n)), backend.BroadcastOptions{})))
			assert.NoError(t, wait(b.AllGatherIntoTensor(ctx, tracked(p*n), tracked(n), backend.AllGatherOptions{})))
			assert.NoError(t, wait(b.AllToAllSingle(ctx, tracked(p*n), tracked(p*n), nil, nil, backend.AllToAllOptions{})))
			assert.NoError(t, wait(b.ReduceScatterTensor(ctx, tracked(n), tracked(p*n), backend.ReduceScatterOptions{})))
			send, err := b.Send(ctx, tracked(n), right, backend.P2POptions{})
			assert.NoError(t, err)
			assert.NoError(t, wait(b.Recv(ctx, tracked(n), left, backend.P2POptions{})))
			assert.NoError(t, send.Wait(ctx))
		})
		require.NotZero(t, made.Load())
		require.Eventually(t, func() bool {
			runtime.GC()
			return freed.Load() == made.Load()
		}, run.Patience, 50*time.Millisecond)
	})
}
