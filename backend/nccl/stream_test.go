package nccl_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// TestCapture replays operations of a graph, with calls between its launches.
func TestCapture(t *testing.T) {
	w := newWorld(t, setup{size: 2})
	w.each(func(x *rank) error {
		v, flat := x.on(floats(1, 2)), x.alloc(tensor.Float32, 4)
		apart := []*tensor.Tensor{x.alloc(tensor.Float32, 2), x.alloc(tensor.Float32, 2)}
		x.wait(x.b.Barrier(x.within(), backend.BarrierOptions{})) // connects the ranks
		g := must.Get(driver.Capture(x.stream, func() error {
			got := must.Get(x.b.AllReduce(x.within(), []*tensor.Tensor{v}, backend.AllReduceOptions{}))
			require.True(t, got.IsSuccess(), "the graph has it")
			must.Get(x.b.AllGather(x.within(), apart, v, backend.AllGatherOptions{}))
			must.Get(x.b.AllGatherIntoTensor(x.within(), flat, v, backend.AllGatherOptions{}))
			return nil
		}))
		must.Do(g.Launch(x.stream))
		x.wait(x.b.AllReduce(x.within(), []*tensor.Tensor{v}, backend.AllReduceOptions{}))
		must.Do(g.Launch(x.stream))
		require.Equal(t, floats(8, 16).Dump(), x.get(v).Dump())
		require.Equal(t, floats(8, 16, 8, 16).Dump(), x.get(flat).Dump())
		require.Equal(t, floats(8, 16).Dump(), x.get(apart[1]).Dump())
		return g.Close()
	})
	w.end()
}

// TestCaptureNeedsTheStream refuses a call whose tensors are of a captured stream that it is not part of.
func TestCaptureNeedsTheStream(t *testing.T) {
	w := newWorld(t, setup{size: 1})
	x := w.ranks[0]
	v := x.on(floats(1))
	x.wait(x.b.AllReduce(x.context(), []*tensor.Tensor{v}, backend.AllReduceOptions{}))
	g, err := driver.Capture(x.stream, func() error {
		return must.Err(x.b.AllReduce(x.context(), []*tensor.Tensor{v}, backend.AllReduceOptions{}))
	})
	require.ErrorIs(t, err, driver.ErrCapture)
	require.ErrorContains(t, err, "cuda.InStream")
	require.Nil(t, g)
	require.EqualValues(t, 1, x.b.Seq())
	w.end()
}

// TestNeedsEachOrder leaves out waits of streams: the simulator must miss each of them.
func TestNeedsEachOrder(t *testing.T) {
	run := func(skip func(c sim.Call) bool) error {
		w := newWorld(t, setup{size: 2, sim: sim.Config{Quiet: true}})
		w.each(func(x *rank) error { x.wait(x.b.Barrier(x.context(), backend.BarrierOptions{})); return nil })
		w.m.Skip(skip)
		enqueued := make(chan struct{})
		w.each(func(x *rank) error {
			enqueues := sync.OnceFunc(func() { close(enqueued) })
			v := x.on(floats(1, 2, 3))
			if x.r == 0 {
				defer enqueues()
			} else {
				<-enqueued // so that rank 0's cannot end before it is waited for
			}
			got := must.Get(x.b.AllReduce(x.context(), []*tensor.Tensor{v}, backend.AllReduceOptions{}))
			must.Do(got.Synchronize(x.stream))
			must.Do(x.stream.Memset(at(v), 0, v.ByteLen()))
			if x.r == 0 {
				enqueues()
			}
			must.Do(got.Wait(x.ctx))
			x.get(v)
			return nil
		})
		w.m.Skip(nil)
		w.each(func(x *rank) error { return x.b.Close() })
		w.each(func(x *rank) error { return x.ref.Close() })
		for _, x := range w.ranks {
			for _, c := range x.close {
				c.Close()
			}
		}
		return w.m.Close()
	}
	require.NoError(t, run(nil))
	for k, stream := range []string{"rank 0/nccl", "rank 0/caller"} {
		err := run(func(c sim.Call) bool { return c.Name == "Wait" && c.Stream == stream })
		var race *sim.Race
		require.ErrorAs(t, err, &race, "%d: without the waits of %s", k, stream)
	}
}

// TestScratchIsFreed has a call need more memory than the group keeps. A later one frees it.
func TestScratchIsFreed(t *testing.T) {
	w := newWorld(t, setup{size: 2, options: nccl.Options{Scratch: 1 << 10}})
	has := func() int64 { return w.m.Stats().DeviceBytes }
	gather := func(n int) func(x *rank) error {
		outs := make([][]*tensor.Tensor, 2)
		ins := make([]*tensor.Tensor, 2)
		for r, x := range w.ranks {
			outs[r] = []*tensor.Tensor{x.alloc(tensor.Float32, n), x.alloc(tensor.Float32, n+1)}
			outs[r][1] = must.Get(outs[r][1].Slice(0, 1, n+1))
			ins[r] = x.on(must.Get(tensor.New(tensor.Float32, n)))
		}
		return func(x *rank) error {
			x.wait(x.b.AllGather(x.context(), outs[x.r], ins[x.r], backend.AllGatherOptions{}))
			return nil
		}
	}
	large, small := gather(1<<14), gather(4)
	w.each(large)
	before := has()
	w.each(small)
	require.Less(t, has(), before-100<<10)
	w.end()
}
