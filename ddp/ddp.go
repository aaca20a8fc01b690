package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// Group is the part of a process group that DDP uses; *pg.ProcessGroup implements it. Other
// collectives on the group during an iteration must come in the same order on every rank.
type Group interface {
	Rank() int
	Size() int
	AllReduce(ctx context.Context, t *tensor.Tensor, op pg.ReduceOp, o ...pg.CallOptions) (*work.Work, error)
	Broadcast(ctx context.Context, t *tensor.Tensor, root int, o ...pg.CallOptions) (*work.Work, error)
	AllGather(ctx context.Context, out []*tensor.Tensor, in *tensor.Tensor, o ...pg.CallOptions) (*work.Work, error)
}

// Param is one parameter of the model.
type Param struct {
	// Name is for errors; it may be empty.
	Name string

	// Value is the parameter, a strided tensor of a floating-point or complex
	// type, in CPU memory or on Options.Device. DDP writes it only to synchronise
	// ranks: in New, and at the end of Join.
	Value *tensor.Tensor

	// Grad has the trainer's gradient before Ready, and the average after Finish. It has Value's
	// dtype and shape. Strides may differ, but not on a device. It may be nil if the trainer
	// passes every gradient to ReadyGrad, and must be nil with Options.GradientAsBucketView.
	//
	// A sparse COO gradient must be in CPU memory and gets a separate bucket. Its entries may
	// change in each iteration (SetSparse). It cannot be nil.
	Grad *tensor.Tensor

	// NoGrad marks a parameter that is not trained: it is synchronised in New,
	// as in c10d, but never reduced.
	NoGrad bool
}

// Buffer is state of the model that is not trained, such as the running mean
// of a normalisation.
type Buffer struct {
	Name  string
	Value *tensor.Tensor // strided, in CPU memory or on Options.Device, any dtype
}

// Options are the options of New. The zero value is c10d's default. All ranks
// must choose the same.
type Options struct {
	// Buffers are broadcast in New and in every Begin.
	Buffers []Buffer

	// Device has the parameters that are not in CPU memory; nil if all are. All ranks must have
	// the same kind of device; numbers may differ. The group must also serve tensors in CPU
	// memory.
	Device Device

	// BucketCap is the size in bytes at which a bucket is full; 0 means 25 MiB.
	BucketCap int

	// FirstBucket is BucketCap for the first bucket of each dtype, small so
	// that communication starts early; 0 means 1 MiB. Later releases of PyTorch
	// 2, given a bucket_cap_mb, use that for the first bucket too.
	FirstBucket int

	// NoInitSync makes New keep parameters and buffers: the caller promises that they are equal
	// on all ranks. It is c10d's init_sync=False.
	NoInitSync bool

	// NoBroadcastBuffers lets each rank keep its own buffers after New.
	NoBroadcastBuffers bool

	// FindUnused allows iterations in which some gradients are never ready; they count as zeros.
	// If a parameter has no gradient on any rank, its Grad does not change. It costs a small
	// all-reduce in each iteration, and buckets are never rebuilt.
	FindUnused bool

	// StaticGraph promises that every iteration makes the same gradients ready
	// as the first, each as many times. The first iteration reduces nothing
	// before Finish; it finds the unused parameters and counts how often Ready
	// is called for each.
	StaticGraph bool

	// GradientAsBucketView saves a copy and the memory of the gradients: the
	// trainer writes the gradient of parameter i to GradView(i).
	GradientAsBucketView bool

	// Hook replaces the all-reduce of a bucket; nil means a plain average.
	Hook Hook

	// PyTorch allows ranks of PyTorch's DistributedDataParallel in the group. New then sends only
	// PyTorch's messages, which do not have dtypes and options. Only the rank whose shape differs
	// from rank 0's notices that. It names the shape and ends the group, so that other ranks get
	// an error too. Without this option, New fails if it finds a PyTorch rank.
	PyTorch bool
}

// c10d's sizes.
const (
	defaultBucketCap   = 25 << 20
	defaultFirstBucket = 1 << 20
)

