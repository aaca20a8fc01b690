package wire

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

// raw turns headers and payloads into bytes.
func raw(parts ...any) []byte {
	var out []byte
	for _, p := range parts {
		switch p := p.(type) {
		case header:
			var b [headerLen]byte
			p.put(b[:])
			out = append(out, b[:]...)
		case []byte:
			out = append(out, p...)
		case string:
			out = append(out, p...)
		}
	}
	return out
}

func note(opcode, slot, length uint64) header {
	return header{nbytes: headerLen, opcode: opcode, slot: slot, length: length}
}

func data(slot, length uint64) header {
	return header{nbytes: headerLen + length, opcode: opData, slot: slot, length: length}
}

// next reads one header from the other end of a mesh.
func next(t testing.TB, c net.Conn) header {
	t.Helper()
	var b [headerLen]byte
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	must.Get(io.ReadFull(c, b[:]))
	return must.Get(parseHeader(b[:]))
}

func put(t testing.TB, c net.Conn, parts ...any) {
	t.Helper()
	must.Get(c.Write(raw(parts...)))
}

func reset(c net.Conn) {
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// What a rank transmits, byte for byte in order, towards a peer that is no rank
// of this library.
func TestConversation(t *testing.T) {
	m, c := alone(t)
	require.Equal(t, helloHeader(), next(t, c))

	in := make([]byte, 3)
	r := recv(m, 1, 7, in)
	require.Equal(t, note(opRecvReady, 7, 3), next(t, c))
	put(t, c, note(opSendReady, 7, 3), data(7, 3), "abc")
	require.NoError(t, wait(t, r))
	require.Equal(t, "abc", string(in))

	s := send(m, 1, 8, []byte("xy"))
	require.Equal(t, note(opSendReady, 8, 2), next(t, c))
	pending(t, s)
	put(t, c, note(opRecvReady, 8, 2))
	require.Equal(t, data(8, 2), next(t, c))
	var b [2]byte
	_, err := io.ReadFull(c, b[:])
	require.NoError(t, err)
	require.Equal(t, "xy", string(b[:]))
	require.NoError(t, wait(t, s))

	any := recvAny(m, 9, in[:0])
	put(t, c, note(opSendReady, 9, 0))
	require.Equal(t, note(opRecvReady, 9, 0), next(t, c))
	put(t, c, data(9, 0))
	require.NoError(t, wait(t, any))
	require.Equal(t, 1, any.Peer)

	go m.Close()
	require.Equal(t, control(ctlBye), next(t, c))
	_, err = c.Read(b[:])
	require.Equal(t, io.EOF, err)
}

// A send that meets a waiting receive leaves as one write.
func TestSendIsOneWrite(t *testing.T) {
	m := New(0, 2, Options{})
	defer m.Close()
	a, b := net.Pipe()
	defer b.Close()
	writes := &countWrites{Conn: a}
	require.NoError(t, m.Attach(1, writes))
	next(t, b)
	put(t, b, note(opRecvReady, 1, 0))
	eventually(t, "RECV_READY", func() bool { _, n := state(m); return n == 1 })
	before := writes.n.Load()
	s := send(m, 1, 1, nil)
	require.Equal(t, note(opSendReady, 1, 0), next(t, b))
	require.Equal(t, data(1, 0), next(t, b))
	require.NoError(t, wait(t, s))
	require.Equal(t, before+1, writes.n.Load())
}

type countWrites struct {
	net.Conn
	n atomic.Int64
}

func (c *countWrites) Write(b []byte) (int, error) {
	c.n.Add(1)
	return c.Conn.Write(b)
}

// Messages that no rank sends are protocol faults of the peer; nothing is
// written anywhere.
func TestProtocolFaults(t *testing.T) {
	hello := helloHeader()
	abort := func(kind transport.FaultKind, rank, reporter int) header {
		return abortHeader(&transport.Fault{Kind: kind, Rank: rank, Reporter: reporter}, controlVersion)
	}
	cases := map[string][]any{
		"opcode 0":                       {header{nbytes: 52, opcode: opSendBuffer, length: 4}, "abcd"},
		"opcode 4":                       {header{nbytes: 48, opcode: 4}},
		"opcode huge":                    {header{nbytes: 48, opcode: 1 << 40}},
		"short message":                  {header{nbytes: 47, opcode: opData}},
		"length wraps":                   {header{nbytes: 1 << 63, opcode: opData, length: 1 << 63}},
		"length and nbytes disagree":     {header{nbytes: 50, opcode: opData, length: 3}, "ab"},
		"notification with payload":      {header{nbytes: 52, opcode: opSendReady, length: 4}, "abcd"},
		"DATA nobody asked for":          {data(99, 4), "abcd"},
		"huge DATA nobody asked for":     {data(99, 1<<62)},
		"DATA that was not announced":    {data(5, 4), "abcd"},
		"DATA twice":                     {note(opSendReady, 5, 4), data(5, 4), "abcd", data(5, 4), "abcd"},
		"BYE without HELLO":              {control(ctlBye)},
		"ABORT without HELLO":            {abort(transport.FaultAborted, 0, 0)},
		"HELLO twice":                    {hello, hello},
		"HELLO late":                     {note(opSendReady, 77, 1), hello},
		"unknown control":                {hello, control(200)},
		"ABORT of kind 0":                {hello, abort(0, 0, 0)},
		"ABORT of unknown kind":          {hello, abort(99, 0, 0)},
		"ABORT about a rank that is not": {hello, abort(transport.FaultAborted, 2, 0)},
		"ABORT by a rank that is not":    {hello, abort(transport.FaultAborted, 0, -2)},
		"garbage":                        {"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"},
	}
	for name, parts := range cases {
		t.Run(name, func(t *testing.T) {
			m, c := alone(t)
			buf := []byte("....untouched")
			r := recv(m, 1, 5, buf[:4])
			other := send(m, 1, 6, buf)
			put(t, c, parts...)
			f := failed(t, m)
			require.Equal(t, transport.FaultProtocol, f.Kind)
			require.Equal(t, 1, f.Rank)
			require.Equal(t, 0, f.Reporter)
			require.Same(t, f, faultOf(t, other))
			if name != "DATA twice" {
				require.Same(t, f, faultOf(t, r))
				require.Equal(t, "....untouched", string(buf))
			}
		})
	}
}

// If lengths differ, both sides end with an error that names the other side, and a
// peer that does not check lengths gets no DATA.
func TestLengthsDiffer(t *testing.T) {
	t.Run("announced, receive posted", func(t *testing.T) {
		m, c := alone(t)
		r := recv(m, 1, 5, make([]byte, 4))
		put(t, c, note(opSendReady, 5, 8))
		sizeFault(t, m, r, 4, 8)
	})
	t.Run("announced, receive late", func(t *testing.T) {
		m, c := alone(t)
		put(t, c, note(opSendReady, 5, 2))
		eventually(t, "SEND_READY", func() bool { _, n := state(m); return n == 1 })
		sizeFault(t, m, recv(m, 1, 5, make([]byte, 4)), 4, 2)
	})
	t.Run("receive from any", func(t *testing.T) {
		m, c := alone(t)
		r := recvAny(m, 5, make([]byte, 4))
		put(t, c, note(opSendReady, 5, 2))
		sizeFault(t, m, r, 4, 2)
	})
	for _, n := range []uint64{0, 3, 5, 1 << 40} {
		t.Run(fmt.Sprintf("DATA of %d", n), func(t *testing.T) {
			m, c := alone(t)
			buf := []byte("....untouched")
			r := recv(m, 1, 5, buf[:4])
			put(t, c, note(opSendReady, 5, 4), data(5, n), "abcdefgh")
			sizeFault(t, m, r, 4, n)
			require.Equal(t, "....untouched", string(buf))
		})
	}
	for _, order := range []string{"send first", "receive first"} {
		t.Run("peer receives less, "+order, func(t *testing.T) {
			m, c := alone(t)
			next(t, c)
			var s *transport.Request
			if order == "send first" {
				s = send(m, 1, 5, []byte("abcdef"))
				require.Equal(t, note(opSendReady, 5, 6), next(t, c))
				put(t, c, note(opRecvReady, 5, 4))
			} else {
				put(t, c, note(opRecvReady, 5, 4))
				eventually(t, "RECV_READY", func() bool { _, n := state(m); return n == 1 })
				s = send(m, 1, 5, []byte("abcdef"))
				require.Equal(t, note(opSendReady, 5, 6), next(t, c))
			}
			f := faultOf(t, s)
			require.Equal(t, transport.FaultMismatch, f.Kind)
			require.Equal(t, 1, f.Rank)
			require.Equal(t, uint64(ctlAbort), controlCode(next(t, c).slot))
		})
	}
}

func sizeFault(t *testing.T, m *Mesh, r *transport.Request, want, got uint64) {
	t.Helper()
	err := wait(t, r)
	size := must.As[*transport.SizeError](t, err)
	require.Equal(t, transport.SizeError{Peer: 1, Slot: 5, Want: want, Got: got}, *size)
	f := failed(t, m)
	require.Equal(t, transport.FaultMismatch, f.Kind)
	require.Equal(t, 1, f.Rank)
}

func TestNoticesAreBounded(t *testing.T) {
	m, c := alone(t)
	chunk := make([]any, 1024)
	for i := range chunk {
		chunk[i] = note(opSendReady, uint64(i), 1)
	}
	b := raw(chunk...)
	for range maxNotices/len(chunk) + 1 {
		if _, err := c.Write(b); err != nil {
			break
		}
	}
	f := failed(t, m)
	require.Equal(t, transport.FaultProtocol, f.Kind)
	require.ErrorContains(t, f, "announced")
}

// TestPeerIsReset: a connection that is reset is a death too.
func TestPeerIsReset(t *testing.T) {
	ms := group(t, 3)
	for _, m := range ms[:2] {
		eventually(t, "HELLO", func() bool { return m.Diagnose(0)[2].Native })
	}
	r, waits := recv(ms[0], 2, 1, make([]byte, 4)), recv(ms[1], 0, 1, make([]byte, 4))
	for _, p := range ms[2].pairs[:2] {
		reset(p.conn)
	}
	for _, r := range []*transport.Request{r, waits} {
		f := faultOf(t, r)
		require.Equal(t, transport.FaultPeerDied, f.Kind)
		require.Equal(t, 2, f.Rank)
	}
}

// TestASlowRankBlamesNobody: no rank has answered this one. Then a connection ends without a reason,
// because the other rank had to leave before its last words were written. If another rank answers, the
// end of a connection is a death.
func TestASlowRankBlamesNobody(t *testing.T) {
	t.Parallel()
	for name, answers := range map[string]bool{"nobody answers": false, "another rank answers": true} {
		t.Run(name, func(t *testing.T) {
			m := New(0, 3, Options{})
			defer m.Close()
			var peers [3]net.Conn
			for r := 1; r < 3; r++ {
				a, b := tcpPair(t)
				defer b.Close()
				require.NoError(t, m.Attach(r, a))
				if r == 2 && answers {
					other := New(2, 3, Options{})
					defer other.Close()
					require.NoError(t, other.Attach(0, b))
				} else {
					put(t, b, helloHeader())
				}
				require.True(t, m.SpeaksVersion2(t.Context(), r))
				peers[r] = b
			}
			r := recv(m, 1, 7, make([]byte, 8))
			ask := func() bool { return m.Diagnose(200 * time.Millisecond)[2].Answered } // as an operation that has timed out
			ask()
			if ask(); answers {
				eventually(t, "an answer of rank 2", ask)
			}
			require.NoError(t, peers[1].Close())
			f := failed(t, m)
			require.Error(t, wait(t, r))
			if answers {
				require.Equal(t, transport.FaultPeerDied, f.Kind)
				require.Equal(t, 1, f.Rank)
				return
			}
			require.Equal(t, transport.FaultTimeout, f.Kind)
			require.Equal(t, -1, f.Rank, "this rank may be slow, or the others")
			require.ErrorContains(t, f.Err, "no other rank answers this one")
		})
	}
}

// The connection of a PyTorch rank ends: nobody can tell whether it died.
func TestForeignPeerEnds(t *testing.T) {
	t.Run("idle", func(t *testing.T) {
		departed := make(chan int, 1)
		m := New(0, 2, Options{Departed: func(peer int) { departed <- peer }})
		defer m.Close()
		a, c := tcpPair(t)
		require.NoError(t, m.Attach(1, a))
		put(t, c, note(opSendReady, 5, 1))
		c.Close()
		require.Equal(t, 1, <-departed)
		require.Nil(t, m.Fault())
		slots, notices := state(m)
		require.Zero(t, slots)
		require.Zero(t, notices)
		f := faultOf(t, recvAny(m, 5, make([]byte, 1)))
		require.Equal(t, transport.FaultPeerDied, f.Kind)
		require.Equal(t, 1, f.Rank)
	})
	t.Run("after data", func(t *testing.T) {
		m, c := alone(t)
		r := recv(m, 1, 5, make([]byte, 4))
		put(t, c, note(opSendReady, 5, 4), data(5, 4), "abcd")
		c.Close()
		require.NoError(t, wait(t, r))
	})
	for name, parts := range map[string][]any{
		"before data":     {note(opSendReady, 5, 4)},
		"inside a header": {note(opSendReady, 5, 4), raw(data(5, 4))[:20]},
		"inside data":     {note(opSendReady, 5, 4), data(5, 4), "ab"},
	} {
		t.Run(name, func(t *testing.T) {
			m, c := alone(t)
			r := recv(m, 1, 5, make([]byte, 4))
			put(t, c, parts...)
			c.Close()
			f := faultOf(t, r)
			require.Equal(t, transport.FaultPeerDied, f.Kind)
			require.Equal(t, 1, f.Rank)
		})
	}
	t.Run("under a send", func(t *testing.T) {
		m, c := alone(t)
		next(t, c)
		put(t, c, note(opRecvReady, 5, 64<<20))
		s := send(m, 1, 5, make([]byte, 64<<20))
		next(t, c)
		reset(c)
		require.Equal(t, transport.FaultPeerDied, faultOf(t, s).Kind)
	})
}

// A peer that has stopped reading, with its socket full, delays neither Abort
// nor Close, and the buffer is given back.
func TestAbortPastStoppedPeer(t *testing.T) {
	t.Parallel()
	m, c := alone(t)
	const n = 64 << 20
	put(t, c, note(opRecvReady, 1, n))
	eventually(t, "RECV_READY", func() bool { _, k := state(m); return k == 1 })
	s, r := send(m, 1, 1, make([]byte, n)), recv(m, 1, 2, make([]byte, 1))
	require.Equal(t, helloHeader(), next(t, c))
	require.Equal(t, note(opSendReady, 1, n), next(t, c))
	require.Equal(t, data(1, n), next(t, c))
	f := &transport.Fault{Kind: transport.FaultTimeout, Rank: 1}
	m.Abort(f)
	require.Same(t, f, faultOf(t, r))
	require.Same(t, f, faultOf(t, s))
	require.NoError(t, m.Close())
}

// A live peer in the middle of a large message gets it and the ABORT behind it.
func TestAbortBehindLargeMessage(t *testing.T) {
	m, c := alone(t)
	m.Limits = patient
	const n = 16 << 20
	next(t, c)
	put(t, c, note(opRecvReady, 1, n))
	s := send(m, 1, 1, make([]byte, n))
	next(t, c)
	require.Equal(t, data(1, n), next(t, c))
	m.Abort(&transport.Fault{Kind: transport.FaultAborted, Rank: 0, Op: 1, Seq: 2})
	must.Get(io.CopyN(io.Discard, c, n))
	require.NoError(t, wait(t, s))
	f := must.Get(parseAbort(next(t, c), 2))
	require.Equal(t, transport.Fault{Kind: transport.FaultAborted, Op: 1, Seq: 2}, *f)
}

// A receive whose bytes are coming in is not ended before its buffer is free.
func TestAbortInsideReceive(t *testing.T) {
	t.Parallel()
	m, c := alone(t)
	buf := make([]byte, 1<<20)
	r := recv(m, 1, 1, buf)
	put(t, c, note(opSendReady, 1, 1<<20), data(1, 1<<20), make([]byte, 1000))
	eventually(t, "DATA", func() bool { s, _ := state(m); return s == 0 })
	f := &transport.Fault{Kind: transport.FaultAborted}
	m.Abort(f)
	require.Same(t, f, faultOf(t, r))
	for i := range buf { // the race detector watches
		buf[i] = 1
	}
	put(t, c, make([]byte, 1000))
	require.NoError(t, m.Close())
	require.Equal(t, byte(1), buf[1500])
}

// A peer whose HELLO comes while Diagnose waits was not asked and is not waited for.
func TestDiagnoseDoesNotWaitForTheUnasked(t *testing.T) {
	m := New(0, 3, Options{})
	defer m.Close()
	a, x := tcpPair(t)
	b, y := tcpPair(t)
	require.NoError(t, m.Attach(1, a))
	require.NoError(t, m.Attach(2, b))
	next(t, x)
	put(t, x, helloHeader())
	greeted := func(peer int) func() bool {
		return func() bool { m.Mu.Lock(); defer m.Mu.Unlock(); return m.pairs[peer].Native }
	}
	eventually(t, "HELLO", greeted(1))
	health := make(chan []transport.Health)
	go func() { health <- m.Diagnose(time.Hour) }()
	ping := next(t, x)
	put(t, y, helloHeader())
	eventually(t, "HELLO", greeted(2))
	pong := control(ctlPong)
	pong.offset, pong.length, pong.roffset = ping.offset, 5, 4
	put(t, x, pong)
	all := <-health
	all[0].Links = nil // its connections with the others
	require.Equal(t, []transport.Health{
		{Rank: 0, Native: true, Answered: true, Op: transport.NoOp},
		{Rank: 1, Native: true, Answered: true, Issued: 5, Completed: 4},
		{Rank: 2, Native: true},
	}, all)
	x.Close()
	y.Close()
}

func TestClose(t *testing.T) {
	t.Run("sends what is queued", func(t *testing.T) {
		t.Parallel()
		ms := group(t, 2)
		ms[0].Limits = patient
		in := make([]byte, 32<<20)
		r := recv(ms[1], 0, 1, in)
		eventually(t, "RECV_READY", func() bool { _, n := state(ms[0]); return n == 1 })
		s := send(ms[0], 1, 1, pattern(len(in), 1))
		require.NoError(t, ms[0].Close())
		require.NoError(t, wait(t, s))
		require.NoError(t, wait(t, r))
		require.Equal(t, pattern(len(in), 1), in)
	})
	t.Run("peer does not read", func(t *testing.T) {
		t.Parallel()
		m, c := alone(t)
		put(t, c, note(opRecvReady, 1, 64<<20))
		s := send(m, 1, 1, make([]byte, 64<<20))
		require.NoError(t, m.Close())
		require.ErrorIs(t, wait(t, s), transport.ErrClosed)
	})
	t.Run("the process waits for a CPU", func(t *testing.T) {
		t.Parallel()
		m, c := alone(t)
		m.Limits.Close = time.Second
		var checks atomic.Int64
		late := make(chan struct{})
		m.Late = func(time.Time) time.Duration {
			if checks.Add(1) == 12 { // a Close that is not extended ends before the 11th
				close(late)
			}
			return m.Limits.Close
		}
		const n = 64 << 20
		next(t, c)
		put(t, c, note(opRecvReady, 1, n))
		s := send(m, 1, 1, make([]byte, n))
		require.Equal(t, note(opSendReady, 1, n), next(t, c))
		require.Equal(t, data(1, n), next(t, c))
		closed := make(chan error, 1)
		go func() { closed <- m.Close() }()
		select {
		case <-late:
		case err := <-closed:
			require.Fail(t, "Close has not waited", err)
		}
		must.Get(io.CopyN(io.Discard, c, n))
		require.Equal(t, control(ctlBye), next(t, c))
		require.NoError(t, wait(t, s))
		c.Close()
		require.NoError(t, <-closed)
	})
	t.Run("the writer waits for a CPU", func(t *testing.T) {
		t.Parallel()
		for starved, want := range map[int64]error{5: nil, 1000: io.EOF} {
			a, b := tcpPair(t)
			c := &faulty{Conn: a, pieces: 1 << 10}
			c.reads.Store(1 << 40)
			c.writes.Store(1 << 40)
			m := New(0, 2, Options{})
			m.Limits = mesh.Limits{Close: 100 * time.Millisecond, Step: 20 * time.Millisecond}
			m.Late = func(time.Time) time.Duration { return time.Second }
			require.NoError(t, m.Attach(1, c))
			next(t, b) // HELLO
			c.late.Store(starved)
			closed := make(chan error, 1)
			go func() { closed <- m.Close() }()
			h := make([]byte, headerLen)
			b.SetReadDeadline(time.Now().Add(patience))
			_, err := io.ReadFull(b, h)
			require.Equal(t, want, err)
			b.Close()
			require.NoError(t, <-closed)
		}
	})
	t.Run("the process always waits for a CPU", func(t *testing.T) {
		t.Parallel()
		m, c := alone(t)
		m.Limits.Close = 100 * time.Millisecond
		m.Late = func(time.Time) time.Duration { return m.Limits.Close }
		put(t, c, note(opRecvReady, 1, 64<<20))
		s := send(m, 1, 1, make([]byte, 64<<20))
		require.NoError(t, m.Close())
		require.ErrorIs(t, wait(t, s), transport.ErrClosed)
	})
	t.Run("attach after", func(t *testing.T) {
		t.Parallel()
		m := New(0, 2, Options{})
		require.NoError(t, m.Close())
		a, b := tcpPair(t)
		require.ErrorIs(t, m.Attach(1, a), transport.ErrClosed)
		_, err := b.Read(make([]byte, 1))
		require.Equal(t, io.EOF, err)
		b.Close()
	})
}

// faulty is a connection that hands out bytes in small pieces and breaks after
// a number of bytes in either direction.
type faulty struct {
	net.Conn
	reads, writes atomic.Int64
	late          atomic.Int64 // so many writes end at the deadline
	pieces        int
}

var errBroken = errors.New("broken by the test")

func (c *faulty) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b[:min(len(b), c.pieces)])
	if c.reads.Add(-int64(n)) < 0 {
		return 0, errBroken
	}
	return n, err
}

