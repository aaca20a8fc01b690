package cuda

// hop is one step of a rank in a ring: of a range of elements it takes what the
// left neighbour has passed on, does something with it, and passes the outcome on
// to the right one.
type hop struct {
	lo, hi  int  // the elements
	take    bool // something has come from the left
	combine bool // it is combined with the rank's own
	whole   bool // that was the last of the ranks: the result is there
	keep    bool // the outcome is what the rank's own elements become
	pass    bool // the outcome goes to the right
}

// roundsAtOnce is how many rounds of a ring go side by side: while one's words are on
// their way between the devices, the other's elements are combined.
const roundsAtOnce = 2

// hops calls f for the steps of a rank in a ring of size ranks that all-reduces n
// elements. A step is on at most grain elements, grain and the borders within a
// round being multiples of unit.
//
// The elements go in rounds of size blocks each. A round is a reduce-scatter, in
// which each block goes once round the ring and gathers every rank's elements,
// followed by an all-gather, in which it goes round again as the result: each
// rank sends 2(size-1)/size of the data, which is the least there is. Blocks
// without elements make no steps.
//
// Left and right see the messages between them in one order. A rank's step needs
// steps of its neighbours that come earlier in this order, as long as more than
// roundsAtOnce messages can be on their way, so the ring cannot stand still.
func hops(rank, size, n, grain, unit int, f func(hop)) {
	if size == 1 {
		return
	}
	rounds := (n + size*grain - 1) / (size * grain)
	for first := 0; first < rounds; first += roundsAtOnce {
		for s := range 2*size - 1 {
			for round := first; round < min(first+roundsAtOnce, rounds); round++ {
				base := round * size * grain
				m := min(size*grain, n-base)
				each := ((m+size-1)/size + unit - 1) / unit * unit
				block := around((rank-s)%size, size)
				lo, hi := min(block*each, m), min((block+1)*each, m)
				if lo == hi {
					continue
				}
				f(hop{
					lo: base + lo, hi: base + hi,
					take: s > 0, combine: s > 0 && s < size, whole: s == size-1,
					keep: s >= size-1, pass: s < 2*size-2,
				})
			}
		}
	}
}
