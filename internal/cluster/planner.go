package cluster

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/bits"
	"slices"

	"github.com/c10d-go/c10d/internal/plan"
)

// Call describes a collective for one rank. Buffers are those of package plan.
type Call struct {
	Op         plan.Op
	Rank, Root int

	// Bytes is the length of the buffer of an all-reduce, a reduce or a broadcast, and of one
	// rank's block otherwise.
	Bytes int64

	// Counts replace Bytes if the ranks' blocks of a reduce-scatter, all-gather or gather differ. In
	// a gather, ranks outside the root's cluster need to know those of their cluster only, and other
	// ranks than the root in the root's cluster their own only.
	Counts []int64

	// Send and Recv replace Bytes in an all-to-all. Send[i][r] is what the rank at place i of this
	// cluster sends to rank r. Recv[i][r] is what it receives from rank r.
	Send, Recv [][]int64

	Elem int64 // bytes of an element that is to stay in one piece; 0 means 1

	// Chunk is how many bytes of the buffer, about, go through the stages at a time. 0 means all.
	Chunk int64

	// Single lets one rank carry all traffic of its cluster. All-reduce, reduce and broadcast have
	// it.
	Single bool

	// Around cuts an all-reduce into a block for each rank, which begins at that rank and goes around the ring of all
	// ranks: plan.AllReduceAround. All blocks are under way together. It is for layouts of clusters with one rank each.
	Around bool

	// Apart says that steps inside never keep this rank's messages of other steps back: whoever runs them does
	// not run the steps between clusters. Then chunks end in the order in which they begin. Otherwise all
	// ranks end them in one order. Reduce-scatter and all-gather need it.
	Apart bool
}

// ahead is how many chunks have begun between clusters before the first one has to end. With two, a
// rank would have nothing on the link while it waits for the last round of a ring.
const ahead = 3

// A message for each rank of a cluster costs the root of a gather or a scatter about 1 us of CPU
// time each. One message for the cluster costs two more copies of a block, at about 10 GB/s, on
// every host at once. Blocks of up to togetherRooted go together. In an all-to-all one message from
// cluster g to cluster h replaces one for each pair of their ranks, and a block is copied four times
// more. Blocks from g to h go together if they have at most together bytes on average.
const (
	togetherRooted = 8 << 10
	together       = 4 << 10
)

// wholeBlocks is the length of a rank's part of other ranks' blocks up to which no block is cut. It
// takes about as long as the messages that parts of a block would need.
const wholeBlocks = 64 << 10

// TogetherRooted is the size of blocks up to which a gather and a scatter have one message for each
// cluster, and Together that of an all-to-all.
const TogetherRooted, Together = togetherRooted, together

