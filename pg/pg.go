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
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/trace"
	"github.com/c10d-go/c10d/work"
)

// Options are the options of New and Init. The zero value works.
type Options struct {
	Backend        string         // "gloo", "cpu:gloo,cuda:cuda"; empty means all default ones that are linked in
	BackendOptions BackendOptions // at most one for each backend: {gloo.Options{...}, cuda.Options{...}}
	Timeout        time.Duration  // of making a group, and of operations that set none; 0 or less means 30 minutes
	Name           string         // of the group; empty means "0", as PyTorch's default group
	Description    string         // free text that errors and logs show
	// InitBarrier makes the ranks meet in the store after each group is made (TORCH_DIST_INIT_BARRIER), and
	// Detail compares every collective before it runs (TORCH_DISTRIBUTED_DEBUG=DETAIL, see package
	// backend/detail). All ranks must agree.
	InitBarrier, Detail bool
	// PyTorch says that other ranks may be PyTorch's, so this one does not wait to see them in the store. It is for groups
	// without backend gloo, in which PyTorch's ranks write nothing until they need each other. All Go ranks must agree.
	PyTorch bool
	// Elastic prepares the default group for Reconfigure and Join. This library's TCP store then reports
	// which ranks have died; otherwise Reconfigure may have to wait for ReconfigureOptions.Timeout.
	Elastic bool
	// Recorder records the operations of all groups. Nil means one for each New, and trace.Off none.
	Recorder *trace.Recorder
	// Logger gets lines about groups (Info), failures (Error) and long waits (Warn). Nil writes Warn alone,
	// to slog.Default(); slog.DiscardHandler writes nothing.
	Logger *slog.Logger

	least, most int // numbers of ranks that c10d run -elastic has told, 0 if it has not
}

// check refuses nil options, two options for one backend, and options for unknown backends. It makes
// the default Recorder.
func (o *Options) check() error {
	if o.Recorder == nil {
		o.Recorder = trace.New()
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

// BackendOptions are options of backends, such as gloo.Options.
type BackendOptions []backend.SpecificOptions

// specific returns the options of a backend, nil if there are none.
func (o *Options) specific(name string) backend.SpecificOptions {
	for _, b := range o.BackendOptions {
		if b.BackendName() == name {
			return b
		}
	}
	return nil
}

// ProcessGroup is a set of ranks that compute together, and this rank's end of it. The device of the first tensor chooses
// the backend. See backend.Backend for contracts, and backend.CheckMemory for tensors that share memory.
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

// New makes the default group over a store: all ranks call it.
func New(ctx context.Context, st store.Store, rank, size int, o ...Options) (*ProcessGroup, error) {
	return newWorld(ctx, st, rank, size, option.Last(o), origin{hosted: -1})
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
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	keys, run, known, err := findRun(ctx, st, &o, rank, size, from)
	if err != nil {
		err = public(from.sayHost(st, rank, err))
		o.failed(o.Name, rank, size, nil, err)
		return nil, err
	}
	w := &world{
		store: keys, rank: rank, size: size, options: o, next: counted, compares: known, tells: run.Notice != nil, origin: from,
		ours: run.ID != "", apart: !known, run: run.ID, begun: run.Keys, begunIn: st, made: make(map[string]int),
	}
	w.over, w.end = context.WithCancelCause(context.Background())
	if path := blameFile(rank, size); path != "" {
		os.Remove(path) // of a group that this one takes the place of
	}
	if run.Notice != nil {
		run.Notice.Listen(stop)
	}
	g, err := w.newGroup(ctx, groupSpec{
		name: o.Name, desc: o.Description, ranks: allRanks(size), backend: o.Backend, timeout: o.Timeout, counted: counted,
		notice: run.Notice,
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

// Explain describes the wire, transports and algorithms, with reasons.
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

// Recorder returns what records the operations of this rank's groups.
func (g *ProcessGroup) Recorder() *trace.Recorder { return g.now().world.options.Recorder }

// IsMember reports whether this rank belongs to the group.
func (g *ProcessGroup) IsMember() bool { return g.now().rank >= 0 }

// Name returns the group's name, the same on every rank.
func (g *ProcessGroup) Name() string { return g.name }

// Description returns the text given when the group was made.
func (g *ProcessGroup) Description() string { return g.desc }

// Ranks returns the members' ranks in the default group, in order.
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

// SetTimeout changes the limit of later operations; 0 means 30 minutes.
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

// Abort ends every operation with cause, on every rank, also in groups made from this one. Close the group then.
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

// Close leaves the group, within about a second, and closes those made from it. Wait for operations before, or call
// Shutdown: others fail with ErrClosed. A Barrier before makes sure that no rank needs this one.
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

// Shutdown waits for this rank's operations or ctx, and calls Close.
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

// Broadcast overwrites every rank's t with rank root's.
func (g *ProcessGroup) Broadcast(ctx context.Context, t *tensor.Tensor, root int, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.Broadcast, t)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	ts := listOf(t)
	defer putList(ts)
	var c trace.Call
	c.Begin(g.now().traced, b, work.Broadcast, ts[:], ts[:], -1, limit)
	return c.Issued(b.Broadcast(ctx, ts[:], backend.BroadcastOptions{Root: root, Timeout: limit}))
}

// AllReduce combines every rank's t and puts the result in each.
func (g *ProcessGroup) AllReduce(ctx context.Context, t *tensor.Tensor, op ReduceOp, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllReduce, t)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	ts := listOf(t)
	defer putList(ts)
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllReduce, ts[:], ts[:], -1, limit)
	return c.Issued(b.AllReduce(ctx, ts[:], backend.AllReduceOptions{Op: op, Timeout: limit}))
}

// AllReduceCoalesced combines ts[i] of all ranks, for all i at once.
func (g *ProcessGroup) AllReduceCoalesced(ctx context.Context, ts []*tensor.Tensor, op ReduceOp, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllReduceCoalesced, ts...)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllReduceCoalesced, ts, ts, -1, limit)
	return c.Issued(b.AllReduceCoalesced(ctx, ts, backend.AllReduceOptions{Op: op, Timeout: limit}))
}

