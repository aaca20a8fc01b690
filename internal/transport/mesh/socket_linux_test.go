package mesh

import (
	"crypto/tls"
	"io"
	"math"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/transport"
	"golang.org/x/sys/unix"
)

// between is a connection between two addresses.
type between struct {
	*net.TCPConn
	local, remote string
}

func (c between) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.ParseIP(c.local)} }
func (c between) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.remote)} }

// The kernel asks another host whether it is there, and not its own one. TestCrowd of package pg, with
// 256 ranks, shows why.
func TestKeepAlive(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	for _, tc := range []struct {
		local, remote string
		asks          int
	}{
		{"192.0.2.1", "192.0.2.2", 1},
		{"192.0.2.1", "192.0.2.1", 0},
		{"127.0.0.1", "127.0.0.2", 0},
		{"2001:db8::1", "2001:db8::2", 1},
		{"::1", "::1", 0},
	} {
		tcp := c.(*net.TCPConn)
		require.NoError(t, LimitSilence(between{tcp, tc.local, tc.remote}, 0))
		raw, err := tcp.SyscallConn()
		require.NoError(t, err)
		var asks int
		raw.Control(func(fd uintptr) { asks, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE) })
		require.NoError(t, err)
		require.Equal(t, tc.asks, asks, "%+v", tc)
	}
}

// What the system tells of a connection is found below TLS and below the count of its handshake.
func TestBelow(t *testing.T) {
	c, other := net.Pipe()
	defer c.Close()
	defer other.Close()
	require.Same(t, c, below(tls.Server(strangers.InHandshake(c), nil)))
}

// TestLongSilence: the system has limits for its times, and a Silence has none.
func TestLongSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	for _, d := range []time.Duration{7 * 24 * time.Hour, 30 * 24 * time.Hour, math.MaxInt64} {
		require.NoError(t, LimitSilence(between{c.(*net.TCPConn), "192.0.2.1", "192.0.2.2"}, d), "%v", d)
		raw, err := c.(*net.TCPConn).SyscallConn()
		require.NoError(t, err)
		var ms int
		raw.Control(func(fd uintptr) { ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
		require.NoError(t, err)
		require.EqualValues(t, min(d.Milliseconds(), math.MaxInt32), ms)
	}
}

// A connection that its other end closes or resets has not ended because time ran out.
func TestEndOf(t *testing.T) {
	for name, linger := range map[string]int{"closed": -1, "reset": 0} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			c, err := net.Dial("tcp", l.Addr().String())
			require.NoError(t, err)
			defer c.Close()
			require.NoError(t, LimitSilence(between{c.(*net.TCPConn), "192.0.2.1", "192.0.2.2"}, 0))
			other, err := l.Accept()
			require.NoError(t, err)
			require.NoError(t, other.(*net.TCPConn).SetLinger(linger))
			require.NoError(t, other.Close())
			_, err = c.Read(make([]byte, 1))
			require.Error(t, err)
			require.Equal(t, err, EndOf(c, err))
			require.Equal(t, io.EOF, EndOf(c, io.EOF), "as after another call had the error")
		})
	}
}

// bare is the Link of a peer that only tests write to.
type bare struct {
	Link
	conn     net.Conn
	received uint64
	pads     int
	pings    []Ping
	waits    bool
}

func (b *bare) Conns() []net.Conn { return []net.Conn{b.conn} }
func (b *bare) Received() uint64  { return b.received }
func (b *bare) Pad()              { b.pads++ }
func (b *bare) Waits() bool       { return b.waits }
func (b *bare) Answer()           {}
func (b *bare) Ping(p Ping) bool {
	b.pings = append(b.pings, p)
	return true
}

