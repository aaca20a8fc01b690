package drivertest

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

func testStreamOrder(t *suite) {
	v := t.device(0)
	s, err := v.NewStream(driver.StreamOptions{High: true})
	require.NoError(t, err)
	t.keep(s)
	require.Equal(t, v.ID(), s.Device())
	add := t.function(v, Add)
	const n, rounds = 5000, 200
	a, b := t.alloc(v, 4*n), t.alloc(v, 4*n)
	require.NoError(t, s.Memset(a.Ptr(), 0, 4*n))
	require.NoError(t, s.Memset(b.Ptr(), 0, 4*n))
	// Fibonacci: every step needs the one before.
	require.NoError(t, s.Memset(b.Ptr(), 1, 1))
	x, y := uint32(0), uint32(1)
	for range rounds {
		t.add(s, add, a.Ptr(), b.Ptr(), n)
		t.add(s, add, b.Ptr(), a.Ptr(), n)
		x += y
		y += x
	}
	require.Equal(t, words(x, 0), t.get(s, a.Ptr(), 8))
	require.Equal(t, words(y, 0), t.get(s, b.Ptr(), 8))
}

func testStreamsIndependent(t *suite) {
	v := t.device(0)
	held, free := t.stream(v), t.stream(v)
	g := t.gates(1)
	m := t.alloc(v, 1000)
	g[0].hold(t, held)
	require.NoError(t, held.Memset(m.Ptr(), 1, 500))
	e, err := held.Record()
	require.NoError(t, err)
	defer e.Release()
	require.NoError(t, free.Memset(m.Ptr()+500, 2, 500))
	t.finish(free) // a stream that waited for the other would never get here
	t.pending(e)
	g[0].open()
	t.passes(e)
}

func testStreamClose(t *suite) {
	v := t.device(0)
	g := t.gates(1)
	m, h := t.alloc(v, 100), t.host(100)
	s, err := v.NewStream()
	require.NoError(t, err)
	g[0].hold(t, s)
	require.NoError(t, s.Memset(m.Ptr(), 7, 100))
	require.NoError(t, s.Copy(h.Ptr(), m.Ptr(), 100))
	e, err := s.Record()
	require.NoError(t, err)
	defer e.Release()
	require.NoError(t, s.Close())
	require.NoError(t, s.Close(), "closed twice")
	t.refused(s.Memset(m.Ptr(), 8, 100), "Memset", driver.ErrClosed)
	t.refused(s.Copy(h.Ptr(), m.Ptr(), 100), "Copy", driver.ErrClosed)
	_, err = s.Record()
	t.refused(err, "Record", driver.ErrClosed)
	t.refused(s.Wait(e), "Wait", driver.ErrClosed)
	t.refused(s.WaitValue(h.Ptr(), 1, driver.Equal), "WaitValue", driver.ErrClosed)
	t.refused(s.WriteValue(h.Ptr(), 1), "WriteValue", driver.ErrClosed)
	g[0].open()
	t.passes(e)
	require.Equal(t, byte(7), h.Bytes()[99], "what it was given still runs")
}

func testBorrowStream(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	if s.Handle() == 0 {
		t.Skip("streams have no handles")
	}
	g := t.gates(1)
	m, h := t.alloc(v, 100), t.host(100)
	b, err := v.BorrowStream(s.Handle())
	require.NoError(t, err)
	require.Equal(t, s.Handle(), b.Handle())
	require.Equal(t, v.ID(), b.Device())
	g[0].hold(t, s)
	require.NoError(t, b.Memset(m.Ptr(), 1, 100))
	require.NoError(t, s.Memset(m.Ptr(), 2, 50))
	require.NoError(t, b.Copy(h.Ptr(), m.Ptr(), 100))
	e, err := b.Record()
	require.NoError(t, err)
	defer e.Release()
	t.pending(e)
	g[0].open()
	t.passes(e)
	require.Equal(t, []byte{2, 1}, h.Bytes()[49:51])
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	require.NoError(t, s.Memset(m.Ptr(), 3, 100), "the stream itself goes on")
	t.finish(s)
}

