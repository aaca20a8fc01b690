package cluster

import (
	"cmp"
	"slices"
)

// Member is what a rank says about itself, as far as clusters go by it. The zero value of a field
// means that it is unknown.
type Member struct {
	Host    string // ranks of different hosts are never in one cluster
	Cluster string // splits a host into several clusters
	Device  string // kind of device that holds its tensors; "" is the CPU
	NIC     string // network interface by which the rank reaches other clusters
	Speed   int64  // of that interface, in any unit that all ranks share
}

// Layout says which ranks form each cluster, and which share of the traffic between clusters each
// rank carries. It is immutable.
type Layout struct {
	cluster, place []int   // by rank: its cluster, and its place among the cluster's ranks
	members        [][]int // by cluster: its ranks, ascending
	weights        []int64 // by rank
}

// Find returns the layout of a group. A cluster is the ranks with equal Host, Cluster and Device.
// Clusters are numbered in the order of their first ranks.
//
// The ranks of a cluster share its traffic in proportion to the speed of their interfaces. Ranks with one interface share its
// speed. If a speed is unknown, it counts as the lowest known one of the cluster.
func Find(ranks []Member) *Layout {
	type key struct{ host, cluster, device string }
	numbers, at := map[key]int{}, make([]int, len(ranks))
	for r, m := range ranks {
		k := key{m.Host, m.Cluster, m.Device}
		if _, known := numbers[k]; !known {
			numbers[k] = len(numbers)
		}
		at[r] = numbers[k]
	}
	l := New(at, nil)
	for _, members := range l.members {
		slowest, users := int64(0), map[string]int64{}
		for _, r := range members {
			if s := ranks[r].Speed; s > 0 && (slowest == 0 || s < slowest) {
				slowest = s
			}
			users[ranks[r].NIC]++
		}
		all := int64(1) // divisible by each number of users
		for _, n := range users {
			all = lcm(all, n)
		}
		for _, r := range members {
			l.weights[r] = cmp.Or(max(0, ranks[r].Speed), slowest, 1)
			if ranks[r].NIC != "" {
				l.weights[r] *= all / users[ranks[r].NIC]
			}
		}
	}
	return l
}

// New returns the layout of a group whose rank r is in cluster clusters[r], which may be any number,
// and carries weights[r] of the traffic, at least 1. Nil weights are equal.
func New(clusters []int, weights []int64) *Layout {
	l := &Layout{cluster: make([]int, len(clusters)), place: make([]int, len(clusters)), weights: make([]int64, len(clusters))}
	numbers := map[int]int{}
	for r, name := range clusters {
		c, known := numbers[name]
		if !known {
			c = len(numbers)
			numbers[name] = c
			l.members = append(l.members, nil)
		}
		l.cluster[r], l.place[r], l.weights[r] = c, len(l.members[c]), 1
		l.members[c] = append(l.members[c], r)
	}
	if weights != nil {
		copy(l.weights, weights)
	}
	return l
}

// Ranks returns how many ranks there are.
func (l *Layout) Ranks() int { return len(l.cluster) }

// Clusters returns how many clusters there are.
func (l *Layout) Clusters() int { return len(l.members) }

// Cluster returns the number of rank's cluster.
func (l *Layout) Cluster(rank int) int { return l.cluster[rank] }

// Numbers returns each rank's cluster. The caller must not change them.
func (l *Layout) Numbers() []int { return l.cluster }

// Place returns rank's place among the ranks of its cluster.
func (l *Layout) Place(rank int) int { return l.place[rank] }

// Members returns the ranks of a cluster, ascending. The caller must not change them.
func (l *Layout) Members(cluster int) []int { return l.members[cluster] }

// Share returns which part of its cluster's traffic a rank carries.
func (l *Layout) Share(rank int) float64 {
	var all int64
	for _, r := range l.members[l.cluster[rank]] {
		all += l.weights[r]
	}
	return float64(l.weights[rank]) / float64(all)
}

// cut returns where the parts of the ranks of a cluster begin, and the end: [lo, hi) in whole
// elements, in proportion to the weights.
func (l *Layout) cut(cluster int, lo, hi, elem int64) []int64 {
	m := l.members[cluster]
	var all, sum int64
	for _, r := range m {
		all += l.weights[r]
	}
	at := make([]int64, len(m)+1)
	for i, r := range m {
		at[i] = lo + scale((hi-lo)/elem, sum, all)*elem
		sum += l.weights[r]
	}
	at[len(m)] = hi
	return at
}

// cutBlocks is cut at the beginnings of blocks. Turn varies who gets one more than others.
func (l *Layout) cutBlocks(cluster int, start []int64, turn int) []int64 {
	m := l.members[cluster]
	var all, sum int64
	for _, r := range m {
		all += l.weights[r]
	}
	at, shift := make([]int64, len(m)+1), all/int64(len(m))*int64(turn%len(m))
	for i, r := range m {
		at[i] = start[0]
		if i > 0 {
			at[i] = start[min(int64(len(start)-1), (int64(len(start)-1)*sum+shift)/all)]
		}
		sum += l.weights[r]
	}
	at[len(m)] = start[len(start)-1]
	return at
}

// grain returns a number of elements that every cluster cuts into whole ones, in proportion.
func (l *Layout) grain() int64 {
	g := int64(1)
	for _, m := range l.members {
		var all int64
		for _, r := range m {
			all += l.weights[r]
		}
		if g = lcm(g, all); g > maxGrain {
			return maxGrain
		}
	}
	return g
}

// maxGrain bounds grain. A cluster whose weights do not divide it gets parts that differ by an
// element.
const maxGrain = 1 << 16

func lcm(a, b int64) int64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// piece is a range for which one rank of each cluster is responsible.
type piece struct {
	lo, hi int64
	owner  []int // by cluster: the rank
}

// pieces cuts a range wherever the parts of a cluster's ranks begin: cuts has them by cluster.
func (l *Layout) pieces(cuts [][]int64) []piece {
	at := slices.Concat(cuts...)
	slices.Sort(at)
	at = slices.Compact(at)
	var all []piece
	for i := range len(at) - 1 {
		p := piece{lo: at[i], hi: at[i+1], owner: make([]int, len(cuts))}
		for c, cut := range cuts {
			// The last part that begins at or before lo is not empty.
			next, _ := slices.BinarySearch(cut[:len(cut)-1], p.lo+1)
			p.owner[c] = l.members[c][next-1]
		}
		all = append(all, p)
	}
	return all
}
