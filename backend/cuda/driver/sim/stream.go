package sim

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/tensor"
)

type opKind uint8

const (
	opCopy opKind = iota + 1
	opMemset
	opLaunch
	opRecord
	opWait
	opWaitValue
	opWriteValue
	opHost  // a host's own access
	opAlloc // never runs: it remembers where memory came from
	opFree
	opGraph // never runs: a launch of a graph that a capture refuses
	opEnd   // the stream's goroutine ends
)

// op is one operation of a stream, or something that a host did.
type op struct {
	kind  opKind
	name  string // of a kernel, or what a host did
	s     *stream
	n     uint64 // number of the operation on its stream, from 1
	host  clock  // what the host had seen when it enqueued
	spans []span
	only  *Driver // the process that something is freed for, nil for all

	fill   byte
	value  uint32
	cond   driver.Condition
	rec    *record
	raw    *RawEvent
	launch *launch
	after  <-chan struct{} // the end of the operation before in the hardware queue; nil if there is none
	ended  chan struct{}   // closed at the end; nil without such queues

	pcs [8]uintptr
}

// where remembers who called the driver.
func (o *op) where() { runtime.Callers(3, o.pcs[:]) }

const module = "github.com/c10d-go/c10d/"

// caller returns where the driver was called from, outside of the packages that
// only pass calls on.
func (o *op) caller() string {
	if o == nil || o.pcs[0] == 0 {
		return "somewhere"
	}
	n := 0
	for n < len(o.pcs) && o.pcs[n] != 0 {
		n++
	}
	frames := runtime.CallersFrames(o.pcs[:n])
	first := ""
	for {
		f, more := frames.Next()
		at := fmt.Sprintf("%s:%d", filepath.Join(filepath.Base(filepath.Dir(f.File)), filepath.Base(f.File)), f.Line)
		if first == "" {
			first = at
		}
		inside := strings.HasPrefix(f.Function, module+"backend/cuda/driver/sim.") ||
			strings.HasPrefix(f.Function, module+"backend/cuda/driver/edges.")
		if !inside || strings.HasSuffix(f.File, "_test.go") {
			return at
		}
		if !more {
			return first
		}
	}
}

// String describes the operation without saying where it is.
func (o *op) String() string {
	place := func(s span) string {
		where := "page-locked memory"
		if s.device >= 0 {
			where = fmt.Sprintf("device %d", s.device)
		}
		return fmt.Sprintf("%v of %s", s.ptr, where)
	}
	switch o.kind {
	case opCopy:
		return fmt.Sprintf("Copy of %d bytes from %s to %s", o.spans[0].len, place(o.spans[1]), place(o.spans[0]))
	case opMemset:
		return fmt.Sprintf("Memset of %d bytes at %s", o.spans[0].len, place(o.spans[0]))
	case opLaunch:
		return "Launch of " + o.name
	case opRecord:
		return "Record"
	case opWait:
		return "Wait"
	case opWaitValue:
		return fmt.Sprintf("WaitValue %v %d at %s", o.cond, o.value, place(o.spans[0]))
	case opWriteValue:
		return fmt.Sprintf("WriteValue %d at %s", o.value, place(o.spans[0]))
	}
	return o.name
}

// full describes the operation with its stream and where it came from.
func (o *op) full() string {
	if o.s == nil {
		return fmt.Sprintf("%s (host, %s)", o, o.caller())
	}
	return fmt.Sprintf("%s (operation %d of stream %s, %s)", o, o.n, o.s.ag.name, o.caller())
}

// node is one place in a stream's queue. The list goes one way. The stream's operations are not
// ordered before the next ones of the host, and Go's race detector must not believe so.
type node struct {
	op   *op
	next *node
	more chan struct{} // closed when next is set
}

// stream is a queue and the goroutine that works it off.
type stream struct {
	d      *Driver
	dev    *Device
	ag     *agent
	handle uintptr
	made   *op
	queue  int // of dev.queues

	tail   *node    // guarded by d.mu
	closed bool     // guarded by d.mu
	cap    *capture // that the stream is part of; guarded by d.mu
	enq    atomic.Uint64

	done    atomic.Uint64 // operations that have ended
	ticks   atomic.Uint32 // steps that have ended
	blocked atomic.Pointer[block]

	// The goroutine's own.
	clock clock
	tick  uint32
	rng   *rand.Rand
}

// block is what a stream waits for.
type block struct {
	op   *op
	rec  *record
	word *span
	cond driver.Condition
	v    uint32
}

// over reports whether the wait could end now.
func (b *block) over() bool {
	if b.word != nil {
		return b.cond.Holds(driver.LoadWord(b.word.b.bytes, b.word.off), b.v)
	}
	select {
	case <-b.rec.done:
		return true
	default:
		return false
	}
}

