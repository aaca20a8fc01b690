package cuda

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
	"github.com/c10d-go/c10d/backend/cuda/internal/clusterway"
	"github.com/c10d-go/c10d/backend/cuda/internal/directway"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/argcheck"
	"github.com/c10d-go/c10d/internal/ways"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// Name is what the backend is registered as.
const Name = "cuda"

func init() {
	err := backend.Register(backend.Registration{
		Name: Name, Devices: []tensor.DeviceType{tensor.CUDA, tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) { return New(ctx, o) },
	})
	if err != nil {
		panic(err)
	}
}

// Default returns the process's GPUs, the driver of groups whose Options have
// none. It is opened on the first call that finds a device, and stays open.
func Default() (driver.Driver, error) { return nvidia.Default() }

const (
	defaultChunk = 2 << 20
	defaultKept  = 256 << 20
)

// Options are the backend's own options, for pg.Options.BackendOptions.
type Options struct {
	// Driver has the devices that tensors are on; nil means Default. The backend
	// does not close it. Where Default finds no device the group can be made all the
	// same, and operations on device tensors say why they cannot be done.
	Driver driver.Driver

	// NoDevice makes this rank one without a device, also where the process could have some. Its
	// tensors are in CPU memory; those of other ranks may be on devices. Driver must be nil.
	NoDevice bool

	// Chunk is how many bytes of each rank go through the host at a time. So the way down, the
	// CPU's part and the way up of large tensors overlap. 0 means 2 MiB. Tensors of more than 60
	// of them go in 60 larger ones, but in all-reduces through memory that ranks share. Operations of
	// several tensors have fewer. All ranks need the same.
	Chunk int

	// Slots is how many chunks are on their way at a time; 0 means 4. All-reduces through memory
	// that ranks share then have as many as fill 128 MiB, if those are more. Such ranks need the
	// same.
	Slots int

	// Pinned is how many bytes of page-locked memory the group keeps for later operations,
	// besides what operations under way have; 0 means 256 MiB. A call frees the rest when no
	// operation of the process is under way, because CUDA may wait for all streams to free
	// memory.
	Pinned int

	// Scratch is how many bytes of memory of each device the group keeps in the same way; 0
	// means 256 MiB. Tensors that are not contiguous need such memory, those on another
	// device than that of direct work, and the outcomes of sparse all-reduces.
	Scratch int

	// AllReduce is the name of the work that does every all-reduce of dense tensors, for tests: one of
	// AllReduceWorks. Empty lets the backend choose. All ranks need the same.
	AllReduce string

	// Broadcast is the way in which every broadcast goes from rank to rank:
	// BroadcastDirect, BroadcastFlat, BroadcastTree, BroadcastChain or BroadcastHost.
	// Empty means direct work, if the group has it, and else the way of the fewest
	// messages for the number of ranks and chunks. All ranks need the same.
	Broadcast string

	// Table is a file with measured times of ways, which "c10d bench -device cuda -tune" writes. All
	// calls choose their way by it. Empty means the environment variable C10D_CUDA_TABLE; if that is
	// empty too, the table in the library. A rule decides where a table has no row for the group.
	// Explain says which ways a group takes. All ranks need the same table.
	Table string

	// CPU is the backend that does the host's part; empty means that of CPUOptions, or gloo.
	// CPUOptions are its own options. Nil means, for gloo, sums in rank order: then bits do
	// not depend on Chunk. But collectives of several clusters add inside the clusters first, unless
	// CPUOptions are given and ask for sums in rank order or exact ones.
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
	case o.NoDevice && o.Driver != nil:
		return errors.New("cuda: Options.NoDevice is set, and Options.Driver is not nil")
	case o.Broadcast != "" && !slices.Contains(broadcastWays, o.Broadcast):
		return fmt.Errorf("cuda: Options.Broadcast is %q, want one of %q", o.Broadcast, broadcastWays)
	}
	o.Chunk, o.Slots, o.Pinned = cmp.Or(o.Chunk, defaultChunk), cmp.Or(o.Slots, group.DefaultSlots), cmp.Or(o.Pinned, defaultKept)
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
	g       *group.Engine
	options Options
	args    argcheck.Checker
	direct  *directway.Group

	// The ways of operations over the links that the group may turn out to have. Apart is for devices
	// that do not reach each other, and for calls that no kernel can do.
	peers, ring, shared, apart *ways.Ways

	divided atomic.Pointer[clusterway.Group] // see clusters
	flat    error                            // why New has not divided the ranks into clusters
	lacking bool                             // some rank has no device
	mixed   mixed
}

