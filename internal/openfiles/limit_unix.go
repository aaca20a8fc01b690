//go:build unix

package openfiles

import "syscall"

// Limit returns how many descriptors this process may have, 0 if nobody knows. Go raises that to the hard limit when a
// program starts.
func Limit() int {
	var r syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) != nil {
		return 0
	}
	return int(min(uint64(r.Cur), 1<<20))
}
