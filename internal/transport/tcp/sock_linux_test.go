package tcp

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestSocketOptions: all sockets of both sides have the options.
func TestSocketOptions(t *testing.T) {
	o := local
	o.Silence = 30 * time.Second
	o.Lanes = 1
	ms := join(t, 2, o)
	a, b := tcpPair(t) // with the buffers that the kernel gives
	defer a.Close()
	defer b.Close()
	require.NoError(t, a.(*net.TCPConn).SetWriteBuffer(localBuffer))
	require.NoError(t, a.(*net.TCPConn).SetReadBuffer(localBuffer))
	option := func(c net.Conn, level, opt int) (n int) {
		raw, err := c.(syscall.Conn).SyscallConn()
		require.NoError(t, err)
		raw.Control(func(fd uintptr) { n, err = unix.GetsockoptInt(int(fd), level, opt) })
		require.NoError(t, err)
		return n
	}
	check := func(c net.Conn) {
		get := func(level, opt int) int { return option(c, level, opt) }
		require.Equal(t, 1, get(unix.IPPROTO_TCP, unix.TCP_NODELAY))
		require.Equal(t, 30_000, get(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT))
		require.Equal(t, 0, get(unix.SOL_SOCKET, unix.SO_KEEPALIVE), "within the host")
		require.Equal(t, 12, get(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE))
		require.Equal(t, 6, get(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL))
		require.Equal(t, 3, get(unix.IPPROTO_TCP, unix.TCP_KEEPCNT))
		require.Equal(t, option(a, unix.SOL_SOCKET, unix.SO_SNDBUF), get(unix.SOL_SOCKET, unix.SO_SNDBUF))
		require.Equal(t, option(a, unix.SOL_SOCKET, unix.SO_RCVBUF), get(unix.SOL_SOCKET, unix.SO_RCVBUF))
		var name string
		raw, err := c.(syscall.Conn).SyscallConn()
		require.NoError(t, err)
		raw.Control(func(fd uintptr) { name, err = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) })
		require.NoError(t, err)
		require.Equal(t, "reno", name[:4])
	}
	buf := make([]byte, bulkyBytes)
	s, r := send(ms[0], 1, 1, buf), recv(ms[1], 0, 1, make([]byte, bulkyBytes))
	require.NoError(t, wait(t, s))
	require.NoError(t, wait(t, r))
	for i, m := range ms {
		eventually(t, "another connection", func() bool {
			m.Mu.Lock()
			defer m.Mu.Unlock()
			return len(m.pairs[1-i].bulk)+len(m.pairs[1-i].inbound) > 0
		})
		m.Mu.Lock()
		check(m.pairs[1-i].first.conn)
		for _, l := range m.pairs[1-i].bulk {
			check(l.conn)
			require.Equal(t, [2]int{bulkyBytes, aloneBytes}, [2]int{m.pairs[1-i].s.bulky, m.pairs[1-i].s.alone}, "within the host")
		}
		for c := range m.pairs[1-i].inbound {
			check(c)
		}
		m.Mu.Unlock()
	}
}
