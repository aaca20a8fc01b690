package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/transport"
)

// stranger is the place of a rank that a test plays itself.
func stranger() address {
	return address{token: newToken(), places: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}}
}

// call connects with an endpoint and says hello.
func call(t testing.TB, e *Endpoint, h hello) net.Conn {
	t.Helper()
	c := must.Get(net.Dial("tcp", e.addr.places[0].String()))
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	must.Get(c.Write(h.encode()))
	return c
}

func helloOf(rank, size, lane uint32, to token) hello {
	return hello{lane: lane, rank: rank, size: size, eager: defaultEager, window: defaultWindow, token: to}
}

func answerOf(t testing.TB, c net.Conn, want token) hello {
	t.Helper()
	var b [helloLen]byte
	must.Get(io.ReadFull(c, b[:]))
	return must.Get(parseHello(b[:], want))
}

// alone returns rank 0 of two, its endpoint, and the connection that rank 1 has.
func alone(t testing.TB) (*Mesh, *Endpoint, net.Conn) {
	t.Helper()
	e, err := Listen(local)
	require.NoError(t, err)
	peer := stranger()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	type result struct {
		m   *Mesh
		err error
	}
	joined := make(chan result, 1)
	go func() {
		m, err := e.Join(ctx, 0, []string{e.Addr(), peer.String()})
		joined <- result{m, err}
	}()
	c := call(t, e, helloOf(1, 2, 0, e.addr.token))
	require.EqualValues(t, verdictOK, answerOf(t, c, peer.token).verdict)
	r := <-joined
	require.NoError(t, r.err)
	t.Cleanup(func() { c.Close(); r.m.Close() })
	return r.m, e, c
}

