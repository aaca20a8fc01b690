package drivertest

import (
	"errors"
	"math"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/tensor"
)

func testDevices(t *suite) {
	require.NotEmpty(t, t.d.Name())
	uuids := make(map[[16]byte]bool)
	for i := range t.d.Count() {
		v := t.device(i)
		require.Equal(t, tensor.Device{Type: tensor.CUDA, Index: i}, v.ID())
		require.True(t, v == t.device(i), "the same device twice")
		info := v.Info()
		require.NotEmpty(t, info.Name)
		require.Positive(t, info.Major)
		require.Positive(t, info.Multiprocessors)
		require.Positive(t, info.Memory)
		require.GreaterOrEqual(t, info.ThreadsPerBlock, 512)
		require.GreaterOrEqual(t, info.SharedMemory, 48<<10)
		require.Positive(t, info.Driver)
		require.True(t, info.StreamValues, "streams that wait for values")
		require.False(t, uuids[info.UUID], "two devices with one UUID")
		uuids[info.UUID] = true
		free, total, err := v.MemInfo()
		require.NoError(t, err)
		require.LessOrEqual(t, free, total)
		require.Positive(t, free)
		for j := range t.d.Count() {
			l, err := t.d.Link(i, j)
			require.NoError(t, err)
			if i == j {
				require.True(t, l.Peer, "a device reaches itself")
			}
		}
	}
	for _, bad := range []int{-1, t.d.Count(), math.MaxInt32} {
		_, err := t.d.Device(bad)
		t.refused(err, "Device", driver.ErrInvalid)
		_, err = t.d.Link(0, bad)
		t.refused(err, "Link", driver.ErrInvalid)
		_, err = t.d.Link(bad, 0)
		t.refused(err, "Link", driver.ErrInvalid)
	}
}

func testMemory(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	seen := make(map[driver.Ptr]bool)
	for _, n := range []int{1, 3, 255, 256, 4096, 1<<20 + 1} {
		m := t.alloc(v, n)
		require.Equal(t, n, m.Len())
		require.Equal(t, v.ID(), m.Device())
		require.NotZero(t, m.Ptr())
		require.Zero(t, m.Ptr()%256, "alignment of %v", m.Ptr())
		require.False(t, seen[m.Ptr()])
		seen[m.Ptr()] = true
		want := pattern(n, n)
		t.put(s, m.Ptr(), want)
		require.Equal(t, want, t.get(s, m.Ptr(), n))
	}
	empty := t.alloc(v, 0)
	require.Zero(t, empty.Len())
	require.Zero(t, empty.Ptr())
	require.Equal(t, v.ID(), empty.Device())
	require.NoError(t, empty.Close())
	_, err := v.Alloc(-1)
	t.refused(err, "Alloc", driver.ErrInvalid)

	m, err := v.Alloc(100)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	require.NoError(t, m.Close(), "closed twice")
}

func testOutOfMemory(t *suite) {
	v := t.device(0)
	_, total, err := v.MemInfo()
	require.NoError(t, err)
	_, err = v.Alloc(int(total) + 1<<20)
	t.refused(err, "Alloc", driver.ErrOutOfMemory)
	s := t.stream(v)
	m := t.alloc(v, 1000)
	t.put(s, m.Ptr(), pattern(1000, 1))
	require.Equal(t, pattern(1000, 1), t.get(s, m.Ptr(), 1000), "the device still works")
}

func testHostMemory(t *suite) {
	for _, n := range []int{1, 63, 4096, 1<<20 + 3} {
		h := t.host(n)
		require.Equal(t, n, h.Len())
		require.Len(t, h.Bytes(), n)
		require.NotZero(t, h.Ptr())
		require.Zero(t, h.Ptr()%4)
		require.Equal(t, make([]byte, n), h.Bytes(), "fresh page-locked memory is zero")
	}
	h := t.host(64)
	h.Store32(8, 0xdeadbeef)
	require.Equal(t, uint32(0xdeadbeef), h.Load32(8))
	require.Equal(t, words(0xdeadbeef), h.Bytes()[8:12])
	require.Zero(t, h.Load32(4))
	require.Zero(t, h.Load32(12))

	empty := t.host(0)
	require.Zero(t, empty.Len())
	require.Empty(t, empty.Bytes())
	_, err := t.d.AllocHost(-1)
	t.refused(err, "AllocHost", driver.ErrInvalid)

	m, err := t.d.AllocHost(100)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	require.NoError(t, m.Close(), "closed twice")
}

