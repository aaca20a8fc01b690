package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// What decides how an all-reduce goes through the exchange. BenchmarkHostStages
// measures what they rest on.
const (
	// sharedPieces is into how many chunks an all-reduce is cut, so that the way
	// down, the CPUs' part and the way up overlap, as long as they have smallestPiece
	// bytes and at most Options.Chunk.
	sharedPieces  = 8
	smallestPiece = 512 << 10

	// mostAtOnce is how many bytes a kernel does the device's part of. It writes to the
	// host and reads from there with the threads of one block, and needs a third of the
	// calls, and no wait of a stream for a word, which that notices late.
	mostAtOnce = 128 << 10

	// firstBatch is how many chunks are enqueued at first, and then twice as many each
	// time: the host begins with them while the next are enqueued.
	firstBatch = 2

	// mostCrew is how many goroutines of a rank combine its share at most: as many as are
	// as fast as the copies. With twelve, and threads that look for work beside them, the whole
	// takes longer up to 1 MiB, from 4 bytes on. spareCPUs are
	// a rank's that they leave to who enqueues, who waits and the rank's worker.
	mostCrew  = 4
	spareCPUs = 3

	// eagerCPUs is how many CPUs a rank needs for its goroutines to poll without
	// letting others go first.
	eagerCPUs = 4
	eagerFor  = 2 * time.Millisecond
	yieldFor  = 200 * time.Microsecond

	// lingerFor is how long the worker and the finisher poll for the next operation
	// before they sleep, where there are CPUs for that: waking a goroutine of another
	// thread takes 5 to 50 us.
	lingerFor = 200 * time.Microsecond

	// askEvery is how often who polls asks whether to go on; every so many times
	// that, the driver.
	askEvery  = 100 * time.Microsecond
	askDriver = 50
)

// smallestPart is the least that one goroutine of a rank's crew combines, of each
// rank's bytes; a variable for tests, like crewOf.
var smallestPart = 16 << 10

// crewOf returns how many goroutines of a rank combine its share, if it may use so
// many CPUs.
var crewOf = func(cpus int) int { return min(cpus-spareCPUs, mostCrew) }

// usableCPUs returns how many CPUs this process may use at a time.
func usableCPUs() int { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) }

