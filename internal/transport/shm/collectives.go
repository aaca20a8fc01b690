package shm

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/internal/copies"
)

// start begins a collective; the caller holds g.mu.
func (g *Group) start(h header, stop func() error) error {
	if err := g.failure.Load(); err != nil {
		return *err
	}
	if err := g.aborted(); err != nil {
		return err
	}
	h.history = g.history
	g.op, g.stop, g.room = h, stop, g.roomFor(&h)
	return g.uncalled()
}

// pipeline runs n pieces of a collective. stage fills this rank's slot with piece k. It is nil
// if this rank sends nothing. take uses piece k of the call, which is piece p of the group,
// after this rank has published it. It may be nil.
//
// A rank publishes piece k+1 before it takes piece k, so that others need not wait for it.
// Slots can be used again because of this: a rank that has published piece p no longer reads
// pieces before p-1.
func (g *Group) pipeline(n int, stage func(k int, data []byte), take func(k int, p uint32) error) error {
	first := g.next
	if g.posted { // the only piece
		g.posted = false
		err := take(0, first-1)
		g.claimNext()
		return err
	}
	for k := -1; k < n; k++ {
		if k+1 < n {
			p := first + uint32(k+1)
			if stage != nil {
				if err := g.reserve(p); err != nil {
					return err
				}
				stage(k+1, g.staged(g.self, p))
				g.publish(p)
				if take == nil {
					if err := g.look(p); err != nil {
						return err
					}
				}
			} else {
				g.publishEmpty()
			}
		}
		if k >= 0 && take != nil {
			if err := take(k, first+uint32(k)); err != nil {
				return err
			}
		}
	}
	g.claimNext()
	return nil
}

// claimNext asks the CPU for the cache lines of the next piece, if this one is small and every rank has sent one. The next
// is likely to be as long. The other ranks have read an earlier piece there, so the lines are in their caches. Without
// claimNext a rank would wait for the lines when it publishes. Where some ranks only send, that
// wait holds up nobody.
//
// Others may poll the header's line already. Two ranks on an EPYC gain if they claim it too: a barrier takes 0.78 of the
// time. On a Xeon an all_reduce of 4 bytes took 1.06 of the time.
func (g *Group) claimNext() {
	switch g.op.kind {
	case opAllReduce, opAllGather, opBarrier:
	default:
		return
	}
	if g.size == 2 && g.fast {
		copies.Claim(g.self.slots[g.next%depth].head)
	}
	if n := g.op.bytes; n > besideBytes && n <= earlyBytes {
		copies.Claim(g.staged(g.self, g.next)[:n])
	}
}

// markPublished publishes piece p, whose slot and header are ready.
func (g *Group) markPublished(p uint32) {
	g.next = p + 1
	if int32(p-apart-g.seen) > 0 { // a rank that only receives does not look
		g.seen = p - apart
	}
	g.announce(g.self.slots[p%depth].in, p+1)
}

// apart is more pieces than lie between any two ranks.
const apart = 1 << 16

// free returns how many pieces all ranks must have published before piece p may be written to such
// a place: then no rank reads what was there.
func (r room) free(p uint32) uint32 {
	if r == large {
		return p - largeDepth + 3
	}
	return p - depth + 3
}

// enough returns how many pieces all ranks must have published until a rank that has to look goes on
// with piece p. It is more than free for small pieces, so that the rank does not look in each call.
func (r room) enough(p uint32) uint32 {
	if r == large {
		return r.free(p)
	}
	return p - depth/2
}

// reserve waits until no rank reads the piece that p replaces. A rank that only sends, as the root of a broadcast, waits
// nowhere else.
func (g *Group) reserve(p uint32) error {
	if g.sawAll(g.room.free(p)) {
		return nil
	}
	need := g.room.enough(p)
	for r := range g.segs {
		if r != g.rank {
			if err := g.wait(r, g.segs[r].slots[(need-1)%depth].in, need); err != nil {
				return err
			}
		}
	}
	g.seen = need
	return nil
}

