package libcuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
)

const ptx = ".version 6.0\n.target sm_60\n"

// fixture is a driver on a fake with a stream on device 0.
type fixture struct {
	*testing.T
	f *fake
	d *Driver
	v *Device
	s *Stream
}

func newFixture(t *testing.T, f *fake) *fixture {
	t.Helper()
	d := must.Get(New(f, nil))
	x := &fixture{T: t, f: f, d: d}
	x.v = x.device(0)
	s := must.Get(x.v.NewStream())
	x.s = s.(*Stream)
	return x
}

func (x *fixture) device(i int) *Device {
	x.Helper()
	return must.Get(x.d.Device(i)).(*Device)
}

func (x *fixture) alloc(v *Device, n int) driver.Memory {
	x.Helper()
	return must.Get(v.Alloc(n))
}

// end closes the rest and asserts that nothing is left.
func (x *fixture) end(closers ...interface{ Close() error }) {
	x.Helper()
	for _, c := range closers {
		require.NoError(x, c.Close())
	}
	require.NoError(x, x.s.Close())
	require.NoError(x, x.d.Close())
	require.Empty(x, x.f.left())
}

func refused(t *testing.T, err error, call string, want error) {
	t.Helper()
	require.ErrorIs(t, err, want)
	e := must.As[*driver.Error](t, err)
	require.Equal(t, call, e.Call, "%v", err)
}

// TestAddresses has everything refused that is not in memory of the driver,
// before CUDA sees it.
func TestAddresses(t *testing.T) {
	x := newFixture(t, newFake(2))
	w := x.device(1)
	a, b := x.alloc(x.v, 100), x.alloc(w, 100)
	h, err := x.d.AllocHost(100)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 100), h.Bytes(), "CUDA does not promise zeros")
	calls := x.f.calls
	for _, err := range []error{
		x.s.Copy(0x1000, a.Ptr(), 1), x.s.Copy(a.Ptr(), 0x1000, 1), x.s.Copy(a.Ptr(), h.Ptr(), 101),
		x.s.Copy(a.Ptr()+100, h.Ptr(), 1), x.s.Copy(a.Ptr()-1, h.Ptr(), 1), x.s.Copy(h.Ptr(), b.Ptr()+50, 51),
	} {
		refused(t, err, "Copy", driver.ErrInvalid)
	}
	refused(t, x.s.Memset(a.Ptr()+99, 0, 2), "Memset", driver.ErrInvalid)
	refused(t, x.s.WriteValue(0x1000, 1), "WriteValue", driver.ErrInvalid)
	refused(t, x.s.WaitValue(b.Ptr(), 1, driver.Equal), "WaitValue", driver.ErrInvalid)
	refused(t, x.s.WriteValue(b.Ptr(), 1), "WriteValue", driver.ErrPeerAccess)
	require.Equal(t, calls, x.f.calls, "CUDA was not asked")
	require.NoError(t, x.v.EnablePeer(1))
	require.NoError(t, x.s.WriteValue(b.Ptr(), 1))
	require.NoError(t, x.s.Copy(b.Ptr(), a.Ptr()+1, 99))
	require.NoError(t, a.Close())
	refused(t, x.s.Memset(a.Ptr(), 0, 1), "Memset", driver.ErrInvalid)
	x.end(b, h)
}

func TestContexts(t *testing.T) {
	f := newFake(2)
	d := must.Get(New(f, map[int]Context{1: 0xabc}))
	h := must.Get(d.AllocHost(1))
	require.Equal(t, 1, f.live["context"], "page-locked memory needs a context of some device")
	require.NoError(t, h.Close())
	w, err := d.Device(1)
	require.NoError(t, err)
	require.Equal(t, Context(0xabc), w.(*Device).Context())
	require.Equal(t, 1, f.live["context"], "the program's own is not retained")
	for _, before := range []Context{0, 0xabc, 0x123} {
		f.current = before
		_, _, err := w.MemInfo()
		require.NoError(t, err)
		if before == 0 {
			before = 0xabc // a thread that had none keeps it
		}
		require.Equal(t, before, f.current)
	}
	require.NoError(t, d.Close())
	require.NoError(t, d.Close())
	require.Empty(t, f.left())
	_, err = New(f, map[int]Context{2: 1})
	refused(t, err, "Open", driver.ErrInvalid)
	f.devices = 0
	_, err = New(f, nil)
	refused(t, err, "Open", driver.ErrNoDevice)

	// A device that is in use serves for page-locked memory, not the first.
	f = newFake(2)
	d = must.Get(New(f, nil))
	must.Get(d.Device(1))
	h = must.Get(d.AllocHost(1))
	require.Equal(t, 1, f.live["context"])
	require.NoError(t, h.Close())
	require.NoError(t, d.Close())
}

