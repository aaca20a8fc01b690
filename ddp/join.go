package ddp

import (
	"context"
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// JoinOptions are the options of Join. All ranks must choose the same.
type JoinOptions struct {
	// DivideByActive divides gradients by the number of ranks that still have inputs. Otherwise
	// the divisor is the group's size, so that every input has the same weight. A Hook divides
	// for itself.
	DivideByActive bool

	// ErrorOnEarlyEnd ends Join with ErrEarlyEnd on every rank as soon as one has no more inputs.
	// Use it for models with other collectives, which Join cannot match.
	ErrorOnEarlyEnd bool
}

// joining is the state of Join.
type joining struct {
	on bool
	o  JoinOptions

	active flag // float32: 1 for a rank that has inputs; the sum is how many have
	syncs  flag // float32: 1 for a rank whose iteration reduces
	stop   flag // float32: 1 for a rank that ran out, under ErrorOnEarlyEnd
	rank   flag // int64: the highest rank that may be the source
}

func (j *joining) init() error {
	for _, f := range []*flag{&j.active, &j.syncs, &j.stop} {
		if err := f.init(tensor.Float32, 1); err != nil {
			return err
		}
	}
	return j.rank.init(tensor.Int64, 1)
}

// cell is a tensor that one kind of collective uses again and again, so that a call allocates
// only the Work.
type cell struct {
	t    *tensor.Tensor
	work *work.Work // the latest all-reduce, nil once it has been waited for
}

func (c *cell) init(dtype tensor.DType, n int) (err error) {
	c.t, err = tensor.New(dtype, n)
	return err
}

func (c *cell) start(ctx context.Context, g Group, op pg.ReduceOp) (err error) {
	c.work, err = g.AllReduce(ctx, c.t, op)
	return err
}

func (c *cell) wait(ctx context.Context) error {
	if c.work == nil {
		return nil
	}
	if err := c.work.Wait(ctx); err != nil {
		return err
	}
	c.work = nil
	return nil
}

// flag is a cell of one element.
type flag struct{ cell }

func (f *flag) start(ctx context.Context, g Group, v float64, op pg.ReduceOp) error {
	if err := f.wait(ctx); err != nil {
		return err
	}
	if err := f.t.SetFloat64(v, 0); err != nil {
		return err
	}
	return f.cell.start(ctx, g, op)
}

// result waits for the collective that was started last.
func (f *flag) result(ctx context.Context) (float64, error) {
	if err := f.wait(ctx); err != nil {
		return 0, err
	}
	return f.t.Float64At(0)
}

func (f *flag) run(ctx context.Context, g Group, v float64, op pg.ReduceOp) (float64, error) {
	if err := f.start(ctx, g, v, op); err != nil {
		return 0, err
	}
	return f.result(ctx)
}

// settle waits for collectives that no call has waited for.
func (j *joining) settle(ctx context.Context) error {
	if err := j.active.wait(ctx); err != nil {
		return fmt.Errorf("ddp: join: %w", err)
	}
	if err := j.syncs.wait(ctx); err != nil {
		return fmt.Errorf("ddp: join: %w", err)
	}
	return nil
}

// notifyActive tells the joined ranks, at the start of an iteration, that this rank still has
// inputs.
func (d *DDP) notifyActive(ctx context.Context) error {
	j := &d.join
	if !j.on {
		return nil
	}
	if err := j.active.start(ctx, d.g, 1, pg.Sum()); err != nil {
		return d.fail(fmt.Errorf("ddp: join: %w", err))
	}
	if !j.o.ErrorOnEarlyEnd {
		return nil
	}
	stop, err := j.stop.run(ctx, d.g, 0, pg.Sum())
	if err != nil {
		return d.fail(fmt.Errorf("ddp: join: %w", err))
	}
	if stop != 0 {
		return ErrEarlyEnd
	}
	return nil
}

// notifySync tells the joined ranks whether this iteration reduces.
func (d *DDP) notifySync(ctx context.Context, syncs bool) error {
	if !d.join.on {
		return nil
	}
	v := 0.0
	if syncs {
		v = 1
	}
	if err := d.join.syncs.start(ctx, d.g, v, pg.Sum()); err != nil {
		return fmt.Errorf("ddp: join: %w", err)
	}
	return nil
}

// divideBy computes the divisor at the first gradient of an iteration.
func (d *DDP) divideBy() error {
	if d.divisor != 0 {
		return nil
	}
	d.divisor = d.g.Size()
	if !d.join.on || !d.join.o.DivideByActive {
		return nil
	}
	n, err := d.join.active.result(d.ctx)
	if err != nil {
		return fmt.Errorf("ddp: join: %w", err)
	}
	if !(n >= 1 && n <= float64(d.divisor)) { // NaN too
		return fmt.Errorf("ddp: join: %v of %d ranks are active", n, d.divisor)
	}
	d.divisor = int(n)
	return nil
}

// refreshBuffers gives every rank the buffers of rank 0, or during Join of the highest rank that
// still has inputs.
func (d *DDP) refreshBuffers(ctx context.Context, active bool) error {
	if !d.syncBuffers || d.o.NoBroadcastBuffers || len(d.o.Buffers) == 0 {
		return nil
	}
	root := 0
	if d.join.on {
		var err error
		if root, err = d.commonRank(ctx, active); err != nil {
			return err
		}
	}
	if err := d.buffers.run(ctx, root, true); err != nil {
		return fmt.Errorf("ddp: buffers from rank %d: %w", root, err)
	}
	return nil
}

// commonRank returns the highest rank that is a candidate.
func (d *DDP) commonRank(ctx context.Context, candidate bool) (int, error) {
	v := -1.0
	if candidate {
		v = float64(d.g.Rank())
	}
	r, err := d.join.rank.run(ctx, d.g, v, pg.Max())
	if err == nil && (r < 0 || r >= float64(d.g.Size())) {
		err = fmt.Errorf("no rank is the source (%v)", r)
	}
	if err != nil {
		return 0, fmt.Errorf("ddp: join: %w", err)
	}
	return int(r), nil
}

// Join runs train, a loop of iterations, on ranks that may have unequal numbers of inputs. A rank
// whose train has returned takes part in the other ranks' collectives with zeros until all have
// returned. Then every rank gets the parameters and buffers of the rank that finished last, or of
// the highest if several did.
//
// If train returns an error, Join returns it at once. The other ranks then wait for this one,
// until their contexts end or the group is closed.
func (d *DDP) Join(ctx context.Context, train func() error, opts ...JoinOptions) error {
	o := option.Last(opts)
	d.mu.Lock()
	err := d.usable()
	if err == nil && d.join.on {
		err = errors.New("ddp: Join inside Join")
	}
	if err != nil {
		d.mu.Unlock()
		return err
	}
	d.join.on, d.join.o = true, o
	d.mu.Unlock()
	err = train()
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.join.on = false }()
	if err != nil {
		return err
	}
	if err := d.usable(); err != nil {
		return err
	}
	if d.open && d.started {
		return d.fail(d.unfinished())
	}
	d.open = false
	for _, p := range d.train {
		p.touched = false
	}
	return d.shadow(ctx)
}

