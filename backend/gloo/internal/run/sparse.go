package run

import (
	"context"
	"fmt"
	"math"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/tensor"
)

// sparseWork is the all-reduce of sparse CPU tensors: every rank gets all entries, and adds them in rank order.
// In another form each rank added a range of coordinates and spread the sums. That took 0.74 times the CPU time at
// best (4 ranks), which is not worth a second form.
type sparseWork struct {
	host *host
	ts   []*tensor.Tensor
	kind backend.ReduceKind
	red  backend.Reduction
}

const (
	// shownDims is how many dimensions the native wire sends in full, to be named in an error.
	shownDims = 8

	// maxEntries bounds what one rank can make the others allocate.
	maxEntries = 1 << 31
)

// window is how many bytes a rank allocates because others announced them. For more than that,
// memory grows as data arrive. Tests shrink it.
var window int64 = 256 << 20

// maxSparseDims is how many sparse dimensions, and how many dense ones, the
// nine numbers have room for.
const maxSparseDims = 4

// CheckSparse returns why AllReduce refuses sparse tensors of one dtype and shape, on any device, nil if it does not.
// A backend that copies tensors to CPU memory asks first.
func (b *Group) CheckSparse(ts []*tensor.Tensor, op backend.ReduceOp) error {
	return b.checkSparse(ts, op)
}

func (s *session) checkSparse(ts []*tensor.Tensor, op backend.ReduceOp) error {
	switch k := op.Kind(); {
	case k == backend.Sum().Kind(), k == backend.Avg().Kind(), k == backend.PreMulSum(1).Kind() && s.native:
	default:
		return fmt.Errorf("unsupported reduction operation %v (allreduce of sparse tensors only works with ReduceOp.SUM, here with AVG, and on the native wire with PREMUL_SUM)", op)
	}
	t := ts[0]
	if _, err := op.Reduction(t.DType(), s.size); err != nil {
		return err
	}
	for i, x := range ts {
		if x.SparseDims() != t.SparseDims() {
			return fmt.Errorf("tensor %d has %d sparse dimensions, tensor 0 %d", i, x.SparseDims(), t.SparseDims())
		}
	}
	if n, d := t.SparseDims(), t.Dims()-t.SparseDims(); !s.native && (n > maxSparseDims || d > maxSparseDims) {
		return fmt.Errorf("%d sparse and %d dense dimensions; the wire has room for %d each", n, d, maxSparseDims)
	}
	return nil
}

func (q *operation) newSparse() error {
	c, h := &q.reduce, &q.reduce.host
	if err := h.checkSparse(c.tensors, c.op); err != nil {
		return err
	}
	red, err := c.op.Reduction(c.tensors[0].DType(), h.size)
	if err != nil {
		return err
	}
	c.runner = (&sparseWork{host: h, ts: c.tensors, kind: c.op.Kind(), red: red}).run
	q.run, q.needsAll = runAllReduce, true
	return nil
}

func (w *sparseWork) run(ctx context.Context) error {
	mine, err := tensor.SumSparse(w.ts...)
	if err != nil {
		return err
	}
	if w.red.Before != nil || w.host.size == 1 {
		if mine, err = mine.Clone(); err != nil {
			return err
		}
		before(w.red, mine.Values().Bytes())
	}
	agree := w.agreeGloo
	if w.host.native {
		agree = w.agree
	}
	counts, err := agree(ctx, mine)
	if err != nil {
		return err
	}
	sum := mine
	if w.host.size > 1 {
		if sum, err = w.add(mine, counts); err != nil {
			return err
		}
	}
	after(w.red, sum.Values().Bytes())
	return w.set(sum.Indices(), sum.Values())
}

// sparseMeta describes a rank's tensor to the others on the native wire.
type sparseMeta struct {
	same    [4 + 1 + shownDims]int64 // dtype, kind, sparse dimensions, dimensions, digest of the shape, the first of it
	entries int64
}

const metaLen = 4 + 1 + shownDims + 1

func (m *sparseMeta) numbers() []int64 { return append(m.same[:], m.entries) }

func (m *sparseMeta) String() string {
	dims := max(m.same[3], 0)
	more := ""
	if dims > shownDims {
		dims, more = shownDims, fmt.Sprintf(" and %d more", m.same[3]-shownDims)
	}
	return fmt.Sprintf("%v of %v%v%s with %d sparse dimensions", backend.ReduceKind(m.same[1]), tensor.DType(m.same[0]), m.same[5:5+dims], more, m.same[2])
}

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

