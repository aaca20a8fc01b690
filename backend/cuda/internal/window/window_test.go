package window_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// host is a simulated host with the ranks' drivers, of one process or of one each.
type host struct {
	m *sim.Machine
	d []driver.Driver
}

func newHost(t *testing.T, c sim.Config, ranks int, apart bool) host {
	t.Helper()
	m := must.Get(sim.New(c))
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	h := host{m: m}
	for r := range ranks {
		if r > 0 && !apart {
			h.d = append(h.d, h.d[0])
			continue
		}
		d := must.Get(m.Process(fmt.Sprint("process ", r)))
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		h.d = append(h.d, d)
	}
	return h
}

func (h host) options(t *testing.T, rank, device int) window.Options {
	t.Helper()
	v := must.Get(h.d[rank].Device(device))
	return window.Options{Driver: h.d[rank], Device: v, Rank: rank, Ranks: len(h.d), Channels: 2, Depth: 8}
}

// make makes all windows, with a device for each rank.
func (h host) make(t *testing.T) (all []*window.Window) {
	t.Helper()
	for r := range h.d {
		w := must.Get(window.New(t.Context(), h.options(t, r, r)))
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		all = append(all, w)
	}
	return all
}

// together runs a function for all ranks, and gives them an exchange.
func together(ranks int, f func(rank int, exchange window.Exchange) error) []error {
	type round struct {
		whys []error
		all  [][]byte
		left int
		done chan struct{}
	}
	newRound := func() *round { return &round{make([]error, ranks), make([][]byte, ranks), ranks, make(chan struct{})} }
	var mu sync.Mutex
	current := newRound()
	exchange := func(rank int) window.Exchange {
		return func(why error, mine []byte) (error, [][]byte, error) {
			mu.Lock()
			now := current
			now.whys[rank], now.all[rank] = why, bytes.Clone(mine)
			if now.left--; now.left == 0 {
				current = newRound()
				close(now.done)
			}
			mu.Unlock()
			<-now.done
			return cmp.Or(now.whys...), slices.Clone(now.all), nil
		}
	}
	errs := make([]error, ranks)
	var wait sync.WaitGroup
	for r := range ranks {
		wait.Go(func() { errs[r] = f(r, exchange(r)) })
	}
	wait.Wait()
	return errs
}

func connect(t *testing.T, all []*window.Window) []error {
	return together(len(all), func(r int, e window.Exchange) error {
		reason, err := all[r].Connect(t.Context(), e)
		return cmp.Or(reason, err)
	})
}

// read returns words of device memory, through page-locked memory.
func read(t *testing.T, d driver.Driver, v driver.Device, p driver.Ptr, n int) []byte {
	t.Helper()
	s := must.Get(v.NewStream())
	defer s.Close()
	h := must.Get(d.AllocHost(n))
	defer h.Close()
	require.NoError(t, s.Copy(h.Ptr(), p, n))
	settle(t, s)
	return bytes.Clone(h.Bytes())
}

func settle(t *testing.T, s driver.Stream) {
	t.Helper()
	e := must.Get(s.Record())
	defer e.Release()
	require.NoError(t, e.Sync(t.Context()))
}

