//go:build !(linux || darwin || freebsd || netbsd || openbsd)

package cuda

import (
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"unsafe"
)

// Here only ranks of one process share pages.
var pages struct {
	sync.Mutex
	by map[[nameLen / 2]byte][]byte // those that have a name
}

func createPage(id [nameLen / 2]byte) (*page, error) {
	b := make([]byte, 2*pageSize)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (pageSize - 1))
	p := &page{bytes: b[skip : skip+pageSize : skip+pageSize], name: hex.EncodeToString(id[:])}
	p.forget = func() error {
		pages.Lock()
		defer pages.Unlock()
		delete(pages.by, id)
		return nil
	}
	pages.Lock()
	defer pages.Unlock()
	if pages.by == nil {
		pages.by = make(map[[nameLen / 2]byte][]byte)
	}
	pages.by[id] = p.bytes
	return p, nil
}

func mapPage(id [nameLen / 2]byte) (*page, error) {
	pages.Lock()
	defer pages.Unlock()
	b, ok := pages.by[id]
	if !ok {
		return nil, fmt.Errorf("processes share no memory on this system: %w", errors.ErrUnsupported)
	}
	return &page{bytes: b}, nil
}
