package sim

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// record is one execution of a Record. Only the close of done orders a waiter after it.
type record struct {
	s     *stream
	n     uint64 // the operation's number
	done  chan struct{}
	clock clock
	err   error
	cap   *capture // the capture that has it instead of a stream; nil for most
}

func (r *record) end(c clock, err error) {
	r.clock, r.err = c, err
	close(r.done)
}

// Event is a driver.Event.
type Event struct {
	d        *Driver
	rec      *record
	made     *op
	used     atomic.Bool
	released atomic.Bool
}

func (e *Event) from() string { return "stream " + e.rec.s.ag.name }

// Record returns a new event.
func (s *Stream) Record() (driver.Event, error) {
	r := &record{s: s.s, done: make(chan struct{})}
	o := &op{kind: opRecord, rec: r}
	if err := s.enqueue("Record", o, false); err != nil {
		return nil, err
	}
	d := s.s.d
	e := &Event{d: d, rec: r, made: o}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.openEvents == nil {
		d.openEvents = make(map[*Event]bool)
	}
	d.openEvents[e] = true
	d.stats.Events++
	return e, nil
}

// Wait makes the stream wait for an event.
func (s *Stream) Wait(ev driver.Event) error {
	const call = "Wait"
	e, ok := ev.(*Event)
	if !ok || e == nil || e.d != s.s.d {
		return invalid(call, s.s.dev.index, "the event is of another driver")
	}
	if e.released.Load() {
		return &driver.Error{Call: call, Device: s.s.dev.index, Err: fmt.Errorf("%w: the event was released", driver.ErrClosed)}
	}
	e.used.Store(true)
	return s.enqueue(call, &op{kind: opWait, rec: e.rec}, false)
}

// Done reports whether the event has passed.
func (e *Event) Done() (bool, error) {
	if e.released.Load() {
		return false, &driver.Error{Call: "Done", Device: -1, Err: fmt.Errorf("%w: the event was released", driver.ErrClosed)}
	}
	e.used.Store(true)
	if e.rec.cap != nil {
		return false, e.captured("Done")
	}
	select {
	case <-e.rec.done:
		e.d.seen(e.rec.clock)
		return true, e.rec.err
	default:
		return false, nil
	}
}

func (e *Event) captured(call string) error {
	return refuse(call, -1, "the event was recorded in a capture, so it never passes; record one after Graph.Launch")
}

// Sync blocks until the event has passed.
func (e *Event) Sync(ctx context.Context) error {
	const call = "Sync"
	if e.released.Load() {
		return &driver.Error{Call: call, Device: -1, Err: fmt.Errorf("%w: the event was released", driver.ErrClosed)}
	}
	e.used.Store(true)
	if _, err := e.d.enter(call, -1, nil); err != nil {
		return err
	}
	if e.rec.cap != nil {
		return e.captured(call)
	}
	select {
	case <-e.rec.done:
	default:
		select {
		case <-e.rec.done:
		case <-ctx.Done():
			return &driver.Error{Call: call, Device: -1, Err: fmt.Errorf("the event of %s has not passed: %w", e.from(), context.Cause(ctx))}
		case <-e.d.abort:
			return &driver.Error{Call: call, Device: -1, Err: driver.ErrClosed}
		}
	}
	e.d.seen(e.rec.clock)
	return e.rec.err
}

// Release gives the event back. Nobody may have recorded it for nothing.
func (e *Event) Release() {
	if e.released.Swap(true) {
		o := new(op)
		o.where()
		e.d.m.findings.add(&Lifetime{What: "an event is released twice", Where: o.caller()})
		return
	}
	if !e.used.Load() {
		e.d.m.findings.add(&Unused{Stream: e.from(), Where: e.made.caller()})
	}
	e.d.mu.Lock()
	delete(e.d.openEvents, e)
	e.d.stats.Events--
	e.d.mu.Unlock()
}

// RawEvent is an event as CUDA has it: it can be recorded again and again, and
// what a wait means then depends on Config.Semantics. It is there to run programs
// written for such events, and to show why package driver has none.
type RawEvent struct {
	d *Driver
	// last is the record that was enqueued last, nil before the first.
	last atomic.Pointer[record]
}

// NewRawEvent returns an event that was never recorded: waiting for it is no wait.
func (d *Driver) NewRawEvent() *RawEvent { return &RawEvent{d: d} }

// Record records the event on a stream of the simulator, in place of any record
// before.
func (r *RawEvent) Record(st driver.Stream) error {
	s, ok := st.(*Stream)
	if !ok || s.s.d != r.d {
		return invalid("Record", -1, "the stream is of another driver")
	}
	rec := &record{s: s.s, done: make(chan struct{})}
	o := &op{kind: opRecord, rec: rec, raw: r}
	if err := s.enqueue("Record", o, false); err != nil {
		return err
	}
	r.last.Store(rec)
	return nil
}

// Wait makes a stream of the simulator wait for the event.
func (r *RawEvent) Wait(st driver.Stream) error {
	s, ok := st.(*Stream)
	if !ok || s.s.d != r.d {
		return invalid("Wait", -1, "the stream is of another driver")
	}
	o := &op{kind: opWait}
	if r.d.m.cfg.Semantics == LateBinding {
		o.raw = r
	} else if o.rec = r.last.Load(); o.rec == nil {
		return nil
	}
	return s.enqueue("Wait", o, false)
}

// Sync blocks the host until the latest record has passed.
func (r *RawEvent) Sync(ctx context.Context) error {
	rec := r.last.Load()
	if rec == nil {
		return nil
	}
	select {
	case <-rec.done:
		r.d.seen(rec.clock)
		return rec.err
	case <-ctx.Done():
		return &driver.Error{Call: "Sync", Device: -1, Err: fmt.Errorf("the event has not passed: %w", context.Cause(ctx))}
	case <-r.d.abort:
		return &driver.Error{Call: "Sync", Device: -1, Err: driver.ErrClosed}
	}
}

// wait is a wait with late binding: for whatever record is the latest while it
// lasts.
func (r *RawEvent) wait(s *stream, o *op) {
	for {
		rec := r.last.Load()
		if rec == nil {
			return
		}
		s.await(o, rec)
		if r.last.Load() == rec || s.stopped() != nil {
			return
		}
	}
}

var _ driver.Event = (*Event)(nil)
