package plan

// blocks has the place of each rank's part of a buffer: in rank order, without gaps.
type blocks struct {
	size int

	offs []int64 // where each begins, and the total; nil where a rule says so:

	// units of unit bytes, distributed evenly; the first ranks get one more if there is a
	// remainder.
	units, unit int64
}

// equal has size blocks of bytes bytes.
func equal(size int, bytes int64) blocks {
	return blocks{size: size, units: int64(size), unit: bytes}
}

// cut has bytes bytes cut into size blocks of whole elements.
func cut(size int, bytes, elem int64) blocks {
	return blocks{size: size, units: bytes / elem, unit: elem}
}

// listed has counts[r] bytes for rank r.
func listed(counts []int64) blocks {
	offs := make([]int64, len(counts)+1)
	for r, n := range counts {
		checkBytes(n)
		offs[r+1] = offs[r] + n
	}
	return blocks{size: len(counts), offs: offs}
}

// start returns the begin of block k, or for k = size the end of the last one.
func (b blocks) start(k int) int64 {
	if b.offs != nil {
		return b.offs[k]
	}
	p := int64(b.size)
	return b.unit * (int64(k)*(b.units/p) + min(int64(k), b.units%p))
}

func (b blocks) at(k int) (off, n int64) { return b.span(k, k+1) }

// span returns the place of the blocks from lo to hi-1.
func (b blocks) span(lo, hi int) (off, n int64) {
	off = b.start(lo)
	return off, b.start(hi) - off
}

func (b blocks) total() int64 { return b.start(b.size) }

// largest returns the size of the largest block.
func (b blocks) largest() int64 {
	if b.offs == nil {
		_, n := b.at(0)
		return n
	}
	var most int64
	for r := range b.size {
		_, n := b.at(r)
		most = max(most, n)
	}
	return most
}

// around returns the bytes of count blocks from rank on; block 0 follows the last.
func (b blocks) around(rank, count int) int64 {
	if end := rank + count; end > b.size {
		return b.total() - b.start(rank) + b.start(end-b.size)
	}
	return b.start(rank+count) - b.start(rank)
}

// part returns part s of parts of the n bytes at off, in whole elements.
func part(off, n, elem, s, parts int64) (int64, int64) {
	units := n / elem
	lo := units / parts * s
	lo += min(s, units%parts)
	hi := units/parts*(s+1) + min(s+1, units%parts)
	return off + lo*elem, (hi - lo) * elem
}
