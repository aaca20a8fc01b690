package pg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// Options are the options of New and Init. The zero value works.
type Options struct {
	// Backend chooses the backend by name and device, as in c10d: "gloo",
	// "cpu:gloo,cuda:cuda". Empty means every default backend that is linked in.
	Backend string

	// Timeout bounds the rendezvous and every operation that sets none; 0 or less
	// means backend.DefaultTimeout (30 minutes). An operation ends at most 0.3 s after its timeout, or a
	// tenth of it if that is more, also with Detail.
	Timeout time.Duration

	// Name is the group's name, "0" if empty. PyTorch's default group is "0".
	Name string

	// Description is free text that errors and logs show.
	Description string

	// Dialect is the generation of PyTorch whose ranks are in the job. It decides
	// key names and Gloo's rendezvous. Unknown means what PyTorch's ranks show in
	// the store. If there are none, nothing depends on it.
	Dialect store.Dialect

	// BackendOptions are the backends' own options, at most one for each backend, for
	// example {gloo.Options{...}, cuda.Options{...}}. Options of a backend that the group
	// does not have are not used.
	BackendOptions []backend.SpecificOptions

	// InitBarrier makes the ranks meet in the store after each group is made,
	// as PyTorch 2 does under TORCH_DIST_INIT_BARRIER=1. All ranks must agree.
	InitBarrier bool

	// Detail makes the ranks compare every collective before they run it, as PyTorch does under
	// TORCH_DISTRIBUTED_DEBUG=DETAIL. If calls do not match, every rank gets a
	// *detail.MismatchError. Collectives block until all ranks have called them. All ranks must
	// set it, those of PyTorch too. See package backend/detail.
	Detail bool

	// Elastic prepares the default group for Reconfigure and Join when it is made. Join then finds
	// the group at once. This library's TCP store (store.Willer) then reports which ranks
	// have died. Without Elastic, or with another store, Reconfigure waits for a rank that has died at the same
	// moment as another one until ReconfigureOptions.Patience is over. Elastic costs two calls of
	// the store for each rank, and one in Close. Groups with PyTorch ranks do not use it.
	Elastic bool

	// Recorder records the operations of all groups, and tells its observers of them. Nil means one
	// of trace.DefaultEntries operations for each New, and trace.Off none. See ProcessGroup.Recorder.
	Recorder *trace.Recorder

	// Logger gets a line at level Info when a group has been made, and at level Error when
	// one could not be made. While this rank waits for others it gets lines at level Warn:
	// the first after 10 s, more at growing intervals. They name the missing ranks, what is
	// known of them, and until when this rank waits. With nil only the lines at level Warn
	// are written, to slog.Default(). A logger with slog.DiscardHandler writes nothing.
	Logger *slog.Logger

	least, most int // numbers of ranks that c10d run -elastic has told, 0 if it has not
}

// check refuses nil options, two options for one backend, and options for unknown backends. It makes
// the default Recorder.
func (o *Options) check() error {
	if o.Recorder == nil {
		o.Recorder = trace.New(trace.Options{})
	}
	for i, b := range o.BackendOptions {
		if b == nil {
			return fmt.Errorf("BackendOptions[%d] is nil", i)
		}
		name := b.BackendName()
		if known := backend.Names(); !slices.Contains(known, name) {
			return fmt.Errorf("BackendOptions[%d], a %T, is for %q, which is no backend of this program (it has %s; others must be imported)", i, b, name, strings.Join(known, ", "))
		}
		if slices.ContainsFunc(o.BackendOptions[:i], func(other backend.SpecificOptions) bool { return other.BackendName() == name }) {
			return fmt.Errorf("BackendOptions[%d], a %T, is the second for backend %q", i, b, name)
		}
	}
	return nil
}

// specific returns the options of a backend, nil if there are none.
func (o *Options) specific(name string) backend.SpecificOptions {
	for _, b := range o.BackendOptions {
		if b.BackendName() == name {
			return b
		}
	}
	return nil
}