// shared is the part of an all-reduce that goes through the exchange.
type shared struct {
	x      *exchange
	red    backend.Reduction
	n, es  int
	grain  int    // elements in a chunk
	chunks int    // in all
	first  uint64 // the number of the first chunk
	number uint64 // of the operation, among those that go through the exchange
	parts  int    // into how many a rank's share of a chunk is cut

	// direct: the device's streams copy to the exchange and from there. Otherwise this
	// rank's host does: for tensors that are not contiguous, for several, for those on
	// another device than the first, whose streams do not count in order, and where the
	// memory could not be page-locked.
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

// batchOf returns in which batch a chunk is: the first has firstBatch, each later one
// twice as many as the one before.
func batchOf(k int) int { return bits.Len(uint(k+firstBatch)/firstBatch) - 1 }

// own are the kinds of operators that ranks may have each of their own: a rank cannot
// combine others' elements with those.
var own = []backend.ReduceKind{backend.Custom("", nil).Kind(), backend.PreMulSum(1).Kind()}

// sharing returns the part of a call that goes through the exchange, nil if it does
// not. What decides is the same on every rank.
func (b *Backend) sharing(op backend.ReduceOp, ts []*tensor.Tensor) *shared {
	x, n, d := b.usable(), ts[0].Len(), ts[0].DType()
	if x == nil || n == 0 || slices.Contains(own, op.Kind()) {
		return nil
	}
	red, err := op.Reduction(d, b.size)
	if err != nil {
		return nil
	}
	grain := sharedGrain(n, d.Size(), b.options.Chunk)
	chunks := (n + grain - 1) / grain
	if chunks > mostPieces {
		return nil
	}
	s := x.get()
	s.red, s.n, s.es, s.grain, s.chunks = red, n, d.Size(), grain, chunks
	_, most := share(s.grain*s.es, 0, b.size)
	s.parts = min(max(most/smallestPart, 1), x.crew.n)
	batches := batchOf(chunks-1) + 1
	s.batches, s.turns = slices.Grow(s.batches[:0], batches)[:batches], slices.Grow(s.turns[:0], chunks)[:chunks]
	return s
}

// get returns what an operation needs, put takes it back.
func (x *exchange) get() *shared {
	x.mu.Lock()
	defer x.mu.Unlock()
	if n := len(x.free); n > 0 {
		s := x.free[n-1]
		x.free = x.free[:n-1]
		return s
	}
	return &shared{x: x}
}

func (x *exchange) put(s *shared) {
	clear(s.batches)
	s.red, s.direct, s.atOnce, s.copied = backend.Reduction{}, false, false, 0
	s.issued.Store(0)
	s.ended.Store(false)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.free = append(x.free, s)
}

// sharedGrain returns how many of n elements a chunk has.
func sharedGrain(n, es, chunk int) int {
	bytes := min(max((n*es+sharedPieces-1)/sharedPieces, smallestPiece), chunk)
	return max((bytes&^15)/es, 1)
}

// elements returns the range of elements of a chunk.
func (s *shared) elements(k int) (lo, hi int) { return k * s.grain, min((k+1)*s.grain, s.n) }

// commands returns how many commands a stream gets.
func (s *shared) commands() int { return 3*s.chunks + 4 }

// stage decides who copies. The caller holds Backend.calls.
func (s *shared) stage(o *operation) {
	x, p := s.x, o.legs[0].src
	x.prepare()
	if x.dev < 0 {
		x.dev = p.dev
	}
	if s.direct = x.memory != nil && len(o.legs) == 1 && p.flat && p.dev == x.dev; !s.direct {
		o.call = s.several
		return
	}
	if err := x.small(); err != nil {
		s.err = err
		s.failed.Store(true)
	}
	s.atOnce = x.kernel != nil && s.chunks == 1 && s.n*s.es <= mostAtOnce
}

// enqueue gives the streams all that they will do, while the host begins with what
// is there.
func (s *shared) enqueue(o *operation, wrong bool) {
	defer func() {
		s.ended.Store(true)
		s.ending.Done()
	}()
	if wrong || s.failed.Load() {
		return
	}
	for from, many := 0, firstBatch; from < s.chunks; from, many = from+many, 2*many {
		pending, err := s.batch(o, from, min(from+many, s.chunks))
		if err != nil {
			s.err = err
			s.failed.Store(true) // before the host can see the batch, which is not whole
		}
		if pending != nil {
			o.mu.Lock()
			o.pending = pending // its streams have done the earlier ones when they have done this
			o.mu.Unlock()
			s.batches[s.issued.Load()] = pending
			s.issued.Add(1)
		}
		if err != nil {
			return
		}
	}
}

// batch enqueues some chunks.
func (s *shared) batch(o *operation, from, to int) (*edges.Pending, error) {
	x, p := s.x, o.legs[0].src
	batch := o.b.tracker.Batch()
	batch.KeepTurns() // nobody has been told yet
	if from == 0 {
		o.line.places = append(o.line.places[:0], p)
		o.prologue(batch, o.line.places...)
		clear(o.line.places)
	}
	for k := from; k < to; k++ {
		c := s.first + uint64(k)
		lo, hi := s.elements(k)
		n, at := (hi-lo)*s.es, p.base+driver.Ptr(p.lo+lo*s.es)
		in, out := x.ptr(x.in(x.rank, c)), x.ptr(x.out(c))
		if s.atOnce {
			s.exchange(batch, p.up, at, in, out, n, uint32(c+1))
			break
		}
		batch.Copy(p.down, in, at, n)
		batch.Signal(p.down, x.wordPtr(wordArrived, x.rank), uint32(c+1), driver.Writes(in, n), x.arrival())
		// The host's turn has the tensor too, though the host does not touch it, so that it
		// is between the copies. The common slot is ordered by words, among all ranks.
		s.turns[k] = batch.Host(o.line.host, driver.Writes(in, n), driver.Writes(at, n))
		batch.Copy(p.up, at, out, n)
		batch.WriteValue(p.up, x.wordPtr(wordTaken, x.rank), uint32(c+1), driver.Writes(out, n))
	}
	if to < s.chunks {
		batch.Continues()
	}
	return batch.Run()
}

// arrival is what all that counts arrivals writes, so that they are counted in order.
// The kernels count on another stream than the copies do; that is the one on which both
// count what was taken.
func (x *exchange) arrival() driver.Access {
	return driver.Writes(x.wordPtr(wordArrived, x.rank)+exchangeLine/2, 4)
}

// exchange adds the kernel that does all of the device's part to the batch.
func (s *shared) exchange(batch *edges.Batch, stream driver.Stream, at, in, out driver.Ptr, n int, count uint32) {
	x := s.x
	arrived, release, taken := x.wordPtr(wordArrived, x.rank), x.wordPtr(wordGo, x.rank), x.wordPtr(wordTaken, x.rank)
	s.args.Reset().Ptr(at).Ptr(in).Ptr(out).Uint64(uint64(n)).Ptr(arrived).Ptr(release).Ptr(taken).Uint32(count)
	s.access = [...]driver.Access{
		driver.Writes(at, n), driver.Writes(in, n), driver.Reads(out, n),
		driver.Shares(arrived, 4), driver.Shares(release, 4), driver.Shares(taken, 4), x.arrival(),
	}
	s.launch = driver.Launch{Function: x.kernel, Grid: driver.Dim{X: 1}, Block: kernels.OneBlock(n), Args: &s.args, Access: s.access[:]}
	batch.Launch(stream, &s.launch)
}

// run does the host's part of a direct one.
func (s *shared) run(o *operation) error {
	if s.parts > 1 {
		for i := range s.x.left {
			s.x.left[i].Store(int32(s.parts))
		}
		s.x.crew.start(s.parts, s)
	}
	err := s.turn(o)
	if s.parts > 1 {
		s.x.crew.end(err != nil)
	}
	if err != nil {
		return err
	}
	s.ending.Wait()
	return s.err
}

// turn takes the host's turns.
func (s *shared) turn(o *operation) error {
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
			x.count(wordGo, c+1)
			break
		}
		// Its device's copy has ended long ago, but the batch may not have been told of. The
		// others may have all that they need, and have left.
		batch := batchOf(k)
		for w := (watch{eager: x.eager}); int(s.issued.Load()) <= batch && !s.failed.Load(); {
			if err := w.poll((*leaving)(o)); err != nil {
				return err
			}
		}
		if s.failed.Load() {
			return o.ask()
		}
		if err := s.batches[batch].Begin(stopped{o}, s.turns[k]); err != nil {
			return err
		}
		s.batches[batch].End(s.turns[k])
	}
	return nil
}

