//go:build !linux

package region

import (
	"errors"
	"fmt"
	"unsafe"
)

// createShared returns n bytes of zeros for the ranks of this process: other systems
// have simulated devices only.
func createShared(id string, n int) (*SharedMemory, error) {
	if err := Before("make", n); err != nil {
		return nil, err
	}
	b := make([]byte, n+PageSize)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (PageSize - 1))
	return &SharedMemory{Bytes: b[skip : skip+n : skip+n], Name: id}, nil
}

// openShared is for processes, which share none.
func openShared(_ string, n int) (*SharedMemory, error) {
	if err := Before("open", n); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("processes share no memory on this system: %w", errors.ErrUnsupported)
}
