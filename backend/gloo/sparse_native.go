package gloo

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"math/bits"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/internal/runs"
	"github.com/c10d-go/c10d/tensor"
)

const (
	// gatherBytes is the mean number of bytes of a rank's entries up to which ranks gather.
	// BenchmarkSparse on 2 busy CPUs: at 45 KB gathering and owners take equally long with 8
	// ranks; at 85 KB owners take two thirds with 8 ranks, and longer with 2; from 0.8 MB on
	// owners are faster.
	gatherBytes = 64 << 10

	// fullness bounds the dense form in shared memory: ranks must have, on average, at least one
	// in fullness of the union's coordinates. BenchmarkSparse as above, rows of 64 floats: if they
	// have 1 in 2, dense takes 0.6 (2 ranks) to 0.85 (8 ranks) of the owners' time; 1 in 4, as
	// long or longer; all of them, 0.5 to 0.7. Over TCP with 8 ranks it always takes longer, since
	// it never moves less.
	fullness = 2

	// samples is how many of its keys a rank publishes, so that ranges can be cut evenly. A range
	// then has at most 1/samples of a rank's entries more than its share.
	samples = 32

	// shownDims is how many dimensions are sent in full, to be named in an error.
	shownDims = 8
)

// window is how many bytes a rank allocates because others announced them. For more than that,
// memory grows as data arrive. Tests shrink it.
var window int64 = 256 << 20

// sparseMeta describes a rank's tensor to the others.
type sparseMeta struct {
	same    [4 + 1 + shownDims]int64 // dtype, kind, sparse dimensions, dimensions, digest of the shape, the first of it
	entries int64
	keys    [samples]int64 // evenly spread among its keys, ascending
}

const metaLen = 4 + 1 + shownDims + 1 + samples

func (m *sparseMeta) encode(to []int64) {
	n := copy(to, m.same[:])
	to[n] = m.entries
	copy(to[n+1:], m.keys[:])
}

func (m *sparseMeta) decode(from []int64) {
	n := copy(m.same[:], from)
	m.entries = from[n]
	copy(m.keys[:], from[n+1:])
}

func (m *sparseMeta) String() string {
	dims := max(m.same[3], 0)
	more := ""
	if dims > shownDims {
		dims, more = shownDims, fmt.Sprintf(" and %d more", m.same[3]-shownDims)
	}
	return fmt.Sprintf("%v of %v%v%s with %d sparse dimensions", backend.ReduceKind(m.same[1]), tensor.DType(m.same[0]), m.same[5:5+dims], more, m.same[2])
}

// sampled is how many keys a rank with so many entries publishes.
func sampled(entries int64) int { return int(min(entries, samples)) }

// odd returns the first rank whose tensor differs from most others', and one of these; -1 if all
// are alike. All ranks get the same answer.
func odd(all []sparseMeta) (culprit, usual int) {
	best := 0
	for r := range all {
		n := 0
		for o := range all {
			if all[o].same == all[r].same {
				n++
			}
		}
		if n > best {
			best, usual = n, r
		}
	}
	for r := range all {
		if all[r].same != all[usual].same {
			return r, usual
		}
	}
	return -1, usual
}

// sparseScratch is memory that an engine keeps for sparse all-reduces.
type sparseScratch struct {
	meta                []int64
	metas               []sparseMeta
	samples             []sample
	bounds              []uint64
	cuts                []int
	counts              []int64 // by rank and owner
	send, recv, lengths []int64
	got                 []int64 // by owner: how many coordinates it has
	keys, theirs, union []uint64
	runs                [][]uint64
	values              [][]byte
	scaled, out, in     []byte // own values after Before; keys and blocks to send; what came
	rows                []byte
	merger              runs.Merger
}

func (s *sparseScratch) size() int {
	return cap(s.scaled) + cap(s.out) + cap(s.in) + cap(s.rows) + 8*(cap(s.keys)+cap(s.theirs)+cap(s.union)+cap(s.counts)) + s.merger.Size()
}

type sample struct{ key, weight uint64 }

// sparseRun is one all-reduce of a sparse tensor.
type sparseRun struct {
	*sparseScratch
	w       *sparseWork
	e       *engine
	rank, n int
	sparse  int
	shape   []int
	dtype   tensor.DType
	coords  uint64 // how many coordinates the sparse dimensions have
	row     int    // bytes of an entry's values
	mine    []uint64
	vals    []byte
}

