package reduce

import (
	"fmt"
	"unsafe"
)

// uncachedAlign is what the dst of the loop in assembly begins at a multiple of.
const uncachedAlign = 32

// past is the loop, which copies whole steps; nil where there is none.
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
		tail := head + (n-head)&^(step-1)
		if tail > head {
			accessed(dst[head:tail], src[head:tail])
			past(dst[head:tail], src[head:tail])
		}
		copy(dst[tail:n], src[tail:n])
		dst, src = dst[n:], src[n:]
	}
}