// Check returns why no plan can be made for a call, nil if one can.
func (l *Layout) Check(c Call) error {
	size := l.Ranks()
	switch {
	case c.Rank < 0 || c.Rank >= size:
		return fmt.Errorf("cluster: rank %d in a group of %d", c.Rank, size)
	case c.Op > plan.OpBarrier:
		return fmt.Errorf("cluster: no plan for %v", c.Op)
	case c.Op.Rooted() && (c.Root < 0 || c.Root >= size):
		return fmt.Errorf("cluster: root %d in a group of %d", c.Root, size)
	case c.Bytes < 0 || c.Chunk < 0 || c.Elem < 0:
		return fmt.Errorf("cluster: %d bytes in chunks of %d and elements of %d", c.Bytes, c.Chunk, c.Elem)
	case c.Op.Reduces() && c.Elem > 0 && c.Bytes%c.Elem != 0:
		return fmt.Errorf("cluster: %d bytes are no whole number of elements of %d", c.Bytes, c.Elem)
	case c.Counts != nil && c.Op != plan.OpReduceScatter && c.Op != plan.OpAllGather && c.Op != plan.OpGather:
		return fmt.Errorf("cluster: %v takes no counts", c.Op)
	case c.Counts != nil && len(c.Counts) != size:
		return fmt.Errorf("cluster: %d counts in a group of %d", len(c.Counts), size)
	case c.Around && (c.Op != plan.OpAllReduce || l.Clusters() < size):
		return fmt.Errorf("cluster: %v of %d clusters with %d ranks goes around no ring", c.Op, l.Clusters(), size)
	case (c.Send != nil || c.Recv != nil) && c.Op != plan.OpAllToAll:
		return fmt.Errorf("cluster: %v takes no lengths by pair", c.Op)
	}
	for r, n := range c.Counts {
		if n < 0 || c.Op.Reduces() && c.Elem > 0 && n%c.Elem != 0 {
			return fmt.Errorf("cluster: block of rank %d: %d bytes are no whole number of elements of %d", r, n, c.Elem)
		}
	}
	if c.Send == nil && c.Recv == nil {
		return nil
	}
	here := len(l.members[l.cluster[c.Rank]])
	if len(c.Send) != here || len(c.Recv) != here {
		return fmt.Errorf("cluster: lengths of %d and %d ranks in a cluster of %d", len(c.Send), len(c.Recv), here)
	}
	for _, list := range slices.Concat(c.Send, c.Recv) {
		if len(list) != size || slices.Min(list) < 0 {
			return fmt.Errorf("cluster: lengths %v in a group of %d", list, size)
		}
	}
	return nil
}

// Plan returns the steps of c.Rank.
func (l *Layout) Plan(c Call) (*Plan, error) {
	if err := l.Check(c); err != nil {
		return nil, err
	}
	c.Elem = max(c.Elem, 1)
	b := &planner{
		l: l, Call: c, p: &Plan{Call: c, Chunks: 1},
		mine: l.cluster[c.Rank], place: l.place[c.Rank], here: l.members[l.cluster[c.Rank]],
	}
	switch c.Op {
	case plan.OpAllReduce, plan.OpReduce, plan.OpBroadcast:
		if c.Around {
			b.around()
			break
		}
		b.whole()
	case plan.OpReduceScatter, plan.OpAllGather:
		b.blocks()
	case plan.OpGather:
		b.gather()
	case plan.OpScatter:
		b.scatter()
	case plan.OpAllToAll:
		b.allToAll()
	case plan.OpBarrier:
		b.inside(Before, plan.OpBarrier)
		b.between(plan.OpBarrier, b.leaders(), 0, plan.Out, 0, 0)
		b.finish()
		b.inside(After, plan.OpBarrier)
	}
	b.p.IDs = b.ids
	b.p.Steps = slices.DeleteFunc(b.p.Steps, func(s Step) bool { return len(s.Ranks) == 1 && s.inPlace() })
	return b.p, nil
}

// planner makes the plan of one rank.
type planner struct {
	Call
	l           *Layout
	p           *Plan
	mine, place int   // this rank's cluster, and its place there
	here        []int // the ranks of this cluster
	chunk, ids  int
}

// inside adds a step of this rank's cluster. A cluster of one rank needs those only that move data.
func (b *planner) inside(stage Stage, op plan.Op, parts ...Part) *Step {
	s := Step{Stage: stage, Chunk: b.chunk, Op: op, Ranks: b.here, Parts: slices.DeleteFunc(slices.Clone(parts), func(p Part) bool { return p.Len == 0 })}
	some := len(s.Parts) > 0 || op == plan.OpBarrier || op == plan.OpGather || op == plan.OpScatter || op == plan.OpAllToAll
	if !some || len(b.here) == 1 && len(s.Parts) == 0 {
		return new(Step)
	}
	// A gather with counts may be one in which the ranks do not know each other's.
	s.Even = even(op, len(b.here), s.Parts) && (op != plan.OpGather || b.Op != plan.OpGather || b.Counts == nil)
	b.p.Steps = append(b.p.Steps, s)
	return &b.p.Steps[len(b.p.Steps)-1]
}

