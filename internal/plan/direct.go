package plan

// window is how many messages each way a rank has outstanding at most when it
// trades with all others. It bounds requests and, at the root of a reduction in
// rank order, scratch memory.
const window = 16

// trade has every rank send to and receive from every other, in an order in
// which each round is a permutation: to rank-1 and from rank+1 first. In this
// order the parts of ranks 0, 1, .. come to a rank last and one after the
// other, and can be reduced as they come.
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

// reduceParts sends each rank its block of src, where the sender's blocks lie,
// and reduces what comes to rank, and its own, in rank order. The result ends
// in acc at accOff, where src may be; beside that it takes scratch for all
// parts but two.
func (b *builder) reduceParts(rank int, all blocks, src, acc Buffer, accOff int64) {
	size := all.size
	own, n := all.at(rank)
	// Rank 0's part is where the result grows.
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

// gatherParts sends rank's block in Out to everybody.
func (b *builder) gatherParts(rank int, all blocks) {
	own, n := all.at(rank)
	b.trade(rank, all.size, func(to int) int32 {
		return b.sendSome(to, Out, own, n)
	}, func(from int) int32 {
		off, n := all.at(from)
		return b.recvSome(from, Out, off, n)
	}, nil)
}

// allReduceTwoStep sends each rank its block, has it reduced in rank order, and
// sends the results to everybody.
func (b *builder) allReduceTwoStep(rank, size int, bytes, elem int64) {
	all := cut(size, bytes, elem)
	off, _ := all.at(rank)
	b.reduceParts(rank, all, Out, Out, off)
	b.gatherParts(rank, all)
}

// allReduceOneShot sends everything to everybody, and everybody reduces all of
// it in rank order.
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

// reduceScatterRing passes partial results of each block around a ring, to
// rank+1, the one that ends at rank beginning at rank+1: acc = op(acc, own) at
// each stop. Blocks go in parts of at most chunk bytes, so that one can be
// reduced while others travel.
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
	// piece returns where in In the part lies that is sent in step i; it was
	// received a block before.
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

// broadcastFlat has root send to everybody.
func (b *builder) broadcastFlat(rank, size, root int, bytes int64) {
	if rank != root {
		b.wait(b.recvSome(root, Out, 0, bytes))
		return
	}
	b.rounds(int64(size-1), window, func(i int64) (recv, send int32) {
		return none, b.sendSome((root+1+int(i))%size, Out, 0, bytes)
	}, nil)
}
