package plan

// window is the most messages each way that a rank has outstanding when it exchanges with all
// others. It bounds requests and, at the root of a reduction in rank order, scratch memory.
const window = 16

// trade makes every rank send to and receive from every other rank. Each round is a permutation:
// to rank-1 and from rank+1 first. The parts of ranks 0, 1, .. then arrive last and in order, so
// they can be reduced as they arrive.
func (b *builder) trade(rank, size int, send, recv func(peer int) int32, done func(from int)) {
	b.rounds(int64(size-1), window, func(i int64) (int32, int32) {
		d := int(i) + 1
		r := recv((rank + d) % size)
		return r, send((rank - d + size) % size)
	}, func(i int64) {
		if done != nil {
			done((rank + int(i) + 1) % size)
		}
	})
}

// reduceParts sends each rank its block of src, and reduces the received blocks and the own one
// in rank order. The result is in acc at accOff, which may be in src. It takes scratch for all
// parts but two.
func (b *builder) reduceParts(rank int, all blocks, src, acc Buffer, accOff int64) {
	size := all.size
	own, n := all.at(rank)
	// The result begins with rank 0's part, in its place.
	sum, sumOff := acc, accOff
	inPlace := src == acc && own == accOff
	first := int64(0) // scratch below is taken
	if rank == 0 {
		b.local(Copy, acc, accOff, src, own, n)
	} else if inPlace {
		sum, sumOff, first = Scratch, 0, n
	}
	at := func(from int) (Buffer, int64) {
		if from == 0 {
			return sum, sumOff
		}
		slot := from - 1
		if from > rank && rank > 0 {
			slot--
		}
		return Scratch, first + int64(slot)*n
	}
	fold := func(from int) {
		buf, off := at(from)
		if from == rank {
			buf, off = src, own
		}
		if from > 0 {
			b.local(Reduce, sum, sumOff, buf, off, n)
		}
	}
	b.scratch(first + n*int64(max(0, size-1-min(rank, 1))))
	b.trade(rank, size, func(to int) int32 {
		off, n := all.at(to)
		return b.sendSome(to, src, off, n)
	}, func(from int) int32 {
		buf, off := at(from)
		return b.recvSome(from, buf, off, n)
	}, func(from int) {
		if rank == 0 || from < rank {
			fold(from)
		}
	})
	if rank > 0 {
		for r := rank; r < size; r++ {
			fold(r)
		}
	}
	b.local(Copy, acc, accOff, sum, sumOff, n)
}

// gatherParts sends rank's block in Out to all ranks.
func (b *builder) gatherParts(rank int, all blocks) {
	own, n := all.at(rank)
	b.trade(rank, all.size, func(to int) int32 {
		return b.sendSome(to, Out, own, n)
	}, func(from int) int32 {
		off, n := all.at(from)
		return b.recvSome(from, Out, off, n)
	}, nil)
}

// allReduceTwoStep sends each rank its block of all operands. The rank reduces them in rank order
// and sends the result to all ranks.
func (b *builder) allReduceTwoStep(rank, size int, bytes, elem int64) {
	all := cut(size, bytes, elem)
	off, _ := all.at(rank)
	b.reduceParts(rank, all, Out, Out, off)
	b.gatherParts(rank, all)
}

// allReduceOneShot sends every operand to all ranks. Each reduces them all in rank order.
func (b *builder) allReduceOneShot(rank, size int, bytes int64) {
	if size == 1 || bytes == 0 {
		return
	}
	at := func(from int) int64 {
		if from > rank {
			from--
		}
		return int64(from) * bytes
	}
	b.scratch(int64(size-1) * bytes)
	b.trade(rank, size, func(to int) int32 {
		return b.send(to, Out, 0, bytes)
	}, func(from int) int32 {
		return b.recv(from, Scratch, at(from), bytes)
	}, nil)
	acc := Scratch
	if rank == 0 {
		acc = Out
	}
	for r := 1; r < size; r++ {
		if r == rank {
			b.local(Reduce, acc, 0, Out, 0, bytes)
		} else {
			b.local(Reduce, acc, 0, Scratch, at(r), bytes)
		}
	}
	b.local(Copy, Out, 0, acc, 0, bytes)
}

// reduceScatterRing passes partial results of each block around a ring, to rank+1. The block of a
// rank begins at rank+1, and each rank computes acc = op(acc, own). Blocks are sent in parts of
// at most chunk bytes, so that one is reduced while others travel.
func (b *builder) reduceScatterRing(rank int, all blocks, elem, chunk int64) {
	size := all.size
	if size == 1 {
		b.local(Copy, Out, 0, In, 0, all.total())
		return
	}
	parts := max(1, ceilDiv(all.largest(), max(chunk/elem*elem, elem)))
	depth := min(parts, 2)
	room := roundUp(ceilDiv(all.largest(), parts), elem)
	slots := parts + depth // a part is sent on a block after it came
	b.scratch(slots * room)
	to, from := (rank+1)%size, (rank-1+size)%size
	// piece returns the place in In of the part that is sent in step i. It was received one block
	// earlier.
	piece := func(i int64) (off, n int64) {
		off, n = all.at((rank - 1 - int(i/parts) + 2*size) % size)
		return part(off, n, elem, i%parts, parts)
	}
	start, _ := all.at(rank)
	steps := int64(size-1) * parts
	last := steps - parts
	b.rounds(steps, int(depth), func(i int64) (recv, send int32) {
		off, n := piece(i + parts)
		if i < last {
			recv = b.recvSome(from, Scratch, i%slots*room, n)
		} else {
			recv = b.recvSome(from, Out, off-start, n)
		}
		if off, n = piece(i); i < parts {
			return recv, b.sendSome(to, In, off, n)
		}
		return recv, b.sendSome(to, Scratch, (i-parts)%slots*room, n)
	}, func(i int64) {
		off, n := piece(i + parts)
		if i < last {
			b.local(Reduce, Scratch, i%slots*room, In, off, n)
		} else {
			b.local(Reduce, Out, off-start, In, off, n)
		}
	})
}

// broadcastFlat sends from root to each rank.
func (b *builder) broadcastFlat(rank, size, root int, bytes int64) {
	if rank != root {
		b.wait(b.recvSome(root, Out, 0, bytes))
		return
	}
	b.rounds(int64(size-1), window, func(i int64) (recv, send int32) {
		return none, b.sendSome((root+1+int(i))%size, Out, 0, bytes)
	}, nil)
}
