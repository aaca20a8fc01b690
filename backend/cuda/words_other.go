//go:build !(linux || darwin || freebsd || netbsd || openbsd)

package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"
)

// Here only ranks of one process share pages.
var pages struct {
	sync.Mutex
	by map[string][]byte // those that have a name
}

func createPage(name string) (*page, error) {
	b := make([]byte, 2*pageSize)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (pageSize - 1))
	p := &page{bytes: b[skip : skip+pageSize : skip+pageSize], name: name}
	pages.Lock()
	defer pages.Unlock()
	if pages.by == nil {
		pages.by = make(map[string][]byte)
	}
	pages.by[name] = p.bytes
	return p, nil
}

func mapPage(name string) (*page, error) {
	pages.Lock()
	defer pages.Unlock()
	b, ok := pages.by[name]
	if !ok {
		return nil, fmt.Errorf("processes share no memory on this system: %w", errors.ErrUnsupported)
	}
	return &page{bytes: b}, nil
}

func removePage(name string) error {
	pages.Lock()
	defer pages.Unlock()
	delete(pages.by, name)
	return nil
}
