package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/internal/unwind"
	"github.com/c10d-go/c10d/work"
)

// cpuGroup is what the name of the group of the host's part ends with.
const cpuGroup = "/cuda"

const defaultSlots = 4

// engine is a group: its CPU backend, the order and the end of its operations, and its failure.
type engine struct {
	rank, size   int
	group        string
	chunk, slots int   // see Options
	limits       error // why the ranks may not all-reduce through memory that they share
	driver       driver.Driver
	missing      error           // why there is no driver
	cpu          backend.Backend // of the same ranks, does the host's part
	tracker      *edges.Tracker
	pinned       *pool.Pool[driver.HostMemory]
	scratch      *pool.Pool[driver.Memory] // for elements in order, and for other devices' tensors
	line         *line                     // that collectives share
	messages     *line                     // that sends and receives share; its streams wait for no other rank
	timeout      atomic.Int64
	fault        atomic.Pointer[error]            // what ended the group
	unreachable  error                            // why no device reaches another rank's, as far as New knows
	ways         []way                            // that have operations of their own
	board        *board.Board                     // of what ranks of this host call
	oneHost      bool                             // all ranks are on this one
	exchange     atomic.Pointer[hostshm.Exchange] // what they all-reduce through; nil until it is clear whether they need it

	sharedSlots int // of the exchange, for each rank

	calls       sync.Mutex // makes the order of calls that of what they enqueue
	collectives uint64     // that were issued; guarded by calls, like packers
	packers     map[int]*packer

	cut    atomic.Pointer[work.Error] // what the others are told when Close has ended what was pending
	open   atomic.Int64               // sends and receives
	staged atomic.Int64               // operations that have not left the devices, but direct ones
	queued atomic.Int64               // commands of operations that a stream may still have to do

	mu       sync.Mutex
	seq      uint64
	draining bool // Shutdown has begun
	closing  bool
	closed   chan struct{}
	last     *work.Work      // of the last collective that was issued
	todo     fifo[operation] // for the worker
	ending   fifo[operation] // for the finisher
	late     []*operation
	idle     []*shared // for later operations
	posted   map[post]chan struct{}
	wg       sync.WaitGroup
	p2p      sync.WaitGroup
}

func trimZeros(b []byte) []byte {
	for len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return b
}

// Rank returns this rank's number in the group.
func (b *engine) Rank() int { return b.rank }

// Size returns the number of ranks in the group.
func (b *engine) Size() int { return b.size }

// Seq returns how many operations have been issued.
func (b *engine) Seq() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.seq
}

// SetTimeout sets the limit of later operations.
func (b *engine) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	b.timeout.Store(int64(d))
}

// Abort ends every operation with cause, on every rank.
func (b *engine) Abort(cause error) {
	if cause == nil {
		cause = work.ErrAborted
	}
	b.fail(&aborted{cause}, cause)
}

// aborted is the end of a group that this rank has aborted.
type aborted struct{ cause error }

func (e *aborted) Error() string { return fmt.Sprintf("%v: %v", work.ErrAborted, e.cause) }

func (e *aborted) Unwrap() []error { return []error{work.ErrAborted, e.cause} }

// culprit returns the rank that caused an error, as the other ranks are told; -1 if
// none or not known.
func (b *engine) culprit(err error) int {
	var own *aborted
	var first *work.Error
	var panicked *work.PanicError
	switch {
	case errors.As(err, &own):
		return b.rank
	case errors.As(err, &first):
		return first.Peer
	case errors.As(err, &panicked):
		return b.rank
	}
	return -1
}

// fail ends the group: err is what operations of this rank end with, cause what
// the other ranks are told.
func (b *engine) fail(err, cause error) {
	b.fault.CompareAndSwap(nil, &err)
	if left := b.cut.Load(); left != nil {
		cause = left // an operation that Close has ended may be here first
	}
	b.cpu.Abort(cause)
	for _, w := range b.ways {
		w.Abort()
	}
}

// broken returns what ended the group, nil while it works.
func (b *engine) broken() error {
	if e := b.fault.Load(); e != nil {
		return *e
	}
	return nil
}

