// Package group has what all operations of a group of ranks share: their order, their end, their failure,
// and the way through the host.
//
// A file calls only those below it:
//
//   - engine: a group begins and ends
//   - message: a send or a receive becomes an operation
//   - within: operations on the tensors of a group of one rank
//   - run: the host's part of operations, and their end
//   - meet: what the ranks tell each other
//   - issue: a collective becomes an operation on the streams
//   - feeder, stage: who enqueues it, and what it needs before
//   - onhost: operations on tensors in CPU memory
//   - onetoall, route: broadcasts from host to host
//   - shared, small: all-reduces through memory that the ranks share
//   - made: device memory for an outcome whose length nobody knows before
//   - claim: messages
//   - words: whether kernels see what the host writes
//   - pack: tensors that are not contiguous
//   - staged: all other operations
//   - feed, fifo, room: how many commands a stream gets at a time, in which order
//   - fault: errors, and the end of a group
//   - program, leg: an operation with its own commands; the bytes that move, and their streams
package group

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
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/internal/ring"
	"github.com/c10d-go/c10d/work"
)

// CPUGroup is what the name of the group of the host's part ends with.
const CPUGroup = "/cuda"

const DefaultSlots = 4

// Engine is a group: its CPU backend, the order and the end of its operations, and its failure.
type Engine struct {
	Config
	Issuer      work.Issuer
	CPU         backend.Backend // of the same ranks, does the host's part
	Tracker     *edges.Tracker
	Pinned      *pool.Pool[driver.HostMemory]
	Scratch     *pool.Pool[driver.Memory] // for elements in order, and for other devices' tensors
	line        *line                     // that collectives share
	messages    *line                     // that sends and receives share; its streams wait for no other rank
	timeout     atomic.Int64
	fault       atomic.Pointer[error]            // what ended the group
	Unreachable error                            // why no device reaches another rank's, as far as New knows
	Ways        []way                            // that have operations of their own
	OnHost      onHost                           // orders operations on tensors in CPU memory; may be nil
	Board       *board.Board                     // of what ranks of this host call
	OneHost     bool                             // all ranks are on this one, as Meet has found
	local       int                              // this rank's number among those of its host
	Devices     int                              // that the ranks of this host see together, most likely
	Exchange    atomic.Pointer[hostshm.Exchange] // what they all-reduce through; nil until it is clear whether they need it

	making   sync.Mutex // of streams and kernels
	byCall   temporary  // guarded by Calls
	byFeeder temporary

	Calls       sync.Mutex // makes the order of calls that of what they enqueue
	collectives uint64     // that were issued; guarded by calls
	hosted      bool       // a collective has gone through the hosts since the last barrier that did
	heard       int        // how often Hear was called
	packers     map[int]*packer

	InUse  atomic.Bool                // Close has left memory that devices may still use
	cut    atomic.Pointer[work.Error] // what the others are told when Close has ended what was pending
	open   atomic.Int64               // sends and receives
	Staged atomic.Int64               // operations that have not left the devices, but direct ones
	queued atomic.Int64               // commands of operations that a stream may still have to do

	Mu       sync.Mutex
	seq      uint64
	uncalled *work.Error // of the last operation that was not started because its context had ended
	draining bool        // Shutdown has begun
	closing  bool
	closed   chan struct{}
	Last     *work.Work      // of the last collective that was issued
	todo     Fifo[Operation] // for the worker
	ending   Fifo[Operation] // for the finisher
	late     []*Operation
	gaveUp   bool // Close has ended turns before what they come after
	posted   map[Post]chan struct{}
	unfed    ring.Queue[*Operation] // for the feeder, which takes out those that it has enqueued
	feeds    sync.Cond              // unfed or fed has changed
	fed      bool                   // there is nothing more for the feeder
	wg       sync.WaitGroup
	p2p      sync.WaitGroup
}

// Config is how an engine is made.
type Config struct {
	Rank, Size  int
	Group       string
	Names       *work.Names
	Timeout     time.Duration // at first
	Driver      driver.Driver
	Missing     error // why there is no driver
	Chunk       int   // as the rest, see Options of package cuda
	Slots       int
	SharedSlots int // of the exchange, for each rank
	KeepPinned  int
	KeepScratch int
	Limits      error // why all-reduces may not go through memory that ranks share
}

