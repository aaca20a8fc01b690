//go:build !race

package cuda_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/tensor"
)

// TestChoiceAllocs: choosing the way of a call allocates nothing. Under the race detector a sync.Pool forgets at random what it was given.
func TestChoiceAllocs(t *testing.T) {
	s := directly(2)
	s.sim.NoDelays, s.sim.NoCheck = true, true
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error { return x.meetDirectly(r) })
	x := w.ranks[0]
	y, err := x.vector(tensor.Float32, 0, make([]byte, 1<<10))
	require.NoError(t, err)
	ts := []*tensor.Tensor{y.t}
	chosen := x.b.Chooses(x.ctx, ts)
	require.Equal(t, []string{cuda.DirectWork, "one-shot", "one-shot", "direct", "direct"}, chosen())
	require.Zero(t, testing.AllocsPerRun(1000, func() { chosen() }))
	_, err = x.bytes(y, 0) // its memory is no longer used
	require.NoError(t, err)
	w.end()
}

// callAllocs is how many objects an all-reduce takes, whatever its size: the Work, what
// the call was, its chunks, and those of contexts.
const callAllocs = 21

// TestExchangeAllocs counts what all-reduces through shared memory allocate, besides
// the simulator: as much for one chunk as for many.
func TestExchangeAllocs(t *testing.T) {
	old := runtime.MemProfileRate
	runtime.MemProfileRate = 1
	defer func() { runtime.MemProfileRate = old }()
	w := newWorld(t, setup{size: 2, sim: sim.Config{NoDelays: true, NoCheck: true}, options: cuda.Options{Chunk: 1024}})
	const rounds = 50
	for _, chunks := range []int{1, 40} {
		run := reduceLoop(t, w, 256*chunks)
		for range 10 {
			run()
		}
		before := allocated()
		for range rounds {
			run()
		}
		each := float64(allocated()-before) / float64(rounds*len(w.ranks))
		t.Logf("%d chunks: %.2f objects", chunks, each)
		// A list may grow in between.
		require.Less(t, each, callAllocs+0.5, "%d chunks", chunks)
		require.Greater(t, each, 1.0, "the Work at least")
	}
	w.end()
}