// linger is how long a rank that closes after a failure, which may be another rank's, waits for
// others to let go of its memory.
const linger = time.Second

// closeLimit bounds how long Close waits for devices that do not go on after an
// operation has failed.
var closeLimit = 5 * time.Second // a variable for tests

// stuck returns how many operations have not left the devices when the limit is over.
func (b *engine) stuck(limit time.Duration) (n int) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, o := range b.late {
		if !o.settled(ctx) {
			n++
		}
	}
	return n
}

// departure is why this rank has ended the group in Close.
type departure struct {
	kind  error
	words string
}

func (d *departure) Error() string { return d.words }

func (d *departure) Unwrap() error { return d.kind }

// closeGrace is how long Close lets operations end by themselves. A caller that has ordered its
// stream after one (Work.Synchronize) and seen the result may close before the Work has ended.
const closeGrace = 500 * time.Millisecond

// drain waits until what was issued has ended, or ctx has. It reports whether something is open.
func (b *engine) drain(ctx context.Context) (open bool) {
	b.mu.Lock()
	last := b.last
	b.mu.Unlock()
	if last != nil {
		last.Wait(ctx) // its error is for whoever waits for the operation
		open = !last.IsCompleted()
	}
	messages := make(chan struct{})
	go func() {
		b.p2p.Wait()
		close(messages)
	}()
	select {
	case <-messages:
	case <-ctx.Done():
		open = open || b.open.Load() > 0
	}
	return open
}

// interrupt waits until no call is being made. If one does not return, it ends the group: that
// call waits for room on a stream, until an operation that is under way has run out of time.
func (b *engine) interrupt() {
	for end := time.Now().Add(closeGrace); !b.calls.TryLock(); time.Sleep(time.Millisecond) {
		if time.Now().Before(end) {
			continue
		}
		b.cutOff(work.Info{Op: work.Barrier, Seq: b.Seq(), Group: b.group, Rank: b.rank},
			&departure{work.ErrPeerLeft, "it called Close while another call waited for room on a stream"})
		b.calls.Lock()
		break
	}
	b.calls.Unlock()
}

// cutOff ends the group because of Close.
func (b *engine) cutOff(at work.Info, why *departure) {
	err := &work.Error{Info: at, Peer: b.rank, Err: why}
	b.cut.Store(err)
	b.fail(err, err)
}

// leave ends what is pending, because this rank closes the group, and tells the others.
func (b *engine) leave(dying bool) {
	if b.broken() != nil || b.cpuErr() != nil {
		return // all has ended
	}
	if !dying {
		ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
		b.drain(ctx)
		cancel()
	}
	b.mu.Lock()
	last, messages := b.last, b.open.Load()
	info := work.Info{Op: work.Barrier, Seq: b.seq, Group: b.group, Rank: b.rank}
	b.mu.Unlock()
	why := &departure{kind: work.ErrPeerLeft}
	switch {
	case dying:
		why.kind, why.words = work.ErrPanicked, "its program called Close while it panicked"
	case last != nil && !last.IsCompleted():
		info = last.Info()
		why.words = fmt.Sprintf("it called Close with %v seq %d open", info.Op, info.Seq)
	case messages > 0:
		why.words = fmt.Sprintf("it called Close with %d sends or receives open", messages)
	default:
		return
	}
	b.cutOff(info, why)
}

// Shutdown waits until what was issued has ended, then closes the backend. When ctx ends first,
// Close ends what is left, and the error wraps that of ctx.
func (b *engine) Shutdown(ctx context.Context) error {
	b.calls.Lock()
	b.mu.Lock()
	b.draining = true
	last := b.last
	b.mu.Unlock()
	b.calls.Unlock()
	open := b.drain(ctx)
	var cut error
	switch {
	case last != nil && !last.IsCompleted():
		cut = fmt.Errorf("cuda: Shutdown gave up waiting for %v seq %d: %w", last.Info().Op, last.Info().Seq, canceled(ctx))
	case open:
		cut = fmt.Errorf("cuda: Shutdown gave up waiting for sends or receives: %w", canceled(ctx))
	}
	return errors.Join(cut, b.Close())
}