// DDP averages the gradients of a model that every rank of a group trains on its own data. Make
// one with New.
//
// An iteration is Begin, then Ready for each gradient, then Finish. Several goroutines may call
// Ready at once; all other calls must come from one goroutine. Begin, Finish and Join
// communicate, so every rank must make the same calls of them.
type DDP struct {
	g      Group
	o      Options
	params []*param         // as New was given them
	state  []*tensor.Tensor // of Elastic
	formed int              // how often Elastic has made it anew
	train  []*param         // those that are reduced: c10d's parameter numbers

	mu      sync.Mutex
	failed  error           // this rank is out of step with the others
	ctx     context.Context // of the iteration: bounds what Ready launches
	open    bool            // between Begin and Finish
	noSync  bool
	started bool // a gradient was ready in this iteration

	buckets []*Bucket
	shared  *sharedMemory // of buckets; nil if they lie in ordinary memory, or on a device
	next    int           // the bucket to be launched next
	rebuilt bool          // or never to be
	order   []int         // train numbers in the order in which they became ready
	divisor int           // of this iteration; 0 until it is known

	used cell // int32 a train number: how many ranks have a gradient

	// StaticGraph: whether the first iteration is over, on any rank and on
	// this one, which may have joined before it.
	recorded, learned bool

	syncBuffers bool // the last iteration reduced, so buffers may differ
	buffers     *broadcaster
	join        joining
	flying      []flight // in the order in which they were started
}

// param is a parameter and its state in this iteration.
type param struct {
	Param
	index  int // in New's slice
	number int // in DDP.train, -1 for NoGrad
	bucket *Bucket
	slot   int

	grad    *tensor.Tensor // of this iteration
	ready   bool
	touched bool // has a gradient that was not reduced yet, maybe of a NoSync iteration
	unused  bool // on every rank
	fires   int  // StaticGraph: Ready calls in the first iteration
	left    int  // StaticGraph: those to come in this one
}

func (p *param) sparse() bool { return p.Grad != nil && p.Grad.Layout() == tensor.SparseCOO }

func (p *param) errorf(format string, args ...any) error { return p.wrap(fmt.Errorf(format, args...)) }

func (p *param) wrap(err error) error { return &ParamError{Index: p.index, Name: p.Name, Err: err} }

// New prepares the parameters, in the order in which the model defines them,
// for training in the group. It compares the ranks' models, gives all of them
// rank 0's parameters and buffers, and assigns gradients to buckets. Every rank
// must call it; ctx bounds its communication.
func New(ctx context.Context, g Group, params []Param, opts ...Options) (*DDP, error) {
	o := option.Last(opts)
	d, err := prepare(g, params, o)
	if err != nil {
		return nil, err
	}
	if err := d.construct(ctx); err != nil {
		return nil, err
	}
	if err := d.wait(ctx); err != nil {
		return nil, err
	}
	d.shareMemory()
	return d, d.arrange(ctx)
}

// prepare checks the arguments of New.
func prepare(g Group, params []Param, opts ...Options) (*DDP, error) {
	o := option.Last(opts)
	if g == nil {
		return nil, errors.New("ddp: New needs a group")
	}
	if g.Size() < 1 || g.Rank() < 0 {
		return nil, errors.New("ddp: this rank is not a member of the group")
	}
	d := &DDP{g: g, o: o, syncBuffers: true}
	d.o.Buffers = slices.Clone(o.Buffers)
	if o.BucketCap < 0 || o.FirstBucket < 0 {
		return nil, fmt.Errorf("ddp: negative bucket size (BucketCap %d, FirstBucket %d)", o.BucketCap, o.FirstBucket)
	}
	if o.BucketCap == 0 {
		d.o.BucketCap = defaultBucketCap
	}
	if o.FirstBucket == 0 {
		d.o.FirstBucket = defaultFirstBucket
	}
	seen := make(map[*tensor.Tensor]int, len(params))
	for i, given := range params {
		p := &param{Param: given, index: i, number: -1}
		if err := d.check(p); err != nil {
			return nil, err
		}
		if k, ok := seen[p.Value]; ok {
			return nil, p.errorf("is the same tensor as parameter %d; give a shared parameter once", k)
		}
		seen[p.Value] = i
		if !p.NoGrad {
			p.number = len(d.train)
			d.train = append(d.train, p)
		}
		p.grad = p.Grad
		d.params = append(d.params, p)
	}
	if len(d.train) == 0 {
		return nil, errors.New("ddp: no parameter requires a gradient")
	}
	for i, b := range d.o.Buffers {
		if err := d.placed(b.Value); err != nil {
			return nil, fmt.Errorf("ddp: buffer %d (%s): %w", i, b.Name, err)
		}
	}
	return d, nil
}

