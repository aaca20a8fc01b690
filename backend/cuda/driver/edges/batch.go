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

type kind uint8

const (
	kindBefore kind = iota
	kindAfter
	kindCopy
	kindMemset
	kindLaunch
	kindWaitValue
	kindWriteValue
	kindSignal
	kindHost
	kindClaim
)

// Batch is a list of operations that are enqueued together. It is used by one
// goroutine, and once: Run ends it.
type Batch struct {
	t    *Tracker
	ops  []operation
	acc  []driver.Access
	more bool // another batch has the end of this one
	keep bool // Run does not end the turns

	// Made by Run, kept for the next batch.
	waits  []wait
	clocks []uint64 // of each operation, one number a lane
	last   []int32  // of each lane: the operation to wait for, while one is looked at
	found  []found  // lanes that last has an entry for
	hits   []use
}

// operation is one line of a batch.
type operation struct {
	kind     kind
	stream   driver.Stream
	host     *Host
	dst, src driver.Ptr
	n        int
	value    uint32
	cond     driver.Condition
	launch   *driver.Launch
	from, to int // its accesses

	lane     *lane
	index    uint64
	waitFrom int
	waitTo   int
	signal   uint32 // the value of its lane's word that stands for it
	event    driver.Event
	waiters  int   // streams that wait for the event and have not been told to yet
	byEvent  bool  // somebody waits for it by an event
	byWord   bool  // a host waits for it
	sink     bool  // the Pending has its event
	proxy    int32 // of a Before: the first operation that comes after it, none if there is none
}

// wait is an operation that another one has to come after: of this batch, or all
// that a lane had before it.
type wait struct {
	lane *lane
	op   int32 // -1: the lane's tail
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

// Batch returns an empty batch.
func (t *Tracker) Batch() *Batch {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.batches); n > 0 {
		b := t.batches[n-1]
		t.batches = t.batches[:n-1]
		return b
	}
	return &Batch{t: t}
}

// add appends an operation and returns its number.
func (b *Batch) add(o operation, access ...driver.Access) int {
	o.from = len(b.acc)
	for _, a := range access {
		if a.Len > 0 {
			b.acc = append(b.acc, a)
		}
	}
	o.to = len(b.acc)
	b.ops = append(b.ops, o)
	return len(b.ops) - 1
}

// Before says that s, a stream whose work the tracker does not see, may have used
// memory so, up to now. Operations that follow in the batch and conflict with it
// come after that.
func (b *Batch) Before(s driver.Stream, access ...driver.Access) {
	b.add(operation{kind: kindBefore, stream: s}, access...)
}

// After says that s, a stream whose work the tracker does not see, may use memory
// so from now on. That comes after what precedes in the batch, and in earlier
// ones, and conflicts with it.
func (b *Batch) After(s driver.Stream, access ...driver.Access) {
	b.add(operation{kind: kindAfter, stream: s}, access...)
}

// Copy copies n bytes, as Stream.Copy.
func (b *Batch) Copy(s driver.Stream, dst, src driver.Ptr, n int) {
	acc := [2]driver.Access{driver.Reads(src, n), driver.Writes(dst, n)}
	b.add(operation{kind: kindCopy, stream: s, dst: dst, src: src, n: n}, acc[:]...)
}

// Memset sets n bytes, as Stream.Memset.
func (b *Batch) Memset(s driver.Stream, dst driver.Ptr, value byte, n int) {
	acc := [1]driver.Access{driver.Writes(dst, n)}
	b.add(operation{kind: kindMemset, stream: s, dst: dst, n: n, value: uint32(value)}, acc[:]...)
}

// Launch runs a kernel, which uses memory as l.Access says. The launch must not
// be changed before Run has returned.
func (b *Batch) Launch(s driver.Stream, l *driver.Launch) {
	if l == nil {
		b.add(operation{kind: kindLaunch, stream: s})
		return
	}
	b.add(operation{kind: kindLaunch, stream: s, launch: l}, l.Access...)
}

// WaitValue makes s wait for a word that somebody else writes, as
// Stream.WaitValue. The accesses are what that stands for: what others have done
// when the word comes. The operations that conflict with them come after it.
func (b *Batch) WaitValue(s driver.Stream, p driver.Ptr, v uint32, c driver.Condition, access ...driver.Access) {
	b.add(operation{kind: kindWaitValue, stream: s, dst: p, value: v, cond: c}, access...)
}

// WriteValue makes s write a word for somebody else, as Stream.WriteValue. The
// accesses are what that stands for: what others may do when they have seen the
// word. It comes after the operations that conflict with them.
func (b *Batch) WriteValue(s driver.Stream, p driver.Ptr, v uint32, access ...driver.Access) {
	b.add(operation{kind: kindWriteValue, stream: s, dst: p, value: v}, access...)
}

