package reduce

import (
	"fmt"
	"unsafe"
)

// uncachedStep is what the loops in assembly copy a multiple of, uncachedAlign what
// their dst begins at a multiple of.
const (
	uncachedStep  = 128
	uncachedAlign = 32
)

// past copies so, nil where nothing can.
var past = copier()

// Uncached copies src to dst, which have the same length, and leaves dst in no cache of
// a processor that can do that: for memory that a device reads next, which is slow where
// it has to ask the processors' caches, and which the copy then need not read first.
// Whoever sees what the caller stores afterwards sees the copy. The two must not overlap.
func Uncached(dst, src []byte) {
	if len(dst) != len(src) {
		panic(fmt.Sprintf("reduce: Uncached from %d bytes to %d", len(src), len(dst)))
	}
	if past == nil {
		copy(dst, src)
		return
	}
	for len(dst) > 0 {
		n := min(len(dst), piece)
		head := min(int(-uintptr(unsafe.Pointer(unsafe.SliceData(dst)))%uncachedAlign), n)
		copy(dst[:head], src[:head])
		tail := head + (n-head)&^(uncachedStep-1)
		if tail > head {
			accessed(dst[head:tail], src[head:tail])
			past(dst[head:tail], src[head:tail])
		}
		copy(dst[tail:n], src[tail:n])
		dst, src = dst[n:], src[n:]
	}
}