func (c *faulty) Write(b []byte) (int, error) {
	if c.late.Add(-1) >= 0 {
		return 0, os.ErrDeadlineExceeded
	}
	if left := c.writes.Load(); left < int64(len(b)) {
		n, _ := c.Conn.Write(b[:max(left, 0)])
		c.writes.Store(0)
		return n, errBroken
	}
	c.writes.Add(-int64(len(b)))
	return c.Conn.Write(b)
}

// Whatever byte a connection breaks at, in either direction, both ranks end
// every request, and a request that ends well has the right bytes.
func TestConnectionBreaksAnywhere(t *testing.T) {
	const n, rounds = 100, 3
	total := headerLen + rounds*(3*headerLen+n)
	for _, direction := range []string{"read", "write"} {
		for at := 0; at < total; at += 13 {
			// Virtual time, because a mesh waits if only one direction breaks.
			synctest.Test(t, func(t *testing.T) {
				t.Logf("%s at %d", direction, at)
				a, b := net.Pipe()
				f := &faulty{Conn: a, pieces: 1 + at%50}
				f.reads.Store(1 << 40)
				f.writes.Store(1 << 40)
				if direction == "read" {
					f.reads.Store(int64(at))
				} else {
					f.writes.Store(int64(at))
				}
				x, y := New(0, 2, Options{}), New(1, 2, Options{})
				require.NoError(t, x.Attach(1, f))
				require.NoError(t, y.Attach(0, b))
				var rs []*transport.Request
				for i := range rounds {
					rs = append(rs, recv(x, 1, 1, make([]byte, n)), recv(y, 0, 1, make([]byte, n)),
						send(x, 1, 1, pattern(n, i)), send(y, 0, 1, pattern(n, i)))
				}
				for i, r := range rs {
					if wait(t, r) == nil {
						require.Equal(t, pattern(n, i/4), r.Buf)
					}
				}
				require.NotNil(t, failed(t, x))
				require.NoError(t, x.Close())
				require.NoError(t, y.Close())
			})
		}
	}
}

