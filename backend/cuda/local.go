package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/backend/cuda/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Local does operations on tensors of one process, which lie on any number of
// devices: gloo's local collectives. Tensors count from 0, as ranks do. They may
// share devices, and must be contiguous, of one dtype and of one shape.
//
// A call enqueues everything and returns. The operation comes after what the
// tensors' streams (OnStream, WithStreams) had been given, and what they are
// given later comes after it, without Synchronize. Other streams are ordered by
// the Work's Synchronize.
//
// Methods may be called from many goroutines. Operations on the same memory
// are ordered as they were called. One that fails leaves the others alone.
type Local struct {
	d       driver.Driver
	o       LocalOptions
	tracker *edges.Tracker
	host    *edges.Host
	pinned  *pool.Pool[driver.HostMemory]
	scratch *pool.Pool[driver.Memory]

	calls   sync.Mutex // makes the order of calls that of what they enqueue
	streams map[int]driver.Stream
	modules map[int]driver.Module
	kernels map[kernelKey]driver.Function

	mu      sync.Mutex
	seq     uint64
	closing bool
	closed  chan struct{}
	todo    group.Fifo[localOp] // for the host
	ending  group.Fifo[localOp] // for the finisher
	late    []*localOp          // the finisher's
	wg      sync.WaitGroup
}

// LocalOptions are the options of a Local. The zero value is usable.
type LocalOptions struct {
	// Kernels combine elements on the devices. Where there is none for an operator
	// and a dtype the host combines, with the same bits.
	Kernels Kernels

	// Timeout is the limit of an operation; 0 means backend.DefaultTimeout.
	Timeout time.Duration

	// Pinned is how many bytes of page-locked memory are kept for later operations, Scratch
	// how many of each device's; 0 means 256 MiB. See Options.
	Pinned, Scratch int
}

// Kernels are functions that combine elements, for all devices.
type Kernels struct {
	// Image is what Device.Load takes: PTX, for GPUs. A driver.Keeper keeps it.
	Image []byte

	// Combine returns the name of the kernel that does c[i] = a[i] op b[i] for n
	// elements, with parameters (c, a, b, n uint64), for any grid; "" if there is
	// none. c may be a. All is in the memory of the device that it runs on.
	Combine func(k backend.ReduceKind, d tensor.DType) string
}

// keep has the kernels loaded before there are streams that wait for something.
func (k Kernels) keep(d driver.Driver) {
	if k.Image == nil {
		return
	}
	var names []string
	for _, o := range []backend.ReduceOp{backend.Sum(), backend.Product(), backend.Min(), backend.Max(), backend.BAnd(), backend.BOr(), backend.BXor()} {
		for _, t := range tensor.DTypes() {
			if name := k.Combine(o.Kind(), t); name != "" {
				names = append(names, name)
			}
		}
	}
	driver.Keep(d, k.Image, names...)
}

type kernelKey struct {
	dev  int
	name string
}

// Grid and block of a combining kernel, as gloo's.
const (
	kernelBlock = 512
	kernelGrid  = 4096
)

// NewLocal returns a Local for the devices of d, which it does not close; nil
// means Default.
func NewLocal(d driver.Driver, o LocalOptions) (*Local, error) {
	if o.Pinned < 0 {
		return nil, fmt.Errorf("cuda: LocalOptions.Pinned is %d bytes, want 0 or more", o.Pinned)
	}
	if o.Scratch < 0 {
		return nil, fmt.Errorf("cuda: LocalOptions.Scratch is %d bytes, want 0 or more", o.Scratch)
	}
	if (o.Kernels.Image == nil) != (o.Kernels.Combine == nil) {
		return nil, errors.New("cuda: LocalOptions.Kernels needs both Image and Combine, or neither")
	}
	if d == nil {
		var err error
		if d, err = Default(); err != nil {
			return nil, fmt.Errorf("cuda: %w", err)
		}
	}
	o.Pinned, o.Scratch = cmp.Or(o.Pinned, defaultKept), cmp.Or(o.Scratch, defaultKept)
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	l := &Local{
		d: d, o: o, tracker: edges.New(d), pinned: pool.NewPinned(d, o.Pinned), scratch: pool.NewScratch(d, o.Scratch),
		streams: make(map[int]driver.Stream), modules: make(map[int]driver.Module), kernels: make(map[kernelKey]driver.Function),
		closed: make(chan struct{}),
	}
	var err error
	if l.host, err = l.tracker.Host("host"); err != nil {
		return nil, errors.Join(fmt.Errorf("cuda: %w", err), l.tracker.Close())
	}
	o.Kernels.keep(d)
	l.todo.Init(&l.mu)
	l.ending.Init(&l.mu)
	l.wg.Go(l.work)
	l.wg.Go(l.finish)
	return l, nil
}

