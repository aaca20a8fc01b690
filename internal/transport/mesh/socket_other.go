//go:build !linux

package mesh

import (
	"syscall"
	"time"
)

// socketTraffic is traffic for one connection.
func socketTraffic(syscall.Conn) (bytes uint64, quiet time.Duration) { return 0, 0 }

// timedOut is not known.
func timedOut(syscall.Conn) bool { return false }

// setUserTimeout leaves the time to the system.
func setUserTimeout(syscall.Conn, time.Duration) error { return nil }
