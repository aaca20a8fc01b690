//go:build race && linux

package main

// The race detector's own memory is several times the program's.
func init() { growth *= 4 }