// Signal is WriteValue for a word that is part of the batch too: what conflicts with
// the accesses and follows comes after the word.
func (b *Batch) Signal(s driver.Stream, p driver.Ptr, v uint32, access ...driver.Access) {
	b.add(operation{kind: kindSignal, stream: s, dst: p, value: v}, access...)
}

// Host gives the host a turn, in which it uses page-locked memory so. It returns
// the turn's number, for Pending.Begin and End.
func (b *Batch) Host(h *Host, access ...driver.Access) int {
	return b.add(operation{kind: kindHost, host: h}, access...)
}

// Claim is Host for a turn that is part of the batch's end: Order, Done and Sync of the
// Pending wait for it too. In such a turn the host has streams of its own use memory that
// the tracker orders, without a batch. No stream waits meanwhile but those that come after.
func (b *Batch) Claim(h *Host, access ...driver.Access) int {
	return b.add(operation{kind: kindClaim, host: h}, access...)
}

// Len returns the number of operations, Before and After included.
func (b *Batch) Len() int { return len(b.ops) }

// Continues says that the next batch gives every stream and host of this one something
// more, so that who waits for that one's end waits for this one's. The Pending of this
// one has no end then: it is always done, and orders nothing.
func (b *Batch) Continues() { b.more = true }

// KeepTurns says that Run leaves the host's turns as they are if it fails: who has
// somebody to tell first calls Pending.Abort afterwards.
func (b *Batch) KeepTurns() { b.keep = true }

// check looks at what can be wrong with the batch as such.
func (b *Batch) check() error {
	for i := range b.ops {
		o := &b.ops[i]
		if o.kind == kindHost || o.kind == kindClaim {
			if o.host == nil || o.host.t != b.t {
				return b.wrong(i, "a host of another tracker")
			}
			continue
		}
		if o.stream == nil {
			return b.wrong(i, "no stream")
		}
		if o.n < 0 {
			return b.wrong(i, fmt.Sprintf("%d bytes", o.n))
		}
		for _, a := range b.acc[o.from:o.to] {
			if a.Mode != driver.Read && a.Mode != driver.Write && a.Mode != driver.Shared {
				return b.wrong(i, a.String())
			}
		}
	}
	return nil
}

func (b *Batch) wrong(i int, what string) error {
	return &driver.Error{Call: "Batch", Device: -1, Err: fmt.Errorf("%w: operation %d: %s", driver.ErrInvalid, i, what)}
}

// Run enqueues the operations with the orders that they need, and ends the
// batch. If a call fails, what was enqueued before it stays enqueued; the Pending
// that comes with the error stands for that. It is nil if nothing was.
//
// Run blocks while a stream has no room, and while another Run does.
func (b *Batch) Run() (*Pending, error) {
	t := b.t
	t.order.Lock()
	defer t.order.Unlock()
	defer b.free()
	if t.closed {
		return nil, errClosed()
	}
	if err := b.check(); err != nil {
		return nil, err
	}
	t.trim()
	b.plan()
	p := t.newPending()
	p.more = b.more
	err := b.issue(p)
	if err != nil {
		p.more = false // nothing follows
	}
	for _, l := range t.lanes {
		p.calls = max(p.calls, l.calls)
	}
	b.settle(p, err != nil)
	if err == nil {
		return p, nil
	}
	nothing := len(p.lanes) == 0 && len(p.events) == 0
	if !b.keep || nothing {
		p.Abort()
	}
	if nothing {
		p.Release()
		return nil, err
	}
	return p, err
}

// free empties the batch and keeps it for later.
func (b *Batch) free() {
	b.t.mu.Lock()
	defer b.t.mu.Unlock()
	for i := range b.ops {
		b.ops[i] = operation{}
	}
	b.ops, b.acc, b.waits, b.clocks, b.more, b.keep = b.ops[:0], b.acc[:0], b.waits[:0], b.clocks[:0], false, false
	b.t.batches = append(b.t.batches, b)
}

