// Package freeport finds ports for servers that are started later, by another
// process, with a port that it is told; tests need such.
//
// To listen on port 0, close and use the number leaves the port to whoever asks
// the kernel next: a test elsewhere that connects to anything. A process that
// imports PyTorch first takes seconds to listen, in which thousands of ports may
// be given away. Loopback therefore makes a connection to its port and closes it
// on the listening side first. That side stays behind in TIME_WAIT, for 60 s on
// Linux. Meanwhile the kernel gives the port to nobody who asks for any. A server
// gets it if it names it and sets SO_REUSEADDR, as Go, Redis and PyTorch do. Who
// connects meanwhile is refused.
package freeport

import (
	"io"
	"net"
	"testing"
)

// Loopback returns "127.0.0.1:port" with a port that is kept for the caller.
func Loopback(t testing.TB) string {
	t.Helper()
	addr, err := Reserve()
	if err != nil {
		t.Fatalf("freeport: %v", err)
	}
	return addr
}

// Reserve is Loopback outside of a test.
func Reserve() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return "", err
	}
	defer near.Close()
	far, err := ln.Accept()
	if err != nil {
		return "", err
	}
	if err := far.Close(); err != nil {
		return "", err
	}
	// The end of the connection is here before this side closes too.
	if _, err := io.Copy(io.Discard, near); err != nil {
		return "", err
	}
	return ln.Addr().String(), nil
}
