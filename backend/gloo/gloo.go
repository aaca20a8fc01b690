package gloo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo/rendezvous"
	"github.com/c10d-go/c10d/backend/gloo/transport"
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
	// number. Empty means GLOO_SOCKET_IFNAME, and without that the address of the
	// host's name, or 127.0.0.1 if that cannot be bound.
	Interfaces []string

	// Workers is how many collectives may run at a time; 0 means two for each
	// interface, as in PyTorch.
	Workers int

	// Join connects the ranks instead of the rendezvous over the store, for
	// groups that need no network. index counts the interfaces.
	Join func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error)
}

// Backend is Gloo's engine for tensors in CPU memory; see backend.Backend.
type Backend struct {
	rank, size int
	group      string
	meshes     []transport.Mesh
	timeout    atomic.Int64
	planner    planner

	mu        sync.Mutex
	queued    sync.Cond // the queue is not empty, or the backend closes
	queue     []*operation
	inflight  []*operation // collectives queued or running
	seq       uint64
	tag       uint32
	calls     uint64 // collectives issued
	completed uint64 // collectives ended
	idle      int    // workers that wait for the queue
	closing   bool
	idled     chan struct{} // closed when nothing is under way any more
	done      chan struct{} // closed when Close has finished
	workers   sync.WaitGroup
	p2p       sync.WaitGroup // and whatever else runs beside the queue
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
	join := own.Join
	if join == nil {
		join = func(ctx context.Context, o backend.Options, index int) (transport.Mesh, error) {
			return rendezvous.Connect(ctx, rendezvous.Config{
				Store: store.Prefix(fmt.Sprint(index), o.Store), Rank: o.Rank, Size: o.Size,
				Interface: names[index], Timeout: o.Timeout, Generation: generation(o.Dialect),
			})
		}
	}
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	b := &Backend{rank: o.Rank, size: o.Size, group: o.Group, idled: make(chan struct{}), done: make(chan struct{})}
	b.queued.L = &b.mu
	b.timeout.Store(int64(o.Timeout))
	for i := range names {
		m, err := join(ctx, o, i)
		if err != nil {
			for _, made := range b.meshes {
				made.Close()
			}
			return nil, err
		}
		b.meshes = append(b.meshes, m)
	}
	workers := own.Workers
	if workers <= 0 {
		workers = 2 * len(b.meshes)
	}
	for range workers {
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

// operation is one call on its way. The Work is part of it.
type operation struct {
	work.Promise
	backend    *Backend
	ctx        context.Context
	timeout    time.Duration
	prefix     uint8 // Gloo's number of the collective, in the slot
	tag        uint32
	call       uint64 // which collective this is, counted from 0
	collective bool
	unwatch    func() bool // stops watching ctx on behalf of the queue; may be nil
	run        func(e *engine) error
	sync       func(work.Stream) error // orders a stream after the result; may be nil
	result     []*tensor.Tensor
	room       [1]*tensor.Tensor // for a list of one
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
)

// issue gives a collective its number and its tags and queues it.
func (b *Backend) issue(ctx context.Context, op work.OpType, timeout time.Duration, prefix uint8, tags int, o *operation) (*work.Work, error) {
	if err := b.admit(ctx, op, o); err != nil {
		return nil, err
	}
	defer b.mu.Unlock()
	o.begin(b, ctx, op, timeout)
	o.collective, o.prefix, o.tag, o.call = true, prefix, b.tag, b.calls
	b.tag += uint32(tags)
	b.calls++
	b.progress()
	b.queue = append(b.queue, o)
	b.inflight = append(b.inflight, o)
	if len(b.queue) > b.idle && ctx.Done() != nil {
		b.p2p.Add(1)
		o.unwatch = context.AfterFunc(ctx, func() {
			defer b.p2p.Done()
			b.cancelQueued(o)
		})
	}
	b.queued.Signal()
	return o.Work(), nil
}

// admit checks that an operation can start; on success b.mu is held.
func (b *Backend) admit(ctx context.Context, op work.OpType, o *operation) error {
	ended := ctx.Err() != nil // a nil context panics here, not under the lock
	b.mu.Lock()
	info := work.Info{Op: op, Seq: b.seq, Group: b.group, Rank: b.rank}
	var err error
	switch f := b.fault(); {
	case b.closing:
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

// begin fills in an operation that has been admitted. b.mu is held.
func (o *operation) begin(b *Backend, ctx context.Context, op work.OpType, timeout time.Duration) {
	if timeout <= 0 {
		timeout = time.Duration(b.timeout.Load())
	}
	o.Init(work.Info{Op: op, Seq: b.seq, Group: b.group, Rank: b.rank})
	o.backend, o.ctx, o.timeout = b, ctx, timeout
	o.OnAbort(o.abort)
	if o.sync != nil {
		o.OnSynchronize(o.sync)
	}
	b.seq++
}

func (o *operation) abort(cause error) { o.backend.abort(cause, o) }

// progress tells the peers, should they ask, how far this rank is. b.mu is held.
func (b *Backend) progress() {
	for _, m := range b.meshes {
		m.SetProgress(b.calls, b.completed)
	}
}

// work runs queued collectives, oldest first, until the backend closes.
func (b *Backend) work() {
	e := newEngine(b)
	for {
		b.mu.Lock()
		b.idle++
		for len(b.queue) == 0 && !b.closing {
			b.queued.Wait()
		}
		b.idle--
		if len(b.queue) == 0 {
			b.mu.Unlock()
			return
		}
		o := b.queue[0]
		copy(b.queue, b.queue[1:])
		b.queue[len(b.queue)-1] = nil
		b.queue = b.queue[:len(b.queue)-1]
		b.mu.Unlock()

		if o.unwatch != nil && o.unwatch() {
			b.p2p.Done()
		}
		o.Start()
		e.begin(o)
		err := o.run(e)
		e.end()
		b.finish(o, err)
	}
}

// cancelQueued ends the group because the context of o ended before a worker
// had come to o.
func (b *Backend) cancelQueued(o *operation) {
	b.mu.Lock()
	queued := slices.Contains(b.queue, o)
	b.mu.Unlock()
	if queued {
		b.giveUp(b.meshFor(o.tag), o, -1, canceled(o.ctx))
	}
}

func (b *Backend) finish(o *operation, err error) {
	if err == nil {
		err = cleanBools(o.result)
		o.SetResult(o.result...)
	}
	if err != nil && b.fault() == nil {
		// It failed on this rank alone: the others wait for its messages.
		b.fail(b.meshFor(o.tag), o, err, b.rank)
	}
	b.mu.Lock()
	if i := slices.Index(b.inflight, o); i >= 0 {
		b.inflight = slices.Delete(b.inflight, i, i+1)
	}
	b.completed++
	b.progress()
	// Under the lock: what a barrier finds in flight no more has ended.
	o.Complete(err)
	b.mu.Unlock()
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

func (b *Backend) abort(cause error, o *operation) {
	if cause == nil {
		cause = work.ErrAborted
	}
	f := transport.Fault{Kind: transport.FaultAborted, Rank: b.rank, Reporter: b.rank, Op: noOp, Err: cause}
	if o != nil {
		f.Op, f.Seq = uint8(o.Info().Op), o.Info().Seq
	}
	for _, m := range b.meshes {
		g := f
		m.Abort(&g)
	}
}

// Close waits until what was issued has ended, says goodbye and frees everything.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.closing {
		b.mu.Unlock()
		<-b.done
		return nil
	}
	b.closing = true
	b.queued.Broadcast()
	waiting := slices.Clone(b.inflight)
	b.mu.Unlock()
	for _, o := range waiting {
		<-o.Work().Done()
	}
	b.p2p.Wait()
	close(b.idled)
	b.workers.Wait()
	defer close(b.done)
	var errs []error
	for _, m := range b.meshes {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}
