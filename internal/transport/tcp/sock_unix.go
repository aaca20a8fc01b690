//go:build linux || darwin || openbsd

package tcp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// gatherVectors is how many buffers one attempt may have; with more of them
// unix.Writev allocates.
const gatherVectors = 8

// attempt writes what a socket takes without waiting.
type tryWriter struct {
	conn syscall.RawConn
	call func(fd uintptr) bool
	bufs [][]byte
	n    int
	err  error
}

// newTryWriter returns nil if c is no socket that can be written to directly.
func newTryWriter(c net.Conn) *tryWriter {
	t, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil
	}
	a := &tryWriter{conn: raw}
	a.call = func(fd uintptr) bool {
		for {
			if len(a.bufs) == 1 {
				a.n, a.err = unix.Write(int(fd), a.bufs[0])
			} else {
				a.n, a.err = unix.Writev(int(fd), a.bufs)
			}
			if a.err != unix.EINTR {
				return true
			}
		}
	}
	return a
}

// write returns how many bytes of bufs went out, which may be none. An error is not reported:
// the next write that waits finds it again.
func (a *tryWriter) write(bufs [][]byte) int {
	a.bufs, a.n, a.err = bufs, 0, nil
	if err := a.conn.Write(a.call); err != nil || a.err != nil {
		a.n = 0
	}
	a.bufs = nil
	return max(a.n, 0)
}
