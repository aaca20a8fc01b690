package gloo

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Name is what the backend is registered as.
const Name = "gloo"

func init() {
	err := backend.Register(backend.Registration{
		Name: Name, Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) { return New(ctx, o) },
	})
	if err != nil {
		panic(err)
	}
}

// Backend is the backend for tensors in CPU memory; see backend.Backend.
type Backend struct {
	*session
	queue
	issuer   work.Issuer
	timeout  atomic.Int64
	spares   sync.Pool // operations that have ended
	messages messages
	waits    waitLog
	p2p      sync.WaitGroup // sends, receives, and what else runs beside the queue
	done     chan struct{}  // closed when Close has finished
}

// New connects a rank with the others of its group. It returns when all are
// connected, when ctx ends or when the timeout is over.
func New(ctx context.Context, o backend.Options) (*Backend, error) {
	var own Options
	switch v := o.Specific.(type) {
	case nil:
	case Options:
		own = v
	default:
		return nil, fmt.Errorf("gloo: options of type %T, want gloo.Options", v)
	}
	if o.Rank < 0 || o.Rank >= o.Size {
		return nil, fmt.Errorf("gloo: rank %d is not within a group of %d", o.Rank, o.Size)
	}
	set, err := own.settings(o)
	if err != nil {
		return nil, err
	}
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	s, err := connect(ctx, o, set)
	if err != nil {
		return nil, err
	}
	b := &Backend{session: s, issuer: work.Issuer{Group: o.Group, Rank: o.Rank, Names: o.Names}, done: make(chan struct{})}
	b.queued.L = &b.mu
	b.unbegun.Check = b.checkUnbegun
	b.messages.recheck.Check = b.checkMessages
	b.waits.init(ctx, b, o)
	b.timeout.Store(int64(o.Timeout))
	for _, m := range s.meshes {
		m.SetWaiting(b.waitsFor)
	}
	for range set.workers(s) {
		b.engines = append(b.engines, newEngine(s))
		b.workers.Go(b.work)
	}
	return b, nil
}

// Name returns "gloo".
func (b *Backend) Name() string { return Name }

// Prompt implements backend.Prompt: calls queue operations, and run only those that wait for no other rank.
func (b *Backend) Prompt() {}

// Rank returns this rank's number in the group.
func (b *Backend) Rank() int { return b.rank }

// Size returns the number of ranks in the group.
func (b *Backend) Size() int { return b.size }

// Seq returns how many operations have been issued.
func (b *Backend) Seq() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.seq
}

// SetTimeout sets the limit of later operations.
func (b *Backend) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	b.timeout.Store(int64(d))
}

// Err returns the fault that ended the group, or the death of a rank that no operation needed. It
// returns nil while all ranks are there. Backends above this one, which need all ranks for their own
// operations, call it.
func (b *Backend) Err() error {
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
func (b *Backend) Failed() <-chan struct{} { return b.meshes[0].Failed() }

// Abort ends every operation with cause, on every rank.
func (b *Backend) Abort(cause error) { b.abort(cause, nil) }

func (b *Backend) abort(cause error, o *future) {
	if errors.Is(cause, work.ErrMismatch) {
		b.mismatchTold.Store(true)
	}
	f := b.causedBy(cause)
	if o != nil {
		f.Op, f.Seq = uint8(o.Info().Op), o.Info().Seq
	}
	b.end(f)
}