// New returns an engine that has no CPU backend yet.
func New(c Config) (*Engine, error) {
	b := &Engine{
		Config: c, Issuer: work.Issuer{Group: c.Group, Rank: c.Rank, Names: c.Names},
		Tracker: edges.New(c.Driver), Pinned: pool.NewPinned(c.Driver, c.KeepPinned), Scratch: pool.NewScratch(c.Driver, c.KeepScratch),
		closed: make(chan struct{}), posted: make(map[Post]chan struct{}),
		messages: &line{down: make(map[int]driver.Stream), up: make(map[int]driver.Stream)}, Board: new(board.Board),
	}
	b.timeout.Store(int64(c.Timeout))
	b.feeds.L = &b.Mu
	b.todo.Init(&b.Mu)
	b.ending.Init(&b.Mu)
	if c.Missing == nil {
		var err error
		if b.line, err = b.newLine(); err != nil {
			return nil, errors.Join(fmt.Errorf("cuda: %w", err), b.Tracker.Close())
		}
	}
	return b, nil
}

// Start begins to serve operations.
func (b *Engine) Start() {
	b.wg.Go(b.feed)
	b.wg.Go(b.work)
	b.wg.Go(b.finish)
}

// Discard frees what an engine has that was not started.
func (b *Engine) Discard() error {
	errs := []error{b.usable().Close(), b.Board.Close()}
	if b.CPU != nil {
		errs = append(errs, b.CPU.Close())
	}
	return errors.Join(append(errs, b.Tracker.Close())...)
}

// Seq returns how many operations have been issued.
func (b *Engine) Seq() uint64 {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	return b.seq
}

// SetTimeout sets the limit of later operations.
func (b *Engine) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	b.timeout.Store(int64(d))
}

// Shutdown waits until what was issued has ended, then closes the backend. If ctx ends first,
// Close ends the rest, and the error wraps that of ctx.
func (b *Engine) Shutdown(ctx context.Context) error {
	called := b.called(ctx)
	b.Mu.Lock()
	b.draining = true
	last := b.Last
	b.Mu.Unlock()
	if called {
		b.Calls.Unlock()
	}
	open := called && b.drain(ctx)
	var cut error
	switch {
	case !called:
		cut = fmt.Errorf("cuda: Shutdown gave up waiting for a call that waits for room on a stream: %w", Canceled(ctx))
	case last != nil && !last.IsCompleted():
		cut = fmt.Errorf("cuda: Shutdown gave up waiting for %v seq %d: %w", last.Info().Op, last.Info().Seq, Canceled(ctx))
	case open:
		cut = fmt.Errorf("cuda: Shutdown gave up waiting for sends or receives: %w", Canceled(ctx))
	}
	return errors.Join(cut, b.Close())
}

// called waits until no call is being made, and returns with Calls held; false if ctx ends first.
func (b *Engine) called(ctx context.Context) bool {
	for !b.Calls.TryLock() {
		if ctx.Err() != nil {
			return false
		}
		time.Sleep(time.Millisecond)
	}
	return true
}

