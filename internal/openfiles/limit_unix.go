//go:build unix

package openfiles

import (
	"fmt"
	"syscall"
)

// limit returns the number of descriptors that this process may have, for an error's text.
func limit() string {
	var r syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) != nil {
		return ""
	}
	return fmt.Sprintf(" (it may have %d)", r.Cur)
}
