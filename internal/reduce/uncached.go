package reduce

import (
	"fmt"
	"unsafe"
)

// uncachedAlign is the alignment of dst that the loop in assembly needs.
const uncachedAlign = 32

// past is the loop, which copies whole steps; nil if there is none.
var past = copier()

// Uncached copies src to dst without leaving dst in the processor's caches, if the processor can
// do that. Use it for memory that a device reads next: a device is slow with memory in those
// caches. The copy also does not read dst first. A reader that sees a later store of the caller
// also sees the copy. src and dst have the same length and must not overlap.
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