// look compares the call with those of the ranks that have published piece p by now. A rank that only sends calls it when it
// has published the piece. Another rank that only sends does the same, so the later of the two finds the other's header. It
// is still there: its owner does not write the slot again before this rank has published the next pieces.
func (g *Group) look(p uint32) error {
	for r := range g.segs {
		if r == g.rank {
			continue
		}
		s := &g.segs[r].slots[p%depth]
		if got := s.op; reached(s.in, p+1) && got.isOf(p) && got.history != g.op.history {
			return g.mismatch(r, *got, g.op)
		}
	}
	return nil
}

// waitPiece waits for what rank r has staged of piece p, and returns it.
func (g *Group) waitPiece(r int, p uint32) ([]byte, error) {
	s := &g.segs[r].slots[p%depth]
	if err := g.wait(r, s.in, p+1); err != nil {
		return nil, err
	}
	if !s.op.isFor(&g.op, p) {
		want := g.op
		want.piece = p
		return nil, g.mismatch(r, *s.op, want)
	}
	return g.staged(&g.segs[r], p), nil
}

// staged returns where a rank stages piece p of this call.
func (g *Group) staged(s *segment, p uint32) []byte {
	switch slot := &s.slots[p%depth]; g.room {
	case beside:
		return slot.beside[:]
	case small:
		return slot.small
	default:
		return slot.large
	}
}

// besideBytes is how much there is room for beside a header. So one cache line brings a piece
// of that size.
const besideBytes = 32

// roomFor returns where the pieces of a call lie. Only collectives with a root have small pieces,
// because in the others no rank can run ahead.
func (g *Group) roomFor(h *header) room {
	n := h.bytes
	switch h.kind {
	case opBarrier:
		return beside
	case opAllReduce, opReduce:
		if n > uint64(g.oneShot) {
			return large
		}
	case opScatter:
		n = uint64(g.size * g.blockRoom(int(min(n, smallBytes))))
	case opBroadcast, opAllGather, opGather:
	default:
		return large
	}
	switch {
	case n <= besideBytes:
		return beside
	case n <= smallBytes && h.kind != opAllReduce && h.kind != opAllGather:
		return small
	}
	return large
}

// blockRoom returns how much room a block of n bytes takes in a slot with a block for each rank.
func (g *Group) blockRoom(n int) int {
	if n*g.size <= besideBytes {
		return max(n, 1)
	}
	if up := (n + 63) &^ 63; up*g.size <= smallBytes {
		return up
	}
	return g.blockPiece()
}

// allPublished notes that every rank has published piece p.
func (g *Group) allPublished(p uint32) {
	if int32(p+1-g.seen) > 0 {
		g.seen = p + 1
	}
}

func pieces(n, piece int) int { return (n + piece - 1) / piece }

// cut returns piece k of b.
func cut(b []byte, k, piece int) []byte {
	lo := min(k*piece, len(b))
	return b[lo:min(lo+piece, len(b))]
}

// unit returns what pieces and shares are multiples of: whole elements and whole cache lines.
func unit(elem int) int {
	a, b := 64, elem
	for b != 0 {
		a, b = b, a%b
	}
	return 64 / a * elem
}

// share returns the part of n bytes that rank r reduces.
func share(n, r, ranks, unit int) (lo, hi int) {
	per := ((n+unit-1)/unit + ranks - 1) / ranks * unit
	return min(r*per, n), min((r+1)*per, n)
}

// same reports whether a and b, which have the same length, are the same memory.
func same(a, b []byte) bool { return unsafe.SliceData(a) == unsafe.SliceData(b) }

// copyTo is copy in stretches, because a goroutine cannot be stopped for a garbage collection
// while it copies. It does nothing if both are the same memory.
func copyTo(dst, src []byte) {
	if same(dst, src) {
		return
	}
	for len(dst) > 0 && len(src) > 0 {
		n := copies.Bytes(dst[:min(len(dst), stretch)], src)
		dst, src = dst[n:], src[n:]
	}
}

// stretch takes about 50 us to copy.
const stretch = 1 << 20