func (w *sparseWork) runNative(mine *tensor.Tensor) error {
	e := w.host.engine
	if e.sparse == nil {
		e.sparse = &sparseScratch{}
	}
	x := &sparseRun{
		sparseScratch: e.sparse, w: w, e: e, rank: e.session.rank, n: e.session.size,
		sparse: mine.SparseDims(), shape: mine.Shape(), dtype: mine.DType(),
	}
	defer func() {
		clear(x.runs)
		clear(x.values)
		if x.size() > keepScratch {
			e.sparse = nil
		}
	}()
	if err := x.begin(mine); err != nil {
		return err
	}
	metas, err := x.agree()
	if err != nil {
		return err
	}
	do := x.owners
	form := e.session.sparse
	if form == SparseGather || form == SparseAuto && gathers(metas, x.row) {
		do = x.gather
	}
	union, sums, err := do(metas)
	if err != nil {
		return err
	}
	return x.finish(union, sums)
}

// begin finds the keys of this rank's entries, and their values.
func (x *sparseRun) begin(mine *tensor.Tensor) error {
	x.coords, x.row = 1, x.dtype.Size()
	for i, d := range x.shape {
		if i < x.sparse {
			x.coords *= uint64(d)
		} else {
			x.row *= d
		}
	}
	at, err := tensor.Data[int64](mine.Indices())
	if err != nil {
		return err
	}
	n := mine.NNZ()
	x.keys = room(x.keys, n)
	clear(x.keys)
	for dim := range x.sparse {
		size := uint64(x.shape[dim])
		for i, v := range at[dim*n : (dim+1)*n] {
			x.keys[i] = x.keys[i]*size + uint64(v)
		}
	}
	x.mine, x.vals = x.keys, mine.Values().Bytes()
	if x.w.red.Before != nil {
		scaled := grow(&x.scaled, len(x.vals))
		copy(scaled, x.vals)
		before(x.w.red, scaled)
		x.vals = scaled
	}
	return nil
}

// agree exchanges the descriptions of all ranks' tensors and checks that they match.
func (x *sparseRun) agree() ([]sparseMeta, error) {
	var m sparseMeta
	m.same = [...]int64{int64(x.dtype), int64(x.w.kind), int64(x.sparse), int64(len(x.shape)), digest(x.shape), 4 + shownDims: 0}
	for i, d := range x.shape[:min(len(x.shape), shownDims)] {
		m.same[5+i] = int64(d)
	}
	m.entries = int64(len(x.mine))
	for i := range sampled(m.entries) {
		m.keys[i] = int64(x.mine[i*len(x.mine)/sampled(m.entries)])
	}
	x.meta = room(x.meta, metaLen*(x.n+1))
	own, all := x.meta[:metaLen], x.meta[metaLen:]
	m.encode(own)
	if err := x.e.session.route.allGather(x.e, bytesOf(all), bytesOf(own)); err != nil {
		return nil, err
	}
	x.metas = room(x.metas, x.n)
	for r := range x.metas {
		x.metas[r].decode(all[r*metaLen:])
	}
	if culprit, usual := odd(x.metas); culprit >= 0 {
		// The first to say so ends the group. When all have come here, all have the
		// reason by themselves, so an error of the barrier tells nothing new.
		_ = x.e.session.route.barrier(x.e)
		return nil, x.w.host.mismatch(culprit, fmt.Errorf("sparse tensors do not match: rank %d has %v, rank %d %v", culprit, &x.metas[culprit], usual, &x.metas[usual]))
	}
	// Ranks coalesce first, so no rank has more entries than there are coordinates. No product
	// below overflows an int64.
	most := min(x.coords, maxEntries, math.MaxInt)
	for r := range x.metas {
		m := &x.metas[r]
		if m.entries < 0 || uint64(m.entries) > most {
			return nil, x.w.host.mismatch(r, fmt.Errorf("rank %d announces %d entries, of at most %d", r, m.entries, most))
		}
		for i, k := range m.keys[:sampled(m.entries)] {
			if k < 0 || uint64(k) >= x.coords || i > 0 && k <= m.keys[i-1] {
				return nil, x.w.host.mismatch(r, fmt.Errorf("rank %d announces coordinates %v, of %d", r, m.keys[:sampled(m.entries)], x.coords))
			}
		}
	}
	// Sums of lengths stay within an int.
	total, longest, largest := uint64(0), int64(0), 0
	for r := range x.metas {
		n := x.metas[r].entries
		total += uint64(n)
		if n > longest {
			longest, largest = n, r
		}
	}
	if hi, all := bits.Mul64(total, uint64(x.row)+16); hi != 0 || all > min(1<<60, math.MaxInt) {
		return nil, x.w.host.mismatch(largest, fmt.Errorf("rank %d announces %d entries of %d bytes, the ranks %d together", largest, longest, x.row, total))
	}
	return x.metas, nil
}

