//go:build !linux && !darwin && !openbsd

package tcp

import "net"

const gatherVectors = 8

// attempt would write the bytes that a socket takes without waiting. That cannot be done here, so
// the writers' goroutines do it all.
type tryWriter struct{}

func newTryWriter(net.Conn) *tryWriter { return nil }

func (*tryWriter) write([][]byte) int { return 0 }