// Padding counts neither as moved nor as waiting, wherever it is: in the socket, on its way, or acknowledged.
func TestPaddingIsNoData(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	other, err := l.Accept()
	require.NoError(t, err)
	defer other.Close()
	require.NoError(t, c.(*net.TCPConn).SetWriteBuffer(64<<10))
	require.NoError(t, other.(*net.TCPConn).SetReadBuffer(16<<10))

	p := &Peer{link: &bare{conn: c}}
	first := p.traffic().acked // the SYN
	total := 0
	write := func(n int) {
		_, err := c.Write(make([]byte, n))
		require.NoError(t, err)
	}
	data := func(n int) { write(n); total += n }
	holds := func() {
		t.Helper()
		now := p.traffic()
		require.EqualValues(t, total, now.acked+now.queue-first)
	}
	data(1000)
	holds()
	for _, n := range []int{0, 100, 5000} {
		p.PaddingBegins()
		write(3000)
		holds()
		p.PaddingEnds()
		holds()
		data(n)
		holds()
	}
	_, err = io.CopyN(io.Discard, other, int64(total+3*3000))
	require.NoError(t, err)
	acked := func() bool { now := p.traffic(); return now.queue == 0 && now.acked-first == uint64(total) }
	require.Eventually(t, acked, 20*time.Second, time.Millisecond)

	// More padding than fits into the sockets, and data behind it.
	const more = 8 << 20
	p.PaddingBegins()
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, more))
		wrote <- err
	}()
	require.Eventually(t, func() bool { return trafficOf(c).queue >= longQueue }, 20*time.Second, time.Millisecond)
	require.True(t, acked())
	_, err = io.CopyN(io.Discard, other, more/2)
	require.NoError(t, err)
	require.True(t, acked())
	_, err = io.CopyN(io.Discard, other, more/2)
	require.NoError(t, err)
	require.NoError(t, <-wrote)
	p.PaddingEnds()
	require.True(t, acked())
	data(20_000)
	holds()
	_, err = io.CopyN(io.Discard, other, 20_000)
	require.NoError(t, err)
	require.Eventually(t, acked, 20*time.Second, time.Millisecond)
	require.Empty(t, p.padding)
}

// A long question makes a rank ask both ranks that it is about in the same way, unless it is one of them. One long
// question is on its way to a peer at a time.
func TestLongQuestions(t *testing.T) {
	var b Base
	b.Init(0, 5, Limits{}, func() {})
	var links [5]*bare
	for r := 1; r < 5; r++ {
		links[r] = new(bare)
		p := &Peer{Native: r != 4}
		b.Add(r, p, links[r])
	}
	links[3].waits = true
	padded := func() (n [5]int) {
		for r := 1; r < 5; r++ {
			n[r] = links[r].pads
		}
		return n
	}
	b.Mu.Lock()
	defer b.Mu.Unlock()
	from := b.peers[1]
	from.Pinged(Ping{Round: 5, About: [2]int{2, 4}, Deep: true})
	require.Equal(t, [5]int{}, padded(), "the question is short")
	require.Len(t, links[2].pings, 1)
	from.Pinged(Ping{})
	from.Pinged(Ping{Round: 6, About: [2]int{0, 2}, Deep: true})
	require.Equal(t, [5]int{}, padded(), "it is about this rank")

	from.Pinged(Ping{})
	from.Pinged(Ping{Round: 7, About: [2]int{2, 4}, Deep: true})
	require.Equal(t, [5]int{2: 1}, padded(), "not to rank 3, which it is not about, and not to PyTorch")
	require.Len(t, links[2].pings, 2)
	from.Pinged(Ping{})
	from.Pinged(Ping{Round: 8, About: [2]int{2, 4}, Deep: true})
	require.Equal(t, [5]int{2: 1}, padded(), "rank 2 has not answered yet")

	to := b.peers[2]
	require.Zero(t, to.describe(transport.Waiting{}).Long)
	sent := to.longSent
	to.longSent = sent.Add(-answerIn)
	require.GreaterOrEqual(t, to.describe(transport.Waiting{}).Long, answerIn, "a late answer counts as long as it is missing")
	to.Ponged(Pong{Round: to.longRound - 1})
	require.True(t, to.awaitsLong(), "the answer to an earlier question")
	to.Ponged(Pong{Round: to.longRound})
	require.GreaterOrEqual(t, to.describe(transport.Waiting{}).Long, answerIn)
	to.longSent = sent
	require.Zero(t, to.answers, "the answer to a long question is no measure of the others")
	from.Pinged(Ping{})
	from.Pinged(Ping{Round: 9, About: [2]int{2, 4}, Deep: true})
	require.Equal(t, [5]int{2: 1}, padded(), "the last one was sent a moment ago")
	require.Zero(t, to.describe(transport.Waiting{}).Silent)
	to.longSent = to.longSent.Add(-2 * askAgain)
	from.Pinged(Ping{})
	from.Pinged(Ping{Round: 10, About: [2]int{2, 4}, Deep: true})
	require.Equal(t, [5]int{2: 2}, padded())
	to.unanswered = to.unanswered.Add(-answerIn)
	require.Zero(t, to.describe(transport.Waiting{}).Silent, "the answer is behind padding")
	to.unanswered = to.unanswered.Add(-longIn)
	require.GreaterOrEqual(t, to.describe(transport.Waiting{}).Silent, answerIn+longIn)
	a, ok := from.TakePing()
	require.True(t, ok)
	require.NotZero(t, a.Links[0].Long)
	b.peers[3].Pinged(Ping{Round: 9, About: [2]int{2, 4}, Deep: true})
	a, ok = b.peers[3].TakePing()
	require.True(t, ok)
	require.Zero(t, a.Links[0].Long, "a rank that asks no long questions may not understand this")
}

