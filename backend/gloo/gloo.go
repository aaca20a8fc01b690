package gloo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/rendezvous"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Name is what the backend is registered as.
const Name = "gloo"

func init() {
	err := backend.Register(backend.Registration{
		Name: Name, Devices: []tensor.DeviceType{tensor.CPU},
		New: func(ctx context.Context, o backend.Options) (backend.Backend, error) { return New(ctx, o) },
	})
	if err != nil {
		panic(err)
	}
}

// Options are the backend's own options, for pg.Options.BackendOptions["gloo"].
// The zero value takes them from Gloo's environment variables.
type Options struct {
	// Interfaces are names of network interfaces; each gets connections of its
	// own, and collectives take turns over them. All ranks need the same
	// number. Empty means GLOO_SOCKET_IFNAME, and without that the address by which
	// this host reaches the store (store.LocalAddrOf): if that is a loopback address,
	// nothing leaves the host. Where the store cannot tell, Gloo's wire takes the
	// address of the host's name, or 127.0.0.1 if that cannot be bound, as PyTorch
	// does, and the native wire all addresses.
	Interfaces []string

	// Workers is how many collectives may run at a time; 0 means two for each
	// interface, as in PyTorch.
	Workers int

	// Wire is how the ranks talk to each other. Empty means the environment
	// variable C10D_WIRE, and without that WireAuto.
	Wire Wire

	// Sums is what the bits of a sum depend on, on the native wire. All ranks need
	// the same.
	Sums Sums

	// Sparse is how sparse tensors are all-reduced, on the native wire; empty lets the
	// library choose. All ranks need the same.
	Sparse Sparse

	// Copy is how many copies large data take between ranks that share memory. Empty means
	// the environment variable C10D_COPY, and without that CopyAuto.
	Copy Copy

	// Table is a file with measured times of algorithms, made by "c10d bench
	// -tune", by which the native wire chooses between them where ranks do not
	// share memory. Empty means the environment variable C10D_TABLE, and without that
	// the table in the library. All ranks need the same.
	Table string

	// TCP are the native wire's connections. An empty Host stands for the first
	// of Interfaces. TLS, if nil, is that of backend.Options. With TLS the group takes
	// the native wire, or New returns an error that names a rank without it.
	TCP tcp.Options

	// Host is what ranks on one host have the same, for the native wire: they
	// try to share memory, and collectives between hosts go in two levels. Empty means
	// the environment variable C10D_HOST, and without that whatever tells this
	// host from others. One host can play several by it.
	Host string

	// Join connects the ranks instead of the rendezvous over the store, for
	// groups that need no network; they run Gloo's algorithms. index counts the
	// interfaces.
	Join func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error)
}

// Backend is Gloo's engine for tensors in CPU memory; see backend.Backend.
type Backend struct {
	rank, size int
	group      string
	meshes     []transport.Mesh
	native     bool       // all ranks are of this library, and do not do as Gloo does
	shared     *shm.Group // nil unless all ranks share memory
	direct     messenger  // for messages, if some go through memory
	levels     *levels    // nil unless those of each host do, and there are several
	table      *choice.Table
	layout     *plan.Layout // nil if no two ranks are on one host, or nobody knows
	hosts      int
	sums       Sums
	sparse     Sparse
	why        string // the wire is what it is
	route      route
	lists      listRoute         // nil unless the route takes lists
	onFailure  func(*work.Error) // may be nil
	timeout    atomic.Int64
	planner    planner
	spares     sync.Pool // of operations that have ended

	mu        sync.Mutex
	queued    sync.Cond // a worker can go on, or the backend closes
	queue     []*operation
	engines   []*engine    // that run nothing
	inflight  []*operation // collectives queued or running
	seq       uint64
	tag       uint32
	calls     uint64 // collectives issued
	completed uint64 // collectives ended
	met       uint64 // collectives up to the last that has shown that all ranks called the same
	latest    latest
	told      atomic.Bool // an operation has returned how the ranks disagree
	alarm     alarm
	streak    int  // large collectives in a row that were waited for at once
	draining  bool // Shutdown has begun
	closing   bool
	stopped   bool          // queued operations end without being run
	idled     chan struct{} // closed when nothing is under way any more
	done      chan struct{} // closed when Close has finished
	workers   sync.WaitGroup
	messages  messages
	silence   silence
	p2p       sync.WaitGroup // and whatever else runs beside the queue
}

// MeetsElsewhere reports whether the ranks find each other without the store.
func (o Options) MeetsElsewhere() bool { return o.Join != nil }

