package plan

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// Op is a collective.
type Op uint8

// The collectives.
const (
	OpAllReduce Op = iota
	OpReduce
	OpReduceScatter
	OpAllGather
	OpBroadcast
	OpAllToAll
	OpGather
	OpScatter
	OpBarrier
)

var opNames = [...]string{"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "gather", "scatter", "barrier"}

// String returns the collective's name, as in the flag -op of c10d bench.
func (o Op) String() string {
	if int(o) >= len(opNames) {
		return fmt.Sprintf("op(%d)", uint8(o))
	}
	return opNames[o]
}

// Ops returns all collectives.
func Ops() []Op {
	all := make([]Op, len(opNames))
	for i := range all {
		all[i] = Op(i)
	}
	return all
}

// ParseOp returns the collective of that name.
func ParseOp(name string) (Op, error) {
	if i := slices.Index(opNames[:], name); i >= 0 {
		return Op(i), nil
	}
	return 0, fmt.Errorf("plan: no collective %q (known: %s)", name, strings.Join(opNames[:], ", "))
}

// Reduces reports whether the collective combines elements.
func (o Op) Reduces() bool { return o <= OpReduceScatter }

// Rooted reports whether one of the ranks is the root.
func (o Op) Rooted() bool {
	return o == OpReduce || o == OpBroadcast || o == OpGather || o == OpScatter
}

// counts reports whether the ranks' blocks may differ. All ranks must then know all lengths.
func (o Op) counts() bool {
	return o == OpReduceScatter || o == OpAllGather || o == OpGather || o == OpScatter
}

// Order is the order in which an algorithm combines the operands of an element.
type Order uint8

const (
	// AnyOrder depends on the algorithm, the size of the group, the length of the buffer and the
	// element's place in it.
	AnyOrder Order = iota

	// RankOrder is ((x0 op x1) op x2) and so on, for every element.
	RankOrder
)

// Call describes a collective for one rank. The ranks' calls differ in Rank only.
type Call struct {
	Rank, Size int
	Root       int // of the collectives that have one

	// Bytes is the length of the buffer of an all-reduce, a reduce or a
	// broadcast, and of one rank's block otherwise.
	Bytes int64

	// Counts replace Bytes if the ranks' blocks of a reduce-scatter, all-gather, gather or
	// scatter differ in length.
	Counts []int64

	Elem  int64 // bytes of an element that is to stay in one piece; 0 means 1
	Chunk int64 // bytes of a message of the algorithms that cut them; 0 means Algorithm.ChunkOf
}

// DefaultChunk is the chunk of rings: Gloo's bound of a message.
const DefaultChunk = maxSegment

// Chains need smaller chunks, because the first chunk passes all ranks before the last one
// leaves. If a message costs as much time as perMessage bytes, the best length is the root of
// bytes*perMessage/hops. In a model of TCP with a latency of 10 us and 1 us of CPU time a message, perMessage is 25 KB over
// 100 Gbit/s, and 2.5 KB over 10 Gbit/s. The value here is in between. With it, 2 MiB along eight ranks take 2.1 ms over
// 10 Gbit/s. The best chunk takes 1.8 ms, DefaultChunk 6.8 ms.
const (
	perMessage = 16 << 10
	minChunk   = 4 << 10
)

// chainChunk returns the chunk of a chain: a power of two near the best.
func chainChunk(bytes int64, hops int) int64 {
	best := uint64(min(bytes, 1<<40)) * perMessage / uint64(max(hops, 1))
	return max(minChunk, min(DefaultChunk, int64(1)<<(bits.Len64(best)/2)))
}

// Algorithm is an algorithm for a collective.
type Algorithm struct {
	Op      Op
	Name    string
	Summary string // one line
	Order   Order  // where Op reduces
	Chunks  bool   // Call.Chunk matters

	hops func(c *Call) int // how many ranks a chain has behind its first; nil for others
	plan func(b *builder, c *Call)
}

func (a *Algorithm) String() string { return a.Op.String() + " " + a.Name }

// Algorithms returns the algorithms of a collective, the plainest first.
func Algorithms(op Op) []*Algorithm {
	var found []*Algorithm
	for i := range algorithms {
		if algorithms[i].Op == op {
			found = append(found, &algorithms[i])
		}
	}
	return found
}

// Lookup returns a collective's algorithm of that name.
func Lookup(op Op, name string) (*Algorithm, error) {
	var known []string
	for _, a := range Algorithms(op) {
		if a.Name == name {
			return a, nil
		}
		known = append(known, a.Name)
	}
	return nil, fmt.Errorf("plan: no algorithm %q of %v (known: %s)", name, op, strings.Join(known, ", "))
}

// ChunkOf returns the chunk for the call: the call's own, or the algorithm's default.
func (a *Algorithm) ChunkOf(c Call) int64 {
	switch {
	case c.Chunk > 0:
		return c.Chunk
	case a.hops != nil:
		return chainChunk(c.Bytes, a.hops(&c))
	}
	return DefaultChunk
}

// Plan returns the steps of c.Rank. It panics if the call is invalid or the algorithm cannot
// serve it.
func (a *Algorithm) Plan(c Call) *Plan {
	a.check(&c)
	return build(16, func(b *builder) { a.plan(b, &c) })
}

func (a *Algorithm) check(c *Call) {
	checkRank(c.Rank, c.Size)
	if a.Op.Rooted() {
		checkRoot(c.Root, c.Size)
	}
	if c.Elem == 0 {
		c.Elem = 1
	}
	if c.Counts != nil && !a.Op.counts() {
		panic(fmt.Sprintf("plan: %v takes no counts", a))
	}
	checkElements(c.Bytes, c.Elem)
	c.Chunk = a.ChunkOf(*c)
	switch {
	case c.Counts == nil:
	case len(c.Counts) != c.Size:
		panic(fmt.Sprintf("plan: %d counts in a group of %d", len(c.Counts), c.Size))
	default:
		for _, n := range c.Counts {
			checkElements(n, c.Elem)
		}
	}
}

// blocks returns where the ranks' blocks lie.
func (c *Call) blocks() blocks {
	if c.Counts != nil {
		return listed(c.Counts)
	}
	return equal(c.Size, c.Bytes)
}

// gathered starts an all-gather that works in place in Out.
func (b *builder) gathered(c *Call, gather func(all blocks)) {
	all := c.blocks()
	off, n := all.at(c.Rank)
	b.local(Copy, Out, off, In, 0, n)
	gather(all)
}

// some makes no steps if there are no bytes or no other ranks.
func some(plan func(b *builder, c *Call)) func(b *builder, c *Call) {
	return func(b *builder, c *Call) {
		if c.Bytes > 0 && c.Size > 1 {
			plan(b, c)
		}
	}
}

var algorithms = []Algorithm{
	{
		Op: OpAllReduce, Name: "ring", Chunks: true,
		Summary: "ring reduce-scatter, then ring all-gather, blocks above a chunk in several messages",
		plan: some(func(b *builder, c *Call) {
			b.allReduceRing(c.Rank, c.Size, c.Bytes, c.Elem, c.Chunk)
		}),
	},
	{
		Op: OpAllReduce, Name: "halving-doubling",
		Summary: "recursive halving, then doubling, in halves that may differ by a rank",
		plan: some(func(b *builder, c *Call) {
			b.allReduceHalving(c.Rank, c.Size, c.Bytes, c.Elem)
		}),
	},
	{
		Op: OpAllReduce, Name: "bcube",
		Summary: "generalised hypercube over the factors of the group's size",
		plan: some(func(b *builder, c *Call) {
			b.bcube(c.Rank, c.Size, c.Bytes, c.Elem)
		}),
	},
	{
		Op: OpAllReduce, Name: "recursive-doubling",
		Summary: "everything traded over distances 1, 2, 4 and so on: few rounds, much data",
		plan: some(func(b *builder, c *Call) {
			b.allReduceDoubling(c.Rank, c.Size, c.Bytes)
		}),
	},
	{
		Op: OpAllReduce, Name: "binomial",
		Summary: "reduce up a binomial tree, broadcast down it",
		plan: some(func(b *builder, c *Call) {
			b.allReduceTree(c.Rank, c.Size, c.Bytes)
		}),
	},
	{
		Op: OpAllReduce, Name: "direct", Order: RankOrder,
		Summary: "everything to everybody in one round",
		plan: some(func(b *builder, c *Call) {
			b.allReduceOneShot(c.Rank, c.Size, c.Bytes)
		}),
	},
	{
		Op: OpAllReduce, Name: "two-step", Order: RankOrder,
		Summary: "each rank's share straight to it, results straight to everybody",
		plan: some(func(b *builder, c *Call) {
			b.allReduceTwoStep(c.Rank, c.Size, c.Bytes, c.Elem)
		}),
	},
	{
		Op: OpAllReduce, Name: "chain", Order: RankOrder, Chunks: true,
		Summary: "up a chain of ranks in chunks, and back down",
		hops:    func(c *Call) int { return 2 * (c.Size - 1) },
		plan: some(func(b *builder, c *Call) {
			b.allReduceChain(c.Rank, c.Size, c.Bytes, c.Elem, c.Chunk)
		}),
	},

	{
		Op: OpReduce, Name: "binomial",
		Summary: "up a binomial tree",
		plan: some(func(b *builder, c *Call) {
			b.reduceTree(c.Rank, c.Size, c.Root, c.Bytes)
		}),
	},
	{
		Op: OpReduce, Name: "halving-gather",
		Summary: "reduce-scatter by halving, then a gather",
		plan: some(func(b *builder, c *Call) {
			b.reduceHalvingTo(c.Rank, c.Size, c.Root, c.Bytes, c.Elem)
		}),
	},
	{
		Op: OpReduce, Name: "direct", Order: RankOrder,
		Summary: "everything to the root",
		plan: some(func(b *builder, c *Call) {
			b.reduceInOrder(c.Rank, c.Size, c.Root, c.Bytes)
		}),
	},

	{
		Op: OpReduceScatter, Name: "direct", Order: RankOrder,
		Summary: "each rank's block straight to it",
		plan: func(b *builder, c *Call) {
			b.reduceParts(c.Rank, c.blocks(), In, Out, 0)
		},
	},
	{
		Op: OpReduceScatter, Name: "ring", Chunks: true,
		Summary: "partial results around a ring, blocks above a chunk in several messages",
		plan: func(b *builder, c *Call) {
			b.reduceScatterRing(c.Rank, c.blocks(), c.Elem, c.Chunk)
		},
	},
	{
		Op: OpReduceScatter, Name: "halving",
		Summary: "recursive halving, in halves that may differ by a rank",
		plan: func(b *builder, c *Call) {
			b.reduceScatterHalving(c.Rank, c.blocks())
		},
	},

	{
		Op: OpAllGather, Name: "ring",
		Summary: "blocks around a ring",
		plan: func(b *builder, c *Call) {
			b.gathered(c, func(all blocks) { b.passAround(c.Rank, all) })
		},
	},
	{
		Op: OpAllGather, Name: "bruck",
		Summary: "as few rounds as there can be, turned into place at the end",
		plan: func(b *builder, c *Call) {
			b.allGatherBruck(c.Rank, c.blocks())
		},
	},
	{
		Op: OpAllGather, Name: "recursive-doubling",
		Summary: "halves trade all they have, pairs first",
		plan: func(b *builder, c *Call) {
			b.gathered(c, func(all blocks) { b.gatherDoubling(c.Rank, all) })
		},
	},
	{
		Op: OpAllGather, Name: "direct",
		Summary: "each block straight to everybody",
		plan: func(b *builder, c *Call) {
			b.gathered(c, func(all blocks) { b.gatherParts(c.Rank, all) })
		},
	},

	{
		Op: OpBroadcast, Name: "binomial",
		Summary: "down a binomial tree",
		plan: some(func(b *builder, c *Call) {
			b.broadcastTree(c.Rank, c.Size, c.Root, c.Bytes)
		}),
	},
	{
		Op: OpBroadcast, Name: "flat",
		Summary: "from the root straight to everybody",
		plan: some(func(b *builder, c *Call) {
			b.broadcastFlat(c.Rank, c.Size, c.Root, c.Bytes)
		}),
	},
	{
		Op: OpBroadcast, Name: "chain", Chunks: true,
		Summary: "in chunks along a chain of ranks",
		hops:    func(c *Call) int { return c.Size - 1 },
		plan: some(func(b *builder, c *Call) {
			b.broadcastChain(c.Rank, c.Size, c.Root, c.Bytes, c.Chunk)
		}),
	},
	{
		Op: OpBroadcast, Name: "scatter-ring",
		Summary: "scatter down a tree, then all-gather around a ring",
		plan: some(func(b *builder, c *Call) {
			b.broadcastScattered(c.Rank, c.Size, c.Root, c.Bytes, true)
		}),
	},
	{
		Op: OpBroadcast, Name: "scatter-doubling",
		Summary: "scatter down a tree, then all-gather by recursive doubling",
		plan: some(func(b *builder, c *Call) {
			b.broadcastScattered(c.Rank, c.Size, c.Root, c.Bytes, false)
		}),
	},

	{
		Op: OpAllToAll, Name: "direct",
		Summary: "every block straight to its rank, all posted at once",
		plan: func(b *builder, c *Call) {
			all := c.blocks()
			b.allToAllDirect(c.Rank, all, all, false)
		},
	},

	{
		Op: OpGather, Name: "direct",
		Summary: "each block straight to the root",
		plan: func(b *builder, c *Call) {
			b.gatherDirect(c.Rank, c.Root, c.blocks(), false)
		},
	},
	{
		Op: OpGather, Name: "binomial",
		Summary: "up a binomial tree",
		plan: func(b *builder, c *Call) {
			b.gatherTree(c.Rank, c.Root, c.blocks())
		},
	},
	{
		Op: OpScatter, Name: "direct",
		Summary: "each block straight from the root",
		plan: func(b *builder, c *Call) {
			b.scatterDirect(c.Rank, c.Root, c.blocks(), false)
		},
	},
	{
		Op: OpScatter, Name: "binomial",
		Summary: "down a binomial tree",
		plan: func(b *builder, c *Call) {
			b.scatterTree(c.Rank, c.Root, c.blocks())
		},
	},

	{
		Op: OpBarrier, Name: "dissemination",
		Summary: "empty messages over distances 1, 2, 4 and so on",
		plan: func(b *builder, c *Call) {
			b.disseminate(c.Rank, c.Size)
		},
	},
}
