//go:build !unix

package tcp

// descriptorLimit is how many connections the process may have open.
func descriptorLimit() int { return 1 << 15 }
