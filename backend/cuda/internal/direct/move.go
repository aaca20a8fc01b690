package direct

import (
	"fmt"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

// with returns the range from the first byte of two spans to the last. x may be empty.
func (x Span) with(o Span) Span {
	if x.N == 0 {
		return o
	}
	lo := min(x.Off, o.Off)
	return Span{lo, max(x.Off+x.N, o.Off+o.N) - lo}
}

// movement is a call that combines nothing: to each rank a span of src, from each one a span of dst.
// The spans of this rank itself are copied from one to the other.
type movement struct {
	what       string
	dst, src   driver.Ptr
	send, take [window.MostRanks]Span

	// most is the longest span of all ranks, where all know it. Else it is -1, and the kernels tell
	// each other.
	most    int
	blocks  int // see Form
	into    Into
	writers int // how many ranks write to one at a time; 0 means one
}

// StraightBytes is how long the spans are that a rank lets its peers write where they are to be.
const StraightBytes = 256 << 10

// open returns where a peer may write its span, and whether all may. Those who send nothing may. The longest
// span has to have at least so many bytes.
func (m *movement) open(rank, ranks, least int) (into [window.MostRanks]Place, open, told bool) {
	for r, x := range m.take[:ranks] {
		if r == rank || x.N == 0 {
			continue
		}
		at := m.dst + driver.Ptr(x.Off)
		if m.into.Region == 0 || at%16 != 0 || m.longest() < least {
			return [window.MostRanks]Place{}, false, false
		}
		into[r], told = At(m.into.Region, int(at-m.into.At)), true
	}
	return into, true, told
}

// longest returns the longest span that this rank takes.
func (m *movement) longest() (n int) {
	for _, x := range m.take {
		n = max(n, x.N)
	}
	return n
}

// unknownShape is the shape of calls whose longest span a rank does not know. All ranks need the same
// shape. 1024 warps have 2 MiB of tiles on their way, or 1 MiB with more than two ranks.
var unknownShape = Shape{Blocks: 64, Threads: 512, Large: true}

// move is a call that is one movement.
func (c *Comm) move(s Launcher, m *movement) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.launchMove(s, m)
}

// launchMove launches the kernel of a movement. The caller holds c.mu.
func (c *Comm) launchMove(s Launcher, m *movement) error {
	shape := unknownShape
	part := m.most
	if m.most >= 0 {
		shape = c.shape(max(part, 1), c.blocks(m.blocks), c.channels, c.ranks, Moves)
	} else {
		shape.Threads = min(shape.Threads, 32*c.channels)
		shape.Blocks = max(min(shape.Blocks, c.blocks(m.blocks), 32*c.channels/shape.Threads), 1)
	}
	var reads, writes Span // from the first byte to the last
	align := 0
	for r := range c.ranks {
		from, to := m.send[r], m.take[r]
		if from.N < 0 || to.N < 0 || m.src == 0 && from.N > 0 || m.dst == 0 && to.N > 0 {
			return fmt.Errorf("direct: %s of %d bytes at %v to rank %d, and of %d bytes at %v from there", m.what, from.N, m.src, r, to.N, m.dst)
		}
		if from.N > 0 {
			reads, align = reads.with(from), align|from.Off
		}
		if to.N > 0 {
			writes, align = writes.with(to), align|to.Off
		}
		part = max(part, from.N, to.N)
	}
	if err := c.w.Err(); err != nil {
		return fmt.Errorf("direct: %s: %w", m.what, err)
	}
	src, dst := m.src, m.dst
	if reads.N == 0 {
		src = dst
	}
	if writes.N == 0 {
		dst = src
	}
	x := &c.call
	x.Src, x.Dst, x.Part = src, dst, part
	x.Scaled, x.Align = 0, uint32(src|dst|driver.Ptr(align))
	x.Send, x.Take = m.send, m.take
	into, open, told := m.open(c.rank, c.ranks, c.o.straight)
	x.Into, x.Open, x.Told, x.Writers = into, flag(open), flag(told), uint32(max(m.writers, 1))
	return c.start(s, c.moves.all, shape, raw(x), driver.Reads(src+driver.Ptr(reads.Off), reads.N), driver.Writes(dst+driver.Ptr(writes.Off), writes.N))
}

