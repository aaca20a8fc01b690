package edges

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Tracker orders the operations of a set of streams by what they do to memory.
// Its methods may be called from many goroutines; batches are enqueued one after
// the other.
//
// Run blocks in the driver while a stream is full. Another Run, Host, Forget and Close
// wait for it. Batch, GiveUp and the methods of Pending do not.
//
// Streams with operations of a batch must stay open until Forget or the tracker's Close. Streams
// that only occur in Before and After need not.
type Tracker struct {
	d driver.Driver

	// Trace, if not nil, is told each edge that a batch gets. Set it before the
	// first batch.
	Trace func(Edge)

	// order is held while a batch is planned and enqueued. It guards the lanes, what
	// they have done, and the words.
	order  sync.Mutex
	lanes  []*lane // in use; a lane's id is its index
	torn   bool    // a batch was not enqueued as a whole: see lane.torn
	spare  []*lane // not in use: newLane takes these first, which have words
	hist   history
	trimAt int
	words  []driver.HostMemory
	next   int // word of the last of words

	// mu is never held during a call of the driver. Who holds order may take it.
	mu      sync.Mutex
	closed  bool // also written under order, so that either lock will do to read it
	batches []*Batch
	pending []*Pending
	marks   []Mark              // not in use
	marked  []driver.HostMemory // their words
	readers []driver.Event      // of streams of others that were given a wait for a word

	aborts sync.WaitGroup // those that end the turns of aborted batches
	quit   chan struct{}
	once   sync.Once // closes quit
}

// Edge is an order that a batch was given.
type Edge struct {
	From, To   int    // operations of the batch by number; From is -1 for one of an earlier batch
	FromOn, On string // their streams or hosts
	Host       bool   // through a word, not through an event
}

// lane is a stream, or a host, as the tracker knows it.
type lane struct {
	id       int
	stream   driver.Stream // nil for a host
	host     *Host
	name     string        // of a host
	index    uint64        // operations so far
	finished atomic.Uint64 // operations that are known to have ended
	clock    []uint64      // by lane: the operation that this lane's next one is ordered after
	torn     uint64        // what comes later on other lanes comes after this operation, whatever it uses
	foreign  bool          // it is the batch's only for Before and After
	word     driver.HostMemory
	offset   int
	signals  uint32 // values that the word was or will be given, one after the other

	// Of a host: turns end in order.
	turns sync.Mutex
	ended uint32
	early []uint32

	// Of the batch that is being made.
	base   uint64
	before int     // of Batch.tails, if it has operations
	signal uint32  // signals when the batch began, or of the tail
	ops    []int32 // the batch's operations on this lane
	tail   driver.Event
	tails  int  // waits for tail that are still to come
	tailed bool // the word was written for the tail
	calls  int  // that the stream was given
}

// New returns a tracker for streams of d.
func New(d driver.Driver) *Tracker {
	return &Tracker{d: d, trimAt: 64, quit: make(chan struct{})}
}

// Host is a line of host work: one goroutine at a time that takes its turns in
// the order in which batches gave them.
type Host struct {
	t *Tracker
	l *lane
}

// Host returns a new line of host work. The name shows in errors.
func (t *Tracker) Host(name string) (*Host, error) {
	t.order.Lock()
	defer t.order.Unlock()
	if t.closed {
		return nil, errClosed()
	}
	h := &Host{t: t}
	h.l = t.newLane(nil, name)
	h.l.host = h
	if err := t.needWord(h.l); err != nil {
		t.forget(h.l)
		return nil, err
	}
	return h, nil
}

// Close forgets the host, all of whose turns have ended.
func (h *Host) Close() {
	h.t.order.Lock()
	defer h.t.order.Unlock()
	if h.l != nil && !h.t.closed {
		h.t.forget(h.l)
	}
	h.l = nil
}

func errClosed() error {
	return &driver.Error{Call: "Tracker", Device: -1, Err: driver.ErrClosed}
}

// wordSize keeps words in lines of their own; manyWords is how many of them are allocated together.
const (
	wordSize  = 64
	manyWords = 64
)