// New connects a rank with the others of its group. It returns when all are
// connected, when ctx ends or when the timeout is over.
func New(ctx context.Context, o backend.Options) (*Backend, error) {
	var own Options
	switch v := o.Specific.(type) {
	case nil:
	case Options:
		own = v
	default:
		return nil, fmt.Errorf("gloo: options of type %T, want gloo.Options", v)
	}
	if o.Rank < 0 || o.Rank >= o.Size {
		return nil, fmt.Errorf("gloo: rank %d is not within a group of %d", o.Rank, o.Size)
	}
	names := own.Interfaces
	// Gloo, too, ignores a value of one character.
	if env := os.Getenv("GLOO_SOCKET_IFNAME"); len(names) == 0 && len(env) > 1 {
		names = strings.Split(env, ",")
	}
	if len(names) == 0 {
		names = []string{""}
	}
	wire, err := own.wire()
	if err != nil {
		return nil, err
	}
	if own.Copy, err = own.copies(); err != nil {
		return nil, err
	}
	if err := own.Sums.check(); err != nil {
		return nil, err
	}
	if err := own.Sparse.check(); err != nil {
		return nil, err
	}
	table, err := own.table()
	if err != nil {
		return nil, err
	}
	if own.TCP.TLS == nil {
		own.TCP.TLS = o.TLS
	}
	only := own.TCP.TLS != nil || wire == WireNative || wire == WireTCP
	if own.TCP.TLS != nil && wire == WireGloo && own.Join == nil {
		return nil, errors.New("gloo: Options.Wire or C10D_WIRE is gloo, whose wire has no TLS: choose another wire, or no TLS")
	}
	near := store.LocalAddrOf(o.Store)
	join := own.Join
	var nat *native
	if wire != WireGloo && join == nil && o.Size > 1 {
		if own.TCP.Host == "" {
			own.TCP.Host = names[0]
		}
		if own.TCP.Host == "" && near.IsValid() {
			own.TCP.Host = near.String()
		}
		if nat, err = newNative(wire, only, o.Rank, o.Size, own, table); err != nil {
			return nil, err
		}
		defer nat.close()
		nat.log = logger(o)
	}
	if join == nil {
		join = func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error) {
			c := rendezvous.Config{
				Store: store.Prefix(fmt.Sprint(index), o.Store), Rank: o.Rank, Size: o.Size,
				Interface: names[index], Near: near, Timeout: o.Timeout, Generation: generation(o.Dialect),
				Logger: logger(o), LastSeen: o.LastSeen,
			}
			if nat != nil && index == 0 {
				record, err := json.Marshal(nat.record)
				if err != nil {
					return nil, err
				}
				c.Native = &rendezvous.Native{Record: record, Connect: nat.connect, Only: only}
			}
			return rendezvous.Connect(ctx, c)
		}
	}
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	b := &Backend{rank: o.Rank, size: o.Size, group: o.Group, onFailure: o.Failed, idled: make(chan struct{}), done: make(chan struct{})}
	b.queued.L = &b.mu
	b.silence.init(ctx, b, o)
	b.timeout.Store(int64(o.Timeout))
	closeAll := func() {
		for _, made := range b.meshes {
			made.Close()
		}
	}
	for i := range names {
		m, err := join(ctx, o, i)
		if err != nil {
			closeAll()
			return nil, err
		}
		b.meshes = append(b.meshes, m)
		if nat != nil && nat.all != nil {
			break // one mesh is enough
		}
	}
	workers := own.Workers
	if workers <= 0 {
		workers = 2 * len(b.meshes)
	}
	switch {
	case own.Join != nil:
		b.why = "over what Options.Join connects"
	case wire == WireGloo:
		b.why = "as asked for"
	case o.Size == 1:
		b.why = "one rank has nobody to talk to"
	default:
		b.why = nat.why
	}
	if nat != nil && nat.all != nil {
		b.native, b.table, b.sums, b.sparse = true, table, own.Sums, own.Sparse
		hosts := plan.NewLayout(nat.hosts())
		b.hosts = hosts.Hosts()
		if b.hosts < o.Size {
			b.layout = hosts
		}
		ctx, cancel := context.WithTimeout(ctx, o.Timeout)
		defer cancel()
		b.why = "all ranks have it"
		if own.TCP.TLS != nil {
			b.why += ", and TLS"
		}
		group, err := nat.share(ctx, b.meshes[0], hosts)
		switch {
		case err != nil && !errors.Is(err, errApart):
			closeAll()
			return nil, err
		case err != nil:
			b.why += "; " + err.Error()
		case b.hosts == 1:
			b.shared = group
			b.why += ", and share memory"
			direct, err := shm.NewMesh(group, b.meshes[0], shm.MeshOptions{Lazy: true})
			if err != nil {
				closeAll()
				return nil, errors.Join(err, group.Close())
			}
			b.direct = direct
		case b.layout != nil:
			b.levels = newLevels(group, hosts, o.Rank)
			if group != nil {
				direct, err := newNear(group, b.meshes[0].(connections), b.levels.members[b.levels.host], shm.MeshOptions{Lazy: true})
				if err != nil {
					closeAll()
					return nil, errors.Join(err, group.Close())
				}
				b.direct = direct
			}
			b.why += ", and share memory on each host"
		}
		if b.shared != nil || b.levels != nil {
			workers = 1 // collectives in shared memory run in the order of the calls
		}
	}
	b.chooseRoute()
	for range workers {
		b.engines = append(b.engines, newEngine(b))
		b.workers.Go(b.work)
	}
	if len(b.meshes) > 1 {
		for _, m := range b.meshes {
			b.workers.Go(func() { b.spread(m) })
		}
	}
	return b, nil
}