// foreign reports whether another process may end the wait.
func (b *block) foreign() bool { return b.word != nil }

func (b *block) describe(s *stream) string {
	who := fmt.Sprintf("stream %s at operation %d of %d (%s, %s) waits for ", s.ag.name, b.op.n, s.enq.Load(), b.op, b.op.caller())
	if b.word != nil {
		return who + fmt.Sprintf("a word that is %d", driver.LoadWord(b.word.b.bytes, b.word.off))
	}
	return who + fmt.Sprintf("operation %d of stream %s", b.rec.n, b.rec.s.ag.name)
}

// Stream is a driver.Stream whose operations a goroutine carries out.
type Stream struct {
	s        *stream
	borrowed bool
	closed   atomic.Bool
}

// NewStream returns a stream.
func (v *Device) NewStream(o ...driver.StreamOptions) (driver.Stream, error) {
	if err := v.enter("NewStream"); err != nil {
		return nil, err
	}
	made := &op{kind: opAlloc, name: "NewStream"}
	made.where()
	d := v.d
	s := v.newStream(option.Last(o).Name, made)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nextHandle += 16
	s.handle = d.nextHandle
	d.byHandle[s.handle] = s
	d.stats.Streams++
	d.stats.MadeStreams++
	return &Stream{s: s}, nil
}

// newStream starts a stream without a handle.
func (v *Device) newStream(name string, made *op) *stream {
	d, m := v.d, v.d.m
	s := &stream{d: d, dev: v, made: made, tail: &node{more: make(chan struct{})}}
	m.mu.Lock()
	if name == "" {
		name = fmt.Sprintf("%d of device %d", len(*m.agents.Load()), v.index)
	}
	if d.name != "" {
		name = d.name + "/" + name
	}
	s.ag = m.newAgent(name, d, s)
	m.mu.Unlock()
	s.rng = rand.New(rand.NewPCG(m.cfg.Seed, uint64(s.ag.id)))
	d.mu.Lock()
	for old := range d.streams {
		if old.closed && old.done.Load() == old.enq.Load() {
			d.retired = d.retired.join(old.clock.with(old.ag.id, old.tick))
			delete(d.streams, old)
		}
	}
	d.streams[s] = true
	if n := d.m.cfg.Queues; n > 0 {
		v.queues = slices.Grow(v.queues, n)[:n]
		s.queue = v.made % n
		v.made++
	}
	first := s.tail
	d.mu.Unlock()
	d.group.Go(func() { s.loop(first) })
	return s
}

// end has the stream's goroutine end after what the stream was given; the caller holds d.mu.
func (s *stream) end() {
	if !s.closed && !s.d.done {
		s.closed = true
		s.push(&op{kind: opEnd})
	}
}

// BorrowStream returns a stream of the device by its handle.
func (v *Device) BorrowStream(handle uintptr) (driver.Stream, error) {
	const call = "BorrowStream"
	if err := v.enter(call); err != nil {
		return nil, err
	}
	v.d.mu.Lock()
	defer v.d.mu.Unlock()
	s := v.d.byHandle[handle]
	if s == nil || s.dev != v {
		return nil, invalid(call, v.index, "no stream %#x", handle)
	}
	return &Stream{s: s, borrowed: true}, nil
}

// Device returns the stream's device.
func (s *Stream) Device() tensor.Device { return s.s.dev.ID() }

// Handle returns a number that BorrowStream takes.
func (s *Stream) Handle() uintptr { return s.s.handle }

// Name returns the name that reports use.
func (s *Stream) Name() string { return s.s.ag.name }

// Err returns what broke the device.
func (s *Stream) Err() error { return s.s.dev.broken("Stream") }

// Close gives the stream back; what it was given still runs.
func (s *Stream) Close() error {
	if s.closed.Swap(true) || s.borrowed {
		return nil
	}
	d := s.s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if !s.s.closed && !d.done {
		delete(d.byHandle, s.s.handle)
		d.stats.Streams--
	}
	if c := s.s.cap; c != nil {
		c.fail("stream " + s.s.ag.name + " was closed")
		if c.lanes[0] == s.s {
			c.end()
		}
	}
	s.s.end()
	return nil
}

// push appends to the queue; the caller holds d.mu.
func (s *stream) push(o *op) {
	if o.kind != opEnd {
		o.s = s
		o.n = s.enq.Load() + 1
		o.host = s.d.publish()
		if o.kind == opRecord {
			o.rec.n = o.n
		}
		s.enq.Store(o.n)
		if q := s.dev.queues; q != nil {
			o.after, o.ended = q[s.queue], make(chan struct{})
			q[s.queue] = o.ended
		}
		s.d.stats.Operations++
		s.d.stats.Deepest = max(s.d.stats.Deepest, int(o.n-s.done.Load()))
	}
	n := &node{op: o, more: make(chan struct{})}
	last := s.tail
	s.tail = n
	last.next = n
	close(last.more)
}

