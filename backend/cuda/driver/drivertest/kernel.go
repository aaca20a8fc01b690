package drivertest

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

func testKernels(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	fill, add := t.function(v, Fill), t.function(v, Add)
	require.Equal(t, Fill, fill.Name())
	require.Equal(t, v.ID(), fill.Device())
	const room = 1 << 16
	a, b := t.alloc(v, 4*room), t.alloc(v, 4*room)
	for _, n := range []int{1, 31, 32, 33, 1000, room} {
		for _, shape := range [][2]uint32{{1, 1}, {1, 32}, {3, 1024}, {200, 256}} {
			launch := func(f driver.Function, args *driver.Args, access ...driver.Access) {
				require.NoError(t, s.Launch(&driver.Launch{
					Function: f, Grid: driver.Dim{X: shape[0]}, Block: driver.Dim{X: shape[1], Y: 1}, Args: args, Access: access,
				}))
			}
			require.NoError(t, s.Memset(a.Ptr(), 0, 4*room))
			var args driver.Args
			launch(fill, args.Reset().Ptr(a.Ptr()).Uint32(40).Uint32(uint32(n)), driver.Writes(a.Ptr(), 4*n))
			launch(fill, args.Reset().Ptr(b.Ptr()).Uint32(2).Uint32(room), driver.Writes(b.Ptr(), 4*room))
			launch(add, args.Reset().Ptr(a.Ptr()).Ptr(b.Ptr()).Uint32(uint32(n)), driver.Writes(a.Ptr(), 4*n), driver.Reads(b.Ptr(), 4*n))
			got := t.get(s, a.Ptr(), 4*room)
			require.Equal(t, repeat(42, n), got[:4*n], "%d words, %v", n, shape)
			require.Equal(t, make([]byte, 4*(room-n)), got[4*n:], "%d words, %v", n, shape)
		}
	}
}

func testParams(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	f := t.function(v, Params)
	out := t.alloc(v, 44)
	table := words(11, 12, 13, 14, 15, 16, 17, 18)
	args := new(driver.Args).Ptr(out.Ptr()).Uint32(0xffffffff).Struct(table, 8).Uint32(20).Float32(1.5)
	require.NoError(t, s.Launch(&driver.Launch{
		Function: f, Grid: driver.Dim{X: 2}, Block: driver.Dim{X: 32}, Args: args, Access: []driver.Access{driver.Writes(out.Ptr(), 44)},
	}))
	args.Reset().Ptr(0) // the launch has its own copy
	require.Equal(t, words(0xffffffff, 11, 12, 13, 14, 15, 16, 17, 18, 20, math.Float32bits(1.5)), t.get(s, out.Ptr(), 44))
}

func testRefusedLaunches(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	f := t.function(v, Fill)
	m := t.alloc(v, 400)
	t.put(s, m.Ptr(), pattern(400, 1))
	good := driver.Launch{
		Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1},
		Args: new(driver.Args).Ptr(m.Ptr()).Uint32(0).Uint32(100), Access: []driver.Access{driver.Writes(m.Ptr(), 400)},
	}
	for what, change := range map[string]func(l *driver.Launch){
		"no function":     func(l *driver.Launch) { l.Function = nil },
		"no blocks":       func(l *driver.Launch) { l.Grid = driver.Dim{} },
		"no threads":      func(l *driver.Launch) { l.Block = driver.Dim{} },
		"many threads":    func(l *driver.Launch) { l.Block.X = 1025 },
		"many threads up": func(l *driver.Launch) { l.Block = driver.Dim{X: 64, Y: 64} },
		"tall grid":       func(l *driver.Launch) { l.Grid.Y = 1 << 16 },
		"wide grid":       func(l *driver.Launch) { l.Grid.X = 1 << 31 },
		"shared memory":   func(l *driver.Launch) { l.Shared = 1 << 20 },
		"negative shared": func(l *driver.Launch) { l.Shared = -1 },
		"bad access":      func(l *driver.Launch) { l.Access = []driver.Access{{Ptr: m.Ptr(), Len: -1, Mode: driver.Read}} },
		"no mode":         func(l *driver.Launch) { l.Access = []driver.Access{{Ptr: m.Ptr(), Len: 1}} },
		"many parameters": func(l *driver.Launch) { l.Args = new(driver.Args).Struct(make([]byte, 5000), 8) },
	} {
		l := good
		change(&l)
		t.refused(s.Launch(&l), "Launch", driver.ErrInvalid)
		require.NoError(t, s.Err(), what)
	}
	t.refused(s.Launch(nil), "Launch", driver.ErrInvalid)
	require.Equal(t, pattern(400, 1), t.get(s, m.Ptr(), 400), "no byte has changed")
	if t.d.Count() > 1 {
		other := good
		other.Function = t.function(t.device(1), Fill)
		t.refused(s.Launch(&other), "Launch", driver.ErrInvalid)
	}
	require.NoError(t, s.Launch(&good))
	require.Equal(t, make([]byte, 400), t.get(s, m.Ptr(), 400))
}