// A rank asks the ends of a link long questions. Another rank that is to ask them gets 32 KiB of padding only from
// the hosts of the ends: from all ranks it would be too much.
func TestMark(t *testing.T) {
	for name, c := range map[string]struct {
		x, y int
		near bool // rank 2 is
		long []int
		pads [4]int
	}{
		"this rank asks":          {2, 3, false, []int{2, 3}, [4]int{2: 1, 3: 1}},
		"rank 1 asks":             {2, 3, false, []int{1}, [4]int{}},
		"rank 1 asks this rank":   {0, 3, false, []int{1}, [4]int{1: 1}},
		"rank 1 asks this host":   {2, 3, true, []int{1}, [4]int{1: 1}},
		"rank 1 asks other hosts": {1, 3, true, []int{2}, [4]int{}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b Base
				b.Init(0, 4, Limits{}, func() {})
				var links [4]*bare
				for r := 1; r < 4; r++ {
					links[r] = new(bare)
					b.Add(r, &Peer{Native: true, Near: c.near && r == 2}, links[r])
				}
				b.DiagnoseLink(time.Second, c.x, c.y, c.long...)
				ping := Ping{Round: 1, About: [2]int{c.x, c.y}, Deep: true}
				for r := 1; r < 4; r++ {
					require.Equal(t, c.pads[r], links[r].pads, "to rank %d", r)
					want := []Ping{ping}
					if slices.Contains(c.long, r) && c.pads[r] == 0 {
						want = []Ping{{About: [2]int{-1, -1}}, ping}
					}
					require.Equal(t, want, links[r].pings, "to rank %d", r)
				}
			})
		})
	}
}

// Bytes that the other end does not take count as waiting, and those that it has acknowledged as moved.
func TestTraffic(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	other, err := l.Accept()
	require.NoError(t, err)
	defer other.Close()
	require.Zero(t, trafficOf(c).queue)

	p := &Peer{link: &bare{conn: c}}
	p.measure(time.Now())
	require.NotZero(t, p.least)
	p.least = 1
	p.measure(time.Now())
	require.EqualValues(t, 1, p.least, "the quickest packet counts")

	const size = 8 << 20
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, size))
		wrote <- err
	}()
	require.Eventually(t, func() bool { return trafficOf(c).queue >= longQueue }, 20*time.Second, time.Millisecond)
	_, err = io.CopyN(io.Discard, other, size)
	require.NoError(t, err)
	require.NoError(t, <-wrote)
	require.Eventually(t, func() bool {
		now := trafficOf(c)
		return now.queue == 0 && now.acked >= size
	}, 20*time.Second, time.Millisecond)
}