// Broadcast gives every tensor the elements of tensor number root, down a
// binomial tree: n-1 copies from device to device, the longest way through
// ceil(log2 n) of them.
func (l *Local) Broadcast(ctx context.Context, ts []*tensor.Tensor, root int) (*work.Work, error) {
	o, err := l.begin(ctx, work.Broadcast, ts, root)
	if err != nil {
		return nil, err
	}
	return l.issue(o, func(b *edges.Batch) error {
		o.spread(b, root)
		return nil
	})
}

// BroadcastFrom gives every tensor the elements of src, which is in CPU memory and
// not used after the call has returned. Tensor number root is the first to have
// them.
func (l *Local) BroadcastFrom(ctx context.Context, src *tensor.Tensor, ts []*tensor.Tensor, root int) (*work.Work, error) {
	const op = work.Broadcast
	o, err := l.begin(ctx, op, ts, root)
	if err != nil {
		return nil, err
	}
	switch {
	case src == nil:
		return nil, bad(op, "the source is nil")
	case src.Device().Type != tensor.CPU || src.Layout() != tensor.Strided:
		return nil, bad(op, "the source is %v, want a dense tensor in CPU memory", src)
	case src.DType() != ts[0].DType() || !src.SameShape(ts[0]):
		return nil, bad(op, "cannot copy %v into %v", src, ts[0])
	}
	return l.issue(o, func(b *edges.Batch) error {
		if o.bytes == 0 {
			return nil
		}
		if err := o.stage(1); err != nil {
			return err
		}
		driver.HostAccess(l.d, "staging a source", driver.Writes(o.pinned.Ptr(), o.bytes))
		if err := src.Pack(o.pinned.Bytes()[:o.bytes]); err != nil {
			return err
		}
		b.Copy(o.streams[root], o.at(root), o.pinned.Ptr(), o.bytes)
		o.spread(b, root)
		return nil
	})
}

// Reduce combines all tensors into tensor number root; the others keep theirs.
// Elements are combined in pairs of neighbours, pairs of these and so on:
// ((x0 x1) (x2 x3)) ((x4 x5) x6), whatever the root and wherever that is done.
func (l *Local) Reduce(ctx context.Context, ts []*tensor.Tensor, root int, op backend.ReduceOp) (*work.Work, error) {
	return l.reduce(ctx, work.Reduce, ts, root, op)
}

// AllReduce combines all tensors, in Reduce's order, and gives each the result.
func (l *Local) AllReduce(ctx context.Context, ts []*tensor.Tensor, op backend.ReduceOp) (*work.Work, error) {
	return l.reduce(ctx, work.AllReduce, ts, 0, op)
}

func (l *Local) reduce(ctx context.Context, kind work.OpType, ts []*tensor.Tensor, root int, op backend.ReduceOp) (*work.Work, error) {
	o, err := l.begin(ctx, kind, ts, root)
	if err != nil {
		return nil, err
	}
	red, err := op.Reduction(ts[0].DType(), len(ts))
	if err != nil {
		return nil, bad(kind, "%v", err)
	}
	to := []int{root}
	if kind == work.AllReduce {
		to = to[:0]
		for i := range ts {
			to = append(to, i)
		}
	}
	return l.issue(o, func(b *edges.Batch) error {
		combine, err := l.combiners(o, op, red)
		if err != nil || o.bytes == 0 {
			return err
		}
		if combine == nil {
			return o.onHost(b, red, to)
		}
		return o.onDevices(b, combine, to, kind == work.AllReduce)
	})
}

