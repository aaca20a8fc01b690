package plan

// maxSegment bounds a message of the ring. It is Gloo's number; both sides must have the same.
const maxSegment = 1 << 20

// AllReduceRing plans an all-reduce of bytes bytes in elements of elem: a ring
// reduce-scatter, then a ring all-gather (Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", 2009).
//
// The operand is cut into segments. Each rank has an equal number of them, at least two, so that
// one is on the wire while another is reduced. Every rank sends to rank-1 and receives from
// rank+1. Rank b owns the segments of block b, whose result is
//
//	acc = x[b-1]; for k = 2..size: acc = op(x[b-k], acc)
//
// with ranks taken modulo size and the local operand first. Each segment is
// computed once and copied, so all ranks end with the same bits.
func AllReduceRing(rank, size int, bytes, elem int64) *Plan {
	return allReduceRing(rank, size, bytes, elem, maxSegment)
}

func allReduceRing(rank, size int, bytes, elem, limit int64) *Plan {
	checkRank(rank, size)
	checkElements(bytes, elem)
	return build(16, func(b *builder) { b.glooRing(rank, size, bytes, elem, limit) })
}

func (b *builder) glooRing(rank, size int, bytes, elem, limit int64) {
	if bytes == 0 || size == 1 {
		return
	}
	p := int64(size)
	segments := roundUp(max(ceilDiv(bytes, elem*max(1, limit/elem)), 2*p), p)
	newRing(rank, size, bytes, segments, roundUp(ceilDiv(bytes, segments), elem), glooDepth).allReduce(b)
}

// allReduceRing is the ring of groups without PyTorch ranks. Blocks of at most chunk bytes are
// not cut, which saves a message for each rank and step. Larger ones are cut into messages of at
// most chunk bytes.
func (b *builder) allReduceRing(rank, size int, bytes, elem, chunk int64) {
	if bytes == 0 || size == 1 {
		return
	}
	p := int64(size)
	segments := p * ceilDiv(roundUp(ceilDiv(bytes, p), elem), max(chunk/elem*elem, elem))
	newRing(rank, size, bytes, segments, roundUp(ceilDiv(bytes, segments), elem), ringDepth).allReduce(b)
}

// AllReduceAround plans an all-reduce of one block. The block goes around the ring of ranks, from rank first on. Each
// rank combines its own operand with the block that has come. The result goes on around the ring until all ranks have
// it. With one block from each rank on, a rank sends 2(size-1) messages.
func AllReduceAround(rank, size, first int, bytes int64) *Plan {
	checkRank(rank, size)
	checkRoot(first, size)
	checkElements(bytes, 1)
	return build(8, func(b *builder) {
		if bytes == 0 || size == 1 {
			return
		}
		to, from, place := (rank+1)%size, (rank+size-1)%size, (rank+size-first)%size
		if place > 0 {
			b.scratch(bytes)
			b.wait(b.recv(from, Scratch, 0, bytes))
			b.local(Reduce, Out, 0, Scratch, 0, bytes)
		}
		b.wait(b.send(to, Out, 0, bytes)) // the last rank's is the result
		if place < size-1 {
			b.wait(b.recv(from, Out, 0, bytes))
		}
		if place < size-2 {
			b.wait(b.send(to, Out, 0, bytes))
		}
	})
}

// ReduceRing plans a reduction onto root: the reduce-scatter of
// [AllReduceRing], with segments cut a little differently, after which every
// other rank sends its block to root. The operands meet in the same order.
//
// Gloo's loop has two steps less than there are segments, however many each rank has. With more
// than two for each rank, the last steps carry segments that no rank needs, but peers wait for
// them.
func ReduceRing(rank, size, root int, bytes, elem int64) *Plan {
	return reduceRing(rank, size, root, bytes, elem, maxSegment)
}

func reduceRing(rank, size, root int, bytes, elem, limit int64) *Plan {
	checkRank(rank, size)
	checkRoot(root, size)
	checkElements(bytes, elem)
	return build(16, func(b *builder) {
		if bytes == 0 || size == 1 {
			return
		}
		p := int64(size)
		segment := roundUp(min(ceilDiv(bytes, 2*p), elem*max(1, limit/elem)), elem)
		newRing(rank, size, bytes, roundUp(max(ceilDiv(bytes, segment), 2*p), p), segment, glooDepth).reduceTo(b, root)
	})
}

// ring is a schedule whose messages all go to rank-1 and come from rank+1.
type ring struct {
	rank, size int
	bytes      int64
	segments   int64 // how many, a multiple of the group's size
	segment    int64 // bytes of one; the last ones may be shorter or empty
	per        int64 // segments of each rank
	depth      int64 // messages outstanding each way at most, no more than per
}

func newRing(rank, size int, bytes, segments, segment, depth int64) *ring {
	per := segments / int64(size)
	return &ring{rank: rank, size: size, bytes: bytes, segments: segments, segment: segment, per: per, depth: min(per, depth)}
}

// Gloo has two messages outstanding. With chunks of 64 KiB, four messages keep a network of 10 us
// and 12.5 GB/s busy, and two do not. In a model of 16 ranks an all-reduce of 64 MiB takes 13 ms and 20 ms, and 12 ms
// with the default chunk.
const (
	glooDepth = 2
	ringDepth = 4
)

func (r *ring) allReduce(b *builder) {
	steps := r.segments - r.per
	r.pass(b, int64(r.rank+1)*r.per, steps, true)
	r.pass(b, int64(r.rank)*r.per, steps, false)
}

func (r *ring) reduceTo(b *builder, root int) {
	r.pass(b, int64(r.rank+1)*r.per, r.segments-2, true)
	block := func(k int) (off, n int64) {
		off = int64(k) * r.per * r.segment
		return off, min(r.per*r.segment, r.bytes-off)
	}
	if r.rank != root {
		if off, n := block(r.rank); n > 0 {
			b.wait(b.send(root, Out, off, n))
		}
		return
	}
	posted := make([]int32, 0, r.size)
	for k := range r.size {
		if off, n := block(k); k != root && n > 0 {
			posted = append(posted, b.recv(k, Out, off, n))
		}
	}
	b.wait(posted...)
}

// at returns the place of segment k; an empty one has no message.
func (r *ring) at(k int64) (off, n int64) {
	off = k % r.segments * r.segment
	return off, max(0, min(r.segment, r.bytes-off))
}

// pass sends steps segments from first on, and receives the same number from first+per on:
// straight into place, or through scratch if reduce is set. A step sends the segment that was
// received per steps earlier. At most depth steps are under way, which bounds receives, sends and
// parts of scratch.
func (r *ring) pass(b *builder, first, steps int64, reduce bool) {
	to, from := (r.rank+r.size-1)%r.size, (r.rank+1)%r.size
	depth := r.depth
	if !reduce {
		b.rounds(steps, int(depth), func(i int64) (recv, send int32) {
			off, n := r.at(first + r.per + i)
			recv = b.recvSome(from, Out, off, n)
			off, n = r.at(first + i)
			return recv, b.sendSome(to, Out, off, n)
		}, nil)
		return
	}
	b.scratch(depth * r.segment)
	b.rounds(steps, int(depth), func(i int64) (recv, send int32) {
		_, n := r.at(first + r.per + i)
		recv = b.recvSome(from, Scratch, i%depth*r.segment, n)
		off, n := r.at(first + i)
		return recv, b.sendSome(to, Out, off, n)
	}, func(i int64) {
		off, n := r.at(first + r.per + i)
		b.local(Reduce, Out, off, Scratch, i%depth*r.segment, n)
	})
}
