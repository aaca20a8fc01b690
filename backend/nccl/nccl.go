package nccl

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/nccl/internal/libnccl"
	"github.com/c10d-go/c10d/internal/argcheck"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Name is what the backend is registered as.
const Name = "nccl"

func init() {
	err := backend.Register(backend.Registration{
		Name: Name, Devices: []tensor.DeviceType{tensor.CUDA},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) { return New(ctx, o) },
	})
	if err != nil {
		panic(err)
	}
}

// ErrNoLibrary is matched by the error of New where no NCCL can be loaded.
var ErrNoLibrary = libnccl.ErrNoLibrary

// Library returns where NCCL's library was found, and its version. Path is Options.Library.
func Library(path string) (at, version string, err error) {
	a, err := libnccl.Open(path)
	if err != nil {
		return "", "", fmt.Errorf("nccl: %w", err)
	}
	return a.Path(), a.Version().String(), nil
}

// Options are the backend's own options, for pg.Options.BackendOptions.
type Options struct {
	// Library is the path of NCCL's library. Empty means the environment variable C10D_NCCL_LIBRARY; if that is empty too,
	// the library of PyTorch in the Python that is found first, then the system's. All ranks need the same version,
	// PyTorch's included.
	Library string

	// Driver has the devices that tensors are on; nil means the process's GPUs. The backend does not close it.
	Driver driver.Driver

	// Device is the rank's device, for a barrier and for objects before any tensor has shown it, and for Eager. A device of
	// type CPU, as in the zero value, stands for the one whose number is the local rank (LOCAL_RANK), or else 0.
	Device tensor.Device

	// Eager makes the communicator in New, and those of groups that all ranks make by splits of it. PyTorch's ranks do
	// that if init_process_group has a device_id. They need the same.
	Eager bool

	// DumpPyTorch makes PyTorch's ranks dump their flight recorders and end, a minute or so after this rank's group has
	// failed. Without it they wait for their timeout.
	DumpPyTorch bool

	// Scratch is how many bytes of device memory the group keeps for later operations on lists of tensors that do not
	// lie one behind the other. 0 means 256 MiB.
	Scratch int

	// Control are options of the group of backend gloo by which ranks of this library tell each other of faults. There is
	// none if PyTorch's ranks may take part.
	Control gloo.Options

	api libnccl.API // in place of the library, for tests
}

// BackendName returns Name: these are the options of this backend.
func (Options) BackendName() string { return Name }

// Backend does the collectives of tensors in device memory by NCCL; see backend.Backend.
type Backend struct {
	backend.Unsupported
	options    Options
	rank, size int
	issuer     work.Issuer
	api        libnccl.API
	driver     driver.Driver
	store      store.Store
	root       store.Store // without prefixes
	args       argcheck.Checker
	scratch    *pool.Pool[driver.Memory]
	pinned     *pool.Pool[driver.HostMemory]
	control    *gloo.Backend // nil beside PyTorch
	told       func(*work.Error)

	// calls is held by a call until it has given its stream the operation. It guards what follows.
	calls sync.Mutex
	dev   driver.Device // nil until it is known
	ids   int           // communicators that were made from ids
	word  driver.Memory // of barriers; nil before the first

	seq     atomic.Uint64
	timeout atomic.Int64
	fault   atomic.Pointer[error]
	life    context.Context // ends with the group
	end     context.CancelCauseFunc

	mu      sync.Mutex
	comms   map[int]*comm // by the peer of messages, -1 for the group's
	pending []*operation
	closing bool
	left    map[int]time.Time // when ranks have closed the group
	held    []driver.Memory   // of graphs

	wake       chan struct{}
	watching   sync.WaitGroup
	failMu     sync.Mutex
	over       bool // Close waits for failing, and nothing fails any more
	failing    sync.WaitGroup
	closed     sync.Once
	closeErr   error
	quit       chan struct{}
	dumpsKnown bool // exception_dump was there before
}

