package clusterway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Network runs the steps between clusters.
type Network interface {
	Stage(ctx context.Context, s gloo.NetworkStage) (*gloo.StageCall, error)
}

// Group is what a rank has for the collectives of a group whose ranks form several clusters.
type Group struct {
	B       *group.Engine
	Layout  *cluster.Layout
	Network Network
	Inside  backend.Backend // of this cluster's ranks, by place, for their CPU tensors; nil if there is one rank
	Chunk   int             // about how many bytes of a buffer go through the stages at a time

	// Form returns how the kernels of this cluster do an operation of so many bytes: of the buffer, or of
	// one rank's part. The ranks of the cluster need the same.
	Form func(op plan.Op, bytes int) direct.Form

	plans    *cluster.Cache
	kernels  *directway.Group
	combined atomic.Uint32 // the dtypes whose kernels the ranks have loaded, as far as they have any; a bit each

	meeting sync.Mutex
	met     atomic.Bool
	why     error // why there are no kernels; known once the ranks have met
}

// New returns the group of a rank. Plans is the directory of its plans' files; empty means none. The kernels of some
// dtypes are loaded when the ranks meet.
func New(
	b *group.Engine, l *cluster.Layout, n Network, inside backend.Backend, chunk int, plans string, some []tensor.DType,
) *Group {
	members := l.Members(l.Cluster(b.Rank))
	g := &Group{
		B: b, Layout: l, Network: n, Inside: inside, Chunk: chunk, plans: cluster.NewCache(l, plans),
		kernels: &directway.Group{B: b, Members: members},
	}
	// Steps add the bits of parts whose lengths differ.
	g.kernels.DTypes = slices.Concat(some, []tensor.DType{tensor.Uint8, tensor.Int64})
	for _, d := range g.kernels.DTypes {
		g.combined.Or(1 << d)
	}
	return g
}

// Ranks returns how many ranks this cluster has.
func (g *Group) Ranks() int { return g.kernels.Size() }

// Meet finds out, with the other ranks, whether this cluster has kernels. All ranks come to the first
// call in the order of the group's collectives. Dev is the device of the rank's kernels.
func (g *Group) Meet(ctx context.Context, op work.OpType, dev int, print board.Call) error {
	if g.met.Load() {
		return nil
	}
	g.meeting.Lock()
	defer g.meeting.Unlock()
	if g.met.Load() {
		return nil
	}
	err := g.B.Together(ctx, op, print, func(q *group.Operation) (err error) {
		g.why, err = g.kernels.Connect(q, dev, g.lacks())
		return err
	})
	if err == nil {
		g.met.Store(true)
	}
	return err
}

// combines reports whether this cluster has kernels for a reduction. The first one of a dtype loads them: all ranks
// come to it in the order of the group's collectives.
func (g *Group) combines(ctx context.Context, op work.OpType, print board.Call) (bool, error) {
	there := func() bool { return g.combined.Load()>>print.DType&1 != 0 }
	if there() {
		return g.kernels.Combines(print.DType), nil
	}
	if err := group.Captured(ctx, op); err != nil {
		return false, err
	}
	g.meeting.Lock()
	defer g.meeting.Unlock()
	if !there() {
		err := g.B.Together(ctx, op, print, func(q *group.Operation) error {
			_, err := g.kernels.Load(q, print.DType)
			return err
		})
		if err != nil {
			return false, err
		}
		g.combined.Or(1 << print.DType)
	}
	return g.kernels.Combines(print.DType), nil
}

// Keep has the driver load the kernels that this cluster's ranks need when they meet.
func (g *Group) Keep() {
	if n := g.kernels.Size(); n > 1 && n <= window.MostRanks {
		directway.Keep(g.B.Driver, n, g.kernels.DTypes, false)
	}
}

// lacks returns why this rank has no kernels.
func (g *Group) lacks() error {
	if g.B.Missing != nil {
		return g.B.Missing
	}
	return group.NoPeers(g.B.Driver)
}

// ErrNotMet is what Why returns before the ranks have met.
var ErrNotMet = errors.New("whether the devices of the cluster reach each other is found out by the first collective")

// Why returns why the cluster's ranks have no kernels, nil if they have.
func (g *Group) Why() error {
	if !g.met.Load() {
		return ErrNotMet
	}
	return g.why
}

// Before implements the engine's way: its operations are ordered by the engine's tracker.
func (g *Group) Before(func(driver.Stream, ...driver.Access), []*place.Place) {}

// Abort ends the kernels, and what the hosts do inside.
func (g *Group) Abort() {
	g.kernels.Abort()
	if g.Inside != nil {
		g.Inside.Abort(g.B.Broken())
	}
}

// Close frees everything. The kernels have ended, or do so because the group has failed. If they do not, their
// memory stays.
func (g *Group) Close() error {
	err := g.closeKernels()
	if g.Inside != nil {
		err = errors.Join(err, g.Inside.Close())
	}
	return err
}

func (g *Group) closeKernels() error {
	if g.met.Load() && g.why == nil {
		_, dev, inside := g.kernels.Kernels()
		ctx, cancel := context.WithTimeout(context.Background(), group.CloseLimit)
		defer cancel()
		if !group.Drained(ctx, []driver.Stream{inside}) {
			g.B.InUse.Store(true)
			return fmt.Errorf("cuda: kernels have not left device %d after %v, and the memory of their cluster stays", dev, group.CloseLimit)
		}
		g.B.Tracker.Forget(inside)
	}
	return g.kernels.Close()
}
