package gloo

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/tensor"
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

// ErrExhausted says that a rank of those that share memory has no room for Alloc. All of them
// return it.
var ErrExhausted = backend.ErrExhausted

// Backend is the backend for tensors in CPU memory. Its operations are those of backend.Backend. Beside them it has:
//
//   - Shutdown, Probe, Explain: as in backend.Shutdowner, Prober and Explainer
//   - Alloc, Free: tensors in memory that all ranks of the host see
//   - Completed, CompletedEverywhere: how many collectives have ended here, and on every rank
//   - Revoke: ends the group for a call that was cancelled before it began
//   - Err, Failed: what has ended the group, or which rank has died
//   - Foreign: the ranks of PyTorch, as far as they have shown it
//   - CheckSparse, Stage: for backends above this one
type Backend struct {
	*running
	connection *connection
}

// running is what runs the operations. Its methods are the Backend's.
type running = run.Group

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
	c, err := connect(ctx, o, set)
	if err != nil {
		return nil, err
	}
	g, err := run.New(ctx, o, c.Connections)
	if err != nil {
		return nil, err
	}
	return &Backend{g, c}, nil
}

// Name returns "gloo".
func (b *Backend) Name() string { return Name }