func TestLost(t *testing.T) {
	x := newFixture(t, newFake(2))
	m := x.alloc(x.v, 100)
	e := must.Get(x.s.Record())
	x.f.at, x.f.with, x.f.sticky = x.f.calls+2, 700, true // the call after Current
	err := x.s.Memset(m.Ptr(), 0, 1)
	refused(t, err, "Memset", driver.ErrDeviceLost)
	require.ErrorContains(t, err, "driver: Memset on device 0: device lost (cuMemsetD8Async returned 700, CUDA_ERROR_ILLEGAL_ADDRESS)")
	calls := x.f.calls
	refused(t, x.s.Copy(m.Ptr(), m.Ptr()+50, 10), "Copy", driver.ErrDeviceLost)
	_, err = x.v.Alloc(1)
	refused(t, err, "Alloc", driver.ErrDeviceLost)
	_, err = e.Done()
	refused(t, err, "Done", driver.ErrDeviceLost)
	refused(t, e.Sync(t.Context()), "Sync", driver.ErrDeviceLost)
	require.ErrorIs(t, x.s.Err(), driver.ErrDeviceLost)
	e.Release()
	require.NoError(t, m.Close())
	require.NoError(t, x.s.Close())
	require.Equal(t, calls, x.f.calls, "CUDA was not asked again")
	x.f.at = 0
	y := x.device(1)
	require.NoError(t, x.alloc(y, 1).Close(), "the other device works")
	h, err := x.d.AllocHost(1)
	require.NoError(t, err, "with the other device's context")
	require.NoError(t, h.Close())
	require.NoError(t, x.d.Close())
}

// TestMeet has devices reach each other's memory as soon as two have contexts.
// TestLostPeers: devices that have met are lost before anything has noticed.
func TestLostPeers(t *testing.T) {
	f := newFake(2)
	x := newFixture(t, f)
	x.device(1)
	require.NoError(t, x.s.Close())
	f.at, f.with, f.sticky = f.calls+1, 700, true
	require.NoError(t, x.d.Close())
	require.NotEmpty(t, f.failed)
}

func TestMeet(t *testing.T) {
	f := newFake(3)
	x := newFixture(t, f)
	keys := [][2]Context{{fakeContext(0), fakeContext(1)}, {fakeContext(1), fakeContext(0)}}
	require.Empty(t, f.peers, "there is one")
	x.device(1)
	require.Len(t, f.peers, 2)
	for _, k := range keys {
		require.True(t, f.peers[k], "%v", k)
	}
	f.names = nil
	x.device(1)
	require.Empty(t, f.names, "it has met the other")
	require.NoError(t, x.v.EnablePeer(1))
	require.NoError(t, x.v.DisablePeer(1))
	require.True(t, f.peers[keys[0]], "copies have it yet")
	x.device(2)
	require.Len(t, f.peers, 6)
	require.NoError(t, errors.Join(x.s.Close(), x.d.Close()))
	require.Empty(t, f.peers, "Close takes it back")

	f.noPeer = true
	y := newFixture(t, f)
	a, b := y.alloc(y.v, 8), y.alloc(y.device(1), 8)
	require.NoError(t, y.s.Copy(b.Ptr(), a.Ptr(), 8), "devices that cannot")
	require.Empty(t, f.peers)
	require.NoError(t, errors.Join(a.Close(), b.Close(), y.s.Close(), y.d.Close()))
	require.Empty(t, f.left())
}

func TestPeers(t *testing.T) {
	f := newFake(2)
	x, y := newFixture(t, f), newFixture(t, f)
	key := [2]Context{fakeContext(0), fakeContext(1)}
	require.NoError(t, x.v.EnablePeer(1))
	require.NoError(t, x.v.EnablePeer(1))
	require.NoError(t, y.v.EnablePeer(1))
	require.True(t, f.peers[key])
	require.NoError(t, x.v.DisablePeer(1))
	require.NoError(t, x.v.DisablePeer(1))
	require.True(t, f.peers[key], "the other driver of the process has it yet")
	require.NoError(t, y.s.Close())
	require.NoError(t, y.d.Close())
	require.True(t, f.peers[key], "as has this one, for copies")
	x.end()
	require.False(t, f.peers[key], "Close takes it back")

	f.peers[key] = true // another library did it
	x = newFixture(t, f)
	require.NoError(t, x.v.EnablePeer(1))
	require.NoError(t, x.v.DisablePeer(1))
	require.NoError(t, errors.Join(x.s.Close(), x.d.Close()))
	require.True(t, f.peers[key], "what others enabled stays")
	delete(f.peers, key)
	peers.uses = make(map[[2]Context]int)

	x = newFixture(t, f)
	x.device(1)
	f.at, f.with = f.calls+1, 711
	refused(t, x.v.EnablePeer(1), "EnablePeer", driver.ErrPeerAccess)
	f.at = 0
	require.NoError(t, x.v.EnablePeer(1))
	x.end()

	f.noPeer = true
	x = newFixture(t, f)
	refused(t, x.v.EnablePeer(1), "EnablePeer", driver.ErrPeerAccess)
	refused(t, x.v.EnablePeer(0), "EnablePeer", driver.ErrInvalid)
	refused(t, x.v.EnablePeer(2), "EnablePeer", driver.ErrInvalid)
	x.end()
}

