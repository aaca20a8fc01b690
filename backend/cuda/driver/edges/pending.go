package edges

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Pending is a batch that was enqueued. Its methods may be called from many
// goroutines.
type Pending struct {
	t     *Tracker
	lanes []laneEnd
	calls int

	mu     sync.Mutex // not held while somebody waits; taken before the tracker's mu
	uses   int
	issued bool  // Run has returned: there are no more turns
	wrong  error // what Run has returned
	events []driver.Event
	passed int    // events that have passed
	ends   []need // turns that are part of the end
	done   bool
	err    error

	// Run adds turns under mu. What is there does not change.
	needs    []need
	turns    []turn
	accesses []driver.Access
}

// laneEnd is how far a lane is when the batch has ended.
type laneEnd struct {
	lane  *lane
	index uint64
}

// turn is a host's turn.
type turn struct {
	op          int
	lane        *lane
	index       uint64
	signal      uint32
	from, to    int // of Pending.needs
	first, last int // of Pending.accesses
}

// need is what a host waits for before its turn: an event, or else a lane's word.
type need struct {
	lane   *lane
	id     int           // of the lane; it and the stream may be others later
	stream driver.Stream // nil for a host
	signal uint32
	event  driver.Event // of a stream that the tracker does not know
}

func (n need) String() string {
	if n.stream == nil {
		return n.lane.name
	}
	return streamName(n.stream, n.id)
}

func (t *Tracker) newPending() *Pending {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.pending); n > 0 {
		p := t.pending[n-1]
		t.pending = t.pending[:n-1]
		p.uses = 1
		return p
	}
	return &Pending{t: t, uses: 1}
}

// touch notes that the batch has given o's lane something.
func (p *Pending) touch(o *operation) {
	if o.kind == kindBefore || o.kind == kindAfter {
		return
	}
	for i := range p.lanes {
		if p.lanes[i].lane == o.lane {
			p.lanes[i].index = o.index
			return
		}
	}
	p.lanes = append(p.lanes, laneEnd{o.lane, o.index})
}

// Calls returns how many calls one stream was given at most, the batch's own and
// those that order it. Streams have room for so many; see package driver's Stream.
func (p *Pending) Calls() int { return p.calls }

// Begin blocks the host until it is its turn: what the turn's accesses conflict
// with has ended. If ctx ends first, the turn has still to be ended, or the batch
// aborted.
func (p *Pending) Begin(ctx context.Context, turn int) error {
	u, needs, accesses, err := p.await(ctx, turn)
	if err != nil {
		return err
	}
	for _, n := range needs {
		if err := n.await(ctx); err != nil {
			return fmt.Errorf("edges: %s waits for %s: %w", u.lane.name, n, err)
		}
	}
	driver.HostAccess(p.t.d, u.lane.name, accesses...)
	return nil
}

// await waits until a turn has been enqueued.
func (p *Pending) await(ctx context.Context, n int) (turn, []need, []driver.Access, error) {
	for start := time.Now(); ; driver.Pause(start) {
		p.mu.Lock()
		if u := p.find(n); u != nil {
			t, needs, accesses := *u, p.needs[u.from:u.to], p.accesses[u.first:u.last]
			p.mu.Unlock()
			return t, needs, accesses, nil
		}
		issued, wrong := p.issued, p.wrong
		p.mu.Unlock()
		switch {
		case wrong != nil:
			return turn{}, nil, nil, wrong
		case issued:
			return turn{}, nil, nil, &driver.Error{Call: "Begin", Device: -1, Err: fmt.Errorf("%w: no turn %d in the batch", driver.ErrInvalid, n)}
		}
		if err := ctx.Err(); err != nil {
			return turn{}, nil, nil, fmt.Errorf("edges: turn %d has not been enqueued: %w", n, err)
		}
	}
}

// find returns the turn with the number that Batch.Host returned, nil if it has not been enqueued. The
// caller holds p.mu.
func (p *Pending) find(n int) *turn {
	i, found := slices.BinarySearchFunc(p.turns, n, func(u turn, n int) int { return u.op - n })
	if !found {
		return nil
	}
	return &p.turns[i]
}

// enqueued notes what Run returns.
func (p *Pending) enqueued(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.issued, p.wrong = true, err
}

// await waits until the host may go on as far as n is concerned.
func (n need) await(ctx context.Context) error {
	if n.event == nil {
		return driver.AwaitWord(ctx, n.lane.word, n.lane.offset, n.signal, driver.AtLeast)
	}
	// Not Event.Sync, which does not ask ctx.Err. To ask costs a call of the driver.
	const yields = 50
	pause := 5 * time.Microsecond
	for i := 0; ; i++ {
		done, err := n.event.Done()
		if done || err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if i < yields {
			runtime.Gosched()
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, 500*time.Microsecond)
	}
}

// End ends the host's turn. Operations that wait for it go on as soon as the Host's earlier turns
// have ended too.
func (p *Pending) End(turn int) {
	p.mu.Lock()
	u := p.find(turn)
	p.mu.Unlock()
	if u != nil {
		u.lane.end(u.signal)
	}
}

