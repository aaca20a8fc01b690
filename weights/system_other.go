//go:build !linux

package weights

func largePages([]byte) {}