// TestConnect holds that each rank reaches the others' rings, credits and nothing else of
// theirs, and that all begin clear.
func TestConnect(t *testing.T) {
	for _, ranks := range []int{2, 3, 8} {
		for _, apart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d ranks, apart %v", ranks, apart), func(t *testing.T) {
				h := newHost(t, sim.Config{Devices: ranks, NoCheck: true}, ranks, apart)
				all := h.make(t)
				require.NoError(t, errors.Join(connect(t, all)...))
				slots, keys := 2*8*window.SlotBytes(ranks), 2*8*window.KeyBytes
				for r, w := range all {
					own := w.Own()
					require.Equal(t, bytes.Repeat([]byte{0xff}, slots*(ranks-1)), read(t, h.d[r], w.Device(), own.Slots, slots*(ranks-1)))
					require.Equal(t, bytes.Repeat([]byte{0xff}, keys*(ranks-1)), read(t, h.d[r], w.Device(), own.Keys, keys*(ranks-1)))
					require.Equal(t, make([]byte, 64), read(t, h.d[r], w.Device(), own.Credit, 64))
					require.Equal(t, make([]byte, 16), read(t, h.d[r], w.Device(), own.State, 16))
					require.Equal(t, make([]byte, 4), read(t, h.d[r], w.Device(), own.Failed, 4))
					_, _, shared := w.SharedDevice()
					require.False(t, shared)
				}
				// Each rank writes its number into its ring and its credit at each peer.
				for r, w := range all {
					s := must.Get(w.Device().NewStream())
					for p := range ranks {
						if p == r {
							continue
						}
						at := w.Peer(p)
						require.NoError(t, s.Memset(at.Slots, byte(r), slots))
						require.NoError(t, s.Memset(at.Keys, byte(r), keys))
						require.NoError(t, s.Memset(at.Credit, byte(r), 4))
					}
					settle(t, s)
					require.NoError(t, s.Close())
				}
				for r, w := range all {
					own, from := w.Own(), 0
					credit := read(t, h.d[r], w.Device(), own.Credit, 4*window.MostRanks)
					for p := range ranks {
						if p == r {
							require.Equal(t, make([]byte, 4), credit[4*p:][:4])
							continue
						}
						require.Equal(t, bytes.Repeat([]byte{byte(p)}, 4), credit[4*p:][:4])
						require.Equal(t, bytes.Repeat([]byte{byte(p)}, slots), read(t, h.d[r], w.Device(), own.Slots+driver.Ptr(from*slots), slots))
						require.Equal(t, bytes.Repeat([]byte{byte(p)}, keys), read(t, h.d[r], w.Device(), own.Keys+driver.Ptr(from*keys), keys))
						from++
					}
				}
				require.Error(t, must.Err(all[0].Connect(t.Context(), nil)), "a second time")
				for _, w := range all {
					require.NoError(t, w.Detach())
				}
			})
		}
	}
}

// TestConnectFails holds that all ranks fail if one does, with its number and device.
func TestConnectFails(t *testing.T) {
	wants := func(t *testing.T, errs []error, texts ...string) {
		t.Helper()
		for r, err := range errs {
			for _, text := range texts {
				require.ErrorContains(t, err, text, "rank %d", r)
			}
		}
	}
	t.Run("no peer access", func(t *testing.T) {
		c := sim.Config{Devices: 3, Topology: sim.Topology{NoPeer: func(from, to int) bool { return from == 2 && to == 1 }}}
		for _, apart := range []bool{false, true} {
			errs := connect(t, newHost(t, c, 3, apart).make(t))
			wants(t, errs, "rank 2 on device 2: the memory of rank 1 on its device 1: ", "no peer access")
			require.ErrorIs(t, errs[2], driver.ErrPeerAccess)
		}
	})
	t.Run("other options", func(t *testing.T) {
		h := newHost(t, sim.Config{Devices: 2}, 2, true)
		var all []*window.Window
		for r := range 2 {
			o := h.options(t, r, r)
			o.Depth = 4 << r
			w := must.Get(window.New(t.Context(), o))
			defer w.Close()
			all = append(all, w)
		}
		errs := connect(t, all)
		wants(t, errs, "all ranks need the same Options")
		require.ErrorContains(t, errs[0], "channels of lanes and of the ring are [2 4 0 0], those of rank 1 [2 8 0 0]")
	})
	t.Run("exchange", func(t *testing.T) {
		w := newHost(t, sim.Config{Devices: 2}, 2, true).make(t)[0]
		gone := errors.New("rank 1 has gone")
		_, err := w.Connect(t.Context(), func(error, []byte) (error, [][]byte, error) { return nil, nil, gone })
		require.ErrorIs(t, err, gone)
		reason, err := w.Connect(t.Context(), func(why error, b []byte) (error, [][]byte, error) {
			return why, [][]byte{b, make([]byte, len(b))}, nil
		})
		require.NoError(t, err)
		require.ErrorContains(t, reason, "the handle of rank 1")
	})
	t.Run("calls", func(t *testing.T) {
		// Whatever call of a driver fails, nothing is left behind and nothing hangs.
		for k := range 40 {
			h := newHost(t, sim.Config{Devices: 2, NoDelays: true}, 2, true)
			o := []window.Options{h.options(t, 0, 0), h.options(t, 1, 1)}
			failed := false
			h.m.Inject(func(c sim.Call) error {
				if c.N == k {
					failed = true
					return driver.ErrOutOfMemory
				}
				return nil
			})
			var all []*window.Window
			for r := range 2 {
				w, err := window.New(t.Context(), o[r])
				if err != nil {
					require.ErrorContains(t, err, fmt.Sprintf("rank %d on device %d", r, r))
					break
				}
				all = append(all, w)
			}
			if len(all) == 2 {
				if errs := connect(t, all); errs[0] != nil || errs[1] != nil {
					wants(t, errs, "out of memory", "window: rank")
				}
			}
			h.m.Inject(nil)
			for _, w := range all {
				require.NoError(t, w.Detach())
			}
			for _, w := range all {
				require.NoError(t, w.Close())
			}
			if !failed {
				return
			}
		}
	})
}