func generation(d store.Dialect) rendezvous.Generation {
	switch d {
	case store.DialectV1:
		return rendezvous.G1
	case store.DialectV2:
		return rendezvous.G2
	}
	return rendezvous.Auto
}

// spread makes the failure of one mesh the failure of all.
func (b *Backend) spread(m transport.Mesh) {
	select {
	case <-b.idled:
	case <-m.Failed():
		for _, other := range b.meshes {
			if other != m {
				other.Abort(m.Fault())
			}
		}
	}
}

// Name returns "gloo".
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

// operation is one call on its way.
type operation struct {
	*future
	ctx        context.Context
	timeout    time.Duration
	prefix     uint8 // Gloo's number of the collective, in the slot
	tag        uint32
	call       uint64 // which collective this is, counted from 0
	print      transport.Call
	meets      bool // it cannot succeed before every rank has called it
	collective bool
	queued     bool        // in the queue
	issued     time.Time   // when, if it is large
	streak     int         // how many before it were waited for at once
	unwatch    func() bool // stops watching ctx on behalf of the queue; may be nil
	run        func(e *engine) error
	sync       func(work.Stream) error // orders a stream after the result; may be nil
	result     []*tensor.Tensor

	reduce reduceCall // of an all-reduce
}

// future is what a caller keeps of an operation. It is apart because the collector has to come
// the more often the larger it is, and stops all ranks when it comes to one.
type future struct {
	work.Promise
	backend *Backend
	op      *operation // nil once it has ended; under backend.mu
	room    [1]*tensor.Tensor
}

// spare returns an empty operation. One that has ended is used again if nobody else can have it.
func (b *Backend) spare() *operation {
	o, ok := b.spares.Get().(*operation)
	if !ok {
		o = new(operation)
	}
	o.future = new(future)
	return o
}

// recycle keeps o, which has ended, for spare. Only dense all-reduces come again: works that
// others have registered may hold on to their calls, and so may those who watch a context.
func (b *Backend) recycle(o *operation) {
	if o.reduce.runner != &o.reduce.dense || o.unwatch != nil {
		return
	}
	*o = operation{}
	b.spares.Put(o)
}

// Gloo's numbers of the collectives.
const (
	prefixGather    = 1
	prefixAllGather = 2
	prefixReduce    = 3
	prefixAllReduce = 4
	prefixScatter   = 5
	prefixBroadcast = 6
	prefixBarrier   = 7
	prefixAllToAll  = 8

	// prefixMonitored is this library's own; see Backend.monitoredSlot.
	prefixMonitored = 0x80
)

// issue gives a collective on so many bytes its number and its tags and queues it.
func (b *Backend) issue(ctx context.Context, op work.OpType, timeout time.Duration, prefix uint8, tags, bytes int, o *operation) (*work.Work, error) {
	if err := b.admit(ctx, op, o); err != nil {
		return nil, err
	}
	defer b.mu.Unlock()
	o.begin(b, ctx, op, timeout)
	if b.native {
		tags = 1
	}
	o.collective, o.prefix, o.tag, o.call = true, prefix, b.tag, b.calls
	b.tag += uint32(tags)
	b.calls++
	b.progress()
	b.enter(o)
	b.enqueue(o, bytes)
	return o.Work(), nil
}

// admit checks that an operation can start; on success b.mu is held.
func (b *Backend) admit(ctx context.Context, op work.OpType, o *operation) error {
	ended := ctx.Err() != nil // a nil context panics here, not under the lock
	b.mu.Lock()
	info := work.Info{Op: op, Seq: b.seq, Group: b.group, Rank: b.rank}
	var err error
	switch f := b.fault(); {
	case b.closing || b.draining:
		err = &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	case f != nil:
		err = b.faultError(info, f)
	case ended:
		err = &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("not started: %w", canceled(ctx))}
	default:
		return nil
	}
	b.mu.Unlock()
	return err
}

// fault returns what ended the group, nil while it works.
func (b *Backend) fault() *transport.Fault {
	for _, m := range b.meshes {
		if f := m.Fault(); f != nil {
			return f
		}
	}
	return nil
}