// plan finds out which operation has to wait for which. It enqueues nothing.
func (b *Batch) plan() {
	t := b.t
	for i := range b.ops {
		o := &b.ops[i]
		if o.host != nil {
			o.lane = o.host.l
		} else {
			o.lane = t.laneOf(o.stream)
			if o.kind != kindBefore && o.kind != kindAfter {
				o.lane.foreign = false
			}
			o.proxy = none
		}
	}
	lanes := len(t.lanes)
	for _, l := range t.lanes {
		l.base, l.signal, l.ops, l.tails, l.tailed, l.calls = l.index, l.signals, l.ops[:0], 0, false, 0
	}
	b.last = slices.Grow(b.last[:0], lanes)[:lanes]
	for i := range b.last {
		b.last[i] = none
	}
	// The clocks of the lanes at the start come first: they are the tails'.
	for _, l := range t.lanes {
		b.clocks = append(b.clocks, l.clock...)
		b.clocks[len(b.clocks)-lanes+l.id] = l.index
	}
	for i := range b.ops {
		o := &b.ops[i]
		l := o.lane
		l.index++
		o.index = l.index
		l.ops = append(l.ops, int32(i))
		// What comes from where the tracker does not see waits for nothing here, and
		// what goes there is nothing to wait for.
		in := o.kind == kindBefore || o.kind == kindWaitValue
		out := o.kind == kindAfter || o.kind == kindWriteValue
		if !in {
			b.wait(i)
		}
		l.clock[l.id] = l.index
		b.clocks = append(b.clocks, l.clock...)
		if out {
			continue
		}
		for _, a := range b.acc[o.from:o.to] {
			t.hist.add(a, use{lane: l.id, index: o.index, alone: in})
		}
	}
	if !b.more {
		b.sinks()
	}
}

// none stands for no operation in Batch.last, tail for a lane's tail.
const (
	none int32 = -2
	tail int32 = -1
)

// clock returns the clock of an operation, or of a lane's tail.
func (b *Batch) clock(w wait) []uint64 {
	lanes := len(b.t.lanes)
	at := w.lane.id
	if w.op >= 0 {
		at = lanes + int(w.op)
	}
	return b.clocks[at*lanes : (at+1)*lanes]
}

// wait finds what an operation has to wait for: of each lane the last operation
// that it conflicts with, without those that it comes after anyway.
func (b *Batch) wait(i int) {
	t, o := b.t, &b.ops[i]
	l := o.lane
	b.hits = b.hits[:0]
	for _, a := range b.acc[o.from:o.to] {
		b.hits = t.hist.conflicts(b.hits, a)
	}
	for _, u := range b.hits {
		from := t.lanes[u.lane]
		if u.lane == l.id || u.index <= l.clock[u.lane] || u.index <= from.finished.Load() {
			continue
		}
		op := tail
		if u.index > from.base {
			op = from.ops[u.index-from.base-1]
		}
		if b.last[u.lane] == none {
			b.found = append(b.found, found{wait: wait{from, op}})
		}
		b.last[u.lane] = max(b.last[u.lane], op)
		for k := range b.found {
			if f := &b.found[k]; f.lane == from && u.index >= f.index {
				f.op, f.index = op, u.index
			}
		}
	}
	o.waitFrom = len(b.waits)
	for k := range b.found {
		f := &b.found[k]
		b.last[f.lane.id] = none
		// The others may stand for everything that this one is there for.
		f.implied = true
		f.implied = b.covered()
		if !f.implied {
			b.waits = append(b.waits, f.wait)
		}
	}
	o.waitTo = len(b.waits)
	b.found = b.found[:0]
	for _, w := range b.waits[o.waitFrom:o.waitTo] {
		for id, n := range b.clock(w) {
			l.clock[id] = max(l.clock[id], n)
		}
		byHost := l.stream == nil
		switch {
		case w.lane.stream == nil:
		case w.lane.foreign && byHost:
			// Not by a word: the lane, and its word, may be another stream's before this one
			// has written it.
			b.ops[w.op].sink = true
		case w.op < 0 && byHost:
			w.lane.tailed = true
		case w.op < 0:
			w.lane.tails++
		case byHost:
			b.ops[w.op].byWord = true
		default:
			b.ops[w.op].byEvent = true
			b.ops[w.op].waiters++
		}
		if w.lane.foreign && !l.foreign {
			for _, j := range w.lane.ops {
				if p := &b.ops[j].proxy; j <= w.op && *p == none {
					*p = int32(i)
				}
			}
		}
	}
}

// found is a wait that an operation may need.
type found struct {
	wait
	index   uint64 // the operation, on its lane, that it is needed for
	implied bool   // by others
}

// covered reports whether the waits that were found and are not implied order all
// that they were found for.
func (b *Batch) covered() bool {
	for _, f := range b.found {
		if f.implied && !slices.ContainsFunc(b.found, func(g found) bool {
			return !g.implied && b.clock(g.wait)[f.lane.id] >= f.index
		}) {
			return false
		}
	}
	return true
}