var (
	// ErrNotMember is returned by the operations of a group that this rank does not belong to.
	ErrNotMember = errors.New("pg: this rank is not a member of the group")

	// ErrClosed is returned by operations on a group that was closed on this rank.
	ErrClosed = work.ErrClosed
)

// ProcessGroup is a set of ranks that compute together, and this rank's end of it. Operations go
// to the backend of the first tensor's device type. See backend.Backend for the operations'
// contracts and for concurrent calls.
//
// A rank outside the group holds a ProcessGroup too, with rank -1, whose
// operations return ErrNotMember: every rank can run the same lines.
//
// A group that has failed stays failed until Reconfigure begins its next epoch. Rank, size and
// connections belong to the epoch.
type ProcessGroup struct {
	current atomic.Pointer[epoch]
	name    string
	desc    string

	closing  sync.Once
	closeErr error
	released func()         // nil unless Init made the group
	retired  sync.WaitGroup // old epochs that are being closed

	reconfiguring sync.Mutex
	membership    *members // nil until Reconfigure, Pending or Join

	refused atomic.Pointer[refusal] // nil if operations are not refused; written under mu

	mu      sync.Mutex
	timeout time.Duration
	stop    context.CancelCauseFunc // ends a Reconfigure or Pending; nil before the first

	allocators []allocator // of old epochs, for Free
}

// refusal is why operations are refused.
type refusal struct{ why error }

// now returns the group's epoch.
func (g *ProcessGroup) now() *epoch { return g.current.Load() }

// epoch is a group as long as its members stay the same.
type epoch struct {
	world    *world
	name     string
	rank     int
	size     int
	ranks    []int // the members' ranks in the default group, by group rank
	names    *work.Names
	timeout  time.Duration
	store    store.Store // under the group's prefix
	devices  []backend.DeviceBackend
	backends map[tensor.DeviceType]backend.Backend
	forCPU   backend.Backend   // backends[tensor.CPU], for calls: a map takes 15 ns
	distinct []backend.Backend // in order of devices, each once
	split    bool              // made by Split or SplitRanks
	traced   *trace.Group      // nil if nothing is recorded
	meeting  backend.Meeting   // while the group is made, if its ranks tell each other why it cannot be

	key    string // its name in the store
	within string // what its keys begin with in world.store
	tidier tidier

	allocated atomic.Bool  // Alloc was called
	splits    atomic.Int64 // how often Split and SplitRanks were called
}

// New makes the default group over a store: all size ranks must call it, with ranks 0 to size-1.
// It returns when the rank is connected to all other ranks. Closing the group leaves the store
// open.
//
// Other runs may have used the store under the same prefix. Ranks of this library do not read
// their keys. If a PyTorch rank takes part, keys are PyTorch's, and New returns ErrStale where it
// finds those of an earlier run.
func New(ctx context.Context, st store.Store, rank, size int, o Options) (*ProcessGroup, error) {
	return newWorld(ctx, st, rank, size, o, origin{hosted: -1})
}

// newWorld is New for Init.
func newWorld(ctx context.Context, st store.Store, rank, size int, o Options, from origin) (*ProcessGroup, error) {
	if st == nil {
		return nil, errors.New("pg: New needs a store")
	}
	if size < 1 || rank < 0 || rank >= size {
		return nil, fmt.Errorf("pg: rank %d is not within a world of %d", rank, size)
	}
	counted := 0
	if o.Name == "" {
		o.Name, counted = "0", 1
	}
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("pg: %w", err)
	}
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	st = heard(st, o.Recorder)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	keys, run, known, n, err := findRun(ctx, stop, st, &o, rank, size, from)
	if err != nil {
		err = from.sayHost(st, rank, err)
		o.failed(o.Name, rank, size, nil, err)
		return nil, err
	}
	w := &world{
		store: keys, rank: rank, size: size, options: o, next: counted, compares: known, tells: n != nil, origin: from,
		ours: run.ID != "", apart: !known, run: run.ID, begun: run.Key, begunIn: st, made: make(map[string]int),
	}
	w.over, w.end = context.WithCancelCause(context.Background())
	if path := blameFile(rank, size); path != "" {
		os.Remove(path) // of a group that this one takes the place of
	}
	g, err := w.newGroup(ctx, groupSpec{
		name: o.Name, desc: o.Description, ranks: allRanks(size), backend: o.Backend, timeout: o.Timeout, counted: counted,
		notice: n,
	})
	if err == nil && o.Elastic && w.elastic() == nil {
		if err = g.stand(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("pg: group %q: %w", o.Name, err), g.Close())
		}
	}
	return g, err
}

