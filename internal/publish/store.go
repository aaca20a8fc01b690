//go:build !amd64 || !gc || race

package publish

import (
	"sync/atomic"
	"unsafe"
)

// Store stores v in *p, after all that the goroutine has written before.
func Store(p *uint32, v uint32) { atomic.StoreUint32(p, v) }

// StorePointer is Store for a pointer.
func StorePointer(p *unsafe.Pointer, v unsafe.Pointer) { atomic.StorePointer(p, v) }
