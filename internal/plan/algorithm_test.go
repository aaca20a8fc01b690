package plan

import (
	"bytes"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// worlds are the sizes of groups that every algorithm is run with.
func worlds() []int {
	return testsize.Of([]int{1, 2, 3, 5, 8}, []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17},
		[]int{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33})
}

// TestAlgorithms runs every algorithm in random orders of events and compares
// the results with what the collective means.
func TestAlgorithms(t *testing.T) {
	rng := must.Rand(t)
	for _, op := range Ops() {
		for _, a := range Algorithms(op) {
			t.Run(a.String(), func(t *testing.T) {
				for _, size := range worlds() {
					counts := []int64{0, 1, 2, int64(size) - 1, int64(3*size) + 1, rng.Int64N(200)}
					if size > 9 {
						counts = []int64{rng.Int64N(int64(3 * size))}
					}
					for _, n := range counts {
						c := Call{Size: size, Root: rng.IntN(size), Bytes: 8 * n, Elem: 8}
						if a.Chunks {
							c.Chunk = []int64{0, 8, 27, 64}[rng.IntN(4)]
						}
						check(t, a, c, nil, rng)
						if op.counts() {
							check(t, a, c, randomCounts(c, rng), rng)
						}
					}
				}
			})
		}
	}
}

// randomCounts returns how many bytes each rank has, some of them none.
func randomCounts(c Call, rng *rand.Rand) []int64 {
	counts := make([]int64, c.Size)
	for r := range counts {
		counts[r] = 8 * rng.Int64N(c.Bytes/8+1) * rng.Int64N(2)
	}
	return counts
}

// check runs one collective and compares the results.
func check(t *testing.T, a *Algorithm, c Call, counts []int64, rng *rand.Rand) {
	t.Helper()
	c.Counts = counts
	name := fmt.Sprintf("%v: %+v", a, c)
	plans := make([]*Plan, c.Size)
	for c.Rank = range plans {
		plans[c.Rank] = a.Plan(c)
	}
	for _, mixing := range []bool{false, true} {
		mems, ins := memories(a.Op, c, rng), make([][]byte, c.Size)
		combine := func(x, y uint64) uint64 { return x + y }
		if mixing {
			combine = mix
		}
		for r := range mems {
			ins[r] = clone(mems[r].in)
		}
		want := meaning(a.Op, c, mems, combine)
		require.NoError(t, newSimulation(plans, mems, eachWord(combine), rng).run(), name)
		if !mixing {
			requireTraffic(t, a, c, plans)
		}
		for r := range mems {
			require.True(t, bytes.Equal(ins[r], mems[r].in), "%s: the input of rank %d has changed", name, r)
			switch {
			case want[r] == nil:
			case !mixing || a.Order == RankOrder:
				require.True(t, bytes.Equal(want[r], mems[r].out), "%s: rank %d", name, r)
			case a.Op == OpAllReduce:
				require.True(t, bytes.Equal(mems[0].out, mems[r].out), "%s: ranks 0 and %d differ", name, r)
			}
		}
		if !a.Op.Reduces() {
			break
		}
	}
}

// memories returns what the ranks have before a collective.
func memories(op Op, c Call, rng *rand.Rand) []memory {
	mems := make([]memory, c.Size)
	for r := range mems {
		own, all := c.Bytes, c.blocks().total()
		if c.Counts != nil {
			own = c.Counts[r]
		}
		m := memory{blank: true}
		switch op {
		case OpAllReduce, OpReduce:
			m = memory{out: randomBytes(rng, c.Bytes)}
		case OpBroadcast:
			m.out = randomBytes(rng, c.Bytes)
			m.blank = r != c.Root
		case OpReduceScatter:
			m.in, m.out = randomBytes(rng, all), randomBytes(rng, own)
		case OpAllGather:
			m.in, m.out = randomBytes(rng, own), randomBytes(rng, all)
		case OpGather:
			m.in = randomBytes(rng, own)
			if r == c.Root {
				m.out = randomBytes(rng, all)
			}
		case OpScatter:
			m.out = randomBytes(rng, own)
			if r == c.Root {
				m.in = randomBytes(rng, all)
			}
		case OpAllToAll:
			m.in, m.out = randomBytes(rng, all), randomBytes(rng, all)
		}
		mems[r] = m
	}
	return mems
}