// New makes the backend of a rank. It connects the ranks if Options.Eager is set, and else the first operation does.
func New(ctx context.Context, o backend.Options) (_ *Backend, err error) {
	var own Options
	switch v := o.Specific.(type) {
	case nil:
	case Options:
		own = v
	default:
		return nil, fmt.Errorf("nccl: options of type %T, want nccl.Options", v)
	}
	switch {
	case o.Rank < 0 || o.Rank >= o.Size:
		return nil, fmt.Errorf("nccl: rank %d is not within a group of %d", o.Rank, o.Size)
	case o.Store == nil && o.Size > 1:
		return nil, errors.New("nccl: the ranks need a store to meet")
	case own.Scratch < 0:
		return nil, fmt.Errorf("nccl: Options.Scratch is %d bytes, want 0 or more", own.Scratch)
	}
	if own.api == nil {
		if own.api, err = libnccl.Open(own.Library); err != nil {
			return nil, fmt.Errorf("nccl: %w", err)
		}
	}
	if own.Driver == nil {
		if own.Driver, err = nvidia.Default(); err != nil {
			return nil, fmt.Errorf("nccl: %w", err)
		}
	}
	b := &Backend{
		Unsupported: backend.Unsupported{Backend: Name}, options: own, rank: o.Rank, size: o.Size, issuer: work.Issuer{Group: o.Group, Rank: o.Rank, Names: o.Names},
		api: own.api, driver: own.Driver, store: store.Unnoted(o.Store), root: store.Root(o.Store), scratch: pool.NewScratch(own.Driver, cmp.Or(own.Scratch, 256<<20)), pinned: pool.NewPinned(own.Driver, 16<<20), told: o.Failed,
		comms: map[int]*comm{}, left: map[int]time.Time{}, wake: make(chan struct{}, 1), quit: make(chan struct{}),
	}
	b.args = argcheck.Checker{Backend: Name, Rank: b.rank, Size: b.size, Dense: b.dense}
	b.life, b.end = context.WithCancelCause(context.Background())
	b.SetTimeout(o.Timeout)
	defer func() {
		if err != nil {
			b.fail(err)
			err = errors.Join(err, b.Close())
		}
	}()
	if o.Meeting != nil && b.size > 1 {
		if err := b.meet(ctx, o); err != nil {
			return nil, err
		}
	}
	b.watching.Go(b.watch)
	if b.besidePyTorch() && b.root != nil {
		b.dumpsKnown, _ = b.root.Check(ctx, dumpKey)
		b.watching.Go(b.watchDumps)
	}
	if !own.Eager {
		return b, nil
	}
	parent, _ := o.Parent.(*Backend)
	if parent != nil && parent.Splits() {
		return b, b.splitOff(ctx, parent, o)
	}
	return b, b.connectNow(ctx)
}

// meeting takes the log lines of the control group until its ranks have met. After that they always wait, for each
// other's questions.
type meeting struct {
	slog.Handler
	met *atomic.Bool
}

func (m meeting) Enabled(ctx context.Context, l slog.Level) bool {
	return !m.met.Load() && m.Handler.Enabled(ctx, l)
}

func (m meeting) WithAttrs(a []slog.Attr) slog.Handler {
	return meeting{m.Handler.WithAttrs(a), m.met}
}

// meet makes the control group, and compares NCCL's versions.
func (b *Backend) meet(ctx context.Context, o backend.Options) error {
	inner := o
	inner.Device, inner.Specific, inner.Store, inner.Failed = tensor.CPU, b.options.Control, store.Prefix("c10d", o.Store), nil
	log := meeting{Handler: cmp.Or(o.Logger, slog.Default()).Handler(), met: new(atomic.Bool)}
	inner.Logger = slog.New(log)
	control, err := gloo.New(ctx, inner)
	if err != nil {
		return err
	}
	b.control = control
	defer log.met.Store(true)
	mine, all := make([]byte, 8), make([]byte, 8*b.size)
	binary.LittleEndian.PutUint64(mine, uint64(b.api.Version()))
	in, err := tensor.Of(mine, 8)
	if err != nil {
		return err
	}
	out, err := tensor.Of(all, len(all))
	if err != nil {
		return err
	}
	w, err := control.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{})
	if err == nil {
		err = w.Wait(context.Background())
	}
	if err != nil {
		return fmt.Errorf("nccl: comparing versions with the other ranks: %w", err)
	}
	for r := range b.size {
		if v := libnccl.Version(binary.LittleEndian.Uint64(all[8*r:])); v != b.api.Version() {
			return fmt.Errorf("nccl: rank %d has NCCL %v (%s), %s NCCL %v: all ranks need the same, give them the library's path in Options.Library or %s",
				b.rank, b.api.Version(), b.api.Path(), b.issuer.Names.Rank(r), v, libnccl.Variable)
		}
	}
	for r := range b.size {
		if r != b.rank {
			b.watching.Go(func() { b.listen(r) })
		}
	}
	return nil
}

// besidePyTorch reports whether other ranks may be PyTorch's.
func (b *Backend) besidePyTorch() bool { return b.control == nil && b.size > 1 }

// ownDevice returns the number of the rank's device if no tensor has shown it.
func (b *Backend) ownDevice() int {
	switch {
	case b.dev != nil:
		return b.dev.ID().Index
	case b.options.Device.Type == tensor.CUDA:
		return b.options.Device.Index
	}
	local, _ := strconv.Atoi(os.Getenv("LOCAL_RANK"))
	return local % max(b.driver.Count(), 1)
}