// meet waits until all ranks are at the operation, and compares what they call.
// Ranks that go on with what they combine meanwhile do no harm: it has not left the
// host.
func (s *shared) meet(o *operation) error {
	x, mine := s.x, o.print.said()
	x.call(s.number, s.first, mine)
	for w := (watch{eager: x.eager}); !x.met(s.first); {
		if err := w.poll(o); err != nil {
			return s.late(o, err, wordCalled, s.first+1, "has not called it")
		}
	}
	for r := range x.size {
		if theirs := x.called(r, s.number); theirs != mine {
			return &work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w", disagree(o.number, x.rank, mine, r, theirs))}
		}
	}
	return nil
}

// late adds to the end of a time limit which rank has not counted to n, the first one.
func (s *shared) late(o *operation, err error, kind int, n uint64, what string) error {
	x := s.x
	if !errors.Is(err, work.ErrTimeout) {
		return err
	}
	for r := range x.size {
		if r != x.rank && !driver.AtLeast.Holds(driver.LoadWord(x.region.bytes, x.word(kind, r)), uint32(n)) {
			return &work.Error{Info: o.Info(), Peer: r, Err: fmt.Errorf("cuda: %w; rank %d %s", err, r, what)}
		}
	}
	return err
}

// lateShare is late for a chunk.
func (s *shared) lateShare(o *operation, err error, c uint64) error {
	if late := s.late(o, err, wordArrived, c+1, "has not given the host its tensor"); late != err {
		return late
	}
	return s.late(o, err, wordDone, c+1, "has not combined its share")
}

