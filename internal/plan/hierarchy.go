package plan

// Layout says which ranks of a group share a host. It is immutable.
type Layout struct {
	host, index []int32   // by rank: its host, and which of the host's ranks it is
	members     [][]int32 // by host: its ranks, ascending
	even        int       // how many ranks each host has, 0 if they differ
}

// NewLayout returns the layout of a group whose rank r is on host hosts[r],
// which may be any number.
func NewLayout(hosts []int) *Layout {
	l := &Layout{host: make([]int32, len(hosts)), index: make([]int32, len(hosts))}
	numbers := make(map[int]int32)
	for r, name := range hosts {
		h, ok := numbers[name]
		if !ok {
			h = int32(len(numbers))
			numbers[name] = h
			l.members = append(l.members, nil)
		}
		l.host[r], l.index[r] = h, int32(len(l.members[h]))
		l.members[h] = append(l.members[h], int32(r))
	}
	for h, m := range l.members {
		switch {
		case h == 0:
			l.even = len(m)
		case len(m) != l.even:
			l.even = 0
		}
	}
	return l
}

// Ranks returns how many ranks there are.
func (l *Layout) Ranks() int { return len(l.host) }

// Hosts returns how many hosts there are.
func (l *Layout) Hosts() int { return len(l.members) }

// Host returns the number of rank's host; hosts are numbered by their first ranks.
func (l *Layout) Host(rank int) int { return int(l.host[rank]) }

// Members returns the ranks of a host, ascending.
func (l *Layout) Members(host int) []int {
	ranks := make([]int, len(l.members[host]))
	for i, r := range l.members[host] {
		ranks[i] = int(r)
	}
	return ranks
}

// PerHost returns how many ranks each host has, 0 if they differ.
func (l *Layout) PerHost() int { return l.even }

// inside runs a planner on the ranks of rank's host.
func (b *builder) inside(l *Layout, rank int, planner func(index, size int)) {
	members := l.members[l.host[rank]]
	b.within(func(v int) int { return int(members[v]) }, 0, func() { planner(int(l.index[rank]), len(members)) })
}

// between runs a planner on one rank of each host; of returns that rank.
func (b *builder) between(l *Layout, rank int, of func(host int) int, off int64, planner func(host, hosts int)) {
	b.within(of, off, func() { planner(int(l.host[rank]), len(l.members)) })
}

// allReduceHierarchical reduces on each host, then between hosts. Each byte leaves a host as
// often as if the host were one rank. If hosts have equal numbers of ranks, each rank reduces one
// share on its host. It all-reduces that with the ranks of the same index on other hosts, and
// sends the result to its host. All shares run at the same time. Otherwise the first rank of each
// host does all of it.
func (b *builder) allReduceHierarchical(rank int, l *Layout, bytes, elem int64, outer func(b *builder, rank, size int, bytes int64)) {
	if bytes == 0 {
		return
	}
	if l.even == 0 {
		b.inside(l, rank, func(index, size int) { b.reduceInOrder(index, size, 0, bytes) })
		if l.index[rank] == 0 {
			b.between(l, rank, l.first, 0, func(host, hosts int) { outer(b, host, hosts, bytes) })
		}
		b.inside(l, rank, func(index, size int) { b.broadcastFlat(index, size, 0, bytes) })
		return
	}
	all := cut(l.even, bytes, elem)
	index := l.index[rank]
	off, n := all.at(int(index))
	b.inside(l, rank, func(index, size int) { b.reduceParts(index, all, Out, Out, off) })
	b.between(l, rank, l.like(int(index)), off, func(host, hosts int) { outer(b, host, hosts, n) })
	b.inside(l, rank, func(index, size int) { b.gatherParts(index, all) })
}

func (l *Layout) first(host int) int { return int(l.members[host][0]) }

// heads returns the rank that represents each host in an operation with a root: the root on its
// host, the first rank elsewhere.
func (l *Layout) heads(root int) func(host int) int {
	return func(host int) int {
		if host == int(l.host[root]) {
			return root
		}
		return l.first(host)
	}
}

