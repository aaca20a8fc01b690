package sim_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
)

// graph captures what enqueue gives s.
func (h *host) graph(s driver.Stream, enqueue func()) driver.Graph {
	h.Helper()
	g := must.Get(driver.Capture(s, func() error { enqueue(); return nil }))
	h.closers = append(h.closers, g)
	return g
}

// TestGraphRaces holds that the checker sees the operations of a graph when it is launched, and
// only then, with the orders that the launch has.
func TestGraphRaces(t *testing.T) {
	for _, c := range []struct {
		name  string
		races int
		run   func(h *host, g driver.Graph, a, b driver.Stream, x driver.Memory) error
	}{
		{"not launched", 0, func(_ *host, _ driver.Graph, _, b driver.Stream, x driver.Memory) error {
			return b.Memset(x.Ptr(), 1, 100)
		}},
		{"another stream", 1, func(_ *host, g driver.Graph, a, b driver.Stream, x driver.Memory) error {
			return errors.Join(g.Launch(a), b.Memset(x.Ptr(), 1, 100))
		}},
		{"another stream that waits", 0, func(h *host, g driver.Graph, a, b driver.Stream, x driver.Memory) error {
			err := g.Launch(a)
			h.order(b, a)
			return errors.Join(err, b.Memset(x.Ptr(), 1, 100))
		}},
		{"another stream before", 1, func(_ *host, g driver.Graph, a, b driver.Stream, x driver.Memory) error {
			return errors.Join(b.Memset(x.Ptr(), 1, 100), g.Launch(a))
		}},
		{"another stream that is waited for", 0, func(h *host, g driver.Graph, a, b driver.Stream, x driver.Memory) error {
			err := b.Memset(x.Ptr(), 1, 100)
			h.order(a, b)
			return errors.Join(err, g.Launch(a))
		}},
		{"launches on two streams", 0, func(_ *host, g driver.Graph, a, b driver.Stream, _ driver.Memory) error {
			return errors.Join(g.Launch(a), g.Launch(b), g.Launch(a))
		}},
		{"the host", 1, func(h *host, g driver.Graph, a, _ driver.Stream, _ driver.Memory) error {
			p := h.pinned(100)
			copies := h.graph(a, func() { require.NoError(h, a.Memset(p.Ptr(), 1, 100)) })
			err := copies.Launch(a)
			h.d.HostAccess("reading", driver.Reads(p.Ptr(), 100))
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := open(t, sim.Config{Quiet: true})
			a, b, x := h.stream(0, "a"), h.stream(0, "b"), h.alloc(0, 100)
			touch := h.kernel(0, "touch")
			g := h.graph(a, func() { h.launch(a, touch, driver.Writes(x.Ptr(), 100)) })
			require.NoError(t, c.run(h, g, a, b, x))
			err := h.settle()
			require.Equal(t, c.races, races(err), "%v", err)
			if c.races == 0 {
				require.NoError(t, err)
			}
		})
	}
}

// TestGraphLanes has two streams of a capture use the same bytes, with and without an order, and
// names them when the graph is launched.
func TestGraphLanes(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		h := open(t, sim.Config{Quiet: true})
		a, b, c, x := h.stream(0, "a"), h.stream(0, "b"), h.stream(0, "c"), h.alloc(0, 100)
		g := h.graph(a, func() {
			h.order(b, a)
			h.order(c, a)
			require.NoError(t, b.Memset(x.Ptr(), 1, 100))
			if ordered {
				h.order(c, b)
			}
			require.NoError(t, c.Memset(x.Ptr(), 2, 100))
			h.order(a, b)
			h.order(a, c)
		})
		for range 3 {
			require.NoError(t, g.Launch(a))
			require.NoError(t, g.Launch(b), "a stream of the capture is as good as any other")
		}
		err := h.settle()
		if ordered {
			require.NoError(t, err)
			continue
		}
		require.Equal(t, 1, races(err), "%v", err)
		require.ErrorContains(t, err, "stream graph's b")
		require.ErrorContains(t, err, "stream graph's c")
		require.ErrorContains(t, err, "sim/graph_test.go")
	}
}

// TestGraphLeaveOut holds that each wait of a capture is missed when it is left out.
func TestGraphLeaveOut(t *testing.T) {
	tried, unmissed, err := sim.LeaveOut(sim.Config{Devices: 2}, func(m *sim.Machine) error {
		d, err := m.Process("")
		require.NoError(t, err)
		h := newHost(t, d)
		a, b, x, y := h.stream(0, "a"), h.stream(1, "b"), h.alloc(0, 100), h.alloc(1, 100)
		if err := a.Memset(x.Ptr(), 1, 100); err != nil {
			return err
		}
		var g driver.Graph
		g, err = driver.Capture(a, func() error {
			h.order(b, a)
			if err := b.Copy(y.Ptr(), x.Ptr(), 100); err != nil {
				return err
			}
			h.order(a, b)
			return a.Memset(x.Ptr(), 2, 100)
		})
		if err == nil {
			h.closers = append(h.closers, g)
			err = errors.Join(g.Launch(a), g.Launch(a))
		}
		h.m.Skip(nil)
		h.wait(a)
		h.wait(b)
		return errors.Join(err, h.m.Settle(h.ctx), h.close())
	})
	require.NoError(t, err)
	require.Len(t, tried, 4)
	require.Empty(t, unmissed)
}

