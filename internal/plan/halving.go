package plan

// level is one step of recursive halving: the ranks from lo to hi-1 divide into a lower half, up
// to mid-1, and an upper one. An odd number gives the lower half one more. Groups of any size are
// thus halved without folding ranks together, and a rank sends each byte once.
type level struct{ lo, mid, hi int }

// levels returns the levels of rank, from the whole group down to a pair.
func levels(rank, size int) []level {
	var all []level
	for lo, hi := 0, size; hi-lo > 1; {
		l := level{lo, (lo + hi + 1) / 2, hi}
		all = append(all, l)
		lo, hi = l.half(rank)
	}
	return all
}

// half returns the half that rank is in.
func (l level) half(rank int) (lo, hi int) {
	if rank < l.mid {
		return l.lo, l.mid
	}
	return l.mid, l.hi
}

// other returns the half that rank is not in.
func (l level) other(rank int) (lo, hi int) {
	if rank < l.mid {
		return l.mid, l.hi
	}
	return l.lo, l.mid
}

// target returns rank's counterpart in the other half. If the lower half has one more, its last
// two ranks have the same counterpart.
func (l level) target(rank int) int {
	if rank < l.mid {
		return min(l.mid+rank-l.lo, l.hi-1)
	}
	return l.lo + rank - l.mid
}

// sources returns the ranks whose counterpart is rank. It is one rank; but if the lower half has
// one more, two for the last upper rank and none for the last lower rank.
func (l level) sources(rank int) []int {
	uneven := l.mid-l.lo > l.hi-l.mid
	switch {
	case uneven && rank == l.mid-1:
		return nil
	case uneven && rank == l.hi-1:
		return []int{l.mid - 2, l.mid - 1}
	}
	return []int{l.target(rank)}
}

// reduceHalving reduces the blocks in Out. Afterwards rank's own block is the result, and other
// blocks have partial results. In each level, a rank sends the blocks of the other half and
// reduces the received blocks of its own half. See Thakur, Rabenseifner and Gropp, "Optimization
// of collective communication operations in MPICH", 2005, section 4.3.
func (b *builder) reduceHalving(rank int, all blocks) {
	for _, l := range levels(rank, all.size) {
		lo, hi := l.half(rank)
		off, n := all.span(lo, hi)
		sources := l.sources(rank)
		b.scratch(int64(len(sources)) * n)
		var recv [2]int32
		for j, from := range sources {
			recv[j] = b.recvSome(from, Scratch, int64(j)*n, n)
		}
		lo, hi = l.other(rank)
		give, m := all.span(lo, hi)
		send := b.sendSome(l.target(rank), Out, give, m)
		for j := range sources {
			b.wait(recv[j])
			b.local(Reduce, Out, off, Scratch, int64(j)*n, n)
		}
		b.wait(send)
	}
}

// reduceScatterHalving is reduceHalving from In, which does not change, to a block in Out.
// Partial results are in scratch; it begins with the half of the operand that the rank keeps.
func (b *builder) reduceScatterHalving(rank int, all blocks) {
	src, shift := In, int64(0) // block k begins in src at its place plus shift
	var room int64             // what the partial results take
	for _, l := range levels(rank, all.size) {
		sources := l.sources(rank)
		off, n := all.span(l.half(rank))
		give, m := all.span(l.other(rank))
		give += shift
		to, keep := src, off+shift
		if to == In {
			to, keep, shift, room = Scratch, 0, -off, n
			b.scratch(room)
			if len(sources) == 0 {
				b.local(Copy, Scratch, 0, In, off, n)
			}
		}
		// The first part may be received in the place of the result.
		var recv [2]int32
		var at [2]int64
		for j, from := range sources {
			if at[j] = room + int64(j)*n; src == In {
				at[j] -= n
			}
			b.scratch(at[j] + n)
			recv[j] = b.recvSome(from, Scratch, at[j], n)
		}
		send := b.sendSome(l.target(rank), src, give, m)
		for j := range sources {
			b.wait(recv[j])
			if src == In && j == 0 {
				b.local(Reduce, to, keep, In, off, n)
			} else {
				b.local(Reduce, to, keep, Scratch, at[j], n)
			}
		}
		b.wait(send)
		src = Scratch
	}
	off, n := all.at(rank)
	b.local(Copy, Out, 0, src, off+shift, n)
}

