//go:build race

package reduce

import (
	"runtime"
	"unsafe"
)

// accessed tells the race detector which memory a loop reads and writes, because it does not see
// assembly.
func accessed(dst, src []byte) {
	runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(src)), len(src))
	runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(dst)), len(dst))
}