func testRegister(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	const n = 1 << 16
	b := pages(n)
	copy(b, pattern(n, 5))
	h, err := t.d.RegisterHost(b)
	require.NoError(t, err)
	require.Equal(t, n, h.Len())
	require.True(t, &h.Bytes()[0] == &b[0], "the same bytes")
	m := t.alloc(v, n)
	require.NoError(t, s.Copy(m.Ptr(), h.Ptr(), n))
	t.finish(s)
	require.Equal(t, pattern(n, 5), t.get(s, m.Ptr(), n))
	require.NoError(t, s.Memset(m.Ptr(), 9, n))
	require.NoError(t, s.Copy(h.Ptr()+100, m.Ptr(), 100))
	t.finish(s)
	want := pattern(n, 5)
	for i := 100; i < 200; i++ {
		want[i] = 9
	}
	require.Equal(t, want, b)

	_, err = t.d.RegisterHost(b)
	t.refused(err, "RegisterHost", driver.ErrInvalid)
	require.NoError(t, h.Close())
	require.NoError(t, h.Close(), "closed twice")
	require.Equal(t, want, b, "the bytes stay the caller's")
	h, err = t.d.RegisterHost(b)
	require.NoError(t, err, "once more after Close")
	require.NoError(t, h.Close())
	_, err = t.d.RegisterHost(nil)
	t.refused(err, "RegisterHost", driver.ErrInvalid)
}

func testBorrow(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	m := t.alloc(v, 1000)
	t.put(s, m.Ptr(), pattern(1000, 1))
	b, err := v.Borrow(m.Ptr()+100, 200)
	require.NoError(t, err)
	require.Equal(t, m.Ptr()+100, b.Ptr())
	require.Equal(t, 200, b.Len())
	require.Equal(t, v.ID(), b.Device())
	require.Equal(t, pattern(1000, 1)[100:300], t.get(s, b.Ptr(), b.Len()))
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	require.Equal(t, pattern(1000, 1), t.get(s, m.Ptr(), 1000), "not freed")
	_, err = v.Borrow(m.Ptr(), 1<<30)
	t.refused(err, "Borrow", driver.ErrInvalid)
	_, err = v.Borrow(m.Ptr(), -1)
	t.refused(err, "Borrow", driver.ErrInvalid)
	_, err = v.Borrow(16, 16)
	t.refused(err, "Borrow", driver.ErrInvalid)
	b, err = v.Borrow(0, 0)
	require.NoError(t, err)
	require.NoError(t, b.Close())
}

// testCopies copies every way within a device, at odd places, and looks at what
// lies around.
func testCopies(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	const room = 9000
	a, b := t.alloc(v, room), t.alloc(v, room)
	in, out := t.host(room), t.host(room)
	for _, c := range []struct{ from, to, n int }{
		{0, 0, room}, {1, 3, 1}, {3, 1, 255}, {4096, 17, 4096}, {0, 8000, 1000}, {8999, 8999, 1}, {13, 1024, 4099},
	} {
		copy(in.Bytes(), pattern(room, c.n))
		require.NoError(t, s.Copy(a.Ptr(), in.Ptr(), room))
		require.NoError(t, s.Memset(b.Ptr(), 0x5a, room))
		require.NoError(t, s.Copy(b.Ptr()+driver.Ptr(c.to), a.Ptr()+driver.Ptr(c.from), c.n))
		require.NoError(t, s.Copy(out.Ptr(), b.Ptr(), room))
		t.finish(s)
		want := make([]byte, room)
		for i := range want {
			want[i] = 0x5a
		}
		copy(want[c.to:c.to+c.n], pattern(room, c.n)[c.from:])
		require.Equal(t, want, out.Bytes(), "%+v", c)
	}
	// From and to page-locked memory at odd places, and host to host.
	for _, n := range []int{1, 7, 4095} {
		copy(in.Bytes(), pattern(room, n))
		require.NoError(t, s.Copy(a.Ptr()+5, in.Ptr()+11, n))
		require.NoError(t, s.Copy(out.Ptr()+3, a.Ptr()+5, n))
		t.finish(s)
		require.Equal(t, pattern(room, n)[11:11+n], out.Bytes()[3:3+n])
		require.NoError(t, s.Copy(out.Ptr()+5000, in.Ptr()+1, 100))
		t.finish(s)
		require.Equal(t, pattern(room, n)[1:101], out.Bytes()[5000:5100])
	}
	require.NoError(t, s.Copy(0, 0, 0), "nothing to copy")
	require.NoError(t, s.Memset(0, 1, 0))
}

