// Package board compares what the ranks of a host call.
package board

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Call is what all ranks have to call alike under one number. Where ranks may
// differ, as in the elements of an all-to-all, it is left zero.
type Call struct {
	Op     work.OpType
	With   backend.ReduceKind // of the operator, plus one; 0 if nothing is reduced
	DType  tensor.DType       // Invalid if no tensor takes part
	N      int                // elements
	Root   int                // -1 if there is none
	Sparse bool               // and N counts the elements of the dense tensor; the ranks tell each other the rest themselves
	Beside bool               // it leaves room for other kernels, which ranks have to do alike
}

// Reducing is what a call has as with.
func Reducing(op backend.ReduceOp) backend.ReduceKind { return op.Kind() + 1 }

// calledAs has the operations that hosts do alike, so that ranks may mix them.
var calledAs = map[work.OpType]work.OpType{
	work.AllGatherIntoTensor:          work.AllGather,
	work.ReduceScatterTensor:          work.ReduceScatter,
	work.ReduceScatterTensorCoalesced: work.ReduceScatter,
	work.AllToAllSingle:               work.AllToAll,
}

// Said is a call as ranks tell each other.
type Said [2]uint64

// The first word has a one, so that it is never zero. It also has the operation, the operator
// plus one, the dtype, whether it is sparse, and the root plus one. The second word has the
// elements.
func (c Call) Said() Said {
	op := c.Op
	if kind, ok := calledAs[op]; ok {
		op = kind
	}
	w := uint64(1)<<63 | uint64(op)<<52 | uint64(c.DType)<<36 | uint64(uint32(c.Root+1))
	w |= uint64(c.With) << 44
	if c.Sparse {
		w |= 1 << 35
	}
	if c.Beside {
		w |= 1 << 34
	}
	return Said{w, uint64(c.N)}
}

// String shows the call of any rank.
func (c Said) String() string {
	op, dtype, root := work.OpType(c[0]>>52&0x7ff), tensor.DType(c[0]>>36&0xff), uint32(c[0])
	s := op.String()
	if op == work.Barrier && root > 0 {
		return "monitored_" + s
	}
	if k := uint8(c[0] >> 44); k > 0 {
		s += fmt.Sprintf(" (%v)", backend.ReduceKind(k-1))
	}
	if c[0]>>35&1 != 0 {
		s += " of a sparse tensor"
	}
	switch {
	case dtype != tensor.Invalid && c[1] > 0:
		s += fmt.Sprintf(" of %d elements of %v", c[1], dtype)
	case dtype != tensor.Invalid:
		s += fmt.Sprintf(" of %v", dtype)
	}
	if root > 0 {
		s += fmt.Sprintf(" with root %d", root-1)
	}
	if c[0]>>34&1 != 0 {
		s += " beside other kernels"
	}
	return s
}

// Disagree is the error of a rank whose call is not that of another one.
func Disagree(number uint64, rank int, mine Said, peer int, theirs Said) error {
	return fmt.Errorf("%w: as collective number %d rank %d called %v, rank %d called %v", work.ErrMismatch, number, rank, mine, peer, theirs)
}

// Board is where a rank writes its calls. The ranks before and after it on its host read them.
// All ranks of a host agree if each agrees with these. A rank writes first and reads then, so of
// two the later one sees both calls, whatever the operations wait for, and no message is needed.
type Board struct {
	own   *region.Region
	peers []boardOf // where they can be read
	Why   error     // why there is no page, or a peer's cannot be read; set by New
}

type boardOf struct {
	rank int
	page *region.Region
}

// rememberCalls is how many calls a board has, the latest ones: a rank may be so
// far ahead of another, and the difference is still found.
const rememberCalls = region.PageSize / (calledWords * 8)

// calledWords are the words of an entry: the number plus one, or zero while the
// entry is written, the two of the call, and one that is free.
const calledWords = 4

func entry(p *region.Region, number uint64) *[calledWords]atomic.Uint64 {
	return (*[calledWords]atomic.Uint64)(unsafe.Pointer(&p.Bytes[number%rememberCalls*calledWords*8]))
}

// New returns a board that nobody reads yet, and its name for others. Without a page
// it compares nothing: the CPU backend finds some of the calls that do not fit.
func New() (*Board, string) {
	p, err := region.New(region.PageSize)
	if err != nil {
		return &Board{Why: fmt.Errorf("this rank has no page for others to read: %w", err)}, ""
	}
	return &Board{own: p}, p.Name
}

// Open looks for the boards of a rank's neighbours on its host. It leaves out those
// that it cannot read, and notes why.
func (b *Board) Open(rank int, names map[int]string) {
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
		p, err := region.Open(names[r], region.PageSize)
		if err != nil {
			b.Why = errors.Join(b.Why, fmt.Errorf("the page of rank %d cannot be read: %w", r, err))
			continue
		}
		b.peers = append(b.peers, boardOf{r, p})
	}
}

// Hide takes the board's name away, when all who may open it have.
func (b *Board) Hide() error {
	if b.own == nil {
		return nil
	}
	return b.own.Hide()
}

// Enter writes what the rank calls under a number, which may be the one before,
// and returns what a neighbour calls otherwise.
func (b *Board) Enter(number uint64, c Said) (peer int, theirs Said, ok bool) {
	if len(b.peers) == 0 {
		return -1, Said{}, true
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
		theirs := Said{e[1].Load(), e[2].Load()}
		if e[0].Load() == number+1 && theirs != c {
			return p.rank, theirs, false
		}
	}
	return -1, Said{}, true
}

func (b *Board) Close() error {
	if b.own == nil {
		return nil
	}
	errs := []error{b.own.Leave()}
	for _, p := range b.peers {
		errs = append(errs, p.page.Leave())
	}
	b.own, b.peers = nil, nil
	return errors.Join(errs...)
}