// Operator is how elements are combined.
type Operator struct {
	Elem int // bytes of an element, 1 to MaxElem

	// Combine does dst = dst op src on whole elements.
	Combine func(dst, src []byte)

	// Join does dst = (operands[0] op operands[1]) op ... on whole elements, with the same bits as
	// Combine. dst may be one of the operands. It may be nil.
	Join func(dst []byte, operands [][]byte)
}

// check returns what is wrong with o, or with n bytes of its elements.
func (o *Operator) check(n int) error {
	switch {
	case o.Elem < 1 || o.Elem > MaxElem:
		return fmt.Errorf("shm: elements of %d bytes, want 1 to %d", o.Elem, MaxElem)
	case n%o.Elem != 0:
		return fmt.Errorf("shm: %d bytes are no whole number of elements of %d", n, o.Elem)
	case o.Combine == nil:
		return fmt.Errorf("shm: nil function to combine")
	}
	return nil
}

func (g *Group) checkRoot(root int) error {
	if root < 0 || root >= g.size {
		return fmt.Errorf("shm: root %d in a group of %d", root, g.size)
	}
	return nil
}

// blocks has a block for each rank, all of one size: one after the other, or a slice each.
type blocks struct {
	whole []byte
	each  [][]byte
}

// at returns the block of rank r, of n bytes.
func (b *blocks) at(r, n int) []byte {
	if b.each != nil {
		return b.each[r]
	}
	return b.whole[r*n:][:n]
}

// checkBlocks checks that there is a block for each rank, as long as one.
func (g *Group) checkBlocks(what string, all blocks, one []byte) error {
	if all.each == nil {
		if len(all.whole) != g.size*len(one) {
			return fmt.Errorf("shm: %s of %d bytes, want %d blocks of %d", what, len(all.whole), g.size, len(one))
		}
		return nil
	}
	if len(all.each) != g.size {
		return fmt.Errorf("shm: %s of %d blocks in a group of %d", what, len(all.each), g.size)
	}
	for r, b := range all.each {
		if len(b) != len(one) {
			return fmt.Errorf("shm: %s block %d has %d bytes, want %d", what, r, len(b), len(one))
		}
	}
	return nil
}

// AllReduce combines buf with those of the other ranks, element by element. All ranks get the
// same bits, for any size and timing: ((b0 op b1) op b2) ... in the order of the ranks.
func (g *Group) AllReduce(buf []byte, by Operator, stop func() error) error {
	if err := by.check(len(buf)); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opAllReduce, elem: uint8(by.Elem), bytes: uint64(len(buf))}, stop); err != nil || g.size == 1 {
		return err
	}
	g.by = by
	if len(buf) <= g.oneShot {
		return g.allReduceSmall(buf)
	}
	if g.exposes(never, g.mapped.AllReduce, len(buf)) {
		if ok, err := g.exposing(func() (bool, error) { return g.allReduceMapped(buf) }); ok || err != nil {
			return err
		}
	}
	return g.reduceShares(buf, -1)
}

// Reduce is AllReduce whose result only root gets, in out. Other ranks leave out nil. in is not
// changed, unless out is in.
func (g *Group) Reduce(out, in []byte, root int, by Operator, stop func() error) error {
	if err := by.check(len(in)); err != nil {
		return err
	}
	if err := g.checkRoot(root); err != nil {
		return err
	}
	if g.rank == root && len(out) != len(in) {
		return fmt.Errorf("shm: result of %d bytes, want %d", len(out), len(in))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opReduce, elem: uint8(by.Elem), root: uint16(root), bytes: uint64(len(in))}, stop); err != nil {
		return err
	}
	g.by = by
	if len(in) > g.oneShot && g.exposes(never, g.mapped.Reduce, len(in)) {
		if ok, err := g.exposing(func() (bool, error) { return g.reduceMapped(out, in, root) }); ok || err != nil {
			return err
		}
	}
	if g.rank == root {
		copyTo(out, in)
		in = out
	}
	if g.size == 1 {
		return nil
	}
	if len(in) <= g.oneShot {
		return g.reduceSmall(in, root)
	}
	return g.reduceShares(in, root)
}

