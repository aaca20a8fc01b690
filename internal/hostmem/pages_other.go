//go:build !linux

package hostmem

// LargePages does nothing.
func LargePages([]byte) {}
