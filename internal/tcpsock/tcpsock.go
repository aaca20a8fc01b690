// Package tcpsock has what net does not offer for TCP connections.
package tcpsock

import "net"

// IsLocal reports whether both ends of a connection are on this host.
func IsLocal(c net.Conn) bool {
	remote, ok := c.RemoteAddr().(*net.TCPAddr)
	local, both := c.LocalAddr().(*net.TCPAddr)
	return ok && both && (remote.IP.IsLoopback() || remote.IP.Equal(local.IP))
}