// arrange assigns the parameters to the first buckets.
func (d *DDP) arrange(ctx context.Context) error {
	d.rebuilt = d.o.FindUnused && !d.o.StaticGraph
	limits := []int{d.o.FirstBucket, d.o.BucketCap}
	if !d.rebuilt {
		// The order of readiness is not known yet. Until then c10d makes one bucket of each
		// dtype, so that other collectives of the backward pass cannot come between its
		// all-reduces.
		limits = []int{int(^uint(0) >> 1)}
	}
	assignment := assign(d.items(nil), limits, true)
	slices.Reverse(assignment) // gradients come about in reverse order of definition
	if err := d.makeBuckets(ctx, assignment); err != nil {
		return err
	}
	if d.o.FindUnused || d.o.StaticGraph {
		if err := d.used.init(tensor.Int32, len(d.train)); err != nil {
			return err
		}
	}
	return d.join.init()
}

func onHost(t *tensor.Tensor) error {
	switch {
	case t == nil:
		return errors.New("nil tensor")
	case t.Layout() != tensor.Strided:
		return fmt.Errorf("%v is not strided", t)
	case t.Device().Type != tensor.CPU:
		return fmt.Errorf("%v is not in CPU memory", t)
	case t.HasOverlap():
		return fmt.Errorf("elements of %v overlap", t)
	}
	return nil
}

func (d *DDP) check(p *param) error {
	if err := d.placed(p.Value); err != nil {
		return p.wrap(err)
	}
	switch dt := p.Value.DType(); {
	case p.NoGrad && p.Grad != nil:
		return p.errorf("has a gradient and NoGrad")
	case p.NoGrad:
		return nil
	case !dt.IsFloat() && !dt.IsComplex():
		return p.errorf("%v has no gradients; set NoGrad", dt)
	case p.Grad == nil:
		return nil
	case d.o.GradientAsBucketView && !p.sparse():
		return p.errorf("Grad must be nil under GradientAsBucketView; write to GradView")
	}
	return p.checkGrad(p.Grad, p.sparse())
}

// checkGrad is c10d's check of a gradient against its place in the bucket.
func (p *param) checkGrad(grad *tensor.Tensor, sparse bool) error {
	if grad.DType() != p.Value.DType() || !grad.SameShape(p.Value) || (grad.Layout() == tensor.SparseCOO) != sparse {
		return p.errorf("expected a gradient like %v, got %v", p.Value, grad)
	}
	if sparse {
		if grad.Device().Type != tensor.CPU || p.Value.Device().Type != tensor.CPU {
			return p.errorf("sparse gradient %v of %v: both must be in CPU memory", grad, p.Value)
		}
		return nil
	}
	if p.Value.Device().Type != tensor.CPU {
		return p.gradOn(grad)
	}
	if err := onHost(grad); err != nil {
		return p.errorf("gradient: %w", err)
	}
	return nil
}

// fail records that this rank is out of step with other ranks.
func (d *DDP) fail(err error) error {
	d.failed, d.open = err, false
	return err
}

func (d *DDP) usable() error {
	if d.failed != nil {
		return fmt.Errorf("%w: %w", ErrFailed, d.failed)
	}
	return nil
}

// NoSync runs f, whose iterations reduce nothing. The trainer adds gradients in its own tensors,
// and the first iteration after NoSync reduces the sums. Call the forward pass inside f too.
// Buffers are not broadcast in the iteration after one without reduction.
func (d *DDP) NoSync(f func() error) error {
	d.mu.Lock()
	before := d.noSync
	d.noSync = true
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		d.noSync = before
		d.mu.Unlock()
	}()
	return f()
}

// Begin starts an iteration: call it before the forward pass. It checks that the last iteration
// was finished. After the first iteration it rebuilds the buckets. Then it broadcasts rank 0's
// buffers. ctx bounds all communication of the iteration, also the buckets that Ready launches.
// If it ends, the iteration fails on every rank.
//
// A forward pass without a backward pass needs no Finish; see also Evaluate.
func (d *DDP) Begin(ctx context.Context) error { return d.forward(ctx, true) }

// Evaluate is Begin for a forward pass without gradients, as under torch.no_grad in PyTorch. It
// gives every rank the buffers of rank 0. The next Begin does not send them again. All ranks must
// make the same calls of it.
func (d *DDP) Evaluate(ctx context.Context) error { return d.forward(ctx, false) }