// AllToAllV sends the span send[r] of src to rank r, and receives from rank r into the span take[r] of
// dst. The ranks need not know each other's lengths. A rank fails if a peer sends another length than
// it expects; see window.Failure. There is a span for each rank, in bytes.
func (c *Comm) AllToAllV(s Launcher, dst, src driver.Ptr, take, send []Span, form Form) error {
	m := movement{what: "all_to_all", dst: dst, src: src, most: -1, blocks: form.Blocks, into: form.Into}
	if len(take) != c.ranks || len(send) != c.ranks || take[c.rank].N != send[c.rank].N {
		return fmt.Errorf("direct: all_to_all of spans %v to spans %v, want one for each of %d ranks and the same length for this one", send, take, c.ranks)
	}
	copy(m.send[:], send)
	copy(m.take[:], take)
	return c.move(s, &m)
}

// Gather brings n bytes at src of each rank to dst of the root, in the order of the ranks.
func (c *Comm) Gather(s Launcher, dst, src driver.Ptr, n, root int, form Form) error {
	m := movement{what: "gather", dst: dst, src: src, most: n, blocks: form.Blocks, into: form.Into, writers: c.ranks - 1}
	m.send[root].N = n
	if c.rank == root {
		m.take = c.equal(n)
	}
	return c.some(s, &m, n)
}

// GatherV brings n bytes at src of each rank to dst of the root. The ranks may have any lengths, as in
// AllToAllV. Take has the root's spans, and is not used elsewhere.
func (c *Comm) GatherV(s Launcher, dst, src driver.Ptr, n int, take []Span, root int, form Form) error {
	m := movement{what: "gather", dst: dst, src: src, most: -1, blocks: form.Blocks, into: form.Into, writers: c.ranks - 1}
	m.send[root].N = n
	if c.rank == root {
		copy(m.take[:], take)
	}
	return c.move(s, &m)
}

// Scatter brings part r of the root's src, of n bytes, to rank r's dst.
func (c *Comm) Scatter(s Launcher, dst, src driver.Ptr, n, root int, form Form) error {
	m := movement{what: "scatter", dst: dst, src: src, most: n, blocks: form.Blocks, into: form.Into}
	m.take[root].N = n
	if c.rank == root {
		m.send = c.equal(n)
	}
	return c.some(s, &m, n)
}

