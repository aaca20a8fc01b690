package group

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// What decides how an all-reduce goes through the exchange. BenchmarkHostStages
// measures what they rest on.
const (
	// sharedPieces is into how many chunks an all-reduce is cut. Then the way down, the CPUs'
	// part and the way up overlap. Chunks have at least smallestPiece bytes and at most
	// Options.Chunk.
	sharedPieces  = 8
	smallestPiece = 512 << 10

	// mostAtOnce is up to how many bytes a kernel does the device's part. It writes to the
	// host and reads from there with the threads of one block. That takes a third of the
	// calls. And no stream waits for a word: streams notice words late.
	mostAtOnce = 128 << 10

	// firstBatch is how many chunks are enqueued at first, and then twice as many each
	// time: the host begins with them while the next are enqueued.
	firstBatch = 2
)

// SmallestPart is the least that one goroutine of a rank's crew combines, of each
// rank's bytes; a variable for tests, like crewOf.
var SmallestPart = 16 << 10

// mostPieces is how many chunks an all-reduce through memory that the ranks share has.
const mostPieces = 256

// Shared is the part of an all-reduce that goes through the exchange.
type shared struct {
	x      *hostshm.Exchange
	red    backend.Reduction
	n, es  int
	grain  int    // elements in a chunk
	chunks int    // in all
	first  uint64 // the number of the first chunk
	number uint64 // of the operation, among those that go through the exchange
	parts  int    // into how many a rank's share of a chunk is cut

	// direct: the device's streams copy to the exchange and from there. Otherwise this rank's
	// host does. It copies tensors that are not contiguous, and several tensors. It copies
	// tensors on another device than the first, because the streams of the other device do not
	// count in order. It copies all if the memory could not be page-locked.
	direct bool
	atOnce bool // one kernel is all that the device does
	launch driver.Launch
	args   driver.Args
	access [7]driver.Access
	copied int // chunks that the host has done

	turns   []int            // the host's, of the chunks
	batches []*edges.Pending // of chunks that were enqueued together
	issued  atomic.Int32     // batches that are there
	ending  sync.WaitGroup   // until all have been enqueued, or an error has ended that
	ended   atomic.Bool      // that is so
	err     error            // that error
	failed  atomic.Bool      // there is one

	panicked atomic.Pointer[work.PanicError] // what a member of the crew ran into
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
	grain := sharedGrain(n, d.Size(), b.chunk)
	chunks := (n + grain - 1) / grain
	if chunks > mostPieces {
		return nil
	}
	s := b.newShared(x)
	s.red, s.n, s.es, s.grain, s.chunks = red, n, d.Size(), grain, chunks
	_, most := hostshm.Share(s.grain*s.es, 0, b.Size)
	s.parts = min(max(most/SmallestPart, 1), x.Crew.N)
	batches := batchOf(chunks-1) + 1
	s.batches, s.turns = slices.Grow(s.batches[:0], batches)[:batches], slices.Grow(s.turns[:0], chunks)[:chunks]
	return s
}

// sharedGrain returns how many of n elements a chunk has.
func sharedGrain(n, es, chunk int) int {
	bytes := min(max((n*es+sharedPieces-1)/sharedPieces, smallestPiece), chunk)
	return max((bytes&^15)/es, 1)
}

// newShared returns what an operation needs, put takes it back.
func (b *Engine) newShared(x *hostshm.Exchange) *shared {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if n := len(b.idle); n > 0 {
		s := b.idle[n-1]
		b.idle = b.idle[:n-1]
		return s
	}
	return &shared{x: x}
}

func (b *Engine) putShared(s *shared) {
	clear(s.batches)
	s.red, s.direct, s.atOnce, s.copied = backend.Reduction{}, false, false, 0
	s.issued.Store(0)
	s.ended.Store(false)
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.idle = append(b.idle, s)
}

// usable returns the exchange that a backend's ranks have, nil if they have none.
func (b *Engine) usable() *hostshm.Exchange {
	if x := b.Exchange.Load(); x != nil && x.Why == nil {
		return x
	}
	return nil
}

// direct reports whether the devices copy to the ranks' exchange.
func (o *Operation) direct() bool { return o.Shared != nil && o.Shared.direct }

// stage decides who copies. The caller holds engine.calls.
func (s *shared) stage(o *Operation) {
	x, p := s.x, o.Legs[0].Src
	x.Prepare()
	if x.Dev < 0 {
		x.Dev = p.Dev
	}
	if s.direct = x.Memory != nil && len(o.Legs) == 1 && p.Flat && p.Dev == x.Dev; !s.direct {
		o.Call = s.several
		return
	}
	if err := x.Small(); err != nil {
		s.err = err
		s.failed.Store(true)
	}
	s.atOnce = x.Kernel != nil && s.chunks == 1 && s.n*s.es <= mostAtOnce
}