// forward starts a forward pass that a backward pass may follow or not.
func (d *DDP) forward(ctx context.Context, backward bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if d.open && d.started {
		return d.fail(d.unfinished())
	}
	if err := d.landed(); err != nil {
		return d.fail(err)
	}
	reduces := backward && !d.noSync
	d.ctx, d.open, d.started = ctx, false, false
	if err := d.notifyActive(ctx); err != nil {
		return err
	}
	if backward || d.join.on { // ranks that have joined do not know which it is
		if err := d.rebuild(ctx); err != nil {
			return d.fail(err)
		}
	}
	if err := d.refreshBuffers(ctx, true); err != nil {
		return d.fail(err)
	}
	if err := d.notifySync(ctx, reduces); err != nil {
		return d.fail(err)
	}
	d.syncBuffers = reduces
	d.open = backward
	if reduces {
		d.resetCounts()
	}
	return nil
}

func (d *DDP) resetCounts() {
	d.next, d.divisor = 0, 0
	for _, b := range d.buckets {
		b.pending, b.work = len(b.slots), nil
	}
	for _, p := range d.train {
		p.ready, p.left = false, p.fires
	}
}

func (d *DDP) unfinished() error {
	e := &UnfinishedError{Rank: d.g.Rank(), Static: d.o.StaticGraph, Unused: d.o.FindUnused}
	for _, p := range d.train {
		if !p.ready {
			e.Indices = append(e.Indices, p.index)
			e.Names = append(e.Names, p.Name)
		}
	}
	return e
}

func (d *DDP) learning() bool { return d.o.StaticGraph && !d.learned }

func (d *DDP) dynamicUnused() bool { return d.o.FindUnused && !d.o.StaticGraph }

// Ready says that the gradient of parameter i is final: it is in Grad, or in GradView(i). Call it
// in the backward pass as early as possible, in the same order on all ranks if you can. A bucket
// is launched when all its gradients are ready and the buckets of lower index are launched. The
// caller goes on computing. The gradient must not change between Ready and Finish.
func (d *DDP) Ready(i int) error { return d.markReady(i, nil, true) }

// ReadyGrad is Ready for a gradient that is in another tensor in each
// iteration. The tensor takes the place of Grad until Finish.
func (d *DDP) ReadyGrad(i int, grad *tensor.Tensor) error {
	if grad == nil {
		return fmt.Errorf("ddp: parameter %d: nil gradient; see Unused", i)
	}
	return d.markReady(i, grad, true)
}

// Unused says, with FindUnused, that parameter i gets no gradient in this iteration. Finish
// notices that too, but with Unused the bucket is launched earlier.
func (d *DDP) Unused(i int) error {
	if !d.o.FindUnused {
		return fmt.Errorf("ddp: parameter %d is unused, but FindUnused is not set", i)
	}
	return d.markReady(i, nil, false)
}

func (d *DDP) markReady(i int, grad *tensor.Tensor, used bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if i < 0 || i >= len(d.params) {
		return fmt.Errorf("ddp: out of range parameter index %d of %d", i, len(d.params))
	}
	p := d.params[i]
	switch {
	case !d.open:
		return p.wrap(ErrNotBegun)
	case p.NoGrad:
		return p.errorf("has NoGrad")
	case !used && d.o.StaticGraph && p.fires == 0:
		return nil
	case d.o.StaticGraph && d.learned && !d.noSync && (!used || p.left == 0):
		return p.wrap(ErrGraphChanged)
	case p.ready && !d.noSync:
		return p.errorf("%w: it was ready already in this iteration; is it used outside the forward pass, or in several passes at once?", ErrMarkedTwice)
	}
	switch {
	case grad == nil && p.grad == nil && used && !d.o.GradientAsBucketView:
		return p.errorf("has no Grad; use ReadyGrad")
	case grad != nil && d.o.GradientAsBucketView:
		return p.errorf("ReadyGrad under GradientAsBucketView; write to GradView")
	case grad != nil:
		if err := p.checkGrad(grad, p.sparse()); err != nil {
			return err
		}
		p.grad = grad
	}
	p.touched = p.touched || used
	if d.noSync {
		return nil
	}
	if !d.started {
		d.started = true
		if d.o.StaticGraph && d.learned {
			if err := d.markUnready(func(q *param) bool { return q.fires == 0 }); err != nil {
				return err
			}
		}
	}
	switch {
	case d.learning():
		p.fires++
		return nil
	case d.o.StaticGraph:
		if p.left--; p.left > 0 {
			return nil
		}
	}
	if !d.rebuilt {
		d.order = append(d.order, p.number)
	}
	return d.mark(p)
}

