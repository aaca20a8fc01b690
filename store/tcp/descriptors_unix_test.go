//go:build unix

package tcp

import "syscall"

// descriptors is how many files the process may have open. Go raises that to
// the hard limit by itself.
func descriptors() int {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return int(min(r.Cur, 1<<20))
}
