package drivertest

import (
	"errors"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// capturer returns a stream that can be captured, or skips.
func (t *suite) capturer(v driver.Device) driver.Stream {
	t.Helper()
	s := t.stream(v)
	if _, ok := s.(driver.Capturer); !ok {
		t.Skip("the driver has no graphs")
	}
	return s
}

func (t *suite) capture(s driver.Stream, enqueue func()) driver.Graph {
	t.Helper()
	g, err := driver.Capture(s, func() error { enqueue(); return nil })
	require.NoError(t, err)
	t.keep(g)
	return g
}

// testGraph launches copies, fills and kernels again and again, with other work between.
func testGraph(t *suite) {
	v := t.device(0)
	s, other := t.capturer(v), t.stream(v)
	const n = 5000
	fill, add := t.function(v, Fill), t.function(v, Add)
	a, b, one, h := t.alloc(v, 4*n), t.alloc(v, 4*n), t.alloc(v, 4*n), t.host(4*n)
	t.put(s, a.Ptr(), repeat(7, n))
	t.put(s, one.Ptr(), repeat(1, n))
	require.NoError(t, s.Memset(b.Ptr(), 0xee, 4*n))
	t.finish(s)
	l := &driver.Launch{
		Function: add, Grid: driver.Dim{X: 4}, Block: driver.Dim{X: 128}, Args: new(driver.Args).Ptr(a.Ptr()).Ptr(one.Ptr()).Uint32(n),
		Access: []driver.Access{driver.Writes(a.Ptr(), 4*n), driver.Reads(one.Ptr(), 4*n)},
	}
	require.False(t, driver.Capturing(s))
	g := t.capture(s, func() {
		require.True(t, driver.Capturing(s))
		require.False(t, driver.Capturing(other))
		require.NoError(t, s.Err())
		require.NoError(t, s.Launch(l))
		require.NoError(t, s.Memset(b.Ptr(), 0, 4*n))
		require.NoError(t, s.Copy(b.Ptr(), a.Ptr(), 4*n))
		require.NoError(t, s.Copy(h.Ptr(), b.Ptr(), 4*n))
	})
	require.False(t, driver.Capturing(s))
	// The graph has copies of all arguments.
	l.Args.Reset().Ptr(b.Ptr()).Ptr(b.Ptr()).Uint32(1)
	l.Access[0], l.Access[1] = driver.Access{}, driver.Access{}
	require.Equal(t, repeat(7, n), t.get(s, a.Ptr(), 4*n), "nothing has run")
	require.Equal(t, repeat(0xeeeeeeee, n), t.get(s, b.Ptr(), 4*n), "nothing has run")
	want := uint32(7)
	for i := range 20 * t.Rounds {
		if i%5 == 3 {
			want = 1000 * uint32(i)
			t.fill(s, fill, a.Ptr(), want, n)
		}
		require.NoError(t, g.Launch(s))
		want++
		if i%2 == 0 {
			require.NoError(t, g.Launch(s))
			want++
		}
		t.finish(s)
		require.Equal(t, repeat(want, n), h.Bytes(), "round %d", i)
	}
	// A launch comes after earlier ones on other streams, and after what its own stream had.
	gate := t.gates(1)[0]
	gate.hold(t, s)
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.Launch(other))
	e, err := other.Record()
	require.NoError(t, err)
	defer e.Release()
	t.pending(e)
	gate.open()
	t.passes(e)
	require.Equal(t, repeat(want+2, n), h.Bytes())
	// What was enqueued runs after Close.
	require.NoError(t, g.Launch(other))
	require.NoError(t, g.Close())
	require.NoError(t, g.Close(), "closed twice")
	t.refused(g.Launch(s), "GraphLaunch", driver.ErrClosed)
	t.finish(other)
	require.Equal(t, repeat(want+3, n), h.Bytes())
}