// markUnready marks the selected parameters that are not ready.
func (d *DDP) markUnready(which func(*param) bool) error {
	for _, p := range d.train {
		if !p.ready && which(p) {
			if err := d.mark(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// mark puts the gradient into its bucket and launches complete buckets.
func (d *DDP) mark(p *param) error {
	if err := d.divideBy(); err != nil {
		return d.fail(err)
	}
	p.ready = true
	b := p.bucket
	if err := b.fill(p, d.divisor); err != nil {
		return d.fail(b.wrap(err))
	}
	if b.pending--; b.pending > 0 {
		return nil
	}
	for ; d.next < len(d.buckets) && d.buckets[d.next].pending == 0; d.next++ {
		if err := d.buckets[d.next].launch(d.ctx); err != nil {
			return d.fail(err)
		}
	}
	if d.next == len(d.buckets) && d.dynamicUnused() {
		return d.reduceUsed()
	}
	return nil
}

// reduceUsed starts the all-reduce of the map of used parameters.
func (d *DDP) reduceUsed() error {
	m := data[int32](d.used.t)
	for k, p := range d.train {
		m[k] = 0
		if p.touched {
			m[k] = 1
		}
	}
	if err := d.used.start(d.ctx, d.g, pg.Sum()); err != nil {
		return d.fail(fmt.Errorf("ddp: map of used parameters: %w", err))
	}
	return nil
}

// waitUsed finds the parameters that no rank used, if reduceUsed was called.
func (d *DDP) waitUsed(ctx context.Context) error {
	if d.used.work == nil {
		return nil
	}
	if err := d.used.wait(ctx); err != nil {
		return fmt.Errorf("ddp: map of used parameters: %w", err)
	}
	for k, n := range data[int32](d.used.t) {
		d.train[k].unused = n == 0
	}
	return nil
}

// Finish ends the iteration: it waits until all buckets are reduced and puts
// the averages into the gradients. Call it after the backward pass, before the
// optimizer. ctx bounds the waiting. In a NoSync iteration it does nothing.
//
// For gradients on a device it enqueues and does not block: later commands on the stream see the
// averages. See also [DDP.Wait].
//
// If a collective failed on any rank, Finish returns a *BucketError. The DDP cannot be used
// afterwards, because the other ranks' state is unknown.
func (d *DDP) Finish(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if !d.open {
		return ErrNotBegun
	}
	if d.noSync {
		d.open = false
		return nil
	}
	if err := d.complete(); err != nil {
		return err
	}
	err := d.collect(ctx)
	if err == nil {
		err = d.landed()
	}
	if err != nil {
		return d.fail(err)
	}
	d.open, d.started = false, false
	for _, p := range d.train {
		p.grad, p.touched = p.Grad, false
	}
	return nil
}

// complete launches the remaining buckets for Finish.
func (d *DDP) complete() error {
	switch {
	case d.learning():
		if !d.recorded {
			// c10d sends the map before the buckets in this iteration.
			if err := d.reduceUsed(); err != nil {
				return err
			}
		} else {
			d.definitionOrder()
		}
		d.recorded, d.learned = true, true
	case d.dynamicUnused():
	case d.next < len(d.buckets):
		return d.fail(d.unfinished())
	default:
		if !d.rebuilt && d.o.StaticGraph {
			for _, p := range d.train {
				if p.fires == 0 {
					d.order = append(d.order, p.number)
				}
			}
		}
		return nil
	}
	return d.markUnready(func(*param) bool { return true })
}

// definitionOrder replaces an order of readiness that was not observed.
func (d *DDP) definitionOrder() {
	if d.rebuilt || len(d.order) > 0 {
		return
	}
	for _, p := range d.train {
		d.order = append(d.order, p.number)
	}
}

// collect waits for the launched collectives and writes the gradients.
func (d *DDP) collect(ctx context.Context) error {
	if err := d.waitUsed(ctx); err != nil {
		return err
	}
	for _, b := range d.buckets {
		if err := b.wait(ctx); err != nil {
			return b.wrap(err)
		}
		if err := b.write(); err != nil {
			return err
		}
	}
	return d.join.settle(ctx)
}

// GradView returns the place of parameter i's gradient in its bucket, with GradientAsBucketView;
// otherwise nil. Begin may move it once, with its elements, so call GradView in each iteration.
// Between Ready and Finish it belongs to DDP.
func (d *DDP) GradView(i int) *tensor.Tensor {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.params[i]
	if !d.o.GradientAsBucketView || p.NoGrad || p.sparse() {
		return nil
	}
	return p.bucket.slots[p.slot].view
}

// Buckets returns the indices of the parameters in each bucket, in the order
// in which buckets are reduced.
func (d *DDP) Buckets() [][]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([][]int, len(d.buckets))
	for i, b := range d.buckets {
		out[i] = b.Params()
	}
	return out
}
