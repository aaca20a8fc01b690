package tcpsock

import (
	"net"

	"golang.org/x/sys/unix"
)

// SetCongestion sets the congestion control of a connection, if the system has it.
func SetCongestion(c *net.TCPConn, name string) {
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) })
	}
}