func testModules(t *suite) {
	v := t.device(0)
	m, err := v.Load(t.Image)
	require.NoError(t, err)
	_, err = m.Function("c10d_test_nothing")
	t.refused(err, "Function", driver.ErrNotFound)
	_, err = m.Function("")
	t.refused(err, "Function", driver.ErrNotFound)
	f, err := m.Function(Fill)
	require.NoError(t, err)
	n, err := f.Blocks(256, 0)
	require.NoError(t, err)
	require.Positive(t, n)
	more, err := f.Blocks(1024, 0)
	require.NoError(t, err)
	require.LessOrEqual(t, more, n)
	require.NoError(t, f.SetShared(v.Info().SharedMemory))
	require.Error(t, f.SetShared(1<<30))
	again, err := v.Load(t.Image)
	require.NoError(t, err, "the same image once more")
	require.NoError(t, again.Close())
	require.NoError(t, m.Close())
	require.NoError(t, m.Close(), "closed twice")
	_, err = m.Function(Fill)
	t.refused(err, "Function", driver.ErrClosed)
	for _, bad := range []string{"", "no image at all", ".version 999.0\n.target nothing\n.address_size 64\n.entry {{{"} {
		_, err := v.Load([]byte(bad))
		t.refused(err, "Load", driver.ErrImage)
	}
	t.finish(t.stream(v))
}

// testKeep has kernels loaded in advance, launches them after a module that was loaded
// like any other has been closed, and while a stream waits for a word.
func testKeep(t *suite) {
	if _, ok := t.d.(driver.Keeper); !ok {
		t.Skip("the driver keeps no kernels")
	}
	driver.Keep(t.d, []byte("no image at all"), Fill)
	driver.Keep(t.d, t.Image, Fill, "c10d_test_nothing")
	for i := range t.d.Count() {
		v := t.device(i)
		// Before a stream waits: making memory may wait for that.
		s, held, mem, h, g := t.stream(v), t.stream(v), t.alloc(v, 400), t.host(400), t.gates(1)[0]
		_, err := v.Load([]byte("no image at all"))
		t.refused(err, "Load", driver.ErrImage)
		for round := range 3 {
			m, err := v.Load(t.Image)
			require.NoError(t, err)
			f, err := m.Function(Fill)
			require.NoError(t, err)
			if round == 0 {
				_, err = m.Function("c10d_test_nothing")
				t.refused(err, "Function", driver.ErrNotFound)
				g.hold(t, held)
			}
			t.fill(s, f, mem.Ptr(), uint32(round), 100)
			require.NoError(t, s.Copy(h.Ptr(), mem.Ptr(), 400))
			t.finish(s)
			require.Equal(t, repeat(uint32(round), 100), h.Bytes())
			require.NoError(t, m.Close())
			t.refused(s.Launch(&driver.Launch{
				Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1},
				Args: new(driver.Args).Ptr(mem.Ptr()).Uint32(0).Uint32(1), Access: []driver.Access{driver.Writes(mem.Ptr(), 4)},
			}), "Launch", driver.ErrClosed)
			_, err = m.Function(Fill)
			t.refused(err, "Function", driver.ErrClosed)
		}
		g.open()
		t.finish(held)
	}
}

// testKernelStreams lets kernels of several streams work on one array, each
// after the one before by an event.
func testKernelStreams(t *suite) {
	v := t.device(0)
	const n, lanes = 2000, 4
	add, delay := t.function(v, Add), t.function(v, Delay)
	a, one := t.alloc(v, 4*n), t.alloc(v, 4*n)
	var s [lanes]driver.Stream
	for i := range s {
		s[i] = t.stream(v)
	}
	t.put(s[0], one.Ptr(), repeat(1, n))
	require.NoError(t, s[0].Memset(a.Ptr(), 0, 4*n))
	rounds := 20 * t.Rounds
	for i := range rounds {
		from, to := s[i%lanes], s[(i+1)%lanes]
		t.launch(from, delay, new(driver.Args).Uint64(20_000))
		t.add(from, add, a.Ptr(), one.Ptr(), n)
		t.after(to, from)
	}
	require.Equal(t, repeat(uint32(rounds), n), t.get(s[rounds%lanes], a.Ptr(), 4*n))
}

