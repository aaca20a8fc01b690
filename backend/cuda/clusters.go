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
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/clusterway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/cluster"
	"github.com/c10d-go/c10d/internal/netstage"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ClustersWork is the name of the work of groups whose ranks form several clusters, such as hosts. It
// goes inside the clusters, between them, and inside again, in stages that overlap (decision 34). Its
// priority among the all-reduce works is 100. Such groups broadcast, gather and reduce-scatter in the
// same way. Devices of one host that are neither a mesh nor a ring form a cluster for each part whose devices reach each
// other (decision 58).
const ClustersWork = "clusters"

const clustersPriority = 100

// The environment variables of gloo.Options.Host, Cluster and LinkSpeed.
const (
	hostVariable    = "C10D_HOST"
	clusterVariable = "C10D_CLUSTER"
	speedVariable   = "C10D_LINK_SPEED"
)

// clusters returns the clusters that the group's collectives go through, nil if they do not go through several. A group
// on one host may get them when its devices connect: those are cliques of devices that reach each other.
func (b *Backend) clusters() *clusterway.Group {
	if k := b.divided.Load(); k != nil && k.Refused() == nil {
		return k
	}
	return nil
}

// clusterEnd ends the clusters with the engine. Their operations are ordered by the engine's tracker.
type clusterEnd struct{ b *Backend }

func (clusterEnd) Before(func(driver.Stream, ...driver.Access), []*place.Place) {}

func (w clusterEnd) Abort() {
	if k := w.b.divided.Load(); k != nil {
		k.Abort()
	}
}

