package plan

// allGatherBruck gathers in the fewest rounds for every size of a group (Bruck, Ho, Kipnis, Upfal
// and Weathersby, "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", 1997). It collects the blocks in scratch, beginning with the rank's
// own, and copies them into place at the end.
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