func testEvents(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	e, err := s.Record()
	require.NoError(t, err)
	t.passes(e) // nothing came before it
	e.Release()

	g := t.gates(1)
	g[0].hold(t, s)
	first, err := s.Record()
	require.NoError(t, err)
	defer first.Release()
	second, err := s.Record()
	require.NoError(t, err)
	t.pending(first)
	t.pending(second)
	second.Release() // before it has passed; what is recorded next may be the same event again
	for range 10 {
		e, err := s.Record()
		require.NoError(t, err)
		t.pending(e)
		e.Release()
	}
	t.pending(first)
	g[0].open()
	t.passes(first)
}

func testEventOrder(t *suite) {
	v := t.device(0)
	producer, consumer := t.stream(v), t.stream(v)
	fill := t.function(v, Fill)
	const n = 10000
	a, b := t.alloc(v, 4*n), t.alloc(v, 4*n)
	g := t.gates(t.Rounds * 3)
	for i := range g {
		g[i].hold(t, producer)
		t.fill(producer, fill, a.Ptr(), uint32(i), n)
		e, err := producer.Record()
		require.NoError(t, err)
		require.NoError(t, consumer.Wait(e))
		e.Release()
		require.NoError(t, consumer.Copy(b.Ptr(), a.Ptr(), 4*n))
		passed, err := consumer.Record()
		require.NoError(t, err)
		t.pending(passed)
		g[i].open()
		t.passes(passed)
		require.Equal(t, repeat(uint32(i), n), t.get(consumer, b.Ptr(), 4*n))
		require.NoError(t, producer.Wait(passed))
		passed.Release()
	}
	// Waiting for a stream's own event, and for one twice, changes nothing.
	e, err := producer.Record()
	require.NoError(t, err)
	require.NoError(t, producer.Wait(e))
	require.NoError(t, producer.Wait(e))
	e.Release()
	t.finish(producer)
}

// testEventIsOnePoint: an event stands for all commands before it and for none after it, no
// matter who waits for it and when.
func testEventIsOnePoint(t *suite) {
	v := t.device(0)
	s, early, late := t.stream(v), t.stream(v), t.stream(v)
	g := t.gates(2)
	g[0].hold(t, s)
	e, err := s.Record()
	require.NoError(t, err)
	require.NoError(t, early.Wait(e))
	g[1].hold(t, s)
	for range 5 {
		x, err := s.Record()
		require.NoError(t, err)
		t.pending(x)
		x.Release()
	}
	require.NoError(t, late.Wait(e))
	g[0].open()
	t.finish(early, late) // with a later record's meaning these would never end
	t.passes(e)
	e.Release()
	last, err := s.Record()
	require.NoError(t, err)
	defer last.Release()
	t.pending(last)
	g[1].open()
	t.passes(last)
}

func testEventsBetweenDevices(t *suite) {
	v, w := t.two()
	s, r := t.stream(v), t.stream(w)
	a, b, h := t.alloc(v, 1000), t.alloc(w, 1000), t.host(1000)
	g := t.gates(1)
	g[0].hold(t, s)
	require.NoError(t, s.Memset(a.Ptr(), 5, 1000))
	t.after(r, s)
	require.NoError(t, r.Copy(b.Ptr(), a.Ptr(), 1000))
	t.after(s, r)
	require.NoError(t, s.Memset(a.Ptr(), 6, 1000))
	require.NoError(t, r.Copy(h.Ptr(), b.Ptr(), 1000))
	e, err := r.Record()
	require.NoError(t, err)
	defer e.Release()
	t.pending(e)
	g[0].open()
	t.passes(e)
	require.Equal(t, byte(5), h.Bytes()[0])
	require.Equal(t, byte(5), h.Bytes()[999])
	t.finish(s)
}

