package mesh

import (
	"errors"
	"math"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// mostLooks is how often socketTraffic looks at a connection until nothing is acknowledged meanwhile.
const mostLooks = 4

// socketTraffic is the traffic of one connection.
func socketTraffic(c syscall.Conn) (t traffic) {
	raw, err := c.SyscallConn()
	if err != nil {
		return traffic{}
	}
	raw.Control(func(fd uintptr) {
		for range mostLooks {
			before, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			queue, err2 := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
			now, err3 := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if errors.Join(err, err2, err3) != nil {
				return
			}
			t = traffic{acked: now.Bytes_acked, queue: uint64(max(queue, 0)), quiet: time.Duration(now.Last_data_recv) * time.Millisecond}
			if now.Min_rtt != math.MaxUint32 {
				t.least = time.Duration(now.Min_rtt) * time.Microsecond
			}
			if now.Bytes_acked == before.Bytes_acked {
				return
			}
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
