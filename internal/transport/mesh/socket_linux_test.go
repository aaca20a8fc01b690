package mesh

import (
	"net"
	"testing"

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
