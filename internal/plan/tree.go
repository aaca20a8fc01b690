package plan

// reduceTree reduces Out towards root up a binomial tree; elsewhere partial
// results remain.
func (b *builder) reduceTree(rank, size, root int, bytes int64) {
	place := (rank - root + size) % size
	for d := 1; d < size; d <<= 1 {
		if place&d != 0 {
			b.wait(b.sendSome((place-d+root)%size, Out, 0, bytes))
			return
		}
		if place+d < size {
			b.scratch(bytes)
			b.wait(b.recvSome((place+d+root)%size, Scratch, 0, bytes))
			b.local(Reduce, Out, 0, Scratch, 0, bytes)
		}
	}
}

func (b *builder) allReduceTree(rank, size int, bytes int64) {
	if bytes > 0 {
		b.reduceTree(rank, size, 0, bytes)
		b.broadcastTree(rank, size, 0, bytes)
	}
}

// reduceInOrder sends every operand to root, which reduces them in rank order.
func (b *builder) reduceInOrder(rank, size, root int, bytes int64) {
	if rank != root {
		b.wait(b.sendSome(root, Out, 0, bytes))
		return
	}
	// The first part of scratch has the result until the operand in Out has been reduced. Other
	// parts receive in turn.
	acc, accOff := Out, int64(0)
	if root > 0 {
		acc, accOff = Scratch, 0
		b.scratch(bytes)
	}
	depth := min(window, size-1)
	slot := func(i int64) int64 {
		if root > 0 && i == 0 {
			return 0
		}
		if root > 0 {
			return bytes * (1 + (i-1)%int64(depth))
		}
		return bytes * (i % int64(depth))
	}
	from := func(i int64) int {
		if int(i) < root {
			return int(i)
		}
		return int(i) + 1
	}
	b.rounds(int64(size-1), max(depth, 1), func(i int64) (recv, send int32) {
		b.scratch(slot(i) + bytes)
		return b.recvSome(from(i), Scratch, slot(i), bytes), none
	}, func(i int64) {
		if root == 0 || i > 0 {
			b.local(Reduce, acc, accOff, Scratch, slot(i), bytes)
		}
		if root > 0 && from(i) == root-1 {
			b.local(Reduce, acc, accOff, Out, 0, bytes)
		}
	})
	b.local(Copy, Out, 0, acc, accOff, bytes)
}

// scatterHalving cuts root's Out into blocks and sends each rank its own, counted from root. A
// rank with the blocks of several ranks sends the upper half of them to the first rank of that
// half.
func (b *builder) scatterHalving(rank int, all blocks) {
	var sends []int32
	for _, l := range levels(rank, all.size) {
		off, n := all.span(l.mid, l.hi)
		switch rank {
		case l.lo:
			sends = append(sends, b.sendSome(l.mid, Out, off, n))
		case l.mid:
			b.wait(b.recvSome(l.lo, Out, off, n))
		}
	}
	b.wait(sends...)
}

// broadcastScattered scatters the data, then gathers them on all ranks (van de Geijn, "On global
// combine operations", 1994): around a ring, or by doubling.
func (b *builder) broadcastScattered(rank, size, root int, bytes int64, ring bool) {
	all, place := cut(size, bytes, 1), (rank-root+size)%size
	b.within(func(v int) int { return (v + root) % size }, func() {
		b.scatterHalving(place, all)
		if ring {
			b.passAround(place, all)
		} else {
			b.gatherDoubling(place, all)
		}
	})
}

// passAround gathers the ranks' blocks in Out around a ring: P-1 steps, in each of which a block
// goes to rank+1.
func (b *builder) passAround(rank int, all blocks) {
	to, from := (rank+1)%all.size, (rank-1+all.size)%all.size
	b.rounds(int64(all.size-1), 1, func(i int64) (recv, send int32) {
		out := (rank - int(i) + all.size) % all.size
		off, n := all.at((out - 1 + all.size) % all.size)
		recv = b.recvSome(from, Out, off, n)
		off, n = all.at(out)
		return recv, b.sendSome(to, Out, off, n)
	}, nil)
}