// between adds a step among ranks of different clusters, if this rank is one of them.
func (b *planner) between(op plan.Op, ranks []int, root int, buf plan.Buffer, off, n int64) *Step {
	id := b.ids
	b.ids++
	if len(ranks) == 1 || !slices.Contains(ranks, b.Rank) {
		return new(Step)
	}
	s := Step{Stage: Between, Chunk: b.chunk, Op: op, ID: id, Ranks: ranks, Root: root, Src: buf, Dst: buf}
	if op != plan.OpBarrier {
		s.Parts = []Part{{Src: off, Dst: off, Len: n}}
	}
	b.p.Steps = append(b.p.Steps, s)
	return &b.p.Steps[len(b.p.Steps)-1]
}

// message adds a message from one rank to another.
func (b *planner) message(id, from, to int, buf plan.Buffer, off, n int64) *Step {
	b.ids = id
	return b.between(plan.OpBroadcast, []int{from, to}, 0, buf, off, n)
}

// finish ends the chunk's steps between clusters, if there are some.
func (b *planner) finish() {
	if slices.ContainsFunc(b.p.Steps, func(s Step) bool { return s.Stage == Between && s.Chunk == b.chunk }) {
		b.p.Steps = append(b.p.Steps, Step{Stage: Between, Finish: true, Chunk: b.chunk})
	}
}

// leaders returns a rank for each cluster: the root in its own cluster, and in the others the first rank.
func (b *planner) leaders() []int {
	ranks := make([]int, len(b.l.members))
	for c := range ranks {
		ranks[c] = b.l.members[c][0]
	}
	if b.Op.Rooted() {
		ranks[b.l.cluster[b.Root]] = b.Root
	}
	return ranks
}

func (b *planner) takeScratch(n int64) (off int64) {
	off = b.p.Scratch
	b.p.Scratch += n
	return off
}

// area is a range of a buffer that goes through the stages as one chunk.
type area struct {
	cuts   [][]int64 // by cluster: the parts of its ranks
	root   int       // the cluster that sends, or that gets the result; of an all-reduce -1
	single bool
}

// ranges cuts n bytes into chunks that each cluster can cut evenly. What is left over is one more.
func (b *planner) ranges(n int64) (chunks [][2]int64, rest bool) {
	grain := b.l.grain() * b.Elem
	bulk := n / grain * grain
	if bulk < n/2 {
		bulk, grain = n, b.Elem
	}
	chunk := bulk
	if b.Chunk > 0 {
		k := max(1, (bulk+b.Chunk/2)/b.Chunk)
		chunk = max(grain, (bulk/k+grain-1)/grain*grain)
	}
	for lo := int64(0); lo < bulk; lo += chunk {
		chunks = append(chunks, [2]int64{lo, min(lo+chunk, bulk)})
	}
	if bulk < n {
		chunks = append(chunks, [2]int64{bulk, n})
	}
	return chunks, bulk < n
}

// whole plans the collectives on one buffer: all-reduce, reduce and broadcast.
func (b *planner) whole() {
	root := -1
	if b.Op != plan.OpAllReduce {
		root = b.l.cluster[b.Root]
	}
	leaders := b.leaders()
	add := func(lo, hi int64, single bool) (a area) {
		a.root, a.single = root, single
		for c, m := range b.l.members {
			if !single {
				a.cuts = append(a.cuts, b.l.cut(c, lo, hi, b.Elem))
				continue
			}
			at := slices.Repeat([]int64{lo}, len(m)+1)
			for i := b.l.place[leaders[c]] + 1; i <= len(m); i++ {
				at[i] = hi
			}
			a.cuts = append(a.cuts, at)
		}
		return a
	}
	if b.Bytes == 0 {
		return
	}
	if b.Single {
		b.pipeline([]area{add(0, b.Bytes, true)}, []int{0}, 1, nil)
		return
	}
	chunks, rest := b.ranges(b.Bytes)
	areas, order := make([]area, len(chunks)), make([]int, len(chunks))
	for k, r := range chunks {
		areas[k], order[k] = add(r[0], r[1], rest && k == len(chunks)-1), k
	}
	b.pipeline(areas, order, ahead, nil)
}