// connectNow makes the communicator.
func (b *Backend) connectNow(ctx context.Context) error {
	b.calls.Lock()
	defer b.calls.Unlock()
	if _, err := b.groupComm(ctx, b.ownDevice(), time.Now().Add(b.limit(0))); err != nil {
		return fmt.Errorf("nccl: making the communicator of %s: %w", b.issuer.Names.Group(b.issuer.Group), err)
	}
	return nil
}

// splitOff makes the communicator as a part of the parent's.
func (b *Backend) splitOff(ctx context.Context, parent *Backend, o backend.Options) error {
	hue := color(o.Ranks)
	if o.Parts {
		if v := b.api.Version(); parent.besidePyTorch() && v < libnccl.LowestRankVersion {
			return fmt.Errorf("nccl: %w: a split into parts beside PyTorch before 2.11, to which NCCL %v belongs: the colors of its parts are not known; NewGroup makes the groups one by one", errors.ErrUnsupported, v)
		}
		hue = slices.Min(o.Ranks)
	}
	b.dev = parent.dev
	c, err := b.newComm(b.dev, b.rank, b.size)
	if err != nil {
		return err
	}
	err = parent.splitFor(ctx, hue, b.rank, c)
	return errors.Join(err, b.keep(-1, c))
}

// Name returns "nccl".
func (b *Backend) Name() string { return Name }

// Rank returns this rank's number in the group.
func (b *Backend) Rank() int { return b.rank }

// Size returns the number of ranks in the group.
func (b *Backend) Size() int { return b.size }

// Seq returns how many operations have been issued.
func (b *Backend) Seq() uint64 { return b.seq.Load() }

// SetTimeout sets the limit of later operations.
func (b *Backend) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	b.timeout.Store(int64(d))
}

// limit returns the time of an operation: the group's, unless the call has one.
func (b *Backend) limit(d time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return time.Duration(b.timeout.Load())
}

// closing takes about so long: pending operations may end, and the ranks of a communicator end it together.
const (
	closeOperations = 500 * time.Millisecond
	closeTogether   = 500 * time.Millisecond
)

// Shutdown waits until what was issued has ended, then closes the backend. If ctx ends first, Close ends the rest, and
// the error wraps that of ctx.
func (b *Backend) Shutdown(ctx context.Context) error {
	b.shut()
	var err error
	if !b.drained(ctx) {
		err = fmt.Errorf("nccl: %d operations have not ended: %w", b.underway(), canceled(ctx))
	}
	return errors.Join(err, b.Close())
}

// shut refuses later calls.
func (b *Backend) shut() {
	b.mu.Lock()
	b.closing = true
	b.mu.Unlock()
}

// drained waits until nothing is pending; false if ctx has ended first.
func (b *Backend) drained(ctx context.Context) bool {
	for began := time.Now(); b.underway() > 0; driver.Pause(began) {
		if ctx.Err() != nil {
			return false
		}
	}
	return true
}

func (b *Backend) underway() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.pending)
}

// Close lets operations go on for half a second, and ends those still pending with work.ErrClosed. It ends the
// communicators together with the other ranks, if these do so within half a second.
func (b *Backend) Close() error {
	b.closed.Do(func() {
		b.shut()
		ctx, cancel := context.WithTimeout(context.Background(), closeOperations)
		defer cancel()
		if !b.drained(ctx) {
			b.fail(work.ErrClosed)
		}
		b.failMu.Lock()
		b.over = true
		b.failMu.Unlock()
		b.failing.Wait()
		b.mu.Lock()
		comms := b.comms
		b.comms = map[int]*comm{}
		held := b.held
		b.mu.Unlock()
		var ending sync.WaitGroup
		var errs []error
		for _, c := range comms {
			ending.Go(func() { c.finalize(closeTogether) })
		}
		ending.Wait()
		for _, c := range comms {
			errs = append(errs, c.stream.Close())
		}
		for _, m := range append(held, b.word) {
			if m != nil {
				errs = append(errs, m.Close())
			}
		}
		errs = append(errs, b.scratch.Close(), b.pinned.Close())
		if b.control != nil {
			errs = append(errs, b.control.Close())
		}
		close(b.quit)
		b.end(work.ErrClosed)
		b.watching.Wait()
		b.closeErr = errors.Join(errs...)
	})
	return b.closeErr
}

var (
	_ backend.Backend    = (*Backend)(nil)
	_ backend.Shutdowner = (*Backend)(nil)
	_ backend.Splitter   = (*Backend)(nil)
	_ backend.Batcher    = (*Backend)(nil)
	_ backend.Explainer  = (*Backend)(nil)
)
