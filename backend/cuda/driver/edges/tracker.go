package edges

import (
	"fmt"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Tracker orders the operations of a set of streams by what they do to memory.
// Its methods may be called from many goroutines; batches are enqueued one after
// the other.
//
// Streams that a batch gives operations to must stay open until Forget or the
// tracker's Close; those that only occur in Before and After need not.
type Tracker struct {
	d driver.Driver

	// Trace, if not nil, is told each edge that a batch gets. Set it before the
	// first batch.
	Trace func(Edge)

	mu      sync.Mutex
	closed  bool
	lanes   []*lane
	spare   []*lane // words that lanes have given back
	hist    history
	trimAt  int
	words   []driver.HostMemory
	next    int // word of the last of words
	batches []*Batch
	pending []*Pending

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
	name     string
	index    uint64   // operations so far
	finished uint64   // operations that are known to have ended
	clock    []uint64 // by lane: the operation that this lane's next one is ordered after
	foreign  bool     // it is the batch's only for Before and After
	word     driver.HostMemory
	offset   int
	signals  uint32 // values that the word was or will be given, one after the other

	// Of a host: turns end in order.
	turns sync.Mutex
	ended uint32
	early []uint32

	// Of the batch that is being made.
	base   uint64
	signal uint32  // signals when the batch began, or of the tail
	ops    []int32 // the batch's operations on this lane
	tail   driver.Event
	tails  int // waits for tail that are still to come
	inUse  bool
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
	t.mu.Lock()
	defer t.mu.Unlock()
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

func errClosed() error {
	return &driver.Error{Call: "Tracker", Device: -1, Err: driver.ErrClosed}
}

// wordSize keeps words in lines of their own.
const wordSize = 64

// needWord gives a lane a word, if it has none.
func (t *Tracker) needWord(l *lane) error {
	if l.word != nil {
		return nil
	}
	const words = 64
	if len(t.words) == 0 || t.next == words {
		h, err := t.d.AllocHost(words * wordSize)
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

// newLane returns a lane, the caller holds t.mu.
func (t *Tracker) newLane(s driver.Stream, name string) *lane {
	var l *lane
	if n := len(t.spare); n > 0 {
		l = t.spare[n-1]
		t.spare = t.spare[:n-1]
	} else {
		l = &lane{id: len(t.lanes)}
		t.lanes = append(t.lanes, l)
		for _, o := range t.lanes {
			for len(o.clock) < len(t.lanes) {
				o.clock = append(o.clock, 0)
			}
		}
	}
	l.stream, l.name, l.host, l.inUse, l.foreign = s, name, nil, true, false
	l.finished = l.index
	l.ended = l.signals
	clear(l.clock)
	return l
}

// forget gives a lane back: what it did has ended, or is nobody's business.
func (t *Tracker) forget(l *lane) {
	if !l.foreign {
		t.hist.drop(func(u use) bool { return u.lane == l.id })
	}
	for _, o := range t.lanes {
		o.clock[l.id] = l.index
	}
	l.inUse, l.stream, l.host = false, nil, nil
	t.spare = append(t.spare, l)
}

// laneOf returns the lane of a stream, a new one if it is not known.
func (t *Tracker) laneOf(s driver.Stream) *lane {
	for _, l := range t.lanes {
		if l.inUse && l.stream != nil && same(l.stream, s) {
			return l
		}
	}
	l := t.newLane(s, "")
	l.foreign = true
	return l
}

// same reports whether two streams are one queue: a borrowed stream and the
// stream itself are.
func same(a, b driver.Stream) bool {
	return a == b || a.Handle() != 0 && a.Handle() == b.Handle() && a.Device() == b.Device()
}

// Forget makes the tracker forget a stream, which has ended all that batches gave
// it. It may then be closed.
func (t *Tracker) Forget(s driver.Stream) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range t.lanes {
		if l.inUse && l.stream != nil && same(l.stream, s) {
			t.forget(l)
		}
	}
}

// GiveUp ends what is left of the turns of aborted batches, whatever they come after,
// for streams that would not go on otherwise. Batches that are aborted later end
// their turns at once.
func (t *Tracker) GiveUp() {
	t.once.Do(func() { close(t.quit) })
	t.aborts.Wait()
}

// Close frees the tracker's words. Batches must have ended. It may be called
// more than once.
func (t *Tracker) Close() error {
	t.GiveUp()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	var err error
	for _, h := range t.words {
		if e := h.Close(); err == nil {
			err = e
		}
	}
	t.words, t.lanes, t.spare, t.hist = nil, nil, nil, history{}
	return err
}

// trim forgets what has ended, when the history has grown.
func (t *Tracker) trim() {
	if len(t.hist.segs) < t.trimAt {
		return
	}
	t.hist.drop(func(u use) bool { return u.index <= t.lanes[u.lane].finished })
	t.trimAt = max(64, 2*len(t.hist.segs))
}

func (l *lane) String() string {
	if l.name != "" {
		return l.name
	}
	if n, ok := l.stream.(interface{ Name() string }); ok {
		return n.Name()
	}
	return fmt.Sprintf("stream %d of %v", l.id, l.stream.Device())
}