func raw(parts ...any) []byte {
	var out []byte
	for _, p := range parts {
		switch p := p.(type) {
		case frame:
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

// resealed returns b with the right checksum in every header that it has room for.
func resealed(b []byte) []byte {
	for rest := b; len(rest) >= headerLen; {
		le := binary.LittleEndian
		le.PutUint32(rest[headerSumAt:], crc32.Checksum(rest[:headerSumAt], castagnoli))
		f, err := parseFrame(rest)
		rest = rest[headerLen:]
		n := uint64(0)
		switch {
		case err != nil:
		case f.kind == kEager, f.kind == kData:
			n = f.length
		case f.kind == kAbort:
			n = f.call.What[0]
		}
		rest = rest[min(n, uint64(len(rest))):]
	}
	return b
}

func put(t testing.TB, c net.Conn, parts ...any) {
	t.Helper()
	must.Get(c.Write(raw(parts...)))
}

func next(t testing.TB, c net.Conn) frame {
	t.Helper()
	var b [headerLen]byte
	must.Get(io.ReadFull(c, b[:]))
	return must.Get(parseFrame(b[:]))
}

// What a rank transmits, byte for byte.
func TestConversation(t *testing.T) {
	m, _, c := alone(t)

	s := send(m, 1, 7, []byte("abc"))
	require.NoError(t, wait(t, s))
	want := append([]byte{kEager, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0x11, 0xaa, 0x3d, 0x6b}, "abc"...)
	got := make([]byte, len(want))
	_, err := io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, want, got)

	in := make([]byte, 2)
	r := recv(m, 1, 8, in)
	put(t, c, frame{kind: kEager, slot: 8, length: 2}, "xy")
	require.NoError(t, wait(t, r))
	require.Equal(t, "xy", string(in))

	// A large receive is granted, with the credit of the small one; its pieces may
	// come in any order.
	const n = defaultEager + 1
	large := make([]byte, n)
	r = recv(m, 1, 9, large)
	require.Equal(t, frame{kind: kGrant, slot: 9, length: n, credit: 2 + messageCost}, next(t, c))
	put(t, c, frame{kind: kStart, slot: 9, length: n}, frame{kind: kData, slot: n - 1, length: 1}, "z",
		frame{kind: kData, length: n - 1}, bytes.Repeat([]byte("w"), n-1))
	require.NoError(t, wait(t, r))
	require.Equal(t, append(bytes.Repeat([]byte("w"), n-1), 'z'), large)

	// A large send is offered, or begins at once where it has been granted.
	s = send(m, 1, 10, large)
	require.Equal(t, frame{kind: kOffer, slot: 10, length: n}, next(t, c))
	put(t, c, frame{kind: kGrant, slot: 11, length: n, handle: 5})
	put(t, c, frame{kind: kGrant, slot: 10, length: n, handle: 4})
	require.Equal(t, frame{kind: kData, handle: 4, length: n}, next(t, c))
	io.CopyN(io.Discard, c, n)
	require.NoError(t, wait(t, s))
	s = send(m, 1, 11, large)
	require.Equal(t, frame{kind: kStart, slot: 11, length: n, handle: 5}, next(t, c))
	require.Equal(t, frame{kind: kData, handle: 5, length: n}, next(t, c))
	io.CopyN(io.Discard, c, n)
	require.NoError(t, wait(t, s))

	put(t, c, frame{kind: kPing, slot: 77})
	m.SetProgress(3, 2)
	require.EqualValues(t, 77, next(t, c).slot)

	go m.Close()
	require.Equal(t, frame{kind: kBye}, next(t, c))
	_, err = c.Read(got)
	require.Equal(t, io.EOF, err)
}

// A small message and its header leave in one write of one segment; this is
// what lets one read take it in.
func TestFramesAreGathered(t *testing.T) {
	m, _, c := alone(t)
	m.Mu.Lock()
	p := m.pairs[1]
	for i := range 10 {
		require.Nil(t, p.s.send(req(1, uint64(i), make([]byte, 100))))
	}
	require.True(t, p.first.gather())
	require.Len(t, p.first.bufs, 1)
	require.Len(t, p.first.bufs[0], 10*(headerLen+100))
	require.True(t, p.first.tryWrite())
	p.first.complete(nil)
	m.Mu.Unlock()
	for range 10 {
		require.EqualValues(t, 100, next(t, c).length)
		io.CopyN(io.Discard, c, 100)
	}
}

// Bytes that no rank sends end the mesh with a fault of that rank, and write
// nothing into buffers.
func TestProtocolFaults(t *testing.T) {
	abort := func(kind transport.FaultKind, rank, reporter int) frame {
		return abortFrame(&transport.Fault{Kind: kind, Rank: rank, Reporter: reporter})
	}
	for name, parts := range map[string][]any{
		"kind 0":                         {frame{}},
		"unknown kind":                   {frame{kind: kindEnd}},
		"wide kind":                      {resealed(append([]byte{kBye, 1}, make([]byte, headerLen-2)...))},
		"EAGER that is large":            {frame{kind: kEager, slot: 5, length: 1 << 50}},
		"EAGER with a handle":            {frame{kind: kEager, slot: 5, handle: 1}},
		"DATA nobody asked for":          {frame{kind: kData, handle: 3, length: 4}, "abcd"},
		"DATA before START":              {frame{kind: kData, length: 4}, "abcd"},
		"empty DATA":                     {frame{kind: kData}},
		"START nobody asked for":         {frame{kind: kStart, slot: 99, length: 1 << 40}},
		"GRANT nobody offered":           {frame{kind: kGrant, slot: 99, length: 4}},
		"credit from nowhere":            {frame{kind: kCredit, credit: 1 << 63}},
		"BYE with a slot":                {frame{kind: kBye, slot: 1}},
		"BYE with a call":                {frame{kind: kBye, call: what(1, 2)}},
		"CALL with a length":             {frame{kind: kCall, length: 1}},
		"CALL for nothing":               {frame{kind: kCall, handle: callAnswered + 1}},
		"ABORT with too much to say":     {frame{kind: kAbort, handle: 0x100, call: what(maxWords+1, 0)}},
		"ABORT of kind 0":                {abort(0, 0, 0)},
		"ABORT of unknown kind":          {abort(99, 0, 0)},
		"ABORT about a rank that is not": {abort(transport.FaultAborted, 2, 0)},
		"ABORT by a rank that is not":    {abort(transport.FaultAborted, 0, -2)},
		"BYE with a payload":             {frame{kind: kBye, sum: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			m, _, c := alone(t)
			buf := bytes.Repeat([]byte("."), 100<<10)
			r := recv(m, 1, 5, buf)
			s := send(m, 1, 6, make([]byte, 100<<10))
			put(t, c, parts...)
			f := failed(t, m)
			require.Equal(t, transport.FaultProtocol, f.Kind, "%v", f)
			require.Equal(t, 1, f.Rank)
			require.Equal(t, 0, f.Reporter)
			end := must.As[*transport.Fault](t, wait(t, r))
			require.Same(t, f, end)
			require.ErrorAs(t, wait(t, s), &end)
			require.Same(t, f, end)
			require.Equal(t, bytes.Repeat([]byte("."), 100<<10), buf)
		})
	}
}

// The end of a connection without a goodbye, at any point, is a death.
func TestPeerDies(t *testing.T) {
	const n = 100 << 10
	for name, parts := range map[string][]any{
		"idle":            nil,
		"inside a header": {raw(frame{kind: kEager, slot: 1, length: 3})[:9]},
		"inside EAGER":    {frame{kind: kEager, slot: 5, length: 50}, "ab"},
		"inside early":    {frame{kind: kEager, slot: 500, length: 50}, "ab"},
		"after START":     {frame{kind: kStart, slot: 6, length: n}},
		"inside DATA":     {frame{kind: kStart, slot: 6, length: n}, frame{kind: kData, length: n}, "ab"},
	} {
		for _, how := range []string{"FIN", "RST"} {
			t.Run(name+" "+how, func(t *testing.T) {
				m, _, c := alone(t)
				r := recv(m, 1, 5, make([]byte, 50))
				l := recv(m, 1, 6, make([]byte, n))
				put(t, c, parts...)
				if how == "RST" {
					c.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
				for _, r := range []*transport.Request{r, l} {
					f := must.As[*transport.Fault](t, wait(t, r))
					require.Equal(t, transport.FaultPeerDied, f.Kind)
					require.Equal(t, 1, f.Rank)
				}
			})
		}
	}
}

// A peer that has stopped reading, with its socket full, does not delay Abort, and Close ends.
// The buffers are given back.
func TestAbortPastStoppedPeer(t *testing.T) {
	t.Parallel()
	m, _, c := alone(t)
	const n = 64 << 20
	put(t, c, frame{kind: kGrant, slot: 1, length: n})
	s, r := send(m, 1, 1, make([]byte, n)), recv(m, 1, 2, make([]byte, 1))
	next(t, c)
	f := &transport.Fault{Kind: transport.FaultTimeout, Rank: 1}
	m.Abort(f)
	require.ErrorIs(t, wait(t, r), f)
	require.ErrorIs(t, wait(t, s), f)
	require.NoError(t, m.Close())
}

// A process that waits for a CPU takes longer than Limits.Close to say goodbye, and the peer gets
// all of it.
func TestCloseWhileThisProcessIsLate(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	for name, o := range map[string]Options{"plain": local, "TLS": secure(a, a.issue(t, nil))} {
		t.Run(name, func(t *testing.T) {
			o.Window = 256 << 20
			ms := join(t, 2, o)
			m := ms[0]
			m.Limits.Close = time.Second
			var checks atomic.Int64
			late := make(chan struct{})
			m.Late = func(time.Time) time.Duration {
				if checks.Add(1) == 12 { // a Close that is not extended ends before the 11th
					close(late)
				}
				return m.Limits.Close
			}
			ms[1].Mu.Lock() // its reader stops
			for i := range 300 {
				send(m, 1, uint64(i), make([]byte, defaultEager))
			}
			closed := make(chan error, 1)
			go func() { closed <- m.Close() }()
			select {
			case <-late:
			case err := <-closed:
				t.Errorf("Close has not waited: %v", err)
				close(closed)
			}
			ms[1].Mu.Unlock()
			eventually(t, "departure", func() bool { return ms[1].Diagnose(0)[0].Departed || ms[1].Fault() != nil })
			if f := ms[1].Fault(); f != nil {
				t.Fatal(f)
			}
			require.NoError(t, <-closed)
		})
	}
}

// A live peer in the middle of a piece gets the rest of it and the ABORT behind.
func TestAbortBehindPiece(t *testing.T) {
	m, _, c := alone(t)
	const n = 64 << 20
	put(t, c, frame{kind: kGrant, slot: 1, length: n})
	s := send(m, 1, 1, make([]byte, n))
	next(t, c)
	m.Abort(&transport.Fault{Kind: transport.FaultAborted, Rank: 0, Op: 1, Seq: 2})
	for {
		f := next(t, c)
		if f.kind == kData {
			must.Get(io.CopyN(io.Discard, c, int64(f.length)))
			continue
		}
		if f.kind == kStart {
			continue
		}
		told := must.Get(parseAbort(f, nil, 2))
		require.Equal(t, transport.Fault{Kind: transport.FaultAborted, Op: 1, Seq: 2}, *told)
		break
	}
	require.Error(t, wait(t, s))
}

// Nothing comes through for as long as TCP waits for a packet that is lost twice, or for longer while this process
// waits for a CPU. The peer still gets the rest of a message, and the reason behind it.
func TestAbortThroughSilence(t *testing.T) {
	for name, c := range map[string]struct{ late, silence time.Duration }{
		"lost packets": {0, 600 * time.Millisecond}, "this process is late": {time.Second, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := mustFill(t, Options{Host: "127.0.0.1", Poll: -1})
				ms := []*Mesh{newMesh(0, 2, o), newMesh(1, 2, o)}
				ms[0].Late = func(time.Time) time.Duration { return c.late }
				var wg sync.WaitGroup
				silent := make(chan struct{})
				ours, to := net.Pipe()
				from, theirs := net.Pipe()
				wg.Go(func() {
					defer from.Close()
					io.CopyN(from, to, 100<<10)
					<-silent
					io.Copy(from, to)
				})
				wg.Go(func() {
					defer to.Close()
					io.Copy(to, from)
				})
				for i, conn := range []net.Conn{ours, theirs} {
					require.NoError(t, ms[i].attach(1-i, conn, helloOf(uint32(1-i), 2, 0, token{})))
				}
				const n = 300 << 10
				r, s := recv(ms[1], 0, 1, make([]byte, n)), send(ms[0], 1, 1, make([]byte, n))
				synctest.Wait()
				ms[0].Abort(transport.NewFault(transport.FaultCorrupted, 1, 0, errMessageCorrupted))
				time.Sleep(c.silence)
				close(silent)
				require.ErrorContains(t, failed(t, ms[1]), "link between 0 and 1: bytes of a message")
				require.NoError(t, wait(t, r))
				require.NoError(t, wait(t, s))
				for _, m := range ms {
					require.NoError(t, m.Close())
				}
				wg.Wait()
			})
		})
	}
}

