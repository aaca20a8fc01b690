//go:build !race

package cuda_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestDirectMutations leaves out each record and wait that rank 0 makes for direct operations on
// two streams; somebody has to notice every one (T3, T4). The race detector would too.
func TestDirectMutations(t *testing.T) {
	run := func(w *world) error {
		return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error {
			b := must.Get(x.warm(r))
			own, part := x.ctx, cuda.InStream(x.ctx, x.caller(r))
			none := cuda.WithStreams(x.ctx) // only the group's order is left
			for _, ctxs := range [][]context.Context{{own}, {part, none, part, none}} {
				must.Do(x.fill(r, b))
				op := backend.Sum()
				var v *work.Work
				for _, ctx := range ctxs {
					v = must.Get(x.b.AllReduce(ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{Op: op}))
					op = backend.Max() // of what all have
				}
				must.Do(v.Synchronize(x.caller(r)))
				e := must.Get(x.use(r, b))
				must.Do(errors.Join(x.verify(b, e), v.Wait(x.ctx)))
			}
			return nil
		})...)
	}
	s, began := directly(2), false
	s.sim.Quiet = true
	tried := leaveOut(t, s, withoutCall, func(c sim.Call) bool {
		began = began || c.Stream == "rank 0/caller 0.0" && c.Name == "Record" && c.K == 1
		stream := c.Stream == "rank 0/rank 0 direct" || c.Stream == "rank 0/caller 0.0"
		return began && stream && (c.Name == "Record" || c.Name == "Wait")
	}, run)
	require.NotZero(t, tried["Record"])
	require.NotZero(t, tried["Wait"])
}