// around plans an all-reduce whose blocks go around a ring.
func (b *planner) around() {
	size, at := int64(b.l.Ranks()), int64(0)
	ranks := make([]int, size)
	for r := range ranks {
		ranks[r] = r
	}
	n := b.Bytes / b.Elem
	for k := range size {
		block := n / size * b.Elem
		if k < n%size {
			block += b.Elem
		}
		if b.chunk = int(k); block > 0 {
			b.between(b.Op, ranks, b.chunk, plan.Out, at, block)
		}
		at += block
	}
	for b.chunk = range int(size) {
		b.finish()
	}
	b.p.Chunks = int(size)
}

// blocks plans the collectives with a block for each rank: reduce-scatter and all-gather. An area
// has blocks of one cluster.
func (b *planner) blocks() {
	size, start := b.l.Ranks(), b.starts()
	if n := start[size]; b.Counts == nil && b.Chunk == 0 && n > 0 && n <= inColumns && b.grid() {
		b.columns()
		return
	}
	own, n := start[b.Rank], start[b.Rank+1]-start[b.Rank]
	if b.Op == plan.OpAllGather && n > 0 {
		b.p.Steps = append(b.p.Steps, Step{
			Op: plan.OpAllToAll, Ranks: []int{b.Rank}, Src: plan.In, Parts: []Part{{Dst: own, Len: n}},
		})
	}
	var areas []area
	for lo := 0; lo < size; {
		hi, root := lo+1, b.l.cluster[lo]
		for hi < size && b.l.cluster[hi] == root {
			hi++
		}
		for at := start[lo]; at < start[hi]; {
			next := start[hi]
			if b.Chunk > 0 && next-at > b.Chunk {
				next = at + max(b.Elem, b.Chunk/b.Elem*b.Elem)
			}
			a := area{root: root}
			for c, m := range b.l.members {
				if c != root && next-at < wholeBlocks*int64(len(m)) && at == start[lo] && next == start[hi] {
					a.cuts = append(a.cuts, b.l.cutBlocks(c, start[lo:hi+1], lo))
					continue
				}
				if c != root {
					a.cuts = append(a.cuts, b.l.cut(c, at, next, b.Elem))
					continue
				}
				cut := make([]int64, 0, len(m)+1)
				for _, r := range m {
					cut = append(cut, min(max(start[r], at), next))
				}
				a.cuts = append(a.cuts, append(cut, next))
			}
			areas = append(areas, a)
			at = next
		}
		lo = hi
	}
	// All areas begin before the first one ends, so no cluster waits for the link of another one. A
	// cluster begins with the blocks of the next one.
	order := make([]int, len(areas))
	for i := range order {
		order[i] = i
	}
	behind := func(k int) int {
		n := len(b.l.members)
		return (areas[k].root - b.mine + n - 1) % n
	}
	slices.SortStableFunc(order, func(x, y int) int { return behind(x) - behind(y) })
	b.pipeline(areas, order, len(areas), start)
}

// inColumns is the length of all blocks up to which copies of them cost less than a step inside for
// each cluster's blocks.
const inColumns = 128 << 10

// grid reports whether all clusters have as many ranks, all with one share of the traffic.
func (b *planner) grid() bool {
	for _, m := range b.l.members {
		if len(m) != len(b.here) {
			return false
		}
		for _, r := range m {
			if b.l.weights[r] != b.l.weights[m[0]] {
				return false
			}
		}
	}
	return true
}