// The goodbye on the first connection may be faster than data on others: they
// are read to their end first.
func TestGoodbyeWaitsForOtherConnections(t *testing.T) {
	m, e, c := alone(t)
	const n = 100 << 10
	in := make([]byte, n)
	r := recv(m, 1, 6, in)
	g := next(t, c)
	l := call(t, e, helloOf(1, 2, 1, e.addr.token))
	var b [helloLen]byte
	must.Get(io.ReadFull(l, b[:]))
	// The piece even comes before its START.
	put(t, l, frame{kind: kData, handle: g.handle, length: 10}, "0123456789")
	put(t, c, frame{kind: kStart, slot: 6, length: n, handle: g.handle}, frame{kind: kBye})
	put(t, l, frame{kind: kData, handle: g.handle, slot: 10, length: n - 10}, make([]byte, n-10))
	require.NoError(t, wait(t, r))
	require.Equal(t, "0123456789", string(in[:10]))
	require.False(t, m.Diagnose(0)[1].Departed)
	l.Close()
	eventually(t, "departure", func() bool { return m.Diagnose(0)[1].Departed })
	require.Nil(t, m.Fault())
}

// A connection that outlives the goodbye and says nothing keeps nobody.
func TestGoodbyeWithoutEnd(t *testing.T) {
	m, e, c := alone(t)
	m.opts.reasonLimit = 20 * time.Millisecond
	l := call(t, e, helloOf(1, 2, 1, e.addr.token))
	var b [helloLen]byte
	must.Get(io.ReadFull(l, b[:]))
	put(t, c, frame{kind: kBye})
	eventually(t, "departure", func() bool { return m.Diagnose(0)[1].Departed })
	require.Nil(t, m.Fault())
}