// allRanks returns 0 to size-1.
func allRanks(size int) []int {
	ranks := make([]int, size)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

// Rank returns this rank's number in the group, -1 if it is no member.
func (g *ProcessGroup) Rank() int { return g.now().rank }

// Size returns the number of ranks in the group, -1 if this rank is no member.
func (g *ProcessGroup) Size() int {
	if g.now().rank < 0 {
		return -1
	}
	return g.now().size
}

// Explain describes the group's wire, the transport to each rank, and the algorithm by size, with
// reasons. Backends without an Explainer are left out.
func (g *ProcessGroup) Explain() []backend.Explanation { return g.now().explain() }

func (g *epoch) explain() []backend.Explanation {
	var all []backend.Explanation
	for _, b := range g.distinct {
		if e, ok := b.(backend.Explainer); ok {
			all = append(all, e.Explain())
		}
	}
	return all
}

// probe asks the other ranks how far they are.
func (g *epoch) probe() []backend.Probe {
	var all []backend.Probe
	for _, b := range g.distinct {
		if p, ok := b.(backend.Prober); ok {
			all = append(all, p.Probe())
		}
	}
	return all
}

// prompt reports whether the calls of all backends return soon.
func (g *epoch) prompt() bool {
	return !slices.ContainsFunc(g.distinct, func(b backend.Backend) bool {
		_, ok := b.(backend.Prompt)
		return !ok
	})
}

// Recorder returns what records this rank's operations, in this group and those of the same job.
func (g *ProcessGroup) Recorder() *trace.Recorder { return g.now().world.options.Recorder }

// IsMember reports whether this rank belongs to the group.
func (g *ProcessGroup) IsMember() bool { return g.now().rank >= 0 }

// Name returns the group's name, the same on every rank.
func (g *ProcessGroup) Name() string { return g.name }

// Description returns the text given when the group was made.
func (g *ProcessGroup) Description() string { return g.desc }

// Ranks returns the members' ranks in the default group, by rank in this group.
func (g *ProcessGroup) Ranks() []int { return slices.Clone(g.now().ranks) }

// GlobalRank returns the rank in the default group of a rank of this group.
func (g *ProcessGroup) GlobalRank(rank int) (int, error) {
	if rank < 0 || rank >= len(g.now().ranks) {
		return -1, fmt.Errorf("pg: no rank %d in group %q of %d", rank, g.name, len(g.now().ranks))
	}
	return g.now().ranks[rank], nil
}

// GroupRank returns the rank in this group of a rank of the default group.
func (g *ProcessGroup) GroupRank(global int) (int, error) {
	if i := slices.Index(g.now().ranks, global); i >= 0 {
		return i, nil
	}
	return -1, fmt.Errorf("pg: rank %d of the default group is not in group %q (ranks %v)", global, g.name, g.now().ranks)
}

// Store returns the group's store: the job's, under a prefix of this group.
func (g *ProcessGroup) Store() store.Store { return g.now().store }

// Timeout returns the limit of operations that set none.
func (g *ProcessGroup) Timeout() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.timeout
}

