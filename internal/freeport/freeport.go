// Package freeport finds ports for servers that are started later, by another
// process, with a port that it is told; tests need such.
//
// The kernel gives the ports from 32768 on to those who ask for any: to every test that
// connects to anything. A process that imports PyTorch first may take minutes to listen on
// a busy machine, in which all of them may be given away. So these ports are lower ones.
// Two tests do not choose the same one, because Loopback makes a connection to its port
// and closes it on the listening side first. That side stays behind in TIME_WAIT, for 60 s
// on Linux. Meanwhile only a server that sets SO_REUSEADDR gets the port, as Go, Redis and
// PyTorch do. Who connects meanwhile is refused.
package freeport

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
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

// forked returns once package os has forked without the lock, which it does once in a program, to learn whether it can
// wait for processes by descriptors.
var forked = sync.OnceFunc(func() {
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		_ = p.Release()
	}
})

// Reserve is Loopback outside of a test.
func Reserve() (string, error) {
	if runtime.GOOS == "linux" { // elsewhere, sockets are opened under this lock
		// A process that another goroutine starts has this one's sockets until it runs its program. It would keep
		// the port in use for as long.
		forked()
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
	}
	ln, err := listen()
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

// lowest and above bound the ports. Few services are known there, and most systems give none away.
const lowest, above = 1 << 14, 1 << 15

// listen listens on a port that nobody uses, or has used in the last minute.
func listen() (ln net.Listener, err error) {
	alone := net.ListenConfig{Control: alone}
	for range 1000 {
		at := net.JoinHostPort("127.0.0.1", strconv.Itoa(lowest+rand.IntN(above-lowest)))
		if ln, err = alone.Listen(context.Background(), "tcp", at); err != nil {
			continue
		}
		ln.Close()
		if ln, err = net.Listen("tcp", at); err == nil { // what it leaves behind lets a server in
			return ln, nil
		}
	}
	return nil, err
}
