package nccl

import "github.com/c10d-go/c10d/backend/nccl/internal/libnccl"

// With returns options with an API in place of the library.
func (o Options) With(a libnccl.API) Options {
	o.api = a
	return o
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