// gatherDoubling gathers the ranks' blocks in Out on all ranks. It runs the levels of halving
// backwards; in each, two halves exchange all their blocks. A rank receives each byte once.
func (b *builder) gatherDoubling(rank int, all blocks) {
	ls := levels(rank, all.size)
	for i := len(ls) - 1; i >= 0; i-- {
		l := ls[i]
		off, n := all.span(l.other(rank))
		recv := b.recvSome(l.target(rank), Out, off, n)
		off, n = all.span(l.half(rank))
		var sends [2]int32
		sources := l.sources(rank)
		for j, to := range sources {
			sends[j] = b.sendSome(to, Out, off, n)
		}
		b.wait(recv)
		b.wait(sends[:len(sources)]...)
	}
}

func (b *builder) allReduceHalving(rank, size int, bytes, elem int64) {
	all := cut(size, bytes, elem)
	b.reduceHalving(rank, all)
	b.gatherDoubling(rank, all)
}

// reduceHalvingTo reduces by halving and sends each rank's block to root.
func (b *builder) reduceHalvingTo(rank, size, root int, bytes, elem int64) {
	all := cut(size, bytes, elem)
	b.reduceHalving(rank, all)
	off, n := all.at(rank)
	if rank != root {
		b.wait(b.sendSome(root, Out, off, n))
		return
	}
	posted := make([]int32, 0, size)
	for r := range size {
		if off, n := all.at(r); r != root {
			posted = append(posted, b.recvSome(r, Out, off, n))
		}
	}
	b.wait(posted...)
}

// folded is a group whose first ranks form pairs, so that the number of pairs and single ranks is
// a power of two.
type folded struct {
	pairs, size int // size is the power of two
}

func fold(size int) folded {
	p := 1
	for 2*p <= size {
		p *= 2
	}
	return folded{pairs: size - p, size: p}
}

// number returns rank's number among the ranks that go on after folding. ok is false for the
// second rank of a pair.
func (f folded) number(rank int) (n int, ok bool) {
	if rank >= 2*f.pairs {
		return rank - f.pairs, true
	}
	return rank / 2, rank%2 == 0
}

// rank is the reverse of number.
func (f folded) rank(n int) int {
	if n < f.pairs {
		return 2 * n
	}
	return n + f.pairs
}

// unfold sends the result to the ranks that did not go on.
func (b *builder) unfold(rank int, f folded, bytes int64) {
	switch {
	case rank >= 2*f.pairs:
	case rank%2 == 0:
		b.wait(b.sendSome(rank+1, Out, 0, bytes))
	default:
		b.wait(b.recvSome(rank-1, Out, 0, bytes))
	}
}

// allReduceDoubling has the fewest rounds. In each, every rank exchanges its whole buffer with
// another rank and reduces it. The operand of the lower ranks comes first, so both get the same
// bits. The result stays in the buffer of the lower operand, which saves a copy.
func (b *builder) allReduceDoubling(rank, size int, bytes int64) {
	f := fold(size)
	n, stays := f.number(rank)
	if size > 1 && stays {
		b.scratch(bytes)
	}
	if rank < 2*f.pairs {
		if !stays {
			b.wait(b.sendSome(rank-1, Out, 0, bytes))
		} else {
			b.wait(b.recvSome(rank+1, Scratch, 0, bytes))
			b.local(Reduce, Out, 0, Scratch, 0, bytes)
		}
	}
	have, spare := Out, Scratch
	for d := 1; stays && d < f.size; d *= 2 {
		mate := f.rank(n ^ d)
		recv := b.recvSome(mate, spare, 0, bytes)
		send := b.sendSome(mate, have, 0, bytes)
		b.wait(recv, send)
		if n&d != 0 {
			have, spare = spare, have
		}
		b.local(Reduce, have, 0, spare, 0, bytes)
	}
	b.local(Copy, Out, 0, have, 0, bytes)
	b.unfold(rank, f, bytes)
}
