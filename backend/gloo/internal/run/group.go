package run

import (
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/argcheck"
	"github.com/c10d-go/c10d/work"
)

// Group runs the operations of one rank of a group. New makes one. Its methods are those of
// gloo.Backend, which embeds it.
type Group struct {
	queue
	args     argcheck.Checker
	messages messages
	asking   sync.WaitGroup // asks other ranks for lines in the log and for Probe
	done     chan struct{}  // closed when Close has finished
}

// Prompt implements backend.Prompt: calls queue operations, and run only those that wait for no other rank.
func (b *Group) Prompt() {}

// Rank returns this rank's number in the group.
func (b *Group) Rank() int { return b.rank }

// Size returns the number of ranks in the group.
func (b *Group) Size() int { return b.size }

// Seq returns how many operations have been issued.
func (b *Group) Seq() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.seq
}

// SetTimeout sets the limit of later operations.
func (b *Group) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	b.timeout.Store(int64(d))
}

// Err returns the fault that ended the group, or the death of a rank that no operation needed. It
// returns nil while all ranks are there. Backends above this one, which need all ranks for their own
// operations, call it.
func (b *Group) Err() error {
	f := b.fault()
	if f == nil {
		f = b.dead.Load()
	}
	if f == nil {
		return nil
	}
	return b.faultError(b.issuer.Info(work.Barrier, b.Seq()), f)
}

// Failed is closed once Err returns a fault.
func (b *Group) Failed() <-chan struct{} { return b.Meshes[0].Failed() }

// Abort ends every operation with cause, on every rank.
func (b *Group) Abort(cause error) { b.abort(cause, nil) }