func TestMappings(t *testing.T) {
	x := newFixture(t, newFake(2))
	h := driver.MemoryHandle{Raw: [64]byte{1}, Owner: [16]byte{1}, UUID: [16]byte{2}, ID: 1, Len: 100}
	a := must.Get(x.v.OpenMemory(h))
	h.Offset, h.Len = 256, 1000-256
	b, err := x.v.OpenMemory(h)
	require.NoError(t, err)
	require.Equal(t, a.Ptr()+256, b.Ptr())
	require.Equal(t, 1, x.f.count("IPCOpenMem"), "one allocation is opened once")
	h.Len++
	_, err = x.v.OpenMemory(h)
	refused(t, err, "OpenMemory", driver.ErrInvalid)
	h.ID, h.Offset = 2, 1<<40
	_, err = x.v.OpenMemory(h)
	refused(t, err, "OpenMemory", driver.ErrInvalid)
	h.Offset = 1<<63 + 1<<62
	_, err = x.v.OpenMemory(h)
	refused(t, err, "OpenMemory", driver.ErrInvalid)
	require.Equal(t, 1, x.f.live["mapping"], "what was refused is closed")
	_, err = a.Export()
	refused(t, err, "Export", driver.ErrInvalid)
	require.NoError(t, a.Close())
	require.NoError(t, a.Close())
	require.NoError(t, x.s.Memset(b.Ptr(), 0, 10), "the other part is open yet")
	require.NoError(t, b.Close())
	refused(t, x.s.Memset(b.Ptr(), 0, 10), "Memset", driver.ErrInvalid)

	x.f.noPeer = true
	h = driver.MemoryHandle{Owner: [16]byte{1}, UUID: [16]byte{2}, Len: 1}
	_, err = x.v.OpenMemory(h)
	refused(t, err, "OpenMemory", driver.ErrPeerAccess)
	m := x.alloc(x.v, 1000)
	h = must.Get(m.Export())
	_, err = x.v.OpenMemory(h)
	refused(t, err, "OpenMemory", driver.ErrOwnHandle)
	x.end(m)
}

func TestBorrow(t *testing.T) {
	x := newFixture(t, newFake(2))
	x.f.sizes[0x100000], x.f.where[0x100000] = 0x1000, 0 // two pieces that
	x.f.sizes[0x101000], x.f.where[0x101000] = 0x1000, 0 // belong together
	x.f.sizes[0x103000], x.f.where[0x103000] = 0x1000, 1
	m := must.Get(x.v.Borrow(0x100800, 0x1000))
	again, err := x.v.Borrow(0x101000, 0x10)
	require.NoError(t, err)
	require.NoError(t, x.s.Memset(m.Ptr(), 0, m.Len()))
	_, err = m.Export()
	refused(t, err, "Export", driver.ErrInvalid)
	for _, bad := range [][2]int{{0x101000, 0x1001}, {0x102000, 1}, {0x103000, 1}, {0, 1}, {0x100000, -1}, {16, 0}} {
		_, err := x.v.Borrow(driver.Ptr(bad[0]), bad[1])
		refused(t, err, "Borrow", driver.ErrInvalid)
	}
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	refused(t, x.s.Memset(0x100800, 0, 1), "Memset", driver.ErrInvalid)
	require.NoError(t, x.s.Memset(0x101000, 0, 1), "lent once more")
	require.NoError(t, again.Close())
	refused(t, x.s.Memset(0x101000, 0, 1), "Memset", driver.ErrInvalid)
	_, err = x.v.BorrowStream(0xbad)
	refused(t, err, "BorrowStream", driver.ErrInvalid)
	_, err = x.v.BorrowStream(2)
	refused(t, err, "BorrowStream", driver.ErrInvalid)
	require.NoError(t, must.Get(x.v.BorrowStream(77)).Close())
	require.Equal(t, 1, x.f.live["stream"])

	// Memory that was freed before its loan ended, and allocated again here.
	x.f.sizes[x.f.next], x.f.where[x.f.next] = 100, 0
	stale := must.Get(x.v.Borrow(driver.Ptr(x.f.next), 100))
	fresh := x.alloc(x.v, 100)
	require.Equal(t, stale.Ptr(), fresh.Ptr())
	x.f.sizes[x.f.next-256], x.f.where[x.f.next-256] = 500, 0
	larger := must.Get(x.v.Borrow(driver.Ptr(x.f.next), 200))
	delete(x.f.sizes, x.f.next-256)
	within := x.alloc(x.v, 100)
	require.Equal(t, larger.Ptr(), within.Ptr())
	refused(t, x.s.Memset(within.Ptr(), 0, 101), "Memset", driver.ErrInvalid)
	refused(t, x.s.Memset(within.Ptr()+150, 0, 1), "Memset", driver.ErrInvalid)
	require.NoError(t, within.Close())
	require.NoError(t, larger.Close())
	require.NoError(t, stale.Close())
	require.NoError(t, x.s.Memset(fresh.Ptr(), 0, 100))
	x.end(fresh)
}