// allReduceSmall reduces on every rank the buffers that all have staged.
func (g *Group) allReduceSmall(buf []byte) error {
	return g.pipeline(pieces(len(buf), g.piece), func(_ int, data []byte) { copies.Bytes(data, buf) },
		func(_ int, p uint32) error { return g.combineAll(buf, p) })
}

func (g *Group) reduceSmall(buf []byte, root int) error {
	if g.rank != root {
		return g.pipeline(pieces(len(buf), g.piece), func(_ int, data []byte) { copies.Bytes(data, buf) }, nil)
	}
	return g.allReduceSmall(buf)
}

// combineAll reduces the staged data of all ranks into buf, which holds this rank's.
func (g *Group) combineAll(buf []byte, p uint32) error {
	if err := g.waitOperands(p, 0, len(buf)); err != nil {
		return err
	}
	own := g.staged(g.self, p)
	if g.by.Join != nil {
		own = buf
	}
	g.srcs[g.rank] = own[:len(buf)]
	g.reduceOperands(buf)
	return nil
}

// waitOperands waits for piece p of all other ranks and notes bytes lo to hi of each in g.srcs.
func (g *Group) waitOperands(p uint32, lo, hi int) error {
	for i := 1; i < g.size; i++ {
		r := g.nth(i)
		data, err := g.waitPiece(r, p)
		if err != nil {
			return err
		}
		g.srcs[r] = data[lo:hi]
	}
	g.allPublished(p)
	return nil
}

// nth returns the rank that comes i ranks after this one. Ranks that begin with different ones do
// not all read from one.
func (g *Group) nth(i int) int {
	if r := g.rank + i; r < g.size {
		return r
	}
	return g.rank + i - g.size
}

// reduceShares reduces a share of each piece on every rank: out of the slots of the others into
// the slot of rank 0. All ranks read the result there, or only root.
//
// The first operand is rank 0's. Rank 0 reduces its share in its own buffer and does not stage
// it, as the others do not stage theirs. With another root, rank 0's buffer must not change, so
// it stages its share too.
func (g *Group) reduceShares(buf []byte, root int) error {
	u := unit(g.by.Elem)
	piece := g.piece / u * u
	inPlace := g.rank == 0 && root <= 0
	return g.pipeline(pieces(len(buf), piece),
		func(k int, data []byte) {
			// The word may be 2^31 pieces old, and then looks newer than p.
			p := g.next
			atomic.StoreUint32(g.self.slots[p%depth].reduced, p)
			b := cut(buf, k, piece)
			lo, hi := share(len(b), g.rank, g.size, u)
			if g.rank == 0 && !inPlace {
				hi = 0
			}
			copies.Bytes(data[:lo], b)
			copies.Bytes(data[hi:], b[hi:])
		},
		func(k int, p uint32) error {
			b := cut(buf, k, piece)
			lo, hi := share(len(b), g.rank, g.size, u)
			shared := g.segs[0].slots[p%depth].large
			acc := shared[lo:hi]
			if inPlace {
				acc = b[lo:hi]
			}
			if err := g.waitOperands(p, lo, hi); err != nil {
				return err
			}
			g.srcs[g.rank] = b[lo:hi]
			g.srcs[0] = acc
			g.reduceOperands(acc)
			if inPlace {
				copies.Bytes(shared[lo:hi], acc)
			}
			g.announce(g.self.slots[p%depth].reduced, p+1)
			if root >= 0 && g.rank != root {
				return nil
			}
			for i := range g.size {
				r := g.nth(i)
				lo, hi := share(len(b), r, g.size, u)
				if lo == hi || r == 0 && inPlace {
					continue
				}
				if err := g.wait(r, g.segs[r].slots[p%depth].reduced, p+1); err != nil {
					return err
				}
				copies.Bytes(b[lo:hi], shared[lo:hi])
			}
			return nil
		})
}

// reduceStep is how much of each operand more than two ranks combine at a time, if an operator has
// no Join. All begin with rank 0's operand. With a whole share, they would all wait for that CPU's cache, and then for
// the next one's. Times of 8 ranks on 16 CPUs in us, with whole shares and with 4 KiB:
//
//	              64 KiB   256 KiB
//	all-reduce    24  21   82  67
//	reduce        20  18   68  58
//	reduce-scatter 20  17   65  52
//
// From 1 MiB on there is no difference.
const reduceStep = 4 << 10

