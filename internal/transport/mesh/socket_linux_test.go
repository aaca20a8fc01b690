package mesh

import (
	"crypto/tls"
	"io"
	"math"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
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
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	c := must.Get(net.Dial("tcp", l.Addr().String()))
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
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	c := must.Get(net.Dial("tcp", l.Addr().String()))
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
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
			defer l.Close()
			c := must.Get(net.Dial("tcp", l.Addr().String()))
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
}

func (b *bare) Conns() []net.Conn { return []net.Conn{b.conn} }
func (b *bare) Received() uint64  { return b.received }

// Bytes count as moved once the other end has acknowledged them, and not before.
func TestTraffic(t *testing.T) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	c := must.Get(net.Dial("tcp", l.Addr().String()))
	defer c.Close()
	other := must.Get(l.Accept())
	defer other.Close()

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
	must.Get(io.CopyN(io.Discard, other, 1))
	require.Less(t, trafficOf(c).acked, uint64(size), "the sockets do not hold so much")
	must.Get(io.CopyN(io.Discard, other, size-1))
	require.NoError(t, <-wrote)
	require.Eventually(t, func() bool { return trafficOf(c).acked >= size }, 20*time.Second, time.Millisecond)
}
