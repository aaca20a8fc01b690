package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestAbortedInOrder kills a rank while the callers' streams have not come as far as
// the call, and lets these write the tensors before and after it. What the operation
// still does on the devices keeps its place between the two.
func TestAbortedInOrder(t *testing.T) {
	eachSeed(t, 1, func(t *testing.T, seed uint64, s sim.Semantics) {
		rng := random(t, seed)
		w := newWorld(t, setup{
			size: 3, timeout: patience, sim: sim.Config{Devices: 2, Seed: seed, Semantics: s},
			options: cuda.Options{Chunk: 100, Slots: 1 + rng.IntN(3), Broadcast: []string{"", cuda.BroadcastHost}[seed%2]},
		})
		kind, layout, held := rng.IntN(4), 3*rng.IntN(2), rng.IntN(2) == 0
		dead := 2
		if kind == 1 {
			dead = 0 // the root
		}
		w.fabric.Kill("g/cuda/0", dead)
		errs := runEach(w, func(x *rank, r int, _ chan struct{}) error {
			if r == dead {
				return nil
			}
			rng := rand.New(rand.NewPCG(seed, uint64(r)))
			open := func() {}
			if held {
				var err error
				if open, err = x.gate(x.stream[1]); err != nil {
					return err
				}
			}
			defer open() // when the operation has ended without the stream
			// The caller's copies into the tensors come behind the gate.
			in, err := x.pairOf(rng, tensor.Int32, 1, laid(layout, 20, 3), true)
			if err != nil {
				return err
			}
			all, err := x.pairOf(rng, tensor.Int32, 1, laid(layout, 60, 3), true)
			if err != nil {
				return err
			}
			var v *work.Work
			switch kind {
			case 0:
				v, err = x.b.AllReduce(x.ctx, []*tensor.Tensor{in.dev}, backend.AllReduceOptions{})
			case 1:
				v, err = x.b.Broadcast(x.ctx, []*tensor.Tensor{in.dev}, backend.BroadcastOptions{})
			case 2:
				v, err = x.b.AllGatherIntoTensor(x.ctx, all.dev, in.dev, backend.AllGatherOptions{})
			case 3:
				v, err = x.b.Recv(x.ctx, in.dev, dead, backend.P2POptions{})
			}
			if err != nil {
				return err
			}
			err = v.Wait(x.ctx)
			if again := v.Synchronize(x.stream[1]); !errors.Is(again, err) {
				return fmt.Errorf("Wait returns %v, Synchronize %v", err, again)
			}
			if err := x.stream[1].Memset(in.mem.Ptr(), 7, in.mem.Len()); err != nil {
				return err
			}
			return err
		})
		for r, err := range errs {
			if r != dead {
				require.ErrorIs(t, err, work.ErrPeerDied)
				var e *work.Error
				require.ErrorAs(t, err, &e)
				require.Equal(t, dead, e.Peer)
			}
		}
		require.NoError(t, w.closed())
		require.NoError(t, w.m.Settle(w.ctx))
		for _, x := range w.ranks {
			x.free()
		}
		require.NoError(t, w.m.Close())
	})
}

// TestLaterCalls holds that what is called after a rank has died, or has aborted the
// group, names that rank, whatever it is.
func TestLaterCalls(t *testing.T) {
	for name, s := range map[string]setup{
		"host":   {size: 3, timeout: patience, sim: sim.Config{Devices: 1, Quiet: true}},
		"device": onDevices(3, 1, 64).quietly(),
	} {
		for _, how := range []string{"dies", "aborts"} {
			t.Run(name+" "+how, func(t *testing.T) {
				const culprit = 1
				w := newWorld(t, s)
				w.each(func(x *rank, r int) error {
					b, err := x.bucket(r)
					if err != nil {
						return err
					}
					_, err = x.run(b.t)
					return err
				})
				if how == "dies" {
					w.fabric.Kill("g/cuda/0", culprit)
				} else {
					w.ranks[culprit].b.Abort(errors.New("no more"))
				}
				for r, x := range w.ranks {
					if r == culprit && how == "dies" {
						continue
					}
					b, err := x.bucket(r)
					require.NoError(t, err)
					all, err := x.bucket(r)
					require.NoError(t, err)
					out, err := tensor.OnDevice(tensor.Uint8, all.mem, 400)
					require.NoError(t, err)
					in, err := tensor.OnDevice(tensor.Uint8, b.mem, 400)
					require.NoError(t, err)
					part, err := in.AsStrided([]int{100}, []int{1}, 0)
					require.NoError(t, err)
					whole, err := out.AsStrided([]int{300}, []int{1}, 0)
					require.NoError(t, err)
					for name, do := range map[string]func() (*work.Work, error){
						"all_reduce": func() (*work.Work, error) {
							return x.b.AllReduce(x.ctx, []*tensor.Tensor{b.t}, backend.AllReduceOptions{})
						},
						"broadcast": func() (*work.Work, error) {
							return x.b.Broadcast(x.ctx, []*tensor.Tensor{b.t}, backend.BroadcastOptions{})
						},
						"all_gather": func() (*work.Work, error) {
							return x.b.AllGatherIntoTensor(x.ctx, whole, part, backend.AllGatherOptions{})
						},
						"barrier": func() (*work.Work, error) { return x.b.Barrier(x.ctx, backend.BarrierOptions{}) },
						"monitored": func() (*work.Work, error) {
							return nil, x.b.MonitoredBarrier(x.ctx, backend.MonitoredBarrierOptions{})
						},
						"send": func() (*work.Work, error) {
							return x.b.Send(x.ctx, b.t, (r+1)%3, backend.P2POptions{})
						},
						"recv": func() (*work.Work, error) {
							return x.b.Recv(x.ctx, b.t, (r+1)%3, backend.P2POptions{})
						},
					} {
						for range 2 {
							v, err := do()
							if err == nil {
								err = v.Wait(x.ctx)
							}
							var e *work.Error
							require.ErrorAs(t, err, &e, name)
							require.Equal(t, culprit, e.Peer, "%s on rank %d: %v", name, r, err)
							require.Equal(t, r, e.Rank)
						}
					}
				}
				w.drop(t)
			})
		}
	}
}