// meaning returns what the ranks have to end with; nil where nothing is
// promised. Elements are reduced in rank order.
func meaning(op Op, c Call, mems []memory, combine func(x, y uint64) uint64) [][]byte {
	root, want := c.Root, make([][]byte, c.Size)
	reduced := func(of func(m memory) []byte) []byte {
		acc := clone(of(mems[0]))
		for _, m := range mems[1:] {
			eachWord(combine)(acc, of(m))
		}
		return acc
	}
	for r := range want {
		switch op {
		case OpAllReduce:
			want[r] = reduced(func(m memory) []byte { return m.out })
		case OpReduce:
			if r == root {
				want[r] = reduced(func(m memory) []byte { return m.out })
			}
		case OpReduceScatter:
			off, n := c.blocks().at(r)
			want[r] = reduced(func(m memory) []byte { return m.in[off:][:n] })
		case OpBroadcast:
			want[r] = clone(mems[root].out)
		case OpAllGather, OpGather:
			if op == OpAllGather || r == root {
				want[r] = []byte{}
				for _, m := range mems {
					want[r] = append(want[r], m.in...)
				}
			}
		case OpScatter:
			off, n := c.blocks().at(r)
			want[r] = clone(mems[root].in[off:][:n])
		case OpAllToAll:
			want[r] = []byte{}
			off, n := c.blocks().at(r)
			for _, m := range mems {
				want[r] = append(want[r], m.in[off:][:n]...)
			}
		}
	}
	return want
}

// traffic is what a group sends, all ranks together.
type traffic struct{ messages, bytes int64 }

func measured(plans []*Plan) (all traffic) {
	for _, p := range plans {
		for _, s := range p.Steps {
			if s.Kind == Send {
				all.messages++
				all.bytes += s.Len
			}
		}
	}
	return all
}

// rounds is how many rounds of halving a group needs, and messages what its
// ranks send in them: one each in every level that they are in.
func halvings(size int) int64 {
	if size < 2 {
		return 0
	}
	return int64(size) + halvings((size+1)/2) + halvings(size/2)
}

func log2(size int) int64 { return int64(bits.Len(uint(size - 1))) }

// formulas tells what algorithms send in a group of p ranks with n bytes (of a
// buffer, or of all blocks), if no block is empty, cut into s parts.
var formulas = map[string]func(p, n, s int64) traffic{
	"all_reduce ring":               func(p, n, s int64) traffic { return traffic{2 * (p - 1) * s, 2 * (p - 1) * n} },
	"all_reduce bcube":              nil, // TestGolden and TestF14Bcube
	"all_reduce halving-doubling":   func(p, n, s int64) traffic { return traffic{2 * halvings(int(p)), 2 * (p - 1) * n} },
	"all_reduce recursive-doubling": func(p, n, _ int64) traffic { m := powers(p) + 2*fold2(p); return traffic{m, m * n} },
	"all_reduce binomial":           func(p, n, _ int64) traffic { return traffic{2 * (p - 1), 2 * (p - 1) * n} },
	"all_reduce direct":             func(p, n, _ int64) traffic { return traffic{p * (p - 1), p * (p - 1) * n} },
	"all_reduce two-step":           func(p, n, _ int64) traffic { return traffic{2 * p * (p - 1), 2 * (p - 1) * n} },
	"all_reduce chain":              func(p, n, s int64) traffic { return traffic{2 * (p - 1) * s, 2 * (p - 1) * n} },

	"reduce binomial":       func(p, n, _ int64) traffic { return traffic{p - 1, (p - 1) * n} },
	"reduce halving-gather": nil, // depends on the root's block: TestHalvingGather
	"reduce direct":         func(p, n, _ int64) traffic { return traffic{p - 1, (p - 1) * n} },

	"reduce_scatter direct":  func(p, n, _ int64) traffic { return traffic{p * (p - 1), (p - 1) * n} },
	"reduce_scatter ring":    func(p, n, s int64) traffic { return traffic{p * (p - 1) * s, (p - 1) * n} },
	"reduce_scatter halving": func(p, n, _ int64) traffic { return traffic{halvings(int(p)), (p - 1) * n} },

	"all_gather ring":               func(p, n, _ int64) traffic { return traffic{p * (p - 1), (p - 1) * n} },
	"all_gather bruck":              func(p, n, _ int64) traffic { return traffic{p * log2(int(p)), (p - 1) * n} },
	"all_gather recursive-doubling": func(p, n, _ int64) traffic { return traffic{halvings(int(p)), (p - 1) * n} },
	"all_gather direct":             func(p, n, _ int64) traffic { return traffic{p * (p - 1), (p - 1) * n} },

	"broadcast binomial":         func(p, n, _ int64) traffic { return traffic{p - 1, (p - 1) * n} },
	"broadcast flat":             func(p, n, _ int64) traffic { return traffic{p - 1, (p - 1) * n} },
	"broadcast chain":            func(p, n, s int64) traffic { return traffic{(p - 1) * s, (p - 1) * n} },
	"broadcast scatter-ring":     func(p, n, _ int64) traffic { return traffic{(p - 1) * (p + 1), scattered(p, n) + (p-1)*n} },
	"broadcast scatter-doubling": func(p, n, _ int64) traffic { return traffic{p - 1 + halvings(int(p)), scattered(p, n) + (p-1)*n} },

	"all_to_all direct": func(p, n, _ int64) traffic { return traffic{p * (p - 1), (p - 1) * n} },

	"gather direct":    nil, // depends on the root's block: TestMoves
	"gather binomial":  nil, // TestTrees
	"scatter direct":   nil,
	"scatter binomial": nil,

	"barrier dissemination": func(p, _, _ int64) traffic { return traffic{p * log2(int(p)), 0} },
}

