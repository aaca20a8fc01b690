package backend

import (
	"context"

	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Splitter is a backend whose group all its ranks split together to make groups of some of them.
type Splitter interface {
	// Splits reports whether a new group is made so. Options.Parent is then this backend.
	Splits() bool

	// Outside is called on a rank that is in none of the groups that the others make. Ranks are those of the one group
	// that is made, nil if there may be several (Options.Parts).
	Outside(ctx context.Context, ranks []int) error
}

// P2P is a message of a batch: either Send or Recv is set.
type P2P struct {
	Send, Recv *tensor.Tensor
	Peer       int // rank in the group
	P2POptions
}

// Batcher is a backend that has to know which messages are under way at the same time.
type Batcher interface {
	// Batch starts messages. The Work ends when all have ended.
	Batch(ctx context.Context, messages []P2P) (*work.Work, error)
}

// Stager is a backend for tensors of devices that can copy between CPU memory and tensors of its own. Groups without a
// backend for the CPU send objects through them.
type Stager interface {
	// Stage returns copies on the device of dense tensors in CPU memory, one for each, nil for nil. Back copies the
	// elements of the first n of them back. Free must be called in the end.
	Stage(ctx context.Context, ts []*tensor.Tensor) (on []*tensor.Tensor, back func(n int) error, free func() error, err error)
}