// shadow matches the collectives of the active ranks until there are none.
func (d *DDP) shadow(ctx context.Context) error {
	d.ctx = ctx
	j := &d.join
	for last := true; ; last = false {
		active, err := j.active.run(ctx, d.g, 0, pg.Sum())
		if err != nil {
			return d.fail(fmt.Errorf("ddp: join: %w", err))
		}
		if active == 0 {
			root, err := d.commonRank(ctx, last)
			if err == nil {
				err = d.syncModel(ctx, root)
			}
			if err != nil {
				return d.fail(err)
			}
			return nil
		}
		if j.o.ErrorOnEarlyEnd {
			if _, err := j.stop.run(ctx, d.g, 1, pg.Sum()); err != nil {
				return d.fail(fmt.Errorf("ddp: join: %w", err))
			}
			return fmt.Errorf("%w: rank %d", ErrEarlyEnd, d.g.Rank())
		}
		if err := d.shadowIteration(ctx, int(active)); err != nil {
			return d.fail(err)
		}
	}
}

func (d *DDP) shadowIteration(ctx context.Context, active int) error {
	if err := d.rebuild(ctx); err != nil {
		return err
	}
	if err := d.refreshBuffers(ctx, false); err != nil {
		return err
	}
	if err := d.notifySync(ctx, false); err != nil {
		return err
	}
	syncs, err := d.join.syncs.result(ctx)
	if err != nil {
		return fmt.Errorf("ddp: join: %w", err)
	}
	d.syncBuffers = syncs != 0
	if syncs == 0 {
		return nil
	}
	d.resetCounts()
	d.divisor = d.g.Size()
	if d.join.o.DivideByActive {
		d.divisor = active // as the others do: a backend may take the factor of any rank
	}
	first := d.o.StaticGraph && !d.recorded
	if first {
		if err := d.reduceUsed(); err != nil {
			return err
		}
	}
	for _, b := range d.buckets {
		for _, s := range b.slots {
			if err := b.fill(s.p, d.divisor); err != nil {
				return b.wrap(err)
			}
		}
		if err := b.launch(ctx); err != nil {
			return err
		}
	}
	if d.dynamicUnused() {
		if err := d.reduceUsed(); err != nil {
			return err
		}
	}
	if err := d.waitUsed(ctx); err != nil {
		return err
	}
	for _, b := range d.buckets {
		if err := b.wait(ctx); err != nil {
			return b.wrap(err)
		}
	}
	if !first {
		d.definitionOrder()
	}
	d.recorded = true
	return nil
}
