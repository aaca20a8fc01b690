//go:build amd64 || arm64

package shm

// pause tells the CPU that this thread polls: what shares the core with it goes faster, and
// it leaves the loop without the work of having guessed wrong.
func pause()
