//go:build amd64 || arm64

package shm

// pause tells the CPU that this thread polls. The other thread of the core then runs faster,
// and the end of the loop costs no mispredicted branch.
func pause()
