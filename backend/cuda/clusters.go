package cuda

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/clusterway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ClustersWork is the name of the work of groups whose ranks form several clusters, such as hosts. It
// goes inside the clusters, between them, and inside again, in stages that overlap (decision 34). Its
// priority among the all-reduce works is 100. Such groups broadcast, gather and reduce-scatter in the
// same way.
const ClustersWork = "clusters"

const clustersPriority = 100

// The environment variables of gloo.Options.Host, Cluster, LinkSpeed and Plans.
const (
	hostVariable    = "C10D_HOST"
	clusterVariable = "C10D_CLUSTER"
	speedVariable   = "C10D_LINK_SPEED"
	plansVariable   = "C10D_PLANS"
)

// errOneCluster says why a group has no ClustersWork.
var errOneCluster = errors.New("the ranks form one cluster")

// noClusters returns why the options do not let a group's collectives go through several clusters.
// Chosen are the options of the CPU backend that the program has given.
func noClusters(chosen backend.SpecificOptions) error {
	switch inner, ok := chosen.(gloo.Options); {
	case ok && inner.Sums != gloo.SumsFast:
		return fmt.Errorf("gloo.Options.Sums is %q, and clusters add in another order", inner.Sums)
	case ok && inner.AllReduce != "":
		return fmt.Errorf("gloo.Options.AllReduce asks for %q", inner.AllReduce)
	}
	return nil
}

// meetClusters finds the clusters of the group, with the other ranks. A cluster is the ranks of a host,
// or of a part of it that gloo.Options.Cluster names. Ranks with devices and ranks without are in
// different clusters.
func (b *Backend) meetClusters(ctx context.Context, o backend.Options, why error) error {
	g := b.g
	inner, _ := b.options.CPUOptions.(gloo.Options)
	speed := inner.LinkSpeed
	if speed == 0 {
		speed, _ = strconv.ParseInt(os.Getenv(speedVariable), 10, 64) // gloo has checked it
	}
	host := group.HostIdentity()
	part := fmt.Sprintf("%x/%q/%q", host, cmp.Or(inner.Host, os.Getenv(hostVariable)), cmp.Or(inner.Cluster, os.Getenv(clusterVariable)))
	name := sha256.Sum256([]byte(part))
	network, ok := g.CPU.(clusterway.Network)
	if !ok && why == nil {
		why = fmt.Errorf("backend %s has no stage between clusters", g.CPU.Name())
	}
	mine := make([]byte, 1, 1+8+len(name))
	if g.Missing == nil {
		mine[0] = 1
	}
	mine = append(binary.LittleEndian.AppendUint64(mine, uint64(speed)), name[:]...)
	why, all, err := g.Hear(ctx, 0, group.Told(why, mine))
	if err != nil {
		return fmt.Errorf("cuda: finding the clusters: %w", err)
	}
	ranks := make([]cluster.Member, g.Size)
	for r, x := range all {
		m := &ranks[r]
		if x[0] == 1 {
			m.Device = tensor.CUDA.String()
		} else {
			b.lacking = true
		}
		m.Speed = int64(binary.LittleEndian.Uint64(x[1:]))
		m.Host = string(x[9:])
	}
	layout := cluster.Find(ranks)
	if layout.Clusters() < 2 {
		b.flat = errOneCluster
		return nil
	}
	g.Apart(layout.Clusters())
	if b.flat = why; why != nil {
		return nil
	}
	inside, err := b.inside(ctx, o, layout)
	if err != nil {
		return err
	}
	plans := cmp.Or(inner.Plans, os.Getenv(plansVariable))
	b.clusters = clusterway.New(g, layout, network, inside, b.options.Chunk, plans, b.options.DTypes)
	g.Ways = append(g.Ways, b.clusters)
	return nil
}

// inside makes a group of the CPU backend for the ranks of this cluster, nil if there is one rank.
func (b *Backend) inside(ctx context.Context, o backend.Options, l *cluster.Layout) (backend.Backend, error) {
	number := l.Cluster(b.g.Rank)
	members := l.Members(number)
	if len(members) == 1 {
		return nil, nil
	}
	r, _ := backend.Lookup(b.options.CPU)
	inner := o
	inner.Device, inner.Specific = tensor.CPU, b.options.CPUOptions
	inner.Rank, inner.Size = l.Place(b.g.Rank), len(members)
	inner.Group = fmt.Sprintf("%s%s/inside %d", o.Group, group.CPUGroup, number)
	inner.Names, inner.Failed = o.Names.Of(members), nil
	if o.Store != nil {
		inner.Store = store.Prefix(fmt.Sprint("inside/", number), o.Store)
	}
	c, err := r.New(ctx, inner)
	if err != nil {
		return nil, fmt.Errorf("cuda: connecting the ranks of cluster %d: %w", number, err)
	}
	return c, nil
}