// commands returns how many commands a stream gets.
func (s *shared) commands() int { return 3*s.chunks + 4 }

// enqueue gives the streams all their commands, while the host begins with the first chunks.
func (s *shared) enqueue(o *Operation, wrong bool) {
	defer func() {
		s.ended.Store(true)
		s.ending.Done()
	}()
	if wrong || s.failed.Load() {
		return
	}
	for from, many := 0, firstBatch; from < s.chunks; from, many = from+many, 2*many {
		if err := s.batch(o, from, min(from+many, s.chunks)); err != nil {
			s.err = err
			s.failed.Store(true)
			return
		}
	}
}

// batchOf returns in which batch a chunk is: the first has firstBatch, each later one
// twice as many as the one before.
func batchOf(k int) int { return bits.Len(uint(k+firstBatch)/firstBatch) - 1 }

// batch enqueues some chunks. The host may begin with them meanwhile.
func (s *shared) batch(o *Operation, from, to int) error {
	x, p := s.x, o.Legs[0].Src
	batch := o.B.Tracker.Batch()
	batch.KeepTurns() // nobody has been told yet
	if from == 0 {
		o.places = append(o.places[:0], p)
		o.prologue(batch, o.places)
		clear(o.places)
	}
	for k := from; k < to; k++ {
		c := s.first + uint64(k)
		lo, hi := s.elements(k)
		n, at := (hi-lo)*s.es, p.Base+driver.Ptr(p.Lo+lo*s.es)
		in, out := x.Ptr(x.In(x.Rank, c)), x.Ptr(x.Out(c))
		if s.atOnce {
			s.exchange(batch, p.Up, at, in, out, n, uint32(c+1))
			break
		}
		batch.Copy(p.Down, in, at, n)
		batch.Signal(p.Down, x.WordPtr(hostshm.WordArrived, x.Rank), uint32(c+1), driver.Writes(in, n), x.Arrival())
		// The host's turn has the tensor too, though the host does not touch it, so that it
		// is between the copies. The common slot is ordered by words, among all ranks.
		s.turns[k] = batch.Host(o.line.host, driver.Writes(in, n), driver.Writes(at, n))
		batch.Copy(p.Up, at, out, n)
		batch.WriteValue(p.Up, x.WordPtr(hostshm.WordTaken, x.Rank), uint32(c+1), driver.Writes(out, n))
	}
	if to < s.chunks {
		batch.Continues()
	} else {
		o.ends(batch)
	}
	pending := batch.Pending()
	o.mu.Lock()
	o.pending = pending // its streams have done the earlier ones when they have done this
	o.mu.Unlock()
	s.batches[s.issued.Load()] = pending
	s.issued.Add(1)
	_, err := o.give(batch)
	return err
}

// Exchange adds the kernel that does all of the device's part to the batch.
func (s *shared) exchange(batch *edges.Batch, stream driver.Stream, at, in, out driver.Ptr, n int, count uint32) {
	x := s.x
	arrived, release, taken := x.WordPtr(hostshm.WordArrived, x.Rank), x.WordPtr(hostshm.WordGo, x.Rank), x.WordPtr(hostshm.WordTaken, x.Rank)
	s.args.Reset().Ptr(at).Ptr(in).Ptr(out).Uint64(uint64(n)).Ptr(arrived).Ptr(release).Ptr(taken).Uint32(count)
	s.access = [...]driver.Access{
		driver.Writes(at, n), driver.Writes(in, n), driver.Reads(out, n),
		driver.Shares(arrived, 4), driver.Shares(release, 4), driver.Shares(taken, 4), x.Arrival(),
	}
	s.launch = driver.Launch{Function: x.Kernel, Grid: driver.Dim{X: 1}, Block: kernels.OneBlock(n), Args: &s.args, Access: s.access[:]}
	batch.Launch(stream, &s.launch)
}

// run does the host's part of a direct one.
func (s *shared) run(o *Operation) error {
	if s.parts > 1 {
		for i := range s.x.Left {
			s.x.Left[i].Store(int32(s.parts))
		}
		s.x.Crew.Start(s.parts, s)
	}
	err := s.turn(o)
	if s.parts > 1 {
		s.x.Crew.End(err != nil)
	}
	if err != nil {
		return err
	}
	s.ending.Wait()
	return s.err
}

