//go:build darwin || freebsd || netbsd || openbsd

package cuda

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// pagePath returns where the file of a page is, until all who may open it have.
func pagePath(id [nameLen / 2]byte) string {
	return filepath.Join(os.TempDir(), "c10d-cuda-"+hex.EncodeToString(id[:]))
}

func createPage(id [nameLen / 2]byte) (*page, error) {
	path := pagePath(id)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
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
		return nil, errors.Join(err, os.Remove(path))
	}
	p.name, p.forget = hex.EncodeToString(id[:]), func() error { return os.Remove(path) }
	return p, nil
}

func mapPage(id [nameLen / 2]byte) (*page, error) {
	f, err := os.OpenFile(pagePath(id), os.O_RDWR|syscall.O_NOFOLLOW, 0)
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
