package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// RegisteredMemory is the Choice.Op of memory that the other ranks have mapped, in Explain.
const RegisteredMemory = "registered memory"

// Explain says which work does an all-reduce and why, how the CPU backend below does
// the host's part, and what this rank does without.
func (b *Backend) Explain() backend.Explanation {
	e := backend.Explanation{Backend: Name, Rank: b.g.Rank, Size: b.g.Size, Wire: "host"}
	if x, ok := b.g.CPU.(backend.Explainer); ok {
		inner := x.Explain()
		e.Hosts, e.Wire, e.Links = inner.Hosts, inner.Wire, inner.Links
		e.Why = fmt.Sprintf("the ranks' hosts talk, through backend %s: %s", inner.Backend, inner.Why)
		for _, c := range inner.Choices {
			c.Op = b.g.CPU.Name() + " " + c.Op
			e.Choices = append(e.Choices, c)
		}
	}
	if b.clusters != nil {
		e.Clusters = b.clusterParts()
	}
	if why := b.g.Board.Why; why != nil {
		e.Why += "; calls of ranks on this host are not all compared when they are made: " + strings.ReplaceAll(why.Error(), "\n", "; ")
	}
	e.Choices = append(append(b.explainAllReduce(), b.explainSparse()), e.Choices...)
	if b.g.Size > 1 && (b.direct.Can() != nil || !errors.Is(b.direct.Known(), group.ErrNotAsked)) {
		e.DeviceLink = string(b.link())
	}
	chunked := fmt.Sprintf("by way of page-locked memory, in chunks of %d bytes", b.options.Chunk)
	for op := work.Broadcast; op <= work.ReduceScatterTensorCoalesced; op++ {
		c := backend.Choice{Op: op.String(), UpTo: -1, Algorithm: HostWork, Why: chunked}
		switch op {
		case work.AllReduceCoalesced, work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced,
			work.ReduceScatter, work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced:
			e.Choices = append(e.Choices, b.explainRanges(op, c)...)
			continue
		case work.Reduce, work.Gather, work.Scatter, work.AllToAll, work.AllToAllSingle:
			if op == work.AllToAll || op == work.AllToAllSingle {
				c.Why = "by way of page-locked memory, in one piece"
			}
			e.Choices = append(e.Choices, b.explainRanges(op, c)...)
			continue
		case work.Broadcast:
			e.Choices = append(e.Choices, b.explainBroadcast()...)
			continue
		case work.AllReduce, work.Coalesced, work.AllReduceSparse:
			continue
		case work.Send, work.Recv, work.RecvAnySource:
			c.Why = "by way of page-locked memory, in one piece"
			if b.clusters != nil {
				break
			}
			if why := b.direct.HasLanes(); why != nil {
				c.Why += "; not " + DirectWork + ": " + why.Error()
			} else {
				c.Algorithm = DirectWork
				c.Why = "one kernel of each of the two ranks; messages with a tag other than 0 go by way of page-locked memory"
				if op == work.RecvAnySource {
					c.Why = "one kernel of each of the two ranks, to page-locked memory and from there to the tensor; so do tags other than 0, through the hosts"
				}
			}
		case work.Barrier:
			c.Why = "after this rank's earlier collectives"
			if b.clusters == nil && b.direct.Mesh() == nil {
				c.Algorithm = DirectWork
				c.Why = "one kernel of each rank meets the others; the hosts meet after a collective that went through them"
			}
		}
		e.Choices = append(e.Choices, c)
	}
	if n, most, bytes, ok := b.direct.Registered(); ok {
		e.Choices = append(e.Choices, backend.Choice{
			Op: RegisteredMemory, UpTo: -1, Algorithm: fmt.Sprintf("%d of %d regions", n, most),
			Why: fmt.Sprintf("%d bytes that the other ranks' kernels have mapped: they write long messages, gathers, scatters and broadcasts straight into it, and the root of a long reduce of two ranks reads from it, without staging", bytes),
		})
	}
	return e
}

// ranges returns the ways of an operation by size, as far as the ranks know yet. Sizes are of a
// rank's tensors, -1 for any.
func (b *Backend) ranges(op plan.Op) []ways.Range {
	w := b.far()
	if l := b.link(); l == ways.Peers || l == ways.Neighbours {
		w = b.near()
	}
	all := w.Ranges(op)
	if op == plan.OpAllToAll {
		all = []ways.Range{*w.Of(op, ways.UnknownBytes)} // no rank knows the others' sizes
	}
	for i := range all {
		if op == plan.OpAllGather || op == plan.OpReduceScatter || op == plan.OpGather || op == plan.OpScatter {
			all[i].UpTo = min(all[i].UpTo, math.MaxInt64/int64(b.g.Size)) * int64(b.g.Size) // it was a rank's block
		}
	}
	all[len(all)-1].UpTo = -1
	return all
}

// said returns a way and why it is taken.
func said(r ways.Range) string { return fmt.Sprintf("%v: %s", r.Way, r.Why) }

// betweenOps are operations that go through clusters, besides all-reduce and broadcast. The blocks of the others
// enter a cluster once through the hosts too.
var betweenOps = []plan.Op{plan.OpAllGather, plan.OpReduceScatter, plan.OpReduce}

