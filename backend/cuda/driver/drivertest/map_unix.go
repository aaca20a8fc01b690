//go:build linux || darwin || freebsd || netbsd || openbsd

package drivertest

import (
	"os"
	"syscall"
)

// mapFile maps n bytes of a file that other processes map too.
func mapFile(path string, n int) ([]byte, func() error, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	b, err := syscall.Mmap(int(f.Fd()), 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return b, func() error { return syscall.Munmap(b) }, nil
}
