package group

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/edges"
	"github.com/c10d-go/c10d/backend/cuda/internal/hostshm"
	"github.com/c10d-go/c10d/internal/pool"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// work does the host's part of collectives, in the order of the calls.
func (b *Engine) work() {
	left := false
	defer func() {
		if !left { // an operator has ended the goroutine: runtime.Goexit
			b.wg.Go(b.work)
		}
	}()
	for {
		b.Mu.Lock()
		o := b.todo.Take()
		b.Mu.Unlock()
		if o == nil {
			break
		}
		if b.perform(o) {
			b.todo.linger(hostshm.LingerFor)
		}
	}
	b.Mu.Lock()
	b.ending.Close()
	b.Mu.Unlock()
	left = true
}

// perform does the host's part of an operation, and hands it to the finisher also if a function of
// the program has panicked in it. It reports whether the next one may come soon.
func (b *Engine) perform(o *Operation) (linger bool) {
	var err error
	returned := false
	defer func() {
		if !returned {
			err = work.Recovered(recover())
		}
		if err != nil {
			o.failed(err)
		}
		linger = o.eager()
		b.Mu.Lock()
		b.ending.Put(o)
		b.Mu.Unlock()
	}()
	err = o.run()
	returned = true
	return linger
}

// eager reports whether the next operation may come soon.
func (o *Operation) eager() bool { return o.Shared != nil && o.Shared.x.Eager }

// finish ends operations when the devices are done with them.
func (b *Engine) finish() {
	for {
		b.Mu.Lock()
		o := b.ending.Take()
		b.Mu.Unlock()
		if o == nil {
			return
		}
		if o.end(); o.eager() {
			b.ending.linger(hostshm.LingerFor)
		}
	}
}

// run does the host's part.
func (o *Operation) run() error {
	o.Start()
	if o.err != nil {
		return o.err
	}
	if err := o.runHost(); err != nil {
		return err
	}
	o.feeding.Wait()
	return o.feedErr
}

func (o *Operation) runHost() error {
	if o.before != nil {
		if err := o.await(o.before); err != nil {
			return err
		}
		o.before = nil
	}
	if err := o.B.Broken(); err != nil {
		return err
	}
	switch {
	case o.Program != nil:
		return o.Program.Run(o)
	case o.fillWithin != nil:
		return nil
	case o.claim != nil:
		return o.runMessage()
	case o.Relay != nil && !o.inTurn():
		return o.runOneToAll()
	case len(o.Legs) == 0:
		return o.Call(o, nil)
	case o.onHost():
		return o.runOnHost()
	}
	if o.Shared != nil {
		if err := o.Shared.meet(o); err != nil {
			return err
		}
	}
	if o.inTurn() {
		return o.runTurn()
	}
	var shadows []*tensor.Tensor
	if !o.inPlace() {
		shadows = make([]*tensor.Tensor, len(o.Legs))
	}
	for k := range o.pieces {
		if err := o.begin(&o.turns, k); err != nil {
			return err
		}
		if o.Near == nil && !o.inPlace() {
			at := k % o.slots * o.slot
			driver.HostAccess(o.B.Driver, "the host's part", driver.Writes(o.staging.Ptr()+driver.Ptr(at), o.slot))
			if err := o.shadow(shadows, k, func(_ *Leg, i, _ int) []byte { return o.staging.Bytes()[at+o.at[i]:] }); err != nil {
				return err
			}
		}
		if err := o.Call(o, shadows); err != nil {
			return err
		}
		o.done(&o.turns, k)
	}
	return nil
}

// await waits until an earlier operation has ended, well or not.
func (o *Operation) await(earlier *work.Work) error {
	ctx, cancel := context.WithDeadline(o.Ctx, o.deadline)
	defer cancel()
	earlier.Wait(ctx) // its error is for whoever waits for it
	switch {
	case earlier.IsCompleted():
		return nil
	case o.Ctx.Err() != nil:
		return Canceled(o.Ctx)
	}
	return fmt.Errorf("%w after %v, waiting for an earlier %v", work.ErrTimeout, o.timeout, earlier.Info().Op)
}