// subtree is one exchange of a binomial gather or scatter: count blocks, from a place on, with
// the rank of that place.
type subtree struct {
	place, count int
	whole        bool // the blocks lie in one piece in the buffer of all blocks
}

// subtrees returns a place's children, from the farthest to the nearest, its parent, and the
// number of blocks of its subtree. Root has no parent and all blocks.
func subtrees(place, root int, all blocks) (children []subtree, parent, own int) {
	parent, own = -1, all.size
	for _, l := range levels(place, all.size) {
		switch place {
		case l.lo:
			first := (l.mid + root) % all.size
			children = append(children, subtree{l.mid, l.hi - l.mid, first+l.hi-l.mid <= all.size})
		case l.mid:
			parent, own, children = l.lo, l.hi-l.mid, nil
		}
	}
	return children, parent, own
}

// gatherTree gathers blocks to root up a binomial tree. Inner ranks collect the blocks of their
// subtrees in scratch, in the order of places.
func (b *builder) gatherTree(rank, root int, all blocks) {
	size := all.size
	place := (rank - root + size) % size
	children, parent, own := subtrees(place, root, all)
	_, n := all.at(rank)
	if own == 1 && parent >= 0 {
		b.wait(b.sendSome((parent+root)%size, In, 0, n))
		return
	}
	posted := make([]int32, len(children))
	for i, c := range children {
		first := (c.place + root) % size
		if length := all.around(first, c.count); parent < 0 && c.whole {
			posted[i] = b.recvSome(first, Out, all.start(first), length)
		} else {
			at := all.around(rank, c.place-place)
			b.scratch(at + length)
			posted[i] = b.recvSome(first, Scratch, at, length)
		}
	}
	if parent < 0 {
		b.local(Copy, Out, all.start(rank), In, 0, n)
	} else {
		b.scratch(n)
		b.local(Copy, Scratch, 0, In, 0, n)
	}
	for i := len(children) - 1; i >= 0; i-- {
		b.wait(posted[i])
		if c := children[i]; parent < 0 && !c.whole {
			b.unwrap(Out, Scratch, all.around(rank, c.place), (c.place+root)%size, c.count, all, false)
		}
	}
	if parent >= 0 {
		b.wait(b.sendSome((parent+root)%size, Scratch, 0, all.around(rank, own)))
	}
}

// scatterTree is gatherTree backwards.
func (b *builder) scatterTree(rank, root int, all blocks) {
	size := all.size
	place := (rank - root + size) % size
	children, parent, own := subtrees(place, root, all)
	off, n := all.at(rank)
	if own == 1 && parent >= 0 {
		b.wait(b.recvSome((parent+root)%size, Out, 0, n))
		return
	}
	if parent >= 0 {
		length := all.around(rank, own)
		b.scratch(length)
		b.wait(b.recvSome((parent+root)%size, Scratch, 0, length))
	}
	posted := make([]int32, len(children))
	for i, c := range children {
		first, at := (c.place+root)%size, all.around(rank, c.place-place)
		switch length := all.around(first, c.count); {
		case parent < 0 && c.whole:
			posted[i] = b.sendSome(first, In, all.start(first), length)
		default:
			if parent < 0 {
				b.scratch(at + length)
				b.unwrap(In, Scratch, at, first, c.count, all, true)
			}
			posted[i] = b.sendSome(first, Scratch, at, length)
		}
	}
	if parent < 0 {
		b.local(Copy, Out, 0, In, off, n)
	} else {
		b.local(Copy, Out, 0, Scratch, 0, n)
	}
	b.wait(posted...)
}

// unwrap copies count blocks from first on between a buffer of all blocks and scratch, to scratch
// if wrap is set. Block 0 follows the last one. In scratch the blocks are contiguous at off.
func (b *builder) unwrap(buf, scratch Buffer, off int64, first, count int, all blocks, wrap bool) {
	tail, head := all.total()-all.start(first), all.start(first+count-all.size)
	if wrap {
		b.local(Copy, scratch, off, buf, all.start(first), tail)
		b.local(Copy, scratch, off+tail, buf, 0, head)
	} else {
		b.local(Copy, buf, all.start(first), scratch, off, tail)
		b.local(Copy, buf, 0, scratch, off+tail, head)
	}
}
