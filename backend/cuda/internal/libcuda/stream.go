package libcuda

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/tensor"
)

// Stream is a driver.Stream.
type Stream struct {
	v        *Device
	h        StreamHandle
	borrowed bool

	// mu keeps Close out of the other calls: a stream that is destroyed must not
	// be used.
	mu     sync.Mutex
	closed bool
	bounce driver.Ptr // what copies within the host go through, once there is one
	had    *history
	first  bool // the call under way has firstCommands

	capturing bool // between BeginCapture and EndCapture
}

// history is of which kinds a stream has had commands.
type history struct{ had atomic.Uint32 }

// commands is a set of kinds of commands.
type commands uint16

const (
	copyToHost commands = 1 << iota
	copyFromHost
	copyBetweenDevices
	copyWithinDevice
	memset
	launch
	waitValue
	writeValue
	recordEvent
	waitEvent
	launchGraph
	none commands = 0
)

// copying returns the kind of a copy, two kinds if it goes through a device.
func copying(to, from span) commands {
	switch {
	case to.device < 0 && from.device < 0:
		return copyToHost | copyFromHost
	case to.device < 0:
		return copyToHost
	case from.device < 0:
		return copyFromHost
	case to.device != from.device:
		return copyBetweenDevices
	}
	return copyWithinDevice
}

// firstCommands is held while a stream is given its first command of a kind, of all
// streams of the process, since drivers share contexts. That is when CUDA gives the
// stream queues of the hardware. Of streams that get theirs at the same time some were
// seen to get the same one, with others free, and then wait for each other for good.
//
// A call that waits for the device, as on a full stream, has got its queue. So nobody waits for one call
// longer than firstWait.
var (
	firstCommands = make(chan struct{}, 1)
	firstCalls    atomic.Uint64 // that have held it
)

const firstWait = 500 * time.Millisecond

// holdFirst takes firstCommands; false if a call keeps it for long.
func holdFirst() bool {
	for {
		n := firstCalls.Load()
		select {
		case firstCommands <- struct{}{}:
			firstCalls.Add(1)
			return true
		case <-time.After(firstWait):
			if firstCalls.Load() == n {
				return false
			}
		}
	}
}

// NewStream returns a stream.
func (v *Device) NewStream(o ...driver.StreamOptions) (driver.Stream, error) {
	const call = "NewStream"
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	least, greatest, r := v.d.api.PriorityRange()
	if r != Success {
		return nil, v.fail(call, "cuCtxGetStreamPriorityRange", r)
	}
	priority := least
	if option.Last(o).High {
		priority = greatest
	}
	h, r := v.d.api.StreamCreate(streamNonBlocking, priority)
	if r != Success {
		return nil, v.fail(call, "cuStreamCreateWithPriority", r)
	}
	s := &Stream{v: v, h: h, had: new(history)}
	v.streams.Add(1)
	v.d.made(s, "stream")
	return s, nil
}

// perThreadStream is CU_STREAM_PER_THREAD.
const perThreadStream StreamHandle = 2

// BorrowStream returns a stream of somebody else. The handle must be one: CUDA
// does not survive others. Zero is the device's default stream.
func (v *Device) BorrowStream(handle uintptr) (driver.Stream, error) {
	const call = "BorrowStream"
	h := StreamHandle(handle)
	if h == perThreadStream {
		return nil, invalid(call, v.index, "the default stream of a thread; goroutines have no thread")
	}
	before, err := v.begin(call)
	if err != nil {
		return nil, err
	}
	defer v.leave(before)
	ctx, r := v.d.api.StreamContext(h)
	if r != Success {
		return nil, v.fail(call, "cuStreamGetCtx", r)
	}
	if ctx != v.ctx {
		return nil, invalid(call, v.index, "the stream is of context %#x, the device's is %#x", uintptr(ctx), uintptr(v.ctx))
	}
	return &Stream{v: v, h: h, borrowed: true, had: v.historyOf(h)}, nil
}

// mostHistories is how many borrowed streams a device remembers.
const mostHistories = 1024