// SetTimeout changes the limit of later operations; 0 or less means backend.DefaultTimeout.
func (g *ProcessGroup) SetTimeout(d time.Duration) {
	if d <= 0 {
		d = backend.DefaultTimeout
	}
	g.mu.Lock()
	g.timeout = d
	g.mu.Unlock()
	for _, b := range g.now().distinct {
		b.SetTimeout(d)
	}
}

// Seq returns how many operations this rank has issued on the group.
func (g *ProcessGroup) Seq() uint64 {
	var n uint64
	for _, b := range g.now().distinct {
		n += b.Seq()
	}
	return n
}

// Devices returns which backend serves which device type.
func (g *ProcessGroup) Devices() []backend.DeviceBackend { return slices.Clone(g.now().devices) }

// Backend returns the backend for a device type.
func (g *ProcessGroup) Backend(d tensor.DeviceType) (backend.Backend, error) {
	e := g.now()
	if err := g.open(); e.rank >= 0 && err != nil {
		return nil, err
	}
	return e.serving(g.name, d)
}

// backend is Backend for an operation, which its error names.
func (g *ProcessGroup) backend(op work.OpType, d tensor.DeviceType) (backend.Backend, error) {
	e := g.now()
	if r := g.refused.Load(); r != nil && e.rank >= 0 {
		return nil, fmt.Errorf("pg: %v in group %q: %w", op, g.name, r.why)
	}
	return e.serving(g.name, d)
}

// serving returns the backend for a device type of the group name.
func (g *epoch) serving(name string, d tensor.DeviceType) (backend.Backend, error) {
	if g.rank < 0 {
		return nil, ErrNotMember
	}
	if d == tensor.CPU && g.forCPU != nil {
		return g.forCPU, nil
	}
	b, ok := g.backends[d]
	if !ok {
		return nil, fmt.Errorf("pg: no backend for device type %v in group %q (it has %s)", d, name, pairs(g.devices))
	}
	return b, nil
}

// pairs is a list of backends as in a backend string.
func pairs(devices []backend.DeviceBackend) string {
	texts := make([]string, len(devices))
	for i, d := range devices {
		texts[i] = d.String()
	}
	return strings.Join(texts, ",")
}

// open returns an error if the group is closed or of an old epoch.
func (g *ProcessGroup) open() error {
	if r := g.refused.Load(); r != nil {
		return fmt.Errorf("pg: group %q: %w", g.name, r.why)
	}
	return nil
}

// of returns the backend for the first tensor that there is.
func (g *ProcessGroup) of(op work.OpType, ts ...*tensor.Tensor) (backend.Backend, error) {
	for _, t := range ts {
		if t != nil {
			return g.backend(op, t.Device().Type)
		}
	}
	if d := g.now().devices; len(d) > 0 {
		return g.backend(op, d[0].Device) // it will say what is missing
	}
	return g.backend(op, tensor.CPU)
}

// Abort ends every operation of the group with cause, on every rank. The group cannot be used
// afterwards; close it. Aborting the default group also aborts the groups made from it that this
// rank is in.
//
// cause may be the error of an operation, of this group or another one of the job. Then the other
// ranks' errors name the rank that it blames.
func (g *ProcessGroup) Abort(cause error) {
	for _, sub := range g.now().world.below(g) {
		sub.Abort(cause)
	}
	g.now().abort(cause)
}

// abort is Abort for the group alone.
func (g *epoch) abort(cause error) {
	cause = g.own(cause)
	for _, b := range g.distinct {
		b.Abort(cause)
	}
}

// own translates cause, the error of an operation of another group: the rank at fault gets its
// number in this group. If that rank is not in this group, the result blames no rank of it.
func (g *epoch) own(cause error) error {
	var e *work.Error
	if !errors.As(cause, &e) || e.Group == g.name {
		return cause
	}
	var link *work.LinkError
	switch {
	case errors.As(cause, &link), e.Peer < 0:
		return &foreign{cause}
	}
	there := g.world.find(e.Group)
	if there == nil || e.Peer >= len(there.ranks) || !slices.Contains(g.ranks, there.ranks[e.Peer]) {
		return &foreign{cause}
	}
	here := *e
	here.Group, here.Names, here.Rank, here.Peer = g.name, g.names, g.rank, slices.Index(g.ranks, there.ranks[e.Peer])
	here.Err = &translated{cause, e.Err}
	return &here
}