// columns plans a reduce-scatter or an all-gather of short blocks in clusters of as many ranks. Column
// i has the blocks of the ranks at place i, by cluster. The rank at place i handles it. Columns lie
// one after the other in scratch memory, so there is one step inside.
func (b *planner) columns() {
	n, k, clusters := b.Bytes, len(b.here), len(b.l.members)
	width := n * int64(clusters)
	all, mine := b.takeScratch(width*int64(k)), b.takeScratch(width)
	local := func(src, dst plan.Buffer, parts ...Part) {
		b.p.Steps = append(b.p.Steps, Step{Op: plan.OpAllToAll, Ranks: []int{b.Rank}, Src: src, Dst: dst, Parts: parts})
	}
	var blocks, columns []Part // from their places in scratch memory
	for i := range k {
		for c, m := range b.l.members {
			blocks = append(blocks, Part{Src: all + int64(i*clusters+c)*n, Dst: int64(m[i]) * n, Len: n})
		}
		columns = append(columns, Part{From: i, To: i, Src: all + int64(i)*width, Dst: mine, Len: width})
	}
	between := func() {
		for c := range clusters {
			column := make([]int, clusters)
			for d, m := range b.l.members {
				column[d] = m[b.place]
			}
			b.ids = c*k + b.place
			b.between(pieceOp[b.Op], column, c, plan.Scratch, mine+int64(c)*n, n)
		}
		b.finish()
		b.ids = clusters * k
	}
	own := mine + int64(b.mine)*n
	if b.Op == plan.OpReduceScatter {
		for i, p := range blocks {
			blocks[i].Src, blocks[i].Dst = p.Dst, p.Src
		}
		local(plan.In, plan.Scratch, blocks...)
		s := b.inside(Before, plan.OpReduceScatter, columns...)
		s.Src, s.Dst = plan.Scratch, plan.Scratch
		between()
		local(plan.Scratch, plan.Out, Part{Src: own, Len: n})
		return
	}
	local(plan.In, plan.Scratch, Part{Dst: own, Len: n})
	between()
	for i, p := range columns {
		columns[i].Src, columns[i].Dst = p.Dst, p.Src
	}
	s := b.inside(After, plan.OpAllGather, columns...)
	s.Src, s.Dst = plan.Scratch, plan.Scratch
	local(plan.Scratch, plan.Out, blocks...)
}

// pipeline lets areas go through the stages, in this order. So many have begun between clusters
// before the first one has to end. All ranks end them in the order of the list, so they cannot wait
// for each other in a circle. With Apart each ends them in its own order, for which all have to begin first.
func (b *planner) pipeline(areas []area, order []int, begun int, start []int64) {
	ids := make([]int, len(areas))
	cut := make([][]piece, len(areas))
	for k, a := range areas {
		cut[k] = b.l.pieces(a.cuts)
		ids[k] = b.ids
		b.ids += len(cut[k])
	}
	ends := make([]func(), len(areas))
	total := b.ids
	for i := range len(areas) + begun - 1 {
		if i < len(areas) {
			k := order[i]
			b.chunk, b.ids = k, ids[k]
			ends[k] = b.begin(areas[k], cut[k], start)
		}
		if k := i - begun + 1; k >= 0 && k < len(areas) {
			if b.Apart {
				k = order[k]
			}
			b.chunk = k
			b.finish()
			ends[k]()
		}
	}
	b.ids = total
	b.p.Chunks = len(areas)
}

// pieceOp is what becomes of a piece between clusters. In a reduce-scatter and an all-gather it is
// a part of one rank's block.
var pieceOp = [...]plan.Op{
	plan.OpAllReduce: plan.OpAllReduce, plan.OpReduce: plan.OpReduce, plan.OpReduceScatter: plan.OpReduce,
	plan.OpBroadcast: plan.OpBroadcast, plan.OpAllGather: plan.OpBroadcast,
}