// combiners returns the kernels that combine on each tensor's device, nil if
// there are none.
func (l *Local) combiners(o *localOp, op backend.ReduceOp, red backend.Reduction) ([]driver.Function, error) {
	if l.o.Kernels.Combine == nil || red.Before != nil || red.After != nil || len(o.places) == 1 {
		return nil, nil
	}
	name := l.o.Kernels.Combine(op.Kind(), o.places[0].T.DType())
	if name == "" {
		return nil, nil
	}
	all := make([]driver.Function, len(o.places))
	for i, p := range o.places {
		k := kernelKey{p.Dev, name}
		f, ok := l.kernels[k]
		if !ok {
			m, ok := l.modules[p.Dev]
			if !ok {
				v, err := l.d.Device(p.Dev)
				if err != nil {
					return nil, err
				}
				if m, err = v.Load(l.o.Kernels.Image); err != nil {
					return nil, err
				}
				l.modules[p.Dev] = m
			}
			var err error
			if f, err = m.Function(name); err != nil {
				return nil, err
			}
			l.kernels[k] = f
		}
		all[i] = f
	}
	return all, nil
}

// localOp is one operation of a Local.
type localOp struct {
	work.Promise
	l        *Local
	ctx      context.Context
	op       work.OpType
	deadline time.Time
	places   []*place.Place
	streams  []driver.Stream // of each place's device
	callers  [][]driver.Stream
	bytes    int
	part     func() error     // the host's, in its turn
	result   []*tensor.Tensor // nil for the tensors
	turn     int
	err      error

	mu       sync.Mutex
	pending  *edges.Pending
	launched bool // it counts in underway
	over     bool // the batch has ended, and is released; only settled writes it
	pinned   driver.HostMemory
	scratch  []driver.Memory
}

func (o *localOp) at(i int) driver.Ptr { return o.places[i].Base + driver.Ptr(o.places[i].Lo) }

// begin checks a call.
func (l *Local) begin(ctx context.Context, op work.OpType, ts []*tensor.Tensor, root int) (*localOp, error) {
	if len(ts) == 0 {
		return nil, bad(op, "requires non-empty tensor list")
	}
	if root < 0 || root >= len(ts) {
		return nil, bad(op, "invalid root tensor: %d (there are %d)", root, len(ts))
	}
	o := &localOp{l: l, ctx: ctx, op: op, turn: -1}
	given := place.StreamsOf(ctx)
	for i, t := range ts {
		if err := dense(l.d, nil, op, fmt.Sprint("tensor ", i), output, t); err != nil {
			return nil, err
		}
		switch {
		case !t.IsContiguous():
			return nil, bad(op, "tensor %d (%v with strides %v) is not contiguous", i, t, t.Strides())
		case t.DType() != ts[0].DType():
			return nil, bad(op, "invalid tensor type at index %d (expected %v, got %v)", i, ts[0].DType(), t.DType())
		case !t.SameShape(ts[0]):
			return nil, bad(op, "invalid tensor size at index %d (expected %v, got %v)", i, ts[0].Shape(), t.Shape())
		}
		p := place.Of(t)
		var callers []driver.Stream
		if given != nil {
			callers = given.Before
		} else if p.Stream != nil {
			callers = []driver.Stream{p.Stream}
		}
		for j, q := range o.places {
			if a, b := o.at(j), p.Base+driver.Ptr(p.Lo); a < b+driver.Ptr(t.ByteLen()) && b < a+driver.Ptr(q.T.ByteLen()) {
				return nil, bad(op, "tensors %d and %d share memory", j, i)
			}
		}
		o.places, o.callers = append(o.places, p), append(o.callers, callers)
	}
	o.bytes = ts[0].ByteLen()
	if err := ctx.Err(); err != nil {
		return nil, &work.Error{Info: work.Info{Op: op, Group: "local"}, Peer: -1, Err: fmt.Errorf("cuda: not started: %w", group.Canceled(ctx))}
	}
	return o, nil
}

