package hostmem

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// LargePages asks for large pages. It does nothing on a system without them.
func LargePages(b []byte) {
	const size = 2 << 20
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) % size)
	if n := (len(b) - skip) &^ (size - 1); n > 0 {
		unix.Madvise(b[skip:skip+n], unix.MADV_HUGEPAGE)
	}
}
