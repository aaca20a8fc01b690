package weights

import (
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

// largePages asks for large pages, which make receiving 1.1 times as fast. It does nothing on a system without them.
func largePages(b []byte) {
	const size = 2 << 20
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) % size)
	if n := (len(b) - skip) &^ (size - 1); n > 0 {
		unix.Madvise(b[skip:skip+n], unix.MADV_HUGEPAGE)
	}
}

// setReno picks reno as the congestion control. The system's choice may send at a rate that it has measured, as bbr does,
// and takes longer within a host.
func setReno(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) { // every kernel has reno; without it an update takes longer
		unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	})
}
