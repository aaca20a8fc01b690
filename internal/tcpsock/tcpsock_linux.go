package tcpsock

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// SetCongestion sets the congestion control of a connection, unless name is empty.
func SetCongestion(c *net.TCPConn, name string) error {
	if name == "" {
		return nil
	}
	return control(c, func(fd int) error {
		if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
			return fmt.Errorf("congestion control %q: %w", name, err)
		}
		return nil
	})
}

func control(c *net.TCPConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}