// begin adds the steps of an area until its pieces are between clusters. The function that it
// returns adds those after that.
func (b *planner) begin(a area, pieces []piece, start []int64) (end func()) {
	cut := a.cuts[b.mine]
	lo, hi := cut[0], cut[len(cut)-1]
	own := make([]Part, len(b.here)) // the parts of this cluster's ranks, in place
	for i := range own {
		own[i] = Part{From: i, To: i, Src: cut[i], Dst: cut[i], Len: cut[i+1] - cut[i]}
	}
	all := func(from int) Part { return Part{From: from, Src: lo, Dst: lo, Len: hi - lo} }
	atRoot, root := a.root == b.mine, b.l.place[b.Root]
	buf, shift := plan.Out, int64(0) // where this rank's pieces are
	spread := func() { b.inside(After, plan.OpAllGather, own...) }
	end = func() {}
	switch b.Op {
	case plan.OpAllReduce:
		b.inside(Before, plan.OpReduceScatter, own...)
		end = spread
	case plan.OpReduce:
		b.inside(Before, plan.OpReduceScatter, own...)
		if atRoot && !a.single {
			for i := range own {
				own[i].To = root
			}
			end = func() { b.inside(After, plan.OpGather, own...).Root = root }
		}
	case plan.OpBroadcast:
		switch {
		case !atRoot:
			end = spread
		case a.single: // the root itself sends first
			defer func() { b.inside(After, plan.OpAllGather, all(root)) }()
		default:
			b.inside(Before, plan.OpAllGather, all(root))
		}
	case plan.OpReduceScatter:
		if atRoot {
			shift = -start[b.Rank]
		} else {
			buf = plan.Scratch
			shift = b.takeScratch(own[b.place].Len) - own[b.place].Src
		}
		own[b.place].Dst += shift
		s := b.inside(Before, plan.OpReduceScatter, own...)
		s.Src, s.Dst = plan.In, buf
	case plan.OpAllGather:
		if atRoot {
			defer spread()
		} else {
			end = spread
		}
	}
	for _, p := range pieces {
		b.between(pieceOp[b.Op], p.owner, max(a.root, 0), buf, p.lo+shift, p.hi-p.lo)
	}
	return end
}

// gather plans a gather: blocks that go together are collected on one rank of their cluster. The
// messages are numbered by the rank that sends, because ranks do not know all lengths.
func (b *planner) gather() {
	start := b.starts()
	rootCluster, leaders := b.l.cluster[b.Root], b.leaders()
	var unpack []Step
	for c, m := range b.l.members {
		if c == rootCluster || c != b.mine && b.Rank != b.Root {
			continue
		}
		lengths, sum := make([]int64, len(m)), int64(0)
		for i, r := range m {
			lengths[i] = start[r+1] - start[r]
			sum += lengths[i]
		}
		if len(m) == 1 || sum > int64(togetherRooted*len(m)) {
			for i, r := range m {
				buf, off := plan.In, int64(0)
				if b.Rank == b.Root {
					buf, off = plan.Out, start[r]
				}
				b.message(r, r, b.Root, buf, off, lengths[i])
			}
			continue
		}
		leader := b.l.place[leaders[c]]
		extra := int64(0)
		if b.Counts != nil {
			extra = sealed
		}
		at := b.takeScratch(sum + extra)
		if b.mine == c {
			b.collect(Before, leader, plan.Scratch, func(i int) (int64, int64) {
				off := at
				for _, n := range lengths[:i] {
					off += n
				}
				return off, lengths[i]
			})
		}
		s := b.message(leaders[c], leaders[c], b.Root, plan.Scratch, at, sum+extra)
		if extra > 0 {
			s.Seal = seal(lengths)
		}
		if b.Rank == b.Root {
			u := Step{Stage: After, Op: plan.OpAllToAll, Ranks: []int{b.Rank}, Src: plan.Scratch}
			for i, r := range m {
				u.Parts = append(u.Parts, Part{Src: at, Dst: start[r], Len: lengths[i]})
				at += lengths[i]
			}
			unpack = append(unpack, u)
		}
	}
	if b.mine == rootCluster {
		b.collect(After, b.l.place[b.Root], plan.Out, func(i int) (int64, int64) {
			r := b.here[i]
			return start[r], start[r+1] - start[r]
		})
	}
	b.finish()
	b.p.Steps = append(b.p.Steps, unpack...)
	b.ids = b.l.Ranks()
}

