package plan

import "fmt"

// Broadcast plans a broadcast of bytes bytes from root down a binomial tree,
// one message for each other rank.
func Broadcast(rank, size, root int, bytes int64) *Plan {
	checkRank(rank, size)
	checkRoot(root, size)
	checkBytes(bytes)
	return build(16, func(b *builder) { b.broadcastTree(rank, size, root, bytes) })
}

func (b *builder) broadcastTree(rank, size, root int, bytes int64) {
	var sends []int32
	place := (rank - root + size) % size // in the tree, root being 0
	for bit := 1; bit < size; bit <<= 1 {
		switch {
		case place >= 2*bit:
		case place >= bit:
			b.wait(b.recv((place-bit+root)%size, Out, 0, bytes))
		case place+bit < size:
			sends = append(sends, b.send((place+bit+root)%size, Out, 0, bytes))
		}
	}
	b.wait(sends...)
}

// AllGather plans an all-gather of blocks of bytes bytes around a ring: every rank sends to
// rank+1 the blocks that it receives from rank-1. Each block is sent in two halves, so that one
// travels while the other is sent on. The halves need not end at an element.
func AllGather(rank, size int, bytes int64) *Plan {
	checkRank(rank, size)
	checkBytes(bytes)
	return build(8*(size-1)+1, func(b *builder) { b.allGatherHalves(rank, size, bytes) })
}

func (b *builder) allGatherHalves(rank, size int, bytes int64) {
	b.local(Copy, Out, int64(rank)*bytes, In, 0, bytes)
	if bytes == 0 || size == 1 {
		return
	}
	half := [2]int64{bytes / 2, bytes - bytes/2}
	start := [2]int64{0, half[0]}
	var pending [2]struct{ send, recv int32 }
	for i := range 2 * (size - 1) {
		p, h := &pending[i&1], i&1
		if i >= 2 {
			b.wait(p.send, p.recv)
		}
		out := (rank - i/2 + size) % size
		in := (out - 1 + size) % size
		p.send = b.send((rank+1)%size, Out, int64(out)*bytes+start[h], half[h])
		p.recv = b.recv((rank-1+size)%size, Out, int64(in)*bytes+start[h], half[h])
	}
	for _, p := range pending {
		b.wait(p.send, p.recv)
	}
}

// AllGatherV plans an all-gather of blocks of unequal size, counts[r] bytes
// from rank r, around a ring without halves.
func AllGatherV(rank int, counts []int64) *Plan {
	checkRank(rank, len(counts))
	all := listed(counts)
	return build(4*(len(counts)-1)+1, func(b *builder) { b.allGatherRing(rank, all) })
}

func (b *builder) allGatherRing(rank int, all blocks) {
	off, n := all.at(rank)
	b.local(Copy, Out, off, In, 0, n)
	if all.total() == 0 {
		return
	}
	for i := range all.size - 1 {
		out := (rank - i + all.size) % all.size
		in := (out - 1 + all.size) % all.size
		off, n = all.at(out)
		send := b.send((rank+1)%all.size, Out, off, n)
		off, n = all.at(in)
		recv := b.recv((rank-1+all.size)%all.size, Out, off, n)
		b.wait(send, recv)
	}
}

// GatherV plans a gather of counts[r] bytes from rank r to root: one message straight
// from each other rank.
func GatherV(rank, root int, counts []int64) *Plan {
	checkRank(rank, len(counts))
	checkRoot(root, len(counts))
	all := listed(counts)
	return build(2*len(counts), func(b *builder) { b.gatherDirect(rank, root, all, true) })
}

// gatherDirect sends empty blocks if empty is set.
func (b *builder) gatherDirect(rank, root int, all blocks, empty bool) {
	own, n := all.at(rank)
	if rank != root {
		if n > 0 || empty {
			b.wait(b.send(root, In, 0, n))
		}
		return
	}
	posted := make([]int32, 0, all.size)
	for r := range all.size {
		if off, n := all.at(r); r != root && (n > 0 || empty) {
			posted = append(posted, b.recv(r, Out, off, n))
		}
	}
	b.local(Copy, Out, own, In, 0, n)
	b.wait(posted...)
}

// Scatter plans a scatter of blocks of bytes bytes from root: one message
// straight to each other rank.
func Scatter(rank, size, root int, bytes int64) *Plan {
	checkRank(rank, size)
	checkRoot(root, size)
	checkBytes(bytes)
	return build(2*size, func(b *builder) { b.scatterDirect(rank, root, equal(size, bytes), true) })
}

// scatterDirect sends empty blocks if empty is set.
func (b *builder) scatterDirect(rank, root int, all blocks, empty bool) {
	own, n := all.at(rank)
	if rank != root {
		if n > 0 || empty {
			b.wait(b.recv(root, Out, 0, n))
		}
		return
	}
	posted := make([]int32, 0, all.size)
	for r := range all.size {
		if off, n := all.at(r); r != root && (n > 0 || empty) {
			posted = append(posted, b.send(r, In, off, n))
		}
	}
	b.local(Copy, Out, 0, In, own, n)
	b.wait(posted...)
}

// AllToAllV plans an exchange in which rank sends send[r] bytes to rank r and receives recv[r]
// bytes from it, all posted at once. send[rank] and recv[rank] must be equal.
func AllToAllV(rank int, send, recv []int64) *Plan {
	checkRank(rank, len(send))
	if len(recv) != len(send) || send[rank] != recv[rank] {
		panic(fmt.Sprintf("plan: rank %d sends %v and receives %v", rank, send, recv))
	}
	from, to := listed(send), listed(recv)
	return build(4*(len(send)-1)+1, func(b *builder) { b.allToAllDirect(rank, from, to, true) })
}

// allToAllDirect sends empty blocks if empty is set.
func (b *builder) allToAllDirect(rank int, from, to blocks, empty bool) {
	size := from.size
	posted := make([]int32, 0, 2*size)
	for i := 1; i < size; i++ {
		dst, src := (rank+i)%size, (rank-i+size)%size
		if off, n := from.at(dst); n > 0 || empty {
			posted = append(posted, b.send(dst, In, off, n))
		}
		if off, n := to.at(src); n > 0 || empty {
			posted = append(posted, b.recv(src, Out, off, n))
		}
	}
	srcOff, n := from.at(rank)
	off, _ := to.at(rank)
	b.local(Copy, Out, off, In, srcOff, n)
	b.wait(posted...)
}

// Barrier plans a dissemination barrier (Hensgen, Finkel and Manber, "Two algorithms for barrier
// synchronization", 1988): empty messages over distances 1, 2, 4 and so on. After them every rank
// knows that all ranks have arrived.
func Barrier(rank, size int) *Plan {
	checkRank(rank, size)
	return build(32, func(b *builder) { b.disseminate(rank, size) })
}

func (b *builder) disseminate(rank, size int) {
	for d := 1; d < size; d <<= 1 {
		recv := b.recv((rank-d+size)%size, Out, 0, 0)
		send := b.send((rank+d)%size, Out, 0, 0)
		b.wait(recv, send)
	}
}