// needWord gives a lane a word, if it has none.
func (t *Tracker) needWord(l *lane) error {
	if l.word != nil {
		return nil
	}
	if len(t.words) == 0 || t.next == manyWords {
		h, err := t.d.AllocHost(manyWords * wordSize)
		if err != nil {
			return err
		}
		t.words = append(t.words, h)
		t.next = 0
	}
	l.word, l.offset = t.words[len(t.words)-1], t.next*wordSize
	t.next++
	return nil
}

// record and write give a lane's stream an event and the next value of its word.
func (l *lane) record() (driver.Event, error) {
	l.calls++
	return l.stream.Record()
}

func (l *lane) write() error {
	l.calls++
	if err := l.stream.WriteValue(l.wordPtr(), l.signals+1); err != nil {
		return err
	}
	l.signals++
	return nil
}

// end ends a host's turn, or notes that it has ended before an earlier one.
func (l *lane) end(signal uint32) {
	l.turns.Lock()
	defer l.turns.Unlock()
	if int32(signal-l.ended) <= 0 || slices.Contains(l.early, signal) {
		return
	}
	l.early = append(l.early, signal)
	for {
		i := slices.Index(l.early, l.ended+1)
		if i < 0 {
			break
		}
		l.early = slices.Delete(l.early, i, i+1)
		l.ended++
	}
	l.word.Store32(l.offset, l.ended)
}

// hasEnded reports whether a host's turn, and all before it, have ended.
func (l *lane) hasEnded(signal uint32) bool {
	l.turns.Lock()
	defer l.turns.Unlock()
	return int32(signal-l.ended) <= 0
}

func (l *lane) wordPtr() driver.Ptr { return l.word.Ptr() + driver.Ptr(l.offset) }

// finish notes that the lane's operations have ended up to one.
func (l *lane) finish(index uint64) {
	for {
		n := l.finished.Load()
		if index <= n || l.finished.CompareAndSwap(n, index) {
			return
		}
	}
}

// open reports whether what others come after when a batch was torn has not ended.
func (l *lane) open() bool { return l.torn > l.finished.Load() }

// newLane returns a lane. The caller holds t.order.
func (t *Tracker) newLane(s driver.Stream, name string) *lane {
	var l *lane
	if n := len(t.spare); n > 0 {
		l = t.spare[n-1]
		t.spare = t.spare[:n-1]
	} else {
		l = &lane{}
	}
	l.id = len(t.lanes)
	for _, o := range t.lanes {
		o.clock = append(o.clock, l.index)
	}
	t.lanes = append(t.lanes, l)
	l.clock = slices.Grow(l.clock[:0], len(t.lanes))[:len(t.lanes)]
	clear(l.clock)
	l.stream, l.name, l.host, l.foreign, l.torn = s, name, nil, false, 0
	l.finish(l.index)
	l.turns.Lock()
	l.ended = l.signals
	l.turns.Unlock()
	return l
}

// forget gives a lane back: its operations have ended, or nobody asks for them any more. The last
// lane takes its place, so that batches cost nothing for lanes that are gone. The caller holds
// t.order.
func (t *Tracker) forget(l *lane) {
	if !l.foreign {
		t.hist.drop(func(u use) bool { return u.lane == l.id })
	}
	n := len(t.lanes) - 1
	if last := t.lanes[n]; last != l {
		t.hist.each(func(u *use) {
			if u.lane == last.id {
				u.lane = l.id
			}
		})
		for _, o := range t.lanes {
			o.clock[l.id] = o.clock[last.id]
		}
		last.id = l.id
		t.lanes[l.id] = last
	}
	t.lanes[n] = nil
	t.lanes = t.lanes[:n]
	for _, o := range t.lanes {
		o.clock = o.clock[:n]
	}
	l.stream, l.host = nil, nil
	l.turns.Lock()
	if l.word != nil && l.ended != l.signals {
		// Turns of a batch that failed. Abort may come later than the lane's next turn.
		l.ended = l.signals
		l.word.Store32(l.offset, l.ended)
	}
	l.turns.Unlock()
	t.spare = append(t.spare, l)
}

