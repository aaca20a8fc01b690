//go:build !race

package cuda_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
)

// TestF26Mutations leaves out each record and wait, of events and of words, that rank 0 makes for an
// all-reduce of two clusters in chunks; somebody has to notice every one (T3, T4). The race detector would
// too.
func TestF26Mutations(t *testing.T) {
	run := func(w *world) error {
		return errors.Join(runEach(w, func(x *rank, r int, _ chan struct{}) error {
			b, err := x.warm(r)
			if err != nil {
				return err
			}
			if err := x.fill(r, b); err != nil {
				return err
			}
			v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
			if err != nil {
				return err
			}
			if err := v.Synchronize(x.caller(r)); err != nil {
				return errors.Join(err, v.Wait(x.ctx))
			}
			e, err := x.use(r, b)
			if err != nil {
				return err
			}
			if err := v.Wait(x.ctx); err != nil {
				e.Release() // the stream may not go on before Close
				return err
			}
			return x.verify(b, e)
		})...)
	}
	defer cuda.SetCloseLimit(200 * time.Millisecond)()
	for _, c := range []struct {
		sizes   []int
		kernels bool // else the hosts do the steps inside
	}{{[]int{2, 2}, true}, {[]int{1, 1}, true}, {[]int{2, 2}, false}} {
		sizes := c.sizes
		s := clustered(sizes...)
		if !c.kernels {
			s.sim.Kernels = nil
		}
		s.options = cuda.Options{Chunk: 80} // of 400 bytes
		s.timeout = patience
		s.sim.Seed, s.sim.Quiet = 3, true
		var calls []sim.Call
		w := newWorld(t, s)
		began := false
		orders := map[string]bool{"Record": true, "Wait": true, "WaitValue": true, "WriteValue": true}
		streams := map[string]bool{"rank 0/rank 0 direct": true, "rank 0/rank 0 down.0": true, "rank 0/rank 0 up.0": true, "rank 0/caller 0.0": true}
		w.m.Skip(func(c sim.Call) bool {
			began = began || c.Stream == "rank 0/caller 0.0" && c.Name == "Record" && c.K == 1
			if began && orders[c.Name] && streams[c.Stream] {
				calls = append(calls, c)
			}
			return false
		})
		require.NoError(t, run(w))
		w.m.Skip(nil)
		w.end()
		// A word that is not written comes late, with the next one; but not the last.
		last := -1
		for i, c := range calls {
			if c.Name == "WriteValue" {
				last = i
			}
		}
		s.timeout = 300 * time.Millisecond
		tried := map[string]int{}
		for i, m := range calls {
			if m.Name == "WriteValue" && i != last {
				continue
			}
			var err error
			for seed := uint64(0); err == nil && seed < 60; seed++ {
				s.sim.Seed, s.sim.Semantics = seed, sim.Semantics(seed%2)
				err = withoutCall(t, s, m, run)
			}
			if err == nil {
				t.Errorf("%v, kernels %t: nobody noticed that %v, number %d of them there, was left out", sizes, c.kernels, m, m.K)
			}
			tried[m.Name]++
		}
		t.Log(sizes, c.kernels, "left out, each of them missed:", tried)
		for name := range orders {
			require.NotZero(t, tried[name], name)
		}
	}
}
