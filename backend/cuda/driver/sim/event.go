package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// record is one execution of a Record. Closing done is the only thing that
// orders who waits after it.
type record struct {
	s     *stream // nil if another process recorded it
	n     uint64  // the operation's number
	done  chan struct{}
	clock clock
	err   error
	file  []byte // the shared word of an event that other processes wait on
}

func (r *record) end(c clock, err error) {
	r.clock, r.err = c, err
	if r.file != nil {
		driver.StoreWord(r.file, 0, 1)
	}
	close(r.done)
}

// Event is a driver.Event.
type Event struct {
	d        *Driver
	rec      *record
	made     *op
	used     atomic.Bool
	released atomic.Bool
	close    func()
}

func (e *Event) from() string {
	if e.rec.s == nil {
		return "another process"
	}
	return "stream " + e.rec.s.ag.name
}

// Record returns a new event.
func (s *Stream) Record() (driver.Event, error) {
	e, err := s.record("Record", nil)
	if err != nil {
		return nil, err
	}
	return e, nil
}

func (s *Stream) record(call string, file []byte) (*Event, error) {
	r := &record{s: s.s, done: make(chan struct{}), file: file}
	o := &op{kind: opRecord, rec: r}
	if err := s.enqueue(call, o, false); err != nil {
		return nil, err
	}
	e := &Event{d: s.s.d, rec: r, made: o}
	s.s.d.mu.Lock()
	s.s.d.keep(e)
	s.s.d.mu.Unlock()
	return e, nil
}

// keep counts an event as alive; the caller holds d.mu.
func (d *Driver) keep(e *Event) {
	if d.openEvents == nil {
		d.openEvents = make(map[*Event]bool)
	}
	d.openEvents[e] = true
	d.stats.Events++
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
	select {
	case <-e.rec.done:
		e.d.seen(e.rec.clock)
		return true, e.rec.err
	default:
		return false, nil
	}
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
	if e.close != nil {
		e.close()
	}
}

// RecordShared records an event that other processes can wait for.
func (d *Driver) RecordShared(st driver.Stream) (driver.Event, driver.EventHandle, error) {
	const call = "RecordShared"
	var h driver.EventHandle
	s, ok := st.(*Stream)
	if !ok || s.s.d != d {
		return nil, h, invalid(call, -1, "the stream is of another driver")
	}
	m := d.m
	m.mu.Lock()
	m.nextID++
	id := m.nextID
	m.mu.Unlock()
	copy(h[:], d.owner[:])
	binary.LittleEndian.PutUint64(h[16:], id)
	var file []byte
	var remove func(bool)
	if m.cfg.Dir != "" {
		var err error
		if file, remove, err = createShared(m.cfg.Dir, sharedName(d.owner, id), page); err != nil {
			return nil, h, &driver.Error{Call: call, Device: s.s.dev.index, Err: err}
		}
	}
	e, err := s.record(call, file)
	if err != nil {
		if remove != nil {
			remove(true)
		}
		return nil, driver.EventHandle{}, err
	}
	e.used.Store(true)
	m.mu.Lock()
	m.events[h] = e.rec
	m.mu.Unlock()
	e.close = func() {
		m.mu.Lock()
		delete(m.events, h)
		m.mu.Unlock()
		if remove != nil {
			// The stream may still have to write the word.
			remove(false)
		}
	}
	return e, h, nil
}

// OpenEvent returns the event of another process.
func (d *Driver) OpenEvent(device int, h driver.EventHandle) (driver.Event, error) {
	const call = "OpenEvent"
	if _, err := d.enter(call, device, nil); err != nil {
		return nil, err
	}
	if device < 0 || device >= len(d.devices) {
		return nil, invalid(call, -1, "no device %d among %d", device, len(d.devices))
	}
	if [16]byte(h[:16]) == d.owner {
		return nil, &driver.Error{Call: call, Device: device, Err: driver.ErrOwnHandle}
	}
	o := &op{kind: opAlloc, name: call}
	o.where()
	m := d.m
	m.mu.Lock()
	r := m.events[h]
	m.mu.Unlock()
	e := &Event{d: d, rec: r, made: o}
	if r == nil {
		if m.cfg.Dir == "" {
			return nil, invalid(call, device, "no such event; it may have been released by its owner")
		}
		file, closeFile, err := openShared(m.cfg.Dir, sharedName([16]byte(h[:16]), binary.LittleEndian.Uint64(h[16:])))
		if err != nil || len(file) < 4 {
			return nil, invalid(call, device, "no such event: %v", err)
		}
		e.rec = &record{done: make(chan struct{})}
		d.group.Go(func() { watch(d, e.rec, file); closeFile(true) })
	}
	e.used.Store(true)
	d.mu.Lock()
	d.keep(e)
	d.mu.Unlock()
	return e, nil
}

// watch ends r when another process has set the word of the file. Releasing the
// event does not end it: a wait that was enqueued before still needs it.
func watch(d *Driver, r *record, file []byte) {
	pause := 10 * time.Microsecond
	for driver.LoadWord(file, 0) == 0 {
		select {
		case <-d.abort:
			r.end(nil, driver.ErrClosed)
			return
		case <-time.After(pause):
			pause = min(2*pause, time.Millisecond)
		}
	}
	r.end(d.m.everything(), nil)
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
	o := &op{kind: opRecord, rec: rec}
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
