package tcp

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// setCongestion sets the congestion control of a connection, unless name is empty.
func setCongestion(c *net.TCPConn, name string) error {
	if name == "" {
		return nil
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		if err := unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
			failed = fmt.Errorf("congestion control %q: %w", name, err)
		}
	})
	if err != nil {
		return err
	}
	return failed
}