// failed ends the group because of what an operation ran into, and lets the
// streams go on.
func (o *Operation) failed(err error) {
	o.err = o.named(err)
	o.B.Fail(fmt.Errorf("the group has failed: %w", o.err), o.err)
	if x := o.B.usable(); x != nil {
		x.Fail()
	}
	if s, ok := o.Program.(*small); ok {
		s.release(o)
	}
	if p, ok := o.Program.(Spoiler); ok {
		p.Spoil()
	}
	for _, w := range o.B.Ways {
		if p, ok := w.(Spoiler); ok {
			p.Spoil()
		}
	}
	// A call of the driver may wait for one of the turns, in what is being enqueued.
	o.mu.Lock()
	o.halted = true
	var all []*edges.Pending
	if !o.over { // else others have them
		all = append(slices.Clone(o.parts), o.pending)
	}
	o.mu.Unlock()
	for _, p := range all {
		if p != nil {
			p.Abort()
		}
	}
	o.feeding.Wait()
}

// end completes the operation: its streams are done, or will not be waited for.
func (o *Operation) end() {
	limit := o.deadline
	if o.err != nil {
		limit = time.Now().Add(Grace)
	}
	ctx, cancel := context.Background(), func() {}
	if o.err == nil {
		ctx = o.Ctx
	}
	quiet := false
	if o.pending == nil {
		quiet = o.settled(ctx)
	} else if done, err := o.pending.Done(); done && err == nil && len(o.parts) == 0 {
		quiet = o.settled(ctx)
	} else {
		ctx, cancel = context.WithDeadline(ctx, limit)
		err := o.passed(ctx)
		if err != nil && o.err == nil {
			switch {
			case o.Ctx.Err() != nil:
				err = Canceled(o.Ctx)
			case ctx.Err() != nil:
				err = fmt.Errorf("%w after %v, waiting for the device", work.ErrTimeout, o.timeout)
			}
			o.failed(err)
		}
		quiet = o.settled(ctx)
	}
	cancel()
	if o.err == nil && o.Program != nil {
		if err := o.Program.Err(); err != nil {
			o.failed(cmp.Or(o.B.Broken(), err))
		}
	}
	if o.unwatch != nil {
		o.unwatch()
	}
	if !quiet {
		o.B.Mu.Lock()
		o.B.late = append(o.B.late, o)
		o.B.Mu.Unlock()
	}
	o.Complete(o.err)
}

// Grace is how long the Work of a failed operation waits for its streams. If they go on in that
// time, they no longer use the tensors when the Work ends. If something else holds them up, it
// ends without them.
const Grace = 50 * time.Millisecond

// settled waits until the operation has left the devices, and then gives back
// what it has; false if ctx ends first. One goroutine at a time calls it.
func (o *Operation) settled(ctx context.Context) bool {
	if o.over {
		return true
	}
	if o.pending != nil {
		err := o.passed(ctx)
		if (err != nil || o.B.gaveUp || o.flying) && !o.drained(ctx) {
			return false
		}
	}
	o.mu.Lock()
	o.over = true // from here on Order leaves the batches alone
	o.mu.Unlock()
	if o.later {
		o.mark.End()
	}
	if o.pending != nil {
		for _, p := range o.parts {
			p.Release()
		}
		o.parts = nil
		o.pending.Release()
	}
	o.B.queued.Add(int64(-o.commands))
	o.unstage()
	if o.launched {
		pool.Underway.Add(-1)
		o.B.Staged.Add(-1)
	}
	return true
}

// lookEvery is how often an operation whose kernels wait for other ranks looks whether the group has failed.
const lookEvery = 20 * time.Millisecond

// passed waits until the streams have done all parts. The kernels of a program wait for those of other
// ranks. If such a rank fails after its host's part, nothing else ends the wait here before the timeout.
func (o *Operation) passed(ctx context.Context) error {
	for o.Program != nil && o.err == nil {
		step, cancel := context.WithTimeout(ctx, lookEvery)
		err := o.sync(step)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if err := cmp.Or(o.B.Broken(), o.B.CPUErr()); err != nil {
			return err
		}
	}
	return o.sync(ctx)
}

// sync waits for the events of all parts.
func (o *Operation) sync(ctx context.Context) error {
	for _, p := range o.parts {
		if err := p.Sync(ctx); err != nil {
			return err
		}
	}
	return o.pending.Sync(ctx)
}

// drained is for when the events of an operation do not tell whether it has
// ended: it waits until the streams have done all that they were given. A device
// that is lost does nothing any more.
func (o *Operation) drained(ctx context.Context) bool {
	return Drained(ctx, append(o.everyStream(), o.makes...))
}
