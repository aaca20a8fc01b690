package cuda_test

import (
	"errors"
	"math/rand/v2"
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

// TestManyMessages posts 100 receives, each with a stream ordered after it, for messages
// that are sent in the opposite order, behind a collective. They take two streams a device
// and rank, whatever their number.
func TestManyMessages(t *testing.T) { onVirtualTime(t, testManyMessages) }

func testManyMessages(t *testing.T) {
	const many = 100
	w := newWorld(t, setup{size: 2, timeout: patience, sim: sim.Config{Devices: 2}})
	all := func(x *rank, r int) (ps []*pair, err error) {
		for i := range many {
			layout := flat(1 + i)
			if i%5 == 0 {
				layout = shape{[]int{i + 2}, []int{2}, 0, 2*i + 4} // with holes
			}
			p, err := x.pairOf(rand.New(rand.NewPCG(uint64(i), uint64(r))), tensor.Int32, i%2, layout, true)
			if err != nil {
				return nil, err
			}
			ps = append(ps, p)
		}
		return ps, nil
	}
	made := 0
	for round := range 3 {
		w.each(func(x *rank, r int) error {
			ps := must.Get(all(x, r))
			b := must.Get(x.bucket(r))
			works := make([]*work.Work, many)
			if r == 0 {
				for i, p := range ps {
					works[i] = must.Get(x.b.Recv(x.ctx, p.dev, 1, backend.P2POptions{Tag: uint32(i)}))
					must.Do(works[i].Synchronize(x.stream[p.device]))
					must.Do(x.back(p))
				}
			}
			// Without streams, for the caller's wait for the messages.
			v, err := x.b.AllReduce(cuda.WithStreams(x.ctx), []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
			if r == 1 && err == nil {
				err = v.Wait(x.ctx)
			}
			if err != nil {
				return err
			}
			for i := many - 1; i >= 0; i-- {
				if r == 1 {
					works[i] = must.Get(x.b.Send(x.ctx, ps[i].dev, 0, backend.P2POptions{Tag: uint32(i)}))
				}
			}
			must.Do(work.WaitAll(x.ctx, append(works, v)...))
			for i, p := range ps {
				if r == 0 {
					v, err = x.cpu.Recv(x.ctx, p.cpu, 1, backend.P2POptions{Tag: uint32(i)})
				} else {
					v, err = x.cpu.Send(x.ctx, p.cpu, 0, backend.P2POptions{Tag: uint32(i)})
				}
				if err == nil {
					err = v.Wait(x.ctx)
				}
				if err == nil && r == 0 {
					err = x.check(p)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
		if now := w.m.Stats().MadeStreams; round > 0 {
			require.Equal(t, made, now)
		} else {
			made = now
		}
	}
	const callers, collectives, messages = 2 * 2, 2 * 2, 2 * 2
	require.LessOrEqual(t, made, callers+collectives+messages)
	w.end()
}

// TestBehind: a message ends with its own time while an earlier one cannot be posted. That one is a send whose
// tensor is not ready, or a receive from any rank on the lanes.
func TestBehind(t *testing.T) {
	for _, lanes := range []bool{false, true} {
		s := setup{size: 2, timeout: patience, sim: sim.Config{Devices: 2}}
		if lanes {
			s.sim.Kernels = directly(2).sim.Kernels
		}
		w := newWorld(t, s)
		errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
			var err error
			if lanes {
				must.Do(x.meetDirectly(r))
			}
			if r == 1 {
				return nil
			}
			a := must.Get(x.vector(tensor.Float32, 0, make([]byte, 16)))
			dev := 1 // whose stream goes on
			if lanes {
				dev = 0
			}
			b := must.Get(x.vector(tensor.Float32, dev, make([]byte, 16)))
			gate := must.Get(x.d.AllocHost(4))
			x.close = append(x.close, gate)
			short, start := 200*time.Millisecond, time.Now()
			var u, v *work.Work
			if lanes {
				u = must.Get(x.b.RecvAnySource(x.ctx, a.t, backend.P2POptions{}))
				v, err = x.b.Recv(x.ctx, b.t, 1, backend.P2POptions{Timeout: short})
			} else {
				must.Do(x.stream[0].WaitValue(gate.Ptr(), 1, driver.AtLeast))
				u = must.Get(x.b.Send(x.ctx, a.t, 1, backend.P2POptions{Tag: 1}))
				v, err = x.b.Send(x.ctx, b.t, 1, backend.P2POptions{Tag: 1, Timeout: short})
			}
			if err != nil {
				return err
			}
			must.Do(says(v.Wait(x.ctx), "behind an earlier message"))
			if d := time.Since(start); d > patience/2 {
				return errors.New("it took " + d.String())
			}
			gate.Store32(0, 1)
			return says(u.Wait(x.ctx), "behind an earlier message")
		})
		require.NoError(t, errors.Join(errs...), "lanes: %v", lanes)
		w.drop(t)
	}
}
