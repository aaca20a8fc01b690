package cuda

import (
	"fmt"
	"os"

	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
)

// tableVariable is the environment variable for Options.Table.
const tableVariable = "C10D_CUDA_TABLE"

// table returns the group's table of ways.
func (o *Options) table() (*choice.Table, error) {
	file := o.Table
	if file == "" {
		file = os.Getenv(tableVariable)
	}
	if file == "" {
		return ways.Default(), nil
	}
	t, err := ways.Catalog.Load(file)
	if err != nil {
		return nil, fmt.Errorf("cuda: table of ways: %w", err)
	}
	return t, nil
}

// allowed reports whether the options let an operation take a way.
func (o *Options) allowed(op plan.Op, name string) bool {
	kernels := ways.Way{Name: name}.Kernels()
	switch {
	case op == plan.OpAllReduce && o.AllReduce == DirectWork:
		return kernels && name != ways.Ring
	case op == plan.OpAllReduce && o.AllReduce == RingWork:
		return name == ways.Ring
	case op == plan.OpBroadcast && o.Broadcast != "":
		return o.Broadcast == name || kernels && o.Broadcast == BroadcastDirect
	}
	return true
}

// setWays computes the ways of the group's operations over each link that it may turn out to have.
func (b *Backend) setWays(t *choice.Table) {
	over := func(l ways.Link) *ways.Ways {
		return ways.New(t, ways.Group{Link: l, Ranks: b.g.Size, Allowed: b.options.allowed})
	}
	b.peers, b.ring, b.shared, b.apart = over(ways.Peers), over(ways.Neighbours), over(ways.Shared), over(ways.Host)
	if !b.g.OneHost {
		b.apart = over(ways.Hosts)
	}
	b.direct.Share = b.peers.Has(plan.OpAllReduce, ways.HostShared)
	for _, op := range []plan.Op{plan.OpAllReduce, plan.OpReduceScatter, plan.OpAllGather} {
		b.direct.Ring = b.direct.Ring || b.peers.Has(op, ways.Ring)
	}
}

// formInside returns how the kernels of a cluster of so many ranks do operations.
func formInside(t *choice.Table, ranks int) func(op plan.Op, bytes int) direct.Form {
	inside := ways.New(t, ways.Group{
		Link: ways.Peers, Ranks: ranks,
		Allowed: func(_ plan.Op, name string) bool { return name != ways.Ring && ways.Way{Name: name}.Kernels() },
	})
	return func(op plan.Op, bytes int) direct.Form { return form(inside.Of(op, bytes).Way) }
}

// link returns what is between the devices, as far as the ranks know yet.
func (b *Backend) link() ways.Link {
	switch {
	case b.direct.Mesh() == nil:
		return ways.Peers
	case b.direct.Can() == nil && b.direct.Has() == nil:
		return ways.Neighbours
	case !b.g.OneHost:
		return ways.Hosts
	case b.direct.Shared.Load():
		return ways.Shared
	}
	return ways.Host
}

// near returns the ways of calls that kernels can do. The ranks have connected.
func (b *Backend) near() *ways.Ways {
	if b.direct.Mesh() != nil {
		return b.ring
	}
	return b.peers
}

// far returns the ways of calls that no kernel can do.
func (b *Backend) far() *ways.Ways {
	if b.direct.Shared.Load() {
		return b.shared
	}
	return b.apart
}

// form returns how kernels do an operation.
func form(w ways.Way) direct.Form {
	return direct.Form{TwoShot: w.Name == ways.TwoShot, Ring: w.Name == ways.Ring, Blocks: w.Blocks}
}

// formOf returns how kernels do one of several parts of an operation, by its own bytes.
func (b *Backend) formOf(op plan.Op, bytes int) direct.Form {
	if r := b.near().Of(op, bytes); r.Kernels() {
		return form(r.Way)
	}
	return direct.Form{TwoShot: int64(bytes) > ways.OneShotUpTo(b.g.Size), Ring: b.direct.Mesh() != nil}
}