// historyOf returns the history of a borrowed stream. Programs borrow the same ones again and again.
func (v *Device) historyOf(h StreamHandle) *history {
	v.spare.Lock()
	defer v.spare.Unlock()
	if v.borrowed[h] == nil {
		if v.borrowed == nil || len(v.borrowed) == mostHistories {
			v.borrowed = make(map[StreamHandle]*history)
		}
		v.borrowed[h] = new(history)
	}
	return v.borrowed[h]
}

// Device returns the stream's device.
func (s *Stream) Device() tensor.Device { return s.v.ID() }

// Handle returns the CUstream.
func (s *Stream) Handle() uintptr { return uintptr(s.h) }

// begin locks the stream for a call that enqueues such commands, and makes its context
// current; end takes both back.
func (s *Stream) begin(call string, c commands) (Context, error) {
	s.mu.Lock()
	return s.locked(call, c)
}

// locked is begin for who holds s.mu.
func (s *Stream) locked(call string, c commands) (Context, error) {
	if s.closed {
		s.mu.Unlock()
		return 0, closedError(call, s.v.index, "stream")
	}
	before, err := s.v.begin(call)
	if err != nil {
		s.mu.Unlock()
		return before, err
	}
	if uint32(c)&^s.had.had.Load() != 0 {
		s.first = holdFirst()
		s.had.had.Or(uint32(c))
	}
	return before, nil
}

func (s *Stream) end(before Context) {
	if s.first {
		s.first = false
		<-firstCommands
	}
	s.v.leave(before)
	s.mu.Unlock()
}

// where finds memory for a call.
func (s *Stream) where(call string, p driver.Ptr, n int) (span, error) {
	at, err := s.v.d.memory.find(p, n)
	if err != nil {
		return at, &driver.Error{Call: call, Device: s.v.index, Err: err}
	}
	return at, nil
}

// Copy copies bytes.
func (s *Stream) Copy(dst, src driver.Ptr, n int) error {
	const call = "Copy"
	if err := driver.CheckCopy(s.v.index, dst, src, n); err != nil || n == 0 {
		return err
	}
	to, err := s.where(call, dst, n)
	if err != nil {
		return err
	}
	from, err := s.where(call, src, n)
	if err != nil {
		return err
	}
	before, err := s.begin(call, copying(to, from))
	if err != nil {
		return err
	}
	defer s.end(before)
	if to.device < 0 && from.device < 0 {
		if on, err := s.captured(call); on || err != nil {
			return cmp.Or(err, refuse(call, s.v.index, "it goes through a buffer of the stream; copy to device memory and back"))
		}
		return s.copyHost(call, dst, src, n)
	}
	return s.v.fail(call, "cuMemcpyAsync", s.v.d.api.MemcpyAsync(s.h, dst, src, n))
}

// bounceSize is how much of a copy within the host goes through the device at
// once: 2 MiB take about 40 us each way, enqueueing a copy 3.
const bounceSize = 2 << 20

// copyHost copies through the device; the caller is between begin and end.
func (s *Stream) copyHost(call string, dst, src driver.Ptr, n int) error {
	if s.bounce == 0 {
		p, err := s.v.takeBounce(call, s.h)
		if err != nil {
			return err
		}
		s.bounce = p
	}
	for n > 0 {
		k := min(n, bounceSize)
		if r := s.v.d.api.MemcpyAsync(s.h, s.bounce, src, k); r != Success {
			return s.v.fail(call, "cuMemcpyAsync", r)
		}
		if r := s.v.d.api.MemcpyAsync(s.h, dst, s.bounce, k); r != Success {
			return s.v.fail(call, "cuMemcpyAsync", r)
		}
		dst, src, n = dst+driver.Ptr(k), src+driver.Ptr(k), n-k
	}
	return nil
}

// bounce is a buffer that a stream had until an event.
type bounce struct {
	p    driver.Ptr
	last EventHandle
}

