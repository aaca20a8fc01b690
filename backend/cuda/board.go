package cuda

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// call is what all ranks have to call alike under one number. Where ranks may
// differ, as in the elements of an all-to-all, it is left zero.
type call struct {
	op     work.OpType
	with   backend.ReduceKind // of the operator, plus one; 0 if nothing is reduced
	dtype  tensor.DType       // Invalid if no tensor takes part
	n      int                // elements
	root   int                // -1 if there is none
	sparse bool               // the ranks tell each other the rest themselves
}

// reducing is what a call has as with.
func reducing(op backend.ReduceOp) backend.ReduceKind { return op.Kind() + 1 }

// calledAs has what the hosts do alike, so that ranks may mix it.
var calledAs = map[work.OpType]work.OpType{
	work.AllGatherIntoTensor:          work.AllGather,
	work.ReduceScatterTensor:          work.ReduceScatter,
	work.ReduceScatterTensorCoalesced: work.ReduceScatter,
	work.AllToAllSingle:               work.AllToAll,
}

// said is a call as ranks tell each other.
type said [2]uint64

// The first word has a one, so that it is never zero, the operation, the operator
// plus one, the dtype, whether it is sparse, and the root plus one; the second has
// the elements.
func (c call) said() said {
	op := c.op
	if kind, ok := calledAs[op]; ok {
		op = kind
	}
	w := uint64(1)<<63 | uint64(op)<<52 | uint64(c.dtype)<<36 | uint64(uint32(c.root+1))
	w |= uint64(c.with) << 44
	if c.sparse {
		w |= 1 << 35
	}
	return said{w, uint64(c.n)}
}

// String shows the call of any rank.
func (c said) String() string {
	op, dtype, root := work.OpType(c[0]>>52&0x7ff), tensor.DType(c[0]>>36&0xff), uint32(c[0])
	s := op.String()
	if op == work.Barrier && root > 0 {
		return "monitored_" + s
	}
	if k := uint8(c[0] >> 44); k > 0 {
		s += fmt.Sprintf(" (%v)", backend.ReduceKind(k-1))
	}
	switch {
	case c[0]>>35&1 != 0:
		s += " of a sparse tensor"
	case dtype != tensor.Invalid && c[1] > 0:
		s += fmt.Sprintf(" of %d elements of %v", c[1], dtype)
	case dtype != tensor.Invalid:
		s += fmt.Sprintf(" of %v", dtype)
	}
	if root > 0 {
		s += fmt.Sprintf(" with root %d", root-1)
	}
	return s
}

// disagree is the error of a rank whose call is not that of another one.
func disagree(number uint64, rank int, mine said, peer int, theirs said) error {
	return fmt.Errorf("%w: as collective number %d rank %d called %v, rank %d called %v", work.ErrMismatch, number, rank, mine, peer, theirs)
}

// board is where a rank writes what it calls, for the ranks before and after it on
// its host to read. All ranks of a host agree if each agrees with these. A rank
// writes first and reads then, so of two the later one sees both calls, whatever
// the operations wait for, and no message is needed.
type board struct {
	own   *region
	peers []boardOf // where they can be read
	why   error     // why there is no page, or a peer's cannot be read; set by New
}

type boardOf struct {
	rank int
	page *region
}

// rememberCalls is how many calls a board has, the latest ones: a rank may be so
// far ahead of another, and the difference is still found.
const rememberCalls = pageSize / (calledWords * 8)

// calledWords are the words of an entry: the number plus one, or zero while the
// entry is written, the two of the call, and one that is free.
const calledWords = 4

func entry(p *region, number uint64) *[calledWords]atomic.Uint64 {
	return (*[calledWords]atomic.Uint64)(unsafe.Pointer(&p.bytes[number%rememberCalls*calledWords*8]))
}

// newBoard returns a board that nobody reads yet, and its name for others. Without a page
// it compares nothing: the CPU backend finds some of the calls that do not fit.
func newBoard() (*board, string) {
	p, err := newRegion(pageSize)
	if err != nil {
		return &board{why: fmt.Errorf("this rank has no page for others to read: %w", err)}, ""
	}
	return &board{own: p}, p.name
}

// open looks for the boards of a rank's neighbours on its host. It leaves out those
// that it cannot read, and notes why.
func (b *board) open(rank int, names map[int]string) {
	if b.own == nil {
		return
	}
	var before, after, first, last = -1, -1, rank, rank
	for r := range names {
		if r < rank {
			before = max(before, r)
		}
		if r > rank && (after < 0 || r < after) {
			after = r
		}
		first, last = min(first, r), max(last, r)
	}
	if before < 0 {
		before = last
	}
	if after < 0 {
		after = first
	}
	for i, r := range []int{before, after} {
		if r == rank || i > 0 && r == before {
			continue
		}
		p, err := openRegion(names[r], pageSize)
		if err != nil {
			b.why = errors.Join(b.why, fmt.Errorf("the page of rank %d cannot be read: %w", r, err))
			continue
		}
		b.peers = append(b.peers, boardOf{r, p})
	}
}

// hide takes the board's name away, when all who may open it have.
func (b *board) hide() error {
	if b.own == nil {
		return nil
	}
	return b.own.hide()
}

// enter writes what the rank calls under a number, which may be the one before,
// and returns what a neighbour calls otherwise.
func (b *board) enter(number uint64, c said) (peer int, theirs said, ok bool) {
	if len(b.peers) == 0 {
		return -1, said{}, true
	}
	e := entry(b.own, number)
	e[0].Store(0)
	e[1].Store(c[0])
	e[2].Store(c[1])
	e[0].Store(number + 1)
	for _, p := range b.peers {
		e := entry(p.page, number)
		if e[0].Load() != number+1 {
			continue // it will look here; or it was long ago
		}
		theirs := said{e[1].Load(), e[2].Load()}
		if e[0].Load() == number+1 && theirs != c {
			return p.rank, theirs, false
		}
	}
	return -1, said{}, true
}

func (b *board) close() error {
	if b.own == nil {
		return nil
	}
	errs := []error{b.own.leave()}
	for _, p := range b.peers {
		errs = append(errs, p.page.leave())
	}
	b.own, b.peers = nil, nil
	return errors.Join(errs...)
}

// enter tells the other ranks of this host what the collective is that comes next. If
// they call something else the group ends, on all ranks and at once. The caller holds
// b.calls.
func (b *Backend) enter(info work.Info, c call) error {
	mine := c.said()
	peer, theirs, ok := b.board.enter(b.collectives, mine)
	if ok {
		return nil
	}
	err := &work.Error{Info: info, Peer: peer, Err: fmt.Errorf("cuda: %w", disagree(b.collectives, b.rank, mine, peer, theirs))}
	b.fail(fmt.Errorf("the group has failed: %w", err), err)
	return err
}
