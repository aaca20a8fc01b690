package cuda_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestCloseWaitsForStreams cancels a collective that a caller's stream holds up, in memory that the ranks
// share and in that of each rank. Close waits for the operation to leave the device, as long as it may,
// and frees nothing that it still uses.
func TestCloseWaitsForStreams(t *testing.T) {
	const limit = 50 * time.Millisecond
	defer cuda.SetCloseLimit(limit)()
	for name, call := range map[string]func(ctx context.Context, b *cuda.Backend, x *tensor.Tensor) (*work.Work, error){
		"all_reduce": func(ctx context.Context, b *cuda.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.AllReduce(ctx, []*tensor.Tensor{x}, backend.AllReduceOptions{})
		},
		"reduce": func(ctx context.Context, b *cuda.Backend, x *tensor.Tensor) (*work.Work, error) {
			return b.Reduce(ctx, x, backend.ReduceOptions{})
		},
	} {
		t.Run(name, virtually(func(t *testing.T) {
			w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1, Quiet: true}, options: cuda.Options{Chunk: 160, Slots: 2}})
			gate := must.Get(w.ranks[0].d.AllocHost(4))
			gate.Store32(0, 0)
			ctx, cancel := context.WithCancel(w.ctx)
			defer cancel()
			var works []*work.Work
			for r, x := range w.ranks {
				b := must.Get(x.bucket(r))
				require.NoError(t, x.fill(r, b))
				if r == 0 {
					require.NoError(t, x.caller(r).WaitValue(gate.Ptr(), 1, driver.Equal))
				}
				v := must.Get(call(ctx, x.b, b.t))
				works = append(works, v)
			}
			cancel()
			for _, v := range works {
				require.ErrorIs(t, v.Wait(w.ctx), work.ErrCanceled)
			}
			begun := time.Now()
			require.ErrorContains(t, w.closed(), "1 operations that failed have not left the device")
			require.GreaterOrEqual(t, time.Since(begun), limit)
			noLifetime(t, w.m)
			gate.Store32(0, 1)
			require.NoError(t, w.m.Settle(w.ctx))
			noLifetime(t, w.m)
			for _, x := range w.ranks {
				x.free()
			}
			require.NoError(t, gate.Close())
			w.m.Close() // reports what Close left
			noLifetime(t, w.m)
		}))
	}
}

// noLifetime requires that nothing was freed while streams used it, or used afterwards.
func noLifetime(t *testing.T, m *sim.Machine) {
	t.Helper()
	for _, f := range m.Findings() {
		var l *sim.Lifetime
		require.False(t, errors.As(f, &l), "%v", f)
	}
}