func testManyEvents(t *suite) {
	v := t.device(0)
	a, b := t.stream(v), t.stream(v)
	m := t.alloc(v, 4)
	n := 500 * t.Rounds
	add, one := t.function(v, Add), t.alloc(v, 4)
	require.NoError(t, a.Memset(m.Ptr(), 0, 4))
	t.put(a, one.Ptr(), words(1))
	for range n {
		t.after(b, a)
		t.add(b, add, m.Ptr(), one.Ptr(), 1)
		t.after(a, b)
		t.add(a, add, m.Ptr(), one.Ptr(), 1)
	}
	t.finish(b)
	require.Equal(t, words(uint32(2*n)), t.get(a, m.Ptr(), 4))
	// Many that are alive at the same time.
	var events []driver.Event
	for range n {
		e, err := a.Record()
		require.NoError(t, err)
		events = append(events, e)
	}
	t.finish(a)
	for _, e := range events {
		ok, err := e.Done()
		require.NoError(t, err)
		require.True(t, ok)
		e.Release()
	}
}

func testSyncContext(t *suite) {
	s := t.stream(t.device(0))
	g := t.gates(1)
	g[0].hold(t, s)
	e, err := s.Record()
	require.NoError(t, err)
	defer e.Release()
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	err = e.Sync(ctx)
	t.refused(err, "Sync", context.Canceled)
	t.pending(e)
	g[0].open()
	t.passes(e)
	require.NoError(t, e.Sync(ctx), "an event that has passed wins over a context that has ended")
}

func testWordsFromHost(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	const n, rounds = 4096, 20
	h, m, out := t.host(64), t.alloc(v, n), t.host(n)
	in := t.host(n)
	for i := range rounds {
		require.NoError(t, s.WaitValue(h.Ptr()+4, uint32(i+1), driver.AtLeast))
		require.NoError(t, s.Copy(m.Ptr(), in.Ptr(), n))
		require.NoError(t, s.Copy(out.Ptr(), m.Ptr(), n))
		e, err := s.Record()
		require.NoError(t, err)
		t.pending(e)
		// The host's turn: the stream copies the bytes that it writes now.
		copy(in.Bytes(), pattern(n, i))
		h.Store32(4, uint32(i+1))
		t.passes(e)
		e.Release()
		require.Equal(t, pattern(n, i), out.Bytes())
	}
}

func testWordsToHost(t *suite) {
	v := t.device(0)
	s := t.stream(v)
	const n, rounds = 4096, 20
	flags, out := t.host(256), t.host(n*rounds)
	m, fill := t.alloc(v, n), t.function(v, Fill)
	for i := range rounds {
		t.fill(s, fill, m.Ptr(), uint32(i), n/4)
		require.NoError(t, s.Copy(out.Ptr()+driver.Ptr(i*n), m.Ptr(), n))
		require.NoError(t, s.WriteValue(flags.Ptr()+128, uint32(i+1)))
	}
	for i := range rounds {
		require.NoError(t, driver.AwaitWord(t.ctx, flags, 128, uint32(i+1), driver.AtLeast))
		require.Equal(t, repeat(uint32(i), n/4), out.Bytes()[i*n:(i+1)*n], "seen before what it stands for")
	}
	require.Zero(t, flags.Load32(124))
	require.Zero(t, flags.Load32(132))
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	t.refused(driver.AwaitWord(ctx, flags, 128, rounds+1, driver.AtLeast), "AwaitWord", context.Canceled)
	t.finish(s)
}

