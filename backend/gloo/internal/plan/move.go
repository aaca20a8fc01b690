package plan

import "fmt"

// Broadcast plans a broadcast of bytes bytes from root down a binomial tree,
// one message for each other rank.
func Broadcast(rank, size, root int, bytes int64) *Plan {
	checkRank(rank, size)
	checkRoot(root, size)
	checkBytes(bytes)
	b := newBuilder(16)
	place := (rank - root + size) % size // in the tree, root being 0
	for bit := 1; bit < size; bit <<= 1 {
		switch {
		case place >= 2*bit:
		case place >= bit:
			b.wait(b.recv((place-bit+root)%size, Out, 0, bytes))
		case place+bit < size:
			b.send((place+bit+root)%size, Out, 0, bytes)
		}
	}
	b.waitAll()
	return b.done()
}

// AllGather plans an all-gather of blocks of bytes bytes around a ring: every
// rank hands on to rank+1 what came from rank-1, each block in two halves so
// that one travels while the other is handed on. The halves need not end at an
// element.
func AllGather(rank, size int, bytes int64) *Plan {
	checkRank(rank, size)
	checkBytes(bytes)
	b := newBuilder(8*(size-1) + 1)
	b.local(Copy, Out, int64(rank)*bytes, In, 0, bytes)
	if bytes == 0 || size == 1 {
		return b.done()
	}
	half := [2]int64{bytes / 2, bytes - bytes/2}
	start := [2]int64{0, half[0]}
	var pending [2]struct{ send, recv int32 }
	for i := range 2 * (size - 1) {
		p, h := &pending[i&1], i&1
		if i >= 2 {
			b.wait(p.send)
			b.wait(p.recv)
		}
		out := (rank - i/2 + size) % size
		in := (out - 1 + size) % size
		p.send = b.send((rank+1)%size, Out, int64(out)*bytes+start[h], half[h])
		p.recv = b.recv((rank-1+size)%size, Out, int64(in)*bytes+start[h], half[h])
	}
	for _, p := range pending {
		b.wait(p.send)
		b.wait(p.recv)
	}
	return b.done()
}

// AllGatherV plans an all-gather of blocks of unequal size, counts[r] bytes
// from rank r, around a ring without halves.
func AllGatherV(rank int, counts []int64) *Plan {
	size := len(counts)
	checkRank(rank, size)
	offs, total := offsets(counts)
	b := newBuilder(4*(size-1) + 1)
	b.local(Copy, Out, offs[rank], In, 0, counts[rank])
	if total == 0 {
		return b.done()
	}
	for i := range size - 1 {
		out := (rank - i + size) % size
		in := (out - 1 + size) % size
		send := b.send((rank+1)%size, Out, offs[out], counts[out])
		recv := b.recv((rank-1+size)%size, Out, offs[in], counts[in])
		b.wait(send)
		b.wait(recv)
	}
	return b.done()
}

// Gather plans a gather of blocks of bytes bytes to root: one message straight
// from each other rank.
func Gather(rank, size, root int, bytes int64) *Plan {
	checkRank(rank, size)
	return GatherV(rank, root, even(size, bytes))
}

// GatherV plans a gather of counts[r] bytes from rank r to root.
func GatherV(rank, root int, counts []int64) *Plan {
	size := len(counts)
	checkRank(rank, size)
	checkRoot(root, size)
	offs, _ := offsets(counts)
	if rank != root {
		b := newBuilder(2)
		b.wait(b.send(root, In, 0, counts[rank]))
		return b.done()
	}
	b := newBuilder(2*size - 1)
	for r := range size {
		if r != root {
			b.recv(r, Out, offs[r], counts[r])
		}
	}
	b.local(Copy, Out, offs[root], In, 0, counts[root])
	b.waitAll()
	return b.done()
}

// Scatter plans a scatter of blocks of bytes bytes from root: one message
// straight to each other rank.
func Scatter(rank, size, root int, bytes int64) *Plan {
	checkRank(rank, size)
	return ScatterV(rank, root, even(size, bytes))
}

// ScatterV plans a scatter of counts[r] bytes to rank r from root.
func ScatterV(rank, root int, counts []int64) *Plan {
	size := len(counts)
	checkRank(rank, size)
	checkRoot(root, size)
	offs, _ := offsets(counts)
	if rank != root {
		b := newBuilder(2)
		b.wait(b.recv(root, Out, 0, counts[rank]))
		return b.done()
	}
	b := newBuilder(2*size - 1)
	for r := range size {
		if r != root {
			b.send(r, In, offs[r], counts[r])
		}
	}
	b.local(Copy, Out, 0, In, offs[root], counts[root])
	b.waitAll()
	return b.done()
}

// AllToAll plans the exchange of one block of bytes bytes between every two
// ranks, all posted at once.
func AllToAll(rank, size int, bytes int64) *Plan {
	checkRank(rank, size)
	counts := even(size, bytes)
	return AllToAllV(rank, counts, counts)
}

// AllToAllV plans an exchange in which rank sends send[r] bytes to rank r and
// receives recv[r] bytes from it. What a rank keeps for itself has to have the
// same size in both.
func AllToAllV(rank int, send, recv []int64) *Plan {
	size := len(send)
	checkRank(rank, size)
	if len(recv) != size || send[rank] != recv[rank] {
		panic(fmt.Sprintf("plan: rank %d sends %v and receives %v", rank, send, recv))
	}
	from, _ := offsets(send)
	to, _ := offsets(recv)
	b := newBuilder(4*(size-1) + 1)
	for i := 1; i < size; i++ {
		dst, src := (rank+i)%size, (rank-i+size)%size
		b.send(dst, In, from[dst], send[dst])
		b.recv(src, Out, to[src], recv[src])
	}
	b.local(Copy, Out, to[rank], In, from[rank], send[rank])
	b.waitAll()
	return b.done()
}

// Barrier plans a dissemination barrier (Hensgen, Finkel and Manber, "Two
// algorithms for barrier synchronization", 1988): empty messages over distances
// 1, 2, 4 and so on, after which every rank has heard of every other.
func Barrier(rank, size int) *Plan {
	checkRank(rank, size)
	b := newBuilder(32)
	for d := 1; d < size; d <<= 1 {
		recv := b.recv((rank-d+size)%size, Out, 0, 0)
		send := b.send((rank+d)%size, Out, 0, 0)
		b.wait(recv)
		b.wait(send)
	}
	return b.done()
}

func even(size int, bytes int64) []int64 {
	counts := make([]int64, size)
	for r := range counts {
		counts[r] = bytes
	}
	return counts
}

// offsets returns where each of the blocks begins, and their total.
func offsets(counts []int64) (offs []int64, total int64) {
	offs = make([]int64, len(counts))
	for r, n := range counts {
		checkBytes(n)
		offs[r] = total
		total += n
	}
	return offs, total
}