// agree exchanges the descriptions of all ranks' tensors, and returns how many entries each has. If two tensors do not
// match, all ranks get an error that names the same rank.
func (w *sparseWork) agree(_ context.Context, mine *tensor.Tensor) ([]int64, error) {
	e, shape := w.host.engine, mine.Shape()
	m := sparseMeta{entries: int64(mine.NNZ())}
	m.same = [...]int64{int64(mine.DType()), int64(w.kind), int64(mine.SparseDims()), int64(len(shape)), int64(hash(shape)), 4 + shownDims: 0}
	for i, d := range shape[:min(len(shape), shownDims)] {
		m.same[5+i] = int64(d)
	}
	all := make([]int64, metaLen*w.host.size)
	if err := e.route.allGather(e, bytesOf(all), bytesOf(m.numbers())); err != nil {
		return nil, err
	}
	metas, counts := make([]sparseMeta, w.host.size), make([]int64, w.host.size)
	for r := range metas {
		n := copy(metas[r].same[:], all[r*metaLen:])
		counts[r] = all[r*metaLen+n]
	}
	if culprit, usual := odd(metas); culprit >= 0 {
		// The first to say so ends the group. When all have come here, all have the
		// reason by themselves, so an error of the barrier tells nothing new.
		_ = e.route.barrier(e)
		return nil, w.host.mismatch(culprit, fmt.Errorf("sparse tensors do not match: rank %d has %v, rank %d %v", culprit, &metas[culprit], usual, &metas[usual]))
	}
	return counts, nil
}

// agreeGloo sends Gloo's first message, nine numbers from each rank, and returns how many entries each has.
func (w *sparseWork) agreeGloo(ctx context.Context, mine *tensor.Tensor) ([]int64, error) {
	s := mine.SparseDims()
	var meta [2*maxSparseDims + 1]int64
	for i, d := range mine.Shape() {
		if i < s {
			meta[i] = int64(d)
		} else {
			meta[maxSparseDims+i-s] = int64(d)
		}
	}
	meta[2*maxSparseDims] = int64(mine.NNZ())
	all := make([]int64, len(meta)*w.host.size)
	if err := w.host.AllGatherBytes(ctx, bytesOf(all), bytesOf(meta[:])); err != nil {
		return nil, err
	}
	counts := make([]int64, w.host.size)
	for r := range counts {
		theirs := all[r*len(meta) : (r+1)*len(meta)]
		for i := range 2 * maxSparseDims {
			if theirs[i] != meta[i] {
				return nil, w.host.mismatch(r, fmt.Errorf("sparse dimensions do not match: rank %d has %v, this rank %v", r, theirs[:2*maxSparseDims], meta[:2*maxSparseDims]))
			}
		}
		counts[r] = theirs[2*maxSparseDims]
	}
	return counts, nil
}

// add gathers the indices of all ranks, then the values, and adds all entries. Rank r has counts[r] of them.
func (w *sparseWork) add(mine *tensor.Tensor, counts []int64) (*tensor.Tensor, error) {
	s, shape := mine.SparseDims(), mine.Shape()
	row := mine.DType().Size()
	for _, d := range shape[s:] {
		row *= d
	}
	// Ranks coalesce first, so no rank has more entries than there are coordinates. No product
	// below overflows an int64, because the bytes of the dense tensor fit an int.
	most := int64(1)
	for _, d := range shape[:s] {
		most *= int64(d)
	}
	most = min(most, maxEntries)
	indexBytes, valueBytes := make([]int64, len(counts)), make([]int64, len(counts))
	left, announced := int64(math.MaxInt), int64(0) // bytes of all ranks, and of the others
	for r, n := range counts {
		if n < 0 || n > most {
			return nil, w.host.mismatch(r, fmt.Errorf("rank %d announces %d entries, of at most %d", r, n, most))
		}
		indexBytes[r], valueBytes[r] = n*int64(s)*8, n*int64(row)
		for _, more := range []int64{indexBytes[r], valueBytes[r]} {
			if more > left {
				return nil, w.host.mismatch(r, fmt.Errorf("rank %d announces %d entries: with those of the ranks before it this rank cannot address them", r, n))
			}
			left -= more
			if r != w.host.rank {
				announced += more
			}
		}
	}
	e := w.host.engine
	if e.sparse == nil {
		e.sparse = new([2][]byte)
	}
	defer func() {
		if cap(e.sparse[0])+cap(e.sparse[1]) > keepScratch {
			e.sparse = nil
		}
	}()
	grows := announced > window
	if w.host.native { // whose messages are others then: all ranks have to agree
		grows = math.MaxInt-left > window
	}
	indices, err := w.gather(&e.sparse[0], mine.Indices().Bytes(), indexBytes, grows)
	if err != nil {
		return nil, err
	}
	values, err := w.gather(&e.sparse[1], mine.Values().Bytes(), valueBytes, grows)
	if err != nil {
		return nil, err
	}
	parts := make([]*tensor.Tensor, len(counts))
	for r, n := range counts {
		it, err := tensor.FromBytes(tensor.Int64, indices[r], s, int(n))
		if err != nil {
			return nil, err
		}
		vt, err := tensor.FromBytes(mine.DType(), values[r], append([]int{int(n)}, shape[s:]...)...)
		if err != nil {
			return nil, err
		}
		if parts[r], err = tensor.Sparse(it, vt, shape...); err != nil {
			return nil, w.host.mismatch(r, fmt.Errorf("entries of rank %d: %w", r, err))
		}
	}
	return tensor.SumSparse(parts...)
}

