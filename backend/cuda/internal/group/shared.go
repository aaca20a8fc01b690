package group

import (
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// An all-reduce through the exchange is cut into sharedPieces chunks. Then the way down, the CPUs' part and the way up
// overlap. Chunks have at least smallestPiece bytes and at most Options.Chunk. BenchmarkHostStages measures what this
// rests on.
const (
	sharedPieces  = 8
	smallestPiece = 512 << 10
)

// SmallestPart is the least that one goroutine of a rank's crew combines, of each
// rank's bytes; a variable for tests, like crewOf.
var SmallestPart = 16 << 10

// shared is what the host does in an all-reduce through memory that the ranks share. The engine cuts it into pieces and
// gives the host a turn for each, as in all operations.
type shared struct {
	x      *hostshm.Exchange
	red    backend.Reduction
	n, es  int
	grain  int    // elements in a chunk
	chunks int    // in all
	first  uint64 // the number of the first chunk
	parts  int    // into how many a rank's share of a chunk is cut
	chunk  int    // that the host is at

	// inPlace: this rank's device copies to the exchange and from there. Otherwise its host does: tensors that are not
	// contiguous, several tensors, and all if the memory could not be page-locked.
	inPlace bool
}

// own are the kinds of operators that ranks may have each of their own: a rank cannot
// combine others' elements with those.
var own = []backend.ReduceKind{backend.Custom("", nil).Kind(), backend.PreMulSum(1).Kind()}

// Sharing returns the part of a call that goes through the exchange, nil if it does
// not. What decides is the same on every rank.
func (b *Engine) Sharing(op backend.ReduceOp, ts []*tensor.Tensor) *shared {
	x, n, d := b.usable(), ts[0].Len(), ts[0].DType()
	if x == nil || n == 0 || slices.Contains(own, op.Kind()) {
		return nil
	}
	red, err := op.Reduction(d, b.Size)
	if err != nil {
		return nil
	}
	s := &shared{x: x, red: red, n: n, es: d.Size()}
	bytes := min(max((n*s.es+sharedPieces-1)/sharedPieces, smallestPiece), b.Chunk)
	s.grain = max((bytes&^15)/s.es, 1)
	s.chunks = (n + s.grain - 1) / s.grain
	_, most := hostshm.Share(s.grain*s.es, 0, b.Size)
	s.parts = min(max(most/SmallestPart, 1), x.Crew.N)
	return s
}

// usable returns the exchange that a backend's ranks have, nil if they have none.
func (b *Engine) usable() *hostshm.Exchange {
	if x := b.Exchange.Load(); x != nil && x.Why == nil {
		return x
	}
	return nil
}

// stage decides who copies. The caller holds engine.calls.
func (s *shared) stage(o *Operation) {
	s.x.Prepare()
	s.inPlace = s.x.Memory != nil && len(o.Legs) == 1 && o.Legs[0].flat()
	o.Call = s.combine
	if s.inPlace {
		o.Program = s.small(o)
	}
}

// inPlace reports whether the devices copy to the exchange.
func (o *Operation) inPlace() bool { return o.Shared != nil && o.Shared.inPlace }

// meet waits until all ranks are at the operation, and compares what they call.
func (s *shared) meet(o *Operation) error {
	x, mine := s.x, o.Print.Said()
	x.Call(s.first, mine)
	if err := s.await(o, hostshm.WordCalled, s.first+1, "has not called it"); err != nil {
		return err
	}
	for r := range x.Size {
		if theirs := x.Called(r); theirs != mine {
			return &work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w", board.Disagree(o.number, x.Rank, mine, r, theirs))}
		}
	}
	return nil
}

// await waits until all ranks have counted to n. If the time is over before, the error names the first one that has not.
func (s *shared) await(o *Operation, kind int, n uint64, what string) error {
	r, err := s.x.Await(o, kind, n)
	if r >= 0 && errors.Is(err, work.ErrTimeout) {
		return &work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w; rank %d %s", err, r, what)}
	}
	return err
}

// combine is the host's part of the next chunk. It comes after what the device had of the chunk's slots. Ts are this
// rank's tensors on the host, unless the chunk is in place. They are combined first, in order.
func (s *shared) combine(o *Operation, ts []*tensor.Tensor) error {
	x, c := s.x, s.first+uint64(s.chunk)
	in, out, n := x.In(x.Rank, c), x.Out(c), s.bytes()
	var all []byte
	if !s.inPlace {
		all = ts[0].Bytes()
		for _, t := range ts[1:] {
			s.red.Combine(all, t.Bytes())
		}
		s.touches("copying in", driver.Writes, in)
		copy(x.Region.Bytes[in:], all)
	}
	x.Count(hostshm.WordArrived, c+1)
	if err := s.await(o, hostshm.WordArrived, c+1, "has not given the host its tensor"); err != nil {
		return err
	}
	x.Crew.Do(s.parts, s)
	x.Count(hostshm.WordDone, c+1)
	if err := s.await(o, hostshm.WordDone, c+1, "has not combined its share"); err != nil {
		return err
	}
	if !s.inPlace {
		s.touches("copying out", driver.Reads, out)
		for _, t := range ts {
			copy(t.Bytes(), x.Region.Bytes[out:][:n])
		}
	}
	s.chunk++
	return nil
}

// bytes returns the length of the chunk that the host is at.
func (s *shared) bytes() int { return (min((s.chunk+1)*s.grain, s.n) - s.chunk*s.grain) * s.es }

// touches tells the driver what the host does with its slot or the common one.
func (s *shared) touches(what string, access func(driver.Ptr, int) driver.Access, at int) {
	if s.x.Memory != nil {
		driver.HostAccess(s.x.D, what, access(s.x.Ptr(at), s.bytes()))
	}
}

// Part is what a member of the crew does: its part of the rank's share of the chunk that the host is at.
func (s *shared) Part(i int) {
	lo, hi := hostshm.Share(s.bytes(), s.x.Rank, s.x.Size)
	a, b := hostshm.Share(hi-lo, i, s.parts)
	s.x.Combine(s.first+uint64(s.chunk), &s.red, lo+a, lo+b, &s.x.Members[i])
}
