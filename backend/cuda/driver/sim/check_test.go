package sim_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
)

// TestOrders are small programs, and how many races they have: two uses of the
// same bytes without an order. What the goroutines do in a run does not matter.
func TestOrders(t *testing.T) {
	type world struct {
		*host
		a, b driver.Stream
		x, y driver.Memory
		h    driver.HostMemory
	}
	for name, c := range map[string]struct {
		races int
		run   func(w *world)
	}{
		"nothing in common": {0, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 50))
			require.NoError(w, w.b.Memset(w.x.Ptr()+50, 2, 50))
		}},
		"two reads": {0, func(w *world) {
			require.NoError(w, w.a.Copy(w.y.Ptr(), w.x.Ptr(), 50))
			require.NoError(w, w.b.Copy(w.y.Ptr()+50, w.x.Ptr(), 50))
		}},
		"two writes": {1, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 51))
			require.NoError(w, w.b.Memset(w.x.Ptr()+50, 2, 50))
		}},
		"read and write": {1, func(w *world) {
			require.NoError(w, w.a.Copy(w.y.Ptr(), w.x.Ptr(), 50))
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 1))
		}},
		"an event": {0, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			w.order(w.b, w.a)
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"an event that is too early": {1, func(w *world) {
			e := must.Get(w.a.Record())
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			require.NoError(w, w.b.Wait(e))
			e.Release()
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"a wait that is too late": {1, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			e := must.Get(w.a.Record())
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
			require.NoError(w, w.b.Wait(e))
			e.Release()
		}},
		"by way of a third stream": {0, func(w *world) {
			c := w.stream(0, "c")
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			w.order(c, w.a)
			w.order(w.b, c)
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"by way of the host": {0, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			w.wait(w.a)
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"the host waited for less": {1, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			w.wait(w.a)
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 1))
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"a word": {0, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			require.NoError(w, w.a.WriteValue(w.h.Ptr(), 7))
			require.NoError(w, w.b.WaitValue(w.h.Ptr(), 7, driver.Equal))
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"a word that is too early": {1, func(w *world) {
			require.NoError(w, w.a.WriteValue(w.h.Ptr(), 7))
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			require.NoError(w, w.b.WaitValue(w.h.Ptr(), 7, driver.Equal))
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"another word": {1, func(w *world) {
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 100))
			require.NoError(w, w.a.WriteValue(w.h.Ptr(), 7))
			w.h.Store32(4, 7)
			require.NoError(w, w.b.WaitValue(w.h.Ptr()+4, 7, driver.Equal))
			require.NoError(w, w.b.Memset(w.x.Ptr(), 2, 100))
		}},
		"the host sees a word": {0, func(w *world) {
			require.NoError(w, w.a.Copy(w.h.Ptr()+64, w.x.Ptr(), 10))
			require.NoError(w, w.a.WriteValue(w.h.Ptr(), 1))
			require.NoError(w, driver.AwaitWord(w.ctx, w.h, 0, 1, driver.AtLeast))
			driver.HostAccess(w.d, "looking", driver.Reads(w.h.Ptr()+64, 10))
		}},
		"the host does not look": {1, func(w *world) {
			require.NoError(w, w.a.Copy(w.h.Ptr()+64, w.x.Ptr(), 10))
			require.NoError(w, w.a.WriteValue(w.h.Ptr(), 1))
			driver.HostAccess(w.d, "looking", driver.Reads(w.h.Ptr()+64, 10))
		}},
		"the host's turn": {0, func(w *world) {
			require.NoError(w, w.a.WaitValue(w.h.Ptr(), 1, driver.AtLeast))
			require.NoError(w, w.a.Copy(w.x.Ptr(), w.h.Ptr()+64, 10))
			driver.HostAccess(w.d, "writing", driver.Writes(w.h.Ptr()+64, 10))
			w.h.Store32(0, 1)
		}},
		"the host writes after its turn": {1, func(w *world) {
			require.NoError(w, w.a.WaitValue(w.h.Ptr(), 1, driver.AtLeast))
			require.NoError(w, w.a.Copy(w.x.Ptr(), w.h.Ptr()+64, 10))
			w.h.Store32(0, 1)
			driver.HostAccess(w.d, "writing", driver.Writes(w.h.Ptr()+64, 10))
		}},
		"enqueued after the host has written": {0, func(w *world) {
			driver.HostAccess(w.d, "writing", driver.Writes(w.h.Ptr()+64, 10))
			require.NoError(w, w.a.Copy(w.x.Ptr(), w.h.Ptr()+64, 10))
		}},
		"a buffer that is used again while it is copied (T10)": {1, func(w *world) {
			driver.HostAccess(w.d, "the first call", driver.Writes(w.h.Ptr()+64, 10))
			require.NoError(w, w.a.Copy(w.x.Ptr(), w.h.Ptr()+64, 10))
			driver.HostAccess(w.d, "the second call", driver.Writes(w.h.Ptr()+64, 10))
		}},
		"freed while it is used": {1, func(w *world) {
			x := must.Get(w.gpu().Alloc(10))
			require.NoError(w, w.a.Memset(x.Ptr(), 1, 10))
			require.NoError(w, w.m.Quiesce(w.ctx), "it has ended, but the host has not seen it")
			require.NoError(w, x.Close())
		}},
		"freed when the host has waited": {0, func(w *world) {
			x := must.Get(w.gpu().Alloc(10))
			require.NoError(w, w.a.Memset(x.Ptr(), 1, 10))
			w.wait(w.a)
			require.NoError(w, x.Close())
		}},
		"kernels that meet": {0, func(w *world) {
			tell, hear := w.kernel(0, "tell"), w.kernel(0, "hear")
			w.launch(w.b, hear, driver.Shares(w.h.Ptr(), 4), driver.Reads(w.x.Ptr(), 15), driver.Writes(w.y.Ptr(), 15))
			w.launch(w.a, tell, driver.Shares(w.h.Ptr(), 4), driver.Writes(w.x.Ptr(), 15))
		}},
		"a kernel that does not wait": {1, func(w *world) {
			tell, hasty := w.kernel(0, "tell"), w.kernel(0, "hasty")
			w.launch(w.b, hasty, driver.Shares(w.h.Ptr(), 4), driver.Reads(w.x.Ptr(), 15), driver.Writes(w.y.Ptr(), 15))
			w.launch(w.a, tell, driver.Shares(w.h.Ptr(), 4), driver.Writes(w.x.Ptr(), 15))
		}},
		"a kernel that waits for a stream's word": {0, func(w *world) {
			hear := w.kernel(0, "hear")
			w.launch(w.b, hear, driver.Shares(w.h.Ptr(), 4), driver.Reads(w.x.Ptr(), 15), driver.Writes(w.y.Ptr(), 15))
			require.NoError(w, w.a.Memset(w.x.Ptr(), 1, 15))
			require.NoError(w, w.a.WriteValue(w.h.Ptr(), 1))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range someSeeds() {
				w := &world{host: open(t, sim.Config{Seed: seed, Quiet: c.races > 0})}
				w.a, w.b = w.stream(0, "a"), w.stream(0, "b")
				w.x, w.y, w.h = w.alloc(0, 100), w.alloc(0, 100), w.pinned(128)
				c.run(w)
				err := w.settle()
				require.Equal(t, c.races, races(err), "%v", err)
				if c.races == 0 {
					require.NoError(t, err)
				}
			}
		})
	}
}

// gpu returns the first device.
func (h *host) gpu() driver.Device { return h.device(0) }

// TestReport holds what a race says.
func TestReport(t *testing.T) {
	h := open(t, sim.Config{Quiet: true})
	a, b, x := h.stream(0, "a"), h.stream(0, "b"), h.alloc(0, 100)
	y := h.alloc(0, 100)
	require.NoError(t, a.Memset(x.Ptr(), 1, 60))
	require.NoError(t, b.Copy(y.Ptr(), x.Ptr()+50, 20))
	race := must.As[*sim.Race](t, h.settle())
	require.Equal(t, [2]int{50, 60}, [2]int{race.From, race.To})
	for _, want := range []string{"Memset of 60 bytes", "operation 1 of stream a", "Copy of 20 bytes", "operation 1 of stream b", "sim/check_test.go:", "device 0"} {
		require.Contains(t, race.Error(), want)
	}
	require.Regexp(t, `stream [ab] waits, before operation 1, for an event that stream [ab] records after operation 1`, race.Missing)
}

// TestLifetimes are uses of what is gone.
func TestLifetimes(t *testing.T) {
	t.Run("event released twice", func(t *testing.T) {
		h := open(t, sim.Config{})
		e, err := h.stream(0, "a").Record()
		require.NoError(t, err)
		require.NoError(t, e.Sync(h.ctx))
		e.Release()
		e.Release()
		require.ErrorIs(t, must.Err(e.Done()), driver.ErrClosed)
		require.ErrorIs(t, e.Sync(h.ctx), driver.ErrClosed)
		require.ErrorIs(t, h.stream(0, "b").Wait(e), driver.ErrClosed)
		l := must.As[*sim.Lifetime](t, h.settle())
		require.Contains(t, l.Error(), "released twice")
	})
	t.Run("memory used after it was freed", func(t *testing.T) {
		h := open(t, sim.Config{})
		x, err := h.gpu().Alloc(100)
		require.NoError(t, err)
		require.NoError(t, x.Close())
		s := h.stream(0, "a")
		require.ErrorIs(t, s.Memset(x.Ptr(), 1, 1), driver.ErrInvalid)
		require.ErrorIs(t, must.Err(x.Export()), driver.ErrClosed)
		require.NoError(t, h.settle())
	})
	t.Run("beyond the end", func(t *testing.T) {
		h := open(t, sim.Config{})
		x, s := h.alloc(0, 100), h.stream(0, "a")
		y := h.alloc(0, 200)
		require.ErrorIs(t, s.Memset(x.Ptr()+50, 1, 51), driver.ErrInvalid)
		require.ErrorIs(t, s.Memset(x.Ptr()-1, 1, 1), driver.ErrInvalid)
		require.ErrorIs(t, s.Copy(x.Ptr(), y.Ptr(), 101), driver.ErrInvalid)
		require.NoError(t, h.settle())
	})
	t.Run("a record for nobody (T13)", func(t *testing.T) {
		h := open(t, sim.Config{})
		e := must.Get(h.stream(0, "a").Record())
		e.Release()
		u := must.As[*sim.Unused](t, h.settle())
		require.Contains(t, u.Error(), "stream a")
		require.Contains(t, u.Error(), "sim/check_test.go:")
	})
	t.Run("leaks", func(t *testing.T) {
		h := open(t, sim.Config{Devices: 2})
		h.stream(0, "a")
		h.alloc(0, 100)
		h.pinned(10)
		h.kernel(1, "sum")
		require.NoError(t, h.device(0).EnablePeer(1))
		require.NoError(t, must.Get(h.stream(0, "b").Record()).Sync(h.ctx))
		text := fmt.Sprint(h.d.Close())
		for _, want := range []string{"stream a", "memory of 100 bytes on device 0", "page-locked memory of 10 bytes", "module on device 1", "peer access of device 0 to device 1", "event of stream b"} {
			require.Contains(t, text, want)
		}
	})
}

// TestFaults are kernels that do what they may not: the device is lost, and the
// report says why.
func TestFaults(t *testing.T) {
	for name, want := range map[string]string{
		"fail": "the kernel said no", "panic": "ouch", "beyond": "which Launch.Access does not have", "readonly": "which Launch.Access does not have",
	} {
		t.Run(name, func(t *testing.T) {
			h := open(t, sim.Config{Devices: 2})
			s, other, x := h.stream(0, "a"), h.stream(1, "b"), h.alloc(0, 100)
			acc := driver.Writes(x.Ptr(), 10)
			if name == "readonly" {
				acc.Mode = driver.Read
			}
			word := h.pinned(4)
			require.NoError(t, s.WaitValue(word.Ptr(), 1, driver.Equal))
			h.launch(s, h.kernel(0, name), acc)
			e := must.Get(s.Record())
			word.Store32(0, 1)
			require.ErrorIs(t, e.Sync(h.ctx), driver.ErrDeviceLost)
			ok, err := e.Done()
			require.True(t, ok)
			require.ErrorIs(t, err, driver.ErrDeviceLost)
			require.NoError(t, other.Wait(e))
			e.Release()
			require.ErrorIs(t, s.Err(), driver.ErrDeviceLost)
			require.ErrorIs(t, s.Memset(x.Ptr(), 1, 1), driver.ErrDeviceLost)
			require.ErrorIs(t, must.Err(h.device(0).Alloc(1)), driver.ErrDeviceLost)
			require.NoError(t, other.Err(), "the other device works")
			h.wait(other)
			var f *sim.Fault
			err = h.settle()
			require.ErrorAs(t, err, &f)
			require.Contains(t, f.Error(), want)
			require.Contains(t, f.Error(), "Launch of "+name)
		})
	}
}

func TestPeerAccess(t *testing.T) {
	h := open(t, sim.Config{Devices: 3, Topology: sim.Topology{NoPeer: func(from, to int) bool { return to == 2 }}})
	x, y := h.alloc(0, 10), h.alloc(1, 10)
	s, f := h.stream(0, "a"), h.kernel(0, "touch")
	launch := func(p driver.Ptr) error {
		return s.Launch(&driver.Launch{Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1},
			Args: new(driver.Args).Ptr(p).Int64(10), Access: []driver.Access{driver.Writes(p, 10)}})
	}
	require.NoError(t, launch(x.Ptr()))
	require.ErrorIs(t, launch(y.Ptr()), driver.ErrPeerAccess)
	require.ErrorIs(t, h.device(0).EnablePeer(2), driver.ErrPeerAccess)
	require.NoError(t, h.device(0).EnablePeer(1))
	require.NoError(t, launch(y.Ptr()))
	require.NoError(t, h.device(0).DisablePeer(1))
	require.ErrorIs(t, launch(y.Ptr()), driver.ErrPeerAccess)
	require.NoError(t, h.settle())
}

// TestLose breaks a device while streams of it and of another wait.
func TestLose(t *testing.T) {
	h := open(t, sim.Config{Devices: 2})
	a, b, c, word := h.stream(0, "a"), h.stream(1, "b"), h.stream(0, "c"), h.pinned(4)
	require.NoError(t, a.WaitValue(word.Ptr(), 1, driver.Equal)) // never comes
	e := must.Get(a.Record())
	require.NoError(t, c.Wait(e))
	last := must.Get(c.Record())
	h.m.Lose(0, errors.New("fell off the bus"))
	require.ErrorIs(t, e.Sync(h.ctx), driver.ErrDeviceLost)
	require.ErrorContains(t, last.Sync(h.ctx), "fell off the bus")
	e.Release()
	last.Release()
	h.wait(b)
	require.NoError(t, h.settle())
}

// TestStuck are programs that can never go on.
func TestStuck(t *testing.T) {
	t.Run("a word that nobody writes", func(t *testing.T) {
		h := open(t, sim.Config{})
		a, b, word := h.stream(0, "a"), h.stream(0, "b"), h.pinned(4)
		require.NoError(t, a.WaitValue(word.Ptr(), 1, driver.Equal))
		h.order(b, a)
		s := must.As[*sim.Stuck](t, h.m.Settle(h.ctx))
		require.Len(t, s.Waits, 2)
		require.Contains(t, s.Waits[0], "stream a at operation 1")
		require.Contains(t, s.Waits[0], "a word that is 0")
		require.Contains(t, s.Waits[1], "waits for operation 2 of stream a")
		require.ErrorAs(t, h.close(), &s)
	})
	t.Run("a context that ends", func(t *testing.T) {
		h := open(t, sim.Config{Kernels: map[string]sim.Kernel{"spin": func(k *sim.Run) error {
			k.Spin(func() bool { return false })
			return nil
		}}})
		s := h.stream(0, "a")
		h.launch(s, h.kernel(0, "spin"))
		ctx, cancel := context.WithCancel(h.ctx)
		cancel()
		require.ErrorIs(t, h.m.Settle(ctx), context.Canceled)
		h.m.Lose(0, nil)
		require.NoError(t, h.settle())
	})
}

// TestClocksOfProcesses has ranks of a ring that read each other's memory through
// handles, ordered by words in device memory; worlds 1 to 9.
func TestClocksOfProcesses(t *testing.T) {
	for world := 1; world <= 9; world++ {
		for _, left := range []string{"", "WaitValue", "WriteValue"} {
			t.Run(fmt.Sprintf("%d without %q", world, left), func(t *testing.T) {
				m := must.Get(sim.New(sim.Config{Devices: world, Seed: uint64(world), Quiet: left != ""}))
				const n = 100
				var ranks []*host
				var bufs, outs, words []driver.Memory
				var streams []driver.Stream
				for r := range world {
					d := must.Get(m.Process(fmt.Sprint("rank", r)))
					h := newHost(t, d)
					ranks = append(ranks, h)
					streams = append(streams, h.stream(r, "s"))
					bufs = append(bufs, h.alloc(r, n))
					outs = append(outs, h.alloc(r, n))
					words = append(words, h.alloc(r, 8)) // from the left, from the right
					require.NoError(t, streams[r].Memset(words[r].Ptr(), 0, 8))
					h.wait(streams[r])
				}
				if left != "" {
					m.Skip(func(c sim.Call) bool { return c.Name == left && c.Stream == "rank0/s" })
				}
				// Everybody maps the memory of the left and the word of the right.
				for r, h := range ranks {
					if world == 1 {
						break
					}
					from, to := (r+world-1)%world, (r+1)%world
					mapped := func(mem driver.Memory) driver.Ptr {
						handle := must.Get(mem.Export())
						o := must.Get(h.device(r).OpenMemory(handle))
						h.closers = append([]interface{ Close() error }{o}, h.closers...)
						return o.Ptr()
					}
					in, right, lefts := mapped(bufs[from]), mapped(words[to]), mapped(words[from])
					require.NoError(t, streams[r].Memset(bufs[r].Ptr(), byte(r+1), n))
					require.NoError(t, streams[r].WriteValue(right, 1))
					require.NoError(t, streams[r].WaitValue(words[r].Ptr(), 1, driver.AtLeast))
					require.NoError(t, streams[r].Copy(outs[r].Ptr(), in, n))
					// Nobody may free or write before the right has read.
					require.NoError(t, streams[r].WriteValue(lefts+4, 1))
					require.NoError(t, streams[r].WaitValue(words[r].Ptr()+4, 1, driver.AtLeast))
				}
				err := m.Quiesce(ranks[0].ctx)
				if left == "WriteValue" && world > 1 {
					must.As[*sim.Stuck](t, err)
					require.Error(t, m.Close())
					return
				}
				require.NoError(t, err)
				for r, h := range ranks {
					back := h.pinned(n)
					require.NoError(t, streams[r].Copy(back.Ptr(), outs[r].Ptr(), n))
					h.wait(streams[r])
					if left == "" && world > 1 {
						require.Equal(t, byte((r+world-1)%world+1), back.Bytes()[n-1])
					}
				}
				for _, h := range ranks {
					for _, c := range h.closers {
						require.NoError(t, c.Close())
					}
				}
				err = m.Close()
				if left == "" || world == 1 {
					require.NoError(t, err)
				} else {
					require.Positive(t, races(err), "%v", err)
				}
			})
		}
	}
}

// TestOrdersOfTwoMachines: memory of another machine in the same folder, which may have the same number as memory of this
// one, is other memory to the checker.
func TestOrdersOfTwoMachines(t *testing.T) {
	c := sim.Config{Devices: 2, Dir: t.TempDir()}
	m, err := sim.New(c)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, errors.Join(err, m.Close()))
	here, there := open(t, c), open(t, c)
	mine, theirs := here.alloc(0, 100), there.alloc(0, 100)
	handle := must.Get(theirs.Export())
	opened := must.Get(here.device(0).OpenMemory(handle))
	here.closers = append(here.closers, opened)
	require.NoError(t, here.stream(0, "a").Memset(mine.Ptr(), 1, 100))
	b := here.stream(0, "b")
	require.NoError(t, b.Memset(opened.Ptr(), 2, 100))
	require.NoError(t, here.settle())
	require.NoError(t, there.settle())
}
