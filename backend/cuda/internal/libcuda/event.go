package libcuda

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Event is a driver.Event.
type Event struct {
	v        *Device
	h        EventHandle
	released atomic.Bool
	captured bool // it was recorded in a capture
}

// pool is a device's events that nobody uses.
type pool struct {
	mu   sync.Mutex
	idle []*Event
	out  atomic.Int64 // events that were not released
}

// take returns an event; the device's context is current.
func (p *pool) take(v *Device, call string) (*Event, error) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		e := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		e.captured = false
		e.released.Store(false)
		p.out.Add(1)
		return e, nil
	}
	p.mu.Unlock()
	h, r := v.d.api.EventCreate(eventDisableTiming)
	if r != Success {
		return nil, v.fail(call, "cuEventCreate", r)
	}
	p.out.Add(1)
	return &Event{v: v, h: h}, nil
}

func (p *pool) put(e *Event) {
	e.released.Store(true)
	p.out.Add(-1)
	p.mu.Lock()
	p.idle = append(p.idle, e)
	p.mu.Unlock()
}

// drain destroys the idle events.
func (p *pool) drain(v *Device) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == 0 {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail("Close", "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	var err error
	for _, e := range p.idle {
		if r := v.d.api.EventDestroy(e.h); r != Success && err == nil {
			err = v.fail("Close", "cuEventDestroy", r)
		}
	}
	p.idle = nil
	return err
}

// Done reports whether the event has passed.
func (e *Event) Done() (bool, error) { return e.done("Done") }

func (e *Event) done(call string) (bool, error) {
	v := e.v
	if e.released.Load() {
		return false, closedError(call, v.index, "event was released")
	}
	if e.captured {
		// To ask CUDA would end the capture.
		return false, refuse(call, v.index, "the event was recorded in a capture, so it never passes; record one after Graph.Launch")
	}
	before, err := v.begin(call)
	if err != nil {
		return false, err
	}
	defer v.leave(before)
	switch r := v.d.api.EventQuery(e.h); r {
	case Success:
		return true, nil
	case errNotReady:
		return false, nil
	default:
		return false, v.fail(call, "cuEventQuery", r)
	}
}

// Sync blocks until the event has passed. CUDA's own way to block does not end
// with a context, so it asks: as fast as it can at first, then with pauses.
func (e *Event) Sync(ctx context.Context) error {
	const call = "Sync"
	const spins = 20
	start := time.Now()
	for i := 0; ; i++ {
		if ok, err := e.done(call); ok || err != nil {
			return err
		}
		if i < spins {
			continue
		}
		if ctx.Err() != nil {
			return &driver.Error{Call: call, Device: e.v.index, Err: fmt.Errorf("the event has not passed: %w", context.Cause(ctx))}
		}
		driver.Pause(start)
	}
}

// Release gives the event back. It can be recorded again at once: a wait that
// was enqueued keeps the state it was given.
func (e *Event) Release() {
	if !e.released.Swap(true) {
		e.v.events.put(e)
	}
}

var _ driver.Event = (*Event)(nil)