// deviceOf returns the device of the kernels for a rank whose first collective has this tensor.
func (b *Backend) deviceOf(t *tensor.Tensor) int {
	if t.Device().Type == tensor.CUDA {
		return t.Device().Index
	}
	return b.g.OwnDevice()
}

// between returns nil if a collective goes through the clusters, else why it does not. The answer is the
// same on all ranks. The first such collective finds out which clusters have kernels.
func (b *Backend) between(ctx context.Context, op work.OpType, c *clusterway.Call) error {
	if b.clusters == nil {
		return b.flat
	}
	if err := cmp.Or(c.Supports(b.g.Size), b.elsewhere(c)); err != nil {
		return err
	}
	return b.clusters.Meet(ctx, op, b.deviceOf(c.First()), c.Print)
}

// elsewhere returns why the options or the table of ways do not let a collective go through the clusters.
func (b *Backend) elsewhere(c *clusterway.Call) error {
	switch w := b.options.AllReduce; {
	case c.Op == plan.OpAllReduce && w != "" && w != ClustersWork:
		return fmt.Errorf("Options.AllReduce is %q", w)
	case c.Op == plan.OpBroadcast && b.options.Broadcast != "":
		return errAsked
	case c.Op == plan.OpBroadcast && b.far().Of(c.Op, c.Out[0].ByteLen()).Name != "":
		return errSlower
	}
	return nil
}

// broadcastCall returns a broadcast as one of several clusters.
func broadcastCall(ts []*tensor.Tensor, o backend.BroadcastOptions, print board.Call) *clusterway.Call {
	return &clusterway.Call{Op: plan.OpBroadcast, Root: o.Root, Out: slices.Concat(ts[o.RootTensor:], ts[:o.RootTensor]), Print: print}
}

// isBetween reports whether a collective goes through the clusters.
func (b *Backend) isBetween(ctx context.Context, op work.OpType, c *clusterway.Call) bool {
	return b.clusters != nil && b.between(ctx, op, c) == nil
}

// clusterCall returns the all-reduce as one of several clusters.
func (a *allReduce) clusterCall() *clusterway.Call {
	return &clusterway.Call{Op: plan.OpAllReduce, Reduce: a.op, Out: slices.Clone(a.ts), Print: a.print}
}

// allowsClusters returns nil if the all-reduce goes through the clusters.
func (a *allReduce) allowsClusters() error {
	switch {
	case a.b.clusters == nil:
		return a.b.flat
	case len(a.ts) > 1:
		return errors.New("a rank has several tensors")
	case a.probe:
		return nil
	}
	return a.b.between(a.ctx, work.AllReduce, a.clusterCall())
}

// throughClusters returns an all-reduce that goes through the clusters.
func (a *allReduce) throughClusters() (*clusterway.Call, error) {
	if err := a.checked(); err != nil {
		return nil, err
	}
	return a.clusterCall(), nil
}

// explainClusters says what this rank does in collectives that go through the clusters.
func (b *Backend) explainClusters() string {
	l := b.clusters.Layout
	number := l.Cluster(b.g.Rank)
	how := "by kernels"
	switch err := b.clusters.Why(); {
	case len(l.Members(number)) == 1:
		how = "which it has no partners for"
	case err != nil:
		how = "on the hosts: " + err.Error()
	}
	return fmt.Sprintf("this rank is in cluster %d of %d, and carries %.3g of its traffic; inside the cluster: %s; between clusters: from page-locked memory over the network, in chunks of about %d bytes whose stages overlap",
		number, l.Clusters(), l.Share(b.g.Rank), how, b.options.Chunk)
}

// clusterParts are the clusters, for Explain.
func (b *Backend) clusterParts() (all []backend.Cluster) {
	l := b.clusters.Layout
	for i := range l.Clusters() {
		part := backend.Cluster{Ranks: slices.Clone(l.Members(i))}
		for _, r := range part.Ranks {
			part.Shares = append(part.Shares, l.Share(r))
		}
		all = append(all, part)
	}
	return all
}