// explainRanges says how an operation goes that kernels can do. C is its way through the host.
func (b *Backend) explainRanges(op work.OpType, c backend.Choice) (all []backend.Choice) {
	not := cmp.Or(b.direct.Can(), b.direct.Known())
	if b.clusters != nil && (op == work.AllReduceCoalesced || slices.Contains(betweenOps, planned(op))) {
		c.Algorithm, c.Why = ClustersWork, b.explainClusters()
		return []backend.Choice{c}
	}
	if not != nil {
		c.Why += "; not " + DirectWork + ": " + not.Error()
		return []backend.Choice{c}
	}
	if not = b.direct.Mesh(); not != nil {
		c.Why += "; not " + DirectWork + ": " + not.Error()
	}
	for _, r := range b.ranges(planned(op)) {
		x := c
		switch x.UpTo = r.UpTo; {
		case r.Name == ways.Ring:
			x.Algorithm, x.Why = RingWork, b.explainRing()
		case r.Kernels():
			x.Algorithm, x.Why = DirectWork, directway.Why
		}
		x.Why += "; " + said(r)
		all = append(all, x)
	}
	return all
}

// explainAllReduce asks the works about a tensor of each range of sizes.
func (b *Backend) explainAllReduce() (all []backend.Choice) {
	op := work.AllReduce.String()
	least := int64(0)
	for _, r := range b.ranges(plan.OpAllReduce) {
		n := int(min(least/4, math.MaxInt32/8)) + 1 // elements, of which the last begins in the range
		least = r.UpTo
		t, err := tensor.OnDevice(tensor.Float32, nowhere{4 * n}, n)
		if err != nil {
			break
		}
		c := b.explainWork(t)
		c.Op, c.UpTo = op, r.UpTo
		if len(all) > 0 && all[len(all)-1].Algorithm == c.Algorithm && all[len(all)-1].Why == c.Why {
			all = all[:len(all)-1]
		}
		all = append(all, c)
	}
	return all
}

// explainSparse asks the works about a sparse tensor.
func (b *Backend) explainSparse() (c backend.Choice) {
	at, err := tensor.OnDevice(tensor.Int64, nowhere{}, 1, 0)
	values, failed := tensor.OnDevice(tensor.Float32, nowhere{}, 0)
	var t *tensor.Tensor
	if err = cmp.Or(err, failed); err == nil {
		t, err = tensor.Sparse(at, values, 1)
	}
	if err == nil {
		c = b.explainWork(t)
	} else {
		c.Algorithm, c.Why = "none", err.Error()
	}
	c.Op, c.UpTo = "all_reduce, sparse", -1
	return c
}

// explainWork says which work all-reduces a tensor, and why.
func (b *Backend) explainWork(t *tensor.Tensor) (c backend.Choice) {
	a := allReduce{b: b, ts: []*tensor.Tensor{t}, op: backend.Sum(), probe: true}
	name, registered, err := a.findWork()
	if err != nil {
		c.Algorithm, c.Why = "none", err.Error()
		return c
	}
	c.Algorithm = name
	how := ""
	switch {
	case registered != nil:
	case name == SparseWork:
		how = "; entries go by way of page-locked memory through backend " + b.g.CPU.Name() + ", and the result to new device memory"
	case name == ClustersWork:
		how = "; " + b.explainClusters()
	case name == RingWork:
		how = "; " + b.explainRing() + "; " + said(*a.way)
	case b.g.Size == 1 && b.options.AllReduce == "":
		how = "; there is one rank: kernels combine its tensors on the device of the first, and a tree of copies gives all the result. By way of page-locked memory go those with holes or in CPU memory, and what no kernel combines"
		if err := group.Lacks(b.g.Driver); err != nil {
			how = "; several tensors go by way of page-locked memory: " + err.Error()
		}
	default:
		how = "; " + said(*a.way)
		if x := b.g.Exchange.Load(); a.way.Name == ways.HostShared && x != nil {
			how = "; " + b.explainExchange(x) + how
		}
	}
	if b.options.AllReduce != "" && t.Layout() == tensor.Strided {
		c.Why = "Options.AllReduce asks for it" + how
		return c
	}
	c.Why = "the work of the highest priority that can do it"
	for _, why := range a.refusals(name) {
		c.Why += "; not " + why
	}
	c.Why += how
	return c
}

// explainRing says how calls go round the ring.
func (b *Backend) explainRing() string {
	return fmt.Sprintf("%s, in a ring of the ranks %v", directway.WhyRing, b.direct.Order())
}

// explainExchange says how all-reduces go through the host.
func (b *Backend) explainExchange(x *hostshm.Exchange) string {
	if x.Why != nil {
		return fmt.Sprintf("through backend %s, not memory that the ranks share: %v", b.g.CPU.Name(), x.Why)
	}
	s := fmt.Sprintf("in chunks of up to %d bytes through page-locked memory that the ranks share, each rank's CPUs (%d) combining a part", b.options.Chunk, x.Crew.N)
	if err := x.Unlocked.Load(); err != nil {
		s += fmt.Sprintf("; this rank's host copies to it and from it: %v", *err)
	}
	if err := x.Lacks.Load(); err != nil {
		s += fmt.Sprintf("; small ones in several commands of the device, not one kernel: %v", *err)
	}
	return s
}

// nowhere is memory that only stands for a device's.
type nowhere struct{ bytes int }

func (nowhere) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (m nowhere) Len() int            { return m.bytes }