// inputs waits until a chunk of all ranks has come, and all devices have copied
// what was in the common slot before.
func (s *shared) inputs(c uint64, o asker) error {
	x := s.x
	for w := (watch{eager: x.eager}); !x.all(wordArrived, c+1) || !x.all(wordTaken, c+1-uint64(x.slots)); {
		if err := w.poll(o); err != nil {
			return err
		}
	}
	return nil
}

// combined waits until all ranks have combined their shares of a chunk.
func (s *shared) combined(c uint64, o asker) error {
	x := s.x
	for w := (watch{eager: x.eager}); !x.all(wordDone, c+1); {
		if err := w.poll(o); err != nil {
			return err
		}
	}
	// Some of what was combined may not be what its rank gave, if that rank's streams
	// go on by themselves. Why they do is on its way.
	for w := (watch{}); x.failed(); {
		if err := w.poll(o); err != nil {
			return err
		}
	}
	return nil
}

// leave waits until the device has copied the last chunk.
func (s *shared) leave(o *operation) error {
	for w := (watch{eager: s.x.eager}); !s.x.has(wordTaken, s.first+uint64(s.chunks)); {
		if err := w.poll((*leaving)(o)); err != nil {
			return err
		}
	}
	return nil
}

// abort lets the streams go on, each after what it comes after. The host's part has
// ended.
func (s *shared) abort() {
	for i := 0; ; time.Sleep(50 * time.Microsecond) {
		over := s.ended.Load()
		for ; i < int(s.issued.Load()); i++ {
			s.batches[i].Abort()
		}
		if over {
			break
		}
	}
	if s.atOnce {
		s.x.count(wordGo, s.first+1)
	}
}

// release gives the batches back but the last one, which the operation has. All have
// left the device.
func (s *shared) release() {
	for _, p := range s.batches[:max(s.issued.Load()-1, 0)] {
		p.Release()
	}
}

// part is what a member of the crew does: its part of the rank's share of each
// chunk.
func (s *shared) part(i int) {
	returned := false
	defer func() {
		if !returned {
			s.panicked.CompareAndSwap(nil, work.Recovered(recover())) // of a custom operator
		}
	}()
	s.combineParts(i)
	returned = true
}

func (s *shared) combineParts(i int) {
	for k := range s.chunks {
		if s.inputs(s.first+uint64(k), s.x.crew) != nil {
			return
		}
		s.combine(k, i)
	}
}

// combine combines a part of the rank's share of a chunk. Who is the last says that
// the share is done.
func (s *shared) combine(k, i int) {
	x := s.x
	c := s.first + uint64(k)
	from, to := s.elements(k)
	lo, hi := share((to-from)*s.es, x.rank, x.size)
	a, b := share(hi-lo, i, s.parts)
	x.combine(c, &s.red, lo+a, lo+b, &x.members[i])
	if s.parts > 1 {
		left := &x.left[x.slot(c)]
		if left.Add(-1) > 0 {
			return
		}
		left.Store(int32(s.parts))
	}
	x.count(wordDone, c+1)
}