// A peer may give up a bulk connection just after this side has accepted it.
func TestOtherConnectionIsGivenUp(t *testing.T) {
	m, e, c := alone(t)
	l := call(t, e, helloOf(1, 2, 1, e.addr.token))
	var b [helloLen]byte
	must.Get(io.ReadFull(l, b[:]))
	l.Close()
	eventually(t, "its end", func() bool {
		m.Mu.Lock()
		defer m.Mu.Unlock()
		return len(m.pairs[1].inbound) == 0
	})
	m.Mu.Lock()
	require.NoError(t, m.pairs[1].suspect)
	m.Mu.Unlock()
	r := recv(m, 1, 5, make([]byte, 1))
	put(t, c, frame{kind: kEager, slot: 5, length: 1}, "x")
	require.NoError(t, wait(t, r))
}

// Another connection that ends under a message, while the first one lives and is
// silent, is a death too.
func TestOtherConnectionBreaks(t *testing.T) {
	m, e, c := alone(t)
	m.opts.reasonLimit = 20 * time.Millisecond
	const n = 100 << 10
	r := recv(m, 1, 6, make([]byte, n))
	g := next(t, c)
	l := call(t, e, helloOf(1, 2, 1, e.addr.token))
	var b [helloLen]byte
	must.Get(io.ReadFull(l, b[:]))
	put(t, c, frame{kind: kStart, slot: 6, length: n, handle: g.handle})
	put(t, l, frame{kind: kData, handle: g.handle, length: n}, "0123456789")
	l.Close()
	f := must.As[*transport.Fault](t, wait(t, r))
	require.Equal(t, transport.FaultPeerDied, f.Kind)
	require.ErrorContains(t, f, "unexpected EOF")
}

// Frames that do not belong there, on a connection for DATA.
func TestOtherConnectionFaults(t *testing.T) {
	for name, part := range map[string]any{
		"control": frame{kind: kBye}, "garbage": resealed(bytes.Repeat([]byte("x"), headerLen)), "no grant": frame{kind: kData, handle: 9, length: 1},
	} {
		t.Run(name, func(t *testing.T) {
			m, e, _ := alone(t)
			l := call(t, e, helloOf(1, 2, 1, e.addr.token))
			var b [helloLen]byte
			must.Get(io.ReadFull(l, b[:]))
			put(t, l, part)
			require.Equal(t, transport.FaultProtocol, failed(t, m).Kind)
		})
	}
}