// TestHostCopies has copies within the host go through the device, piece by
// piece and through one buffer after another stream's use of it.
func TestHostCopies(t *testing.T) {
	x := newFixture(t, newFake(1))
	const n = 2*bounceSize + 5
	a := must.Get(x.d.AllocHost(n))
	b := must.Get(x.d.RegisterHost(make([]byte, n+1)))
	require.NoError(t, x.s.Copy(b.Ptr()+1, a.Ptr(), n))
	buf := x.s.bounce
	require.NotZero(t, buf)
	var want []string
	for at := driver.Ptr(0); at < n; at += bounceSize {
		k := min(n-int(at), bounceSize)
		want = append(want, fmt.Sprintf("%v %v %d", buf, a.Ptr()+at, k), fmt.Sprintf("%v %v %d", b.Ptr()+1+at, buf, k))
	}
	require.Equal(t, want, x.f.copies)
	require.NoError(t, x.s.Close())
	s := must.Get(x.v.NewStream(driver.StreamOptions{High: true}))
	waits := x.f.count("StreamWaitEvent")
	require.NoError(t, s.Copy(b.Ptr(), a.Ptr(), 10))
	require.Equal(t, buf, s.(*Stream).bounce)
	require.Equal(t, waits+1, x.f.count("StreamWaitEvent"))
	lent := must.Get(x.v.BorrowStream(77))
	require.NoError(t, lent.Copy(b.Ptr(), a.Ptr(), 10))
	x.end(s, a, b)
	calls := x.f.calls
	require.NoError(t, lent.Close(), "after the driver")
	require.Equal(t, calls, x.f.calls)
}

// TestRegisterTwice has two Drivers of a process register the same memory, which CUDA does once.
func TestQueues(t *testing.T) {
	x := newFixture(t, newFake(2))
	queues := func(v *Device, streams, queues int) {
		t.Helper()
		s, q := v.Queues()
		require.Equal(t, []int{streams, queues}, []int{s, q})
	}
	queues(x.v, 1, 4)
	x.f.queues = 32
	s := must.Get(x.v.NewStream())
	b := must.Get(x.v.BorrowStream(s.Handle()))
	queues(x.v, 2, 32)
	queues(x.device(1), 0, 32)
	require.NoError(t, errors.Join(b.Close(), s.Close(), s.Close()))
	queues(x.v, 1, 32)
	x.end()
}

type release struct{ driver.Event }

func (r release) Close() error {
	r.Release()
	return nil
}