// enter begins a call that enqueues.
func (s *Stream) enter(call string) (skip bool, err error) {
	c := s.s
	if s.closed.Load() {
		return false, &driver.Error{Call: call, Device: c.dev.index, Err: driver.ErrClosed}
	}
	skip, err = c.d.enter(call, c.dev.index, c)
	if err == nil {
		err = c.dev.broken(call)
	}
	return skip, err
}

// enqueue resolves what o uses and appends it. A kernel must be able to reach
// it.
func (s *Stream) enqueue(call string, o *op, kernel bool, access ...driver.Access) error {
	if err := s.add(call, o, kernel, access...); err != nil {
		return err
	}
	c := s.s
	if f := c.d.m.cfg.Blocking; f != nil && f(Call{Name: call, Device: c.dev.index, Stream: c.ag.name}) {
		c.drain(o)
	}
	return nil
}

// drain blocks until the stream has done an operation that it was given. The host has not seen that.
func (s *stream) drain(o *op) {
	for s.done.Load() < o.n {
		select {
		case <-s.d.abort:
			return
		case <-time.After(50 * time.Microsecond):
		}
	}
}

func (s *Stream) add(call string, o *op, kernel bool, access ...driver.Access) error {
	c := s.s
	skip, err := s.enter(call)
	if err != nil {
		return err
	}
	runtime.Callers(4, o.pcs[:])
	on := -1
	if kernel {
		on = c.dev.index
	}
	c.d.mu.Lock()
	defer c.d.mu.Unlock()
	if c.closed || c.d.done {
		return &driver.Error{Call: call, Device: c.dev.index, Err: driver.ErrClosed}
	}
	if o.spans, err = c.d.resolve(call, on, access); err != nil {
		return err
	}
	switch {
	case c.captures(o):
		if err := c.capture(call, o, skip); err != nil {
			return err
		}
	case !skip:
		c.push(o)
	case o.kind == opRecord:
		close(o.rec.done)
	}
	switch o.kind {
	case opCopy:
		if from := o.spans[1].device; o.spans[0].device == c.dev.index && from >= 0 && from != c.dev.index {
			c.d.stats.Fetches++
		}
	case opRecord:
		c.d.stats.Records++
	case opWait:
		c.d.stats.Waits++
	}
	return nil
}

// Copy copies bytes.
func (s *Stream) Copy(dst, src driver.Ptr, n int) error {
	if err := driver.CheckCopy(s.s.dev.index, dst, src, n); err != nil || n == 0 {
		return err
	}
	return s.enqueue("Copy", &op{kind: opCopy}, false, driver.Writes(dst, n), driver.Reads(src, n))
}

// Memset sets bytes.
func (s *Stream) Memset(dst driver.Ptr, value byte, n int) error {
	if err := driver.CheckMemset(s.s.dev.index, dst, n); err != nil || n == 0 {
		return err
	}
	return s.enqueue("Memset", &op{kind: opMemset, fill: value}, false, driver.Writes(dst, n))
}

// WaitValue holds the stream until a word has a value.
func (s *Stream) WaitValue(p driver.Ptr, v uint32, c driver.Condition) error {
	const call = "WaitValue"
	if err := driver.CheckWord(call, s.s.dev.index, p, c); err != nil {
		return err
	}
	o := &op{kind: opWaitValue, value: v, cond: c}
	return s.enqueue(call, o, true, driver.Shares(p, 4))
}

// WriteValue writes a word.
func (s *Stream) WriteValue(p driver.Ptr, v uint32) error {
	const call = "WriteValue"
	if err := driver.CheckWord(call, s.s.dev.index, p, driver.AtLeast); err != nil {
		return err
	}
	return s.enqueue(call, &op{kind: opWriteValue, value: v}, true, driver.Shares(p, 4))
}

// loop carries out the operations.
func (s *stream) loop(at *node) {
	for {
		<-at.more
		at = at.next
		o := at.op
		at.op = nil
		if o.kind == opEnd {
			return
		}
		if o.after != nil {
			select {
			case <-o.after:
			case <-s.d.abort:
			case <-s.dev.gone:
			}
		}
		s.delay()
		s.run(o)
		s.delay()
		s.done.Store(s.done.Load() + 1)
		if o.ended != nil {
			close(o.ended)
		}
	}
}

// delay lets others go first, by the seed.
func (s *stream) delay() {
	if s.d.m.cfg.NoDelays {
		return
	}
	switch s.rng.IntN(8) {
	case 4, 5:
		runtime.Gosched()
	case 6:
		time.Sleep(time.Duration(1+s.rng.IntN(30)) * time.Microsecond)
	case 7:
		time.Sleep(time.Duration(1+s.rng.IntN(200)) * time.Microsecond)
	}
}

