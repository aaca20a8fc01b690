//go:build race

package nvidia

// maxAllocs is not checked: the race detector allocates.
const maxAllocs = -1