// reduceOperands combines g.srcs, one operand of each rank, in the order of the ranks into acc.
// acc may be the first operand, and any operand of an operator that has Join.
func (g *Group) reduceOperands(acc []byte) {
	defer clear(g.srcs)
	if g.by.Join != nil {
		g.by.Join(acc, g.srcs)
		return
	}
	step := len(acc)
	if g.size > 2 {
		u := unit(g.by.Elem)
		step = max(reduceStep/u, 1) * u
	}
	for at := 0; at < len(acc); at += step {
		end := min(at+step, len(acc))
		copyTo(acc[at:end], g.srcs[0][at:end])
		for _, src := range g.srcs[1:] {
			g.by.Combine(acc[at:end], src[at:end])
		}
	}
}

// ReduceScatter reduces in, which has a block for each rank, and gives each rank its block. The
// bits are those of AllReduce. in is not changed. out may be this rank's block of in, but must
// not overlap in otherwise.
func (g *Group) ReduceScatter(out, in []byte, by Operator, stop func() error) error {
	if err := by.check(len(out)); err != nil {
		return err
	}
	if err := g.checkBlocks("input", blocks{whole: in}, out); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opReduceScatter, elem: uint8(by.Elem), bytes: uint64(len(in))}, stop); err != nil {
		return err
	}
	g.by = by
	n := len(out)
	mine := in[g.rank*n:][:n]
	if g.size == 1 {
		copyTo(out, mine)
		return nil
	}
	if g.exposes(never, g.mapped.ReduceScatter, len(in)) {
		if ok, err := g.exposing(func() (bool, error) { return g.reduceScatterMapped(out, in) }); ok || err != nil {
			return err
		}
	}
	// An output that is the input's block is overwritten by other ranks'
	// operands before this rank's comes in: it is kept in the slot.
	keep := same(out, mine) && g.rank > 0 && by.Join == nil
	u := unit(by.Elem)
	piece := g.piece / g.size / u * u
	return g.pipeline(pieces(n, piece),
		func(k int, data []byte) {
			g.stageBlocks(data, blocks{whole: in}, n, k, piece)
			if keep {
				copies.Bytes(data[g.rank*piece:][:piece], cut(mine, k, piece))
			}
		},
		func(k int, p uint32) error {
			dst := cut(out, k, piece)
			at := g.rank * piece
			if err := g.waitOperands(p, at, at+len(dst)); err != nil {
				return err
			}
			g.srcs[g.rank] = cut(mine, k, piece)
			if keep {
				g.srcs[g.rank] = g.staged(g.self, p)[at:][:len(dst)]
			}
			g.reduceOperands(dst)
			return nil
		})
}

// Broadcast copies root's buf to the other ranks'.
func (g *Group) Broadcast(buf []byte, root int, stop func() error) error {
	if err := g.checkRoot(root); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opBroadcast, root: uint16(root), bytes: uint64(len(buf))}, stop); err != nil || g.size == 1 {
		return err
	}
	if g.exposes(never, g.mapped.Broadcast, len(buf)) {
		ok, err := g.copyExposed(rootExposes, buf, len(buf), func(int) ([]byte, int) { return buf, 0 })
		if ok || err != nil {
			return err
		}
	}
	return g.broadcastStaged(buf, root)
}

func (g *Group) broadcastStaged(buf []byte, root int) error {
	// The others wait for the first piece: the smaller, the sooner they copy while root does.
	piece := min(max(len(buf)/4&^(line-1), minPart), maxPart, g.piece)
	n := pieces(len(buf), piece)
	if g.rank == root {
		return g.pipeline(n, func(k int, data []byte) { copies.Bytes(data, cut(buf, k, piece)) }, nil)
	}
	return g.pipeline(n, nil, func(k int, p uint32) error {
		data, err := g.waitPiece(root, p)
		copies.Bytes(cut(buf, k, piece), data)
		return err
	})
}