// TestOptions holds what New refuses.
func TestOptions(t *testing.T) {
	h := newHost(t, sim.Config{Devices: 2}, 2, true)
	for _, c := range []struct {
		change func(o *window.Options)
		why    string
	}{
		{func(o *window.Options) { o.Driver = nil }, "Options.Driver"},
		{func(o *window.Options) { o.Ranks = 1 }, "rank 0 of 1"},
		{func(o *window.Options) { o.Ranks = 9 }, "rank 0 of 9"},
		{func(o *window.Options) { o.Rank = 2 }, "rank 2 of 2"},
		{func(o *window.Options) { o.Channels = -1 }, "-1 channels"},
		{func(o *window.Options) { o.Depth = 6 }, "6 slots"},
		{func(o *window.Options) { o.Depth = 2 }, "2 slots"},
	} {
		o := h.options(t, 0, 0)
		c.change(&o)
		require.ErrorContains(t, must.Err(window.New(t.Context(), o)), c.why)
	}
	o := h.options(t, 0, 0)
	o.Channels, o.Depth = 0, 0
	w := must.Get(window.New(t.Context(), o))
	channels, depth := w.Shape()
	require.Equal(t, [2]int{2048, 16}, [2]int{channels, depth})
	require.NoError(t, w.Close())
	require.NoError(t, w.Close())
	require.Error(t, must.Err(w.Connect(t.Context(), nil)))
}

// TestAbort holds what Abort and Reset do to the words.
func TestAbort(t *testing.T) {
	h := newHost(t, sim.Config{Devices: 2}, 2, false)
	all := h.make(t)
	require.Error(t, all[0].Reset(t.Context(), nil), "not connected")
	require.NoError(t, errors.Join(connect(t, all)...))
	w := all[0]
	require.NoError(t, w.Err())
	w.Abort()
	require.ErrorIs(t, w.Err(), window.ErrAborted)
	// What a kernel reports comes before that.
	s := must.Get(w.Device().NewStream())
	for i, v := range []uint32{2, 1, 7, 9} {
		require.NoError(t, s.WriteValue(w.Own().Host+4+driver.Ptr(4*i), v))
	}
	require.NoError(t, s.Memset(w.Own().Slots, 5, 100))
	require.NoError(t, s.WriteValue(w.Own().Failed, 1))
	settle(t, s)
	f := must.As[*window.Failure](t, w.Err())
	require.Equal(t, window.Failure{Peer: 1, Channel: 7, Tile: 9}, *f)
	require.EqualError(t, f, "window: a kernel of rank 0 on device 0 waited too long for rank 1 (channel 7, tile 9)")
	require.NoError(t, errors.Join(together(2, func(r int, e window.Exchange) error { return all[r].Reset(t.Context(), e) })...))
	require.NoError(t, w.Err())
	require.Equal(t, bytes.Repeat([]byte{0xff}, 100), read(t, h.d[0], w.Device(), w.Own().Slots, 100))
	require.Equal(t, make([]byte, 4), read(t, h.d[0], w.Device(), w.Own().Failed, 4))
	require.NoError(t, s.Close())
	for _, w := range all {
		require.NoError(t, w.Detach())
		w.Abort() // is nothing to a closed window
	}
}

// TestSharedDevice holds that ranks can share a device, and know it.
func TestSharedDevice(t *testing.T) {
	h := newHost(t, sim.Config{Devices: 2}, 3, true)
	var all []*window.Window
	for r, device := range []int{0, 1, 1} {
		w := must.Get(window.New(t.Context(), h.options(t, r, device)))
		defer func() { require.NoError(t, w.Close()) }()
		all = append(all, w)
	}
	require.NoError(t, errors.Join(connect(t, all)...))
	for _, w := range all {
		a, b, shared := w.SharedDevice()
		require.Equal(t, []any{1, 2, true}, []any{a, b, shared})
	}
	for _, w := range all {
		require.NoError(t, w.Detach())
	}
}