func digest(shape []int) int64 {
	h := fnv.New64a()
	for _, d := range shape {
		var b [8]byte
		for i := range b {
			b[i] = byte(uint64(d) >> (8 * i))
		}
		h.Write(b[:])
	}
	return int64(h.Sum64())
}

// gathers is the first rule. All ranks have the numbers it uses.
func gathers(metas []sparseMeta, row int) bool {
	total := int64(0)
	for r := range metas {
		total += metas[r].entries
	}
	return total <= int64(len(metas))*(gatherBytes/(int64(row)+8))
}

// densely is the second rule, once the union is known: do the ranks' entries, total in all, fill it
// enough?
func densely(total, union int64, ranks int) bool {
	hi, all := bits.Mul64(uint64(union), uint64(ranks))
	return hi == 0 && uint64(total) >= all/fullness
}

// denseIsBetter reports whether to all-reduce the values as a dense tensor. Among clusters one
// then receives twice the union. With owners it receives the union once, and for each of its ranks
// the other clusters' values in that rank's range. BenchmarkSparse has no network between its clusters.
// There both forms take equally long if ranks have all rows, and owners are faster if they have fewer.
func (x *sparseRun) denseIsBetter(total, union int64) bool {
	s := x.e.session
	switch {
	case s.sparse != SparseAuto:
		return s.sparse == SparseDense
	case s.clusters != nil:
		return s.sums == SumsFast && densely(total, union, fullness*s.parts)
	}
	return s.shared != nil && densely(total, union, x.n)
}

// gather sends all entries to every rank, which adds them.
func (x *sparseRun) gather(metas []sparseMeta) ([]uint64, []byte, error) {
	// A block holds the values, which must be aligned, then the keys.
	total := 0
	x.lengths = room(x.lengths, x.n)
	for r := range metas {
		n := int(metas[r].entries)
		x.lengths[r] = (int64(n)*int64(x.row) + runs.Bytes(n, x.coords) + 15) &^ 15
		total += n
	}
	block := grow(&x.out, int(x.lengths[x.rank]))
	keys := block[copy(block, x.vals):]
	keys = keys[:runs.Bytes(len(x.mine), x.coords)]
	runs.Encode(keys, x.mine, 0, x.coords)
	all, err := x.spread(&x.in, block, x.lengths)
	if err != nil {
		return nil, nil, err
	}
	x.theirs, x.runs, x.values = room(x.theirs, total), room(x.runs, x.n), room(x.values, x.n)
	rest := x.theirs
	for r := range metas {
		n := int(metas[r].entries)
		x.runs[r], rest = rest[:n:n], rest[n:]
		block := all[:x.lengths[r]]
		all = all[x.lengths[r]:]
		x.values[r] = block[:n*x.row]
		if err := runs.Decode(x.runs[r], block[n*x.row:][:runs.Bytes(n, x.coords)], 0, x.coords); err != nil {
			return nil, nil, x.w.host.mismatch(r, fmt.Errorf("entries of rank %d: %w", r, err))
		}
	}
	union := x.merger.Union(x.runs, 0, x.coords)
	sums, err := fresh(len(union), x.row)
	if err != nil {
		return nil, nil, err
	}
	return union, sums, x.sum(sums)
}

// sum adds the values that the merger has put together.
func (x *sparseRun) sum(sums []byte) error {
	x.merger.Sum(sums, x.row, x.values, x.w.red.Combine)
	after(x.w.red, sums)
	return nil
}

