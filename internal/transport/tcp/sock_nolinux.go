//go:build !linux

package tcp

import (
	"fmt"
	"net"
	"time"
)

// tuneSystem sets what only Linux has. Other systems do without the time-out, but a choice of
// congestion control is an error.
func tuneSystem(_ *net.TCPConn, congestion string, _ time.Duration) error {
	if congestion != "" {
		return fmt.Errorf("congestion control %q: only Linux has a choice", congestion)
	}
	return nil
}