func TestGolden(t *testing.T) {
	// As captured from PyTorch: the three messages of an all-reduce of four
	// floats between two ranks, and a barrier's.
	for _, c := range []struct {
		h    header
		want string
	}{
		{note(opRecvReady, 4<<56, 4), "3000000000000000 0300000000000000 0000000000000004 0000000000000000 0400000000000000 0000000000000000"},
		{note(opSendReady, 4<<56, 4), "3000000000000000 0200000000000000 0000000000000004 0000000000000000 0400000000000000 0000000000000000"},
		{data(4<<56, 4), "3400000000000000 0100000000000000 0000000000000004 0000000000000000 0400000000000000 0000000000000000"},
		{note(opRecvReady, 7<<56|2<<24, 0), "3000000000000000 0300000000000000 0000000200000007 0000000000000000 0000000000000000 0000000000000000"},
		{helloHeader(), "3000000000000000 0200000000000000 00000000000001c1 0000000000000000 0400000000000000 0000000000000000"},
		{control(ctlBye), "3000000000000000 0200000000000000 00000000000002c1 0000000000000000 0000000000000000 0000000000000000"},
		{abortHeader(&transport.Fault{Kind: transport.FaultPeerDied, Rank: -1, Reporter: 3, Op: 7, Seq: 258}, controlVersion),
			"3000000000000000 0200000000000000 07010000000003c1 ffffffffffffffff 0300000000000000 0201000000000000"},
		{abortHeader(&transport.Fault{Kind: transport.FaultLink, Rank: 1, Reporter: 3, Op: 7, Seq: 258}, 3),
			"3000000000000000 0200000000000000 070a0000000003c1 0100000000000000 0300000000000000 0201000000000000"},
		{abortHeader(&transport.Fault{Kind: transport.FaultLink, Rank: 1, Reporter: 3, Op: 7, Seq: 258}, 2),
			"3000000000000000 0200000000000000 07030000000003c1 ffffffffffffffff 0300000000000000 0201000000000000"},
		{wordsHeaders("no disk")[0], "3000000000000000 0200000000000000 07000000000006c1 6e6f206469736b00 0000000000000000 0000000000000000"},
	} {
		b := raw(c.h)
		got := ""
		for i := 0; i < headerLen; i += 8 {
			got += fmt.Sprintf(" %x", b[i:i+8])
		}
		require.Equal(t, c.want, got[1:])
		require.Equal(t, c.h, must.Get(parseHeader(b)))
	}
}

