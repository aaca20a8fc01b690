//go:build unix

package ownfile

import (
	"context"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// With dontWait, open does not wait for the other side of a FIFO. With noLink it refuses a link.
const (
	dontWait = syscall.O_NONBLOCK
	noLink   = syscall.O_NOFOLLOW
	hasModes = true
)

// Foreign reports whether another user than this one and root has made a file.
func Foreign(info fs.FileInfo) bool {
	s, ok := info.Sys().(*syscall.Stat_t)
	return ok && s.Uid != 0 && int(s.Uid) != os.Geteuid()
}

// Listen listens on a socket that only this user can use. On Linux no other user can connect before that, either:
// bind takes the mode from the descriptor. Other systems refuse to set it there, so the caller has to set that of the file.
func Listen(path string) (net.Listener, error) {
	c := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = syscall.Fchmod(int(fd), 0o600) })
	}}
	return c.Listen(context.Background(), "unix", path)
}