// gather returns every rank's block of counts[r] bytes, in memory that into keeps. With grows it takes memory for
// other ranks' blocks only as they arrive.
func (w *sparseWork) gather(into *[]byte, mine []byte, counts []int64, grows bool) ([][]byte, error) {
	e := w.host.engine
	switch {
	case !grows:
		all := grow(into, int(totalOf(counts)))
		return split(all, counts), e.route.allGatherV(e, all, mine, counts)
	case w.host.native:
		all, err := e.gatherInRounds(mine, counts)
		return split(all, counts), err
	}
	blocks := make([][]byte, len(counts))
	blocks[w.host.rank] = mine
	return blocks, e.onSlot(prefixAllGather, func() error { return e.gatherGrowing(blocks, counts) })
}

// gatherInRounds gives all ranks every rank's part of counts[r] bytes, one after the other. Each round is at most as
// long as all before it, or as the window.
func (e *engine) gatherInRounds(part []byte, counts []int64) ([]byte, error) {
	rank, sum, offset := e.session.rank, totalOf(counts), totalOf(counts[:e.session.rank])
	var all []byte
	now := make([]int64, len(counts))
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
		if now[rank] > 0 {
			mine = part[max(at-offset, 0):][:now[rank]]
		}
		if err := e.route.allGatherV(e, all[at:end], mine, now); err != nil {
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
	t, err := tensor.New(tensor.Uint8, int(min(max(int64(n), 2*int64(cap(b))), end)))
	if err != nil {
		return nil, err
	}
	longer := t.Bytes()
	copy(longer, b)
	return longer[:n], nil
}

// gatherGrowing sends the messages of plan.AllGatherV. blocks has this rank's.
func (e *engine) gatherGrowing(blocks [][]byte, counts []int64) error {
	if totalOf(counts) == 0 {
		return nil
	}
	rank, size := e.session.rank, e.session.size
	g := &e.main
	g.begin(&plan.Plan{Requests: 2}, e.slot, nil, nil, nil)
	recv, send := g.reqs[0], g.reqs[1]
	for i := range size - 1 {
		out := (rank - i + size) % size
		in := (out - 1 + size) % size
		recv.Peer, recv.Slot, recv.Grows = (rank-1+size)%size, e.slot, int(counts[in])
		send.Peer, send.Slot, send.Buf = (rank+1)%size, e.slot, blocks[out]
		g.busy[0], g.busy[1] = true, true
		e.mesh.Recv(recv)
		e.mesh.Send(send)
		for k, r := range g.reqs[:2] {
			e.wait(r)
			g.busy[k] = false
			if r == recv {
				blocks[in] = r.Buf
			}
			r.Buf, r.Grows = nil, 0
			if err := r.Err(); err != nil {
				e.drain()
				return e.session.failed(e.mesh, e.op.Info(), r, err)
			}
		}
	}
	return nil
}

// set gives all tensors the result, the first one without a copy.
func (w *sparseWork) set(indices, values *tensor.Tensor) error {
	for i, t := range w.ts {
		var err error
		if i > 0 {
			if indices, err = indices.Clone(); err == nil {
				values, err = values.Clone()
			}
		}
		if err == nil {
			err = t.SetSparse(indices, values, true)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