// collect adds a gather inside to one rank's buffer.
func (b *planner) collect(stage Stage, to int, buf plan.Buffer, place func(i int) (off, n int64)) {
	parts := make([]Part, len(b.here))
	for i := range parts {
		off, n := place(i)
		parts[i] = Part{From: i, To: to, Dst: off, Len: n}
	}
	s := b.inside(stage, plan.OpGather, parts...)
	s.Root, s.Src, s.Dst = to, plan.In, buf
}

// starts returns where the ranks' blocks begin, and the end of the last one.
func (b *planner) starts() []int64 {
	start := make([]int64, b.l.Ranks()+1)
	for r := range b.l.Ranks() {
		n := b.Bytes
		if b.Counts != nil {
			n = b.Counts[r]
		}
		start[r+1] = start[r] + n
	}
	return start
}

// scatter plans a scatter: blocks that go together are spread by one rank of their cluster.
func (b *planner) scatter() {
	n := b.Bytes
	rootCluster, leaders := b.l.cluster[b.Root], b.leaders()
	spread := func(from int, buf plan.Buffer, place func(i int) int64) {
		parts := make([]Part, len(b.here))
		for i := range parts {
			parts[i] = Part{From: from, To: i, Src: place(i), Len: n}
		}
		s := b.inside(After, plan.OpScatter, parts...)
		s.Root, s.Src, s.Dst = from, buf, plan.Out
	}
	for c, m := range b.l.members {
		if c == rootCluster || c != b.mine && b.Rank != b.Root {
			continue
		}
		if len(m) == 1 || n > togetherRooted {
			for _, r := range m {
				buf, off := plan.Out, int64(0)
				if b.Rank == b.Root {
					buf, off = plan.In, int64(r)*n
				}
				b.message(r, b.Root, r, buf, off, n)
			}
			continue
		}
		all := n * int64(len(m))
		at := b.takeScratch(all)
		if b.Rank == b.Root && n > 0 {
			pack := Step{Op: plan.OpAllToAll, Ranks: []int{b.Rank}, Src: plan.In, Dst: plan.Scratch}
			for i, r := range m {
				pack.Parts = append(pack.Parts, Part{Src: int64(r) * n, Dst: at + int64(i)*n, Len: n})
			}
			b.p.Steps = append(b.p.Steps, pack)
		}
		b.message(leaders[c], b.Root, leaders[c], plan.Scratch, at, all)
		if c == b.mine {
			b.finish()
			spread(b.l.place[leaders[c]], plan.Scratch, func(i int) int64 { return at + int64(i)*n })
			b.ids = b.l.Ranks()
			return
		}
	}
	if b.mine == rootCluster {
		spread(b.l.place[b.Root], plan.In, func(i int) int64 { return int64(b.here[i]) * n })
	}
	b.finish()
	b.ids = b.l.Ranks()
}

