//go:build !linux

package tcp

import (
	"fmt"
	"net"
	"time"
)

// tuneSystem sets what only Linux has: here, nothing. A time-out is an
// improvement that others can do without, but who asks for a congestion control means it.
func tuneSystem(_ *net.TCPConn, congestion string, _ time.Duration) error {
	if congestion != "" {
		return fmt.Errorf("congestion control %q: this system has no choice", congestion)
	}
	return nil
}
