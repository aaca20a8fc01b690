//go:build race

package reduce

import (
	"runtime"
	"unsafe"
)

// accessed tells the race detector what a loop does to memory: it cannot see
// into assembly, and kernels work on memory that ranks share.
func accessed(dst, src []byte) {
	runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(src)), len(src))
	runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(dst)), len(dst))
}