// takeBounce returns a buffer for a stream, whose later work comes after what
// another stream did with it. The caller is between begin and end.
func (v *Device) takeBounce(call string, s StreamHandle) (driver.Ptr, error) {
	v.spare.Lock()
	defer v.spare.Unlock()
	if n := len(v.bounces); n > 0 {
		b := v.bounces[n-1]
		if r := v.d.api.StreamWaitEvent(s, b.last); r != Success {
			return 0, v.fail(call, "cuStreamWaitEvent", r)
		}
		v.bounces = v.bounces[:n-1]
		v.d.api.EventDestroy(b.last)
		return b.p, nil
	}
	p, r := v.d.api.MemAlloc(bounceSize)
	if r != Success {
		return 0, v.fail(call, "cuMemAlloc", r)
	}
	v.buffers = append(v.buffers, p)
	return p, nil
}

// putBounce keeps a stream's buffer for others. After an error nobody gets it.
func (v *Device) putBounce(call string, s StreamHandle, p driver.Ptr) error {
	e, r := v.d.api.EventCreate(eventDisableTiming)
	if r != Success {
		return v.fail(call, "cuEventCreate", r)
	}
	if r := v.d.api.EventRecord(e, s); r != Success {
		v.d.api.EventDestroy(e)
		return v.fail(call, "cuEventRecord", r)
	}
	v.spare.Lock()
	v.bounces = append(v.bounces, bounce{p, e})
	v.spare.Unlock()
	return nil
}

