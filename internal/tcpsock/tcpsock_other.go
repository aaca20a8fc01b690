//go:build !linux

package tcpsock

import "net"

// SetCongestion does nothing: only Linux has a choice.
func SetCongestion(*net.TCPConn, string) {}
