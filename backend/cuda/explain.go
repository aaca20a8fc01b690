package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// RegisteredMemory is the Choice.Op of memory that the other ranks have mapped, in Explain.
const RegisteredMemory = "registered memory"

// Explain says which work does each operation and why, how the CPU backend below does
// the host's part, and what this rank does without. It asks the works about calls as issue does.
func (b *Backend) Explain() backend.Explanation {
	e := backend.Explanation{Backend: Name, Rank: b.g.Rank, Size: b.g.Size, Wire: "host"}
	var below []backend.Choice
	if x, ok := b.g.CPU.(backend.Explainer); ok {
		inner := x.Explain()
		e.Hosts, e.Wire, e.Links = inner.Hosts, inner.Wire, inner.Links
		e.Why = fmt.Sprintf("the ranks' hosts talk, through backend %s: %s", inner.Backend, inner.Why)
		for _, c := range inner.Choices {
			c.Op = b.g.CPU.Name() + " " + c.Op
			below = append(below, c)
		}
	}
	if k := b.clusters(); k != nil {
		e.Clusters = clusterParts(k.Layout)
	}
	if why := b.g.Board.Why; why != nil {
		e.Why += "; calls of ranks on this host are not all compared when they are made: " + strings.ReplaceAll(why.Error(), "\n", "; ")
	}
	if b.g.Size > 1 && (b.direct.Can() != nil || !errors.Is(b.direct.Has(), group.ErrNotAsked)) {
		e.DeviceLink = string(b.link())
	}
	e.Choices = append(b.explainOp(work.AllReduce), b.explainSparse())
	e.Choices = append(e.Choices, below...)
	for op := range operations {
		if op := work.OpType(op); op != work.AllReduce && operations[op].host != nil {
			e.Choices = append(e.Choices, b.explainOp(op)...)
		}
		if op := work.OpType(op); op.IsP2P() {
			e.Choices = append(e.Choices, b.explainMessages(op))
		}
	}
	if n, most, bytes, ok := b.direct.Registered(); ok {
		e.Choices = append(e.Choices, backend.Choice{
			Op: RegisteredMemory, UpTo: -1, Algorithm: fmt.Sprintf("%d of %d regions", n, most),
			Why: fmt.Sprintf("%d bytes that the other ranks' kernels have mapped: they write long messages, gathers, scatters and broadcasts straight into it, and the root of a long reduce of two ranks reads from it, without staging", bytes),
		})
	}
	return e
}

// explainMessages says how messages go.
func (b *Backend) explainMessages(op work.OpType) backend.Choice {
	c := backend.Choice{Op: op.String(), UpTo: -1, Algorithm: HostWork, Why: "by way of page-locked memory, in one piece"}
	switch why := b.direct.HasLanes(); {
	case why != nil:
		c.Why += "; not " + DirectWork + ": " + why.Error()
	case op == work.RecvAnySource:
		c.Algorithm = DirectWork
		c.Why = "one kernel of each of the two ranks, to page-locked memory and from there to the tensor; so do tags other than 0, through the hosts"
	default:
		c.Algorithm = DirectWork
		c.Why = "one kernel of each of the two ranks; messages with a tag other than 0 go by way of page-locked memory"
	}
	return c
}

// ranges returns the ways of an operation by size, as far as the ranks know yet.
func (b *Backend) ranges(op work.OpType) []ways.Range {
	if op == work.Barrier {
		return []ways.Range{{UpTo: -1}}
	}
	w, row := b.far(), &operations[op]
	if l := b.link(); l == ways.Peers || l == ways.Neighbours {
		w = b.near()
	}
	if row.plan == plan.OpAllToAll {
		return []ways.Range{{UpTo: math.MaxInt64}} // no rank knows the others' sizes
	}
	return w.Ranges(row.plan)
}