// Close lets operations go on for half a second, ends those still pending with work.ErrClosed, says
// goodbye and frees everything. It takes about a second, and what devices take to leave an
// operation that was ended, closeLimit at most.
func (b *engine) Close() error {
	dying := unwind.ByPanic()
	b.mu.Lock()
	again := b.closing
	b.closing = true
	b.mu.Unlock()
	if again {
		<-b.closed
		return nil
	}
	defer close(b.closed)
	b.interrupt()
	b.leave(dying)
	b.p2p.Wait()
	b.mu.Lock()
	b.todo.close()
	b.mu.Unlock()
	b.wg.Wait()

	b.usable().Rest()
	var err error
	for _, w := range b.ways {
		err = errors.Join(err, w.Close())
	}
	err = errors.Join(err, b.cpu.Close(), b.board.Close())
	stuck := b.stuck(closeLimit)
	if stuck > 0 {
		// What comes after something that does not end goes on without it.
		b.tracker.GiveUp()
		stuck = b.stuck(linger)
	}
	if stuck > 0 {
		// Their streams still use the memory, which therefore stays.
		return errors.Join(err, fmt.Errorf("cuda: %d operations that failed have not left the device after %v", stuck, closeLimit))
	}
	errs := []error{err}
	for _, l := range []*line{b.line, b.messages} {
		if l != nil {
			errs = append(errs, l.close(b.tracker))
		}
	}
	for _, k := range b.packers {
		errs = append(errs, k.close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	if err := b.tracker.Drain(ctx); err != nil {
		errs = append(errs, fmt.Errorf("cuda: callers' streams wait for a message, and the memory of its word stays: %w", err))
	}
	return errors.Join(append(errs, b.tracker.Close(), b.usable().Close(), b.pinned.Close(), b.scratch.Close())...)
}

// cpuErr returns what ended the group of the host's part, if its backend says so.
func (b *engine) cpuErr() error {
	if e, ok := b.cpu.(interface{ Err() error }); ok {
		return e.Err()
	}
	return nil
}

// way has operations that do not go through the engine's streams.
type way interface {
	// Before has a batch come after the operations that use the same memory as the batch will.
	Before(batch *edges.Batch, places []*place.Place)

	// Abort ends all operations: the group has failed.
	Abort()

	// Close waits until all operations have left the devices, and frees what the way has.
	Close() error
}

// config is how an engine is made.
type config struct {
	rank, size                int
	group                     string
	timeout                   time.Duration
	driver                    driver.Driver
	missing                   error // why there is no driver
	chunk, slots, sharedSlots int
	pinned, scratch           int
	limits                    error // why all-reduces may not go through memory that ranks share
}

// newEngine returns an engine that has no CPU backend yet.
func newEngine(c config) (*engine, error) {
	b := &engine{
		rank: c.rank, size: c.size, group: c.group, driver: c.driver, missing: c.missing, chunk: c.chunk, slots: c.slots, sharedSlots: c.sharedSlots,
		limits: c.limits, tracker: edges.New(c.driver), pinned: pool.NewPinned(c.driver, c.pinned), scratch: pool.NewScratch(c.driver, c.scratch),
		closed: make(chan struct{}), posted: make(map[post]chan struct{}),
		messages: &line{down: make(map[int]driver.Stream), up: make(map[int]driver.Stream)},
	}
	b.timeout.Store(int64(c.timeout))
	b.todo.init(&b.mu)
	b.ending.init(&b.mu)
	if c.missing == nil {
		var err error
		if b.line, err = b.newLine(); err != nil {
			return nil, errors.Join(fmt.Errorf("cuda: %w", err), b.tracker.Close())
		}
	}
	return b, nil
}

// start begins to serve operations.
func (b *engine) start() {
	b.wg.Go(b.work)
	b.wg.Go(b.finish)
}

// discard frees what an engine has that was not started.
func (b *engine) discard() error {
	errs := []error{b.usable().Close(), b.board.Close()}
	if b.cpu != nil {
		errs = append(errs, b.cpu.Close())
	}
	return errors.Join(append(errs, b.tracker.Close())...)
}
