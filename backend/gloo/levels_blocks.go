package gloo

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// Collectives with a block for each rank, in two levels. The cost is the bytes and messages between
// hosts. Host g has k(g) ranks.
//
//   - Reduce-scatter of n bytes: a host adds its ranks' operands first. Then n bytes leave it, less its
//     own ranks' blocks; from rank to rank it would be k(g) times as many. A block's partial sum goes
//     straight to the block's rank.
//   - All-gather: a block goes to each other host once.
//   - Gather and scatter move the same bytes in any case. A message for each rank of a host costs the
//     root about 1 us of CPU time each. One message for the host costs two more copies of a block, at
//     about 10 GB/s, on every host at once. Blocks of up to aggregateRooted go together.
//   - All-to-all: one message from host g to host h replaces k(g) k(h) messages, and a block is copied
//     four times more. Blocks from g to h go together if they have at most aggregate bytes on average.
//
// Everything else stays in a host's memory. Blocks may differ in size, and hosts in ranks. The
// ranks of a host share the work for other hosts' ranks in turns.
const (
	aggregateRooted = 8 << 10
	aggregate       = 4 << 10
)

// handlerOf is the rank, by number on a host of k ranks, that handles number i of another host.
func handlerOf(i, k int) int { return i % k }

func (l *levels) reduceScatter(e *engine, out, in []byte, counts []int64, _ int, r backend.Reduction) error {
	s := e.session
	blocks := split(in, counts)
	mine, err := l.reduceColumns(e, blocks, r)
	if err != nil {
		return err
	}
	column := l.column(l.index)
	if l.even {
		c := blocksOf(pick(column, counts), int64(r.Grain))
		return l.between(e, l.same, plan.OpReduceScatter, out, mine, c, r.Combine)
	}
	parts := make([][]byte, len(l.members)) // of this rank's block, by host
	received := grow(&e.joined, len(out)*len(parts))
	for h, m := range l.members {
		if parts[h] = received[h*len(out):][:len(out)]; h != l.host && len(out) > 0 {
			e.post(false, m[handlerOf(l.index, len(m))], parts[h])
		}
	}
	for _, q := range column {
		block := mine[:counts[q]]
		mine = mine[counts[q]:]
		if q == s.rank {
			parts[l.host] = block
		} else if len(block) > 0 {
			e.post(true, q, block)
		}
	}
	if err := e.finishPosted(nil); err != nil {
		return err
	}
	copy(out, parts[0])
	for _, part := range parts[1:] {
		r.Combine(out, part)
	}
	return nil
}

// column returns the ranks whose blocks rank number i of this host adds, by host.
func (l *levels) column(i int) []int {
	var ranks []int
	k := len(l.members[l.host])
	for _, m := range l.members {
		for j := i; j < len(m); j += k {
			ranks = append(ranks, m[j])
		}
	}
	return ranks
}

// reduceColumns adds the blocks of this host's ranks, and returns the sums of this rank's column.
func (l *levels) reduceColumns(e *engine, blocks [][]byte, r backend.Reduction) ([]byte, error) {
	k := len(l.members[l.host])
	columns, lengths, n := make([][]byte, k), make([]int64, k), 0
	for i := range k {
		for _, q := range l.column(i) {
			lengths[i] += int64(len(blocks[q]))
		}
		n += int(lengths[i])
	}
	packed := grow(&e.blocks, n+int(lengths[l.index]))
	mine := packed[n:]
	at := 0
	for i := range k {
		start := at
		for _, q := range l.column(i) {
			at += copy(packed[at:], blocks[q])
		}
		columns[i] = packed[start:at]
	}
	if l.local == nil {
		return columns[0], nil
	}
	return mine, l.inside(e, func(g *shm.Group) error {
		if even(lengths) {
			return g.ReduceScatter(mine, packed[:n], r.Grain, r.Combine, e.stop)
		}
		for i, column := range columns {
			var sum []byte
			if i == l.index {
				sum = mine
			}
			if err := g.Reduce(sum, column, i, r.Grain, r.Combine, e.stop); err != nil {
				return err
			}
		}
		return nil
	})
}

func (l *levels) allGather(e *engine, out, in []byte) error {
	return l.allGatherV(e, out, in, slices.Repeat([]int64{int64(len(in))}, e.session.size))
}

func (l *levels) allGatherV(e *engine, out, in []byte, counts []int64) error {
	return e.onSlot(prefixAllGather, func() error { return l.allGatherBlocks(e, out, in, counts) })
}