// minPart and maxPart bound the pieces of a broadcast.
const minPart, maxPart = 16 << 10, 128 << 10

// AllGather gives each rank the in of all ranks, in the order of the ranks. in may be this
// rank's block of out, but must not overlap it otherwise.
func (g *Group) AllGather(out, in []byte, stop func() error) error {
	return g.allGather(blocks{whole: out}, in, stop)
}

// AllGatherList is AllGather into a slice for each rank. Some ranks may call this and others
// AllGather.
func (g *Group) AllGatherList(out [][]byte, in []byte, stop func() error) error {
	return g.allGather(blocks{each: out}, in, stop)
}

func (g *Group) allGather(out blocks, in []byte, stop func() error) error {
	if err := g.checkBlocks("output", out, in); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opAllGather, bytes: uint64(len(in))}, stop); err != nil {
		return err
	}
	n, mine := len(in), out.at(g.rank, len(in))
	if g.size == 1 {
		copyTo(mine, in)
		return nil
	}
	if g.exposes(g.reads.AllGather, g.mapped.AllGather, g.size*n) {
		copyTo(mine, in)
		ok, err := g.copyExposed(allToAll, in, n, func(r int) ([]byte, int) { return out.at(r, n), 0 })
		if ok || err != nil {
			return err
		}
	}
	return g.pipeline(pieces(n, g.piece),
		func(k int, data []byte) { copies.Bytes(data, cut(in, k, g.piece)) },
		func(k int, p uint32) error {
			copyTo(cut(mine, k, g.piece), cut(in, k, g.piece))
			return g.collect(out, n, k, p)
		})
}

// AllGatherV is AllGather for blocks of any size: rank r gives counts[r] bytes. All ranks must
// have the same counts.
func (g *Group) AllGatherV(out, in []byte, counts []int64, stop func() error) error {
	if err := g.checkCounts(out, in, counts); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.exposes(g.reads.AllToAll, g.mapped.AllGatherV, len(out)) {
		if err := g.start(header{kind: opAllGatherV, bytes: uint64(len(out))}, stop); err != nil {
			return err
		}
		copyTo(part(out, counts, g.rank), in)
		ok, err := g.copyExposed(allToAll, in, -1, func(r int) ([]byte, int) { return part(out, counts, r), 0 })
		if ok || err != nil {
			return err
		}
	}
	for root := range counts {
		buf := part(out, counts, root)
		if root == g.rank {
			copyTo(buf, in)
		}
		if err := g.start(header{kind: opBroadcast, root: uint16(root), bytes: uint64(len(buf))}, stop); err != nil {
			return err
		}
		if g.size == 1 {
			continue
		}
		if err := g.broadcastStaged(buf, root); err != nil {
			return err
		}
	}
	return nil
}

// part returns the block of rank r.
func part(out []byte, counts []int64, r int) []byte {
	lo := int64(0)
	for _, n := range counts[:r] {
		lo += n
	}
	return out[lo:][:counts[r]]
}

func (g *Group) checkCounts(out, in []byte, counts []int64) error {
	if len(counts) != g.size {
		return fmt.Errorf("shm: %d counts in a group of %d", len(counts), g.size)
	}
	left := int64(len(out))
	for r, n := range counts {
		if n < 0 || n > left {
			return fmt.Errorf("shm: count %d of rank %d, %d bytes of output are left", n, r, left)
		}
		left -= n
	}
	if left != 0 || counts[g.rank] != int64(len(in)) {
		return fmt.Errorf("shm: output of %d bytes and input of %d, want the sum of the counts and %d", len(out), len(in), counts[g.rank])
	}
	return nil
}

// Gather gives root the in of all ranks, in the order of the ranks. On other ranks out is nil.
// in may be root's block of out, but must not overlap out otherwise.
func (g *Group) Gather(out, in []byte, root int, stop func() error) error {
	return g.gather(blocks{whole: out}, in, root, stop)
}

// GatherList is Gather to a slice for each rank's block.
func (g *Group) GatherList(out [][]byte, in []byte, root int, stop func() error) error {
	return g.gather(blocks{each: out}, in, root, stop)
}