// allToAll plans an all-to-all. Of a cluster with k ranks, number h modulo k handles the blocks that
// go together to and from cluster h.
func (b *planner) allToAll() {
	size, k := b.l.Ranks(), len(b.here)
	sends, recvs := b.Send, b.Recv
	if sends == nil {
		sends = slices.Repeat([][]int64{slices.Repeat([]int64{b.Bytes}, size)}, k)
		recvs = sends
	}
	before := func(lengths []int64) []int64 { // where each block begins
		at := make([]int64, len(lengths)+1)
		for i, n := range lengths {
			at[i+1] = at[i] + n
		}
		return at
	}
	ins, outs := make([][]int64, k), make([][]int64, k)
	for i := range k {
		ins[i], outs[i] = before(sends[i]), before(recvs[i])
	}
	type bundle struct {
		cluster int
		lengths []int64
		sum, at int64
	}
	handler := func(h int) int { return h % k }
	take := func(x *bundle) {
		if handler(x.cluster) == b.place {
			x.at = b.takeScratch(x.sum + sealed)
		}
	}
	opposite := func(h int) int { m := b.l.members[h]; return m[b.mine%len(m)] }
	var going, coming []bundle
	for h, m := range b.l.members {
		if h == b.mine {
			continue
		}
		gone, come := bundle{cluster: h}, bundle{cluster: h}
		for i := range k {
			for _, r := range m {
				gone.lengths, gone.sum = append(gone.lengths, sends[i][r]), gone.sum+sends[i][r]
			}
		}
		for _, r := range m {
			for i := range k {
				come.lengths, come.sum = append(come.lengths, recvs[i][r]), come.sum+recvs[i][r]
			}
		}
		most := int64(together * k * len(m))
		if k*len(m) > 1 && gone.sum <= most {
			take(&gone)
			going = append(going, gone)
		} else {
			for _, r := range m {
				b.message(b.Rank*size+r, b.Rank, r, plan.In, ins[b.place][r], sends[b.place][r])
			}
		}
		if k*len(m) > 1 && come.sum <= most {
			take(&come)
			coming = append(coming, come)
		} else {
			for _, r := range m {
				b.message(r*size+b.Rank, r, b.Rank, plan.Out, outs[b.place][r], recvs[b.place][r])
			}
		}
	}
	mine := func(p Part) bool { return p.From == b.place || p.To == b.place }
	exchange := func(stage Stage, src, dst plan.Buffer, parts []Part) {
		s := b.inside(stage, plan.OpAllToAll, parts...)
		s.Src, s.Dst = src, dst
	}
	if len(going) > 0 {
		var parts []Part
		for _, x := range going {
			at := x.at
			for i := range k {
				for _, r := range b.l.members[x.cluster] {
					p := Part{From: i, To: handler(x.cluster), Src: ins[i][r], Dst: at, Len: sends[i][r]}
					if at += p.Len; mine(p) {
						parts = append(parts, p)
					}
				}
			}
		}
		exchange(Before, plan.In, plan.Scratch, parts)
	}
	// Blocks that go together have the number of the block between these two ranks, which then does not go alone. So if
	// the other cluster expects that block alone, it gets a message of the wrong length and notices.
	pass := func(x bundle, from, to int) {
		if handler(x.cluster) == b.place {
			b.message(from*size+to, from, to, plan.Scratch, x.at, x.sum+sealed).Seal = seal(x.lengths)
		}
	}
	for _, x := range coming {
		pass(x, opposite(x.cluster), b.Rank)
	}
	for _, x := range going {
		pass(x, b.Rank, opposite(x.cluster))
	}
	var parts []Part
	for i, from := range b.here {
		for j, to := range b.here {
			p := Part{From: i, To: j, Src: ins[i][to], Dst: outs[j][from], Len: sends[i][to]}
			if mine(p) {
				parts = append(parts, p)
			}
		}
	}
	exchange(After, plan.In, plan.Out, parts)
	b.finish()
	if len(coming) > 0 {
		parts = nil
		for _, x := range coming {
			at := x.at
			for _, r := range b.l.members[x.cluster] {
				for i := range k {
					p := Part{From: handler(x.cluster), To: i, Src: at, Dst: outs[i][r], Len: recvs[i][r]}
					if at += p.Len; mine(p) {
						parts = append(parts, p)
					}
				}
			}
		}
		exchange(After, plan.Scratch, plan.Out, parts)
	}
	b.ids = size * size
}

// sealed is the length of a seal.
const sealed = 8

// seal returns what stands for lengths at the end of a message. It is not 0.
func seal(lengths []int64) uint64 {
	h := fnv.New64a()
	var b [8]byte
	for _, n := range lengths {
		binary.LittleEndian.PutUint64(b[:], uint64(n))
		h.Write(b[:])
	}
	return max(h.Sum64(), 1)
}

// scale returns n*a/b for n and a of at least 0, and b of at least a and above 0.
func scale(n, a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(n), uint64(a))
	q, _ := bits.Div64(hi, lo, uint64(b))
	return int64(q)
}
