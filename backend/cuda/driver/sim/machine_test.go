package sim_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
)

func TestConfig(t *testing.T) {
	for name, c := range map[string]sim.Config{
		"negative devices": {Devices: -1},
		"many devices":     {Devices: 65},
		"semantics":        {Semantics: 9},
		"nil kernel":       {Kernels: map[string]sim.Kernel{"x": nil}},
		"bandwidth":        {Topology: sim.Topology{LinkBandwidth: -1}},
		"latency":          {Topology: sim.Topology{HostLatency: -1}},
		"folder":           {Dir: "/dev/null/nothing"},
	} {
		require.ErrorContains(t, must.Err(sim.New(c)), "sim: ", name)
	}
	h := open(t, sim.Config{})
	require.Equal(t, 1, h.d.Count())
	require.Error(t, h.m.Register("touch", kernels()["touch"]), "twice")
	require.Error(t, h.m.Register("nil", nil))
	require.ErrorContains(t, must.Err(h.m.Timeline()), "Config.Timeline")
	require.NoError(t, h.close())
	require.NoError(t, h.m.Close(), "closed twice")
	require.ErrorIs(t, must.Err(h.m.Process("late")), driver.ErrClosed)
}

// TestInject lets every call of a program fail, once with an error of that call
// and once by losing the device from there on.
func TestInject(t *testing.T) {
	run := func(h *host) (err error) {
		var closers []interface{ Close() error }
		defer func() {
			require.NoError(t, h.m.Settle(h.ctx))
			for i := len(closers) - 1; i >= 0; i-- {
				closers[i].Close()
			}
		}()
		keep := func(c interface{ Close() error }, e error) bool {
			if e != nil {
				err = e
				return false
			}
			closers = append(closers, c)
			return true
		}
		v, err := h.d.Device(0)
		if err != nil {
			return err
		}
		x, e := v.Alloc(100)
		if !keep(x, e) {
			return
		}
		p, e := h.d.AllocHost(100)
		if !keep(p, e) {
			return
		}
		mod, e := v.Load(sim.Image("touch"))
		if !keep(mod, e) {
			return
		}
		f, err := mod.Function("touch")
		if err != nil {
			return err
		}
		a, e := v.NewStream()
		if !keep(a, e) {
			return
		}
		b, e := v.NewStream()
		if !keep(b, e) {
			return
		}
		args := new(driver.Args).Ptr(x.Ptr()).Int64(100)
		if err := a.Launch(&driver.Launch{Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: args, Access: []driver.Access{driver.Writes(x.Ptr(), 100)}}); err != nil {
			return err
		}
		ev, err := a.Record()
		if err != nil {
			return err
		}
		err = b.Wait(ev)
		if err == nil {
			err = b.Copy(p.Ptr(), x.Ptr(), 100)
		}
		_, _ = ev.Done()
		ev.Release()
		if err != nil {
			return err
		}
		end, err := b.Record()
		if err != nil {
			return err
		}
		defer end.Release()
		return end.Sync(h.ctx)
	}
	for _, cause := range []error{errors.New("injected"), driver.ErrDeviceLost, driver.ErrOutOfMemory} {
		for k := 0; ; k++ {
			h := open(t, sim.Config{NoCheck: true})
			h.m.Inject(sim.FailCall(k, cause))
			err := run(h)
			calls := h.m.Calls()
			h.m.Inject(nil)
			require.NoError(t, h.m.Settle(h.ctx))
			s := h.m.Stats()
			require.Zero(t, s.Memories+s.Hosts+s.Streams+s.Events+s.Modules+s.Mappings+s.Peers, "call %d: %+v", k, s)
			if calls <= k {
				require.NoError(t, err)
				require.Greater(t, k, 10)
				require.NoError(t, h.close())
				break
			}
			require.ErrorIs(t, err, cause, "call %d", k)
			e := must.As[*driver.Error](t, err)
			require.NotEmpty(t, e.Call)
			for _, f := range h.m.Findings() {
				must.As[*sim.Unused](t, f, "call %d", k)
			}
			h.close()
		}
	}
}

// TestStats holds that a steady program makes nothing.
func TestStats(t *testing.T) {
	h := open(t, sim.Config{})
	a, b, x, y := h.stream(0, "a"), h.stream(0, "b"), h.alloc(0, 100), h.alloc(0, 100)
	step := func() {
		require.NoError(t, a.Memset(x.Ptr(), 1, 100))
		h.order(b, a)
		require.NoError(t, b.Copy(y.Ptr(), x.Ptr(), 100))
		h.order(a, b)
	}
	step()
	before := h.m.Stats()
	for range 100 {
		step()
	}
	after := h.m.Stats()
	require.Equal(t, 200, after.Records-before.Records)
	require.Equal(t, 200, after.Waits-before.Waits)
	before.Records, before.Waits, before.Operations = after.Records, after.Waits, after.Operations
	before.Deepest = after.Deepest // as many as the stream was behind by
	require.Equal(t, before, after)
	require.NoError(t, h.settle())
}

// TestDeepest counts what a stream has been given while a word holds it up.
func TestDeepest(t *testing.T) {
	h := open(t, sim.Config{})
	a, b, x, word := h.stream(0, "a"), h.stream(0, "b"), h.alloc(0, 100), h.pinned(4)
	word.Store32(0, 0)
	require.NoError(t, a.WaitValue(word.Ptr(), 1, driver.Equal))
	for range 41 {
		require.NoError(t, a.Memset(x.Ptr(), 1, 100))
	}
	require.Equal(t, 42, h.m.Stats().Deepest)
	word.Store32(0, 1)
	h.wait(a)
	before := h.m.Stats().Deepest
	require.NoError(t, b.Memset(x.Ptr(), 2, 100))
	require.Equal(t, before, h.m.Stats().Deepest)
	require.NoError(t, h.settle())
}

// TestMemory holds that memory is limited, and that its contents are not zero.
func TestMemory(t *testing.T) {
	h := open(t, sim.Config{Memory: 1000, Seed: 3})
	x := h.alloc(0, 900)
	require.ErrorIs(t, must.Err(h.gpu().Alloc(101)), driver.ErrOutOfMemory)
	free, total, err := h.gpu().MemInfo()
	require.NoError(t, err)
	require.Equal(t, [2]uint64{100, 1000}, [2]uint64{free, total})
	s, out := h.stream(0, "a"), h.pinned(900)
	require.NoError(t, s.Copy(out.Ptr(), x.Ptr(), 900))
	h.wait(s)
	require.NotZero(t, out.Bytes()[0], "fresh memory is marked")
	require.NoError(t, h.settle())
}

// TestSweep runs so many operations that the checker has to forget, and then
// makes a mistake.
func TestSweep(t *testing.T) {
	h := open(t, sim.Config{NoDelays: true, Quiet: true})
	a, b, x := h.stream(0, "a"), h.stream(0, "b"), h.alloc(0, 4096)
	h.stream(0, "idle")
	for i := range 20000 {
		require.NoError(t, a.Memset(x.Ptr()+driver.Ptr(i%1000*4), 1, 4))
		if i%100 == 0 {
			h.order(b, a)
			require.NoError(t, b.Memset(x.Ptr(), 2, 4096))
			h.order(a, b)
		}
		if i%1000 == 0 {
			h.wait(b)
			h.wait(a)
		}
	}
	require.NoError(t, h.m.Quiesce(h.ctx))
	require.NoError(t, h.m.Check())
	require.NoError(t, b.Memset(x.Ptr()+999*4+3, 1, 1))
	require.Equal(t, 1, races(h.settle()))
}
