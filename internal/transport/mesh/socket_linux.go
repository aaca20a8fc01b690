package mesh

import (
	"errors"
	"math"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socketTraffic is the traffic of one connection.
func socketTraffic(c syscall.Conn) (t traffic) {
	raw, err := c.SyscallConn()
	if err != nil {
		return traffic{}
	}
	raw.Control(func(fd uintptr) {
		i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		t = traffic{acked: i.Bytes_acked, quiet: time.Duration(i.Last_data_recv) * time.Millisecond}
		if i.Min_rtt != math.MaxUint32 {
			t.least = time.Duration(i.Min_rtt) * time.Microsecond
		}
	})
	return t
}

// timedOut reports whether the system has ended a connection because of the limits of LimitSilence.
// The other host acknowledges something in every two fifths of that time.
func timedOut(c syscall.Conn) (ended bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) {
		i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		limit, err2 := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		asks, err3 := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		if errors.Join(err, err2, err3) == nil {
			ended = i.State == unix.BPF_TCP_CLOSE && asks != 0 && limit > 0 && i.Last_ack_recv >= uint32(limit)/5*4
		}
	})
	return ended
}

// setUserTimeout bounds how long data may stay without an acknowledgement.
func setUserTimeout(c syscall.Conn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(min(max(d.Milliseconds(), 1), math.MaxInt32)))
	})
	if err != nil {
		return err
	}
	return failed
}
