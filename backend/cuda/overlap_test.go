package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// TestStagesOverlap holds that while the host is still busy with the first chunk
// the next ones come down, as many as there are slots.
func TestStagesOverlap(t *testing.T) {
	const chunks, slots = 7, 3
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 1, Seed: 2, Timeline: true}, options: cuda.Options{Chunk: 4000 / chunks, Slots: slots}})
	count := func() (down, up int) {
		steps := must.Get(w.m.Timeline())
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
		return must.Err(x.kept(r, 0))
	})
	require.NoError(t, w.m.Quiesce(w.ctx))
	x := w.ranks[0]
	v := must.Get(x.b.AllReduce(w.ctx, x.tensors[:1], backend.AllReduceOptions{}))
	must.As[*sim.Stuck](t, w.m.Quiesce(w.ctx), "rank 0's streams wait for its host, which waits for rank 1")
	down, up := count()
	require.Equal(t, slots, down)
	require.Zero(t, up)
	k := must.Get(w.ranks[1].b.AllReduce(w.ctx, w.ranks[1].tensors[:1], backend.AllReduceOptions{}))
	require.NoError(t, work.WaitAll(w.ctx, v, k))
	require.NoError(t, w.m.Quiesce(w.ctx))
	down, up = count()
	require.Equal(t, []int{chunks + 1, chunks + 1}, []int{down, up}, "4000 bytes in chunks of %d", 4000/chunks)
	w.end()
}

// TestT10HeldOutput holds up the way to the output of one operation, all of whose
// chunks have a slot. Others go on, and do not touch what it still needs (T10). Who has
// only blocked on the Work may use the output on any stream (T12).
func TestT10HeldOutput(t *testing.T) {
	w := newWorld(t, setup{size: 2, sim: sim.Config{Devices: 2, Seed: 4}, options: cuda.Options{Chunk: 160}})
	w.each(func(x *rank, r int) error {
		rng := rand.New(rand.NewPCG(4, uint64(r)))
		gate := must.Get(x.d.AllocHost(4))
		x.close = append(x.close, gate)
		gate.Store32(0, 0)
		defer gate.Store32(0, 1)
		in := must.Get(x.pairOf(rng, tensor.Int32, 0, flat(40), true))
		out := must.Get(x.pairOf(rng, tensor.Int32, 1, flat(80), true))
		must.Do(x.stream[1].WaitValue(gate.Ptr(), 1, driver.Equal))
		held := must.Get(x.b.AllGatherIntoTensor(x.ctx, out.dev, in.dev, backend.AllGatherOptions{}))
		for range 5 {
			p := must.Get(x.pairOf(rng, tensor.Int32, 0, flat(40), true))
			v := must.Get(x.b.AllReduce(x.ctx, []*tensor.Tensor{p.dev}, backend.AllReduceOptions{}))
			must.Do(v.Synchronize(x.stream[0]))
			must.Do(x.back(p))
			k := must.Get(x.cpu.AllReduce(x.ctx, []*tensor.Tensor{p.cpu}, backend.AllReduceOptions{}))
			must.Do(k.Wait(x.ctx))
			must.Do(x.check(p))
		}
		if held.IsCompleted() {
			return errors.New("the operation ended before its output could be written")
		}
		gate.Store32(0, 1)
		must.Do(held.Wait(x.ctx))
		k := must.Get(x.cpu.AllGatherIntoTensor(x.ctx, out.cpu, in.cpu, backend.AllGatherOptions{}))
		must.Do(k.Wait(x.ctx))
		// Two streams that nobody has told of the operation, nor of each other.
		y := &rank{TB: t, ctx: w.ctx, w: w, d: x.d}
		must.Do(y.makeStreams(fmt.Sprint("fresh ", r)))
		defer y.free()
		must.Do(y.back(out))
		return y.check(out)
	})
	w.end()
}