func testPeerCopies(t *suite) {
	v, w := t.two()
	a, b := t.alloc(v, 1<<20), t.alloc(w, 1<<20)
	s, r := t.stream(v), t.stream(w)
	check := func(what string) {
		t.Helper()
		for i, st := range []driver.Stream{s, r} {
			t.put(s, a.Ptr(), pattern(1<<20, i))
			require.NoError(t, st.Copy(b.Ptr()+1, a.Ptr()+2, 1<<20-2), what)
			t.finish(st)
			require.Equal(t, pattern(1<<20, i)[2:], t.get(r, b.Ptr()+1, 1<<20-2), what)
		}
	}
	check("without peer access")
	if l, err := t.d.Link(0, 1); err == nil && l.Peer {
		require.NoError(t, v.EnablePeer(1))
		check("with peer access one way")
		require.NoError(t, w.EnablePeer(0))
		check("with peer access")
		require.NoError(t, v.DisablePeer(1))
		require.NoError(t, w.DisablePeer(0))
	}
}

func testRefusedCopies(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	a := t.alloc(v, 1000)
	t.put(s, a.Ptr(), pattern(1000, 1))
	h := t.host(1000)
	for _, c := range []struct {
		dst, src driver.Ptr
		n        int
	}{
		{a.Ptr(), h.Ptr(), -1}, {0, h.Ptr(), 10}, {a.Ptr(), 0, 10}, {a.Ptr(), a.Ptr() + 5, 10}, {a.Ptr() + 5, a.Ptr(), 10}, {a.Ptr(), a.Ptr(), 1},
	} {
		t.refused(s.Copy(c.dst, c.src, c.n), "Copy", driver.ErrInvalid)
	}
	t.refused(s.Memset(a.Ptr(), 0, -1), "Memset", driver.ErrInvalid)
	t.refused(s.Memset(0, 0, 1), "Memset", driver.ErrInvalid)
	require.Equal(t, pattern(1000, 1), t.get(s, a.Ptr(), 1000), "no byte has changed")
	require.NoError(t, s.Err())
}

func testMemset(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	m, h := t.alloc(v, 1000), t.host(1000)
	require.NoError(t, s.Memset(m.Ptr(), 1, 1000))
	require.NoError(t, s.Memset(m.Ptr()+7, 0xff, 13))
	require.NoError(t, s.Copy(h.Ptr(), m.Ptr(), 1000))
	t.finish(s)
	for i, x := range h.Bytes() {
		want := byte(1)
		if i >= 7 && i < 20 {
			want = 0xff
		}
		require.Equal(t, want, x, "byte %d", i)
	}
	require.NoError(t, s.Memset(h.Ptr()+1, 3, 2))
	t.finish(s)
	require.Equal(t, []byte{1, 3, 3, 1}, h.Bytes()[:4])
}

func testClose(t *suite) {
	d := t.Open(t.T)
	v, err := d.Device(0)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close(), "closed twice")
	_, err = d.Device(0)
	t.refused(err, "Device", driver.ErrClosed)
	_, err = d.AllocHost(10)
	t.refused(err, "AllocHost", driver.ErrClosed)
	_, err = v.Alloc(10)
	t.refused(err, "Alloc", driver.ErrClosed)
	_, err = v.NewStream()
	t.refused(err, "NewStream", driver.ErrClosed)
	_, _, err = v.MemInfo()
	t.refused(err, "MemInfo", driver.ErrClosed)

	// Another driver of the process is not touched by it.
	s := t.stream(t.device(0))
	m := t.alloc(t.device(0), 10)
	t.put(s, m.Ptr(), pattern(10, 1))
	require.Equal(t, pattern(10, 1), t.get(s, m.Ptr(), 10))
}

func testHandles(t *suite) {
	v := t.device(0)
	m := t.alloc(v, 1000)
	h, err := m.Export()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Equal(t, uint64(1000), h.Len)
	require.Equal(t, v.Info().UUID, h.UUID)
	b, err := h.MarshalBinary()
	require.NoError(t, err)
	require.Len(t, b, driver.MemoryHandleSize)
	var back driver.MemoryHandle
	require.NoError(t, back.UnmarshalBinary(b))
	require.Equal(t, h, back)
	_, err = v.OpenMemory(h)
	t.refused(err, "OpenMemory", driver.ErrOwnHandle)

	part, err := v.Borrow(m.Ptr()+256, 100)
	require.NoError(t, err)
	defer part.Close()
	p, err := part.Export()
	require.NoError(t, err)
	require.Equal(t, h.Offset+256, p.Offset)
	require.Equal(t, uint64(100), p.Len)
	require.Equal(t, h.ID, p.ID)

	other := t.alloc(v, 1000)
	o, err := other.Export()
	require.NoError(t, err)
	require.NotEqual(t, h.ID, o.ID)
	_, err = t.alloc(v, 0).Export()
	t.refused(err, "Export", driver.ErrInvalid)

	// A handle of nobody.
	h.Owner[0] ^= 0xff
	h.Raw[0] ^= 0xff
	for i := range h.Raw {
		h.Raw[i] ^= 0x55
	}
	_, err = v.OpenMemory(h)
	require.Error(t, err)
	require.NoError(t, t.stream(v).Err(), "the device still works")
}