// translated is a cause that happened in another group than the one it aborts.
type translated struct {
	whole error // as the program gave it
	cause error // of the operation's error
}

func (t *translated) Error() string   { return t.whole.Error() }
func (t *translated) Unwrap() []error { return []error{t.cause, t.whole} }

// foreign is an error whose ranks mean nothing in a group: errors.As finds none of them.
type foreign struct{ err error }

func (f *foreign) Error() string        { return f.err.Error() }
func (f *foreign) Is(target error) bool { return errors.Is(f.err, target) }

// Close leaves the group and frees it, within about a second. A program that ends without Close looks to the
// other ranks as if it had died. Operations that need this rank then fail with work.ErrPeerDied, and after a
// Close with work.ErrPeerLeft. What has arrived from this rank is received in either case. These fail without
// Close:
//
//   - over TCP, messages that are still on their way
//   - on other ranks, receives from any rank
//   - on other ranks, operations on device tensors that have not ended
//
// Operations of this rank that have not ended fail with ErrClosed; if collectives are among them, the group ends
// on all ranks. Wait for operations before Close, or call Shutdown. Another rank that still needs this one gets
// an error that names it. Use a Barrier before Close to prevent that.
//
// Among Go ranks Close also returns how the ranks' collectives differ, if they do and no operation has returned
// it: see "Calls that do not match" in the package's documentation.
//
// Closing the default group closes the groups made from it. Close may be called more than once.
func (g *ProcessGroup) Close() error {
	g.closing.Do(func() {
		g.refuse(ErrClosed)
		g.reconfiguring.Lock()
		defer g.reconfiguring.Unlock()
		var errs []error
		for _, sub := range g.now().world.leave(g) {
			errs = append(errs, sub.Close())
		}
		g.leave()
		e := g.now()
		errs = append(errs, e.close())
		g.retired.Wait()
		if g == e.world.root {
			e.world.making.Wait()
			if e.world.left != nil {
				e.world.left()
			}
			if e.world.owned != nil {
				errs = append(errs, e.world.owned.Close())
			}
		}
		if g.released != nil {
			g.released()
		}
		g.closeErr = errors.Join(errs...)
	})
	return g.closeErr
}

// Shutdown refuses new operations, waits for the operations that this rank has issued, and calls
// Close. If ctx ends first, Close ends the rest, and the error wraps ctx's. Shutting down the
// default group does the same with the groups made from it.
func (g *ProcessGroup) Shutdown(ctx context.Context) error {
	groups := append(g.now().world.below(g), g)
	for _, x := range groups {
		x.refuse(ErrClosed)
	}
	var errs []error
	for _, x := range groups {
		for _, b := range x.now().distinct {
			errs = append(errs, backend.Shutdown(ctx, b))
		}
	}
	return errors.Join(append(errs, g.Close())...)
}

// refuse makes later operations return an error that wraps why.
func (g *ProcessGroup) refuse(why error) {
	g.mu.Lock()
	g.refused.Store(&refusal{why})
	if g.stop != nil {
		g.stop(why)
	}
	g.mu.Unlock()
}

// close ends an epoch on this rank.
func (g *epoch) close() error {
	err := g.closeBackends()
	g.traced.Leave()
	g.tidier.wait()
	return err
}