// TestFirstCommands has streams of two drivers get their first command of every kind one
// after the other, and later ones at the same time.
func TestFirstCommands(t *testing.T) {
	const drivers, streams = 2, 4
	f := newFake(2)
	type command struct {
		call string
		do   func() error
	}
	var lines [][]command // by stream
	var closers []interface{ Close() error }
	for range drivers {
		x := newFixture(t, f)
		near, far := x.alloc(x.v, 16), x.alloc(x.device(1), 8)
		host := must.Get(x.d.AllocHost(8))
		m := must.Get(x.v.Load([]byte(ptx)))
		k := must.Get(m.Function("f"))
		e, err := x.s.Record()
		require.NoError(t, err)
		l := &driver.Launch{
			Function: k, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args).Ptr(1).Uint32(2).Struct(make([]byte, 12), 4),
		}
		for range streams {
			s, err := x.v.NewStream()
			require.NoError(t, err)
			closers = append(closers, s)
			lines = append(lines, []command{
				{"MemcpyAsync", func() error { return s.Copy(host.Ptr(), near.Ptr(), 8) }},
				{"MemcpyAsync", func() error { return s.Copy(near.Ptr(), host.Ptr(), 8) }},
				{"MemcpyAsync", func() error { return s.Copy(far.Ptr(), near.Ptr(), 8) }},
				{"MemcpyAsync", func() error { return s.Copy(near.Ptr()+8, near.Ptr(), 8) }},
				{"MemsetAsync", func() error { return s.Memset(near.Ptr(), 0, 8) }},
				{"Launch", func() error { return s.Launch(l) }},
				{"StreamWaitValue", func() error { return s.WaitValue(host.Ptr(), 0, driver.AtLeast) }},
				{"StreamWriteValue", func() error { return s.WriteValue(host.Ptr(), 0) }},
				{"StreamWaitEvent", func() error { return s.Wait(e) }},
				{"EventRecord", func() error {
					e, err := s.Record()
					if err == nil {
						e.Release()
					}
					return err
				}},
			})
		}
		closers = append(closers, release{e}, near, far, host, m, x.s, x.d)
	}
	all := func(kind int, during func()) {
		f.during = func(name string) {
			if name == lines[0][kind].call {
				during()
			}
		}
		var wg sync.WaitGroup
		for _, l := range lines {
			wg.Go(func() { assert.NoError(t, l[kind].do()) })
		}
		wg.Wait()
	}
	for kind, c := range lines[0] {
		var under, most atomic.Int32
		all(kind, func() {
			most.Store(max(most.Load(), under.Add(1)))
			time.Sleep(100 * time.Microsecond)
			under.Add(-1)
		})
		require.EqualValues(t, 1, most.Load(), "first commands of kind %d, %s", kind, c.call)
	}
	for kind := range lines[0] {
		var met sync.WaitGroup
		met.Add(len(lines))
		all(kind, func() {
			met.Done()
			met.Wait()
		})
	}
	f.during = nil
	for _, c := range closers {
		require.NoError(t, c.Close())
	}
	require.Empty(t, f.left())
}

func TestRegisterTwice(t *testing.T) {
	f := newFake(1)
	x := newFixture(t, f)
	other := must.Get(New(f, nil))
	room := make([]byte, 100)
	a := must.Get(x.d.RegisterHost(room))
	b := must.Get(other.RegisterHost(room))
	require.Equal(t, 1, f.live["registration"])
	require.Equal(t, 1, f.count("HostRegister"))
	require.NoError(t, a.Close())
	require.Equal(t, 1, f.live["registration"], "the other's")
	require.NoError(t, b.Close())
	require.Zero(t, f.live["registration"])
	require.NoError(t, other.Close())
	x.end()
}

func TestRegister(t *testing.T) {
	x := newFixture(t, newFake(1))
	room := make([]byte, 100)
	h, err := x.d.RegisterHost(room[8:60])
	require.NoError(t, err)
	for _, bad := range [][]byte{nil, room[8:60], room[:12], room[56:], room[20:24], room[61:]} {
		_, err := x.d.RegisterHost(bad)
		refused(t, err, "RegisterHost", driver.ErrInvalid)
	}
	x.f.apart = true
	_, err = x.d.RegisterHost(room[64:])
	refused(t, err, "RegisterHost", driver.ErrInvalid)
	_, err = x.d.AllocHost(10)
	refused(t, err, "AllocHost", driver.ErrInvalid)
	require.NoError(t, h.Close())
	require.Zero(t, x.f.live["host"]+x.f.live["registration"])
	x.end()
}

func TestParameters(t *testing.T) {
	for _, noParam := range []bool{false, true} {
		x := newFixture(t, newFake(1))
		x.f.noParam = noParam
		m := must.Get(x.v.Load([]byte(ptx)))
		f, err := m.Function("f")
		require.NoError(t, err)
		launch := func(a *driver.Args, block uint32) error {
			return x.s.Launch(&driver.Launch{Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: block}, Args: a})
		}
		args := func() *driver.Args { return new(driver.Args).Ptr(1).Uint32(2) }
		require.NoError(t, launch(args().Struct(make([]byte, 12), 4), 256))
		refused(t, launch(args().Struct(make([]byte, 12), 4), 257), "Launch", driver.ErrInvalid)
		for _, bad := range []*driver.Args{
			nil, args(), args().Struct(make([]byte, 11), 4), args().Struct(make([]byte, 12), 8),
			args().Struct(make([]byte, 12), 4).Uint32(1), new(driver.Args).Uint32(1).Uint32(2).Struct(make([]byte, 12), 4),
		} {
			if noParam {
				require.NoError(t, launch(bad, 1), "the driver does not say what it takes")
			} else {
				refused(t, launch(bad, 1), "Launch", driver.ErrInvalid)
			}
		}
		refused(t, f.SetShared(-1), "SetShared", driver.ErrInvalid)
		_, err = f.Blocks(0, 0)
		refused(t, err, "Blocks", driver.ErrInvalid)
		require.NoError(t, m.Close())
		refused(t, launch(args().Struct(make([]byte, 12), 4), 1), "Launch", driver.ErrClosed)
		_, err = f.Blocks(1, 0)
		refused(t, err, "Blocks", driver.ErrClosed)
		x.end()
	}
}

