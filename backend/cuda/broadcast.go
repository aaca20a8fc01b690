package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

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

// explainBroadcast says how broadcasts go, for Explain.
func (b *Backend) explainBroadcast() []backend.Choice {
	op := work.Broadcast.String()
	chunk := b.options.Chunk
	what := map[string]string{
		BroadcastFlat:  "the root sends each rank a chunk when it is clear to send",
		BroadcastTree:  "a binomial tree, each rank sends a chunk on when the next is clear to send",
		BroadcastChain: "each rank sends a chunk on to the next when that is clear to send",
		BroadcastHost:  "the CPU backend broadcasts each chunk",
	}
	tail := fmt.Sprintf(", by way of page-locked memory in chunks of %d bytes; from one tensor of a rank to the others by a tree of copies", chunk)
	if b.g.Size == 1 {
		return []backend.Choice{{Op: op, UpTo: -1, Algorithm: "local", Why: "there is one rank: a tree of copies between its tensors"}}
	}
	way, not := b.options.Broadcast, ""
	if way == "" || way == BroadcastDirect {
		if err := b.direct.Mesh(); err != nil && way == BroadcastDirect {
			return []backend.Choice{{Op: op, UpTo: -1, Algorithm: "none", Why: "Options.Broadcast asks for it: " + err.Error()}}
		} else if err != nil {
			not = "; not " + BroadcastDirect + ": " + err.Error()
		}
	} else {
		return []backend.Choice{{Op: op, UpTo: -1, Algorithm: way, Why: "Options.Broadcast asks for it: " + what[way] + tail}}
	}
	var all []backend.Choice
	for _, r := range b.ranges(plan.OpBroadcast) {
		switch {
		case r.Name == "" && b.clusters != nil: // then it is the only one
			return []backend.Choice{{Op: op, UpTo: -1, Algorithm: ClustersWork, Why: b.explainClusters() + not}}
		case r.Name == "":
			return b.explainChunks(what, tail+not)
		case r.Kernels():
			all = append(all, backend.Choice{Op: op, UpTo: r.UpTo, Algorithm: BroadcastDirect, Why: directway.Why + "; " + said(r)})
		default:
			all = append(all, backend.Choice{Op: op, UpTo: r.UpTo, Algorithm: r.Name, Why: what[r.Name] + tail + not + "; " + said(r)})
		}
	}
	return all
}

// explainChunks says how broadcasts go whose way depends on the number of chunks.
func (b *Backend) explainChunks(what map[string]string, tail string) (all []backend.Choice) {
	chunk := b.options.Chunk
	for n := 1; ; {
		way, last := group.WayOf(b.g.Size, n), group.WayUpTo(b.g.Size, n)
		c := backend.Choice{Op: work.Broadcast.String(), UpTo: -1, Algorithm: way, Why: what[way] + tail}
		if last >= 0 && last < group.PiecesOf(1) {
			c.UpTo = int64(last) * int64(chunk)
			c.Why = fmt.Sprintf("%s; the fewest messages one after the other for %d ranks and up to %d chunks", c.Why, b.g.Size, last)
		}
		all = append(all, c)
		if c.UpTo < 0 {
			return all
		}
		n = last + 1
	}
}

// errAsked is why kernels do not broadcast.
var errAsked = errors.New("Options.Broadcast asks for another way")

// Broadcast sends the root's tensor through the hosts to one tensor of each rank,
// from where the others have it. Options.Broadcast has the ways that it can go.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	const op = work.Broadcast
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if len(ts) == 0 {
		return nil, bad(op, "invalid root tensor: %d (requires non-empty tensor list)", o.RootTensor)
	}
	if o.RootTensor < 0 || o.RootTensor >= len(ts) {
		return nil, bad(op, "invalid root tensor: %d (there are %d)", o.RootTensor, len(ts))
	}
	if err := b.dense(op, "tensor 0", ts[0]); err != nil {
		return nil, err
	}
	if err := b.like(op, "tensors", ts[0], ts); err != nil {
		return nil, err
	}
	if err := b.overlap(op, ts, nil); err != nil {
		return nil, err
	}
	ts = slices.Clone(ts)
	print := board.Call{DType: ts[0].DType(), N: ts[0].Len(), Root: o.Root}
	var elsewhere error
	if w := b.options.Broadcast; w != "" && w != BroadcastDirect {
		elsewhere = errAsked
	}
	shadowed := func() (*work.Work, error) {
		return b.mix(ctx, op, ts, ts, [][]*tensor.Tensor{ts}, func(ctx context.Context, l [][]*tensor.Tensor) (*work.Work, error) {
			return b.Broadcast(ctx, l[0], o)
		})
	}
	r := b.choose(ctx, op, ts[0], ts[0].ByteLen(), elsewhere, print)
	if r.Kernels() {
		if b.shadows(true, ts) {
			return shadowed()
		}
		c := b.direct.NewCall()
		c.Broadcast(ts, o.RootTensor, o.Root, form(r.Way))
		return b.direct.Issue(ctx, op, o.Timeout, c, print, ts...)
	}
	if b.options.Broadcast == BroadcastDirect && b.g.Broken() == nil && ctx.Err() == nil {
		return nil, bad(op, "not in the way %q, which Options.Broadcast asks for: %v", BroadcastDirect, b.direct.Mesh())
	}
	if c := broadcastCall(ts, o, print); b.isBetween(ctx, op, c) {
		if b.shadows(b.clusters.Why() == nil, ts) {
			return shadowed()
		}
		return b.clusters.Issue(ctx, op, o.Timeout, c, ts...)
	}
	if b.g.Size == 1 && onDevices(ts) {
		q := &group.Operation{Print: print}
		q.Within(slices.Concat(ts[o.RootTensor:], ts[:o.RootTensor]), nil)
		return b.g.Issue(ctx, op, o.Timeout, q, ts...)
	}
	l := group.Leg{N: ts[0].Len(), DType: ts[0].DType()}
	chunks := b.g.Chunks(&l)
	way := r.Name
	switch {
	case b.lacking: // such a rank has no chunks to send on
		way = BroadcastHost
	case way == "":
		way = group.WayOf(b.g.Size, chunks)
	}
	if b.shadows(way != BroadcastHost, ts) {
		return shadowed()
	}
	for i := range ts {
		// Elsewhere too the first to have the data.
		t := ts[group.Around(i+o.RootTensor, len(ts))]
		if b.g.Rank == o.Root && i == 0 {
			l.Reads(t)
		} else {
			l.Writes(t)
		}
	}
	q := &group.Operation{Legs: []group.Leg{l}, Print: print, Call: func(q *group.Operation, h []*tensor.Tensor) error {
		return q.Wait(b.g.CPU.Broadcast(q.Ctx, h, backend.BroadcastOptions{Root: o.Root, Timeout: q.Left()}))
	}}
	if way != BroadcastHost {
		q.Relay = group.NewOneToAll(group.RouteOf(way, b.g.Rank, b.g.Size, o.Root), chunks)
		q.Call = func(q *group.Operation, h []*tensor.Tensor) error { return q.PassChunk(h[0].Bytes()) }
	}
	return b.g.Issue(ctx, op, o.Timeout, q, ts...)
}