// TestGraphFailures lets each call of a program with a graph fail.
func TestGraphFailures(t *testing.T) {
	cause := errors.New("injected")
	calls, err := sim.FailEach(sim.Config{}, cause, func(m *sim.Machine) (err error) {
		d, err := m.Process("")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.Close()) }()
		v, err := d.Device(0)
		if err != nil {
			return err
		}
		mem, err := v.Alloc(100)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.Settle(t.Context()), mem.Close()) }()
		s, err := v.NewStream()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		g, err := driver.Capture(s, func() error { return s.Memset(mem.Ptr(), 1, 100) })
		if err != nil {
			return errors.Join(err, s.Memset(mem.Ptr(), 2, 100))
		}
		return errors.Join(g.Launch(s), g.Launch(s), g.Close())
	})
	require.NoError(t, err)
	require.Equal(t, 8, calls, "Device, Alloc, NewStream, BeginCapture, Memset, EndCapture and two launches")
}

// TestGraphLifetimes has what a graph uses go before it does.
func TestGraphLifetimes(t *testing.T) {
	h := open(t, sim.Config{})
	a, x := h.stream(0, "a"), h.alloc(0, 100)
	mod := must.Get(h.device(0).Load(sim.Image("touch")))
	f := must.Get(mod.Function("touch"))
	touches := h.graph(a, func() { h.launch(a, f, driver.Writes(x.Ptr(), 100)) })
	fills := h.graph(a, func() { require.NoError(t, a.Memset(x.Ptr(), 1, 100)) })
	require.NoError(t, mod.Close())
	require.ErrorIs(t, touches.Launch(a), driver.ErrClosed)
	require.ErrorContains(t, touches.Launch(a), "the module of touch")
	require.NoError(t, x.Close())
	require.NoError(t, fills.Launch(a))
	err := h.settle()
	must.As[*sim.Lifetime](t, err)
	require.ErrorContains(t, err, "Memset")

	h = open(t, sim.Config{})
	a = h.stream(0, "a")
	must.Get(driver.Capture(a, func() error { return nil }))
	require.Equal(t, 1, h.m.Stats().Graphs)
	leak := must.As[*sim.Leak](t, h.settle())
	require.Equal(t, "graph of 0 operations", leak.What)
}

// TestCaptureEnds holds that a refused call ends the capture, and that all later calls say why.
func TestCaptureEnds(t *testing.T) {
	h := open(t, sim.Config{})
	a, b, other, x := h.stream(0, "a"), h.stream(0, "b"), h.stream(0, "other"), h.alloc(0, 100)
	early, err := other.Record()
	require.NoError(t, err)
	raw := h.d.NewRawEvent()
	require.NoError(t, raw.Record(other))
	g := h.graph(a, func() {})
	for why, wrong := range map[string]func() error{
		"recorded outside of the capture": func() error { return a.Wait(early) },
		"raw events are not captured":     func() error { return raw.Record(a) },
		"a graph cannot be launched":      func() error { return g.Launch(a) },
		"of another capture": func() error {
			_, err := driver.Capture(other, func() error {
				e := must.Get(other.Record())
				defer e.Release()
				return a.Wait(e)
			})
			return err
		},
		"stream closing was closed": func() error {
			c := must.Get(h.device(0).NewStream(driver.StreamOptions{Name: "closing"}))
			h.order(c, a)
			require.NoError(t, c.Close())
			return a.Memset(x.Ptr(), 1, 100)
		},
	} {
		_, err := driver.Capture(a, func() error {
			h.order(b, a)
			for _, err := range []error{wrong(), a.Memset(x.Ptr(), 1, 100), b.Memset(x.Ptr(), 1, 100)} {
				require.ErrorIs(t, err, driver.ErrCapture)
				require.ErrorContains(t, err, why)
			}
			return nil
		})
		require.ErrorIs(t, err, driver.ErrCapture)
		require.ErrorContains(t, err, why)
		require.NoError(t, a.Memset(x.Ptr(), 1, 100))
		h.order(b, a)
		require.NoError(t, b.Memset(x.Ptr(), 1, 100))
		h.order(a, b)
	}
	require.NoError(t, a.Wait(early))
	early.Release()
	require.NoError(t, h.settle())
}