// Broadcast brings n bytes at the root's at to the other ranks' at.
func (c *Comm) Broadcast(s Launcher, at driver.Ptr, n, root int, form Form) error {
	if c.ranks > 2 {
		if ok, err := c.begin("broadcast", at, at, n); !ok {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		others := everyone(c.ranks) &^ (1 << root)
		who := Roles{Givers: 1 << root, Owners: others, Takers: others}
		if c.rootedShots(n, form) {
			return c.bothShots(s, at, at, n, none, who, &c.moves, form)
		}
		x := step{dst: at, src: at, part: n, r: none, f: c.gathers.all, kind: Gathers, blocks: form.Blocks, roles: who}
		if c.rank == root {
			x.srcBytes = n
		} else {
			x.dstBytes = n
		}
		return c.enqueue(s, x)
	}
	m := movement{what: "broadcast", dst: at, src: at, most: n, blocks: form.Blocks, into: form.Into}
	for r := range c.ranks {
		if r != root && c.rank == root {
			m.send[r].N = n
		}
	}
	if c.rank != root {
		m.take[root].N = n
	}
	return c.some(s, &m, n)
}

// BroadcastSpreads reports whether Form.Into is of use to a broadcast of so many bytes.
func (c *Comm) BroadcastSpreads(bytes int, form Form) bool {
	return c.ranks == 2 || c.rootedSpreads(bytes, form, &c.moves)
}

// ReduceSpreads reports whether Form.Into is of use to a rank of a reduce. With two ranks it is to the one that is not
// the root: the root reads its input.
func (c *Comm) ReduceSpreads(n int, d tensor.DType, op backend.ReduceOp, root int, form Form) bool {
	if c.ranks == 2 {
		_, pulls := c.pullShape(n*d.Size(), d, op, form)
		return pulls && c.rank != root
	}
	return c.rank == root && c.rootedSpreads(n*d.Size(), form, c.forms(d))
}

// pullShape returns the shape of a reduce of two ranks, and whether its root reads the other rank's input, if it may.
// Reads are faster than the rings by 4 %, and begin and end later.
func (c *Comm) pullShape(bytes int, d tensor.DType, op backend.ReduceOp, form Form) (s Shape, pulls bool) {
	s, ok := c.spreadShape(bytes, d, op, form)
	return s, ok && bytes >= 512*c.o.straight
}

func (c *Comm) rootedSpreads(bytes int, form Form, f *forms) bool {
	if !c.rootedShots(bytes, form) {
		return false
	}
	_, spreads := c.bothShape(partOf(bytes, c.ranks-1), form, TwoShots, f)
	return spreads
}

// rootedShots reports whether a broadcast or a reduce takes two shots. Each rank but the root has a part then, and in
// some reduces the root too: see reducers. With two ranks that would be one part.
func (c *Comm) rootedShots(bytes int, form Form) bool {
	return c.ranks > 2 && twoShots(bytes, c.ranks-1, form)
}

// Reduce combines n elements at src of all ranks, to the root's dst. Dst is not used elsewhere. Src and the root's dst
// may be the same.
func (c *Comm) Reduce(s Launcher, dst, src driver.Ptr, n int, d tensor.DType, op backend.ReduceOp, root int, form Form) error {
	f := c.forms(d)
	r, err := reduction(op, d, c.ranks)
	if err != nil {
		return err
	}
	if c.rank != root {
		dst = src
	}
	if ok, err := c.begin("reduce", dst, src, n); !ok {
		return err
	}
	bytes := n * d.Size()
	c.mu.Lock()
	defer c.mu.Unlock()
	all, to := everyone(c.ranks), uint8(1)<<root
	if c.rootedShots(bytes, form) {
		who := Roles{Givers: all, Owners: c.reducers(bytes, all, to), Takers: to}
		return c.bothShots(s, dst, src, bytes, r, who, f, form)
	}
	x := step{dst: dst, src: src, part: bytes, srcBytes: bytes, dstBytes: bytes, r: r, f: f.all, blocks: form.Blocks}
	x.roles = Roles{Givers: all, Owners: to, Takers: to}
	if c.rank != root {
		// It takes part, and keeps nothing.
		x.dstBytes = 0
	}
	if c.ranks == 2 {
		if shape, pulls := c.pullShape(bytes, d, op, form); pulls {
			return c.pull(s, x, f.spread, shape, root, form)
		}
	}
	return c.enqueue(s, x)
}

// pull is a reduce of two ranks whose root reads the other one's input, if it may. The caller holds c.mu.
func (c *Comm) pull(s Launcher, x step, f driver.Function, shape Shape, root int, form Form) error {
	open := (x.src|x.dst)%16 == 0
	var at Place
	if c.rank != root {
		if open = open && form.Into.Region != 0; open {
			at = At(form.Into.Region, int(x.src-form.Into.At))
		}
	}
	return c.launchSpread(s, f, shape, x, x, at, open, driver.Reads(x.src, x.srcBytes), driver.Writes(x.dst, x.dstBytes))
}

// reducers returns the ranks that combine a part each in a reduce of two shots. The root gets all results, and its link
// limits a long reduce. So only the others combine there.
func (c *Comm) reducers(bytes int, all, root uint8) uint8 {
	if bytes <= c.o.rootReduces {
		return all
	}
	return all &^ root
}

// rootReducesUpTo is up to how many bytes the root of a reduce combines a part too.
const rootReducesUpTo = 4 << 20

// Barrier waits on the device until all ranks' barriers have begun.
func (c *Comm) Barrier(s Launcher) error {
	return c.move(s, &movement{what: "barrier"})
}

// some is move, unless there is nothing to do.
func (c *Comm) some(s Launcher, m *movement, n int) error {
	if n == 0 {
		return nil
	}
	return c.move(s, m)
}

// equal returns a span of n bytes for each rank, one after the other.
func (c *Comm) equal(n int) (all [window.MostRanks]Span) {
	for r := range c.ranks {
		all[r] = Span{r * n, n}
	}
	return all
}

// spread is the second half of an all_reduce of two ranks in two shots. Each has its part at its place, and gets the
// other one. The caller holds c.mu.
func (c *Comm) spread(s Launcher, at driver.Ptr, bytes int, form Form) error {
	part := partOf(bytes, c.ranks)
	if c.few(form, part) {
		m := movement{what: "all_gather", dst: at, src: at, most: part, blocks: form.Blocks, into: form.Into}
		for r := range c.ranks {
			if r != c.rank {
				m.take[r] = Span{r * part, min(part, bytes-r*part)}
				m.send[r] = Span{c.rank * part, min(part, bytes-c.rank*part)}
			}
		}
		return c.launchMove(s, &m)
	}
	mine := min(part, bytes-part*c.rank)
	return c.enqueue(s, step{
		dst: at, src: at + driver.Ptr(part*c.rank), part: part, srcBytes: mine, dstStep: part, dstBytes: bytes, r: none, f: c.gathers.all, kind: Gathers,
		blocks: form.Blocks,
	})
}