// issue enqueues what f puts into a batch between what the callers' streams do
// before and after.
func (l *Local) issue(o *localOp, f func(b *edges.Batch) error) (*work.Work, error) {
	l.calls.Lock()
	defer l.calls.Unlock()
	l.mu.Lock()
	closing, info := l.closing, work.Info{Op: o.op, Seq: l.seq, Group: "local"}
	l.mu.Unlock()
	if closing {
		return nil, &work.Error{Info: info, Peer: -1, Err: work.ErrClosed}
	}
	refused := func(err error) error {
		o.settled(context.Background())
		return &work.Error{Info: info, Peer: -1, Err: fmt.Errorf("cuda: %w", err)}
	}
	for _, p := range o.places {
		s, ok := l.streams[p.Dev]
		if !ok {
			v, err := l.d.Device(p.Dev)
			if err != nil {
				return nil, refused(err)
			}
			if s, err = v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprint("local ", p.Dev)}); err != nil {
				return nil, refused(err)
			}
			l.streams[p.Dev] = s
		}
		o.streams = append(o.streams, s)
	}
	b := l.tracker.Batch()
	o.edge(b.Before)
	if err := f(b); err != nil {
		// What the batch would have done is forgotten with it.
		return nil, refused(err)
	}
	o.edge(b.After)
	result := make([]*tensor.Tensor, 0, len(o.places))
	o.Init(info)
	for _, p := range o.places {
		result = append(result, p.T)
	}
	if o.result != nil {
		result = o.result
	}
	o.SetResult(result...)
	o.RunBy(o)
	o.deadline = time.Now().Add(l.o.Timeout)
	o.Start()
	pool.Underway.Add(1)
	o.launched = true
	o.pending, o.err = b.Run()
	l.mu.Lock()
	l.seq++
	l.todo.Put(o)
	l.mu.Unlock()
	return o.Work(), nil
}

// edge is what the callers' streams do with the tensors.
func (o *localOp) edge(f func(driver.Stream, ...driver.Access)) {
	for i, p := range o.places {
		for _, s := range o.callers[i] {
			f(s, driver.Writes(p.Base+driver.Ptr(p.Lo), o.bytes))
		}
	}
}

// stage gets page-locked memory for n tensors.
func (o *localOp) stage(n int) (err error) {
	o.pinned, err = o.l.pinned.Get(pool.OnHost, n*group.Align(o.bytes))
	return err
}

// spread copies from tensor root to all others. The writer of an edge is the
// stream of its source's device.
func (o *localOp) spread(b *edges.Batch, root int) {
	n := len(o.places)
	at := func(i int) int { return (i + root) % n }
	for step := 1 << bits.Len(uint(n-1)) >> 1; step > 0; step >>= 1 {
		for i := 0; i+step < n; i += 2 * step {
			if o.bytes > 0 {
				b.Copy(o.streams[at(i)], o.at(at(i+step)), o.at(at(i)), o.bytes)
			}
		}
	}
}

// tree calls f for each pair that is combined, the second into the first.
func tree(n int, f func(into, from int) error) error {
	for step := 1; step < n; step *= 2 {
		for i := 0; i+step < n; i += 2 * step {
			if err := f(i, i+step); err != nil {
				return err
			}
		}
	}
	return nil
}

