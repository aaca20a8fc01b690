package ddp

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"slices"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// ElasticGroup is the part of a process group that Elastic uses; *pg.ProcessGroup implements it.
type ElasticGroup interface {
	Group
	Pending(ctx context.Context) (int, error)
	Reconfigure(ctx context.Context, o ...pg.ReconfigureOptions) (pg.View, error)
}

// ElasticOptions are the options of NewElastic. The zero value works. All ranks must choose the
// same.
type ElasticOptions struct {
	Options // of the DDP; PyTorch must not be set

	// State is what the trainer keeps beside parameters and buffers, and is the same on all ranks:
	// the optimizer's tensors, counters, results. They are strided, in CPU memory or on Device.
	// Elastic writes them when this rank takes over the state of another rank.
	State []*tensor.Tensor

	// Reconfigure is for the epochs after the first.
	Reconfigure pg.ReconfigureOptions

	// Every is the number of steps between two looks for newcomers; 0 or less means 1. A look
	// costs a broadcast of 8 bytes, and rank 0 one call of the store.
	Every int

	// Changed, if not nil, is called on every rank after the members have changed and have the same
	// state, before the next step. It must not use the group.
	Changed func(pg.View)
}

// Elastic is a DDP in a group whose ranks come and go. Its steps are counted. A step that a fault
// interrupts is repeated by the ranks that are left. Newcomers get parameters, buffers and State of
// the rank that has done most steps.
//
//	e, err := ddp.NewElastic(ctx, g, params, ddp.ElasticOptions{State: momenta})
//	...
//	for e.Steps() < total {
//		err := e.Step(ctx, func(step int) error {
//			batch := share(step, g.Rank(), g.Size())
//			if err := e.Begin(ctx); err != nil {
//				return err
//			}
//			... // backward, with Ready
//			if err := e.Finish(ctx); err != nil {
//				return err
//			}
//			optimize(params, momenta)
//			return nil
//		})
//		if err != nil {
//			return err // for example pg.ErrEvicted or pg.ErrTooFew
//		}
//	}
//
// All collectives on the group belong into steps. An evaluation that sums results is a step, too.
//
// Its methods must come from one goroutine, but for Ready and its relatives.
type Elastic struct {
	*DDP
	group   ElasticGroup
	options ElasticOptions

	steps int  // that are complete
	joins int  // that are complete
	whole bool // this rank has the state of its last step
	lost  bool // the epoch has ended
	epoch int  // at least this one

	saved  []*tensor.Tensor // the buffers after the last step
	fresh  []int            // the ranks of newcomers
	warned bool             // of the store's error
	pause  int              // how many looks for newcomers are left out after an error
	left   int              // those of them that are left
}

// longestPause bounds Elastic.pause. A look at a store that has stopped takes 5 s.
const longestPause = 64