func (w clusterEnd) Close() error {
	if k := w.b.divided.Load(); k != nil {
		return k.Close()
	}
	return nil
}

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
// different clusters. One cluster may be divided when its devices connect.
func (b *Backend) meetClusters(ctx context.Context, o backend.Options, t *choice.Table, why error) error {
	g := b.g
	inner, _ := b.options.CPUOptions.(gloo.Options)
	speed := inner.LinkSpeed
	if speed == 0 {
		speed, _ = strconv.ParseInt(os.Getenv(speedVariable), 10, 64) // gloo has checked it
	}
	host := group.HostIdentity()
	part := fmt.Sprintf("%x/%q/%q", host, cmp.Or(inner.Host, os.Getenv(hostVariable)), cmp.Or(inner.Cluster, os.Getenv(clusterVariable)))
	name := sha256.Sum256([]byte(part))
	network, ok := g.CPU.(netstage.Backend)
	if !ok && why == nil {
		why = fmt.Errorf("backend %s has no stage between clusters", g.CPU.Name())
	}
	mine := make([]byte, 1, 1+8+len(name))
	if g.Missing == nil {
		mine[0] = 1
	}
	mine = append(binary.LittleEndian.AppendUint64(mine, uint64(speed)), name[:]...)
	why, all, err := g.Hear(ctx, 0, why, mine)
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
	one := layout.Clusters() < 2
	if b.flat = why; one {
		b.flat = cmp.Or(why, errOneCluster)
	} else {
		g.Apart(layout.Clusters())
	}
	if why != nil {
		return nil
	}
	divide := func(l *cluster.Layout, inside backend.Backend) {
		k := clusterway.New(g, l, network, inside, b.options.Chunk)
		k.Form, k.KernelsOnly = formInside(t, k.Ranks()), one
		b.divided.Store(k)
	}
	if one {
		b.direct.Split = func(cliques []int) { divide(cluster.New(cliques, nil), nil) }
		return nil
	}
	inside, err := b.inside(ctx, o, layout)
	if err == nil {
		divide(layout, inside)
	}
	return err
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

// clustersWay is ClustersWork.
type clustersWay struct{}

// between returns the call as one of several clusters.
func (c *call) between() *clusterway.Call {
	if c.cluster != nil {
		return c.cluster
	}
	out, in := slices.Clone(c.out), slices.Clone(c.in)
	x := &clusterway.Call{Op: c.row().plan, Root: c.root, Reduce: c.reduce, Out: out, In: in, Print: c.print}
	blocks := out
	switch n := len(out); x.Op {
	case plan.OpBroadcast:
		x.Out = c.ordered()
	case plan.OpReduceScatter:
		// A rank's block has what all parts have for it.
		for i, t := range c.in {
			in[i%c.b.g.Size*n+i/c.b.g.Size] = t
		}
		blocks = in
	}
	if c.uneven {
		for _, t := range blocks {
			x.Counts = append(x.Counts, t.Len())
		}
	}
	c.cluster = x
	return x
}

// Meet finds out which clusters have kernels, once.
func (w clustersWay) Meet(c *call) error {
	if w.Can(c) != nil {
		return nil // it has the reason
	}
	return c.b.divided.Load().Meet(c.ctx, c.op, c.device(), c.print)
}

// Can implements way.
func (clustersWay) Can(c *call) error {
	b := c.b
	k := b.divided.Load()
	if k == nil {
		return b.flat
	}
	op, asked := c.row().plan, b.options.AllReduce
	switch {
	case c.op == work.AllReduce && len(c.out) > 1:
		return errors.New("a rank has several tensors")
	case op == plan.OpAllReduce && asked != "" && asked != ClustersWork:
		return fmt.Errorf("Options.AllReduce is %q", asked)
	case op == plan.OpBroadcast && b.far().Of(op, c.bytes).Name != "":
		return errSlower
	}
	return k.Can(c.between())
}

// OnDevice implements way.
func (clustersWay) OnDevice(c *call) bool { return c.b.clusters().Why() == nil }

// Issue implements way.
func (clustersWay) Issue(c *call) (*work.Work, error) {
	return c.b.clusters().Issue(c.ctx, c.op, c.timeout, c.between(), slices.Clone(c.results())...)
}

// How implements way.
func (clustersWay) How(c *call) string { return c.b.explainClusters(c.b.divided.Load()) }

// explainClusters says what this rank does in collectives that go through the clusters.
func (b *Backend) explainClusters(k *clusterway.Group) string {
	l := k.Layout
	number := l.Cluster(b.g.Rank)
	how := "by kernels"
	switch err := k.Why(); {
	case len(l.Members(number)) == 1:
		how = "which it has no partners for"
	case err != nil:
		how = "on the hosts: " + err.Error()
	}
	over, cliques := "over the network", ""
	if k.KernelsOnly {
		over, cliques = "through backend "+b.g.CPU.Name(), explainCliques(l)
	}
	return fmt.Sprintf("%sthis rank is in cluster %d of %d, and carries %.3g of its traffic; inside the cluster: %s; between clusters: from page-locked memory %s, in chunks of about %d bytes whose stages overlap",
		cliques, number, l.Clusters(), l.Share(b.g.Rank), how, over, b.options.Chunk)
}

// explainCliques says which devices reach each other.
func explainCliques(l *cluster.Layout) string {
	var all []string
	for i := range l.Clusters() {
		switch m := l.Members(i); {
		case len(m) == 1:
		case m[len(m)-1]-m[0] == len(m)-1:
			all = append(all, fmt.Sprintf("of ranks %d-%d", m[0], m[len(m)-1]))
		default:
			all = append(all, fmt.Sprintf("of ranks %v", m))
		}
	}
	return fmt.Sprintf("the devices %s reach each other; ", strings.Join(all, " and "))
}

// clusterParts are the clusters, for Explain.
func clusterParts(l *cluster.Layout) (all []backend.Cluster) {
	for i := range l.Clusters() {
		part := backend.Cluster{Ranks: slices.Clone(l.Members(i))}
		for _, r := range part.Ranks {
			part.Shares = append(part.Shares, l.Share(r))
		}
		all = append(all, part)
	}
	return all
}