// turn takes the host's turns.
func (s *shared) turn(o *Operation) error {
	x := s.x
	if err := s.meet(o); err != nil {
		return err
	}
	for k := range s.chunks {
		c := s.first + uint64(k)
		if s.parts == 1 {
			if err := s.inputs(c, o); err != nil {
				return s.lateShare(o, err, c)
			}
			s.combine(k, 0)
		}
		if err := s.combined(c, o); err != nil {
			return s.lateShare(o, err, c)
		}
		if s.atOnce {
			x.Count(hostshm.WordGo, c+1)
			break
		}
		// Its device's copy has ended long ago, but the batch may not have been told of. The
		// others may have all that they need, and have left.
		batch := batchOf(k)
		for w := (hostshm.Watch{Eager: x.Eager}); int(s.issued.Load()) <= batch && !s.failed.Load(); {
			if err := w.Poll((*leaving)(o)); err != nil {
				return err
			}
		}
		if s.failed.Load() {
			return o.Ask()
		}
		if err := s.batches[batch].Begin(stopped{o}, s.turns[k]); err != nil {
			return err
		}
		s.batches[batch].End(s.turns[k])
	}
	return nil
}

// Meet waits until all ranks are at the operation, and compares what they call.
// Ranks that go on with what they combine meanwhile do no harm: it has not left the
// host.
func (s *shared) meet(o *Operation) error {
	x, mine := s.x, o.Print.Said()
	x.Call(s.number, s.first, mine)
	for w := (hostshm.Watch{Eager: x.Eager}); !x.Met(s.first); {
		if err := w.Poll(o); err != nil {
			return s.late(o, err, hostshm.WordCalled, s.first+1, "has not called it")
		}
	}
	for r := range x.Size {
		if theirs := x.Called(r, s.number); theirs != mine {
			return &work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w", board.Disagree(o.number, x.Rank, mine, r, theirs))}
		}
	}
	return nil
}

// late adds to the end of a time limit which rank has not counted to n, the first one.
func (s *shared) late(o *Operation, err error, kind int, n uint64, what string) error {
	x := s.x
	if !errors.Is(err, work.ErrTimeout) {
		return err
	}
	for r := range x.Size {
		if r != x.Rank && !driver.AtLeast.Holds(driver.LoadWord(x.Region.Bytes, x.Word(kind, r)), uint32(n)) {
			return &work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w; rank %d %s", err, r, what)}
		}
	}
	return err
}

// lateShare is late for a chunk.
func (s *shared) lateShare(o *Operation, err error, c uint64) error {
	if late := s.late(o, err, hostshm.WordArrived, c+1, "has not given the host its tensor"); late != err {
		return late
	}
	return s.late(o, err, hostshm.WordDone, c+1, "has not combined its share")
}

func (s *shared) combineParts(i int) {
	for k := range s.chunks {
		if s.inputs(s.first+uint64(k), s.x.Crew) != nil {
			return
		}
		s.combine(k, i)
	}
}

// Part is what a member of the crew does: its part of the rank's share of each
// chunk.
func (s *shared) Part(i int) {
	returned := false
	defer func() {
		if !returned {
			s.panicked.CompareAndSwap(nil, work.Recovered(recover())) // of a custom operator
		}
	}()
	s.combineParts(i)
	returned = true
}

// inputs waits until a chunk of all ranks has come, and all devices have copied
// what was in the common slot before.
func (s *shared) inputs(c uint64, o hostshm.Asker) error {
	x := s.x
	for w := (hostshm.Watch{Eager: x.Eager}); !x.All(hostshm.WordArrived, c+1) || !x.All(hostshm.WordTaken, c+1-uint64(x.Slots)); {
		if err := w.Poll(o); err != nil {
			return err
		}
	}
	return nil
}

// combine combines a part of the rank's share of a chunk. Who is the last says that
// the share is done.
func (s *shared) combine(k, i int) {
	x := s.x
	c := s.first + uint64(k)
	from, to := s.elements(k)
	lo, hi := hostshm.Share((to-from)*s.es, x.Rank, x.Size)
	a, b := hostshm.Share(hi-lo, i, s.parts)
	x.Combine(c, &s.red, lo+a, lo+b, &x.Members[i])
	if s.parts > 1 {
		left := &x.Left[x.Slot(c)]
		if left.Add(-1) > 0 {
			return
		}
		left.Store(int32(s.parts))
	}
	x.Count(hostshm.WordDone, c+1)
}

