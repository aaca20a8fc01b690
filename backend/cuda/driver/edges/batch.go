package edges

import (
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

// Batch is a list of operations that are enqueued together. It is used by one
// goroutine, and once: Run ends it.
type Batch struct {
	t    *Tracker
	ops  []operation
	acc  []driver.Access
	keep bool     // Run does not end the turns
	p    *Pending // that Run will return, if somebody has asked for it before

	// Made by Run, kept for the next batch.
	waits  []wait
	clocks []uint64 // of each operation, one number a lane
	tails  []uint64 // the same of what the batch's lanes had before it
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
	past     bool  // of a Past: the event was recorded before Run
	waiters  int   // streams that wait for the event and have not been told to yet
	byEvent  bool  // somebody waits for it by an event
	byWord   bool  // a host waits for it
	sink     bool  // the Pending has its event
	proxy    int32 // of a Before: the first operation that comes after it, none if there is none
}

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

// Before says that s, a stream whose work the tracker does not see, may have used
// memory so, up to now. Operations that follow in the batch and conflict with it
// come after that.
func (b *Batch) Before(s driver.Stream, access ...driver.Access) {
	b.add(operation{kind: kindBefore, stream: s}, access...)
}

// Past is Before for what s had been given when it recorded e. Run releases e, also with an error.
func (b *Batch) Past(s driver.Stream, e driver.Event, access ...driver.Access) {
	b.add(operation{kind: kindBefore, stream: s, event: e, past: true}, access...)
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

// WaitValue makes s wait for a word that somebody else writes, as Stream.WaitValue. The accesses
// are what others have done when the word has that value. The operations that conflict with them
// come after it.
func (b *Batch) WaitValue(s driver.Stream, p driver.Ptr, v uint32, c driver.Condition, access ...driver.Access) {
	b.add(operation{kind: kindWaitValue, stream: s, dst: p, value: v, cond: c}, access...)
}

// WriteValue makes s write a word for somebody else, as Stream.WriteValue. The accesses are what
// others may do when they have seen the word. It comes after the operations that conflict with
// them.
func (b *Batch) WriteValue(s driver.Stream, p driver.Ptr, v uint32, access ...driver.Access) {
	b.add(operation{kind: kindWriteValue, stream: s, dst: p, value: v}, access...)
}

// Signal is WriteValue for a word that is part of the batch too: what conflicts with
// the accesses and follows comes after the word.
func (b *Batch) Signal(s driver.Stream, p driver.Ptr, v uint32, access ...driver.Access) {
	b.add(operation{kind: kindSignal, stream: s, dst: p, value: v}, access...)
}

// Host gives the host a turn, in which it uses page-locked memory so. It returns
// the turn's number, for Pending.Begin and End. Memory that it shares, it orders itself among the hosts and
// devices that do: the turn comes after what this tracker has seen of it.
func (b *Batch) Host(h *Host, access ...driver.Access) int {
	return b.add(operation{kind: kindHost, host: h}, access...)
}

// Claim is Host for a turn that is part of the batch's end: Order, Done and Sync of the
// Pending wait for it too. In such a turn the host has streams of its own use memory that
// the tracker orders, without a batch. No stream waits meanwhile but those that come after.
func (b *Batch) Claim(h *Host, access ...driver.Access) int {
	return b.add(operation{kind: kindClaim, host: h}, access...)
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

// Len returns the number of operations, Before and After included.
func (b *Batch) Len() int { return len(b.ops) }

// KeepTurns says that a failed Run leaves the host's turns as they are. The caller can then tell
// others first, and calls Pending.Abort afterwards.
func (b *Batch) KeepTurns() { b.keep = true }

// Pending returns what Run will return, also with an error. Begin, End and Abort may be called before
// Run has returned. So a host that is not the caller of Run can have its turns, and end them, while
// Run blocks.
func (b *Batch) Pending() *Pending {
	if b.p == nil {
		b.p = b.t.newPending()
	}
	return b.p
}

// Run enqueues the operations with the orders that they need, and ends the batch. If a call
// fails, the commands before it stay enqueued. The Pending that comes with the error stands for
// them. It is nil if nothing was, and nobody has asked for it before.
//
// Run blocks while a stream has no room, and while another Run does. Where launches block it also
// waits for the host's turns that come before them: see Pending.
func (b *Batch) Run() (*Pending, error) {
	t := b.t
	t.order.Lock()
	defer t.order.Unlock()
	defer b.free()
	asked := b.p != nil
	p := b.Pending()
	err := b.run(p)
	p.enqueued(err)
	if err == nil {
		return p, nil
	}
	nothing := len(p.lanes) == 0 && len(p.events) == 0
	if !b.keep || nothing {
		p.Abort()
	}
	if nothing && !asked {
		p.Release()
		return nil, err
	}
	return p, err
}

// run is Run, into p.
func (b *Batch) run(p *Pending) error {
	t := b.t
	if t.closed {
		return errClosed()
	}
	if err := b.check(); err != nil {
		return err
	}
	t.trim()
	b.plan()
	err := b.issue(p)
	for _, l := range t.lanes {
		p.calls = max(p.calls, l.calls)
	}
	b.settle(p, err != nil)
	return err
}

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

// free empties the batch and keeps it for later.
func (b *Batch) free() {
	b.t.mu.Lock()
	defer b.t.mu.Unlock()
	for i := range b.ops {
		if o := &b.ops[i]; o.past && o.event != nil && !o.sink {
			o.event.Release()
		}
		b.ops[i] = operation{}
	}
	b.ops, b.acc, b.waits, b.clocks, b.tails = b.ops[:0], b.acc[:0], b.waits[:0], b.clocks[:0], b.tails[:0]
	b.keep, b.p = false, nil
	b.t.batches = append(b.t.batches, b)
}