// Err returns what ended the group, nil while it works. It is for those who wait
// for something that is not the backend's and needs all ranks.
func (b *Backend) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.fault()
	if f == nil {
		return nil
	}
	return b.faultError(work.Info{Op: work.Barrier, Seq: b.seq, Group: b.group, Rank: b.rank}, f)
}

// begin fills in an operation that has been admitted. b.mu is held.
func (o *operation) begin(b *Backend, ctx context.Context, op work.OpType, timeout time.Duration) {
	if timeout <= 0 {
		timeout = time.Duration(b.timeout.Load())
	}
	if o.future == nil {
		o.future = new(future)
	}
	o.Init(work.Info{Op: op, Seq: b.seq, Group: b.group, Rank: b.rank})
	o.backend, o.op = b, o
	o.ctx, o.timeout = ctx, timeout
	o.RunBy(o.future)
	if o.sync != nil {
		o.OnSynchronize(o.sync)
	}
	b.seq++
}

// Abort ends the group because of this operation.
func (f *future) Abort(cause error) { f.backend.abort(cause, f) }

// progress tells the peers, should they ask, how far this rank is. b.mu is held.
func (b *Backend) progress() {
	for _, m := range b.meshes {
		m.SetProgress(b.calls, b.completed)
	}
}

// cleanBools makes every true byte 1: PyTorch adds bools as bytes, and in Go
// any other value is no bool.
func cleanBools(ts []*tensor.Tensor) error {
	for _, t := range ts {
		if t.DType() != tensor.Bool || t.Layout() != tensor.Strided {
			continue
		}
		c, err := t.Contiguous()
		if err != nil {
			return err
		}
		buf, dirty := c.Bytes(), false
		for i, v := range buf {
			if v > 1 {
				buf[i], dirty = 1, true
			}
		}
		if dirty && c != t {
			if err := t.Unpack(buf); err != nil {
				return err
			}
		}
	}
	return nil
}

// Abort ends every operation with cause, on every rank.
func (b *Backend) Abort(cause error) { b.abort(cause, nil) }

func (b *Backend) abort(cause error, o *future) {
	if errors.Is(cause, work.ErrMismatch) {
		b.told.Store(true)
	}
	f := b.causedBy(cause)
	if o != nil {
		f.Op, f.Seq = uint8(o.Info().Op), o.Info().Seq
	}
	b.end(f)
}

// end ends the group with f on all ranks.
func (b *Backend) end(f transport.Fault) {
	for _, m := range b.meshes {
		g := f
		m.Abort(&g)
	}
}

// causedBy makes a fault of the cause of an abort. If the cause is the error of an operation, the fault
// has the kind of that error and its Peer, which is a rank of this group. Backends above abort this
// one when operations of theirs fail.
func (b *Backend) causedBy(cause error) transport.Fault {
	f := transport.Fault{Kind: transport.FaultAborted, Rank: b.rank, Reporter: b.rank, Op: noOp, Err: cause}
	var e *work.Error
	var was *transport.Fault
	switch {
	case cause == nil || cause == work.ErrAborted:
		f.Err = nil
	case errors.As(cause, &e) && e.Peer >= 0 && e.Peer < b.size:
		kind, told := kindOf(e), errors.As(e, &was) && was.Reporter < b.size
		if e.Peer == b.rank && !told && blamesOthers(kind) {
			break // other ranks said nothing of the kind
		}
		f.Kind, f.Rank = kind, e.Peer
		if kind != transport.FaultMismatch { // which the backend above tells on every rank, see settleCalls
			f.Op, f.Seq = uint8(e.Op), e.Seq
		}
		first := &transport.Fault{Err: e.Err}
		if told {
			first, f.Reporter = was, was.Reporter
		}
		f.Err = &relayed{cause, first.Words()}
	case e == nil && errors.As(cause, &was) && was.Rank >= 0 && was.Rank < b.size: // of a rendezvous
		f.Kind, f.Rank, f.Reporter = was.Kind, was.Rank, was.Reporter
		f.Err = &relayed{cause, was.Words()}
	case errors.Is(cause, work.ErrMismatch):
		f.Kind = transport.FaultMismatch
	}
	return f
}

// blamesOthers reports whether no rank finds such a fault with itself.
func blamesOthers(k transport.FaultKind) bool {
	return k == transport.FaultPeerDied || k == transport.FaultTimeout || k == transport.FaultProtocol
}

// relayed is the cause of an abort because of another fault, whose words it keeps.
type relayed struct {
	error
	words string
}

func (r *relayed) Unwrap() error { return r.error }

// Words is what the fault says that came first.
func (r *relayed) Words() string { return r.words }