// combined waits until all ranks have combined their shares of a chunk.
func (s *shared) combined(c uint64, o hostshm.Asker) error {
	x := s.x
	for w := (hostshm.Watch{Eager: x.Eager}); !x.All(hostshm.WordDone, c+1); {
		if err := w.Poll(o); err != nil {
			return err
		}
	}
	// Some of the combined elements may not be those of their rank, if that rank's streams go on
	// by themselves. Why they do is on its way.
	for w := (hostshm.Watch{}); x.Failed(); {
		if err := w.Poll(o); err != nil {
			return err
		}
	}
	return nil
}

// leave waits until the device has copied the last chunk.
func (s *shared) leave(o *Operation) error {
	for w := (hostshm.Watch{Eager: s.x.Eager}); !s.x.Has(hostshm.WordTaken, s.first+uint64(s.chunks)); {
		if err := w.Poll((*leaving)(o)); err != nil {
			return err
		}
	}
	return nil
}

// abort lets the streams go on, each after what it comes after. The host's part has
// ended.
func (s *shared) abort() {
	if s.atOnce {
		s.x.Count(hostshm.WordGo, s.first+1)
	}
	for i := 0; ; time.Sleep(50 * time.Microsecond) {
		over := s.ended.Load()
		for ; i < int(s.issued.Load()); i++ {
			s.batches[i].Abort()
		}
		if over {
			break
		}
	}
}

// release gives the batches back but the last one, which the operation has. All have
// left the device.
func (s *shared) release() {
	for _, p := range s.batches[:max(s.issued.Load()-1, 0)] {
		p.Release()
	}
}

// several is the host's part of a chunk where devices do not do it: this rank's
// tensors are combined first, in order.
func (s *shared) several(o *Operation, ts []*tensor.Tensor) error {
	all := ts[0].Bytes()
	for _, t := range ts[1:] {
		s.red.Combine(all, t.Bytes())
	}
	if err := s.byHost(o, all); err != nil {
		return err
	}
	for _, t := range ts[1:] {
		copy(t.Bytes(), all)
	}
	return nil
}

// byHost all-reduces b, the elements in order of the next chunk in memory of this
// rank's own, with others whose devices may do it.
func (s *shared) byHost(o *Operation, b []byte) error {
	x := s.x
	if s.copied == 0 {
		s.parts = 1
		if err := s.meet(o); err != nil {
			return err
		}
	}
	k := s.copied
	s.copied++
	c := s.first + uint64(k)
	// All ranks have combined what was in the slot: this one has waited for that.
	if x.Memory != nil {
		driver.HostAccess(x.D, "copying in", driver.Writes(x.Ptr(x.In(x.Rank, c)), len(b)))
	}
	copy(x.Region.Bytes[x.In(x.Rank, c):], b)
	x.Count(hostshm.WordArrived, c+1)
	if err := s.inputs(c, o); err != nil {
		return s.lateShare(o, err, c)
	}
	s.combine(k, 0)
	if err := s.combined(c, o); err != nil {
		return s.lateShare(o, err, c)
	}
	// The device may still be copying for earlier operations, and counts that.
	for w := (hostshm.Watch{Eager: x.Eager}); !x.Has(hostshm.WordTaken, c); {
		if err := w.Poll(o); err != nil {
			return err
		}
	}
	if x.Memory != nil {
		driver.HostAccess(x.D, "copying out", driver.Reads(x.Ptr(x.Out(c)), len(b)))
	}
	copy(b, x.Region.Bytes[x.Out(c):])
	x.Count(hostshm.WordTaken, c+1)
	return nil
}

// elements returns the range of elements of a chunk.
func (s *shared) elements(k int) (lo, hi int) { return k * s.grain, min((k+1)*s.grain, s.n) }

func (o *Operation) Ask() error {
	if err := o.expired(); err != nil {
		return err
	}
	if s := o.Shared; s.failed.Load() {
		s.ending.Wait()
		return s.err
	}
	if p := o.Shared.panicked.Load(); p != nil {
		return p
	}
	return cmp.Or(o.B.Broken(), o.B.CPUErr())
}

func (o *Operation) AskDriver() error { return stopped{o}.Err() }

// leaving is an operation that has only to leave the device: what becomes of the
// group does not matter to it.
type leaving Operation

func (l *leaving) Ask() error {
	if err := (*Operation)(l).expired(); err != nil {
		return fmt.Errorf("%w, waiting for the device", err)
	}
	return nil
}

func (l *leaving) AskDriver() error {
	return cmp.Or(l.Legs[0].Src.Down.Err(), l.Legs[0].Src.Up.Err())
}