// Abort ends all turns of the host that have not ended. So every stream goes on, in the order of the
// batch: a turn ends when the operations before it have. What is in the memory is of no use. It may be
// freed when the batch is done; Abort does not wait for that. If Run has not returned, the turns that it
// adds end too.
func (p *Pending) Abort() {
	p.mu.Lock()
	none := p.issued && len(p.turns) == 0
	p.mu.Unlock()
	if none {
		return
	}
	t := p.t
	p.Retain()
	t.mu.Lock()
	closed := t.closed // and so are the words
	if !closed {
		t.aborts.Go(func() {
			defer p.Release()
			p.endTurns()
		})
	}
	t.mu.Unlock()
	if closed {
		p.Release()
	}
}

// endTurns ends the turns as they come.
func (p *Pending) endTurns() {
	for i := 0; ; i++ {
		p.mu.Lock()
		for len(p.turns) == i && !p.issued {
			p.mu.Unlock()
			time.Sleep(50 * time.Microsecond)
			p.mu.Lock()
		}
		if len(p.turns) == i {
			p.mu.Unlock()
			return
		}
		u := p.turns[i]
		needs := p.needs[u.from:u.to]
		p.mu.Unlock()
		for _, n := range needs {
			// An error means that there is nothing to wait for any more.
			_ = n.await(awaited{n.stream, p.t.quit})
		}
		u.lane.end(u.signal)
	}
}

// awaited is the context of waiting for what an aborted turn comes after: it ends when
// the stream has failed, or the tracker has given up.
type awaited struct {
	stream driver.Stream // nil for a host
	quit   <-chan struct{}
}

func (awaited) Deadline() (time.Time, bool) { return time.Time{}, false }
func (awaited) Done() <-chan struct{}       { return nil }
func (awaited) Value(any) any               { return nil }

func (a awaited) Err() error {
	select {
	case <-a.quit:
		return driver.ErrClosed
	default:
	}
	if a.stream != nil {
		return a.stream.Err()
	}
	return nil
}

// Order makes s wait for all operations of the batch. It does not wait for Sync, nor
// that for it, though it blocks while s has no room.
func (p *Pending) Order(s driver.Stream) error {
	p.mu.Lock()
	events := p.events[p.passed:]
	p.mu.Unlock()
	for _, e := range events {
		if err := s.Wait(e); err != nil {
			return err
		}
	}
	for _, n := range p.ends {
		if n.lane.hasEnded(n.signal) {
			continue
		}
		if err := p.t.await(s, n.lane.wordPtr(), n.signal); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Done reports, without blocking, whether all operations of the batch have ended.
func (p *Pending) Done() (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.passed < len(p.events) {
		ok, err := p.events[p.passed].Done()
		if err != nil {
			p.err = err
			return true, err
		}
		if !ok {
			return false, nil
		}
		p.passed++
	}
	for _, n := range p.ends {
		if !n.lane.hasEnded(n.signal) {
			return false, nil
		}
	}
	p.finish()
	return true, p.err
}

// Sync blocks until all operations of the batch have ended, or ctx has.
func (p *Pending) Sync(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.passed < len(p.events) {
		i := p.passed
		e := p.events[i]
		p.mu.Unlock() // Order and Done must not wait for this
		err := e.Sync(ctx)
		p.mu.Lock()
		if err != nil {
			if errors.Is(err, driver.ErrDeviceLost) || errors.Is(err, driver.ErrClosed) {
				p.err = err
			}
			return err
		}
		p.passed = max(p.passed, i+1)
	}
	for _, n := range p.ends {
		p.mu.Unlock()
		err := n.await(ctx)
		p.mu.Lock()
		if err != nil {
			return err
		}
	}
	p.finish()
	return p.err
}

// finish tells the tracker that the batch has ended; the caller holds p.mu.
func (p *Pending) finish() {
	if p.done || p.err != nil {
		return
	}
	p.done = true
	for _, e := range p.lanes {
		e.lane.finish(e.index)
	}
	for _, u := range p.turns {
		if u.lane.hasEnded(u.signal) {
			u.lane.finish(u.index)
		}
	}
}

// Retain says that somebody else uses the Pending too. Each Retain needs a Release.
func (p *Pending) Retain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.uses++
}

// Release gives the Pending back. Who calls it must not use it any more. The batch
// need not have ended, but then the tracker does not learn when it has.
func (p *Pending) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.uses--; p.uses > 0 {
		return
	}
	for i, e := range p.events {
		e.Release()
		p.events[i] = nil
	}
	clear(p.turns)
	clear(p.needs)
	clear(p.ends)
	clear(p.lanes)
	p.events, p.turns, p.needs, p.ends, p.lanes, p.accesses = p.events[:0], p.turns[:0], p.needs[:0], p.ends[:0], p.lanes[:0], p.accesses[:0]
	p.passed, p.calls, p.done, p.err, p.issued, p.wrong = 0, 0, false, nil, false, nil
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	p.t.pending = append(p.t.pending, p)
}
