//go:build linux || darwin || freebsd || netbsd || openbsd

package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// canShare tells that memory in files works here.
const canShare = true

// createShared makes a file of n bytes and maps it. What it returns besides
// removes the file and, if asked, ends the mapping.
func createShared(dir, name string, n int) ([]byte, func(unmap bool), error) {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("sim: %w", err)
	}
	defer f.Close()
	if err := f.Truncate(int64(n)); err != nil {
		os.Remove(path)
		return nil, nil, fmt.Errorf("sim: %w", err)
	}
	b, err := mapFile(f, n)
	if err != nil {
		os.Remove(path)
		return nil, nil, err
	}
	return b, func(unmap bool) {
		os.Remove(path)
		if unmap {
			syscall.Munmap(b)
		}
	}, nil
}

// openShared maps the file of another process, all of it.
func openShared(dir, name string) ([]byte, func(unmap bool), error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("sim: %w", err)
	}
	defer f.Close()
	s, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("sim: %w", err)
	}
	if s.Size() <= 0 || s.Size() != int64(int(s.Size())) {
		return nil, nil, fmt.Errorf("sim: %s has %d bytes", name, s.Size())
	}
	b, err := mapFile(f, int(s.Size()))
	if err != nil {
		return nil, nil, err
	}
	return b, func(unmap bool) {
		if unmap {
			syscall.Munmap(b)
		}
	}, nil
}

func mapFile(f *os.File, n int) ([]byte, error) {
	b, err := syscall.Mmap(int(f.Fd()), 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("sim: mapping %d bytes of %s: %w", n, f.Name(), err)
	}
	return b, nil
}