// laneOf returns the lane of a stream, a new one if it is not known.
func (t *Tracker) laneOf(s driver.Stream) *lane {
	for _, l := range t.lanes {
		if l.stream != nil && Same(l.stream, s) {
			return l
		}
	}
	l := t.newLane(s, "")
	l.foreign = true
	return l
}

// Same reports whether two streams are one queue: a borrowed stream and the
// stream itself are.
func Same(a, b driver.Stream) bool {
	return a == b || a.Handle() != 0 && a.Handle() == b.Handle() && a.Device() == b.Device()
}

// Forget makes the tracker forget a stream, which has ended all that batches gave
// it. It may then be closed.
func (t *Tracker) Forget(s driver.Stream) {
	t.order.Lock()
	defer t.order.Unlock()
	for _, l := range t.lanes {
		if l.stream != nil && Same(l.stream, s) {
			t.forget(l)
			return
		}
	}
}

// GiveUp ends the turns of aborted batches that are left, whatever they come after. Streams that
// wait for them go on. Batches that are aborted later end their turns at once.
func (t *Tracker) GiveUp() {
	t.once.Do(func() { close(t.quit) })
	t.aborts.Wait()
}

// await has a stream of somebody else wait for a word, whose memory stays until the stream has gone on.
func (t *Tracker) await(s driver.Stream, word driver.Ptr, v uint32) error {
	if err := s.WaitValue(word, v, driver.AtLeast); err != nil {
		return err
	}
	e, err := s.Record()
	if err != nil {
		return err
	}
	t.reads(e)
	return nil
}

// reads notes that a stream of somebody else reads a word until e has passed.
func (t *Tracker) reads(e driver.Event) {
	t.mu.Lock()
	all := t.readers
	t.readers = nil
	t.mu.Unlock()
	for len(all) > 0 { // the oldest pass first, mostly
		if done, err := all[0].Done(); !done && err == nil {
			break
		}
		all[0].Release()
		all = all[1:]
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.readers = append(append(all, e), t.readers...)
}

// Drain waits until the streams that Order made wait for a Claim's turn or for a Mark have gone on, or
// ctx ends. All turns and marks must have ended.
func (t *Tracker) Drain(ctx context.Context) error {
	t.mu.Lock()
	all := t.readers
	t.readers = nil
	t.mu.Unlock()
	for i, e := range all {
		if err := e.Sync(ctx); err != nil && ctx.Err() != nil {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.readers = append(t.readers, all[i:]...)
			return fmt.Errorf("edges: %d streams have not gone on after a turn that has ended: %w", len(all)-i, err)
		}
		e.Release()
	}
	return nil
}

// Close frees the tracker's words. Batches must have ended. Words that Drain has not
// seen the end of stay. It may be called more than once.
func (t *Tracker) Close() error {
	t.GiveUp()
	t.order.Lock()
	defer t.order.Unlock()
	t.mu.Lock()
	t.closed = true
	inUse := len(t.readers) > 0
	words := append(t.words, t.marked...)
	t.marks, t.marked = nil, nil
	t.mu.Unlock()
	if inUse {
		words = nil
	}
	var err error
	for _, h := range words {
		if e := h.Close(); err == nil {
			err = e
		}
	}
	t.words, t.lanes, t.spare, t.hist = nil, nil, nil, history{}
	return err
}

// trim forgets what has ended, when the history has grown.
func (t *Tracker) trim() {
	if t.hist.n < t.trimAt {
		return
	}
	t.hist.drop(func(u use) bool { return u.index <= t.lanes[u.lane].finished.Load() })
	t.trimAt = max(64, 2*t.hist.n)
}

func (l *lane) String() string {
	if l.stream == nil {
		return l.name
	}
	return streamName(l.stream, l.id)
}

func streamName(s driver.Stream, id int) string {
	if n, ok := s.(interface{ Name() string }); ok {
		return n.Name()
	}
	return fmt.Sprintf("stream %d of %v", id, s.Device())
}
