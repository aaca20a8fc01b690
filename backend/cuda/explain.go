package cuda

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

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
	if why := b.g.Board.Why; why != nil {
		e.Why += "; calls of ranks on this host are not all compared when they are made: " + strings.ReplaceAll(why.Error(), "\n", "; ")
	}
	e.Choices = append(b.explainAllReduce(), e.Choices...)
	chunked := fmt.Sprintf("by way of page-locked memory, in chunks of %d bytes", b.options.Chunk)
	for op := work.Broadcast; op <= work.ReduceScatterTensorCoalesced; op++ {
		c := backend.Choice{Op: op.String(), UpTo: -1, Algorithm: HostWork, Why: chunked}
		switch op {
		case work.AllReduceCoalesced, work.AllGather, work.AllGatherIntoTensor, work.AllGatherCoalesced,
			work.ReduceScatter, work.ReduceScatterTensor, work.ReduceScatterTensorCoalesced:
			if err := cmp.Or(b.direct.Can(), b.direct.Known()); err != nil {
				c.Why += "; not " + DirectWork + ": " + err.Error()
			} else {
				c.Algorithm, c.Why = DirectWork, directway.Why
			}
		case work.Broadcast:
			e.Choices = append(e.Choices, b.explainBroadcast()...)
			continue
		case work.AllReduce, work.Coalesced, work.AllReduceSparse:
			continue
		case work.AllToAll, work.AllToAllSingle, work.Send, work.Recv, work.RecvAnySource:
			c.Why = "by way of page-locked memory, in one piece"
		case work.Barrier:
			c.Why = "after this rank's earlier collectives"
		}
		e.Choices = append(e.Choices, c)
	}
	return e
}

// explainAllReduce asks the works about a tensor of one element.
func (b *Backend) explainAllReduce() []backend.Choice {
	t, err := tensor.OnDevice(tensor.Float32, nowhere{}, 1)
	if err != nil {
		return nil
	}
	h := &host{b: b, op: &group.Operation{B: b.g}}
	h.call = backend.AllReduceCall{Tensors: []*tensor.Tensor{t}, Op: backend.Sum(), Collectives: h}
	c := backend.Choice{Op: work.AllReduce.String(), UpTo: -1}
	w, err := b.choose(h)
	if err != nil {
		c.Algorithm, c.Why = "none", err.Error()
		return []backend.Choice{c}
	}
	c.Algorithm = w.name
	how := ""
	if x := b.g.Exchange.Load(); w.name == HostWork && x != nil {
		how = "; " + b.explainExchange(x)
	}
	if b.options.AllReduce != "" {
		c.Why = "Options.AllReduce asks for it" + how
		return []backend.Choice{c}
	}
	c.Why = "the work of the highest priority that can do it"
	for _, why := range refusals(h, w.name) {
		c.Why += "; not " + why
	}
	c.Why += how
	return []backend.Choice{c}
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

// nowhere is memory of one float32 that only stands for a device's.
type nowhere struct{}

func (nowhere) Device() tensor.Device { return tensor.Device{Type: tensor.CUDA} }
func (nowhere) Len() int              { return 4 }
