//go:build !race

package nvidia

// maxAllocs is what a round of the suite's operations may allocate.
const maxAllocs = 0
