package cuda_test

import (
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// reduceLoop returns a function that all-reduces a tensor of n float32 once on every
// rank of a group, through memory that the ranks share.
func reduceLoop(tb testing.TB, w *world, n int) func() {
	ts := make([][]*tensor.Tensor, len(w.ranks))
	for r, x := range w.ranks {
		v := must.Get(x.d.Device(r % x.d.Count()))
		m := must.Get(v.Alloc(4 * n))
		x.close = append(x.close, m)
		t := must.Get(tensor.OnDevice(tensor.Float32, cuda.OnStream(m, x.stream[r%x.d.Count()]), n))
		ts[r] = []*tensor.Tensor{t}
	}
	start := make([]chan struct{}, len(w.ranks))
	var done sync.WaitGroup
	for r, x := range w.ranks {
		start[r] = make(chan struct{})
		go func() {
			for range start[r] {
				v, err := x.b.AllReduce(x.ctx, ts[r], backend.AllReduceOptions{Op: backend.Max()})
				if err == nil {
					err = v.Wait(x.ctx)
				}
				if err != nil {
					tb.Error(err)
				}
				done.Done()
			}
		}()
	}
	tb.Cleanup(func() {
		for _, c := range start {
			close(c)
		}
	})
	return func() {
		done.Add(len(start))
		for _, c := range start {
			c <- struct{}{}
		}
		done.Wait()
	}
}

// directAllocs is how many objects a direct all-reduce takes: what the Work is part of.
const directAllocs = 1

// TestDirectAllocs counts what all-reduces allocate that are one kernel, besides the simulator.
func TestDirectAllocs(t *testing.T) {
	old := runtime.MemProfileRate
	runtime.MemProfileRate = 1
	defer func() { runtime.MemProfileRate = old }()
	s := setup{size: 2, sim: sim.Config{Devices: 2, NoDelays: true, NoCheck: true, Kernels: simkernels.All()}}
	w := newWorld(t, s)
	const rounds = 50
	run := reduceLoop(t, w, 256)
	for range 10 {
		run()
	}
	require.Equal(t, cuda.DirectWork, w.ranks[0].b.Explain().Choices[0].Algorithm)
	before := allocated()
	for range rounds {
		run()
	}
	each := float64(allocated()-before) / float64(rounds*len(w.ranks))
	t.Logf("%.2f objects", each)
	require.Less(t, each, directAllocs+0.5)
	require.GreaterOrEqual(t, each, 1.0, "the Work at least")
	w.end()
}

// allocated returns how many objects the backend has allocated, those of the simulator
// not counted.
func allocated() (n int64) {
	runtime.GC()
	runtime.GC()
	records := make([]runtime.MemProfileRecord, 1000)
	for {
		k, ok := runtime.MemProfile(records, true)
		if ok {
			records = records[:k]
			break
		}
		records = make([]runtime.MemProfileRecord, 2*k)
	}
	for _, r := range records {
		own, simulated := false, false
		for frames := runtime.CallersFrames(r.Stack()); ; {
			f, more := frames.Next()
			own = own || strings.Contains(f.Function, "backend/cuda.")
			simulated = simulated || strings.Contains(f.Function, "driver/sim.")
			if !more {
				break
			}
		}
		if own && !simulated {
			n += r.AllocObjects
		}
	}
	return n
}