// Strangers get no answer, and ranks that do not fit get the reason; neither
// disturbs the group.
func TestDoor(t *testing.T) {
	m, e, c := alone(t)
	for name, h := range map[string]hello{
		"token":        helloOf(1, 2, 0, newToken()),
		"no token":     helloOf(1, 2, 0, token{}),
		"lane":         helloOf(1, 2, maxLanes+1, e.addr.token),
		"eager":        {rank: 1, size: 2, eager: 1 << 40, window: defaultWindow, token: e.addr.token},
		"window":       {rank: 1, size: 2, eager: 1000, window: 1 << 62, token: e.addr.token},
		"strange mind": {rank: 1, size: 2, verdict: 99, eager: 1000, window: defaultWindow, token: e.addr.token},
	} {
		t.Run(name, func(t *testing.T) {
			s := call(t, e, h)
			_, err := s.Read(make([]byte, 1))
			require.Error(t, err)
			var late net.Error
			require.False(t, errors.As(err, &late) && late.Timeout())
		})
	}
	for name, x := range map[string]struct {
		h    hello
		want uint32
	}{
		"size":           {helloOf(1, 3, 0, e.addr.token), verdictSize},
		"itself":         {helloOf(0, 2, 0, e.addr.token), verdictRank},
		"no such rank":   {helloOf(2, 2, 0, e.addr.token), verdictRank},
		"twice":          {helloOf(1, 2, 0, e.addr.token), verdictTwice},
		"rank out of it": {helloOf(1<<32-1, 2, 1, e.addr.token), verdictRank},
	} {
		t.Run(name, func(t *testing.T) {
			s := call(t, e, x.h)
			var b [helloLen]byte
			must.Get(io.ReadFull(s, b[:]))
			require.Equal(t, x.want, must.Get(parseHello(b[:], token(b[64:]))).verdict)
			require.Error(t, must.Err(s.Read(b[:1])))
		})
	}
	for _, garbage := range []string{"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01" + string(make([]byte, 200))} {
		s := must.Get(net.Dial("tcp", e.addr.places[0].String()))
		s.Write([]byte(garbage))
		s.(*net.TCPConn).CloseWrite()
		s.SetReadDeadline(time.Now().Add(patience))
		n, _ := s.Read(make([]byte, 1))
		require.Zero(t, n)
		s.Close()
	}
	r := recv(m, 1, 1, make([]byte, 1))
	put(t, c, frame{kind: kEager, slot: 1, length: 1}, "x")
	require.NoError(t, wait(t, r))
}

// strange connects with an endpoint and begins to say hello, so many times.
func strange(t testing.TB, e *Endpoint, n int) (held []net.Conn) {
	t.Helper()
	for range n {
		c := must.Get(net.Dial("tcp", e.addr.places[0].String()))
		t.Cleanup(func() { c.Close() })
		c.Write([]byte(helloMagic[:4]))
		held = append(held, c)
	}
	return held
}

func turnedAway(t testing.TB, held []net.Conn) {
	t.Helper()
	for _, c := range held {
		c.SetReadDeadline(time.Now().Add(patience))
		_, err := c.Read(make([]byte, 1))
		var late net.Error
		require.False(t, errors.As(err, &late) && late.Timeout(), "a stranger is still there")
	}
}

// Whoever holds many connections without a word does not keep ranks out.
func TestManyStrangers(t *testing.T) {
	t.Parallel()
	e := must.Get(Listen(local))
	peer := stranger()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	joined := make(chan *Mesh, 1)
	go func() {
		m, err := e.Join(ctx, 0, []string{e.Addr(), peer.String()})
		if err != nil {
			t.Errorf("Join: %v", err)
		}
		joined <- m
	}()
	held := strange(t, e, strangers.Limit(1)+50)
	c := call(t, e, helloOf(1, 2, 0, e.addr.token))
	answerOf(t, c, peer.token)
	m := <-joined
	defer m.Close()
	turnedAway(t, held[:50])
}

// Rank 2 gives up because rank 1 refuses it. Rank 0, whose answer comes afterwards, hears why.
func TestAnAnswerToARankThatGivesUp(t *testing.T) {
	t.Parallel()
	var peers [2]address
	var doors [2]net.Listener
	for i := range peers {
		doors[i] = must.Get(net.Listen("tcp", "127.0.0.1:0"))
		defer doors[i].Close()
		peers[i] = stranger()
		peers[i].places[0] = doors[i].Addr().(*net.TCPAddr).AddrPort()
	}
	o := local
	o.lastAnswer = patience
	e := must.Get(Listen(o))
	failed := make(chan error, 1)
	go func() {
		_, err := e.Join(context.Background(), 2, []string{peers[0].String(), peers[1].String(), e.Addr()})
		failed <- err
	}()
	var conns [2]net.Conn
	for i, l := range doors {
		conns[i] = must.Get(l.Accept())
		defer conns[i].Close()
		require.NoError(t, conns[i].SetDeadline(time.Now().Add(patience)))
		var b [helloLen]byte
		must.Get(io.ReadFull(conns[i], b[:]))
	}
	answer := helloOf(1, 3, 0, e.addr.token)
	answer.verdict = verdictSize
	must.Get(conns[1].Write(answer.encode()))
	_, err := io.Copy(io.Discard, conns[1]) // until rank 2 has read it
	require.NoError(t, err)
	answer = helloOf(0, 3, 0, e.addr.token)
	must.Get(conns[0].Write(answer.encode()))
	var head [headerLen]byte
	must.Get(io.ReadFull(conns[0], head[:]))
	h := must.Get(parseFrame(head[:]))
	f := must.Get(parseAbort(h, nil, 3))
	require.Equal(t, transport.FaultAborted, f.Kind)
	require.Equal(t, 2, f.Rank)
	require.ErrorContains(t, <-failed, "rank 1 refuses")
}

