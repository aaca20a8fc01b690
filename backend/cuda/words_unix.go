//go:build linux || darwin || freebsd || netbsd || openbsd

package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// pagePath returns where the file of a page is: in memory if there is such a
// place. CUDA locks no pages of files that are written back to a disk.
func pagePath(name string) string {
	const shm = "/dev/shm"
	dir := os.TempDir()
	if s, err := os.Stat(shm); err == nil && s.IsDir() {
		dir = shm
	}
	return filepath.Join(dir, "c10d-cuda-"+name)
}

func createPage(name string) (*page, error) {
	f, err := os.OpenFile(pagePath(name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// Written, so that a full file system is an error and no bus error later.
	_, err = f.Write(make([]byte, pageSize))
	var p *page
	if err == nil {
		p, err = mapped(f)
	}
	if err != nil {
		return nil, errors.Join(err, removePage(name))
	}
	p.name = name
	return p, nil
}

func mapPage(name string) (*page, error) {
	f, err := os.OpenFile(pagePath(name), os.O_RDWR|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !s.Mode().IsRegular() || s.Size() != pageSize {
		return nil, fmt.Errorf("%s has %d bytes, want %d", f.Name(), s.Size(), pageSize)
	}
	return mapped(f)
}

func mapped(f *os.File) (*page, error) {
	b, err := syscall.Mmap(int(f.Fd()), 0, pageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping %s: %w", f.Name(), err)
	}
	return &page{bytes: b, unmap: func() error { return syscall.Munmap(b) }}, nil
}

func removePage(name string) error { return os.Remove(pagePath(name)) }
