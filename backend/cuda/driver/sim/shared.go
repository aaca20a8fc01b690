package sim

import "fmt"

// sharedName returns the name of the file that an allocation lies in.
func sharedName(owner [16]byte, id uint64) string {
	return fmt.Sprintf("gpu-%x-%d", owner, id)
}