// NewElastic is New for a group whose ranks come and go. Newcomers call it when pg.Join has returned,
// while the other ranks are in Step. All ranks then compare their models. A newcomer with another
// model gets a *MismatchError; the other ranks go on without it when it has closed its group.
//
// Make g with pg.Options.Elastic. Prepare the model before pg.Join, because the members wait for
// NewElastic of a newcomer.
func NewElastic(ctx context.Context, g ElasticGroup, params []Param, opts ...ElasticOptions) (*Elastic, error) {
	o := option.Last(opts)
	if o.PyTorch {
		return nil, fmt.Errorf("ddp: NewElastic with Options.PyTorch: PyTorch ranks cannot change their group: %w", errors.ErrUnsupported)
	}
	d, err := prepare(g, params, o.Options)
	if err != nil {
		return nil, err
	}
	d.state = slices.Clone(o.State)
	for i, t := range d.state {
		if err := d.placed(t); err != nil {
			return nil, fmt.Errorf("ddp: State[%d]: %w", i, err)
		}
	}
	e := &Elastic{DDP: d, group: g, options: o}
	for _, b := range d.o.Buffers {
		copied, err := d.flat(b.Value, b.Value.Len())
		if err == nil && d.deviceOf(b.Value) == nil {
			copied, err = copied.Reshape(b.Value.Shape()...)
		}
		if err != nil {
			return nil, err
		}
		e.saved = append(e.saved, copied)
	}
	err = e.form(ctx)
	for e.survives(ctx, err) {
		err = e.reconfigure(ctx)
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

// Steps returns how many steps are complete: the number of the next step.
func (e *Elastic) Steps() int { return e.steps }

// Joins returns how many calls of Join are complete.
func (e *Elastic) Joins() int { return e.joins }

// Step does one step with f, on every rank of the group. f gets the step's number.
//
// If a rank is lost meanwhile, f returns an error with a *pg.EpochError. Step then begins the next
// epoch of the group and calls f again, with the rank and size that the group now has. Another rank
// may have completed the step before. This rank then takes over its state, and f is not called
// again. Steps says how far the training is.
//
// f must change parameters, State and everything else that counts only after its last collective.
// It computes gradients anew: a trainer that adds up gradients clears them first. f has to return
// the errors of its collectives. All other errors of f end Step and have no consequence.
//
// Errors of Reconfigure, such as pg.ErrEvicted and pg.ErrTooFew, end Step too. After ErrTooFew it may be
// called again.
func (e *Elastic) Step(ctx context.Context, f func(step int) error) error {
	for at := e.steps; e.steps == at; {
		err := e.ready(ctx, at)
		if err == nil && e.steps == at {
			if err = f(at); err == nil {
				e.steps++
				return e.copyBuffers(true)
			}
		}
		if err != nil && !e.survives(ctx, err) {
			return err
		}
	}
	return nil
}

// Finish is DDP.Finish. It also waits for averages on a device, because the optimizer must not use
// those of a failed collective.
func (e *Elastic) Finish(ctx context.Context) error {
	if err := e.DDP.Finish(ctx); err != nil {
		return err
	}
	return e.Wait(ctx)
}

// Join is DDP.Join. train calls Step. If a rank is lost, the ranks that have no more inputs go on in
// the next epoch, too. At the end every rank has the State of the rank that has done most steps. No
// newcomers are looked for, but those that wait are taken in after a fault. They have to call Join,
// too: Joins says which.
func (e *Elastic) Join(ctx context.Context, train func() error, o ...JoinOptions) error {
	trained := false
	for at := e.joins; e.joins == at; {
		err := e.mend(ctx)
		if err == nil && e.joins == at {
			err = e.DDP.Join(ctx, func() (err error) {
				if !trained {
					err = train()
					trained = err == nil
				}
				return err
			}, o...)
			if err != nil && !trained {
				return err
			}
			if err == nil {
				err = e.share(ctx)
			}
			if err == nil {
				e.joins++
				return nil
			}
		}
		if err != nil && !e.survives(ctx, err) {
			return err
		}
	}
	return nil
}

// survives reports whether err is the end of an epoch, or the fault of a newcomer, after which the
// next epoch begins.
func (e *Elastic) survives(ctx context.Context, err error) bool {
	if err == nil || ctx.Err() != nil {
		return false
	}
	var m *MismatchError
	newcomer := e.whole && errors.As(err, &m) && slices.Contains(e.fresh, m.Other)
	// The next epoch cannot help a group that an earlier one has ended, such as a hook's.
	var ended *pg.EpochError
	over := newcomer || errors.As(err, &ended) && ended.Epoch >= e.epoch
	e.lost = e.lost || over
	return over
}

// mend begins the next epoch if the last one has ended.
func (e *Elastic) mend(ctx context.Context) error {
	if e.lost {
		return e.reconfigure(ctx)
	}
	return nil
}

// ready makes the group ready for step at: without lost ranks, and with those that wait.
func (e *Elastic) ready(ctx context.Context, at int) error {
	err := e.mend(ctx)
	for err == nil && e.steps == at && !e.join.on && at%max(e.options.Every, 1) == 0 {
		n, bad := e.pending(ctx)
		if n == 0 || bad != nil {
			return bad
		}
		err = e.reconfigure(ctx)
	}
	return err
}

// pending returns how many newcomers can be taken in, the same number on every rank.
func (e *Elastic) pending(ctx context.Context) (int64, error) {
	waiting := []int64{0}
	switch most := e.options.Reconfigure.Max; {
	case e.g.Rank() > 0 || most > 0 && e.g.Size() >= most:
	case e.left > 0:
		e.left--
	default:
		n, err := e.group.Pending(ctx)
		if e.pause = 2 * e.pause; err == nil {
			e.pause = 0
		} else {
			e.pause = min(max(e.pause, 1), longestPause)
		}
		e.left = e.pause
		if err != nil && !e.warned {
			e.warned = true
			slog.Default().Warn("ddp: no newcomer can be taken in", "error", err)
		}
		waiting[0] = int64(n)
	}
	if err := broadcast(ctx, e.g, waiting); err != nil {
		return 0, fmt.Errorf("ddp: looking for newcomers: %w", err)
	}
	return waiting[0], nil
}

// reconfigure begins the next epoch, in which all ranks have the same state.
func (e *Elastic) reconfigure(ctx context.Context) error {
	e.lost = true
	if err := e.drain(ctx); err != nil {
		return err
	}
	v, err := e.group.Reconfigure(ctx, e.options.Reconfigure)
	if err != nil {
		return fmt.Errorf("ddp: after %d steps: %w", e.steps, err)
	}
	e.fresh, e.epoch = v.Joined, v.Epoch
	if err := e.form(ctx); err != nil {
		return err
	}
	e.lost = false
	if e.options.Changed != nil {
		e.options.Changed(v)
	}
	return nil
}

// form makes the DDP as New does, with the state of the rank that has done most steps.
func (e *Elastic) form(ctx context.Context) error {
	if e.whole {
		if err := e.copyBuffers(false); err != nil {
			return err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.restart()
	if err := e.verify(ctx); err != nil {
		return err
	}
	if err := e.share(ctx); err != nil {
		return err
	}
	return e.arrange(ctx)
}

// drain waits for the collectives of an epoch that has ended. They have failed, or soon will.
func (d *DDP) drain(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var open []*work.Work
	for _, b := range d.buckets {
		open = append(open, b.work)
	}
	if d.buffers != nil {
		for i := range d.buffers.chunks {
			open = append(open, d.buffers.chunks[i].work)
		}
	}
	for _, f := range d.flying {
		open = append(open, f.work)
	}
	j := &d.join
	open = append(open, d.used.work, j.active.work, j.syncs.work, j.stop.work, j.rank.work)
	for _, w := range open {
		if w == nil {
			continue
		}
		if err := w.Wait(ctx); err != nil && !w.IsCompleted() {
			return err // ctx has ended
		}
	}
	return nil
}

// restart forgets the last iteration, and what the ranks had agreed on.
func (d *DDP) restart() {
	d.formed++
	d.failed, d.open, d.started, d.syncBuffers = nil, false, false, true
	d.order, d.flying = nil, nil
	d.recorded, d.learned = false, false
	d.used = cell{}
	d.join = joining{on: d.join.on, o: d.join.o}
	for _, p := range d.train {
		p.grad, p.ready, p.touched, p.unused, p.fires = p.Grad, false, false, false, 0
	}
}

// castagnoli is the polynomial for which CPUs have instructions.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// share gives every rank the parameters, buffers and State of the rank that has done most steps. If
// it fails, every rank has what it had.
func (e *Elastic) share(ctx context.Context) error {
	d := e.DDP
	var replicated []*tensor.Tensor
	for _, p := range d.params {
		replicated = append(replicated, p.Value)
	}
	replicated = append(replicated, d.state...)
	sum, onHost, err := checksum(replicated)
	if err != nil {
		return err
	}
	mine := []int64{0, int64(e.steps), int64(e.joins), int64(sum)}
	if e.whole {
		mine[0] = 1
	}
	all, err := gather(ctx, d.g, mine)
	if err != nil {
		return fmt.Errorf("ddp: steps and checksums of the ranks: %w", err)
	}
	source, same := 0, onHost
	for r, v := range all {
		if slices.Compare(v[:3], all[source][:3]) > 0 {
			source = r
		}
		same = same && v[0] == 1 && slices.Equal(v, all[0])
	}
	if !same {
		if err := e.send(ctx, source, replicated); err != nil {
			return err
		}
	}
	e.whole, e.steps, e.joins = true, int(all[source][1]), int(all[source][2])
	return e.copyBuffers(true)
}

// checksum returns the checksum of the tensors in CPU memory, and whether these are all.
func checksum(ts []*tensor.Tensor) (sum uint32, all bool, err error) {
	all = true
	var room []byte
	for _, t := range ts {
		switch n := t.ByteLen(); {
		case t.Device().Type != tensor.CPU:
			all = false
		case t.IsContiguous():
			sum = crc32.Update(sum, castagnoli, t.Bytes())
		default:
			room = slices.Grow(room[:0], n)[:n]
			if err := t.Pack(room); err != nil {
				return 0, false, err
			}
			sum = crc32.Update(sum, castagnoli, room)
		}
	}
	return sum, all, nil
}

// send broadcasts the state of a rank. The other ranks keep theirs until all have it, because the
// source may die meanwhile.
func (e *Elastic) send(ctx context.Context, source int, replicated []*tensor.Tensor) error {
	d := e.DDP
	for _, b := range d.o.Buffers {
		replicated = append(replicated, b.Value)
	}
	b := d.newBroadcaster(replicated)
	for i := range b.chunks {
		b.chunks[i].hold = true
	}
	err := b.run(ctx, source, true)
	if err == nil {
		err = d.wait(ctx)
	}
	if err != nil {
		return fmt.Errorf("ddp: state from rank %d: %w", source, err)
	}
	var sum uint32
	for i := range b.chunks {
		if c := &b.chunks[i]; c.dev == nil {
			sum = crc32.Update(sum, castagnoli, c.flat.Bytes())
		}
	}
	all, err := gather(ctx, d.g, []int64{int64(sum)})
	if err != nil {
		return fmt.Errorf("ddp: checksums of the state from rank %d: %w", source, err)
	}
	for r, v := range all {
		if v[0] != all[source][0] {
			return fmt.Errorf("ddp: state from rank %d has checksum %#x on rank %d, and %#x on rank %d: %w",
				source, all[source][0], source, v[0], r, work.ErrCorrupted)
		}
	}
	for i := range b.chunks {
		c := &b.chunks[i]
		if d.g.Rank() != source {
			err = errors.Join(err, c.deliver())
		}
		err = errors.Join(err, c.drop())
	}
	return err
}

// copyBuffers saves the buffers, which a forward pass changes, or restores them.
func (e *Elastic) copyBuffers(save bool) error {
	for k, b := range e.o.Buffers {
		dst, src := e.saved[k], b.Value
		if !save {
			dst, src = src, dst
		}
		var err error
		if dev := e.deviceOf(b.Value); dev == nil {
			err = dst.CopyFrom(src)
		} else if src.Len() > 0 {
			err = dev.Copy(dst, src)
		}
		if err != nil {
			return fmt.Errorf("ddp: buffer %d (%s): %w", k, b.Name, err)
		}
	}
	return nil
}
