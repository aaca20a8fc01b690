package cuda_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// called is a collective on tensors that new makes, and how errors show it.
type called struct {
	what string
	do   func(x *rank, new func(d tensor.DType, n int) *tensor.Tensor) (*work.Work, error)
}

func calledAllReduce(what string, d tensor.DType, n int, op backend.ReduceOp) called {
	return called{what, func(x *rank, new func(tensor.DType, int) *tensor.Tensor) (*work.Work, error) {
		return x.b.AllReduce(x.ctx, []*tensor.Tensor{new(d, n)}, backend.AllReduceOptions{Op: op})
	}}
}

func calledBroadcast(what string, n, root int) called {
	return called{what, func(x *rank, new func(tensor.DType, int) *tensor.Tensor) (*work.Work, error) {
		return x.b.Broadcast(x.ctx, []*tensor.Tensor{new(tensor.Int32, n)}, backend.BroadcastOptions{Root: root})
	}}
}

var (
	sum40         = calledAllReduce("all_reduce (sum) of 40 elements of int32", tensor.Int32, 40, backend.Sum())
	broadcast12   = calledBroadcast("broadcast of 12 elements of int32 with root 0", 12, 0)
	barrierCalled = called{"barrier", func(x *rank, _ func(tensor.DType, int) *tensor.Tensor) (*work.Work, error) {
		return x.b.Barrier(x.ctx, backend.BarrierOptions{})
	}}
	allGatherNew = func(x *rank, new func(tensor.DType, int) *tensor.Tensor) (*work.Work, error) {
		return x.b.AllGatherIntoTensor(x.ctx, new(tensor.Int32, 12), new(tensor.Int32, 4), backend.AllGatherOptions{})
	}
	gathered = called{"all_gather of 12 elements of int32", allGatherNew}
)

// mismatches are pairs of calls that do not fit together.
var mismatches = []struct {
	name string
	a, b called
}{
	{"operator", sum40, calledAllReduce("all_reduce (max) of 40 elements of int32", tensor.Int32, 40, backend.Max())},
	{"dtype", sum40, calledAllReduce("all_reduce (sum) of 40 elements of float32", tensor.Float32, 40, backend.Sum())},
	{"count", sum40, calledAllReduce("all_reduce (sum) of 80 elements of int32", tensor.Int32, 80, backend.Sum())},
	{"nothing", calledAllReduce("all_reduce (sum) of int32", tensor.Int32, 0, backend.Sum()), sum40},
	{"no kernel", sum40, calledAllReduce("all_reduce (bor) of 40 elements of bool", tensor.Bool, 40, backend.BOr())},
	{"operation", sum40, broadcast12},
	{"host work", sum40, gathered},
	{"barrier", broadcast12, barrierCalled},
	{"root", broadcast12, calledBroadcast("broadcast of 12 elements of int32 with root 1", 12, 1)},
	{"broadcast count", calledBroadcast("broadcast of 1000 elements of int32 with root 0", 1000, 0), broadcast12},
}

// TestMismatch lets one of three ranks make another call than the others, as the first
// operation and as a later one, in every way. All ranks hear of both calls at once, long
// before their time is over.
func TestMismatch(t *testing.T) {
	host := setup{size: 3, timeout: patience, sim: sim.Config{Devices: 1}}
	device := onDevices(3)
	device.options.AllReduce = "" // not every call has a kernel
	native := host
	native.native = true
	for name, s := range map[string]setup{"host": host, "device": device, "native host": native} {
		for i, c := range mismatches {
			for _, first := range []bool{true, false} {
				run := func(t *testing.T) {
					s := s.quietly()
					s.sim.Seed = uint64(i)
					if name != "device" {
						s.sim.Kernels = nil
					}
					mismatch(t, newWorld(t, s), c.a, c.b, i%3, first)
				}
				if !s.native {
					run = virtually(run)
				}
				t.Run(fmt.Sprintf("%s/%s/first %v", name, c.name, first), run)
			}
		}
	}
}

// mismatch lets rank odd call b, the others a.
func mismatch(t *testing.T, w *world, a, b called, odd int, first bool) {
	var warm sync.WaitGroup
	warm.Add(len(w.ranks))
	errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
		tensorOf := func(d tensor.DType, n int) *tensor.Tensor {
			v := must.Get(x.d.Device(x.b.Rank() % x.d.Count()))
			m := must.Get(v.Alloc(n * d.Size()))
			x.close = append(x.close, m)
			return must.Get(tensor.OnDevice(d, m, n))
		}
		if !first {
			for range 3 {
				require.NoError(t, must.Get(a.do(x, tensorOf)).Wait(x.ctx))
			}
			warm.Done()
			warm.Wait() // what comes ends all that is under way
		}
		c := a
		if r == odd {
			c = b
		}
		v, err := c.do(x, tensorOf)
		if err == nil {
			err = v.Wait(x.ctx)
		}
		if err != nil {
			return err
		}
		// A root may have done its part before the odd one came.
		v = must.Get(barrierCalled.do(x, tensorOf))
		return v.Wait(x.ctx)
	})
	for r, err := range errs {
		require.ErrorIs(t, err, work.ErrMismatch, "rank %d", r)
		require.NotErrorIs(t, err, work.ErrTimeout, "rank %d", r)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "rank %d", r)
		require.ErrorContains(t, err, "called "+a.what, "rank %d", r)
		require.ErrorContains(t, err, "called "+b.what, "rank %d", r)
		e := must.As[*work.Error](t, err)
		require.Equal(t, r, e.Rank)
		require.Equal(t, "g", e.Group)
		require.GreaterOrEqual(t, e.Peer, 0)
	}
	w.drop(t)
}