// owners has each rank add the entries of a range of coordinates and send the sums to all.
func (x *sparseRun) owners(metas []sparseMeta) ([]uint64, []byte, error) {
	bounds := x.ranges(metas)
	span := func(r int) uint64 { return bounds[r+1] - bounds[r] }

	x.cuts = room(x.cuts, x.n+1)
	x.counts = room(x.counts, x.n*(x.n+1))
	own, counts := x.counts[:x.n], x.counts[x.n:]
	x.cuts[0] = 0
	for o := range x.n {
		x.cuts[o+1], _ = slices.BinarySearch(x.mine, bounds[o+1])
		own[o] = int64(x.cuts[o+1] - x.cuts[o])
	}
	if err := x.e.session.route.allGather(x.e, bytesOf(counts), bytesOf(own)); err != nil {
		return nil, nil, err
	}
	// to[r*n+o] is how many entries rank r has for owner o.
	longest, entries := int64(0), int64(0)
	for r := range x.n {
		total := int64(0)
		for o, c := range counts[r*x.n : (r+1)*x.n] {
			if c < 0 || uint64(c) > span(o) || c > metas[r].entries {
				return nil, nil, x.w.host.mismatch(r, fmt.Errorf("rank %d announces %d of its %d entries among %d coordinates", r, c, metas[r].entries, span(o)))
			}
			total += c
			longest = max(longest, c)
		}
		if total != metas[r].entries {
			return nil, nil, x.w.host.mismatch(r, fmt.Errorf("rank %d announces %d entries, then %d", r, metas[r].entries, total))
		}
		entries += total
	}

	// The keys come first.
	x.send, x.recv = room(x.send, x.n), room(x.recv, x.n)
	bytes, total := int64(0), int64(0)
	for r := range x.n {
		theirs := counts[r*x.n+x.rank]
		x.send[r], x.recv[r] = runs.Bytes(int(own[r]), span(r)), runs.Bytes(int(theirs), span(x.rank))
		bytes += x.send[r]
		total += theirs
	}
	packed := grow(&x.out, int(bytes))
	for o, part := range split(packed, x.send) {
		runs.Encode(part, x.mine[x.cuts[o]:x.cuts[o+1]], bounds[o], span(o))
	}
	x.values = room(x.values, x.n)
	if err := x.exchange(packed, 8*longest); err != nil {
		return nil, nil, err
	}
	// All of these keys have arrived, so memory for them may be allocated.
	x.theirs, x.runs = room(x.theirs, int(total)), room(x.runs, x.n)
	rest := x.theirs
	for r := range x.n {
		n := counts[r*x.n+x.rank]
		x.runs[r], rest = rest[:n:n], rest[n:]
		if err := runs.Decode(x.runs[r], x.values[r], bounds[x.rank], span(x.rank)); err != nil {
			return nil, nil, x.w.host.mismatch(r, fmt.Errorf("entries of rank %d: %w", r, err))
		}
	}
	union := x.merger.Union(x.runs, bounds[x.rank], span(x.rank))

	// How long is a result? At least as long as its longest run.
	got := room(x.got, x.n)
	x.got = got
	mine := [1]int64{int64(len(union))}
	if err := x.e.session.route.allGather(x.e, bytesOf(got), bytesOf(mine[:])); err != nil {
		return nil, nil, err
	}
	x.lengths = room(x.lengths, x.n)
	sum, offset := int64(0), int64(0)
	for o, n := range got {
		least, most := int64(0), int64(0)
		for r := range x.n {
			c := counts[r*x.n+o]
			least, most = max(least, c), most+c
		}
		if n < least || n > most || uint64(n) > span(o) {
			return nil, nil, x.w.host.mismatch(o, fmt.Errorf("rank %d announces a sum of %d entries, of %d to %d", o, n, least, most))
		}
		if o == x.rank {
			offset = sum
		}
		sum += n
		x.lengths[o] = runs.Bytes(int(n), span(o))
	}
	packed = grow(&x.out, int(x.lengths[x.rank]))
	runs.Encode(packed, union, bounds[x.rank], span(x.rank))
	all, err := x.spread(&x.in, packed, x.lengths)
	if err != nil {
		return nil, nil, err
	}
	x.union = room(x.union, int(sum))
	rest = x.union
	for o, n := range got {
		if err := runs.Decode(rest[:n], all[:x.lengths[o]], bounds[o], span(o)); err != nil {
			return nil, nil, x.w.host.mismatch(o, fmt.Errorf("sum of rank %d: %w", o, err))
		}
		rest, all = rest[n:], all[x.lengths[o]:]
	}

	switch {
	case x.row == 0:
		return x.union, nil, nil
	case x.denseIsBetter(entries, sum):
		sums, err := x.dense()
		return x.union, sums, err
	}
	for r := range x.n {
		x.send[r], x.recv[r] = own[r]*int64(x.row), counts[r*x.n+x.rank]*int64(x.row)
		x.lengths[r] = got[r] * int64(x.row)
	}
	if err := x.exchange(x.vals, longest*int64(x.row)); err != nil {
		return nil, nil, err
	}
	// The sums go straight into the result, if it may be allocated.
	if sum > window/int64(x.row) {
		part := grow(&x.rows, int(x.lengths[x.rank]))
		if err := x.sum(part); err != nil {
			return nil, nil, err
		}
		sums, err := x.spread(nil, part, x.lengths)
		return x.union, sums, err
	}
	sums, err := fresh(int(sum), x.row)
	if err != nil {
		return nil, nil, err
	}
	part := sums[offset*int64(x.row):][:x.lengths[x.rank]]
	if err := x.sum(part); err != nil {
		return nil, nil, err
	}
	return x.union, sums, x.e.session.route.allGatherV(x.e, sums, part, x.lengths)
}

