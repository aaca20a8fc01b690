package tcp

import (
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a TCP connection outside the Go runtime's poller, so that messages to a polling
// goroutine wake no thread of this process. A reader or writer that has to sleep waits for an
// epoll instance that belongs to the connection, and the runtime watches that instance instead.
// While the instance is told not to watch the connection, messages wake nobody.
//
// One goroutine reads at a time, and one writes. Close and the deadlines may be called from any
// goroutine.
type socket struct {
	fd            int
	uses          atomic.Int64 // system calls that run, plus one until Close
	freed         atomic.Bool
	local, remote net.Addr
	in, out       *readiness

	rest     [][]byte // of a write that waits
	wrote    int
	writeErr error
	write    func(uintptr) bool

	change  unix.EpollEvent // of watch
	found   [1]unix.EpollEvent
	control func(uintptr)
}

// closing is added to socket.uses by Close.
const closing = 1 << 32

// readiness is an epoll instance on which a goroutine sleeps until a connection can be read or
// written.
type readiness struct {
	epoll *os.File
	raw   syscall.RawConn
	ctl   int
	event uint32
}

func newReadiness(fd int, event uint32) (*readiness, error) {
	ctl, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	err = unix.SetNonblock(ctl, true) // or the runtime would not watch it
	if err == nil {
		err = unix.EpollCtl(ctl, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: event, Fd: int32(fd)})
	}
	if err != nil {
		unix.Close(ctl)
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	r := &readiness{epoll: os.NewFile(uintptr(ctl), "epoll"), ctl: ctl, event: event}
	if err = r.epoll.SetDeadline(time.Time{}); err == nil {
		r.raw, err = r.epoll.SyscallConn()
	}
	if err != nil {
		r.epoll.Close()
		return nil, err
	}
	return r, nil
}

// ownSocket takes c over. It returns a socket in its place, or c itself if that cannot be.
func ownSocket(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c
	}
	s := &socket{fd: -1, local: t.LocalAddr(), remote: t.RemoteAddr()}
	err = raw.Control(func(fd uintptr) { s.fd, _ = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err != nil || s.fd < 0 {
		return c
	}
	if s.in, err = newReadiness(s.fd, unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLET); err == nil {
		if s.out, err = newReadiness(s.fd, unix.EPOLLOUT|unix.EPOLLET); err != nil {
			s.in.epoll.Close()
		}
	}
	if err != nil {
		unix.Close(s.fd)
		return c
	}
	s.uses.Store(1)
	s.write, s.control = s.writeSome, s.controlled
	t.Close() // the connection lives on in the duplicate
	return s
}

// use keeps the descriptor open until done.
func (s *socket) use() bool {
	if s.uses.Add(1) < closing {
		return true
	}
	s.done()
	return false
}

func (s *socket) done() {
	if s.uses.Add(-1) == closing && !s.freed.Swap(true) {
		unix.Close(s.fd)
	}
}

// hangUp ends the connection once no system call runs on it. It returns false if that was done
// before.
func (s *socket) hangUp() bool {
	for {
		n := s.uses.Load()
		if n >= closing {
			return false
		}
		if s.uses.CompareAndSwap(n, n+closing) {
			s.done()
			return true
		}
	}
}

// Close implements net.Conn. It waits until no goroutine is in await.
func (s *socket) Close() error {
	s.hangUp()
	err := s.in.epoll.Close()
	if e := s.out.epoll.Close(); err == nil {
		err = e
	}
	return err
}

// tryRead implements pollable.
func (s *socket) tryRead(a, b []byte) (int, error) {
	if !s.use() {
		return 0, net.ErrClosed
	}
	defer s.done()
	for {
		var n int
		var err error
		if len(b) == 0 {
			n, err = unix.Read(s.fd, a)
		} else {
			n, err = unix.Readv(s.fd, [][]byte{a, b})
		}
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return 0, errAgain
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// await implements pollable.
func (s *socket) await(f func(uintptr) bool) error { return s.in.raw.Read(f) }

// notify implements pollable. A wait of no time at all makes the instance forget what it
// reported before; otherwise it would not report that again.
func (s *socket) notify(on bool) {
	if !s.use() {
		return
	}
	defer s.done()
	s.change.Events = unix.EPOLLET
	if on {
		s.change.Events = s.in.event
	}
	s.change.Fd = int32(s.fd)
	s.in.raw.Control(s.control)
}

func (s *socket) controlled(ctl uintptr) {
	unix.EpollWait(int(ctl), s.found[:], 0)
	unix.EpollCtl(int(ctl), unix.EPOLL_CTL_MOD, s.fd, &s.change)
}

// Read implements net.Conn.
func (s *socket) Read(b []byte) (n int, err error) {
	failed := s.in.raw.Read(func(uintptr) bool {
		n, err = s.tryRead(b, nil)
		return err != errAgain
	})
	if failed != nil {
		return 0, failed
	}
	return n, err
}

// Write implements net.Conn.
func (s *socket) Write(b []byte) (int, error) {
	bufs := net.Buffers{b}
	n, err := s.writeBuffers(&bufs)
	return int(n), err
}

// writeBuffers is net.Buffers.WriteTo for this connection.
func (s *socket) writeBuffers(bufs *net.Buffers) (int64, error) {
	s.rest, s.wrote, s.writeErr = *bufs, 0, nil
	err := s.out.raw.Read(s.write)
	if err == nil {
		err = s.writeErr
	}
	*bufs, s.rest = s.rest, nil
	return int64(s.wrote), err
}

// writeSome writes until everything is written or the socket is full.
func (s *socket) writeSome(uintptr) bool {
	for len(s.rest) > 0 {
		if len(s.rest[0]) == 0 {
			s.rest = s.rest[1:]
			continue
		}
		if !s.use() {
			s.writeErr = net.ErrClosed
			return true
		}
		n, err := unix.Writev(s.fd, s.rest[:min(len(s.rest), gatherVectors)])
		s.done()
		switch err {
		case nil:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		default:
			s.writeErr = os.NewSyscallError("write", err)
			return true
		}
		s.wrote += n
		for n > 0 {
			k := min(n, len(s.rest[0]))
			if s.rest[0] = s.rest[0][k:]; len(s.rest[0]) == 0 {
				s.rest = s.rest[1:]
			}
			n -= k
		}
	}
	return true
}

// CloseWrite ends what goes out.
func (s *socket) CloseWrite() error {
	return s.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_WR) })
}

// SyscallConn implements syscall.Conn.
func (s *socket) SyscallConn() (syscall.RawConn, error) { return rawSocket{s}, nil }

// Control is as of syscall.RawConn.
func (s *socket) Control(f func(fd uintptr)) error {
	if !s.use() {
		return net.ErrClosed
	}
	defer s.done()
	f(uintptr(s.fd))
	return nil
}

// rawSocket calls functions once, whatever they return.
type rawSocket struct{ *socket }

func (s rawSocket) Read(f func(uintptr) bool) error {
	return s.Control(func(fd uintptr) { f(fd) })
}

func (s rawSocket) Write(f func(uintptr) bool) error {
	if !s.use() {
		return net.ErrClosed
	}
	defer s.done()
	f(uintptr(s.fd))
	return nil
}

func (s *socket) LocalAddr() net.Addr  { return s.local }
func (s *socket) RemoteAddr() net.Addr { return s.remote }

func (s *socket) SetReadDeadline(t time.Time) error  { return s.in.epoll.SetReadDeadline(t) }
func (s *socket) SetWriteDeadline(t time.Time) error { return s.out.epoll.SetReadDeadline(t) }

// SetDeadline implements net.Conn.
func (s *socket) SetDeadline(t time.Time) error {
	if err := s.SetReadDeadline(t); err != nil {
		return err
	}
	return s.SetWriteDeadline(t)
}

// yield offers this thread's CPU to other threads and processes.
func yield() { unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