// Close lets operations go on for half a second, ends those still pending with work.ErrClosed, says
// goodbye and frees everything. It takes about a second, and what devices take to leave an
// operation that was ended, closeLimit at most.
func (b *Engine) Close() error {
	b.Mu.Lock()
	again := b.closing
	b.closing = true
	b.Mu.Unlock()
	if again {
		<-b.closed
		return nil
	}
	defer close(b.closed)
	returned := b.interrupt()
	if returned {
		b.leave()
		returned = b.fedWithin(CloseLimit)
	}
	if !returned {
		// The call uses all that there is.
		b.InUse.Store(true)
		b.Mu.Lock()
		b.fed = true
		b.feeds.Broadcast()
		b.todo.Close()
		b.Mu.Unlock()
		err := fmt.Errorf("cuda: a call has not returned from the driver %v after the group ended, and its memory stays", CloseLimit)
		return errors.Join(err, b.CPU.Close())
	}
	b.p2p.Wait()
	b.Mu.Lock()
	b.todo.Close()
	b.Mu.Unlock()
	b.wg.Wait()

	b.usable().Rest()
	var err error
	for _, w := range b.Ways {
		err = errors.Join(err, w.Close())
	}
	err = errors.Join(err, b.CPU.Close(), b.Board.Close())
	stuck := b.stuck(CloseLimit)
	if stuck > 0 {
		// Operations behind one that does not end go on without it.
		b.Tracker.GiveUp()
		b.gaveUp = true
		stuck = b.stuck(Linger)
	}
	if stuck > 0 {
		// Their streams still use the memory, which therefore stays.
		b.InUse.Store(true)
		return errors.Join(err, fmt.Errorf("cuda: %d operations that failed have not left the device after %v", stuck, CloseLimit))
	}
	errs := []error{err}
	for _, l := range []*line{b.line, b.messages} {
		if l != nil {
			errs = append(errs, l.close(b.Tracker))
		}
	}
	for _, k := range b.packers {
		errs = append(errs, k.close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), CloseLimit)
	defer cancel()
	if err := b.Tracker.Drain(ctx); err != nil {
		errs = append(errs, fmt.Errorf("cuda: callers' streams wait for a message, and the memory of its word stays: %w", err))
	}
	return errors.Join(append(errs, b.Tracker.Close(), b.usable().Close(), b.Pinned.Close(), b.Scratch.Close())...)
}

// interrupt waits until no call is being made. It ends the group if one does not return: that call waits
// for room on a stream, or for a launch that blocks. It returns false if that does not end the call in
// CloseLimit.
func (b *Engine) interrupt() bool {
	cut, end := false, time.Now().Add(closeGrace)
	for ; !b.Calls.TryLock(); time.Sleep(time.Millisecond) {
		switch {
		case time.Now().Before(end):
		case cut:
			return false
		default:
			b.cutOff(b.Issuer.Info(work.Barrier, b.Seq()),
				&departure{"it called Close while another call waited for room on a stream"})
			cut, end = true, time.Now().Add(CloseLimit)
		}
	}
	b.Calls.Unlock()
	return true
}

// leave ends the pending operations, because this rank closes the group, and tells the others.
func (b *Engine) leave() {
	if b.Broken() != nil || b.CPUErr() != nil {
		return // all has ended
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	b.drain(ctx)
	cancel()
	b.Mu.Lock()
	last, messages := b.Last, b.open.Load()
	info := b.Issuer.Info(work.Barrier, b.seq)
	b.Mu.Unlock()
	why := &departure{}
	switch {
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

// drain waits until what was issued has ended, or ctx has. It reports whether something is open.
func (b *Engine) drain(ctx context.Context) (open bool) {
	b.Mu.Lock()
	last := b.Last
	b.Mu.Unlock()
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

// cutOff ends the group because of Close.
func (b *Engine) cutOff(at work.Info, why *departure) {
	err := &work.Error{Info: at, Peer: b.Rank, Err: why}
	b.cut.Store(err)
	b.Fail(err, err)
}

// stuck returns how many operations have not left the devices when the limit is over.
func (b *Engine) stuck(limit time.Duration) (n int) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, o := range b.late {
		if !o.settled(ctx) {
			n++
		}
	}
	return n
}

// closeGrace is how long Close lets operations end by themselves. A caller that has ordered its
// stream after one (Work.Synchronize) and seen the result may close before the Work has ended.
const closeGrace = 500 * time.Millisecond

// CloseLimit bounds how long Close waits for devices that do not go on after an
// operation has failed.
var CloseLimit = 5 * time.Second // a variable for tests

// Linger is how long a rank that closes after a failure, which may be another rank's, waits for
// others to let go of its memory.
const Linger = time.Second

// departure is why this rank has ended the group in Close.
type departure struct{ words string }

func (d *departure) Error() string { return d.words }

func (d *departure) Unwrap() error { return work.ErrPeerLeft }