// fold2 is how many ranks a group of p has above a power of two, and powers what
// a group of that power of two sends in recursive doubling.
func fold2(p int64) int64 { return p - 1<<(bits.Len64(uint64(p))-1) }

func powers(p int64) int64 {
	log := bits.Len64(uint64(p)) - 1
	return int64(log) << log
}

// scattered is what a scatter of n bytes in blocks of eight down a tree sends.
func scattered(p, n int64) (bytes int64) {
	all := cut(int(p), n, 1)
	var down func(lo, hi int)
	down = func(lo, hi int) {
		if hi-lo > 1 {
			mid := (lo + hi + 1) / 2
			_, m := all.span(mid, hi)
			bytes += m
			down(lo, mid)
			down(mid, hi)
		}
	}
	down(0, int(p))
	return bytes
}

// requireTraffic compares what plans send with the algorithm's formula, and
// proves that no reduce-scatter sends more than it must.
func requireTraffic(t *testing.T, a *Algorithm, c Call, plans []*Plan) {
	t.Helper()
	if a.Op == OpReduceScatter {
		all := c.blocks()
		for r, p := range plans {
			_, own := all.at(r)
			require.Equal(t, all.total()-own, measured([]*Plan{p}).bytes, "%v: rank %d", a, r)
		}
	}
	formula, ok := formulas[a.String()]
	require.True(t, ok, "%v has no formula", a)
	elements := c.Bytes / 8
	if formula == nil || c.Counts != nil || elements < 2 && a.Op != OpBarrier {
		return
	}
	p, n, unit, block := int64(c.Size), c.Bytes, c.Elem, c.Bytes
	switch a.Op {
	case OpAllReduce, OpReduce:
		block = ceilDiv(elements, p) * 8
	case OpBroadcast:
		if unit = 1; n < p {
			return
		}
	default:
		n *= p
	}
	if a.Op == OpAllReduce || a.Op == OpReduce {
		if elements < p {
			return
		}
		if a.Name == "chain" {
			block = n
		}
	}
	chunk := a.ChunkOf(c)
	s := int64(1)
	if a.Chunks {
		s = ceilDiv(block, max(chunk/unit*unit, unit))
	}
	want := formula(p, n, s)
	if a.Op == OpAllReduce && a.Name == "ring" {
		// Segments are of one length but for the last ones, and some are empty.
		segment := roundUp(ceilDiv(n, s*p), 8)
		want.messages = 2 * (p - 1) * ceilDiv(n, segment)
	}
	if c.Size == 1 {
		want = traffic{}
	}
	require.Equal(t, want, measured(plans), "%v: %+v", a, c)
}

// TestNothing proves that algorithms send nothing where there is nothing.
func TestNothing(t *testing.T) {
	for _, op := range Ops() {
		for _, a := range Algorithms(op) {
			if op == OpBarrier {
				continue
			}
			for r := range 5 {
				p := a.Plan(Call{Rank: r, Size: 5, Root: 2, Elem: 4})
				require.Empty(t, p.Steps, "%v", a)
			}
		}
	}
}