// TestKeep holds that kept images are loaded with their functions when devices get ready,
// once for all who load them. They are unloaded with the driver.
func TestKeep(t *testing.T) {
	x := newFixture(t, newFake(2))
	x.d.Keep([]byte(ptx), "f", "g")
	x.d.Keep([]byte(ptx), "g", "h")
	require.Equal(t, 1, x.f.count("ModuleLoad"))
	require.Equal(t, 3, x.f.count("FunctionLoad"))
	w := x.device(1)
	require.Equal(t, 2, x.f.count("ModuleLoad"), "when it gets ready")
	require.Equal(t, 6, x.f.count("FunctionLoad"))
	calls := x.f.calls
	for _, v := range []*Device{x.v, w, x.v} {
		m := must.Get(v.Load(slices.Clone([]byte(ptx))))
		f, err := m.Function("f")
		require.NoError(t, err)
		require.Equal(t, v.index, f.Device().Index)
		require.NoError(t, m.Close())
		require.NoError(t, m.Close(), "closed twice")
		_, err = m.Function("f")
		refused(t, err, "Function", driver.ErrClosed)
		_, err = f.Blocks(1, 0)
		refused(t, err, "Blocks", driver.ErrClosed)
	}
	require.Equal(t, calls, x.f.calls, "nothing was asked of CUDA")
	m := must.Get(x.v.Load([]byte(ptx)))
	require.Equal(t, "another", must.Get(m.Function("another")).Name())
	other := must.Get(x.v.Load([]byte(ptx + "\n")))
	require.Equal(t, 3, x.f.count("ModuleLoad"), "another image")
	require.NoError(t, other.Close())
	require.Equal(t, 1, x.f.count("ModuleUnload"))
	x.end(m)
	require.Equal(t, 3, x.f.count("ModuleUnload"))
}

// TestOpening has a second caller ask for a device while the first one's call loads the
// images that are kept. Both get the device when that and the access to other devices are
// done.
func TestOpening(t *testing.T) {
	x := newFixture(t, newFake(2))
	x.d.Keep([]byte(ptx), "f")
	var met atomic.Bool
	second := make(chan bool, 1)
	returned := make(chan struct{})
	x.f.during = func(name string) {
		switch name {
		case "ModuleLoad":
			go func() {
				_, err := x.d.Device(1)
				second <- met.Load() && err == nil
				close(returned)
			}()
			select {
			case <-returned:
			case <-time.After(100 * time.Millisecond):
			}
		case "EnablePeer":
			met.Store(true)
		}
	}
	x.device(1)
	require.True(t, <-second, "the second caller got the device before it was ready")
	x.f.during = nil
	x.end()
}

// TestKeepFails holds that what could not be kept is loaded, or refused, when it is
// asked for.
func TestKeepFails(t *testing.T) {
	x := newFixture(t, newFake(1))
	x.f.at, x.f.with = x.f.calls+2, 218
	x.d.Keep([]byte(ptx), "f")
	require.Equal(t, "ModuleLoad", x.f.failed)
	require.Zero(t, x.f.live["module"])
	x.f.failed, x.f.at, x.f.sticky = "", x.f.calls+2, true
	_, err := x.v.Load([]byte(ptx))
	refused(t, err, "Load", driver.ErrImage)
	x.f.sticky, x.f.at = false, x.f.calls+4
	m, err := x.v.Load([]byte(ptx))
	require.NoError(t, err)
	require.Equal(t, 1, x.f.live["module"])
	require.Zero(t, x.f.count("FunctionAttribute"), "the function could not be loaded")
	must.Get(m.Function("f"))
	x.end(m)
	x = newFixture(t, newFake(1))
	x.d.Keep([]byte("text"), "f")
	_, err = x.v.Load([]byte("text"))
	refused(t, err, "Load", driver.ErrImage)
	x.d.Keep([]byte(ptx))
	x.f.at, x.f.with, x.f.sticky = x.f.calls+1, 700, true
	require.ErrorIs(t, must.Err(x.s.Record()), driver.ErrDeviceLost)
	x.f.at = 0
	_, err = x.v.Load([]byte(ptx))
	refused(t, err, "Load", driver.ErrDeviceLost)
	require.NoError(t, x.s.Close())
	require.NoError(t, x.d.Close())
}