func testKernelHost(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	add := t.function(v, Add)
	const n = 1000
	h, m := t.host(4*n), t.alloc(v, 4*n)
	copy(h.Bytes(), repeat(3, n))
	t.put(s, m.Ptr(), repeat(4, n))
	t.add(s, add, h.Ptr(), m.Ptr(), n)
	t.finish(s)
	require.Equal(t, repeat(7, n), h.Bytes())
	t.add(s, add, m.Ptr(), h.Ptr(), n)
	require.Equal(t, repeat(11, n), t.get(s, m.Ptr(), 4*n))
}

// testKernelAwait lets a running kernel see what the host, and another stream,
// write meanwhile.
func testKernelAwait(t *suite) {
	v := t.device(0)
	s, other := t.stream(v), t.stream(v)
	await := t.function(v, Await)
	h := t.host(8)
	t.launch(s, await, new(driver.Args).Ptr(h.Ptr()).Uint32(1), driver.Shares(h.Ptr(), 4))
	require.NoError(t, s.WriteValue(h.Ptr()+4, 1))
	e, err := s.Record()
	require.NoError(t, err)
	t.pending(e)
	require.Zero(t, h.Load32(4))
	h.Store32(0, 1)
	t.passes(e)
	e.Release()
	require.Equal(t, uint32(1), h.Load32(4))

	t.launch(s, await, new(driver.Args).Ptr(h.Ptr()).Uint32(2), driver.Shares(h.Ptr(), 4))
	e, err = s.Record()
	require.NoError(t, err)
	defer e.Release()
	t.pending(e)
	require.NoError(t, other.WriteValue(h.Ptr(), 2))
	t.passes(e)
	t.finish(other)
}

func testPeer(t *suite) {
	v, w := t.two()
	l, err := t.d.Link(0, 1)
	require.NoError(t, err)
	for _, bad := range []int{-1, 0, t.d.Count()} {
		t.refused(v.EnablePeer(bad), "EnablePeer", driver.ErrInvalid)
	}
	if !l.Peer {
		t.refused(v.EnablePeer(1), "EnablePeer", driver.ErrPeerAccess)
		t.Skip("no peer access")
	}
	require.NoError(t, v.EnablePeer(1))
	require.NoError(t, v.EnablePeer(1), "twice")
	const n = 5000
	s, r := t.stream(v), t.stream(w)
	add := t.function(v, Add)
	a, b := t.alloc(v, 4*n), t.alloc(w, 4*n)
	t.put(s, a.Ptr(), repeat(1, n))
	t.put(r, b.Ptr(), repeat(2, n))
	t.add(s, add, a.Ptr(), b.Ptr(), n) // reads the peer
	t.add(s, add, b.Ptr(), a.Ptr(), n) // writes the peer
	t.finish(s)
	require.Equal(t, repeat(3, n), t.get(s, a.Ptr(), 4*n))
	require.Equal(t, repeat(5, n), t.get(r, b.Ptr(), 4*n))
	late := t.alloc(w, 4*n) // memory that came after EnablePeer
	t.put(r, late.Ptr(), repeat(10, n))
	t.add(s, add, a.Ptr(), late.Ptr(), n)
	t.finish(s)
	require.Equal(t, repeat(13, n), t.get(s, a.Ptr(), 4*n))
	require.NoError(t, v.DisablePeer(1))
	require.NoError(t, v.DisablePeer(1), "twice")
	require.NoError(t, v.EnablePeer(1), "once more")
	require.NoError(t, v.DisablePeer(1))
}

// testGoroutines uses one driver from many goroutines, each with memory of its
// own, several on one stream.
func testGoroutines(t *suite) {
	v := t.device(t.d.Count() - 1)
	const workers, n = 8, 3000
	streams := []driver.Stream{t.stream(v), t.stream(v), t.stream(v)}
	fill, add := t.function(v, Fill), t.function(v, Add)
	err := each(workers, func(i int) error {
		s, other := streams[i%len(streams)], streams[(i+1)%len(streams)]
		a, err := v.Alloc(4 * n)
		if err != nil {
			return err
		}
		defer a.Close()
		b, err := v.Alloc(4 * n)
		if err != nil {
			return err
		}
		defer b.Close()
		h, err := t.d.AllocHost(4 * n)
		if err != nil {
			return err
		}
		defer h.Close()
		var args driver.Args
		launch := func(s driver.Stream, f driver.Function, access ...driver.Access) error {
			return s.Launch(&driver.Launch{Function: f, Grid: driver.Dim{X: 8}, Block: driver.Dim{X: 64}, Args: &args, Access: access})
		}
		order := func(s, after driver.Stream) error {
			e, err := after.Record()
			if err != nil {
				return err
			}
			defer e.Release()
			return s.Wait(e)
		}
		for round := range 10 * t.Rounds {
			x := uint32(1000*i + round)
			args.Reset().Ptr(a.Ptr()).Uint32(x).Uint32(n)
			if err := launch(s, fill, driver.Writes(a.Ptr(), 4*n)); err != nil {
				return err
			}
			args.Reset().Ptr(b.Ptr()).Uint32(x).Uint32(n)
			if err := launch(other, fill, driver.Writes(b.Ptr(), 4*n)); err != nil {
				return err
			}
			if err := order(s, other); err != nil {
				return err
			}
			args.Reset().Ptr(a.Ptr()).Ptr(b.Ptr()).Uint32(n)
			if err := launch(s, add, driver.Writes(a.Ptr(), 4*n), driver.Reads(b.Ptr(), 4*n)); err != nil {
				return err
			}
			if err := s.Copy(h.Ptr(), a.Ptr(), 4*n); err != nil {
				return err
			}
			if err := order(other, s); err != nil {
				return err
			}
			e, err := s.Record()
			if err != nil {
				return err
			}
			err = e.Sync(t.ctx)
			e.Release()
			if err != nil {
				return err
			}
			if got := string(h.Bytes()); got != string(repeat(2*x, n)) {
				return fmt.Errorf("worker %d, round %d: wrong words", i, round)
			}
		}
		return nil
	})
	require.NoError(t, err)
	t.finish(streams...)
}