// TestWords: the cause of an ABORT goes before it, but not to peers that would not understand it.
func TestWords(t *testing.T) {
	long := strings.Repeat("é", transport.MaxWords)
	for _, c := range []struct {
		name    string
		version uint64
		cause   error
		want    string
	}{
		{"short", 2, errors.New("no disk"), "no disk"},
		{"long", 2, errors.New(long), long[:transport.MaxWords]},
		{"several lines", 2, errors.New("one\ntwo\n\nstack"), "one; two"},
		{"a peer of version 1", 1, errors.New("no disk"), ""},
		{"nothing to say", 2, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, far := alone(t)
			require.Equal(t, helloHeader(), next(t, far))
			hello := control(ctlHello)
			hello.length = c.version
			put(t, far, hello)
			m.SpeaksVersion2(t.Context(), 1)
			m.Abort(&transport.Fault{Kind: transport.FaultAborted, Err: c.cause})
			var words []byte
			h := next(t, far)
			for ; controlCode(h.slot) == ctlWords; h = next(t, far) {
				words = must.Get(parseWords(words, h))
			}
			require.Equal(t, uint64(ctlAbort), controlCode(h.slot))
			require.Equal(t, c.want, string(words))
		})
	}
	for name, h := range map[string]header{"none": control(ctlWords), "too many": {slot: 25}, "over the limit": {slot: 1}} {
		words := make([]byte, 0, transport.MaxWords)
		if name == "over the limit" {
			words = words[:transport.MaxWords]
		}
		require.ErrorContains(t, must.Err(parseWords(words, h)), "WORDS", name)
	}
}