// Reduce combines t of all ranks into rank root's.
func (g *ProcessGroup) Reduce(ctx context.Context, t *tensor.Tensor, root int, op ReduceOp, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.Reduce, t)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.Reduce, list(t), list(t), -1, limit)
	return c.Issued(b.Reduce(ctx, t, backend.ReduceOptions{Root: root, Op: op, Timeout: limit}))
}

// AllGather copies rank i's in to every rank's out[i].
func (g *ProcessGroup) AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllGather, in)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGather, list(in), out, -1, limit)
	return c.Issued(b.AllGather(ctx, out, in, backend.AllGatherOptions{Timeout: limit}))
}

// AllGatherV is AllGather where the ranks' inputs may differ in shape.
func (g *ProcessGroup) AllGatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllGather, in)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGather, list(in), out, -1, limit)
	return c.Issued(b.AllGatherV(ctx, out, in, backend.AllGatherOptions{Timeout: limit}))
}

// AllGatherIntoTensor copies rank i's in to part i of every rank's out.
func (g *ProcessGroup) AllGatherIntoTensor(ctx context.Context, out, in *tensor.Tensor, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllGatherIntoTensor, in)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGatherIntoTensor, list(in), list(out), -1, limit)
	return c.Issued(b.AllGatherIntoTensor(ctx, out, in, backend.AllGatherOptions{Timeout: limit}))
}

// AllGatherCoalesced is AllGather of several: out[i][k] is rank i's in[k].
func (g *ProcessGroup) AllGatherCoalesced(ctx context.Context, out [][]*tensor.Tensor, in []*tensor.Tensor, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllGatherCoalesced, in...)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGatherCoalesced, in, nil, -1, limit)
	return c.Issued(b.AllGatherCoalesced(ctx, out, in, backend.AllGatherOptions{Timeout: limit}))
}

// AllGatherIntoTensorCoalesced does AllGatherIntoTensor for each pair at once.
func (g *ProcessGroup) AllGatherIntoTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllGatherCoalesced, in...)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllGatherCoalesced, in, out, -1, limit)
	return c.Issued(b.AllGatherIntoTensorCoalesced(ctx, out, in, backend.AllGatherOptions{Timeout: limit}))
}

// Gather copies rank i's in to out[i] on rank root. Other ranks pass no out.
func (g *ProcessGroup) Gather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, root int, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.Gather, in)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.Gather, list(in), out, -1, limit)
	return c.Issued(b.Gather(ctx, out, in, backend.GatherOptions{Root: root, Timeout: limit}))
}

// GatherV is Gather where the ranks' inputs may differ in shape.
func (g *ProcessGroup) GatherV(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, root int, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.Gather, in)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.Gather, list(in), out, -1, limit)
	return c.Issued(b.GatherV(ctx, out, in, backend.GatherOptions{Root: root, Timeout: limit}))
}

// Scatter copies in[i] of rank root to rank i's out. Other ranks pass no in.
func (g *ProcessGroup) Scatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, root int, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.Scatter, out)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.Scatter, in, list(out), -1, limit)
	return c.Issued(b.Scatter(ctx, out, in, backend.ScatterOptions{Root: root, Timeout: limit}))
}

// ReduceScatter combines in[r] of all ranks into rank r's out.
func (g *ProcessGroup) ReduceScatter(ctx context.Context, out *tensor.Tensor, in []*tensor.Tensor, op ReduceOp, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.ReduceScatter, out)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.ReduceScatter, in, list(out), -1, limit)
	return c.Issued(b.ReduceScatter(ctx, out, in, backend.ReduceScatterOptions{Op: op, Timeout: limit}))
}

