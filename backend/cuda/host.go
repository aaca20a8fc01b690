package cuda

import (
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// HostWork is the name of the work that goes through the host, which
// every device and every pair of ranks can do. Its priority is 0.
const HostWork = "host"

// The ways of a broadcast, for Options.Broadcast.
const (
	// BroadcastFlat: the root sends to every rank.
	BroadcastFlat = group.Flat
	// BroadcastTree: a binomial tree of ranks.
	BroadcastTree = group.Tree
	// BroadcastChain: each rank sends to the next one.
	BroadcastChain = group.Chain
	// BroadcastHost: the CPU backend's own broadcast, chunk by chunk.
	BroadcastHost = HostWork
	// BroadcastDirect: the kernels of DirectWork, without the hosts.
	BroadcastDirect = DirectWork
)

var broadcastWays = []string{BroadcastFlat, BroadcastTree, BroadcastChain, BroadcastHost, BroadcastDirect}

// hostWay is HostWork. It does every call.
type hostWay struct{ alone }

// Can implements way.
func (hostWay) Can(*call) error { return nil }

// table returns the way of the table for a call that does not go by kernels.
func (hostWay) table(c *call) *ways.Range {
	if c.op == work.Barrier {
		return &ways.Range{}
	}
	if w := c.chosen(); !w.Kernels() {
		return w
	}
	return c.b.far().Of(c.row().plan, c.bytes)
}

// relay returns how a broadcast of so many chunks goes from rank to rank, BroadcastHost if the CPU backend does it.
func (w hostWay) relay(c *call, chunks int) string {
	switch name := w.table(c).Name; {
	case c.b.lacking: // such a rank has no chunks to send on
		return BroadcastHost
	case name == "":
		return group.WayOf(c.b.g.Size, chunks)
	default:
		return name
	}
}

// leg returns what a broadcast moves.
func (c *call) leg() group.Leg { return group.Leg{N: c.out[0].Len(), DType: c.out[0].DType()} }

// OnDevice implements way.
func (w hostWay) OnDevice(c *call) bool {
	switch c.op {
	case work.AllReduce:
		return w.table(c).Name == ways.HostShared
	case work.Broadcast:
		l := c.leg()
		return w.relay(c, c.b.g.Chunks(&l)) != BroadcastHost
	}
	return false
}

// Issue implements way.
func (w hostWay) Issue(c *call) (*work.Work, error) {
	c.kept = true // by the host's part
	row := c.row()
	q := &group.Operation{Print: c.print, Whole: row.whole || c.op == work.Gather && c.uneven}
	switch {
	case row.wide && row.plan == plan.OpAllReduce:
		q.Width = c.parts
	case row.wide:
		q.Width = max(c.parts, 1) * c.b.g.Size
	}
	q.Call = func(q *group.Operation, h []*tensor.Tensor) error { return row.host(c, q, h) }
	switch {
	case c.within():
		if op := c.reduce; c.op == work.AllReduce {
			q.Within(c.out, &op)
		} else {
			q.Within(c.ordered(), nil)
		}
	case c.op == work.Broadcast:
		w.broadcast(c, q)
	default:
		legs := group.To
		if c.combined() {
			legs = group.Both
		}
		q.Legs = append(group.Legs(legs, c.out...), group.Legs(group.From, c.in...)...)
		if c.op == work.AllReduce && w.table(c).Name == ways.HostShared {
			q.Shared = c.b.g.Sharing(c.reduce, c.out)
		}
	}
	return c.b.g.Issue(c.ctx, c.op, c.timeout, q, slices.Clone(c.results())...)
}

// broadcast has chunks go from rank to rank, or through the CPU backend.
func (w hostWay) broadcast(c *call, q *group.Operation) {
	l := c.leg()
	for i, t := range c.ordered() {
		if c.b.g.Rank == c.root && i == 0 {
			l.Reads(t)
		} else {
			l.Writes(t)
		}
	}
	q.Legs = []group.Leg{l}
	chunks := c.b.g.Chunks(&l)
	if way := w.relay(c, chunks); way != BroadcastHost {
		q.Relay = group.NewOneToAll(group.RouteOf(way, c.b.g.Rank, c.b.g.Size, c.root), chunks)
		q.Call = func(q *group.Operation, h []*tensor.Tensor) error { return q.PassChunk(h[0].Bytes()) }
	}
}

// within reports whether the devices of a group of one rank do all of an all-reduce or a broadcast. They do not if the
// options ask for an all-reduce through the host.
func (c *call) within() bool {
	if c.b.g.Size > 1 || c.op != work.AllReduce && c.op != work.Broadcast || !onDevices(c.out) {
		return false
	}
	if c.op == work.Broadcast {
		return true
	}
	red, err := c.reduce.Reduction(c.print.DType, 1)
	return err == nil && c.b.options.AllReduce != HostWork && red.Before == nil && red.After == nil &&
		(len(c.out) == 1 || c.b.g.CanCombine(c.reduce, c.out[0]))
}

// onDevices reports whether tensors are contiguous and in device memory.
func onDevices(ts []*tensor.Tensor) bool {
	return !slices.ContainsFunc(ts, func(t *tensor.Tensor) bool { return inCPU(t) || !t.IsContiguous() })
}

// How implements way.
func (w hostWay) How(c *call) string {
	b := c.b
	how := fmt.Sprintf("by way of page-locked memory, in chunks of %d bytes", b.options.Chunk)
	switch {
	case c.op == work.Barrier:
		return "after this rank's earlier collectives"
	case b.g.Size == 1 && c.op == work.Broadcast:
		return "there is one rank: a tree of copies between its tensors"
	case b.g.Size == 1 && c.op == work.AllReduce && b.options.AllReduce == "":
		if err := group.Lacks(b.g.Driver); err != nil {
			return "several tensors go by way of page-locked memory: " + err.Error()
		}
		return "there is one rank: kernels combine its tensors on the device of the first, and a tree of copies gives all the result. By way of page-locked memory go those with holes or in CPU memory, and what no kernel combines"
	case c.op == work.Broadcast:
		how = relayed[w.table(c).Name] + how + "; from one tensor of a rank to the others by a tree of copies"
	case c.row().whole:
		how = "by way of page-locked memory, in one piece"
	case c.op == work.AllReduce && w.table(c).Name == ways.HostShared:
		if x := b.g.Exchange.Load(); x != nil {
			how = explainExchange(b, x)
		}
	}
	return how + "; " + said(w.table(c))
}

// relayed says what the ways of a broadcast through the hosts do.
var relayed = map[string]string{
	BroadcastFlat:  "the root sends each rank a chunk when it is clear to send, ",
	BroadcastTree:  "a binomial tree, each rank sends a chunk on when the next is clear to send, ",
	BroadcastChain: "each rank sends a chunk on to the next when that is clear to send, ",
	BroadcastHost:  "the CPU backend broadcasts each chunk, ",
}

// explainExchange says how all-reduces go through memory that the ranks share.
func explainExchange(b *Backend, x *hostshm.Exchange) string {
	if x.Why != nil {
		return fmt.Sprintf("through backend %s, not memory that the ranks share: %v", b.g.CPU.Name(), x.Why)
	}
	s := fmt.Sprintf("in chunks of up to %d bytes through page-locked memory that the ranks share, each rank's CPUs (%d) combining a part", b.options.Chunk, x.Crew.N)
	if err := x.Unlocked.Load(); err != nil {
		s += fmt.Sprintf("; this rank's host copies to it and from it: %v", *err)
	}
	if k := x.Small.Load(); k != nil && k.Why != nil {
		s += fmt.Sprintf("; small ones go as large ones do: %v", k.Why)
	}
	return s
}
