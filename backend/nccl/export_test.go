package nccl

import (
	"time"

	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
)

// With returns options with an API in place of the library.
func (o Options) With(a libnccl.API) Options {
	o.api = a
	return o
}

// SetAskLimit changes how long other ranks may take to say how far they are, until the function that it returns is called.
func SetAskLimit(d time.Duration) func() {
	old := askLimit
	askLimit = d
	return func() { askLimit = old }
}

var (
	Color = color
	Roots = roots
)

// Communicators returns the peers of the communicators that there are, -1 for the group's.
func (b *Backend) Communicators() (peers []int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.comms {
		peers = append(peers, p)
	}
	return peers
}
