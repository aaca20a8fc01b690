//go:build unix

package tcp

import "syscall"

// descriptorLimit is how many files the process may have open. Go raises it to the hard limit
// when a program starts.
func descriptorLimit() int {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return int(min(uint64(r.Cur), 1<<20))
}