// TestImages has images refused that CUDA would read beyond the end of.
func TestImages(t *testing.T) {
	x := newFixture(t, newFake(1))
	elf := append([]byte("\x7fELF"), make([]byte, 60)...)
	binary.LittleEndian.PutUint64(elf[40:], 64)
	binary.LittleEndian.PutUint16(elf[58:], 64)
	long := slices.Clone(elf)
	binary.LittleEndian.PutUint16(long[60:], 3)
	huge := slices.Clone(elf)
	binary.LittleEndian.PutUint64(huge[32:], 1<<64-1)
	fat := append([]byte{0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0}, make([]byte, 12)...)
	fat[8] = 4
	cut := fat[:19]
	over := slices.Clone(fat)
	binary.LittleEndian.PutUint64(over[8:], 1<<64-1)
	for _, good := range [][]byte{[]byte(ptx), []byte(ptx + "\x00"), elf, fat} {
		require.NoError(t, must.Get(x.v.Load(good)).Close())
	}
	for _, bad := range [][]byte{nil, []byte("text"), []byte(ptx + "\x00x"), elf[:20], long, huge, fat[:9], cut, over} {
		_, err := x.v.Load(bad)
		refused(t, err, "Load", driver.ErrImage)
	}
	x.f.at, x.f.with = x.f.calls+2, 218
	_, err := x.v.Load([]byte(ptx))
	refused(t, err, "Load", driver.ErrImage)
	require.ErrorContains(t, err, "line 7 is odd")
	x.end()
}

func TestEvents(t *testing.T) {
	x := newFixture(t, newFake(2))
	e, err := x.s.Record()
	require.NoError(t, err)
	x.f.unready = true
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	refused(t, e.Sync(ctx), "Sync", context.DeadlineExceeded)
	x.f.unready = false
	require.NoError(t, e.Sync(ctx))
	e.Release()
	refused(t, x.s.Wait(e), "Wait", driver.ErrClosed)
	_, err = e.Done()
	refused(t, err, "Done", driver.ErrClosed)
	for range 10 {
		e := must.Get(x.s.Record())
		e.Release()
	}
	require.Equal(t, 1, x.f.count("EventCreate"), "events come from a pool")

	y := newFixture(t, newFake(1))
	other := must.Get(y.s.Record())
	refused(t, x.s.Wait(other), "Wait", driver.ErrInvalid)
	refused(t, x.s.Wait(nil), "Wait", driver.ErrInvalid)
	other.Release()
	y.end()
	x.end()
}

func TestLeaks(t *testing.T) {
	x := newFixture(t, newFake(1))
	x.alloc(x.v, 1)
	_, err := x.d.AllocHost(1)
	require.NoError(t, err)
	must.Get(x.v.Load([]byte(ptx)))
	require.ErrorContains(t, x.d.Close(), "driver: Close: not closed before: [memory: 1 module: 1 page-locked memory: 1 stream: 1]")
	require.Empty(t, x.f.left(), "and then it was")
	_, err = x.s.Record()
	refused(t, err, "Record", driver.ErrClosed)
}

// scenario uses everything once and stops at the first error.
func scenario(d *Driver) (err error) {
	var closers []interface{ Close() error }
	defer func() {
		for _, c := range slices.Backward(closers) {
			err = errors.Join(err, c.Close())
		}
	}()
	keep := func(c interface{ Close() error }, err error) error {
		if err == nil {
			closers = append(closers, c)
		}
		return err
	}
	v, err := d.Device(0)
	if err != nil {
		return err
	}
	s, err := v.NewStream()
	if err := keep(s, err); err != nil {
		return err
	}
	m, err := v.Alloc(1000)
	if err := keep(m, err); err != nil {
		return err
	}
	if _, err := m.Export(); err != nil {
		return err
	}
	a, err := d.AllocHost(64)
	if err := keep(a, err); err != nil {
		return err
	}
	b, err := d.RegisterHost(make([]byte, 64))
	if err := keep(b, err); err != nil {
		return err
	}
	o, err := v.OpenMemory(driver.MemoryHandle{Owner: [16]byte{1}, Len: 10})
	if err := keep(o, err); err != nil {
		return err
	}
	image, err := v.Load([]byte(ptx))
	if err := keep(image, err); err != nil {
		return err
	}
	f, err := image.Function("f")
	if err != nil {
		return err
	}
	if err := errors.Join(v.EnablePeer(1), s.Copy(a.Ptr(), b.Ptr(), 64), s.Copy(m.Ptr(), a.Ptr(), 64), s.Memset(o.Ptr(), 1, 10),
		s.WriteValue(a.Ptr(), 1), s.WaitValue(a.Ptr(), 1, driver.Equal), s.Launch(&driver.Launch{
			Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args).Ptr(1).Uint32(2).Struct(make([]byte, 12), 4),
		})); err != nil {
		return err
	}
	e, err := s.Record()
	if err != nil {
		return err
	}
	err = errors.Join(s.Wait(e), e.Sync(context.Background()))
	e.Release()
	if err != nil {
		return err
	}
	var inside driver.Event
	g, err := driver.Capture(s, func() (err error) {
		if inside, err = s.Record(); err == nil {
			inside.Release()
			err = s.Memset(m.Ptr(), 1, 100)
		}
		return err
	})
	if err := keep(g, err); err != nil {
		return err
	}
	return errors.Join(g.Launch(s), v.DisablePeer(1))
}

