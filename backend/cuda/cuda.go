package cuda

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/unwind"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Name is what the backend is registered as.
const Name = "cuda"

// cpuGroup is what the name of the group of the host's part ends with.
const cpuGroup = "/cuda"

func init() {
	err := backend.Register(backend.Registration{
		Name: Name, Devices: []tensor.DeviceType{tensor.CUDA},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) { return New(ctx, o) },
	})
	if err != nil {
		panic(err)
	}
}

// Default returns the process's GPUs, the driver of groups whose Options have
// none. It is opened on the first call that finds a device, and stays open.
func Default() (driver.Driver, error) {
	process.Lock()
	defer process.Unlock()
	if process.d == nil {
		d, err := nvidia.Open()
		if err != nil {
			return nil, err
		}
		process.d = d
	}
	return process.d, nil
}

var process struct {
	sync.Mutex
	d driver.Driver
}

const (
	defaultChunk = 2 << 20
	defaultSlots = 4
	defaultKept  = 256 << 20
)

// Options are the backend's own options, for pg.Options.BackendOptions.
type Options struct {
	// Driver has the devices that tensors are on; nil means Default. The backend
	// does not close it. Where Default finds no device the group can be made all the
	// same, and operations on tensors say why they cannot be done.
	Driver driver.Driver

	// Chunk is how many bytes of each rank go through the host at a time, so that
	// the way down, the CPU's part and the way up of large tensors overlap; 0
	// means 2 MiB. Tensors of more than 60 of them go in 60 larger ones; operations of
	// several tensors have fewer, all-reduces through memory that ranks share up to
	// 256. All ranks need the same.
	Chunk int

	// Slots is how many chunks are on their way at a time; 0 means 4, and for all-reduces
	// through memory that ranks share as many as fill 128 MiB, if those are more. Such ranks
	// need the same.
	Slots int

	// Pinned is how many bytes of page-locked memory the group keeps for later operations,
	// besides what operations under way have; 0 means 256 MiB. A call frees the rest when no
	// operation of the process is under way, because CUDA may wait for all streams to free
	// memory.
	Pinned int

	// Scratch is how many bytes of memory of each device the group keeps in the same way; 0
	// means 256 MiB. Tensors that are not contiguous need such memory, and those on another
	// device than that of direct work.
	Scratch int

	// AllReduce is the name of the work that does every all-reduce, for tests: one of
	// AllReduceWorks. Empty lets the backend choose. All ranks need the same.
	AllReduce string

	// Broadcast is the way in which every broadcast goes from rank to rank:
	// BroadcastDirect, BroadcastFlat, BroadcastTree, BroadcastChain or BroadcastHost.
	// Empty means direct work, if the group has it, and else the way of the fewest
	// messages for the number of ranks and chunks. All ranks need the same.
	Broadcast string

	// CPU is the backend that does the host's part; empty means that of CPUOptions, or gloo.
	// CPUOptions are its own options. Nil means, for gloo, sums in rank order: then bits do
	// not depend on Chunk.
	CPU        string
	CPUOptions backend.SpecificOptions
}

// BackendName returns Name: these are the options of this backend.
func (Options) BackendName() string { return Name }

func (o *Options) check() error {
	switch {
	case o.Chunk < 0:
		return fmt.Errorf("cuda: Options.Chunk is %d bytes, want 0 or more", o.Chunk)
	case o.Slots < 0:
		return fmt.Errorf("cuda: Options.Slots is %d, want 0 or more", o.Slots)
	case o.Pinned < 0:
		return fmt.Errorf("cuda: Options.Pinned is %d bytes, want 0 or more", o.Pinned)
	case o.Scratch < 0:
		return fmt.Errorf("cuda: Options.Scratch is %d bytes, want 0 or more", o.Scratch)
	case o.Broadcast != "" && !slices.Contains(broadcastWays, o.Broadcast):
		return fmt.Errorf("cuda: Options.Broadcast is %q, want one of %q", o.Broadcast, broadcastWays)
	}
	o.Chunk, o.Slots, o.Pinned = cmp.Or(o.Chunk, defaultChunk), cmp.Or(o.Slots, defaultSlots), cmp.Or(o.Pinned, defaultKept)
	o.Scratch = cmp.Or(o.Scratch, defaultKept)
	if o.CPU == "" && o.CPUOptions != nil {
		o.CPU = o.CPUOptions.BackendName()
	}
	o.CPU = cmp.Or(o.CPU, gloo.Name)
	if o.CPUOptions == nil && o.CPU == gloo.Name {
		o.CPUOptions = gloo.Options{Sums: gloo.SumsInRankOrder}
	}
	if o.CPUOptions != nil && o.CPUOptions.BackendName() != o.CPU {
		return fmt.Errorf("cuda: Options.CPUOptions is a %T, for backend %q, and Options.CPU is %q", o.CPUOptions, o.CPUOptions.BackendName(), o.CPU)
	}
	if o.AllReduce != "" && !slices.Contains(AllReduceWorks(), o.AllReduce) {
		return fmt.Errorf("cuda: no all-reduce work is called %q", o.AllReduce)
	}
	return nil
}