// ranges cuts the coordinates by the samples, so that each rank owns about as many entries. Rank r
// owns bounds[r] up to but not including bounds[r+1].
func (x *sparseRun) ranges(metas []sparseMeta) (bounds []uint64) {
	const whole = 1 << 10 // so that a sample's weight is rounded by little
	all, total := x.samples[:0], uint64(0)
	for r := range metas {
		n := sampled(metas[r].entries)
		for _, k := range metas[r].keys[:n] {
			w := uint64(metas[r].entries) * whole / uint64(n)
			all = append(all, sample{uint64(k), w})
			total += w
		}
	}
	x.samples = all
	slices.SortFunc(all, func(a, b sample) int { return cmp.Compare(a.key, b.key) })
	x.bounds = room(x.bounds, x.n+1)
	x.bounds[0] = 0
	before, i := uint64(0), 0
	for r := 1; r < x.n; r++ {
		for i < len(all) && before < total/uint64(x.n)*uint64(r) {
			before += all[i].weight
			i++
		}
		x.bounds[r] = x.coords
		if i < len(all) {
			x.bounds[r] = all[i].key
		}
	}
	x.bounds[x.n] = x.coords
	return x.bounds
}

// exchange sends x.send[r] bytes of in to rank r, and leaves the x.recv[r] bytes from rank r in
// x.values[r]. No rank sends another one more than longest. If what one rank may receive exceeds
// the window, it goes in rounds.
func (x *sparseRun) exchange(in []byte, longest int64) error {
	per := max(window/int64(x.n), 1)
	if longest <= per {
		sum := int64(0)
		for _, n := range x.recv {
			sum += n
		}
		out := grow(&x.in, int(sum))
		copy(x.values, split(out, x.recv))
		return x.e.session.route.allToAll(x.e, out, in, x.recv, x.send)
	}
	from := split(in, x.send)
	to := make([][]byte, x.n)
	send, recv := make([]int64, x.n), make([]int64, x.n)
	for at := int64(0); at < longest; at += per {
		part := func(n int64) int64 { return min(max(n-at, 0), per) }
		var packed []byte
		sum := int64(0)
		for r := range x.n {
			send[r], recv[r] = part(x.send[r]), part(x.recv[r])
			packed = append(packed, from[r][min(at, x.send[r]):][:send[r]]...)
			sum += recv[r]
		}
		out := grow(&x.in, int(sum))
		if err := x.e.session.route.allToAll(x.e, out, packed, recv, send); err != nil {
			return err
		}
		for r, b := range split(out, recv) {
			var err error
			if to[r], err = extend(to[r], len(b), x.recv[r]); err != nil {
				return err
			}
			copy(to[r][len(to[r])-len(b):], b)
		}
	}
	copy(x.values, to)
	return nil
}

// spread gives all ranks every rank's part of counts[r] bytes, one after the other. If they exceed
// the window they go in rounds, each at most as long as all before it. into is memory to use, nil
// for new memory.
func (x *sparseRun) spread(into *[]byte, part []byte, counts []int64) ([]byte, error) {
	sum, offset := int64(0), int64(0)
	for r, n := range counts {
		if r == x.rank {
			offset = sum
		}
		sum += n
	}
	var own []byte
	if into == nil {
		into = &own
	}
	if sum <= window {
		all := grow(into, int(sum))
		return all, x.e.session.route.allGatherV(x.e, all, part, counts)
	}
	var all []byte
	now := make([]int64, x.n)
	for at := int64(0); at < sum; {
		end := min(at+max(window, at), sum)
		var err error
		if all, err = extend(all, int(end-at), sum); err != nil {
			return nil, err
		}
		first := int64(0)
		for r, n := range counts {
			now[r] = max(min(end, first+n)-max(at, first), 0)
			first += n
		}
		mine := part[:0]
		if now[x.rank] > 0 {
			mine = part[max(at-offset, 0):][:now[x.rank]]
		}
		if err := x.e.session.route.allGatherV(x.e, all[at:end], mine, now); err != nil {
			return nil, err
		}
		at = end
	}
	return all, nil
}

