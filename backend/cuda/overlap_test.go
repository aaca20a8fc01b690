package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestStagesOverlap holds that while the host is still busy with the first chunk
// the next ones come down, as many as there are slots.
func TestStagesOverlap(t *testing.T) {
	const chunks, slots = 7, 3
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1, Seed: 2, Timeline: true}, options: cuda.Options{Chunk: 4000 / chunks, Slots: slots}})
	count := func() (down, up int) {
		steps, err := w.m.Timeline()
		require.NoError(t, err)
		for _, s := range steps {
			if strings.HasPrefix(s.Operation, "Copy") && strings.Contains(s.Stream, "rank 0 down") {
				down++
			}
			if strings.HasPrefix(s.Operation, "Copy") && strings.Contains(s.Stream, "rank 0 up") {
				up++
			}
		}
		return down, up
	}
	w.each(func(x *rank, r int) error {
		_, err := x.kept(r, 0)
		return err
	})
	require.NoError(t, w.m.Quiesce(w.ctx))
	x := w.ranks[0]
	v, err := x.b.AllReduce(w.ctx, x.tensors[:1], backend.AllReduceOptions{})
	require.NoError(t, err)
	var stuck *sim.Stuck
	require.ErrorAs(t, w.m.Quiesce(w.ctx), &stuck, "rank 0's streams wait for its host, which waits for rank 1")
	down, up := count()
	require.Equal(t, slots, down)
	require.Zero(t, up)
	k, err := w.ranks[1].b.AllReduce(w.ctx, w.ranks[1].tensors[:1], backend.AllReduceOptions{})
	require.NoError(t, err)
	require.NoError(t, work.WaitAll(w.ctx, v, k))
	require.NoError(t, w.m.Quiesce(w.ctx))
	down, up = count()
	require.Equal(t, []int{chunks + 1, chunks + 1}, []int{down, up}, "4000 bytes in chunks of %d", 4000/chunks)
	w.end()
}

// TestManyGroups lets several groups of the same ranks share devices. Each has
// callers and streams of its own, who call in one order within a group, and in no
// order across groups (T14).
func TestManyGroups(t *testing.T) {
	const groups, calls = 4, 12
	w := newWorld(t, setup{size: 3, sim: sim.Config{Devices: 2, Seed: 8}})
	st := store.NewHash()
	defer st.Close()
	w.each(func(whole *rank, r int) error {
		var wg sync.WaitGroup
		errs := make([]error, groups)
		for g := range groups {
			x := &rank{TB: t, ctx: w.ctx, w: w, d: whole.d}
			if err := x.makeStreams(fmt.Sprintf("group %d rank %d", g, r)); err != nil {
				return err
			}
			defer x.free()
			bo := backend.Options{
				Store: store.Prefix(fmt.Sprint(g), st), Rank: r, Size: 3, Group: fmt.Sprint("group ", g), Timeout: patience,
				Specific: cuda.Options{Driver: x.d, Chunk: 64, CPUOptions: join(w.fabric)},
			}
			b, err := cuda.New(x.ctx, bo)
			if err != nil {
				return err
			}
			rng := rand.New(rand.NewPCG(uint64(g), uint64(r)))
			var ps []*pair
			var works []*work.Work
			for range calls {
				p, err := x.pairOf(rng, tensor.Int64, rng.IntN(2), flat(1+g*9), true)
				if err != nil {
					return err
				}
				ps = append(ps, p)
			}
			reference, err := x.reference(bo)
			if err != nil {
				return err
			}
			wg.Go(func() {
				errs[g] = func() error {
					for _, p := range ps {
						v, err := b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{})
						if err != nil {
							return err
						}
						works = append(works, v)
					}
					for i, p := range ps {
						if err := works[i].Synchronize(x.stream[p.device]); err != nil {
							return err
						}
						if err := x.back(p); err != nil {
							return err
						}
					}
					for i, p := range ps {
						v, err := reference.AllReduce(x.ctx, []*tensor.Tensor{p.cpu}, backend.AllReduceOptions{})
						if err != nil {
							return err
						}
						if err := work.WaitAll(x.ctx, works[i], v); err != nil {
							return err
						}
						if err := x.check(p); err != nil {
							return err
						}
					}
					if err := b.Close(); err != nil {
						return err
					}
					return reference.Close()
				}()
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				return err
			}
		}
		return nil
	})
	w.end()
}

// TestT10HeldOutput holds up the way to the output of one operation, all of whose
// chunks have a slot. Others go on, and do not touch what it still needs (T10). Who has
// only blocked on the Work may use the output on any stream (T12).
func TestT10HeldOutput(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 2, Seed: 4}, options: cuda.Options{Chunk: 160}})
	w.each(func(x *rank, r int) error {
		rng := rand.New(rand.NewPCG(4, uint64(r)))
		gate, err := x.d.AllocHost(4)
		if err != nil {
			return err
		}
		x.close = append(x.close, gate)
		gate.Store32(0, 0)
		defer gate.Store32(0, 1)
		in, err := x.pairOf(rng, tensor.Int32, 0, flat(40), true)
		if err != nil {
			return err
		}
		out, err := x.pairOf(rng, tensor.Int32, 1, flat(80), true)
		if err != nil {
			return err
		}
		if err := x.stream[1].WaitValue(gate.Ptr(), 1, driver.Equal); err != nil {
			return err
		}
		held, err := x.b.AllGatherIntoTensor(x.ctx, out.dev, in.dev, backend.AllGatherOptions{})
		if err != nil {
			return err
		}
		for range 5 {
			p, err := x.pairOf(rng, tensor.Int32, 0, flat(40), true)
			if err != nil {
				return err
			}
			v, err := x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{})
			if err != nil {
				return err
			}
			if err := v.Synchronize(x.stream[0]); err != nil {
				return err
			}
			if err := x.back(p); err != nil {
				return err
			}
			k, err := x.cpu.AllReduce(x.ctx, []*tensor.Tensor{p.cpu}, backend.AllReduceOptions{})
			if err != nil {
				return err
			}
			if err := k.Wait(x.ctx); err != nil {
				return err
			}
			if err := x.check(p); err != nil {
				return err
			}
		}
		if held.IsCompleted() {
			return errors.New("the operation ended before its output could be written")
		}
		gate.Store32(0, 1)
		if err := held.Wait(x.ctx); err != nil {
			return err
		}
		k, err := x.cpu.AllGatherIntoTensor(x.ctx, out.cpu, in.cpu, backend.AllGatherOptions{})
		if err != nil {
			return err
		}
		if err := k.Wait(x.ctx); err != nil {
			return err
		}
		// Two streams that nobody has told of the operation, nor of each other.
		y := &rank{TB: t, ctx: w.ctx, w: w, d: x.d}
		if err := y.makeStreams(fmt.Sprint("fresh ", r)); err != nil {
			return err
		}
		defer y.free()
		if err := y.back(out); err != nil {
			return err
		}
		return y.check(out)
	})
	w.end()
}