// testGraphStreams has a capture spread to other streams, one of another device if there is one.
func testGraphStreams(t *suite) {
	v := t.device(0)
	s, r := t.capturer(v), t.stream(v)
	w := v
	if t.d.Count() > 1 {
		w = t.device(1)
	}
	far := t.stream(w)
	const n = 3000
	add := t.function(v, Add)
	a, b, c, one, h := t.alloc(v, 4*n), t.alloc(v, 4*n), t.alloc(w, 4*n), t.alloc(v, 4*n), t.host(4*n)
	t.put(s, one.Ptr(), repeat(1, n))
	t.put(s, a.Ptr(), repeat(0, n))
	g := t.capture(s, func() {
		t.add(s, add, a.Ptr(), one.Ptr(), n)
		e, err := s.Record()
		require.NoError(t, err)
		_, err = e.Done()
		t.refused(err, "Done", driver.ErrCapture)
		t.refused(e.Sync(t.ctx), "Sync", driver.ErrCapture)
		require.NoError(t, r.Wait(e))
		e.Release()
		require.NoError(t, r.Err())
		require.NoError(t, r.Copy(b.Ptr(), a.Ptr(), 4*n))
		t.add(r, add, b.Ptr(), one.Ptr(), n)
		t.after(far, r)
		t.after(r, far)
		require.NoError(t, r.Copy(c.Ptr(), b.Ptr(), 4*n))
		t.after(far, r)
		require.NoError(t, far.Copy(h.Ptr(), c.Ptr(), 4*n))
		t.after(s, far)
		t.add(s, add, a.Ptr(), one.Ptr(), n)
	})
	for i := range 20 * t.Rounds {
		on := s
		if i%2 == 1 {
			on = r
		}
		require.NoError(t, g.Launch(on))
		t.finish(on)
		require.Equal(t, repeat(uint32(2*i+2), n), h.Bytes(), "launch %d", i)
	}
	// The streams are their own again.
	require.NoError(t, r.Memset(b.Ptr(), 3, 4*n))
	require.NoError(t, far.Memset(c.Ptr(), 4, 4*n))
	t.finish(s, r, far)
	require.Equal(t, byte(3), t.get(r, b.Ptr(), 1)[0])
	require.Equal(t, byte(4), t.get(far, c.Ptr(), 1)[0])
}

// testGraphWords captures words, or has them refused.
func testGraphWords(t *suite) {
	v := t.device(0)
	s := t.capturer(v)
	h, out, m := t.host(64), t.host(400), t.alloc(v, 400)
	g, err := driver.Capture(s, func() error {
		return errors.Join(
			s.WaitValue(h.Ptr(), 1, driver.AtLeast),
			s.Copy(m.Ptr(), out.Ptr(), 400),
			s.Copy(out.Ptr(), m.Ptr(), 200), // and the second half stays
			s.WriteValue(h.Ptr()+4, 1),
			s.WriteValue(h.Ptr(), 0),
		)
	})
	if err != nil {
		require.ErrorIs(t, err, driver.ErrCapture)
		require.NoError(t, s.Memset(m.Ptr(), 1, 400), "the stream goes on")
		t.finish(s)
		t.Skip(err)
	}
	t.keep(g)
	for i := range 10 * t.Rounds {
		require.NoError(t, g.Launch(s))
		e, err := s.Record()
		require.NoError(t, err)
		t.pending(e)
		require.Zero(t, h.Load32(4))
		copy(out.Bytes(), pattern(400, i))
		h.Store32(0, 1)
		require.NoError(t, driver.AwaitWord(t.ctx, h, 4, 1, driver.AtLeast))
		t.passes(e)
		e.Release()
		require.Equal(t, pattern(400, i), out.Bytes())
		require.Equal(t, pattern(400, i), t.get(s, m.Ptr(), 400))
		h.Store32(4, 0)
	}
}

// testCaptureGoroutines has other goroutines use the driver while a stream is captured.
func testCaptureGoroutines(t *suite) {
	v := t.device(0)
	s := t.capturer(v)
	const n, workers = 1000, 4
	fill := t.function(v, Fill)
	a, h := t.alloc(v, 4*n), t.host(4*n)
	var streams []driver.Stream
	for range workers {
		streams = append(streams, t.stream(v))
	}
	begun, ended := make(chan struct{}), make(chan struct{})
	errs := make(chan error)
	go func() {
		<-begun
		err := each(workers, func(i int) error {
			for {
				m, err := v.Alloc(4 * n)
				if err != nil {
					return err
				}
				host, err := t.d.AllocHost(4 * n)
				if err != nil {
					return errors.Join(err, m.Close())
				}
				err = errors.Join(streams[i].Launch(&driver.Launch{
					Function: fill, Grid: driver.Dim{X: 2}, Block: driver.Dim{X: 64}, Args: new(driver.Args).Ptr(m.Ptr()).Uint32(uint32(i)).Uint32(n),
					Access: []driver.Access{driver.Writes(m.Ptr(), 4*n)},
				}), streams[i].Copy(host.Ptr(), m.Ptr(), 4*n), streams[i].Err())
				e, recordErr := streams[i].Record()
				if recordErr == nil {
					err = errors.Join(err, e.Sync(t.ctx))
					e.Release()
				}
				if string(host.Bytes()) != string(repeat(uint32(i), n)) {
					err = errors.Join(err, errors.New("wrong words"))
				}
				if err := errors.Join(err, recordErr, host.Close(), m.Close()); err != nil {
					return err
				}
				select {
				case <-ended:
					return nil
				default:
				}
			}
		})
		errs <- err
	}()
	for round := range 5 * t.Rounds {
		g, err := driver.Capture(s, func() error {
			if round == 0 {
				close(begun)
			}
			for i := range uint32(20) {
				t.fill(s, fill, a.Ptr(), i, n)
			}
			return s.Copy(h.Ptr(), a.Ptr(), 4*n)
		})
		if err == nil {
			err = errors.Join(g.Launch(s), g.Close())
		}
		if err != nil {
			close(ended)
			require.NoError(t, errors.Join(err, <-errs))
		}
	}
	close(ended)
	require.NoError(t, <-errs)
	t.finish(s)
	require.Equal(t, repeat(19, n), h.Bytes())
}

