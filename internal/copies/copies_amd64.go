//go:build !race

package copies

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// least is from how many bytes on the instruction is faster.
const least = 4 << 10

var fast = isAMD() && cpu.X86.HasERMS

// isAMD reports whether the processor is from AMD.
func isAMD() bool

// moveString is forward: an overlap with src before dst would be wrong.
//
//go:noescape
func moveString(dst, src *byte, n uintptr)

func bytes(dst, src []byte) int {
	n := min(len(dst), len(src))
	if n < least || !fast || overlap(dst[:n], src[:n]) {
		return copy(dst, src)
	}
	head := int(-uintptr(unsafe.Pointer(&dst[0])) % line) // unaligned it would take 2.5 times as long
	copy(dst[:head], src[:head])
	moveString(&dst[head], &src[head], uintptr(n-head))
	return n
}

// moveUncached copies n bytes, a positive multiple of 64, past the caches. dst is aligned to 64.
//
//go:noescape
func moveUncached(dst, src *byte, n uintptr)

func uncached(dst, src []byte) int {
	n := min(len(dst), len(src))
	if n < least || !fast || overlap(dst[:n], src[:n]) {
		return bytes(dst, src)
	}
	head := int(-uintptr(unsafe.Pointer(&dst[0])) % line)
	end := head + (n-head)&^(line-1)
	copy(dst[:head], src[:head])
	moveUncached(&dst[head], &src[head], uintptr(end-head))
	copy(dst[end:n], src[end:n])
	return n
}

// overlap reports whether a and b, which have the same length, have memory in common.
func overlap(a, b []byte) bool {
	x, y := uintptr(unsafe.Pointer(&a[0])), uintptr(unsafe.Pointer(&b[0]))
	return x-y < uintptr(len(a)) || y-x < uintptr(len(a))
}
