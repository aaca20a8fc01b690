//go:build amd64 || arm64

package copies

import "unsafe"

// claim asks for lines of 64 bytes.
//
//go:noescape
func claim(at *byte, lines int)

// Claim asks the CPU for the cache lines of b, to write them soon. It does not wait for them. The lines may lie in other
// CPUs' caches: a store would wait, and so would everything that has to come after the store.
func Claim(b []byte) {
	if len(b) > 0 {
		first := uintptr(unsafe.Pointer(&b[0])) % line
		claim(&b[0], (int(first)+len(b)+line-1)/line)
	}
}
