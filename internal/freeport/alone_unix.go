//go:build unix

package freeport

import "syscall"

// alone makes a socket refuse a port whose last connection is in TIME_WAIT. Go lets it.
func alone(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 0) })
}
