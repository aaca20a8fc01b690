//go:build !linux

package mesh

import (
	"syscall"
	"time"
)

// socketTraffic is not known.
func socketTraffic(syscall.Conn) traffic { return traffic{} }

// timedOut is not known.
func timedOut(syscall.Conn) bool { return false }

// setUserTimeout leaves the time to the system.
func setUserTimeout(syscall.Conn, time.Duration) error { return nil }