// broadcastHierarchical broadcasts to one rank of each host, and from there to the host's other
// ranks.
func (b *builder) broadcastHierarchical(rank, root int, l *Layout, bytes int64, outer func(b *builder, rank, size, root int, bytes int64)) {
	if bytes == 0 {
		return
	}
	heads := l.heads(root)
	head := heads(int(l.host[rank]))
	if rank == head {
		b.between(l, rank, heads, 0, func(host, hosts int) { outer(b, host, hosts, int(l.host[root]), bytes) })
	}
	b.inside(l, rank, func(index, size int) { b.broadcastFlat(index, size, int(l.index[head]), bytes) })
}

// allGatherHierarchical gathers the ranks' blocks in Out. First the ranks with the same index on
// their hosts gather around a ring. Then the ranks of a host exchange their blocks. Each block
// enters a host once. If hosts differ in their numbers of ranks, blocks go straight to all ranks.
func (b *builder) allGatherHierarchical(rank int, l *Layout, all blocks) {
	if l.even == 0 {
		b.gatherParts(rank, all)
		return
	}
	index := int(l.index[rank])
	block := func(host, index int) (off, n int64) { return all.at(int(l.members[host][index])) }
	b.between(l, rank, l.like(index), 0, func(host, hosts int) {
		to, from := (host+1)%hosts, (host-1+hosts)%hosts
		b.rounds(int64(hosts-1), 1, func(i int64) (recv, send int32) {
			out := (host - int(i) + hosts) % hosts
			off, n := block((out-1+hosts)%hosts, index)
			recv = b.recvSome(from, Out, off, n)
			off, n = block(out, index)
			return recv, b.sendSome(to, Out, off, n)
		}, nil)
	})
	b.tradeColumns(l, rank, func(peer, host int) int32 {
		off, n := block(host, index)
		return b.sendSome(peer, Out, off, n)
	}, func(peer, host int, _ int64) int32 {
		off, n := block(host, peer)
		return b.recvSome(peer, Out, off, n)
	}, nil)
}

// like returns the ranks of an index, by host.
func (l *Layout) like(index int) func(host int) int {
	return func(host int) int { return int(l.members[host][index]) }
}

// tradeColumns is trade among the ranks of a host, with one message for each host between each
// two of them. recv and done get the message's number.
func (b *builder) tradeColumns(l *Layout, rank int, send func(peer, host int) int32, recv func(peer, host int, i int64) int32, done func(host int, i int64)) {
	hosts := int64(len(l.members))
	b.inside(l, rank, func(index, size int) {
		b.rounds(int64(size-1)*hosts, window, func(i int64) (int32, int32) {
			d, host := int(i/hosts)+1, int(i%hosts)
			r := recv((index+d)%size, host, i)
			return r, send((index-d+size)%size, host)
		}, func(i int64) {
			if done != nil {
				done(int(i%hosts), i)
			}
		})
	})
}

// reduceScatterHierarchical first reduces on each host: a rank reduces the blocks of all ranks
// with its index. Then the ranks with the same index exchange and reduce their blocks. Each block
// leaves a host once. If hosts differ in their numbers of ranks, blocks go straight to their
// ranks.
func (b *builder) reduceScatterHierarchical(rank int, l *Layout, all blocks) {
	if l.even == 0 {
		b.reduceParts(rank, all, In, Out, 0)
		return
	}
	// Scratch: room for received blocks, then the column: a block for each host.
	index, hosts := int(l.index[rank]), len(l.members)
	largest, messages := all.largest(), int64(l.even-1)*int64(hosts)
	column := blocks{size: hosts, offs: make([]int64, hosts+1)}
	column.offs[0] = largest * max(min(window, messages), int64(hosts))
	for h := range hosts {
		off, n := all.at(l.like(index)(h))
		column.offs[h+1] = column.offs[h] + n
		b.local(Copy, Scratch, column.offs[h], In, off, n)
	}
	b.scratch(column.offs[hosts])
	b.tradeColumns(l, rank, func(peer, host int) int32 {
		off, n := all.at(l.like(peer)(host))
		return b.sendSome(peer, In, off, n)
	}, func(peer, host int, i int64) int32 {
		_, n := column.at(host)
		return b.recvSome(peer, Scratch, i%window*largest, n)
	}, func(host int, i int64) {
		off, n := column.at(host)
		b.local(Reduce, Scratch, off, Scratch, i%window*largest, n)
	})
	b.between(l, rank, l.like(index), 0, func(host, _ int) { b.reduceParts(host, column, Scratch, Out, 0) })
}
