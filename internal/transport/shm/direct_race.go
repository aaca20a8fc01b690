//go:build race

package shm

import "unsafe"

// copyUnseen copies from memory of another rank in this process. The race detector
// must not see it: what orders the copy lies in memory of which the ranks have two
// mappings. It looks into copy and memmove, so this is a loop.
//
//go:norace
//go:nocheckptr
func copyUnseen(dst []byte, at uint64) {
	p := uintptr(at)
	src := unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), len(dst))
	i := 0
	for ; i+8 <= len(dst); i += 8 {
		*(*[8]byte)(unsafe.Pointer(&dst[i])) = *(*[8]byte)(unsafe.Pointer(&src[i]))
	}
	for ; i < len(dst); i++ {
		dst[i] = src[i]
	}
}