// stopped reports whether operations no longer run: the device is lost or the
// process ends.
func (s *stream) stopped() error {
	select {
	case <-s.d.abort:
		return driver.ErrClosed
	default:
		return s.dev.broken("Stream")
	}
}

// step begins a step of the stream's clock and logs it.
func (s *stream) step(o *op, spans []span) {
	s.tick++
	s.log(o, spans)
	s.ticks.Store(s.tick)
}

func (s *stream) log(o *op, spans []span) {
	if s.d.m.checker.m != nil {
		s.ag.add(&entry{op: o, tick: s.tick, clock: s.clock, spans: spans})
	}
}

// now returns the clock with the current step.
func (s *stream) now() clock { return s.clock.with(s.ag.id, s.tick) }

// run carries out one operation.
func (s *stream) run(o *op) {
	s.clock = s.clock.join(o.host)
	if err := s.stopped(); err != nil {
		if o.kind == opRecord {
			o.rec.end(nil, err)
		}
		return
	}
	if o.kind != opWaitValue && o.kind != opWriteValue {
		for _, sp := range o.spans {
			if by := sp.b.freed.Load(); by != nil {
				s.d.m.findings.add(&Lifetime{What: fmt.Sprintf("%s uses %v, which was freed", o.full(), sp.ptr), Where: by.caller()})
				return
			}
		}
	}
	switch o.kind {
	case opCopy:
		s.step(o, o.spans)
		if !s.loses(o.spans[0]) {
			s.copy(o.spans[0].bytes(), o.spans[1].bytes())
		}
	case opMemset:
		s.step(o, o.spans)
		if !s.loses(o.spans[0]) {
			s.d.m.fill(o.spans[0].bytes(), o.fill)
		}
	case opLaunch:
		s.step(o, nil)
		s.launch(o)
	case opRecord:
		s.step(o, nil)
		o.rec.end(s.now(), nil)
	case opWait:
		if o.raw != nil { // late binding
			o.raw.wait(s, o)
		} else {
			s.await(o, o.rec)
		}
		s.step(o, nil)
	case opWaitValue:
		s.awaitWord(o, &o.spans[0], o.value, o.cond, 0)
		s.step(o, o.spans)
	case opWriteValue:
		s.step(o, o.spans)
		o.spans[0].b.store(o.spans[0].off, o.value, s.now())
	}
}

// loses reports whether what the stream writes somewhere is lost.
func (s *stream) loses(to span) bool {
	lost := s.d.m.topo.Loses
	on := to.b.device // a mapping's is the one it was opened for
	return lost != nil && on >= 0 && on != s.dev.index && lost(s.dev.index, on)
}

// copy copies in pieces, so that an early reader sees torn data.
func (s *stream) copy(dst, src []byte) {
	pieces := 1
	if !s.d.m.cfg.NoDelays && len(dst) >= 64 {
		pieces += s.rng.IntN(4)
	}
	each := (len(dst) + pieces - 1) / pieces
	for at := 0; at < len(dst); at += each {
		if at > 0 {
			runtime.Gosched()
		}
		end := min(at+each, len(dst))
		s.d.m.copy(dst[at:end], src[at:end])
	}
}

// await blocks the stream until an event has passed.
func (s *stream) await(o *op, r *record) {
	select {
	case <-r.done:
	default:
		s.blocked.Store(&block{op: o, rec: r})
		select {
		case <-r.done:
		case <-s.d.abort:
		case <-s.dev.gone:
		}
		s.blocked.Store(nil)
	}
	select {
	case <-r.done:
		s.clock = s.clock.join(r.clock)
	default:
	}
}

// awaitWord blocks the stream until a word fulfils a condition. It returns false if limit, unless it is 0, is over
// before.
func (s *stream) awaitWord(o *op, w *span, v uint32, cond driver.Condition, limit time.Duration) bool {
	defer s.blocked.Store(nil)
	since, pause := time.Now(), 5*time.Microsecond
	for i := 0; ; i++ {
		got, c := w.b.load(w.off)
		if cond.Holds(got, v) {
			if c == nil && s.d.m.cfg.Dir != "" {
				c = s.d.m.everything()
			}
			s.clock = s.clock.join(c)
			return true
		}
		if s.stopped() != nil {
			return true
		}
		if limit > 0 && time.Since(since) > limit {
			return false
		}
		if i == 0 {
			s.blocked.Store(&block{op: o, word: w, cond: cond, v: v})
		}
		if i < 100 {
			runtime.Gosched()
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, 500*time.Microsecond)
	}
}

var _ driver.Stream = (*Stream)(nil)
