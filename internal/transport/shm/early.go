package shm

// A rank may do its part of a small collective before it waits for the others, so that they get its
// data sooner. Ready and the Post functions are for that. They do not wait. A lock of the caller orders them, Begin
// and the collectives, which may run on other goroutines. They come after Begin, while this rank runs no collective
// and is not being closed.

// earlyBytes is up to how many bytes a block may have for that: 4 KiB take 0.1 us to copy.
const earlyBytes = 4 << 10

// setEarly computes the largest block of collectives that have one piece and expose nothing.
func (g *Group) setEarly() {
	most := min(earlyBytes, g.oneShot, g.blockPiece())
	l := &g.mapped
	for _, n := range [...]int64{
		l.AllReduce, l.Reduce, l.Broadcast, l.AllGather, l.Gather, l.Scatter, g.reads.AllGather, g.reads.Scatter,
	} {
		if n >= 0 {
			most = min(most, int(max(n-1, 0))/g.size)
		}
	}
	g.early = most
}

// Ready reports whether this rank need not wait in the next collective. The rank only sends there: it is
// the root of a broadcast or a scatter, or it is not the root of a reduce or a gather. It sends n bytes to
// each rank that receives any, and needs a free slot for them. A rank of a group that has failed may wait for the reason.
func (g *Group) Ready(n int) bool {
	at := small
	if g.size*g.blockRoom(n) > smallBytes { // in a scatter
		at = large
	}
	return n <= g.early && g.refusal() == nil && (g.sawAll(at.free(g.next)) || g.allHave(at.enough(g.next)))
}

// sawAll reports whether the others had published the pieces before one when this rank last looked.
func (g *Group) sawAll(need uint32) bool { return int32(g.seen-need) >= 0 }

// allHave looks whether the others have published the pieces before one.
func (g *Group) allHave(need uint32) bool {
	for r := range g.segs {
		if r != g.rank && !reached(g.segs[r].slots[(need-1)%depth].in, need) {
			return false
		}
	}
	return true
}

// PostAllReduce publishes buf for the next collective, which must be an AllReduce of the same bytes. It
// does nothing if that has to wait or is too large. It reports whether the collective need not wait: every
// rank has published its part.
func (g *Group) PostAllReduce(buf []byte, elem int) (arrived bool) {
	return len(buf) > 0 && g.post(header{kind: opAllReduce, elem: uint8(elem), bytes: uint64(len(buf))}, buf)
}

// PostAllGather is PostAllReduce for an AllGather.
func (g *Group) PostAllGather(in []byte) (arrived bool) {
	return len(in) > 0 && g.post(header{kind: opAllGather, bytes: uint64(len(in))}, in)
}

// PostBarrier is PostAllReduce for a Barrier.
func (g *Group) PostBarrier() (arrived bool) { return g.post(header{kind: opBarrier}, nil) }

func (g *Group) post(h header, data []byte) (arrived bool) {
	if g.size == 1 || len(data) > g.early {
		return false
	}
	if need := g.roomFor(&h).free(g.next); !g.sawAll(need) && !g.allHave(need) || g.start(h, nil) != nil {
		return false
	}
	p := g.next
	copy(g.staged(g.self, p), data)
	g.publish(p)
	g.posted = true
	for r := range g.segs {
		if r != g.rank && !reached(g.segs[r].slots[p%depth].in, p+1) {
			return false
		}
	}
	return true
}