func testWordsBetweenStreams(t *suite) {
	v := t.device(0)
	a, b := t.stream(v), t.stream(v)
	for _, place := range []string{"page-locked", "device"} {
		var at driver.Ptr
		if place == "device" {
			at = t.alloc(v, 8).Ptr()
			t.put(a, at, words(0, 0))
			t.after(b, a)
		} else {
			at = t.host(8).Ptr()
		}
		m, out := t.alloc(v, 1000), t.host(1000)
		for i := range uint32(10) {
			require.NoError(t, b.WaitValue(at, i+1, driver.AtLeast))
			require.NoError(t, b.Copy(out.Ptr(), m.Ptr(), 1000))
			require.NoError(t, b.WriteValue(at+4, i+1))
			require.NoError(t, a.Memset(m.Ptr(), byte(i+1), 1000))
			require.NoError(t, a.WriteValue(at, i+1))
			require.NoError(t, a.WaitValue(at+4, i+1, driver.AtLeast))
			t.finish(b)
			require.Equal(t, byte(i+1), out.Bytes()[999], place)
		}
		t.finish(a)
	}
}

func testWordsBetweenDevices(t *suite) {
	v, w := t.two()
	if l, err := t.d.Link(0, 1); err != nil || !l.Peer {
		t.Skip("no peer access")
	}
	require.NoError(t, v.EnablePeer(1))
	a, b := t.stream(v), t.stream(w)
	word := t.alloc(w, 4) // where the waiting device has it
	t.put(b, word.Ptr(), words(0))
	x, y, out := t.alloc(v, 1000), t.alloc(w, 1000), t.host(1000)
	require.NoError(t, b.WaitValue(word.Ptr(), 1, driver.AtLeast))
	require.NoError(t, b.Copy(out.Ptr(), y.Ptr(), 1000))
	require.NoError(t, a.Memset(x.Ptr(), 3, 1000))
	require.NoError(t, a.Copy(y.Ptr(), x.Ptr(), 1000))
	require.NoError(t, a.WriteValue(word.Ptr(), 1))
	t.finish(b, a)
	require.Equal(t, byte(3), out.Bytes()[500])
	require.NoError(t, v.DisablePeer(1))
}

func testConditions(t *suite) {
	v := t.device(0)
	h := t.host(4)
	for _, c := range []struct {
		cond  driver.Condition
		value uint32
		no    []uint32
		yes   uint32
	}{
		{driver.AtLeast, 5, []uint32{0, 4}, 5},
		{driver.AtLeast, 5, []uint32{math.MaxUint32, 0x80000006}, 6},
		{driver.AtLeast, 0xfffffffe, []uint32{0xfffffffd, 0x80000000}, 1},
		{driver.Equal, 7, []uint32{0, 6, 8}, 7},
	} {
		t.Run(fmt.Sprintf("%v %d", c.cond, c.value), func(tt *testing.T) {
			s := *t
			s.T = tt
			st := s.stream(v)
			defer st.Close()
			h.Store32(0, c.no[0])
			require.NoError(tt, st.WaitValue(h.Ptr(), c.value, c.cond))
			e, err := st.Record()
			require.NoError(tt, err)
			defer e.Release()
			for _, no := range c.no {
				require.False(tt, c.cond.Holds(no, c.value))
				h.Store32(0, no)
				s.pending(e)
			}
			require.True(tt, c.cond.Holds(c.yes, c.value))
			h.Store32(0, c.yes)
			s.passes(e)
		})
	}
}

func testRefusedWords(t *suite) {
	s := t.stream(t.device(0))
	h := t.host(64)
	t.refused(s.WaitValue(h.Ptr()+1, 1, driver.Equal), "WaitValue", driver.ErrInvalid)
	t.refused(s.WaitValue(0, 1, driver.Equal), "WaitValue", driver.ErrInvalid)
	t.refused(s.WaitValue(h.Ptr(), 1, driver.Condition(9)), "WaitValue", driver.ErrInvalid)
	t.refused(s.WriteValue(h.Ptr()+2, 1), "WriteValue", driver.ErrInvalid)
	t.refused(s.WriteValue(0, 1), "WriteValue", driver.ErrInvalid)
	require.Panics(t, func() { h.Load32(2) })
	require.Panics(t, func() { h.Store32(1, 1) })
	t.finish(s)
}