// ReduceScatterTensor combines part r of all ranks' in into rank r's out. For an out of shape [n ...], in is [size*n
// ...] or [size n ...].
func (g *ProcessGroup) ReduceScatterTensor(ctx context.Context, out, in *tensor.Tensor, op ReduceOp, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.ReduceScatterTensor, out)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.ReduceScatterTensor, list(in), list(out), -1, limit)
	return c.Issued(b.ReduceScatterTensor(ctx, out, in, backend.ReduceScatterOptions{Op: op, Timeout: limit}))
}

// ReduceScatterTensorCoalesced does ReduceScatterTensor for each pair at once.
func (g *ProcessGroup) ReduceScatterTensorCoalesced(ctx context.Context, out, in []*tensor.Tensor, op ReduceOp, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.ReduceScatterTensorCoalesced, out...)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.ReduceScatterTensorCoalesced, in, out, -1, limit)
	return c.Issued(b.ReduceScatterTensorCoalesced(ctx, out, in, backend.ReduceScatterOptions{Op: op, Timeout: limit}))
}

// AllToAll copies rank i's in[j] to rank j's out[i].
func (g *ProcessGroup) AllToAll(ctx context.Context, out, in []*tensor.Tensor, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllToAll, out...)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllToAll, in, out, -1, limit)
	return c.Issued(b.AllToAll(ctx, out, in, backend.AllToAllOptions{Timeout: limit}))
}

// AllToAllSingle sends part r of in to rank r; nil splits are equal parts.
func (g *ProcessGroup) AllToAllSingle(ctx context.Context, out, in *tensor.Tensor, outSplits, inSplits []int, o ...CallOptions) (*work.Work, error) {
	b, err := g.of(work.AllToAllSingle, out)
	if err != nil {
		return nil, err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.AllToAllSingle, list(in), list(out), -1, limit)
	return c.Issued(b.AllToAllSingle(ctx, out, in, outSplits, inSplits, backend.AllToAllOptions{Timeout: limit}))
}

// Send sends t to rank dst of the group.
func (g *ProcessGroup) Send(ctx context.Context, t *tensor.Tensor, dst int, o ...P2POptions) (*work.Work, error) {
	b, err := g.of(work.Send, t)
	if err != nil {
		return nil, err
	}
	p := option.Last(o)
	var c trace.Call
	c.Begin(g.now().traced, b, work.Send, list(t), nil, dst, p.Timeout)
	return c.Issued(b.Send(ctx, t, dst, backend.P2POptions(p)))
}

// Recv receives into t from rank src of the group.
func (g *ProcessGroup) Recv(ctx context.Context, t *tensor.Tensor, src int, o ...P2POptions) (*work.Work, error) {
	b, err := g.of(work.Recv, t)
	if err != nil {
		return nil, err
	}
	p := option.Last(o)
	var c trace.Call
	c.Begin(g.now().traced, b, work.Recv, nil, list(t), src, p.Timeout)
	return c.Issued(b.Recv(ctx, t, src, backend.P2POptions(p)))
}

// RecvAnySource receives from any rank; Work.SourceRank tells which.
func (g *ProcessGroup) RecvAnySource(ctx context.Context, t *tensor.Tensor, o ...P2POptions) (*work.Work, error) {
	b, err := g.of(work.RecvAnySource, t)
	if err != nil {
		return nil, err
	}
	p := option.Last(o)
	var c trace.Call
	c.Begin(g.now().traced, b, work.RecvAnySource, nil, list(t), -1, p.Timeout)
	return c.Issued(b.RecvAnySource(ctx, t, backend.P2POptions(p)))
}

// Barrier returns when every rank has called it.
func (g *ProcessGroup) Barrier(ctx context.Context, o ...BarrierOptions) error {
	return Wait(g.BarrierAsync(ctx, o...))
}

// BarrierAsync starts a Barrier.
func (g *ProcessGroup) BarrierAsync(ctx context.Context, o ...BarrierOptions) (*work.Work, error) {
	p := option.Last(o)
	b, err := g.backend(work.Barrier, p.Device)
	if p.Device == tensor.CPU && g.now().forCPU == nil {
		b, err = g.of(work.Barrier) // CPU is what no choice looks like
	}
	if err != nil {
		return nil, err
	}
	var c trace.Call
	c.Begin(g.now().traced, b, work.Barrier, nil, nil, -1, p.Timeout)
	return c.Issued(b.Barrier(ctx, backend.BarrierOptions(p)))
}

// MonitoredBarrier is a Barrier whose error names the missing ranks.
func (g *ProcessGroup) MonitoredBarrier(ctx context.Context, o ...CallOptions) error {
	b, err := g.of(work.Barrier)
	if err != nil {
		return err
	}
	limit := option.Last(o).Timeout
	var c trace.Call
	c.Begin(g.now().traced, b, work.Barrier, nil, nil, -1, limit)
	return c.Blocked(func() error {
		return b.MonitoredBarrier(ctx, backend.MonitoredBarrierOptions{Timeout: limit})
	})
}