func (g *epoch) closeBackends() error {
	var errs []error
	for _, b := range g.distinct {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

// Broadcast gives every tensor on every rank the elements of tensor number
// o.RootTensor of rank o.Root.
// No two tensors of a call share memory: see [backend.CheckMemory].
func (g *ProcessGroup) Broadcast(ctx context.Context, ts []*tensor.Tensor, o backend.BroadcastOptions) (*work.Work, error) {
	b, err := g.of(work.Broadcast, ts...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Broadcast, ts, ts, -1, o.Timeout)
	return c.Issued(b.Broadcast(ctx, ts, o))
}

// AllReduce combines all tensors of all ranks and puts the result in each.
// No two tensors of a call share memory: see [backend.CheckMemory].
func (g *ProcessGroup) AllReduce(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	b, err := g.of(work.AllReduce, ts...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllReduce, ts, ts, -1, o.Timeout)
	return c.Issued(b.AllReduce(ctx, ts, o))
}

// AllReduceCoalesced combines ts[i] with every other rank's ts[i], for all i at once.
// No two tensors of a call share memory: see [backend.CheckMemory].
func (g *ProcessGroup) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, o backend.AllReduceOptions) (*work.Work, error) {
	b, err := g.of(work.AllReduceCoalesced, ts...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllReduceCoalesced, ts, ts, -1, o.Timeout)
	return c.Issued(b.AllReduceCoalesced(ctx, ts, o))
}

// Reduce combines t of all ranks into rank o.Root's.
func (g *ProcessGroup) Reduce(ctx context.Context, t *tensor.Tensor, o backend.ReduceOptions) (*work.Work, error) {
	b, err := g.of(work.Reduce, t)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Reduce, list(t), list(t), -1, o.Timeout)
	return c.Issued(b.Reduce(ctx, t, o))
}

// AllGather copies rank i's in to every rank's out[i].
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	b, err := g.of(work.AllGather, in)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGather, list(in), out, -1, o.Timeout)
	return c.Issued(b.AllGather(ctx, out, in, o))
}

// AllGatherV is AllGather where the ranks' inputs may differ in shape.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	b, err := g.of(work.AllGather, in)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGather, list(in), out, -1, o.Timeout)
	return c.Issued(b.AllGatherV(ctx, out, in, o))
}

// AllGatherIntoTensor copies rank i's in to part i of every rank's out.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	b, err := g.of(work.AllGatherIntoTensor, in)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGatherIntoTensor, list(in), list(out), -1, o.Timeout)
	return c.Issued(b.AllGatherIntoTensor(ctx, out, in, o))
}

// AllGatherCoalesced does AllGather for several inputs at once: out[i][k] becomes rank i's in[k].
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	b, err := g.of(work.AllGatherCoalesced, in...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGatherCoalesced, in, nil, -1, o.Timeout)
	return c.Issued(b.AllGatherCoalesced(ctx, out, in, o))
}

// AllGatherIntoTensorCoalesced does AllGatherIntoTensor for each pair at once.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.AllGatherOptions) (*work.Work, error) {
	b, err := g.of(work.AllGatherCoalesced, in...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGatherCoalesced, in, out, -1, o.Timeout)
	return c.Issued(b.AllGatherIntoTensorCoalesced(ctx, out, in, o))
}

// Gather copies rank i's in to out[i] on rank o.Root. Other ranks pass no out.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	b, err := g.of(work.Gather, in)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Gather, list(in), out, -1, o.Timeout)
	return c.Issued(b.Gather(ctx, out, in, o))
}

// GatherV is Gather where the ranks' inputs may differ in shape.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o backend.GatherOptions) (*work.Work, error) {
	b, err := g.of(work.Gather, in)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Gather, list(in), out, -1, o.Timeout)
	return c.Issued(b.GatherV(ctx, out, in, o))
}

// Scatter copies in[i] of rank o.Root to rank i's out. Other ranks pass no in.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ScatterOptions) (*work.Work, error) {
	b, err := g.of(work.Scatter, out)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Scatter, in, list(out), -1, o.Timeout)
	return c.Issued(b.Scatter(ctx, out, in, o))
}

// ReduceScatter combines in[r] of all ranks into rank r's out.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	b, err := g.of(work.ReduceScatter, out)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.ReduceScatter, in, list(out), -1, o.Timeout)
	return c.Issued(b.ReduceScatter(ctx, out, in, o))
}

