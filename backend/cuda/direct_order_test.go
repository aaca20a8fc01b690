//go:build !race

package cuda_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestDirectMutations leaves out each record and wait that rank 0 makes for direct operations on
// two streams; somebody has to notice every one (T3, T4). The race detector would too.
func TestDirectMutations(t *testing.T) {
	run := func(w *world) error {
		return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error {
			b, err := x.warm(r)
			if err != nil {
				return err
			}
			own, part := x.ctx, cuda.InStream(x.ctx, x.caller(r))
			none := cuda.WithStreams(x.ctx) // only the group's order is left
			for _, ctxs := range [][]context.Context{{own}, {part, none, part, none}} {
				if err := x.fill(r, b); err != nil {
					return err
				}
				op := backend.Sum()
				var v *work.Work
				for _, ctx := range ctxs {
					if v, err = x.b.AllReduce(ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{Op: op}); err != nil {
						return err
					}
					op = backend.Max() // of what all have
				}
				if err := v.Synchronize(x.caller(r)); err != nil {
					return err
				}
				e, err := x.use(r, b)
				if err != nil {
					return err
				}
				if err := errors.Join(x.verify(b, e), v.Wait(x.ctx)); err != nil {
					return err
				}
			}
			return nil
		})...)
	}
	s := directly(2)
	s.timeout = patience
	s.sim.Seed, s.sim.Quiet = 3, true
	var calls []sim.Call
	w := newWorld(t, s)
	began := false
	w.m.Skip(func(c sim.Call) bool {
		began = began || c.Stream == "rank 0/caller 0.0" && c.Name == "Record" && c.K == 1
		if began && (c.Name == "Record" || c.Name == "Wait") && (c.Stream == "rank 0/rank 0 direct" || c.Stream == "rank 0/caller 0.0") {
			calls = append(calls, c)
		}
		return false
	})
	require.NoError(t, run(w))
	w.end()
	s.timeout = 300 * time.Millisecond
	tried := map[string]int{}
	for _, m := range calls {
		var err error
		for seed := uint64(0); err == nil && seed < mutationSeeds; seed++ {
			s.sim.Seed = seed
			err = withoutCall(t, s, m, run)
		}
		if err == nil {
			t.Errorf("nobody noticed that %v, number %d of them there, was left out", m, m.K)
		}
		tried[m.Name]++
	}
	t.Log("left out, each of them missed:", tried)
	require.NotZero(t, tried["Record"])
	require.NotZero(t, tried["Wait"])
}
