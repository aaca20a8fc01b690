package plan

// allGatherBruck gathers in as few rounds as there can be, whatever the size of
// the group (Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", 1997). The
// blocks are collected in scratch, counted from a rank's own, and turned into
// place at the end.
func (b *builder) allGatherBruck(rank int, all blocks) {
	size := all.size
	own, n := all.at(rank)
	if size == 1 {
		b.local(Copy, Out, own, In, 0, n)
		return
	}
	b.scratch(all.total())
	b.local(Copy, Scratch, 0, In, 0, n)
	for d := 1; d < size; d <<= 1 {
		count := min(d, size-d)
		from, to := (rank+d)%size, (rank-d+size)%size
		recv := b.recvSome(from, Scratch, all.around(rank, d), all.around(from, count))
		send := b.sendSome(to, Scratch, 0, all.around(rank, count))
		b.wait(recv, send)
	}
	tail := all.total() - own
	b.local(Copy, Out, own, Scratch, 0, tail)
	b.local(Copy, Out, 0, Scratch, tail, own)
}

// allToAllBruck exchanges small blocks in as few rounds as there can be, at the
// price of sending each block several times: in round k every rank sends to
// rank+2^k all blocks that have a way to go in which bit k is set.
func (b *builder) allToAllBruck(rank, size int, bytes int64) {
	if bytes == 0 || size == 1 {
		b.local(Copy, Out, 0, In, 0, int64(size)*bytes)
		return
	}
	total, tail := int64(size)*bytes, int64(size-rank)*bytes
	b.local(Copy, Scratch, 0, In, int64(rank)*bytes, tail)
	b.local(Copy, Scratch, tail, In, 0, total-tail)
	for d := 1; d < size; d <<= 1 {
		// The blocks with the bit set lie in runs of d.
		var n int64
		for lo := d; lo < size; lo += 2 * d {
			run := int64(min(d, size-lo)) * bytes
			b.local(Copy, Scratch, total+n, Scratch, int64(lo)*bytes, run)
			n += run
		}
		b.scratch(total + 2*n)
		recv := b.recv((rank-d+size)%size, Scratch, total+n, n)
		send := b.send((rank+d)%size, Scratch, total, n)
		b.wait(recv)
		var at int64
		for lo := d; lo < size; lo += 2 * d {
			run := int64(min(d, size-lo)) * bytes
			b.local(Copy, Scratch, int64(lo)*bytes, Scratch, total+n+at, run)
			at += run
		}
		b.wait(send)
	}
	for i := range size {
		b.local(Copy, Out, int64((rank-i+size)%size)*bytes, Scratch, int64(i)*bytes, bytes)
	}
}
