package cuda_test

import (
	"errors"
	"strings"
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

// TestMixedOrder all-reduces tensors in CPU memory by kernels, each call before those before it have ended. They
// share memory, as a whole or in part.
func TestMixedOrder(t *testing.T) {
	w := newWorld(t, directly(2))
	w.each(func(x *rank, r int) error {
		must.Do(x.meetDirectly(r))
		all := must.Get(tensor.Of([]float32{1, 1, 1, 1, 1, 1}, 6))
		even := must.Get(all.AsStrided([]int{3}, []int{2}, 0))
		odd := must.Get(all.AsStrided([]int{2}, []int{-2}, 3))
		var works []*work.Work
		for _, u := range []*tensor.Tensor{all, even, all, odd, even} {
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{u}, backend.AllReduceOptions{}))
			works = append(works, v)
		}
		must.Do(work.WaitAll(x.ctx, works...))
		return same(all.Bytes(), tensorBytes([]float32{16, 8, 16, 8, 16, 4}))
	})
	w.end()
}

// TestMixedClose: Shutdown waits until the results are in CPU memory. Calls that come later leave nothing.
func TestMixedClose(t *testing.T) {
	for range 3 {
		w := newWorld(t, directly(2))
		w.each(func(x *rank, r int) error {
			var err error
			must.Do(x.meetDirectly(r))
			u := must.Get(tensor.New(tensor.Float32, 1<<16))
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{u}, backend.AllReduceOptions{}))
			must.Do(errors.Join(x.b.Shutdown(x.ctx), v.Wait(x.ctx)))
			far := must.Get(x.vector(tensor.Float32, r, make([]byte, 4)))
			_, err = x.b.AllReduceCoalesced(x.ctx, []*tensor.Tensor{u, far.t}, backend.AllReduceOptions{})
			var e *work.Error
			if !errors.Is(err, work.ErrClosed) || !errors.As(err, &e) {
				return says(err, "after Shutdown")
			}
			s, err := x.stream[r].Record() // the tensor has been filled
			if err == nil {
				err = s.Sync(x.ctx)
				s.Release()
			}
			return err
		})
		w.end()
	}
}

// TestMixedStuck closes a group while a device holds up an operation: what stands for tensors in CPU memory there
// is not freed.
func TestMixedStuck(t *testing.T) { onVirtualTime(t, testMixedStuck) }

func testMixedStuck(t *testing.T) {
	defer cuda.SetCloseLimit(100 * time.Millisecond)()
	w := newWorld(t, setup{size: 2, timeout: 300 * time.Millisecond, sim: sim.Config{Devices: 2}}.quietly())
	gates := make([]driver.HostMemory, 2)
	w.each(func(x *rank, r int) error {
		u := must.Get(tensor.New(tensor.Float32, 4))
		y := must.Get(x.vector(tensor.Float32, r, make([]byte, 16)))
		gates[r] = must.Get(x.d.AllocHost(4))
		s := x.stream[r]
		must.Do(s.WaitValue(gates[r].Ptr(), 1, driver.AtLeast))
		v, err := x.b.AllReduceCoalesced(cuda.WithStreams(x.ctx, s), []*tensor.Tensor{u, y.t}, backend.AllReduceOptions{})
		if err != nil {
			return err
		}
		if err := v.Wait(x.ctx); err == nil {
			return errors.New("the all_reduce has ended well")
		}
		return says(x.b.Close(), "have not left the device")
	})
	for _, g := range gates {
		g.Store32(0, 1)
	}
	w.each(func(x *rank, r int) error {
		return errors.Join(x.enqueue(x.stream[r], func() error { return nil }), x.w.m.Settle(x.ctx), gates[r].Close(), x.cpu.Close())
	})
	for _, x := range w.ranks {
		x.free()
	}
	err := w.m.Close()
	require.Error(t, err, "the memory of the operation stays")
	require.False(t, strings.Contains(err.Error(), "was freed"), "%v", err)
}