func testRefusedCaptures(t *suite) {
	v := t.device(0)
	s, r := t.capturer(v), t.stream(v)
	m, x := t.alloc(v, 100), t.alloc(v, 100)
	begin := func() {
		t.Helper()
		require.NoError(t, s.(driver.Capturer).BeginCapture())
	}
	// A refused call may have ended the capture, and need not.
	const no, yes, either = 0, 1, 2
	end := func(graph int) {
		t.Helper()
		g, err := s.(driver.Capturer).EndCapture()
		if graph == yes || graph == either && err == nil {
			require.NoError(t, err)
			t.keep(g)
		} else {
			t.refused(err, "EndCapture", driver.ErrCapture)
			require.Nil(t, g)
		}
		require.NoError(t, s.Memset(m.Ptr(), 5, 100), "the stream goes on")
		t.finish(s, r)
		require.Equal(t, byte(5), t.get(s, m.Ptr(), 100)[99])
	}

	end(no) // was not begun
	begin()
	t.refused(s.(driver.Capturer).BeginCapture(), "BeginCapture", driver.ErrCapture)
	end(yes)

	// Arguments are checked as ever, and the capture goes on.
	begin()
	t.refused(s.Memset(m.Ptr(), 1, 1<<30), "Memset", driver.ErrInvalid)
	t.refused(s.Launch(nil), "Launch", driver.ErrInvalid)
	require.NoError(t, s.Memset(m.Ptr(), 1, 100))
	end(yes)

	before, err := r.Record()
	require.NoError(t, err)
	begin()
	t.refused(s.Wait(before), "Wait", driver.ErrCapture)
	end(either)
	require.NoError(t, s.Wait(before))
	before.Release()

	begin()
	inside, err := s.Record()
	require.NoError(t, err)
	require.NoError(t, r.Wait(inside))
	require.NoError(t, r.Memset(x.Ptr(), 1, 100))
	end(no) // r has work that s does not wait for
	t.refused(r.Wait(inside), "Wait", driver.ErrCapture)
	inside.Release()
	t.finish(r)

	g := t.capture(s, func() { require.NoError(t, s.Memset(m.Ptr(), 9, 100)) })
	begin()
	t.refused(g.Launch(s), "GraphLaunch", driver.ErrCapture)
	end(either)
	require.NoError(t, g.Launch(s))
	require.Equal(t, byte(9), t.get(s, m.Ptr(), 100)[99])

	// A stream may be closed while it is captured.
	c, err := v.NewStream()
	require.NoError(t, err)
	require.NoError(t, c.(driver.Capturer).BeginCapture())
	require.NoError(t, c.Memset(m.Ptr(), 1, 100))
	require.NoError(t, c.Close())
	_, err = c.(driver.Capturer).EndCapture()
	t.refused(err, "EndCapture", driver.ErrClosed)
	require.Equal(t, byte(9), t.get(s, m.Ptr(), 100)[99])

	if t.d.Count() > 1 {
		t.refused(g.Launch(t.stream(t.device(1))), "GraphLaunch", driver.ErrInvalid)
	}
	t.refused(g.Launch(nil), "GraphLaunch", driver.ErrInvalid)

	// What enqueue returns comes back, and there is no graph.
	failed := errors.New("failed")
	_, err = driver.Capture(s, func() error { return failed })
	require.ErrorIs(t, err, failed)
	t.finish(s)
}
