//go:build gc && !race

package publish

import "unsafe"

// Store stores v in *p, after all that the goroutine has written before.
//
//go:noinline
func Store(p *uint32, v uint32) { *p = v }

// StorePointer is Store for a pointer.
//
//go:noinline
func StorePointer(p *unsafe.Pointer, v unsafe.Pointer) { *p = v }