// extend makes b longer by more, towards a final length. Its memory at most doubles.
func extend(b []byte, more int, end int64) ([]byte, error) {
	n := len(b) + more
	if n <= cap(b) {
		return b[:n], nil
	}
	longer, err := fresh(int(min(max(int64(n), 2*int64(cap(b))), end)), 1)
	if err != nil {
		return nil, err
	}
	copy(longer, b)
	return longer[:n], nil
}

// fresh returns zeros, aligned for every element type.
func fresh(n, row int) ([]byte, error) {
	t, err := tensor.New(tensor.Uint8, n, row)
	if err != nil {
		return nil, err
	}
	return t.Bytes(), nil
}

// dense all-reduces the values at the union's coordinates, in rounds that are each at most as long
// as all before.
func (x *sparseRun) dense() ([]byte, error) {
	var all []byte
	n, next := len(x.union), 0 // the next of this rank's entries
	for at := 0; at < n; {
		end := min(at+max(int(window)/x.row, at, 1), n)
		var err error
		if all, err = extend(all, (end-at)*x.row, int64(n)*int64(x.row)); err != nil {
			return nil, err
		}
		for k := at; k < end && next < len(x.mine); {
			if x.union[k] != x.mine[next] {
				k++
				continue
			}
			first, from := k, next // of rows that lie side by side
			for k < end && next < len(x.mine) && x.union[k] == x.mine[next] {
				k, next = k+1, next+1
			}
			copy(all[first*x.row:], x.vals[from*x.row:next*x.row])
		}
		if err := x.e.session.route.allReduce(x.e, all[at*x.row:end*x.row], x.w.red); err != nil {
			return nil, err
		}
		at = end
	}
	after(x.w.red, all)
	return all, nil
}

// finish makes the tensors of the result.
func (x *sparseRun) finish(union []uint64, sums []byte) error {
	n := len(union)
	indices, err := tensor.New(tensor.Int64, x.sparse, n)
	if err != nil {
		return err
	}
	at, err := tensor.Data[int64](indices)
	if err != nil {
		return err
	}
	// The first dimension is what the others leave of the coordinate.
	for dim := x.sparse - 1; dim >= 0; dim-- {
		size := uint64(x.shape[dim])
		to := at[dim*n : (dim+1)*n]
		if dim == 0 {
			for i, k := range union {
				to[i] = int64(k)
			}
			break
		}
		for i, k := range union {
			to[i] = int64(k % size)
			union[i] = k / size
		}
	}
	values, err := tensor.FromBytes(x.dtype, sums, append([]int{n}, x.shape[x.sparse:]...)...)
	if err != nil {
		return err
	}
	return x.w.set(indices, values)
}

// room returns s with length n and undefined contents.
func room[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// explainSparse says which form the rules choose.
func (b *Backend) explainSparse() []backend.Choice {
	c := func(upTo int64, s Sparse, why string) backend.Choice {
		return backend.Choice{Op: "all_reduce, sparse", UpTo: upTo, Algorithm: string(s), Why: why}
	}
	switch {
	case !b.native:
		return []backend.Choice{c(-1, SparseGather, "as PyTorch does it on Gloo's wire")}
	case b.sparse != SparseAuto:
		return []backend.Choice{c(-1, b.sparse, "as asked for")}
	}
	few := c(gatherBytes, SparseGather, "the fewest messages: each rank adds up all entries")
	many := c(-1, SparseOwners, "each rank adds up a range of coordinates")
	switch {
	case b.clusters != nil && b.sums == SumsFast:
		many.Why += "; dense where the ranks have more entries than the result has, times the clusters"
	case b.shared != nil:
		many.Why += fmt.Sprintf("; dense where ranks have 1/%d of the result's on average", fullness)
	}
	return []backend.Choice{few, many}
}