func (g *Group) gather(out blocks, in []byte, root int, stop func() error) error {
	if err := g.checkRoot(root); err != nil {
		return err
	}
	if g.rank == root {
		if err := g.checkBlocks("output", out, in); err != nil {
			return err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opGather, root: uint16(root), bytes: uint64(len(in))}, stop); err != nil {
		return err
	}
	n := len(in)
	if g.exposes(never, g.mapped.Gather, g.size*n) {
		if g.rank == root {
			copyTo(out.at(root, n), in)
		}
		ok, err := g.copyExposed(rootReads, in, n, func(r int) ([]byte, int) { return out.at(r, n), 0 })
		if ok || err != nil {
			return err
		}
	}
	if g.rank != root {
		return g.pipeline(pieces(n, g.piece), func(k int, data []byte) { copies.Bytes(data, cut(in, k, g.piece)) }, nil)
	}
	copyTo(out.at(root, n), in)
	return g.pipeline(pieces(n, g.piece), nil, func(k int, p uint32) error { return g.collect(out, n, k, p) })
}

// collect copies piece k of all other ranks to their blocks of out, which have n bytes.
func (g *Group) collect(out blocks, n, k int, p uint32) error {
	for i := 1; i < g.size; i++ {
		r := g.nth(i)
		data, err := g.waitPiece(r, p)
		if err != nil {
			return err
		}
		copies.Bytes(cut(out.at(r, n), k, g.piece), data)
	}
	g.allPublished(p)
	return nil
}

// Scatter gives each rank its block of root's in. in is nil elsewhere. out may be root's block
// of in, but must not overlap it otherwise.
func (g *Group) Scatter(out, in []byte, root int, stop func() error) error {
	return g.scatter(out, blocks{whole: in}, root, stop)
}

// ScatterList is Scatter from a slice for each rank's block.
func (g *Group) ScatterList(out []byte, in [][]byte, root int, stop func() error) error {
	return g.scatter(out, blocks{each: in}, root, stop)
}

func (g *Group) scatter(out []byte, in blocks, root int, stop func() error) error {
	if err := g.checkRoot(root); err != nil {
		return err
	}
	if g.rank == root {
		if err := g.checkBlocks("input", in, out); err != nil {
			return err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opScatter, root: uint16(root), bytes: uint64(len(out))}, stop); err != nil {
		return err
	}
	n := len(out)
	if g.size > 1 && g.exposes(g.reads.Scatter, g.mapped.Scatter, g.size*n) {
		if ok, err := g.scatterDirect(out, in); ok || err != nil {
			return err
		}
	}
	piece := g.blockRoom(n)
	if g.rank == root {
		copyTo(out, in.at(root, n))
		if g.size == 1 {
			return nil
		}
		return g.pipeline(pieces(n, piece), func(k int, data []byte) { g.stageBlocks(data, in, n, k, piece) }, nil)
	}
	return g.pipeline(pieces(n, piece), nil, func(k int, p uint32) error {
		data, err := g.waitPiece(root, p)
		if err != nil {
			return err
		}
		copies.Bytes(cut(out, k, piece), data[g.rank*piece:])
		return nil
	})
}

// blockPiece returns how much of a block is staged at a time if a slot has room for all ranks.
func (g *Group) blockPiece() int { return g.piece / g.size &^ 63 }

// stageBlocks copies piece k of every other rank's block of in, which have n bytes, into a
// slot.
func (g *Group) stageBlocks(data []byte, in blocks, n, k, piece int) {
	for r := range g.size {
		if r != g.rank {
			copies.Bytes(data[r*piece:][:piece], cut(in.at(r, n), k, piece))
		}
	}
}