// Any bytes from a peer end in a fault or are used; the mesh always closes, and
// never writes outside a posted buffer.
func FuzzPeer(f *testing.F) {
	f.Add(raw(note(opSendReady, 1, 4), data(1, 4), "abcd"))
	f.Add(raw(helloHeader(), note(opRecvReady, 2, 4), control(ctlPing), control(ctlBye)))
	f.Add(raw(helloHeader(), abortHeader(&transport.Fault{Kind: transport.FaultAborted}, controlVersion)))
	f.Add(raw(helloHeader(), wordsHeaders("why")[0], abortHeader(&transport.Fault{Kind: transport.FaultAborted}, controlVersion)))
	f.Add(raw(note(opSendReady, 3, 4), data(3, 4), "abcd", data(1, 1<<60)))
	f.Add(raw(note(opRecvReady, 2, 4), note(opRecvReady, 2, 4), note(opRecvReady, 9, 1<<63)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := New(0, 2, Options{})
		near, far := net.Pipe()
		require.NoError(t, m.Attach(1, near))
		mem := []byte("....guard")
		rs := []*transport.Request{recv(m, 1, 1, mem[:4]), send(m, 1, 2, []byte("wxyz")), recvAny(m, 3, make([]byte, 4))}
		go io.Copy(io.Discard, far)
		far.Write(b)
		far.Close()
		for _, r := range rs {
			wait(t, r)
		}
		require.NoError(t, m.Close())
		require.Equal(t, "guard", string(mem[4:]))
	})
}

func FuzzHeader(f *testing.F) {
	f.Add(raw(data(1, 4)))
	f.Add(raw(helloHeader()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerLen {
			return
		}
		h, err := parseHeader(b)
		if err != nil {
			return
		}
		require.Equal(t, b[:headerLen], raw(h))
		if isControl(h.slot) && controlCode(h.slot) == ctlAbort {
			if fault, err := parseAbort(h, 4); err == nil {
				require.Contains(t, []int{-1, 0, 1, 2, 3}, fault.Rank)
			}
		}
	})
}
