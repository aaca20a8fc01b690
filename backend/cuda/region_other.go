//go:build !linux

package cuda

import (
	"errors"
	"fmt"
	"unsafe"
)

// createShared returns n bytes of zeros for the ranks of this process: other systems
// have simulated devices only.
func createShared(id string, n int) (*sharedMemory, error) {
	if err := before("make", n); err != nil {
		return nil, err
	}
	b := make([]byte, n+slotAlign)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (slotAlign - 1))
	return &sharedMemory{bytes: b[skip : skip+n : skip+n], name: id}, nil
}

// openShared is for processes, which share none.
func openShared(_ string, n int) (*sharedMemory, error) {
	if err := before("open", n); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("processes share no memory on this system: %w", errors.ErrUnsupported)
}