func (l *levels) allGatherBlocks(e *engine, out, in []byte, counts []int64) error {
	s := e.session
	blocks := split(out, counts)
	k := len(l.members[l.host])
	lengths, sum := make([]int64, k), 0 // of what each rank of this host gets to know
	for i := range k {
		for _, q := range l.column(i) {
			lengths[i] += counts[q]
		}
		sum += int(lengths[i])
	}
	all := grow(&e.joined, sum)
	columns := split(all, lengths)
	mine, column := columns[l.index], l.column(l.index)
	if err := l.allGatherColumn(e, mine, in, column, counts); err != nil {
		return err
	}
	spread := func(i int) {
		rest := columns[i]
		for _, q := range l.column(i) {
			rest = rest[copy(blocks[q], rest):]
		}
	}
	if len(out) >= wholeBytes*s.size {
		spread(l.index)
		return l.inside(e, func(g *shm.Group) error {
			for i := range k {
				for _, q := range l.column(i) {
					if err := g.Broadcast(blocks[q], i, e.stop); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	err := l.inside(e, func(g *shm.Group) error { return g.AllGatherV(all, mine, lengths, e.stop) })
	if err != nil {
		return err
	}
	for i := range k {
		spread(i)
	}
	return nil
}

// allGatherColumn brings the blocks of a column to this rank.
func (l *levels) allGatherColumn(e *engine, out, in []byte, column []int, counts []int64) error {
	s := e.session
	if l.even {
		c := blocksOf(pick(column, counts), 0)
		return l.between(e, l.same, plan.OpAllGather, out, in, c, nil)
	}
	for _, q := range column {
		part := out[:counts[q]]
		out = out[len(part):]
		if q == s.rank {
			copy(part, in)
		} else if len(part) > 0 {
			e.post(false, q, part)
		}
	}
	for h, m := range l.members {
		if h != l.host && len(in) > 0 {
			e.post(true, m[handlerOf(l.index, len(m))], in)
		}
	}
	return e.finishPosted(nil)
}

// sumOf returns the bytes of some ranks' blocks.
func sumOf(ranks []int, counts []int64) (n int) {
	for _, r := range ranks {
		n += int(counts[r])
	}
	return n
}

// A message of several blocks ends with a checksum of their lengths. The receiver compares it with
// the lengths that it expects.
const sealed = 8

func seal(buf []byte, lengths []int64) {
	binary.LittleEndian.PutUint64(buf[len(buf)-sealed:], sumOver(lengths))
}

func sumOver(lengths []int64) uint64 {
	h := fnv.New64a()
	var b [8]byte
	for _, n := range lengths {
		binary.LittleEndian.PutUint64(b[:], uint64(n))
		h.Write(b[:])
	}
	return h.Sum64()
}

// unseal returns the blocks of a message from a rank.
func (e *engine) unseal(buf []byte, lengths []int64, from int) ([][]byte, error) {
	if binary.LittleEndian.Uint64(buf[len(buf)-sealed:]) != sumOver(lengths) {
		return nil, e.session.mismatch(e.mesh, e.op, from, fmt.Errorf("blocks of %v bytes were expected, others came", lengths))
	}
	return split(buf, lengths), nil
}

// gatherHere brings the blocks of this host's ranks to its rank number leader.
func (l *levels) gatherHere(e *engine, blocks [][]byte, in []byte, leader int, alike bool) error {
	if l.local == nil {
		copy(blocks[0], in)
		return nil
	}
	return l.inside(e, func(g *shm.Group) error {
		if alike {
			return g.GatherList(blocks, in, leader, e.stop)
		}
		to := make([][]byte, g.Size())
		to[leader] = in
		if blocks == nil {
			blocks = make([][]byte, g.Size())
		}
		return g.AllToAllV(blocks, to, e.stop)
	})
}

func (l *levels) gather(e *engine, out, in []byte, root int, counts []int64, alike bool) error {
	s := e.session
	_, rootHost, leader := l.leaders(root)
	here := l.members[l.host]
	if l.host != rootHost {
		lengths, err := l.lengthsHere(e, len(in), alike)
		if err != nil {
			return err
		}
		n := int(totalOf(lengths))
		if n > aggregateRooted*len(here) {
			e.post(true, root, in)
			return e.finishPosted(nil)
		}
		if l.index != 0 {
			return l.gatherHere(e, nil, in, 0, alike)
		}
		packed := grow(&e.joined, n+sealed)
		if err := l.gatherHere(e, split(packed, lengths), in, 0, alike); err != nil {
			return err
		}
		seal(packed, lengths)
		e.post(true, root, packed)
		return e.finishPosted(nil)
	}
	if s.rank != root {
		return l.gatherHere(e, nil, in, leader, alike)
	}
	blocks := split(out, counts)
	together := func(h int) (n int, yes bool) {
		n = sumOf(l.members[h], counts)
		return n + sealed, h != l.host && n <= aggregateRooted*len(l.members[h])
	}
	need := 0
	for h := range l.members {
		if n, yes := together(h); yes {
			need += n
		}
	}
	received, rest := make([][]byte, len(l.members)), grow(&e.joined, need)
	for h, m := range l.members {
		n, yes := together(h)
		switch {
		case yes:
			received[h], rest = rest[:n], rest[n:]
			e.post(false, m[0], received[h])
		case h != l.host:
			for _, r := range m {
				e.post(false, r, blocks[r])
			}
		}
	}
	if err := e.finishPosted(l.gatherHere(e, pick(here, blocks), in, leader, alike)); err != nil {
		return err
	}
	for h, m := range l.members {
		if received[h] == nil {
			continue
		}
		parts, err := e.unseal(received[h], pick(m, counts), m[0])
		if err != nil {
			return err
		}
		for j, r := range m {
			copy(blocks[r], parts[j])
		}
	}
	return nil
}

// lengthsHere returns the length of each block of this host's ranks.
func (l *levels) lengthsHere(e *engine, n int, alike bool) ([]int64, error) {
	lengths := slices.Repeat([]int64{int64(n)}, len(l.members[l.host]))
	if alike {
		return lengths, nil
	}
	mine := []int64{int64(n)}
	return lengths, l.inside(e, func(g *shm.Group) error { return g.AllGather(bytesOf(lengths), bytesOf(mine), e.stop) })
}

func (l *levels) scatter(e *engine, out, in []byte, root int) error {
	s := e.session
	_, rootHost, leader := l.leaders(root)
	n, here := len(out), l.members[l.host]
	together := n <= aggregateRooted
	switch {
	case s.rank == root:
		blocks := split(in, slices.Repeat([]int64{int64(n)}, s.size))
		var packed []byte
		if together {
			packed = grow(&e.joined, n*s.size)
		}
		for h, m := range l.members {
			switch {
			case h == l.host:
			case together:
				start := packed
				for _, r := range m {
					packed = packed[copy(packed, blocks[r]):]
				}
				e.post(true, m[0], start[:n*len(m)])
			default:
				for _, r := range m {
					e.post(true, r, blocks[r])
				}
			}
		}
		return e.finishPosted(l.scatterHere(e, out, pick(here, blocks), leader))
	case l.host == rootHost:
		return l.scatterHere(e, out, nil, leader)
	case !together:
		e.post(false, root, out)
		return e.finishPosted(nil)
	case l.index != 0:
		return l.scatterHere(e, out, nil, 0)
	}
	packed := grow(&e.joined, n*len(here))
	e.post(false, root, packed)
	if err := e.finishPosted(nil); err != nil {
		return err
	}
	return l.scatterHere(e, out, split(packed, slices.Repeat([]int64{int64(n)}, len(here))), 0)
}

// scatterHere gives each rank of this host its block from rank number leader.
func (l *levels) scatterHere(e *engine, out []byte, blocks [][]byte, leader int) error {
	if l.local == nil {
		copy(out, blocks[0])
		return nil
	}
	return l.inside(e, func(g *shm.Group) error { return g.ScatterList(out, blocks, leader, e.stop) })
}

// allToAll first exchanges the block lengths among the ranks of a host. Then both hosts of a pair
// know what goes from one to the other.
func (l *levels) allToAll(e *engine, out, in []byte, recv, send []int64) error {
	s := e.session
	here, p := l.members[l.host], s.size
	k := len(here)
	told := room(e.lengths, 2*p*(k+1))
	e.lengths = told
	mine, all := told[:2*p], told[2*p:]
	copy(mine, send)
	copy(mine[p:], recv)
	copy(all, mine) // if it is alone
	err := l.inside(e, func(g *shm.Group) error { return g.AllGather(bytesOf(all), bytesOf(mine), e.stop) })
	if err != nil {
		return err
	}
	sends := func(i int) []int64 { return all[2*p*i:][:p] }
	recvs := func(i int) []int64 { return all[2*p*i+p:][:p] }
	outs, ins := split(out, recv), split(in, send)

	// Post the messages between single ranks before anything else.
	var going, coming []bundle
	need := 0
	for h, m := range l.members {
		if h == l.host {
			continue
		}
		gone, come := bundle{host: h}, bundle{host: h}
		for i := range here {
			gone.lengths = append(gone.lengths, pick(m, sends(i))...)
		}
		for _, r := range m {
			for i := range here {
				come.lengths = append(come.lengths, recvs(i)[r])
			}
		}
		most := int64(aggregate * k * len(m))
		if n := totalOf(gone.lengths); n <= most {
			going = append(going, gone)
			need += 3*int(n) + sealed
		} else {
			for _, r := range m {
				e.post(true, r, ins[r])
			}
		}
		if n := totalOf(come.lengths); n <= most {
			coming = append(coming, come)
			need += 3*int(n) + sealed
		} else {
			for _, r := range m {
				e.post(false, r, outs[r])
			}
		}
	}
	free := grow(&e.joined, need)
	take := func(n int) []byte {
		buf := free[:n:n]
		free = free[n:]
		return buf
	}

	err = l.bundle(e, going, ins, sends, take)
	if err == nil {
		for i := range coming {
			x := &coming[i]
			if l.mine(x.host) {
				x.buf = take(int(totalOf(x.lengths)) + sealed)
				e.post(false, l.opposite(x.host), x.buf)
			}
		}
		for _, x := range going {
			if l.mine(x.host) {
				e.post(true, l.opposite(x.host), x.buf)
			}
		}
		err = l.exchangeHere(e, pick(here, outs), pick(here, ins))
	}
	if err = e.finishPosted(err); err != nil {
		return err
	}
	return l.unbundle(e, coming, outs, recvs, take)
}

// bundle is the blocks that go together from one host to another. Of a host with k ranks, number
// handlerOf(h, k) handles the bundles to and from host h.
type bundle struct {
	host    int     // the other
	lengths []int64 // of the blocks: of the first sender's, by receiver, and so on
	buf     []byte  // the blocks and a seal, on who sees to it
}

// mine reports whether this rank handles the bundles to and from host h.
func (l *levels) mine(h int) bool { return handlerOf(h, len(l.members[l.host])) == l.index }

// opposite is the rank of host h that handles the bundles to and from this host.
func (l *levels) opposite(h int) int {
	m := l.members[h]
	return m[handlerOf(l.host, len(m))]
}

// bundle brings the blocks for other hosts to the ranks that send them.
func (l *levels) bundle(e *engine, going []bundle, ins [][]byte, sends func(i int) []int64, take func(n int) []byte) error {
	if len(going) == 0 {
		return nil
	}
	k := len(l.members[l.host])
	to, from := make([][]byte, k), make([][]byte, k)
	for i := range k {
		out, in := 0, 0
		for _, x := range going {
			if handlerOf(x.host, k) == i {
				out += sumOf(l.members[x.host], sends(l.index))
			}
			if l.mine(x.host) {
				in += sumOf(l.members[x.host], sends(i))
			}
		}
		to[i], from[i] = take(out), take(in)
		rest := to[i]
		for _, x := range going {
			if handlerOf(x.host, k) == i {
				for _, r := range l.members[x.host] {
					rest = rest[copy(rest, ins[r]):]
				}
			}
		}
	}
	if err := l.exchangeHere(e, from, to); err != nil {
		return err
	}
	for j := range going {
		x := &going[j]
		if !l.mine(x.host) {
			continue
		}
		x.buf = take(int(totalOf(x.lengths)) + sealed)
		rest := x.buf
		for i := range from {
			n := sumOf(l.members[x.host], sends(i))
			rest = rest[copy(rest, from[i][:n]):]
			from[i] = from[i][n:]
		}
		seal(x.buf, x.lengths)
	}
	return nil
}

// unbundle gives the blocks from other hosts to their ranks.
func (l *levels) unbundle(e *engine, coming []bundle, outs [][]byte, recvs func(i int) []int64, take func(n int) []byte) error {
	if len(coming) == 0 {
		return nil
	}
	k := len(l.members[l.host])
	to, from := make([][]byte, k), make([][]byte, k)
	rest := make([][]byte, k)
	for i := range k {
		out, in := 0, 0
		for _, x := range coming {
			if l.mine(x.host) {
				out += sumOf(l.members[x.host], recvs(i))
			}
			if handlerOf(x.host, k) == i {
				in += sumOf(l.members[x.host], recvs(l.index))
			}
		}
		to[i], from[i] = take(out), take(in)
		rest[i] = to[i]
	}
	for _, x := range coming {
		if !l.mine(x.host) {
			continue
		}
		parts, err := e.unseal(x.buf, x.lengths, l.opposite(x.host))
		if err != nil {
			return err
		}
		for j, part := range parts {
			rest[j%k] = rest[j%k][copy(rest[j%k], part):]
		}
	}
	if err := l.exchangeHere(e, from, to); err != nil {
		return err
	}
	for _, x := range coming {
		buf := &from[handlerOf(x.host, k)]
		for _, r := range l.members[x.host] {
			*buf = (*buf)[copy(outs[r], *buf):]
		}
	}
	return nil
}

// exchangeHere is an all-to-all among the ranks of this host.
func (l *levels) exchangeHere(e *engine, out, in [][]byte) error {
	if l.local == nil {
		copy(out[0], in[0])
		return nil
	}
	return l.inside(e, func(g *shm.Group) error { return g.AllToAllV(out, in, e.stop) })
}