// testPipeline moves chunks down to the host and back up through two slots of page-locked memory.
// Words tell when it is the host's turn. All operations are enqueued before the first one runs.
func testPipeline(t *suite) {
	v := t.device(0)
	down, up := t.stream(v), t.stream(v)
	const chunk, chunks, slots = 8192, 16, 2
	in, out := t.alloc(v, chunk*chunks), t.alloc(v, chunk*chunks)
	t.put(down, in.Ptr(), pattern(chunk*chunks, 1))
	staging, flags := t.host(chunk*slots), t.host(256)
	there, back, taken := flags.Ptr(), flags.Ptr()+64, flags.Ptr()+128
	for c := range chunks {
		slot := staging.Ptr() + driver.Ptr(c%slots*chunk)
		if c >= slots {
			require.NoError(t, down.WaitValue(taken, uint32(c-slots+1), driver.AtLeast))
		}
		require.NoError(t, down.Copy(slot, in.Ptr()+driver.Ptr(c*chunk), chunk))
		require.NoError(t, down.WriteValue(there, uint32(c+1)))
		require.NoError(t, up.WaitValue(back, uint32(c+1), driver.AtLeast))
		require.NoError(t, up.Copy(out.Ptr()+driver.Ptr(c*chunk), slot, chunk))
		require.NoError(t, up.WriteValue(taken, uint32(c+1)))
	}
	for c := range chunks {
		require.NoError(t, driver.AwaitWord(t.ctx, flags, 0, uint32(c+1), driver.AtLeast))
		slot := staging.Bytes()[c%slots*chunk:][:chunk]
		driver.HostAccess(t.d, "the host's turn", driver.Writes(staging.Ptr()+driver.Ptr(c%slots*chunk), chunk))
		for i := range slot {
			slot[i] ^= 0xff
		}
		flags.Store32(64, uint32(c+1))
	}
	t.finish(down)
	want := pattern(chunk*chunks, 1)
	for i := range want {
		want[i] ^= 0xff
	}
	require.Equal(t, want, t.get(up, out.Ptr(), chunk*chunks))
}

func testAllocs(t *suite) {
	if t.MaxAllocs < 0 {
		t.Skip("not promised")
	}
	v := t.device(0)
	a, b := t.stream(v), t.stream(v)
	m, h := t.alloc(v, 4096), t.host(4096)
	l := &driver.Launch{
		Function: t.function(v, Fill), Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 32},
		Args: new(driver.Args), Access: make([]driver.Access, 1),
	}
	round := func() error {
		l.Args.Reset().Ptr(m.Ptr()).Uint32(1).Uint32(1024)
		l.Access[0] = driver.Writes(m.Ptr(), 4096)
		if err := a.Launch(l); err != nil {
			return err
		}
		e, err := a.Record()
		if err != nil {
			return err
		}
		if err := b.Wait(e); err != nil {
			return err
		}
		e.Release()
		if err := b.Copy(h.Ptr(), m.Ptr(), 4096); err != nil {
			return err
		}
		if e, err = b.Record(); err != nil {
			return err
		}
		if err := a.Wait(e); err != nil {
			return err
		}
		if err := e.Sync(context.Background()); err != nil {
			return err
		}
		e.Release()
		return nil
	}
	var failed error
	run := func() {
		if err := round(); err != nil {
			failed = err
		}
	}
	for range 10 {
		run()
	}
	allocs := testing.AllocsPerRun(100, run)
	require.NoError(t, failed)
	require.LessOrEqual(t, allocs, float64(t.MaxAllocs))
	t.finish(a, b)
}
