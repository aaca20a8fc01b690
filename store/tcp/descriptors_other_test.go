//go:build !unix

package tcp

func descriptors() int { return 1 << 14 }
