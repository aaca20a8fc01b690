package clusterway

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/netstage"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/work"
)

// Group is what a rank has for the collectives of a group whose ranks form several clusters.
type Group struct {
	B       *group.Engine
	Layout  *cluster.Layout
	Network netstage.Backend // runs the steps between clusters
	Inside  backend.Backend  // of this cluster's ranks, by place, for their CPU tensors; nil if there is one rank
	Chunk   int              // about how many bytes of a buffer go through the stages at a time

	// KernelsOnly has the group refuse calls that not all clusters of several ranks have kernels for. Inside is not used
	// then.
	KernelsOnly bool

	// Form returns how the kernels of this cluster do an operation of so many bytes: of the buffer, or of
	// one rank's part. The ranks of the cluster need the same.
	Form func(op plan.Op, bytes int) direct.Form

	plans   *cluster.Cache
	kernels *directway.Group

	meeting sync.Mutex
	met     atomic.Bool
	why     error // why there are no kernels; known once the ranks have met
	refused error // with KernelsOnly, why some cluster of several ranks has none
}

// New returns the group of a rank.
func New(b *group.Engine, l *cluster.Layout, n netstage.Backend, inside backend.Backend, chunk int) *Group {
	members := l.Members(l.Cluster(b.Rank))
	return &Group{
		B: b, Layout: l, Network: n, Inside: inside, Chunk: chunk, plans: cluster.NewCache(l),
		kernels: &directway.Group{B: b, Members: members},
	}
}

// Ranks returns how many ranks this cluster has.
func (g *Group) Ranks() int { return g.kernels.Size() }

// Can returns why the group does not do a call, nil if it does. The answer is the same on all ranks. With KernelsOnly it
// may change when the ranks meet.
func (g *Group) Can(c *Call) error {
	if err := g.Refused(); err != nil {
		return err
	}
	if n := len(c.Out) + len(c.In) - g.B.Size; n > mostTensors {
		return fmt.Errorf("a rank has %d tensors besides one for each rank, more than %d", n, mostTensors)
	}
	if !g.KernelsOnly || !g.met.Load() {
		return nil
	}
	return c.supported()
}

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
		if g.why, err = g.kernels.Connect(q, dev, g.lacks()); err == nil && g.KernelsOnly {
			var why error
			if g.Ranks() > 1 && g.why != nil {
				why = fmt.Errorf("no kernels in its cluster: %w", g.why)
			}
			g.refused, _, err = g.B.Hear(q.Ctx, q.Left(), why, nil)
		}
		return err
	})
	if err == nil {
		g.met.Store(true)
	}
	return err
}

// Refused returns why some cluster has no kernels, and the group therefore no operations. It is nil before the ranks
// have met.
func (g *Group) Refused() error {
	if !g.met.Load() {
		return nil
	}
	return g.refused
}

// Keep has the driver load the kernels that this cluster's ranks need when they meet.
func (g *Group) Keep() {
	if n := g.kernels.Size(); n > 1 && n <= window.MostRanks {
		directway.Keep(g.B.Driver, n, false)
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
