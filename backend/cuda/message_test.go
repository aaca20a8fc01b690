package cuda_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestManyMessages posts 100 receives, each with a stream ordered after it, for messages
// that are sent in the opposite order, behind a collective. They take two streams a device
// and rank, whatever their number.
func TestManyMessages(t *testing.T) {
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
			ps, err := all(x, r)
			if err != nil {
				return err
			}
			b, err := x.bucket(r)
			if err != nil {
				return err
			}
			works := make([]*work.Work, many)
			if r == 0 {
				for i, p := range ps {
					if works[i], err = x.b.Recv(x.ctx, p.dev, 1, backend.P2POptions{Tag: uint32(i)}); err != nil {
						return err
					}
					if err := works[i].Synchronize(x.stream[p.device]); err != nil {
						return err
					}
					if err := x.back(p); err != nil {
						return err
					}
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
					if works[i], err = x.b.Send(x.ctx, ps[i].dev, 0, backend.P2POptions{Tag: uint32(i)}); err != nil {
						return err
					}
				}
			}
			if err := work.WaitAll(x.ctx, append(works, v)...); err != nil {
				return err
			}
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
