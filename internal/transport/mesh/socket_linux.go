package mesh

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socketTraffic is traffic for one connection.
func socketTraffic(c syscall.Conn) (bytes uint64, quiet time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0
	}
	raw.Control(func(fd uintptr) {
		if i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			bytes, quiet = i.Bytes_acked+i.Bytes_received, time.Duration(i.Last_data_recv)*time.Millisecond
		}
	})
	return bytes, quiet
}

// setUserTimeout bounds how long data may stay without an acknowledgement.
func setUserTimeout(c syscall.Conn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(max(d.Milliseconds(), 1)))
	})
	if err != nil {
		return err
	}
	return failed
}