// byHost all-reduces b, the elements in order of the next chunk in memory of this
// rank's own, with others whose devices may do it.
func (s *shared) byHost(o *operation, b []byte) error {
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
	if x.memory != nil {
		driver.HostAccess(x.d, "copying in", driver.Writes(x.ptr(x.in(x.rank, c)), len(b)))
	}
	copy(x.region.bytes[x.in(x.rank, c):], b)
	x.count(wordArrived, c+1)
	if err := s.inputs(c, o); err != nil {
		return s.lateShare(o, err, c)
	}
	s.combine(k, 0)
	if err := s.combined(c, o); err != nil {
		return s.lateShare(o, err, c)
	}
	// The device may still be copying for earlier operations, and counts that.
	for w := (watch{eager: x.eager}); !x.has(wordTaken, c); {
		if err := w.poll(o); err != nil {
			return err
		}
	}
	if x.memory != nil {
		driver.HostAccess(x.d, "copying out", driver.Reads(x.ptr(x.out(c)), len(b)))
	}
	copy(b, x.region.bytes[x.out(c):])
	x.count(wordTaken, c+1)
	return nil
}

// several is the host's part of a chunk where devices do not do it: this rank's
// tensors are combined first, in order.
func (s *shared) several(o *operation, ts []*tensor.Tensor) error {
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

// asker says whether to go on waiting. Ask is cheap, askDriver is not.
type asker interface {
	ask() error
	askDriver() error
}

func (o *operation) ask() error {
	if err := o.ctx.Err(); err != nil {
		return canceled(o.ctx)
	}
	if time.Now().After(o.deadline) {
		return fmt.Errorf("%w after %v", work.ErrTimeout, o.timeout)
	}
	if s := o.shared; s.failed.Load() {
		s.ending.Wait()
		return s.err
	}
	if p := o.shared.panicked.Load(); p != nil {
		return p
	}
	return cmp.Or(o.b.broken(), o.b.cpuErr())
}

func (o *operation) askDriver() error { return stopped{o}.Err() }

// leaving is an operation that has only to leave the device: what becomes of the
// group does not matter to it.
type leaving operation

func (l *leaving) ask() error {
	o := (*operation)(l)
	if err := o.ctx.Err(); err != nil {
		return canceled(o.ctx)
	}
	if time.Now().After(o.deadline) {
		return fmt.Errorf("%w after %v, waiting for the device", work.ErrTimeout, o.timeout)
	}
	return nil
}

func (l *leaving) askDriver() error {
	return cmp.Or(l.legs[0].src.down.Err(), l.legs[0].src.up.Err())
}

var errQuit = errors.New("no longer needed")

func (c *crew) ask() error {
	if c.quit.Load() {
		return errQuit
	}
	return nil
}

func (c *crew) askDriver() error { return nil }

// watch is how a goroutine waits for a word: it polls as fast as it can for a
// while, then lets others go first, then pauses.
type watch struct {
	eager        bool
	polls, asked int
	start, last  time.Time
}

// poll is called when the word has not come. Its error ends the waiting.
func (w *watch) poll(o asker) error {
	const burst = 32
	if w.polls++; w.polls%burst != 0 {
		return nil
	}
	now := time.Now()
	if w.start.IsZero() {
		w.start, w.last = now, now
	}
	if now.Sub(w.last) >= askEvery {
		w.last = now
		if err := o.ask(); err != nil {
			return err
		}
		if w.asked++; w.asked%askDriver == 0 {
			if err := o.askDriver(); err != nil {
				return err
			}
		}
	}
	switch waited := now.Sub(w.start); {
	case w.eager && waited < eagerFor:
		if w.polls%(64*burst) == 0 {
			runtime.Gosched()
		}
	case waited < yieldFor:
		runtime.Gosched()
	default:
		time.Sleep(min(waited/16, 200*time.Microsecond))
	}
	return nil
}