// TestHalvingGather counts what a reduction by halving sends: the halving, and
// all blocks but the root's.
func TestHalvingGather(t *testing.T) {
	a := must.Get(Lookup(OpReduce, "halving-gather"))
	for size := 1; size <= 33; size++ {
		for _, root := range []int{0, size / 2, size - 1} {
			n := int64(8 * (2*size + 1))
			plans := group(size, func(r int) *Plan { return a.Plan(Call{Rank: r, Size: size, Root: root, Bytes: n, Elem: 8}) })
			_, own := cut(size, n, 8).at(root)
			want := traffic{halvings(size) + int64(size) - 1, int64(size-1)*n + n - own}
			require.Equal(t, want, measured(plans), "root %d of %d", root, size)
		}
	}
}

// TestTrees counts what trees of blocks send, and how many messages meet at the
// root.
func TestTrees(t *testing.T) {
	for _, op := range []Op{OpGather, OpScatter} {
		a := must.Get(Lookup(op, "binomial"))
		for size := 1; size <= 33; size++ {
			root := size / 3
			plans := group(size, func(r int) *Plan { return a.Plan(Call{Rank: r, Size: size, Root: root, Bytes: 5}) })
			require.Equal(t, traffic{int64(size - 1), scattered(int64(size), 5*int64(size))}, measured(plans), "%v of %d", op, size)
			posts := 0
			for _, s := range plans[root].Steps {
				if s.Kind == Send || s.Kind == Recv {
					posts++
				}
			}
			require.EqualValues(t, log2(size), posts, "%v of %d", op, size)
		}
	}
}

// TestLevels proves what halves of groups of any size are paired: everybody
// sends to the other half once, and nobody hears from more than two.
func TestLevels(t *testing.T) {
	for size := 2; size <= 70; size++ {
		heard := make(map[level][]int)
		for r := range size {
			for _, l := range levels(r, size) {
				target := l.target(r)
				require.Contains(t, l.sources(target), r)
				lo, hi := l.other(r)
				require.True(t, lo <= target && target < hi)
				heard[l] = append(heard[l], l.sources(r)...)
			}
		}
		for l, from := range heard {
			slices.Sort(from)
			require.Len(t, slices.Compact(from), l.hi-l.lo, "%v of %d", l, size)
		}
	}
}

func TestLookup(t *testing.T) {
	for _, op := range Ops() {
		require.Equal(t, op, must.Get(ParseOp(op.String())))
		names := make(map[string]bool)
		for _, a := range Algorithms(op) {
			require.False(t, names[a.Name], a.Name)
			names[a.Name] = true
			require.Same(t, a, must.Get(Lookup(op, a.Name)))
			require.NotEmpty(t, a.Summary)
		}
	}
	_, err := Lookup(OpScatter, "ring")
	require.EqualError(t, err, `plan: no algorithm "ring" of scatter (known: direct, binomial)`)
	require.ErrorContains(t, must.Err(ParseOp("all")), `no collective "all" (known: all_reduce, `)
	require.Equal(t, "op(99)", Op(99).String())
}

func TestChunkOf(t *testing.T) {
	for _, op := range Ops() {
		for _, a := range Algorithms(op) {
			c := Call{Size: 8, Bytes: 2 << 20}
			want := map[string]int64{"all_reduce chain": 64 << 10, "broadcast chain": 64 << 10}[a.String()]
			if want == 0 {
				want = DefaultChunk
			}
			require.Equal(t, want, a.ChunkOf(c), a.String())
			c.Bytes = 0
			require.LessOrEqual(t, int64(minChunk), a.ChunkOf(c))
			c.Bytes = 1 << 62
			require.EqualValues(t, DefaultChunk, a.ChunkOf(c))
			c.Chunk = 77
			require.EqualValues(t, 77, a.ChunkOf(c))
		}
	}
}

func TestCalls(t *testing.T) {
	all := func(op Op, name string) *Algorithm {
		return must.Get(Lookup(op, name))
	}
	for name, c := range map[string]Call{
		"no group":           {},
		"rank too large":     {Rank: 2, Size: 2},
		"bytes negative":     {Size: 2, Bytes: -1},
		"part of an element": {Size: 2, Bytes: 7, Elem: 4},
		"counts missing":     {Size: 2, Counts: []int64{1}},
		"count negative":     {Size: 2, Counts: []int64{1, -1}},
		"part in a count":    {Size: 2, Counts: []int64{4, 3}, Elem: 4},
	} {
		t.Run(name, func(t *testing.T) { require.Panics(t, func() { all(OpReduceScatter, "ring").Plan(c) }) })
	}
	require.Panics(t, func() { all(OpBroadcast, "chain").Plan(Call{Size: 2, Root: 2}) })
	require.Panics(t, func() { all(OpAllToAll, "direct").Plan(Call{Size: 2, Counts: []int64{1, 2}}) })
}
