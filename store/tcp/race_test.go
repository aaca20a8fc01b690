//go:build race

package tcp

// The race detector ends a program with more than 8128 goroutines, of which each
// client has two at the moment of its release, and allocates.
func init() { race = true }
