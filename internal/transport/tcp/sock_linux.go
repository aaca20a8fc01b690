package tcp

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// tuneSystem sets what only Linux has.
func tuneSystem(c *net.TCPConn, congestion string, userTimeout time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		if userTimeout > 0 {
			if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds())); err != nil {
				failed = fmt.Errorf("TCP_USER_TIMEOUT: %w", err)
			}
		}
		if congestion != "" {
			if err := unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion); err != nil {
				failed = fmt.Errorf("congestion control %q: %w", congestion, err)
			}
		}
	})
	if err != nil {
		return err
	}
	return failed
}
