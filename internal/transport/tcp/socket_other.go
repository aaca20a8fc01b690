//go:build !linux

package tcp

import "net"

// ownSocket returns a connection that can be polled, where there are any.
func ownSocket(c net.Conn) net.Conn { return c }

func yield() {}
