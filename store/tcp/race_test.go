//go:build race

package tcp

// The race detector ends a program with more than 8128 goroutines.
func init() { mostClients = 4000 }
