package cuda

import (
	"cmp"
	"context"
	"fmt"
	"math/bits"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// The ways of a broadcast, for Options.Broadcast.
const (
	// BroadcastFlat: the root sends to every rank.
	BroadcastFlat = "flat"
	// BroadcastTree: a binomial tree of ranks.
	BroadcastTree = "tree"
	// BroadcastChain: each rank sends to the next one.
	BroadcastChain = "chain"
	// BroadcastHost: the CPU backend's own broadcast, chunk by chunk.
	BroadcastHost = HostWork
	// BroadcastDirect: the kernels of DirectWork, without the hosts.
	BroadcastDirect = DirectWork
)

var broadcastWays = []string{BroadcastFlat, BroadcastTree, BroadcastChain, BroadcastHost, BroadcastDirect}

// routeOf returns the route of a rank.
func routeOf(way string, rank, size, root int) route {
	at := func(v int) int { return around(v+root, size) }
	v := around(rank-root, size) // as if the root were rank 0
	r := route{from: -1}
	switch way {
	case BroadcastFlat:
		if v > 0 {
			r.from = root
			break
		}
		for i := 1; i < size; i++ {
			r.to = append(r.to, at(i))
		}
	case BroadcastTree:
		low := v & -v
		if v > 0 {
			r.from = at(v - low)
		} else {
			low = 1 << bits.Len(uint(size-1))
		}
		// The largest part of the tree first.
		for step := low >> 1; step > 0; step >>= 1 {
			if v+step < size {
				r.to = append(r.to, at(v+step))
			}
		}
	case BroadcastChain:
		if v > 0 {
			r.from = at(v - 1)
		}
		if v+1 < size {
			r.to = []int{at(v + 1)}
		}
	}
	return r
}

// wayOf returns the way in which the last of so many chunks is the first to
// arrive everywhere, when a rank sends one chunk in the time of one: flat takes
// size-1 times for each, a tree as many as the root has children, a chain one
// for each and one for each rank on the way.
func wayOf(size, chunks int) string {
	flat, tree, chain := chunks*(size-1), chunks*bits.Len(uint(size-1)), chunks+size-2
	switch {
	case flat <= tree && flat <= chain:
		return BroadcastFlat
	case tree <= chain:
		return BroadcastTree
	}
	return BroadcastChain
}

// wayUpTo returns up to how many chunks the way of so many is the one, -1 if
// for all.
func wayUpTo(size, chunks int) int {
	// The last to come is the chain, which beats a tree of two levels or more at the
	// latest when there are as many chunks as ranks.
	way, last := wayOf(size, chunks), chunks
	for ; wayOf(size, last+1) == way; last++ {
		if last > chunks+size {
			return -1
		}
	}
	return last
}

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
	if b.g.size == 1 {
		return []backend.Choice{{Op: op, UpTo: -1, Algorithm: "local", Why: "there is one rank: a tree of copies between its tensors"}}
	}
	direct := backend.Choice{Op: op, UpTo: -1, Algorithm: BroadcastDirect, Why: directWhy}
	way, not := b.options.Broadcast, ""
	if way == "" || way == BroadcastDirect {
		if err := cmp.Or(b.direct.can(), b.direct.known()); err == nil {
			return []backend.Choice{direct}
		} else if way == BroadcastDirect {
			direct.Algorithm, direct.Why = "none", "Options.Broadcast asks for it: "+err.Error()
			return []backend.Choice{direct}
		} else {
			not = "; not " + BroadcastDirect + ": " + err.Error()
		}
	}
	if way != "" {
		return []backend.Choice{{Op: op, UpTo: -1, Algorithm: way, Why: "Options.Broadcast asks for it: " + what[way] + tail}}
	}
	var all []backend.Choice
	for n := 1; ; {
		way, last := wayOf(b.g.size, n), wayUpTo(b.g.size, n)
		c := backend.Choice{Op: op, UpTo: -1, Algorithm: way, Why: what[way] + tail + not}
		if last >= 0 && last < piecesOf(1) {
			c.UpTo = int64(last) * int64(chunk)
			c.Why = fmt.Sprintf("%s; the fewest messages one after the other for %d ranks and up to %d chunks", c.Why, b.g.size, last)
		}
		all = append(all, c)
		if c.UpTo < 0 {
			return all
		}
		n = last + 1
	}
}

// Broadcast sends the root's tensor through the hosts to one tensor of each rank,
// from where the others have it. Options.Broadcast has the ways that it can go.
func (b *Backend) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	const op = work.Broadcast
	if err := b.root(op, o.Root); err != nil {
		return nil, err
	}
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if o.RootTensor < 0 || o.RootTensor >= len(ts) {
		return nil, bad(op, "invalid root tensor: %d (there are %d)", o.RootTensor, len(ts))
	}
	if err := b.dense(op, "tensor 0", output, ts[0]); err != nil {
		return nil, err
	}
	if err := b.like(op, "tensors", output, ts[0], ts); err != nil {
		return nil, err
	}
	ts = slices.Clone(ts)
	way, print := b.options.Broadcast, board.Call{Dtype: ts[0].DType(), N: ts[0].Len(), Root: o.Root}
	if way == "" || way == BroadcastDirect {
		err := b.direct.can()
		if err == nil {
			err = b.direct.ready(ctx, op, ts[0].Device().Index, print)
		}
		switch {
		case err == nil:
			c := b.direct.newCall()
			c.broadcast(ts, o.RootTensor, b.g.rank == o.Root)
			return b.direct.issue(ctx, op, o.Timeout, c, print, ts...)
		case way == BroadcastDirect && b.g.broken() == nil && ctx.Err() == nil:
			return nil, bad(op, "not in the way %q, which Options.Broadcast asks for: %v", way, err)
		}
	}
	l := leg{n: ts[0].Len(), dtype: ts[0].DType()}
	for i := range ts {
		// Elsewhere too the first to have the data.
		p := place.Of(ts[around(i+o.RootTensor, len(ts))])
		if b.g.rank == o.Root && i == 0 {
			l.src = p
		} else {
			l.dst = append(l.dst, p)
		}
	}
	q := &operation{legs: []leg{l}, print: print, call: func(q *operation, h []*tensor.Tensor) error {
		return q.wait(b.g.cpu.Broadcast(q.ctx, h, backend.BroadcastOptions{Root: o.Root, Timeout: q.left()}))
	}}
	chunks := b.g.chunks(&q.legs[0])
	if way == "" {
		way = wayOf(b.g.size, chunks)
	}
	if way != BroadcastHost {
		q.relay = newOneToAll(routeOf(way, b.g.rank, b.g.size, o.Root), chunks)
		q.call = func(q *operation, h []*tensor.Tensor) error { return q.passChunk(h[0].Bytes()) }
	}
	return b.g.issue(ctx, op, o.Timeout, q, ts...)
}
