//go:build !linux

package tcpsock

import (
	"fmt"
	"net"
)

// SetCongestion returns an error unless name is empty: only Linux has a choice.
func SetCongestion(_ *net.TCPConn, name string) error {
	if name != "" {
		return fmt.Errorf("congestion control %q: only Linux has a choice", name)
	}
	return nil
}
