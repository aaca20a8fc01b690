package mesh

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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
	require.Zero(t, trafficOf([]net.Conn{c}).queue)

	const size = 8 << 20
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, size))
		wrote <- err
	}()
	require.Eventually(t, func() bool { return trafficOf([]net.Conn{c}).queue >= longQueue }, 20*time.Second, time.Millisecond)
	_, err = io.CopyN(io.Discard, other, size)
	require.NoError(t, err)
	require.NoError(t, <-wrote)
	require.Eventually(t, func() bool {
		now := trafficOf([]net.Conn{c})
		return now.queue == 0 && now.bytes >= size
	}, 20*time.Second, time.Millisecond)
}
