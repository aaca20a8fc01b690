package plan

// maxSegment bounds a message of the ring. It is Gloo's number, and both sides
// have to agree on it.
const maxSegment = 1 << 20

// AllReduceRing plans an all-reduce of bytes bytes in elements of elem: a ring
// reduce-scatter, then a ring all-gather (Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", 2009).
//
// The operand is cut into segments, an equal number for each rank and at least
// two, so that one is on the wire while another is reduced. Every rank sends to
// rank-1 and receives from rank+1. Rank b owns the segments of block b, which
// comes to be as
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
	if bytes == 0 || size == 1 {
		return new(Plan)
	}
	p := int64(size)
	segments := roundUp(max(ceilDiv(bytes, elem*max(1, limit/elem)), 2*p), p)
	r := newRing(rank, size, bytes, segments, roundUp(ceilDiv(bytes, segments), elem))
	steps := segments - r.per
	r.builder = newBuilder(int(9 * steps))
	r.pass(int64(rank+1)*r.per, steps, true)
	r.pass(int64(rank)*r.per, steps, false)
	return r.done()
}

// ReduceRing plans a reduction onto root: the reduce-scatter of
// [AllReduceRing], with segments cut a little differently, after which every
// other rank sends its block to root. The operands meet in the same order.
//
// Gloo's loop has as many steps as there are segments but two, whatever their
// number for each rank. Beyond two for each rank the surplus steps carry
// segments that nobody needs; peers wait for them all the same.
func ReduceRing(rank, size, root int, bytes, elem int64) *Plan {
	return reduceRing(rank, size, root, bytes, elem, maxSegment)
}

func reduceRing(rank, size, root int, bytes, elem, limit int64) *Plan {
	checkRank(rank, size)
	checkRoot(root, size)
	checkElements(bytes, elem)
	if bytes == 0 || size == 1 {
		return new(Plan)
	}
	p := int64(size)
	segment := roundUp(min(ceilDiv(bytes, 2*p), elem*max(1, limit/elem)), elem)
	r := newRing(rank, size, bytes, roundUp(max(ceilDiv(bytes, segment), 2*p), p), segment)
	r.builder = newBuilder(int(5*(r.segments-2)) + 2*size)
	r.pass(int64(rank+1)*r.per, r.segments-2, true)

	block := func(k int) (off, n int64) {
		off = int64(k) * r.per * segment
		return off, min(r.per*segment, bytes-off)
	}
	if rank != root {
		if off, n := block(rank); n > 0 {
			r.wait(r.send(root, Out, off, n))
		}
		return r.done()
	}
	posted := make([]int32, 0, size)
	for k := range size {
		if off, n := block(k); k != root && n > 0 {
			posted = append(posted, r.recv(k, Out, off, n))
		}
	}
	for _, req := range posted {
		r.wait(req)
	}
	return r.done()
}

// ring is a plan in the making whose messages all go to rank-1 and come from rank+1.
type ring struct {
	builder
	to, from int
	bytes    int64
	segments int64 // how many, a multiple of the group's size
	segment  int64 // bytes of one; the last ones may be shorter or empty
	per      int64 // segments of each rank
}

func newRing(rank, size int, bytes, segments, segment int64) *ring {
	return &ring{
		to: (rank + size - 1) % size, from: (rank + 1) % size,
		bytes: bytes, segments: segments, segment: segment, per: segments / int64(size),
	}
}

// at returns where segment k lies; an empty one has no message.
func (r *ring) at(k int64) (off, n int64) {
	off = k % r.segments * r.segment
	return off, max(0, min(r.segment, r.bytes-off))
}

// pass sends the segments from first on, as many as steps, and receives the
// same number from first+per on: straight into place, or by way of scratch if
// they are to be reduced. A step is finished before the next but one begins,
// so that there are two receives and two sends at most, and two scratch halves.
func (r *ring) pass(first, steps int64, reduce bool) {
	if reduce {
		r.plan.Scratch = 2 * r.segment
	}
	var pending [2]struct {
		recv, send int32
		off, n     int64
	}
	for i := range steps + 2 {
		p, half := &pending[i&1], i&1*r.segment
		if i >= 2 {
			r.wait(p.recv)
			if reduce {
				r.local(Reduce, Out, p.off, Scratch, half, p.n)
			}
			r.wait(p.send)
		}
		if i >= steps {
			continue
		}
		p.recv, p.send = none, none
		p.off, p.n = r.at(first + r.per + i)
		switch {
		case p.n == 0:
		case reduce:
			p.recv = r.recv(r.from, Scratch, half, p.n)
		default:
			p.recv = r.recv(r.from, Out, p.off, p.n)
		}
		if off, n := r.at(first + i); n > 0 {
			p.send = r.send(r.to, Out, off, n)
		}
	}
}