// Backend does the collectives of tensors in device memory; see backend.Backend.
type Backend struct {
	rank, size  int
	group       string
	options     Options
	driver      driver.Driver
	missing     error           // why there is no driver
	cpu         backend.Backend // of the same ranks, does the host's part
	tracker     *edges.Tracker
	pinned      *pool.Pool[driver.HostMemory]
	scratch     *pool.Pool[driver.Memory] // for elements in order, and for other devices' tensors
	line        *line                     // that collectives share
	messages    *line                     // that sends and receives share; its streams wait for no other rank
	timeout     atomic.Int64
	fault       atomic.Pointer[error]            // what ended the group
	unreachable error                            // why no device reaches another rank's, as far as New knows
	direct      *directGroup                     // for direct work
	board       *board.Board                     // of what ranks of this host call
	oneHost     bool                             // all ranks are on this one
	exchange    atomic.Pointer[hostshm.Exchange] // what they all-reduce through; nil until it is clear whether they need it

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

// New connects a rank with the others of its group. It returns when all are
// connected, when ctx ends or when the timeout is over.
func New(ctx context.Context, o backend.Options) (*Backend, error) {
	var own Options
	switch v := o.Specific.(type) {
	case nil:
	case Options:
		own = v
	default:
		return nil, fmt.Errorf("cuda: options of type %T, want cuda.Options", v)
	}
	slots := own.Slots
	if err := own.check(); err != nil {
		return nil, err
	}
	r, ok := backend.Lookup(own.CPU)
	if !ok {
		return nil, fmt.Errorf("cuda: %q: %w", own.CPU, backend.ErrUnknownBackend)
	}
	if !slices.Contains(r.Devices, tensor.CPU) {
		return nil, fmt.Errorf("cuda: backend %q does not serve tensors in CPU memory, which the host's part needs", own.CPU)
	}
	var missing error
	if own.Driver == nil {
		// A program that is linked with the backend also runs where there are no
		// devices: no tensor can be on one, and what is without tensors works.
		if own.Driver, missing = Default(); missing != nil {
			if !errors.Is(missing, driver.ErrNoDevice) {
				return nil, fmt.Errorf("cuda: %w", missing)
			}
			own.Driver = nil
		}
	}
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	b := &Backend{
		rank: o.Rank, size: o.Size, group: o.Group, options: own, driver: own.Driver,
		tracker: edges.New(own.Driver), pinned: pool.NewPinned(own.Driver, own.Pinned),
		scratch: pool.NewScratch(own.Driver, own.Scratch), closed: make(chan struct{}),
	}
	b.missing = missing
	b.direct = &directGroup{b: b}
	b.messages = &line{down: make(map[int]driver.Stream), up: make(map[int]driver.Stream)}
	b.sharedSlots = cmp.Or(slots, hostshm.Slots(b.size, own.Chunk, defaultSlots))
	b.timeout.Store(int64(o.Timeout))
	var err error
	if missing == nil {
		if b.line, err = b.newLine(); err != nil {
			return nil, errors.Join(fmt.Errorf("cuda: %w", err), b.tracker.Close())
		}
	}
	inner := o
	inner.Device, inner.Specific, inner.Group = tensor.CPU, own.CPUOptions, o.Group+cpuGroup
	if o.Store != nil {
		inner.Store = store.Prefix("cpu", o.Store)
	}
	if b.cpu, err = r.New(ctx, inner); err != nil {
		return nil, errors.Join(err, b.tracker.Close())
	}
	if err = b.meet(ctx); err == nil {
		err = b.agree(ctx)
	}
	if err == nil {
		// Who opens the board has done so.
		err = b.board.Hide()
	}
	if err == nil && missing == nil && lacks(b.driver) == nil {
		// Not in an operation, when streams may wait for a word.
		names := []string{kernels.Pack, kernels.Unpack, kernels.Exchange}
		if n := b.driver.Count(); b.direct.can() == nil && (n == 1 || n >= b.size) {
			names = kernels.Names()
			keepDirect(b.driver, b.size) // else ranks share devices, most likely
		}
		driver.Keep(b.driver, kernels.PTX, names...)
	}
	if err == nil && b.direct.can() != nil && (own.AllReduce == "" || own.AllReduce == HostWork) {
		// Else the first collective finds out whether it is needed.
		err = b.share(ctx, 0)
	}
	if err != nil {
		return nil, errors.Join(err, b.usable().Close(), b.board.Close(), b.cpu.Close(), b.tracker.Close())
	}
	b.posted = make(map[post]chan struct{})
	b.todo.init(&b.mu)
	b.ending.init(&b.mu)
	b.wg.Go(b.work)
	b.wg.Go(b.finish)
	return b, nil
}

// agree checks that what must be the same on all ranks is.
func (b *Backend) agree(ctx context.Context) error {
	const nameLen = 56
	if len(b.options.AllReduce) > nameLen {
		return fmt.Errorf("cuda: Options.AllReduce is a name of %d bytes, want at most %d", len(b.options.AllReduce), nameLen)
	}
	const wayLen = 8
	mine := make([]byte, 8+wayLen+nameLen)
	binary.LittleEndian.PutUint64(mine, uint64(b.options.Chunk))
	copy(mine[8:8+wayLen], b.options.Broadcast)
	copy(mine[8+wayLen:], b.options.AllReduce)
	in, err := tensor.Of(mine, len(mine))
	if err != nil {
		return err
	}
	all := make([]byte, len(mine)*b.size)
	out, err := tensor.Of(all, len(all))
	if err != nil {
		return err
	}
	w, err := b.cpu.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{})
	if err == nil {
		err = w.Wait(context.Background())
	}
	if err != nil {
		return fmt.Errorf("cuda: comparing options with the other ranks: %w", err)
	}
	for r := range b.size {
		theirs := all[r*len(mine) : (r+1)*len(mine)]
		if !slices.Equal(theirs, mine) {
			return fmt.Errorf("cuda: rank %d has Options.Chunk %d, AllReduce %q and Broadcast %q, rank %d %d, %q and %q", r,
				binary.LittleEndian.Uint64(theirs), trimZeros(theirs[8+wayLen:]), trimZeros(theirs[8:8+wayLen]),
				b.rank, b.options.Chunk, b.options.AllReduce, b.options.Broadcast)
		}
	}
	return nil
}

