//go:build race

package shm

import "unsafe"

// copyUnchecked copies from memory of another rank in this process. The race detector must not
// see it. It does not see the words that order the copy, because each rank has its own mapping of
// them. It looks into copy and memmove, so this is a loop.
//
//go:norace
//go:nocheckptr
func copyUnchecked(dst []byte, at uint64) {
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