// AllToAllV sends in[r], of any size, to rank r. out[r] comes from
// there and must have the length that rank r sends. None of these slices may overlap.
func (g *Group) AllToAllV(out, in [][]byte, stop func() error) error {
	if len(out) != g.size || len(in) != g.size {
		return fmt.Errorf("shm: %d outputs and %d inputs in a group of %d", len(out), len(in), g.size)
	}
	if len(out[g.rank]) != len(in[g.rank]) {
		return fmt.Errorf("shm: %d bytes to be copied to %d", len(in[g.rank]), len(out[g.rank]))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opAllToAllV}, stop); err != nil {
		return err
	}
	copyTo(out[g.rank], in[g.rank])
	if g.size == 1 {
		return nil
	}
	longest, err := g.exchangeLengths(out, in)
	short := g.shortBlock()
	if err != nil || longest <= short {
		return err
	}
	if g.exposes(g.reads.AllToAll, g.mapped.AllToAll, g.size*longest) {
		if ok, err := g.allToAllVDirect(out, in, short); ok || err != nil {
			return err
		}
	}
	piece := g.blockPiece()
	return g.pipeline(pieces(longest, piece),
		func(k int, data []byte) {
			for r, b := range in {
				if r != g.rank && len(b) > short {
					copies.Bytes(data[r*piece:][:piece], cut(b, k, piece))
				}
			}
		},
		func(k int, p uint32) error {
			for i := 1; i < g.size; i++ {
				r := g.nth(i)
				data, err := g.waitPiece(r, p)
				if err != nil {
					return err
				}
				if len(out[r]) > short {
					copies.Bytes(cut(out[r], k, piece), data[g.rank*piece:])
				}
			}
			g.allPublished(p)
			return nil
		})
}

// lengths returns how many bytes of a slot the lengths of a rank's blocks take.
func (g *Group) lengths() int { return (8*g.size + 63) &^ 63 }

// shortBlock returns the largest block that goes with the lengths: the slot has room for it,
// and it is too short for a single copy.
func (g *Group) shortBlock() int {
	n := max(g.piece-g.lengths(), 0) / g.size &^ 63
	l := g.reads.AllToAll
	if m := g.mapped.AllToAll; g.allocated && m >= 0 && (l < 0 || m < l) {
		l = m
	}
	if l >= 0 && int64(n)*int64(g.size) >= l {
		n = int(max(l-1, 0)) / g.size
	}
	return n
}

// exchangeLengths tells the others the lengths of in and compares out with theirs. It returns
// the longest block of all ranks, which sets the number of pieces. Blocks of up to shortBlock
// go with it.
func (g *Group) exchangeLengths(out, in [][]byte) (longest int, err error) {
	head, short := g.lengths(), g.shortBlock()
	err = g.pipeline(1,
		func(_ int, data []byte) {
			for r, b := range in {
				*word64(data, 8*r) = uint64(len(b))
				if r == g.rank {
					continue
				}
				longest = max(longest, len(b))
				if len(b) <= short {
					copies.Bytes(data[head+r*short:], b)
				}
			}
		},
		func(_ int, p uint32) error {
			for r := range g.segs {
				if r == g.rank {
					continue
				}
				data, err := g.waitPiece(r, p)
				if err != nil {
					return err
				}
				for to := range g.size {
					n := *word64(data, 8*to)
					if to == g.rank && n != uint64(len(out[r])) {
						return g.disagree(r, "rank %d sends %d bytes to rank %d, which expects %d", r, n, g.rank, len(out[r]))
					}
					if to != r {
						longest = max(longest, int(n))
					}
				}
			}
			for i := 1; i < g.size; i++ {
				r := g.nth(i)
				if n := len(out[r]); n <= short {
					data, err := g.waitPiece(r, p)
					if err != nil {
						return err
					}
					copies.Bytes(out[r], data[head+g.rank*short:][:n])
				}
			}
			g.allPublished(p)
			return nil
		})
	return longest, err
}

// Barrier returns once all ranks have called it.
func (g *Group) Barrier(stop func() error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.start(header{kind: opBarrier}, stop); err != nil || g.size == 1 {
		return err
	}
	return g.pipeline(1, func(int, []byte) {}, func(_ int, p uint32) error {
		for r := range g.segs {
			if r != g.rank {
				if _, err := g.waitPiece(r, p); err != nil {
					return err
				}
			}
		}
		g.allPublished(p)
		return nil
	})
}