// A rank whose connection is closed before the answer, because too many strangers came behind it,
// connects again.
func TestConnectsAgain(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	zero := stranger()
	zero.places[0] = l.Addr().(*net.TCPAddr).AddrPort()
	e := must.Get(Listen(local))
	answered := make(chan error, 1)
	go func() {
		for range 3 {
			c, err := l.Accept()
			if err != nil {
				answered <- err
				return
			}
			c.Close()
		}
		c, err := l.Accept()
		if err != nil {
			answered <- err
			return
		}
		t.Cleanup(func() { c.Close() })
		var b [helloLen]byte
		io.ReadFull(c, b[:])
		h, err := parseHello(b[:], zero.token)
		answer := helloOf(0, 2, h.lane, e.addr.token)
		c.Write(answer.encode())
		answered <- err
	}()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m := must.Get(e.Join(ctx, 1, []string{zero.String(), e.Addr()}))
	require.NoError(t, <-answered)
	require.NoError(t, m.Close())
}

// A connection is no stranger once it has said hello, however many come behind it.
func TestRanksAreNoStrangers(t *testing.T) {
	m, e, c := alone(t)
	held := strange(t, e, strangers.Limit(1)+1)
	turnedAway(t, held[:1])
	r := recv(m, 1, 1, make([]byte, 1))
	put(t, c, frame{kind: kEager, slot: 1, length: 1}, "x")
	require.NoError(t, wait(t, r))
}

// A malformed address may be one with a token.
func TestErrorHidesToken(t *testing.T) {
	e, err := Listen(local)
	require.NoError(t, err)
	_, err = e.Join(context.Background(), 0, []string{e.Addr(), e.Addr() + "x"})
	require.ErrorContains(t, err, "that are no address of this version")
	require.NotContains(t, err.Error(), hex.EncodeToString(e.addr.token[:4]))
}

// Nobody may take for ever to say hello.
func TestSlowStrangers(t *testing.T) {
	o := local
	o.Handshake = 20 * time.Millisecond
	e := must.Get(Listen(o))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.Join(ctx, 0, []string{e.Addr(), stranger().String()})
	}()
	turnedAway(t, strange(t, e, 50))
	cancel()
	<-done
}

func TestJoinErrors(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	listen := func(t *testing.T) *Endpoint {
		return must.Get(Listen(local))
	}
	t.Run("a rank that is gone", func(t *testing.T) {
		a, b, c := listen(t), listen(t), listen(t)
		addrs := []string{a.Addr(), b.Addr(), c.Addr()}
		require.NoError(t, b.Close())
		_, err := c.Join(ctx, 2, addrs)
		j := must.As[*JoinError](t, err)
		require.Len(t, j.Missing, 1)
		require.Equal(t, 1, j.Missing[0].Rank)
		require.ErrorContains(t, err, "tcp: rank 2 of 3 is not connected with rank 1: at 127.0.0.1")
		require.ErrorContains(t, err, "refused")
		f := must.As[*transport.Fault](t, err)
		require.Equal(t, transport.FaultPeerDied, f.Kind)
		require.Equal(t, 1, f.Rank)
		a.Close()
	})
	t.Run("a rank that does not call", func(t *testing.T) {
		a, b := listen(t), listen(t)
		defer b.Close()
		short, stop := context.WithCancelCause(ctx)
		stop(errors.New("no more time"))
		_, err := a.Join(short, 0, []string{a.Addr(), b.Addr()})
		require.ErrorContains(t, err, "rank 1: it has not connected to this rank")
		require.ErrorContains(t, err, "no more time")
	})
	t.Run("a rank that listens and does not call", func(t *testing.T) {
		a, b := listen(t), listen(t)
		defer a.Close()
		short, stop := context.WithTimeout(ctx, 50*time.Millisecond)
		defer stop()
		_, err := b.Join(short, 1, []string{a.Addr(), b.Addr()})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "rank 0: at 127.0.0.1")
	})
	t.Run("the others hear of it", func(t *testing.T) {
		// Rank 1 reaches rank 0 and is then told that rank 2 could not be.
		a, b, c := listen(t), listen(t), listen(t)
		addrs := []string{a.Addr(), b.Addr(), c.Addr()}
		require.NoError(t, c.Close())
		short, stop := context.WithCancel(ctx)
		var wg sync.WaitGroup
		var errs [2]error
		var ready sync.WaitGroup
		ready.Add(1)
		wg.Go(func() { _, errs[1] = b.Join(ctx, 1, addrs) })
		wg.Go(func() {
			defer ready.Done()
			_, errs[0] = a.Join(short, 0, addrs)
		})
		stop()
		wg.Wait()
		require.ErrorContains(t, errs[0], "rank 2")
		require.Error(t, errs[1])
	})
	t.Run("addresses", func(t *testing.T) {
		a, b := listen(t), listen(t)
		for name, addrs := range map[string][]string{
			"none":       nil,
			"own":        {b.Addr(), a.Addr()},
			"nonsense":   {a.Addr(), "nonsense"},
			"version":    {a.Addr(), "tcp9" + b.Addr()[4:]},
			"mixed TLS":  {a.Addr(), address{secure: true, token: newToken(), places: b.addr.places}.String()},
			"not for it": {a.Addr()},
		} {
			rank := 0
			if name == "not for it" {
				rank = 1
			}
			e := listen(t)
			e.addr = a.addr
			require.ErrorContains(t, must.Err(e.Join(ctx, rank, addrs)), "tcp: ", name)
		}
		a.Close()
		b.Close()
	})
	t.Run("sizes differ", func(t *testing.T) {
		a, b := listen(t), listen(t)
		short, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() {
			_, err := a.Join(short, 0, []string{a.Addr(), b.Addr(), stranger().String()})
			done <- err
		}()
		_, err := b.Join(ctx, 1, []string{a.Addr(), b.Addr()})
		require.ErrorContains(t, err, "rank 0 refuses: it is in a group of another size")
		stop()
		require.Error(t, <-done)
	})
	t.Run("one", func(t *testing.T) {
		a := listen(t)
		require.NoError(t, must.Get(a.Join(ctx, 0, []string{a.Addr()})).Close())
	})
}

