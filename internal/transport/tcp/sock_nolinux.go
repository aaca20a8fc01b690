//go:build !linux

package tcp

import (
	"fmt"
	"net"
)

// setCongestion returns an error unless name is empty: only Linux has a choice.
func setCongestion(_ *net.TCPConn, name string) error {
	if name != "" {
		return fmt.Errorf("congestion control %q: only Linux has a choice", name)
	}
	return nil
}