// freeBounces gives the buffers back, also those that streams still have.
func (v *Device) freeBounces() (err error) {
	v.spare.Lock()
	defer v.spare.Unlock()
	if len(v.buffers) == 0 {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail("Close", "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	for _, b := range v.bounces {
		v.d.api.EventDestroy(b.last)
	}
	for _, p := range v.buffers {
		err = errors.Join(err, v.fail("Close", "cuMemFree", v.d.api.MemFree(p)))
	}
	v.bounces, v.buffers = nil, nil
	return err
}

// Memset sets bytes.
func (s *Stream) Memset(dst driver.Ptr, value byte, n int) error {
	const call = "Memset"
	if err := driver.CheckMemset(s.v.index, dst, n); err != nil || n == 0 {
		return err
	}
	if _, err := s.where(call, dst, n); err != nil {
		return err
	}
	before, err := s.begin(call, memset)
	if err != nil {
		return err
	}
	defer s.end(before)
	return s.v.fail(call, "cuMemsetD8Async", s.v.d.api.MemsetAsync(s.h, dst, value, n))
}

// word checks the address of a word.
func (s *Stream) word(call string, p driver.Ptr, own bool) error {
	at, err := s.where(call, p, 4)
	switch {
	case err != nil:
		return err
	case own && at.device >= 0 && at.device != s.v.index:
		return invalid(call, s.v.index, "the word at %v is in %v", p, at)
	case !s.v.reaches(at.device):
		return &driver.Error{Call: call, Device: s.v.index, Err: fmt.Errorf(
			"%w: the word at %v is in %v and needs EnablePeer(%d)", driver.ErrPeerAccess, p, at, at.device)}
	case !s.v.info.StreamValues:
		return &driver.Error{Call: call, Device: s.v.index, Err: fmt.Errorf("%w: streams of this device have no values", errors.ErrUnsupported)}
	}
	return nil
}

// WaitValue holds the stream until a word has a value. The conditions' numbers
// are CUDA's.
func (s *Stream) WaitValue(p driver.Ptr, v uint32, c driver.Condition) error {
	const call = "WaitValue"
	if err := driver.CheckWord(call, s.v.index, p, c); err != nil {
		return err
	}
	if err := s.word(call, p, true); err != nil {
		return err
	}
	before, err := s.begin(call, waitValue)
	if err != nil {
		return err
	}
	defer s.end(before)
	return s.v.fail(call, "cuStreamWaitValue32", s.v.d.api.StreamWaitValue(s.h, p, v, uint32(c)))
}

// WriteValue writes a word.
func (s *Stream) WriteValue(p driver.Ptr, v uint32) error {
	const call = "WriteValue"
	if err := driver.CheckWord(call, s.v.index, p, driver.AtLeast); err != nil {
		return err
	}
	if err := s.word(call, p, false); err != nil {
		return err
	}
	before, err := s.begin(call, writeValue)
	if err != nil {
		return err
	}
	defer s.end(before)
	return s.v.fail(call, "cuStreamWriteValue32", s.v.d.api.StreamWriteValue(s.h, p, v))
}

// Launch runs a kernel.
func (s *Stream) Launch(l *driver.Launch) error {
	const call = "Launch"
	if err := driver.CheckLaunch(s.v.index, l); err != nil {
		return err
	}
	f, ok := l.Function.(*Function)
	if !ok || f.m.v != s.v {
		return invalid(call, s.v.index, "%s is of another driver", l.Function.Name())
	}
	if err := f.check(l); err != nil {
		return err
	}
	before, err := s.begin(call, launch)
	if err != nil {
		return err
	}
	defer s.end(before)
	if r := s.v.d.api.Launch(s.h, f.h, l); r != Success {
		function := "cuLaunchKernel"
		if l.Cooperative {
			function = "cuLaunchCooperativeKernel"
		}
		return s.v.failed(call, function, r, f.name)
	}
	return nil
}

// Record returns a new event.
func (s *Stream) Record() (driver.Event, error) {
	const call = "Record"
	before, err := s.begin(call, recordEvent)
	if err != nil {
		return nil, err
	}
	defer s.end(before)
	e, err := s.v.events.take(s.v, call)
	if err != nil {
		return nil, err
	}
	if r := s.v.d.api.EventRecord(e.h, s.h); r != Success {
		s.v.events.put(e)
		return nil, s.v.fail(call, "cuEventRecord", r)
	}
	if e.captured, err = s.captured(call); err != nil {
		s.v.events.put(e)
		return nil, err
	}
	return e, nil
}

// Wait makes the stream wait for an event.
func (s *Stream) Wait(ev driver.Event) error {
	const call = "Wait"
	e, ok := ev.(*Event)
	if !ok || e == nil || e.v.d != s.v.d {
		return invalid(call, s.v.index, "the event is of another driver")
	}
	if e.released.Load() {
		return closedError(call, s.v.index, "event was released")
	}
	if e.captured && s.v.d.captures.Load() == 0 && !s.v.d.foreign.Load() {
		return refuse(call, s.v.index, "the event is of a capture that has ended; record another one after Graph.Launch")
	}
	before, err := s.begin(call, waitEvent)
	if err != nil {
		return err
	}
	defer s.end(before)
	return s.v.fail(call, "cuStreamWaitEvent", s.v.d.api.StreamWaitEvent(s.h, e.h))
}

// Err returns what broke the device. It does not wait for a call of another goroutine, which may last
// until the goroutine that asks does something. That call will tell.
func (s *Stream) Err() error {
	const call = "Stream"
	if s.v.lost.Load() != nil {
		return s.v.alive(call)
	}
	if !s.mu.TryLock() {
		return nil
	}
	before, err := s.locked(call, none)
	if err != nil {
		return nil
	}
	defer s.end(before)
	if on, err := s.captured(call); on || err != nil {
		return err // to ask CUDA would end the capture
	}
	if r := s.v.d.api.StreamQuery(s.h); r != errNotReady {
		return s.v.fail(call, "cuStreamQuery", r)
	}
	return nil
}

// Close gives the stream back; what it was given still runs.
func (s *Stream) Close() error {
	const call = "Close"
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	v := s.v
	if !s.borrowed {
		v.streams.Add(-1)
		v.d.forget(s)
	}
	if v.lost.Load() != nil || s.borrowed && s.bounce == 0 && !s.capturing || !v.ready.Load() {
		return nil
	}
	before, r := v.enter()
	if r != Success {
		return v.fail(call, "cuCtxSetCurrent", r)
	}
	defer v.leave(before)
	var err error
	if s.capturing {
		if g, r := s.stopCapture(); r == Success {
			v.d.api.GraphDestroy(g)
		}
	}
	if s.bounce != 0 {
		err = v.putBounce(call, s.h, s.bounce)
	}
	if s.borrowed {
		return err
	}
	return errors.Join(err, v.fail(call, "cuStreamDestroy", v.d.api.StreamDestroy(s.h)))
}

var _ driver.Stream = (*Stream)(nil)