// sinks marks the operations whose ends are the end of the batch: of each stream
// the last one, if no other stream's last one comes after it.
func (b *Batch) sinks() {
	lastOf := func(l *lane) int32 {
		if l.stream == nil {
			return none
		}
		for _, i := range slices.Backward(l.ops) {
			if k := b.ops[i].kind; k != kindBefore && k != kindAfter {
				return i
			}
		}
		return none
	}
	for _, l := range b.t.lanes {
		i := lastOf(l)
		if i == none {
			continue
		}
		covered := false
		for _, o := range b.t.lanes {
			if j := lastOf(o); o != l && j != none && b.clock(wait{o, j})[l.id] >= b.ops[i].index {
				covered = true
				break
			}
		}
		b.ops[i].sink = !covered
	}
}

// issue enqueues the operations.
func (b *Batch) issue(p *Pending) error {
	t := b.t
	for _, l := range t.lanes {
		if l.tails > 0 {
			e, err := l.record()
			if err != nil {
				return err
			}
			l.tail = e
		}
		if l.tailed {
			if err := t.needWord(l); err != nil {
				return err
			}
			if err := l.write(); err != nil {
				return err
			}
			l.signal = l.signals
		}
	}
	for i := range b.ops {
		o := &b.ops[i]
		if o.host != nil {
			b.turn(p, i)
			continue
		}
		for _, w := range b.waits[o.waitFrom:o.waitTo] {
			if t.Trace != nil {
				t.Trace(Edge{int(w.op), i, w.lane.String(), o.lane.String(), w.lane.stream == nil})
			}
			o.lane.calls++
			if err := b.waitFor(o.stream, w); err != nil {
				return err
			}
		}
		p.touch(o)
		if o.kind != kindBefore && o.kind != kindAfter {
			o.lane.calls++
		}
		if err := b.enqueue(o); err != nil {
			return err
		}
		if o.byWord {
			if err := t.needWord(o.lane); err != nil {
				return err
			}
			if err := o.lane.write(); err != nil {
				return err
			}
			o.signal = o.lane.signals
		}
		if o.byEvent || o.sink {
			e, err := o.lane.record()
			if err != nil {
				return err
			}
			o.event = e
			if o.sink {
				p.events = append(p.events, e)
			}
		}
	}
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

// waitFor makes a stream wait for an operation.
func (b *Batch) waitFor(s driver.Stream, w wait) error {
	if w.lane.stream == nil {
		return s.WaitValue(w.lane.wordPtr(), b.signal(w), driver.AtLeast)
	}
	event, waiters, keep := &w.lane.tail, &w.lane.tails, false
	if w.op >= 0 {
		o := &b.ops[w.op]
		event, waiters, keep = &o.event, &o.waiters, o.sink
	}
	if err := s.Wait(*event); err != nil {
		return err
	}
	if *waiters--; *waiters == 0 && !keep {
		(*event).Release()
		*event = nil
	}
	return nil
}

// signal returns the value of a lane's word that stands for what w waits for.
func (b *Batch) signal(w wait) uint32 {
	if w.op < 0 {
		return w.lane.signal
	}
	return b.ops[w.op].signal
}

func (b *Batch) enqueue(o *operation) error {
	switch o.kind {
	case kindCopy:
		return o.stream.Copy(o.dst, o.src, o.n)
	case kindMemset:
		return o.stream.Memset(o.dst, byte(o.value), o.n)
	case kindLaunch:
		return o.stream.Launch(o.launch)
	case kindWaitValue:
		return o.stream.WaitValue(o.dst, o.value, o.cond)
	case kindWriteValue, kindSignal:
		return o.stream.WriteValue(o.dst, o.value)
	}
	return nil
}

// turn notes what the host has to wait for.
func (b *Batch) turn(p *Pending, i int) {
	o := &b.ops[i]
	from := len(p.needs)
	for _, w := range b.waits[o.waitFrom:o.waitTo] {
		if b.t.Trace != nil {
			b.t.Trace(Edge{int(w.op), i, w.lane.String(), o.lane.String(), true})
		}
		n := need{lane: w.lane, id: w.lane.id, stream: w.lane.stream, signal: b.signal(w)}
		if w.lane.foreign && w.lane.stream != nil {
			n.event = b.ops[w.op].event
		}
		p.needs = append(p.needs, n)
	}
	first := len(p.accesses)
	p.accesses = append(p.accesses, b.acc[o.from:o.to]...)
	o.lane.signals++
	o.signal = o.lane.signals
	if o.kind == kindClaim {
		p.ends = append(p.ends, need{lane: o.lane, signal: o.signal})
	}
	p.turns = append(p.turns, turn{
		op: i, lane: o.lane, index: o.index, signal: o.signal,
		from: from, to: len(p.needs), first: first, last: len(p.accesses),
	})
}

// settle ends the lanes of streams that occur in Before and After only. After a
// failure it also makes p stand for what was enqueued.
func (b *Batch) settle(p *Pending, failed bool) {
	t := b.t
	if failed {
		for i := range b.ops {
			if o := &b.ops[i]; o.event != nil && !o.sink {
				p.events = append(p.events, o.event)
			}
		}
		for _, l := range t.lanes {
			if l.tail != nil {
				p.events = append(p.events, l.tail)
				l.tail = nil
			}
		}
		for _, e := range p.lanes {
			end, err := e.lane.stream.Record()
			if err != nil {
				p.err = err
				continue
			}
			p.events = append(p.events, end)
		}
	}
	// What a caller's stream did before is from now on what the first operation
	// did that came after it.
	before := false
	for i := range b.ops {
		before = before || b.ops[i].kind == kindBefore && b.ops[i].lane.foreign
	}
	if before {
		t.hist.each(func(u *use) {
			if l := t.lanes[u.lane]; u.alone && l.foreign && u.index > l.base {
				if p := b.ops[l.ops[u.index-l.base-1]].proxy; p != none {
					u.lane, u.index = b.ops[p].lane.id, b.ops[p].index
				}
			}
		})
		t.hist.drop(func(u use) bool { return t.lanes[u.lane].foreign })
	}
	for _, l := range slices.Backward(t.lanes) {
		if l.foreign {
			t.forget(l)
		}
	}
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

// Pending is a batch that was enqueued. Its methods may be called from many
// goroutines.
type Pending struct {
	t        *Tracker
	lanes    []laneEnd
	needs    []need
	turns    []turn
	accesses []driver.Access
	calls    int

	more bool // the next one has the end

	mu     sync.Mutex // not held while somebody waits; taken before the tracker's mu
	uses   int
	events []driver.Event
	passed int    // events that have passed
	ends   []need // turns that are part of the end
	done   bool
	err    error
}

// laneEnd is how far a lane is when the batch has ended.
type laneEnd struct {
	lane  *lane
	index uint64
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

// find returns the turn with the number that Batch.Host returned.
func (p *Pending) find(n int) (*turn, error) {
	i, found := slices.BinarySearchFunc(p.turns, n, func(u turn, n int) int { return u.op - n })
	if found {
		return &p.turns[i], nil
	}
	return nil, &driver.Error{Call: "Begin", Device: -1, Err: fmt.Errorf("%w: no turn %d in the batch", driver.ErrInvalid, n)}
}

// Begin blocks the host until it is its turn: what the turn's accesses conflict
// with has ended. If ctx ends first, the turn has still to be ended, or the batch
// aborted.
func (p *Pending) Begin(ctx context.Context, turn int) error {
	u, err := p.find(turn)
	if err != nil {
		return err
	}
	for _, n := range p.needs[u.from:u.to] {
		if err := n.await(ctx); err != nil {
			return fmt.Errorf("edges: %s waits for %s: %w", u.lane.name, n, err)
		}
	}
	driver.HostAccess(p.t.d, u.lane.name, p.accesses[u.first:u.last]...)
	return nil
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

// End ends the host's turn: operations that wait for it go on, as soon as the
// turns that the Host was given before have ended too.
func (p *Pending) End(turn int) {
	if u, err := p.find(turn); err == nil {
		u.lane.end(u.signal)
	}
}

// Abort ends all turns of the host that have not ended, each when what it comes
// after has, so that every stream goes on, in the order of the batch. What is in
// the memory is of no use; it may be freed when the batch is done. Abort does not
// wait for that.
func (p *Pending) Abort() {
	if len(p.turns) == 0 {
		return
	}
	t := p.t
	p.Retain()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return // and so are the words
	}
	t.aborts.Go(func() {
		defer p.Release()
		for _, u := range p.turns {
			for _, n := range p.needs[u.from:u.to] {
				// An error means that there is nothing to wait for any more.
				_ = n.await(awaited{n.stream, t.quit})
			}
			u.lane.end(u.signal)
		}
	})
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
		if err := s.WaitValue(n.lane.wordPtr(), n.signal, driver.AtLeast); err != nil {
			return err
		}
		e, err := s.Record()
		if err != nil {
			return err
		}
		p.t.reads(e)
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
	if p.done || p.more || p.err != nil {
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
	p.passed, p.calls, p.more, p.done, p.err = 0, 0, false, false, nil
	p.t.mu.Lock()
	defer p.t.mu.Unlock()
	p.t.pending = append(p.t.pending, p)
}