// Rank returns this rank's number in the group.
func (b *Backend) Rank() int { return b.g.Rank }

// Size returns the number of ranks in the group.
func (b *Backend) Size() int { return b.g.Size }

// Seq returns how many operations have been issued.
func (b *Backend) Seq() uint64 { return b.g.Seq() }

// SetTimeout sets the limit of later operations.
func (b *Backend) SetTimeout(d time.Duration) { b.g.SetTimeout(d) }

// Err returns what ended the group, nil while it works.
func (b *Backend) Err() error { return cmp.Or(b.g.Broken(), b.g.CPUErr()) }

// Revoke ends the group if this rank's last operation was not started because its context had ended.
// It is for a rank that does not call it again: the others may wait.
func (b *Backend) Revoke() { b.g.Revoke() }

// Abort ends every operation with cause, on every rank.
func (b *Backend) Abort(cause error) { b.g.Abort(cause) }

// Shutdown waits until what was issued has ended, then closes the backend. If ctx ends first,
// Close ends the rest, and the error wraps that of ctx.
func (b *Backend) Shutdown(ctx context.Context) error {
	err := b.g.Shutdown(ctx)
	return errors.Join(err, b.mixed.free(b.g.InUse.Load()))
}

// Close lets operations go on for half a second, ends those still pending with work.ErrClosed, says
// goodbye and frees everything. It takes about a second, and what devices take to leave an
// operation that was ended, 5 s at most.
func (b *Backend) Close() error {
	err := b.g.Close()
	return errors.Join(err, b.mixed.free(b.g.InUse.Load()))
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
	slots, flat := own.Slots, noClusters(own.CPUOptions)
	if err := own.check(); err != nil {
		return nil, err
	}
	if v := os.Getenv(group.PeerVariable); v != "" && v != "0" && v != "1" {
		return nil, fmt.Errorf("cuda: environment variable %s is %q, want 0 or 1", group.PeerVariable, v)
	}
	table, err := own.table()
	if err != nil {
		return nil, err
	}
	r, ok := backend.Lookup(own.CPU)
	if !ok {
		return nil, fmt.Errorf("cuda: %q: %w", own.CPU, backend.ErrUnknownBackend)
	}
	if r.Name == Name || !slices.Contains(r.Devices, tensor.CPU) {
		return nil, fmt.Errorf("cuda: backend %q does not serve tensors in CPU memory, which the host's part needs", own.CPU)
	}
	var missing error
	if own.NoDevice {
		missing = fmt.Errorf("Options.NoDevice is set: %w", driver.ErrNoDevice)
	} else if own.Driver == nil {
		// A program that is linked with the backend also runs where there are no
		// devices. Then no tensor is on a device, and calls without tensors work.
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
	g, err := group.New(group.Config{
		Rank: o.Rank, Size: o.Size, Group: o.Group, Names: o.Names, Timeout: o.Timeout, Driver: own.Driver, Missing: missing, Chunk: own.Chunk, Slots: own.Slots,
		SharedSlots: cmp.Or(slots, hostshm.Slots(o.Size, own.Chunk, group.DefaultSlots)), KeepPinned: own.Pinned, KeepScratch: own.Scratch, Limits: own.unshared(),
	})
	if err != nil {
		return nil, err
	}
	b := &Backend{g: g, options: own}
	b.args = argcheck.Checker{Backend: Name, Rank: g.Rank, Size: g.Size, Dense: b.dense}
	b.direct = &directway.Group{B: g}
	if own.AllReduce != "" && own.AllReduce != DirectWork && own.AllReduce != RingWork {
		b.direct.Forbidden = fmt.Errorf("Options.AllReduce is %q", own.AllReduce)
	}
	g.Ways = append(g.Ways, b.direct, clusterEnd{b})
	inner := o
	inner.Device, inner.Specific, inner.Group = tensor.CPU, own.CPUOptions, o.Group+group.CPUGroup
	if o.Store != nil {
		inner.Store = store.Prefix("cpu", o.Store)
	}
	cpu, err := r.New(ctx, inner)
	if err == nil {
		g.CPU = cpu
		if err = g.Meet(ctx); err == nil {
			err = b.meetClusters(ctx, o, table, flat)
		}
		if err == nil {
			err = b.agree(ctx, table.Fingerprint())
		}
		if err == nil {
			b.setWays(table)
			err = b.prepare(ctx)
		}
	}
	if err != nil {
		return nil, errors.Join(err, clusterEnd{b}.Close(), g.Discard())
	}
	g.Ways = append(g.Ways, &b.mixed)
	if g.Missing == nil {
		g.OnHost = &b.mixed
	}
	g.Start()
	return b, nil
}

// prepare has the driver load kernels, and makes the memory that the ranks share if it is clear that
// they need it.
func (b *Backend) prepare(ctx context.Context) error {
	g := b.g
	if err := g.Board.Hide(); err != nil { // who opens it has done so
		return err
	}
	if g.Missing == nil && group.Lacks(g.Driver) == nil {
		// Not in an operation, when streams may wait for a word.
		if b.direct.Can() == nil && (g.Driver.Count() == 1 || g.Devices >= g.Size) {
			directway.Keep(g.Driver, g.Size, b.direct.Ring) // else ranks share devices, most likely
		} else if k := b.clusters(); k != nil {
			k.Keep()
		}
		driver.Keep(g.Driver, kernels.PTX, kernels.Names()...)
	}
	if b.direct.Can() != nil && (b.options.AllReduce == "" || b.options.AllReduce == HostWork) {
		return g.Share(ctx, 0) // else the first collective finds out whether it is needed
	}
	return nil
}

// agree checks that what must be the same on all ranks is.
func (b *Backend) agree(ctx context.Context, table string) error {
	names := []string{"table of ways (Options.Table or " + tableVariable + ")", "Options.Chunk", "Options.Broadcast", "Options.AllReduce"}
	mine := []string{table, fmt.Sprint(b.options.Chunk), b.options.Broadcast, b.options.AllReduce}
	told := make([]byte, 512)
	if text := strings.Join(mine, "\n"); copy(told, text) < len(text) {
		return fmt.Errorf("cuda: Options.AllReduce is a name of %d bytes, which is too long", len(b.options.AllReduce))
	}
	_, all, err := b.g.Hear(ctx, 0, nil, told)
	if err != nil {
		return fmt.Errorf("cuda: comparing options with the other ranks: %w", err)
	}
	for r, x := range all {
		theirs := strings.Split(string(bytes.TrimRight(x, "\x00")), "\n")
		for i, name := range names {
			if len(theirs) != len(names) || theirs[i] != mine[i] {
				return fmt.Errorf("cuda: rank %d has another %s than rank %d, which has %q: give all ranks the same", r, name, b.g.Rank, mine[i])
			}
		}
	}
	return nil
}

// Name returns "cuda".
func (b *Backend) Name() string { return Name }

// unshared returns why the options do not let ranks all-reduce through shared memory.
func (o *Options) unshared() error {
	inner, ok := o.CPUOptions.(gloo.Options)
	if o.CPU != gloo.Name || !ok {
		return fmt.Errorf("the host's part is done by backend %q, with options of its own", o.CPU)
	}
	if inner.AllReduce != "" {
		return fmt.Errorf("gloo.Options.AllReduce asks for %q", inner.AllReduce)
	}
	return nil
}
