package group

import "math/bits"

// The ways of a broadcast from host to host.
const (
	Flat  = "flat"  // the root sends to every rank
	Tree  = "tree"  // a binomial tree of ranks
	Chain = "chain" // each rank sends to the next one
)

// Route is a rank's place in a broadcast.
type Route struct {
	From int   // whom it has the data from, -1 at the root
	To   []int // whom it gives them to
}

// RouteOf returns the route of a rank.
func RouteOf(way string, rank, size, root int) Route {
	at := func(v int) int { return Around(v+root, size) }
	v := Around(rank-root, size) // as if the root were rank 0
	r := Route{From: -1}
	switch way {
	case Flat:
		if v > 0 {
			r.From = root
			break
		}
		for i := 1; i < size; i++ {
			r.To = append(r.To, at(i))
		}
	case Tree:
		low := v & -v
		if v > 0 {
			r.From = at(v - low)
		} else {
			low = 1 << bits.Len(uint(size-1))
		}
		// The largest part of the tree first.
		for step := low >> 1; step > 0; step >>= 1 {
			if v+step < size {
				r.To = append(r.To, at(v+step))
			}
		}
	case Chain:
		if v > 0 {
			r.From = at(v - 1)
		}
		if v+1 < size {
			r.To = []int{at(v + 1)}
		}
	}
	return r
}

// Around returns i as a number from 0 to n-1, for i from -n.
func Around(i, n int) int { return (i + n) % n }

// WayOf returns the way that brings so many chunks to all ranks in the shortest time, if a rank
// sends one chunk at a time. The unit is the time of one chunk. Flat takes size-1 for each chunk. A
// tree takes one for each chunk and child of the root. A chain takes one for each chunk, and one for
// each rank on the way.
func WayOf(size, chunks int) string {
	flat, tree, chain := chunks*(size-1), chunks*bits.Len(uint(size-1)), chunks+size-2
	switch {
	case flat <= tree && flat <= chain:
		return Flat
	case tree <= chain:
		return Tree
	}
	return Chain
}

// WayUpTo returns up to how many chunks the way of so many is the one, -1 if
// for all.
func WayUpTo(size, chunks int) int {
	// The last to come is the chain, which beats a tree of two levels or more at the
	// latest when there are as many chunks as ranks.
	way, last := WayOf(size, chunks), chunks
	for ; WayOf(size, last+1) == way; last++ {
		if last > chunks+size {
			return -1
		}
	}
	return last
}