// TestFaults lets each call of CUDA's fail in turn: the error comes out with the
// call's name, and all that was made is given back.
func TestFaults(t *testing.T) {
	giveBack := []string{
		"MemFree", "HostFree", "HostUnregister", "IPCCloseMem", "StreamDestroy", "EventDestroy", "ModuleUnload",
		"PrimaryRelease", "DisablePeer", "GraphDestroy", "GraphExecDestroy",
	}
	seen := make(map[string]bool)
	for k := 1; ; k++ {
		f := newFake(2)
		f.at, f.with = k, 304
		d, err := New(f, nil)
		if err == nil {
			err = errors.Join(scenario(d), d.Close())
		}
		peers.uses = make(map[[2]Context]int)
		if f.failed == "" {
			require.NoError(t, err)
			require.Greater(t, k, 50)
			break
		}
		seen[f.failed] = true
		restored := f.failed == "SetCurrent" || f.failed == "Current"
		between := f.failed == "CanAccessPeer" || f.failed == "EnablePeer"
		switch {
		case f.failed == "DevicePCIBusID", f.failed == "FunctionParam", f.failed == "EventDestroy":
			// Not needed, or too late to matter.
		case restored && err == nil:
			// A context that could not be put back, or an event that leaks.
		case between && err == nil:
			// When the devices met: copies do without.
		default:
			require.Error(t, err, "call %d, %s", k, f.failed)
			e := must.As[*driver.Error](t, err, "call %d, %s", k, f.failed)
			require.Equal(t, 304, e.Code, "call %d, %s: %v", k, f.failed, err)
		}
		if !slices.Contains(giveBack, f.failed) && !restored {
			require.Empty(t, f.left(), "call %d, %s failed", k, f.failed)
		}
	}
	require.Greater(t, len(seen), 35, "%v", seen)
}

// TestTable compares the table with a list, from a printed seed.
func TestTable(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	var tb table
	const places = 64
	var used [places]*span // by place of 256 bytes
	for range 3000 {
		i := r.IntN(places)
		if s := used[i]; s != nil {
			tb.remove(s.base, false)
			used[i] = nil
		} else {
			base := driver.Ptr(256 * (i + 1))
			used[i] = &span{base: base, end: base + driver.Ptr(1+r.IntN(256)), device: r.IntN(3) - 1}
			tb.insert(*used[i])
		}
		p, n := driver.Ptr(r.IntN(256*(places+2))), 1+r.IntN(100)
		var want *span
		overlap := false
		for _, s := range used {
			if s == nil {
				continue
			}
			if s.base <= p && p+driver.Ptr(n) <= s.end {
				want = s
			}
			overlap = overlap || s.base < p+driver.Ptr(n) && p < s.end
		}
		got, err := tb.find(p, n)
		if want == nil {
			require.ErrorIs(t, err, driver.ErrInvalid)
		} else {
			require.NoError(t, err)
			require.Equal(t, want.base, got.base)
			require.Equal(t, want.device, got.device)
		}
		_, found := tb.overlaps(p, n)
		require.Equal(t, overlap, found)
	}
}

// TestGoroutines uses one driver from many goroutines, for the race detector.
func TestGoroutines(t *testing.T) {
	x := newFixture(t, newFake(2))
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			for range 50 {
				m, err := x.v.Alloc(100)
				if err != nil {
					errs[i] = err
					return
				}
				e, err := x.s.Record()
				errs[i] = errors.Join(errs[i], err, x.s.Memset(m.Ptr(), 0, 100), x.s.Wait(e), x.v.EnablePeer(1))
				e.Release()
				errs[i] = errors.Join(errs[i], m.Close())
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	x.end()
}

// TestSteadyState holds what a copy, a launch and an edge allocate: nothing.
func TestSteadyState(t *testing.T) {
	x := newFixture(t, newFake(1))
	m := must.Get(x.v.Load([]byte(ptx)))
	f := must.Get(m.Function("f"))
	mem := x.alloc(x.v, 100)
	l := &driver.Launch{
		Function: f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1},
		Args: new(driver.Args).Ptr(1).Uint32(2).Struct(make([]byte, 12), 4),
	}
	g := must.Get(driver.Capture(x.s, func() error { return x.s.Launch(l) }))
	x.f.names = make([]string, 0, 1<<16)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		e, _ := x.s.Record()
		if g.Launch(x.s) != nil || x.s.Launch(l) != nil || x.s.Memset(mem.Ptr(), 1, 100) != nil || x.s.Wait(e) != nil || e.Sync(context.Background()) != nil {
			panic("failed")
		}
		e.Release()
	}))
	x.end(g, mem, m)
}