func trimZeros(b []byte) []byte {
	for len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return b
}

// Name returns "cuda".
func (b *Backend) Name() string { return Name }

// Rank returns this rank's number in the group.
func (b *Backend) Rank() int { return b.rank }

// Size returns the number of ranks in the group.
func (b *Backend) Size() int { return b.size }

// Seq returns how many operations have been issued.
func (b *Backend) Seq() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.seq
}

// SetTimeout sets the limit of later operations.
func (b *Backend) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	b.timeout.Store(int64(d))
}

// Abort ends every operation with cause, on every rank.
func (b *Backend) Abort(cause error) {
	if cause == nil {
		cause = work.ErrAborted
	}
	b.fail(&aborted{cause}, cause)
}

// aborted is the end of a group that this rank has aborted.
type aborted struct{ cause error }

func (e *aborted) Error() string   { return fmt.Sprintf("%v: %v", work.ErrAborted, e.cause) }
func (e *aborted) Unwrap() []error { return []error{work.ErrAborted, e.cause} }

// culprit returns the rank that caused an error, as the other ranks are told; -1 if
// none or not known.
func (b *Backend) culprit(err error) int {
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
func (b *Backend) fail(err, cause error) {
	b.fault.CompareAndSwap(nil, &err)
	if left := b.cut.Load(); left != nil {
		cause = left // an operation that Close has ended may be here first
	}
	b.cpu.Abort(cause)
	b.direct.abort()
}

// broken returns what ended the group, nil while it works.
func (b *Backend) broken() error {
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
func (b *Backend) stuck(limit time.Duration) (n int) {
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
func (b *Backend) drain(ctx context.Context) (open bool) {
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
func (b *Backend) interrupt() {
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
func (b *Backend) cutOff(at work.Info, why *departure) {
	err := &work.Error{Info: at, Peer: b.rank, Err: why}
	b.cut.Store(err)
	b.fail(err, err)
}

// leave ends what is pending, because this rank closes the group, and tells the others.
func (b *Backend) leave(dying bool) {
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
func (b *Backend) Shutdown(ctx context.Context) error {
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
func (b *Backend) Close() error {
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
	err := errors.Join(b.direct.close(), b.cpu.Close(), b.board.Close())
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
func (b *Backend) cpuErr() error {
	if e, ok := b.cpu.(interface{ Err() error }); ok {
		return e.Err()
	}
	return nil
}
