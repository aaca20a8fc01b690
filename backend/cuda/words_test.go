package cuda_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
)

// launches counts what is launched, but for kernels that try words.
func (w *world) launches() *atomic.Int32 {
	launched := new(atomic.Int32)
	w.m.Skip(func(c sim.Call) bool {
		if c.Name == "Launch" && !strings.HasSuffix(c.Stream, "words") {
			launched.Add(1)
		}
		return false
	})
	return launched
}

// TestBlind: no kernel waits for another rank where it would not see that the host aborts it.
func TestBlind(t *testing.T) {
	s := directly(2)
	s.sim.Kernels[kernels.Exchange] = func(k *sim.Run) error { // it gives up at once, to save the test the time
		k.Store(k.Ptr(4), k.Uint32(7))
		return nil
	}
	w := newWorld(t, s)
	w.each(func(x *rank, r int) error { return must.Err(x.run(must.Get(x.bucket(r)).t)) })
	require.Contains(t, w.how(0), "not direct: rank 0: kernels of the device do not see what the host writes while they run")
	w.end()
}

// TestWordsKeepMemory: the memory of the kernel that tries words is not freed while an operation of another group is under
// way.
func TestWordsKeepMemory(t *testing.T) {
	w := newWorld(t, directly(2))
	freed := func() int { s := w.m.Stats(); return s.MadeHosts - s.Hosts }
	all := []*tensor.Tensor{must.Get(w.ranks[0].bucket(0)).t, must.Get(w.ranks[1].bucket(1)).t}
	before := freed()
	pool.Begin()
	defer pool.Underway.Add(-1)
	w.each(func(x *rank, r int) error { return must.Err(x.run(all[r])) })
	require.Equal(t, before, freed())
	w.end()
}

// TestExchangeLimit: the kernel of a host that is stopped leaves the device when its time is over.
func TestExchangeLimit(t *testing.T) {
	d := must.Get(sim.Open(sim.Config{Kernels: simkernels.All()}))
	v := must.Get(d.Device(0))
	m := must.Get(v.Load(kernels.PTX))
	f := must.Get(m.Function(kernels.Exchange))
	s := must.Get(v.NewStream(driver.StreamOptions{}))
	h := must.Get(d.AllocHost(12))
	p := h.Ptr()
	require.NoError(t, s.Launch(&driver.Launch{
		Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 32}, Access: []driver.Access{driver.Shares(p, 12)},
		Args: new(driver.Args).Ptr(p).Ptr(p).Ptr(p).Uint64(0).Ptr(p).Ptr(p + 4).Ptr(p + 8).Uint32(1).Uint64(uint64(time.Millisecond)),
	}))
	e := must.Get(s.Record())
	require.NoError(t, e.Sync(t.Context()))
	e.Release()
	require.EqualValues(t, 1, h.Load32(0))
	require.Zero(t, h.Load32(8))
	require.NoError(t, errors.Join(h.Close(), s.Close(), m.Close(), d.Close()))
}

// TestBoardWithout holds that Explain says why calls are not compared.
func TestBoardWithout(t *testing.T) {
	if lonely {
		t.Skip("other systems are not asked for anything")
	}
	defer cuda.OtherProcesses()()
	for call, want := range map[string][]string{
		"memfd_create": {"this rank has no page for others to read: refused", "cannot be read: there is none"},
		"open":         {"cannot be read: refused"},
	} {
		var once atomic.Bool
		restore := cuda.SetBefore(func(c string, _ int) error {
			if c == call && !once.Swap(true) {
				return errors.New("refused")
			}
			return nil
		})
		w := newWorld(t, setup{size: 2, timeout: patience, sim: sim.Config{Devices: 1}})
		restore()
		said := w.ranks[0].b.Explain().Why + w.ranks[1].b.Explain().Why
		require.Contains(t, said, "calls of ranks on this host are not all compared when they are made: ")
		for _, text := range want {
			require.Contains(t, said, text)
		}
		w.end()
	}
}
