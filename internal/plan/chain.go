package plan

// Outstanding parts of a chain: parts that a rank receives ahead, and slots of scratch for them.
// The two extra slots allow two sends under way.
const (
	ahead = 2
	slots = ahead + 2
)

// parts returns the number of parts, at least one, of at most chunk bytes for a chain of bytes
// bytes.
func parts(bytes, elem, chunk int64) int64 {
	return max(1, ceilDiv(bytes, max(chunk/elem*elem, elem)))
}

// broadcastChain sends the data in parts along a chain from root to root+1 and so on. A rank
// sends one part while it receives others.
func (b *builder) broadcastChain(rank, size, root int, bytes, chunk int64) {
	place, n := (rank-root+size)%size, parts(bytes, 1, chunk)
	if bytes == 0 || size == 1 {
		return
	}
	at := func(i int64) (int64, int64) { return part(0, bytes, 1, i, n) }
	var recvs, sends [slots]int32
	for i := range recvs {
		recvs[i], sends[i] = none, none
	}
	receive := func(i int64) {
		if place > 0 && i < n {
			off, length := at(i)
			recvs[i%slots] = b.recvSome((rank-1+size)%size, Out, off, length)
		}
	}
	for i := range int64(ahead) {
		receive(i)
	}
	for i := range n {
		b.wait(recvs[i%slots])
		if place < size-1 {
			b.wait(sends[i%slots])
			off, length := at(i)
			sends[i%slots] = b.sendSome((rank+1)%size, Out, off, length)
		}
		receive(i + ahead)
	}
	for i := range int64(slots) {
		b.wait(sends[(n+i)%slots])
	}
}

// allReduceChain reduces in rank order for any size. Partial results go in parts from rank 0 to
// the last rank, and each rank adds its own. Results come back down the chain while later parts
// still go up.
//
// Rank r receives a part's result 2(P-1-r) parts, and a few more, after it sent the part. That is
// the time to the end of the chain and back. A plan's steps have a fixed order, so an earlier
// wait would delay other ranks.
func (b *builder) allReduceChain(rank, size int, bytes, elem, chunk int64) {
	if bytes == 0 || size == 1 {
		return
	}
	n, last := parts(bytes, elem, chunk), size-1
	at := func(i int64) (int64, int64) { return part(0, bytes, elem, i, n) }
	room := roundUp(ceilDiv(bytes, n), elem)
	var up, down struct{ recvs, sends [slots]int32 }
	for i := range up.recvs {
		up.recvs[i], up.sends[i], down.recvs[i], down.sends[i] = none, none, none, none
	}
	if rank > 0 {
		b.scratch(min(slots, n) * room)
	}
	receiveUp := func(i int64) {
		if rank == 0 || i >= n {
			return
		}
		// The slot's last part must have been sent.
		b.wait(up.sends[i%slots])
		up.sends[i%slots] = none
		_, length := at(i)
		up.recvs[i%slots] = b.recv(rank-1, Scratch, i%slots*room, length)
	}
	receiveDown := func(i int64) {
		if i < n {
			off, length := at(i)
			down.recvs[i%slots] = b.recv(rank+1, Out, off, length)
		}
	}
	sendDown := func(i int64) {
		if rank > 0 {
			b.wait(down.sends[i%slots])
			off, length := at(i)
			down.sends[i%slots] = b.send(rank-1, Out, off, length)
		}
	}
	for i := range int64(ahead) {
		receiveUp(i)
	}
	lag := 2*int64(last-rank) + ahead
	for i := range n + lag {
		if i < n {
			off, length := at(i)
			switch {
			case rank == 0:
				b.wait(up.sends[i%slots])
				up.sends[i%slots] = b.send(1, Out, off, length)
			case rank < last:
				b.wait(up.recvs[i%slots])
				b.local(Reduce, Scratch, i%slots*room, Out, off, length)
				up.sends[i%slots] = b.send(rank+1, Scratch, i%slots*room, length)
				receiveUp(i + ahead)
			default:
				b.wait(up.recvs[i%slots])
				b.local(Reduce, Scratch, i%slots*room, Out, off, length)
				b.local(Copy, Out, off, Scratch, i%slots*room, length)
				sendDown(i)
				receiveUp(i + ahead)
			}
		}
		if rank == last {
			continue
		}
		// Rank 0 sent part k+ahead from the place of its result.
		if k := i - lag; k+ahead >= 0 && k < n {
			if rank == 0 && k+ahead < n && k+ahead+slots > min(i, n-1) {
				b.wait(up.sends[(k+ahead)%slots])
				up.sends[(k+ahead)%slots] = none
			}
			receiveDown(k + ahead)
			if k >= 0 {
				b.wait(down.recvs[k%slots])
				sendDown(k)
			}
		}
	}
	for i := range int64(slots) {
		b.wait(up.sends[(n+i)%slots])
		b.wait(down.sends[(n+i)%slots])
	}
}