// onDevices combines where the first of each pair is, of which it has brought a
// copy there, and so needs no peer access.
func (o *localOp) onDevices(b *edges.Batch, combine []driver.Function, to []int, all bool) error {
	n := len(o.places)
	value, inbox := make([]driver.Ptr, n), make([]driver.Ptr, n)
	for i := range value {
		value[i] = o.at(i)
	}
	room := func(i int) (driver.Ptr, error) {
		m, err := o.l.scratch.Get(o.places[i].Dev, o.bytes)
		if err != nil {
			return 0, err
		}
		o.scratch = append(o.scratch, m)
		return m.Ptr(), nil
	}
	err := tree(n, func(i, j int) (err error) {
		if inbox[i] == 0 {
			if inbox[i], err = room(i); err != nil {
				return err
			}
		}
		into := value[i]
		if into == o.at(i) && !all && to[0] != i {
			// The tensor keeps what it has.
			if into, err = room(i); err != nil {
				return err
			}
		}
		b.Copy(o.streams[j], inbox[i], value[j], o.bytes)
		count := o.places[i].T.Len()
		b.Launch(o.streams[i], &driver.Launch{
			Function: combine[i],
			Grid:     driver.Dim{X: uint32(min((count+kernelBlock-1)/kernelBlock, kernelGrid))}, Block: driver.Dim{X: kernelBlock},
			Args:   new(driver.Args).Ptr(into).Ptr(value[i]).Ptr(inbox[i]).Uint64(uint64(count)),
			Access: []driver.Access{driver.Reads(value[i], o.bytes), driver.Reads(inbox[i], o.bytes), driver.Writes(into, o.bytes)},
		})
		value[i] = into
		return nil
	})
	if err != nil {
		return err
	}
	if all {
		o.spread(b, 0)
	} else if value[0] != o.at(to[0]) {
		b.Copy(o.streams[0], o.at(to[0]), value[0], o.bytes)
	}
	return nil
}

// onHost combines in page-locked memory.
func (o *localOp) onHost(b *edges.Batch, red backend.Reduction, to []int) error {
	n, size := len(o.places), group.Align(o.bytes)
	if err := o.stage(n); err != nil {
		return err
	}
	for i := range n {
		b.Copy(o.streams[i], o.pinned.Ptr()+driver.Ptr(i*size), o.at(i), o.bytes)
	}
	o.turn = b.Host(o.l.host, driver.Writes(o.pinned.Ptr(), n*size))
	for _, i := range to {
		b.Copy(o.streams[i], o.at(i), o.pinned.Ptr(), o.bytes)
	}
	o.part = func() error {
		part := func(i int) []byte { return o.pinned.Bytes()[i*size:][:o.bytes] }
		if red.Before != nil {
			for i := range n {
				red.Before(part(i))
			}
		}
		err := tree(n, func(i, j int) error {
			red.Combine(part(i), part(j))
			return nil
		})
		if red.After != nil {
			red.After(part(0))
		}
		return err
	}
	return nil
}

// Abort does nothing: no other rank takes part.
func (o *localOp) Abort(error) {}

// Order makes s wait for the operation.
func (o *localOp) Order(s work.Stream) error {
	st, ok := s.(driver.Stream)
	if !ok {
		return o.failure(fmt.Errorf("synchronize: %T is no stream of package driver", s))
	}
	o.mu.Lock()
	if o.pending == nil || o.over {
		o.mu.Unlock()
		return o.Work().Wait(context.Background())
	}
	o.pending.Retain()
	o.mu.Unlock()
	if err := group.OrderAfter(st, []*edges.Pending{o.pending}); err != nil {
		return o.failure(fmt.Errorf("synchronize: %w", err))
	}
	return o.Work().Err()
}

func (o *localOp) failure(err error) error {
	return &work.Error{Info: o.Info(), Peer: -1, Err: fmt.Errorf("cuda: %w", err)}
}

// localWait is the context of the host's wait for its turn.
type localWait struct{ o *localOp }

func (localWait) Deadline() (time.Time, bool) { return time.Time{}, false }
func (localWait) Done() <-chan struct{}       { return nil }
func (localWait) Value(any) any               { return nil }

func (w localWait) Err() error {
	o := w.o
	if o.ctx.Err() != nil {
		return group.Canceled(o.ctx)
	}
	if time.Now().After(o.deadline) {
		return fmt.Errorf("%w after %v", work.ErrTimeout, o.l.o.Timeout)
	}
	for _, s := range o.streams {
		if err := s.Err(); err != nil {
			return err
		}
	}
	return nil
}