// Places are tried until one is the rank: others may refuse, be silent, or be
// another rank of the same number.
func TestPlaces(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	silent := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	gone := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	gone.Close()
	_, other, _ := alone(t)
	a := must.Get(Listen(local))
	b, err := Listen(local)
	require.NoError(t, err)
	many := a.addr
	many.places = nil
	for _, l := range []net.Addr{gone.Addr(), silent.Addr(), other.listener.Addr(), a.listener.Addr()} {
		many.places = append(many.places, l.(*net.TCPAddr).AddrPort())
	}
	addrs := []string{many.String(), b.Addr()}
	var wg sync.WaitGroup
	ms := make([]*Mesh, 2)
	for r, e := range []*Endpoint{a, b} {
		wg.Go(func() {
			var err error
			if ms[r], err = e.Join(ctx, r, addrs); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	wg.Wait()
	r := recv(ms[0], 1, 1, make([]byte, 1))
	send(ms[1], 0, 1, []byte{1})
	require.NoError(t, wait(t, r))
	for _, m := range ms {
		m.Close()
	}
}

// A rank whose host has taken the connection may answer late. Its other places are not tried soon.
func TestOnePlaceAtATime(t *testing.T) {
	var doors [2]*net.TCPListener
	late := stranger()
	late.places = nil
	for i := range doors {
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
		defer l.Close()
		doors[i] = l.(*net.TCPListener)
		late.places = append(late.places, l.Addr().(*net.TCPAddr).AddrPort())
	}
	o := must.Get(local.filled())
	m := newMesh(1, 2, o)
	defer m.Close()
	m.addrs = []address{late, stranger()}
	ctx, cancel := context.WithTimeout(context.Background(), 3*stagger)
	defer cancel()
	require.ErrorIs(t, m.connect(ctx, 0), context.DeadlineExceeded)
	for i, more := range []bool{true, false} {
		limit := patience
		if !more {
			limit = 10 * time.Millisecond
		}
		doors[i].SetDeadline(time.Now().Add(limit))
		c, err := doors[i].Accept()
		require.Equal(t, more, err == nil, "place %d: %v", i, err)
		if more {
			c.Close()
		}
	}
}

func TestListen(t *testing.T) {
	e := must.Get(Listen(Options{}))
	a, err := parseAddress(e.Addr())
	require.NoError(t, err)
	require.Equal(t, e.addr, a)
	require.NoError(t, e.Close())
	require.NoError(t, e.Close())
	e, err = Listen(Options{Host: "lo"})
	if err == nil { // it has other names elsewhere
		require.True(t, e.addr.places[0].Addr().IsLoopback())
		e.Close()
	}
	for name, o := range map[string]Options{
		"host":      {Host: "256.1.1.1"},
		"lanes":     {Lanes: maxLanes + 1},
		"eager":     {Eager: maxEager + 1},
		"negative":  {Eager: -1},
		"window":    {Window: 1000},
		"narrow":    {Eager: 512 << 10, Window: 1 << 20},
		"wide":      {Window: maxWindow + 1},
		"handshake": {Handshake: -1},
		"TLS":       {TLS: &tls.Config{}},
	} {
		require.ErrorContains(t, must.Err(Listen(o)), "tcp: ", name)
	}
}

func TestPlacesOfAHost(t *testing.T) {
	var addrs []net.Addr
	for _, s := range []string{"127.0.0.1/8", "::1/128", "fe80::1/64", "2001:db8::7/64", "192.0.2.7/24", "224.0.0.1/8"} {
		ip, n, err := net.ParseCIDR(s)
		require.NoError(t, err)
		n.IP = ip
		addrs = append(addrs, n)
	}
	require.Equal(t, "[192.0.2.7:9 [2001:db8::7]:9 127.0.0.1:9 [::1]:9]", fmt.Sprint(places(addrs, &net.TCPAddr{IP: net.IPv6zero, Port: 9})))
	require.Equal(t, "[192.0.2.7:9 127.0.0.1:9]", fmt.Sprint(places(addrs, &net.TCPAddr{IP: net.IPv4zero, Port: 9})))
	require.Len(t, places(append(append(append(addrs, addrs...), addrs...), append(addrs, addrs...)...), &net.TCPAddr{Port: 9}), maxPlaces)
}

func FuzzFrame(f *testing.F) {
	f.Add(raw(frame{kind: kEager, slot: 1, length: 4}))
	f.Add(raw(frame{kind: kBye}))
	f.Add(raw(abortFrame(&transport.Fault{Kind: transport.FaultAborted})))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerLen {
			return
		}
		b = b[:headerLen]
		if again := resealed(bytes.Clone(b)); !bytes.Equal(b, again) {
			_, err := parseFrame(b)
			require.Equal(t, errHeaderCorrupted, err)
			b = again
		}
		h, err := parseFrame(b)
		if err != nil {
			return
		}
		require.Equal(t, b, raw(h))
		if h.kind == kAbort {
			if fault, err := parseAbort(h, nil, 4); err == nil {
				require.Contains(t, []int{-1, 0, 1, 2, 3}, fault.Rank)
			}
		}
	})
}

func FuzzHello(f *testing.F) {
	want := token{1, 2, 3}
	h := helloOf(1, 2, 0, want)
	f.Add(h.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHello(b, want)
		if err != nil {
			return
		}
		require.Equal(t, want, h.token)
		require.Equal(t, h, must.Get(parseHello(h.encode(), want)))
	})
}