// explainOp asks the works about a call of each range of sizes.
func (b *Backend) explainOp(op work.OpType) (all []backend.Choice) {
	row, least := &operations[op], int64(0)
	for _, r := range b.ranges(op) {
		bytes := int(min(least, math.MaxInt32/2)) // of a call in the range
		if row.plan == plan.OpAllToAll {
			bytes = ways.UnknownBytes
		}
		least = r.UpTo + 1
		n := bytes/4 + 1
		t, err := tensor.OnDevice(tensor.Float32, nowhere{4 * n}, n)
		if err != nil {
			break
		}
		c := b.probe(op, t)
		c.bytes = bytes
		for _, x := range b.explainCall(c) {
			if x.UpTo < 0 && r.UpTo != math.MaxInt64 {
				x.UpTo = r.UpTo
				if row.block { // it was a rank's block
					x.UpTo = min(r.UpTo, math.MaxInt64/int64(b.g.Size)) * int64(b.g.Size)
				}
			}
			if last := len(all) - 1; last >= 0 && all[last].Algorithm == x.Algorithm && all[last].Why == x.Why {
				all = all[:last]
			}
			all = append(all, x)
		}
	}
	return all
}

// probe returns a call of an operation on a tensor that has no memory.
func (b *Backend) probe(op work.OpType, t *tensor.Tensor) *call {
	c := &call{b: b, op: op, out: []*tensor.Tensor{t}, reduce: backend.Sum()}
	c.print = board.Call{DType: t.DType(), Sparse: t.Layout() != tensor.Strided}
	if operations[op].plan.Reduces() {
		c.print.With = board.Reducing(c.reduce)
	}
	return c
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
		c = b.explainCall(b.probe(work.AllReduce, t))[0]
	} else {
		c.Algorithm, c.Why, c.UpTo = "none", err.Error(), -1
	}
	c.Op = "all_reduce, sparse"
	return c
}

// explainCall says which work does a call, and why. A broadcast through the hosts may depend on the number of chunks.
func (b *Backend) explainCall(c *call) []backend.Choice {
	x := backend.Choice{Op: c.op.String(), UpTo: -1}
	wanted, option := c.wanted()
	w, not, err := c.choose(false)
	if err != nil {
		x.Algorithm, x.Why = "none", err.Error()
		if why := errors.Unwrap(err); wanted != "" && why != nil {
			x.Why = option + " asks for it: " + why.Error()
		}
		return []backend.Choice{x}
	}
	x.Algorithm, x.Why = w.Name, "the work of the highest priority that can do it"
	if wanted != "" {
		x.Why = option + " asks for it"
	}
	for _, why := range not {
		x.Why += "; not " + why
	}
	host, through := w.Do.(hostWay)
	switch {
	case c.op != work.Broadcast || !through:
	case b.g.Size == 1:
		x.Algorithm = "local"
	case host.table(c).Name == "":
		return b.explainChunks(x)
	default:
		x.Algorithm = host.table(c).Name
	}
	if how := w.Do.How(c); how != "" {
		x.Why += "; " + how
	}
	return []backend.Choice{x}
}

// explainChunks says how broadcasts go whose way depends on the number of chunks.
func (b *Backend) explainChunks(x backend.Choice) (all []backend.Choice) {
	chunk := b.options.Chunk
	for n := 1; ; {
		way, last := group.WayOf(b.g.Size, n), group.WayUpTo(b.g.Size, n)
		c := x
		c.Algorithm = way
		c.Why += fmt.Sprintf("; %sby way of page-locked memory, in chunks of %d bytes; from one tensor of a rank to the others by a tree of copies", relayed[way], chunk)
		if last >= 0 && last < group.PiecesOf(1) {
			c.UpTo = int64(last) * int64(chunk)
			c.Why += fmt.Sprintf("; the fewest messages one after the other for %d ranks and up to %d chunks", b.g.Size, last)
		}
		all = append(all, c)
		if c.UpTo < 0 {
			return all
		}
		n = last + 1
	}
}

// nowhere is memory that only stands for a device's.
type nowhere struct{ bytes int }

func (nowhere) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (m nowhere) Len() int            { return m.bytes }
