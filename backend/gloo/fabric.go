package gloo

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mem"
)

// Fabric connects ranks that are goroutines of one process, in place of a network: for tests, and
// to try things out. Any number of groups may share a Fabric. NewFabric makes one.
type Fabric interface {
	// Kill makes a rank of a group die as a process does: its connections end without a goodbye. Operations
	// that need it fail.
	Kill(group string, rank int)

	// Freeze makes a rank of a group stop as SIGSTOP does: it sends nothing and answers nobody.
	Freeze(group string, rank int)
}

// NewFabric returns a Fabric without groups.
func NewFabric() Fabric { return mem.NewFabric() }

// joiner is what a Fabric of this module has besides.
type joiner interface {
	Fabric
	Join(name string, rank, size int) (transport.Mesh, error)
}

// within returns a function that connects ranks over f, one mesh for each interface.
func within(f Fabric) (func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error), error) {
	j, ok := f.(joiner)
	if !ok {
		return nil, fmt.Errorf("gloo: Options.Fabric is a %T: set it to what NewFabric returns", f)
	}
	return func(_ context.Context, o backend.Options, index int) (transport.Mesh, error) {
		return j.Join(fmt.Sprintf("%s/%d", o.Group, index), o.Rank, o.Size)
	}, nil
}