func FuzzAddress(f *testing.F) {
	f.Add(stranger().String())
	f.Add(address{secure: true, places: []netip.AddrPort{netip.MustParseAddrPort("[::1]:5")}}.String())
	f.Fuzz(func(t *testing.T, s string) {
		a, err := parseAddress(s)
		if err != nil {
			return
		}
		require.Equal(t, a, must.Get(parseAddress(a.String())))
	})
}

// FuzzConversation feeds a mesh with any bytes: every request ends, and no byte
// outside their buffers changes.
func FuzzConversation(f *testing.F) {
	f.Add(raw(frame{kind: kEager, slot: 1, length: 4}, "abcd", frame{kind: kBye}))
	f.Add(raw(frame{kind: kGrant, slot: 2, length: 100 << 10, handle: 7}, frame{kind: kStart, slot: 3, length: 100 << 10}, frame{kind: kData, length: 3}, "abc"))
	f.Add(raw(frame{kind: kOffer, slot: 4, length: 4}, frame{kind: kPing, slot: 1}, frame{kind: kCredit}))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := newMesh(0, 2, mustFill(t, local))
		near, far := tcpPair(t)
		require.NoError(t, m.attach(1, near, hello{eager: defaultEager, window: defaultWindow}))
		mem := append(bytes.Repeat([]byte("."), 100<<10), "guard"...)
		rs := []*transport.Request{recv(m, 1, 1, mem[:4]), send(m, 1, 2, make([]byte, 100<<10)), recv(m, 1, 3, mem[4:100<<10]), req(-1, 4, make([]byte, 4))}
		m.RecvAny(rs[3])
		var wg sync.WaitGroup
		wg.Go(func() { io.Copy(io.Discard, far) })
		far.Write(resealed(bytes.Clone(b)))
		far.(*net.TCPConn).CloseWrite()
		for _, r := range rs {
			wait(t, r)
		}
		require.NoError(t, m.Close())
		wg.Wait()
		far.Close()
		require.Equal(t, "guard", string(mem[100<<10:]))
	})
}

func mustFill(t testing.TB, o Options) Options {
	return must.Get(o.filled())
}

func tcpPair(t testing.TB) (net.Conn, net.Conn) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	return must.Get(net.Dial("tcp", l.Addr().String())), must.Get(l.Accept())
}

// TestADialerThatHasFailedSaysWhy: a rank gives up while another one answers it. It tells that one why, and is not taken for
// the dead rank.
func TestADialerThatHasFailedSaysWhy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	zero, one := must.Get(Listen(Options{})), must.Get(Listen(Options{}))
	addrs := []string{zero.Addr(), one.Addr(), stranger().String()}
	m := newMesh(1, 3, one.opts)
	defer m.Close()
	m.addrs = must.Get(checkAddresses(1, one.addr, addrs))
	defer one.Close()
	m.Abort(transport.NewFault(transport.FaultPeerDied, 2, 1, errors.New("gone")))
	joined := make(chan error, 1)
	go func() { joined <- must.Err(zero.Join(ctx, 0, addrs)) }()
	require.Error(t, m.connect(ctx, 0))
	var f *transport.Fault
	require.ErrorAs(t, <-joined, &f)
	require.Equal(t, 2, f.Rank, f.Error())
}