// ReduceScatterTensor combines part r of all ranks' in into rank r's out. With out of shape [n ...] in is
// [size*n ...], or [size n ...]: c10d's concatenation and stack.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	b, err := g.of(work.ReduceScatterTensor, out)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.ReduceScatterTensor, list(in), list(out), -1, o.Timeout)
	return c.Issued(b.ReduceScatterTensor(ctx, out, in, o))
}

// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair at once.
// In place: see [backend.CheckMemory].
func (g *ProcessGroup) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o backend.ReduceScatterOptions) (*work.Work, error) {
	b, err := g.of(work.ReduceScatterTensorCoalesced, out...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.ReduceScatterTensorCoalesced, in, out, -1, o.Timeout)
	return c.Issued(b.ReduceScatterTensorCoalesced(ctx, out, in, o))
}

// AllToAll copies rank i's in[j] to rank j's out[i].
// Outputs share no memory with inputs: see [backend.CheckMemory].
func (g *ProcessGroup) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o backend.AllToAllOptions) (*work.Work, error) {
	b, err := g.of(work.AllToAll, out...)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllToAll, in, out, -1, o.Timeout)
	return c.Issued(b.AllToAll(ctx, out, in, o))
}

// AllToAllSingle sends part r of in to rank r, for all r, and receives the parts of out. Nil
// splits mean equal parts.
// Outputs share no memory with inputs: see [backend.CheckMemory].
func (g *ProcessGroup) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o backend.AllToAllOptions) (*work.Work, error) {
	b, err := g.of(work.AllToAllSingle, out)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllToAllSingle, list(in), list(out), -1, o.Timeout)
	return c.Issued(b.AllToAllSingle(ctx, out, in, outSplits, inSplits, o))
}

// Send sends t to rank dst of the group.
func (g *ProcessGroup) Send(ctx context.Context, t *tensor.Tensor, dst int, o backend.P2POptions) (*work.Work, error) {
	b, err := g.of(work.Send, t)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Send, list(t), nil, dst, o.Timeout)
	return c.Issued(b.Send(ctx, t, dst, o))
}

// Recv receives into t from rank src of the group.
func (g *ProcessGroup) Recv(ctx context.Context, t *tensor.Tensor, src int, o backend.P2POptions) (*work.Work, error) {
	b, err := g.of(work.Recv, t)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Recv, nil, list(t), src, o.Timeout)
	return c.Issued(b.Recv(ctx, t, src, o))
}

// RecvAnySource receives into t from the first rank that sends on the tag;
// the Work's SourceRank tells which.
func (g *ProcessGroup) RecvAnySource(ctx context.Context, t *tensor.Tensor, o backend.P2POptions) (*work.Work, error) {
	b, err := g.of(work.RecvAnySource, t)
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.RecvAnySource, nil, list(t), -1, o.Timeout)
	return c.Issued(b.RecvAnySource(ctx, t, o))
}

// Barrier ends when every rank has called it.
func (g *ProcessGroup) Barrier(ctx context.Context, o backend.BarrierOptions) (*work.Work, error) {
	b, err := g.backend(work.Barrier, o.Device)
	if o.Device == tensor.CPU && g.now().forCPU == nil {
		b, err = g.of(work.Barrier) // CPU is what no choice looks like
	}
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Barrier, nil, nil, -1, o.Timeout)
	return c.Issued(b.Barrier(ctx, o))
}

// MonitoredBarrier blocks until every rank has called it. Its error names those that have not.
func (g *ProcessGroup) MonitoredBarrier(ctx context.Context, o backend.MonitoredBarrierOptions) error {
	b, err := g.of(work.Barrier)
	if err != nil {
		return err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Barrier, nil, nil, -1, o.Timeout)
	return c.Blocked(func() error { return b.MonitoredBarrier(ctx, o) })
}