// work does the host's turns, in order.
func (l *Local) work() {
	left := false
	defer func() {
		if !left { // an operator has ended the goroutine: runtime.Goexit
			l.wg.Go(l.work)
		}
	}()
	for {
		l.mu.Lock()
		o := l.todo.Take()
		l.mu.Unlock()
		if o == nil {
			break
		}
		l.perform(o)
	}
	l.mu.Lock()
	l.ending.Close()
	l.mu.Unlock()
	left = true
}

// perform does the host's part of an operation, and hands it to the finisher also if a function of
// the program has panicked in it.
func (l *Local) perform(o *localOp) {
	begun, returned := false, false
	defer func() {
		if !returned {
			o.err = work.Recovered(recover())
		}
		if begun {
			o.pending.End(o.turn)
		}
		if o.err != nil {
			o.err = o.failure(o.err)
		}
		l.mu.Lock()
		l.ending.Put(o)
		l.mu.Unlock()
	}()
	if o.err == nil && o.turn >= 0 {
		begun = true
		if o.err = o.pending.Begin(localWait{o}, o.turn); o.err == nil {
			o.err = o.part()
		}
	}
	returned = true
}

// finish ends operations when the devices are done with them.
func (l *Local) finish() {
	for {
		l.mu.Lock()
		o := l.ending.Take()
		l.mu.Unlock()
		if o == nil {
			return
		}
		limit, ctx := o.deadline, o.ctx
		if o.err != nil {
			limit, ctx = time.Now().Add(group.Grace), context.Background()
		}
		ctx, cancel := context.WithDeadline(ctx, limit)
		if o.pending != nil {
			if err := o.pending.Sync(ctx); err != nil && o.err == nil {
				switch {
				case o.ctx.Err() != nil:
					err = group.Canceled(o.ctx)
				case ctx.Err() != nil:
					err = fmt.Errorf("%w after %v, waiting for the device", work.ErrTimeout, l.o.Timeout)
				}
				o.err = o.failure(err)
			}
		}
		if !o.settled(ctx) {
			l.late = append(l.late, o)
		}
		l.reap()
		cancel()
		o.Complete(o.err)
	}
}

// reap gives back what operations held that had not left the devices when they
// ended.
func (l *Local) reap() {
	l.late = slices.DeleteFunc(l.late, func(o *localOp) bool {
		done, err := o.pending.Done()
		return done && err == nil && o.settled(context.Background())
	})
}

// settled waits until the operation has left the devices, and then gives back
// what it has; false if ctx ends first. One goroutine at a time calls it.
func (o *localOp) settled(ctx context.Context) bool {
	if o.over {
		return true
	}
	if o.pending != nil {
		if err := o.pending.Sync(ctx); err != nil && !group.Drained(ctx, o.streams) {
			return false
		}
	}
	o.mu.Lock()
	o.over = true
	o.mu.Unlock()
	if o.pending != nil {
		o.pending.Release()
	}
	if o.pinned != nil {
		o.l.pinned.Put(pool.OnHost, o.pinned)
	}
	for _, m := range o.scratch {
		o.l.scratch.Put(m.Device().Index, m)
	}
	if o.launched {
		pool.Underway.Add(-1)
	}
	return true
}

// Close waits until what was issued has ended and frees everything.
func (l *Local) Close() error {
	l.calls.Lock()
	l.mu.Lock()
	again := l.closing
	l.closing = true
	l.todo.Close()
	l.mu.Unlock()
	l.calls.Unlock()
	if again {
		<-l.closed
		return nil
	}
	defer close(l.closed)
	l.wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), group.CloseLimit)
	defer cancel()
	stuck := 0
	for _, o := range l.late {
		if !o.settled(ctx) {
			stuck++
		}
	}
	if stuck > 0 {
		return fmt.Errorf("cuda: %d operations that failed have not left the device after %v", stuck, group.CloseLimit)
	}
	var errs []error
	for _, s := range l.streams {
		l.tracker.Forget(s)
		errs = append(errs, s.Close())
	}
	for _, m := range l.modules {
		errs = append(errs, m.Close())
	}
	return errors.Join(append(errs, l.tracker.Close(), l.pinned.Close(), l.scratch.Close())...)
}
