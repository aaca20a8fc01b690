// Package mesh is the part that packages tcp and wire have in common:
//
//   - how a mesh fails and closes;
//   - how a peer leaves or dies;
//   - receives from any rank;
//   - how ranks diagnose a timeout.
//
// A mesh embeds a [Base], and its type for a connected pair embeds a [Peer]. The base reaches
// the protocol through [Link]. One lock, Base.Mu, guards all of it.
package mesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

// Limits bound the end of a mesh, closed or failed.
type Limits struct {
	// Close is how long peers may take to read what is queued, with the goodbye or the reason behind it. It is
	// longer than TCP waits for a packet that is lost twice: 200 ms, then 400 ms. While this process waits for
	// a CPU, the end goes on, because its last words may not have been written yet. It takes closeMost times
	// as long at most.
	Close time.Duration

	// Step is how long a writer goes on after that if it may not have had the CPU. See MoreTime.
	Step time.Duration
}

// closeMost bounds an end that is extended, in units of Limits.Close.
const closeMost = 10

// closeChecks is how often in Limits.Close a mesh that ends checks whether this process is late.
// A check that comes a quarter of their distance late extends the end by two of them.
const closeChecks = 10

// Link is what the protocol does for one peer. All methods are called with Base.Mu held.
type Link interface {
	// Ping queues a PING and reports whether the peer can answer it.
	Ping(p Ping) bool

	// Received returns how many bytes of messages have been read from the peer.
	Received() uint64

	// Answer makes the writer look for a PING to answer.
	Answer()

	// Waits reports whether a request needs the peer, or is being moved to or from it.
	Waits() bool

	// Conns returns the connections with the peer that carry data. The first one carries the PINGs.
	Conns() []net.Conn

	// Offered returns the position, among the messages of all peers, of the oldest message
	// on a slot that no receive has met. ok is false if there is none.
	Offered(slot uint64) (order uint64, ok bool)

	// TakeOffered receives that message with r.
	TakeOffered(r *transport.Request)

	// DropQueued ends the sends that are queued and not being written.
	DropQueued(err error)

	// EndRequests ends the requests that wait to be met and that no goroutine works on.
	EndRequests(err error)

	// Finish queues the last message, ABORT with f or BYE if f is nil, and ends the
	// goroutines of the pair. Writing must end by the given time.
	Finish(f *transport.Fault, writeBy time.Time)

	// Cut makes writes that wait end now, for a mesh whose time to end is over.
	Cut()

	// Died lets the peer go, because of f, once nothing can come from it. Doubt calls it.
	Died(f *transport.Fault)
}

// Base is the state of a mesh that no protocol is needed for. Init makes it ready.
type Base struct {
	Limits     Limits
	Mu         sync.Mutex
	Goroutines sync.WaitGroup // Close waits for them

	rank, size        int
	onEnd             func()
	issued, completed atomic.Uint64
	waiting           atomic.Pointer[func() transport.Waiting]
	failed            chan struct{}
	told              chan struct{}
	fault             atomic.Pointer[transport.Fault] // set under Mu

	// Late returns how long after due a check runs. Tests replace it.
	Late func(due time.Time) time.Duration

	// Guarded by Mu:
	peers    []*Peer // nil at the own rank, and where there is no connection yet
	any      map[uint64]transport.Requests
	dead     *transport.Fault // of the first peer of this library that has died
	onDeath  []func(*transport.Fault)
	closed   bool
	endBy    time.Time // when connections are cut, once the mesh has ended
	latest   time.Time // the last that endBy may become
	checking *time.Timer
	cut      bool // check has cut the connections
	arrivals uint64
	writers  int    // goroutines that write
	round    uint64 // of Diagnose
	changed  chan struct{}
}

// Init makes b the base of a mesh. When the mesh ends, onEnd is called once, with Mu held.
func (b *Base) Init(rank, size int, l Limits, onEnd func()) {
	b.rank, b.size, b.Limits, b.onEnd, b.Late = rank, size, l, onEnd, time.Since
	b.failed, b.told, b.changed = make(chan struct{}), make(chan struct{}), make(chan struct{})
	b.peers = make([]*Peer, size)
	b.any = make(map[uint64]transport.Requests)
}

// Add makes p the peer of a rank.
func (b *Base) Add(rank int, p *Peer, l Link) {
	p.Rank, p.base, p.link = rank, b, l
	b.peers[rank] = p
}

// Rank returns this rank's number.
func (b *Base) Rank() int { return b.rank }

// Size returns the number of ranks.
func (b *Base) Size() int { return b.size }

// SetProgress sets what this rank answers to a PING.
func (b *Base) SetProgress(issued, completed uint64) {
	// A load is much faster than a store that other CPUs see at once. Mostly one of the two is as it was.
	if b.issued.Load() != issued {
		b.issued.Store(issued)
	}
	if b.completed.Load() != completed {
		b.completed.Store(completed)
	}
}

// SetWaiting implements transport.Mesh.
func (b *Base) SetWaiting(f func() transport.Waiting) { b.waiting.Store(&f) }

// waits returns what SetWaiting has set.
func (b *Base) waits() transport.Waiting {
	if f := b.waiting.Load(); f != nil {
		return (*f)()
	}
	return transport.Waiting{Op: transport.NoOp}
}

// Failed is closed once the mesh has a fault.
func (b *Base) Failed() <-chan struct{} { return b.failed }

// Fault returns what ended the mesh, nil while it works.
func (b *Base) Fault() *transport.Fault { return b.fault.Load() }

// OnDeath implements transport.Mesh.
func (b *Base) OnDeath(f func(*transport.Fault)) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.onDeath = append(b.onDeath, f)
	for _, p := range b.peers {
		if p != nil && p.died() {
			f(p.Gone)
		}
	}
}

// Abort implements transport.Mesh.
func (b *Base) Abort(f *transport.Fault) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.Fail(f)
}

// Close implements transport.Mesh.
func (b *Base) Close() error {
	b.Mu.Lock()
	if b.Ended() == nil {
		b.end(transport.ErrClosed, nil)
	}
	b.closed = true
	b.Mu.Unlock()
	b.Goroutines.Wait()
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if b.checking != nil {
		b.checking.Stop()
		b.checking = nil
	}
	for _, p := range b.peers {
		if p != nil {
			p.link.DropQueued(b.Ended())
		}
	}
	return nil
}

// checkLater has check called after a part of Limits.Close.
func (b *Base) checkLater() {
	pause := b.Limits.Close / closeChecks
	due := time.Now().Add(pause)
	b.checking = time.AfterFunc(pause, func() { b.check(due, pause) })
}

// check extends the end of the mesh if this process is late, and cuts the connections when its time is over.
func (b *Base) check(due time.Time, pause time.Duration) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if b.checking == nil {
		return // Close has returned
	}
	now := time.Now()
	if by := now.Add(2 * pause); b.Late(due) >= pause/4 && by.After(b.endBy) {
		b.endBy = by
		if by.After(b.latest) {
			b.endBy = b.latest
		}
	}
	if now.Before(b.endBy) {
		b.checkLater()
		return
	}
	b.cut = true
	for _, p := range b.peers {
		if p != nil {
			p.link.Cut()
		}
	}
}

// Ended returns how requests end from now on, nil while the mesh works. Mu is held.
func (b *Base) Ended() error {
	if f := b.fault.Load(); f != nil {
		return f
	}
	if b.closed {
		return transport.ErrClosed
	}
	return nil
}

// Fail ends the mesh with f, unless it has ended already. Mu is held. Every peer that has not
// ended its side gets an ABORT, even if another rank noticed the fault. Without one, the peer
// would blame this rank.
func (b *Base) Fail(f *transport.Fault) {
	if b.Ended() != nil {
		return
	}
	b.fault.Store(f)
	close(b.failed)
	for _, p := range b.peers {
		if p != nil {
			p.link.DropQueued(f)
		}
	}
	b.end(f, f)
	b.checkTold()
}

// Told is closed once the mesh has a fault, and its ABORTs are written or cannot be.
func (b *Base) Told() <-chan struct{} { return b.told }

// checkTold closes b.told when the last writer of a mesh that has failed has returned.
func (b *Base) checkTold() {
	if b.writers == 0 && b.fault.Load() != nil {
		close(b.told)
	}
}

// end completes all requests that no goroutine is working on, with err, and tells the peers f, or says goodbye if f is nil.
func (b *Base) end(err error, f *transport.Fault) {
	now := time.Now()
	b.endBy, b.latest = now.Add(b.Limits.Close), now.Add(closeMost*b.Limits.Close)
	b.onEnd()
	for _, p := range b.peers {
		if p != nil {
			p.link.EndRequests(err)
			p.Stranded.Complete(err)
		}
	}
	for _, q := range b.any {
		q.Complete(err)
	}
	clear(b.any)
	b.Changed()
	for _, p := range b.peers {
		if p != nil {
			p.link.Finish(f, b.latest)
		}
	}
	b.checkLater()
}

// Admit reports whether r may be posted to its peer. If not, it ends r. Mu is held.
func (b *Base) Admit(r *transport.Request) bool {
	if err := b.Ended(); err != nil {
		r.Complete(err)
		return false
	}
	if !b.IsPeer(r.Peer) {
		r.Complete(fmt.Errorf("mesh: rank %d has no peer %d in a group of %d", b.rank, r.Peer, b.size))
		return false
	}
	return true
}

// IsPeer reports whether rank is another rank of the group.
func (b *Base) IsPeer(rank int) bool { return rank >= 0 && rank < b.size && rank != b.rank }

// RecvAny implements transport.Mesh. It takes the message that came first.
func (b *Base) RecvAny(r *transport.Request) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if err := b.Ended(); err != nil {
		r.Complete(err)
		return
	}
	if b.size == 1 {
		r.Complete(errors.New("mesh: receive from any rank in a group of one"))
		return
	}
	var first *Peer
	var at uint64
	for _, p := range b.peers {
		if p == nil {
			continue
		}
		if order, ok := p.link.Offered(r.Slot); ok && (first == nil || order < at) {
			first, at = p, order
		}
	}
	if first != nil {
		if r.Claim() {
			r.Peer = first.Rank
			first.link.TakeOffered(r)
		}
		return
	}
	if why := b.inVain(); why != nil {
		if !r.Shared() {
			b.Fail(why)
		}
		r.Complete(why)
		return
	}
	q := b.any[r.Slot]
	q.Push(r)
	b.any[r.Slot] = q
}

// Withdraw forgets a receive from any rank that has a transport.Sharer, unless a message has
// been taken for it.
func (b *Base) Withdraw(r *transport.Request) {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if q, ok := b.any[r.Slot]; ok {
		q.Remove(r)
		b.setAny(r.Slot, q)
	}
}

// NextAny removes and returns the receive from any rank that takes the next message on a slot,
// nil if there is none. Mu is held.
func (b *Base) NextAny(slot uint64) *transport.Request {
	q, ok := b.any[slot]
	if !ok {
		return nil
	}
	r := q.Pop()
	for r != nil && !r.Claim() {
		r = q.Pop()
	}
	b.setAny(slot, q)
	return r
}

// AnySlots returns on how many slots receives from any rank wait. Mu is held.
func (b *Base) AnySlots() int { return len(b.any) }

func (b *Base) setAny(slot uint64, q transport.Requests) {
	if q.Empty() {
		delete(b.any, slot)
	} else {
		b.any[slot] = q
	}
}

// endShared ends the shared receives from any rank if they wait in vain, and reports whether
// there are others then.
func (b *Base) endShared() bool {
	why := b.inVain()
	if why == nil {
		return false
	}
	for slot, q := range b.any {
		var rest transport.Requests
		for r := q.Pop(); r != nil; r = q.Pop() {
			if r.Shared() {
				r.Complete(why)
			} else {
				rest.Push(r)
			}
		}
		b.setAny(slot, rest)
	}
	return len(b.any) > 0
}

// inVain returns why receives from any rank fail: one peer has died, or all have left. Who waits for any
// rank waits for the dead one too.
func (b *Base) inVain() *transport.Fault {
	if b.dead != nil {
		return b.dead
	}
	var last *Peer
	for i, p := range b.peers {
		switch {
		case i == b.rank:
		case p == nil || p.Gone == nil:
			return nil
		case last == nil || p.goneAt > last.goneAt:
			last = p
		}
	}
	if last == nil {
		return nil
	}
	return last.Gone
}

// NextArrival returns the position of a new message among those of all peers. Mu is held.
func (b *Base) NextArrival() uint64 {
	b.arrivals++
	return b.arrivals
}

// Changed makes every Await ask again. Mu is held.
func (b *Base) Changed() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// Await waits until done returns true, the mesh has ended or ctx has. Mu is held, but not while
// it waits. It asks done again after each Changed.
func (b *Base) Await(ctx context.Context, done func() bool) {
	for !done() && b.Ended() == nil && ctx.Err() == nil {
		changed := b.changed
		b.Mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		b.Mu.Lock()
	}
}

// Diagnose implements transport.Mesh.
func (b *Base) Diagnose(limit time.Duration, about ...int) []transport.Health {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.round++
	round := b.round
	var asked []*Peer
	for _, p := range b.peers {
		if p == nil || p.Gone != nil || b.Ended() != nil {
			continue
		}
		if p.ask(Ping{Round: round, About: pairOf(about), Deep: true}) {
			asked = append(asked, p)
		}
	}
	b.Await(ctx, func() bool {
		for _, p := range asked {
			if p.Gone == nil && p.lost == nil && p.pong.Round < round {
				return false
			}
		}
		return true
	})
	health, waiting := make([]transport.Health, b.size), b.waits()
	for i, p := range b.peers {
		h := &health[i]
		h.Rank, h.Native = i, p == nil || p.Native
		switch {
		case i == b.rank:
			h.Answered, h.Issued, h.Completed, h.Op = true, b.issued.Load(), b.completed.Load(), waiting.Op
			for _, p := range b.peers {
				if p != nil && p.Gone == nil {
					h.Links = append(h.Links, p.describe(waiting))
				}
			}
		case p != nil:
			h.Departed, h.Died = p.Gone != nil, p.died()
			if p.pong.Round >= round {
				h.Answered, h.Issued, h.Completed, h.Op, h.Links = true, p.pong.Issued, p.pong.Completed, p.pong.Op, p.pong.Links
			}
		}
	}
	return health
}

// LastWrites is what a writer knows of its write deadlines at the end of a mesh.
type LastWrites struct {
	due     time.Time // the latest deadline, zero before MoreTime has set one
	starved int       // how many passed while the writer may not have had the CPU
}

// mostStarved is how many write deadlines may pass while this process is late.
const mostStarved = 10

// MoreTime moves the write deadline of a connection on by Step, at the end of a mesh, after a write that the
// deadline has ended. A writer that waited for a CPU may not have tried at all: it gets more time mostStarved
// times. Others get none.
func (b *Base) MoreTime(conn net.Conn, w *LastWrites) bool {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if w.starved == mostStarved || !w.due.IsZero() && b.Late(w.due) < b.Limits.Step/4 {
		return false
	}
	w.starved++
	w.due = time.Now().Add(b.Limits.Step)
	conn.SetWriteDeadline(w.due)
	return true
}

// Peer is the state of another rank that no protocol is needed for. Base.Mu guards it.
type Peer struct {
	Rank     int
	Native   bool               // it is a rank of this library
	Near     bool               // it runs on this rank's host
	Gone     *transport.Fault   // the fault of requests that need this peer, once it has left or died
	Ending   bool               // the writers return when nothing is queued
	Stranded transport.Requests // their connection broke before they were done

	base    *Base
	link    Link
	running int // goroutines that use the connection
	goneAt  uint64
	lost    error // the connection has ended, and Doubt finds out why
	inquiry
}

// Fault returns a fault of this peer that belongs to no operation.
func (p *Peer) Fault(kind transport.FaultKind, err error) *transport.Fault {
	return transport.NewFault(kind, p.Rank, p.base.rank, err)
}

// Run starts the reader and the writer of a connection. Mu is held. Each must call Leave when it returns.
func (p *Peer) Run(read, write func()) {
	b := p.base
	p.running = 2
	b.Goroutines.Add(2)
	b.writers++
	go read()
	b.Goroutines.Go(func() {
		write()
		b.Mu.Lock()
		defer b.Mu.Unlock()
		b.writers--
		b.checkTold()
	})
}

// Leave is called by the reader and by the writer when they return. The second one closes the
// connection.
func (p *Peer) Leave(conn net.Conn) {
	p.base.Mu.Lock()
	p.running--
	last := p.running == 0
	p.base.Mu.Unlock()
	if last {
		conn.Close()
	}
	p.base.Goroutines.Done()
}

// Depart notes that the peer is gone, for the reason f: it has left or died. If a request needs the
// peer, as the caller says or a receive from any rank shows, the mesh fails and Depart returns false.
func (p *Peer) Depart(f *transport.Fault, needed bool) bool {
	b := p.base
	p.Gone, p.goneAt = f, b.NextArrival()
	if p.died() && b.dead == nil {
		b.dead = f
	}
	if needed || !p.Stranded.Empty() || b.endShared() {
		b.Fail(f)
		return false
	}
	p.Ending = true
	b.Changed()
	if p.died() {
		for _, tell := range b.onDeath {
			tell(f)
		}
	}
	return true
}

// died reports whether the peer is a rank of this library that has died. That of another library cannot say goodbye.
func (p *Peer) died() bool {
	return p.Native && p.Gone != nil && p.Gone.Kind == transport.FaultPeerDied
}

// EndWithGone ends r, which needs this peer, and the mesh.
func (p *Peer) EndWithGone(r *transport.Request) {
	p.base.Fail(p.Gone)
	r.Complete(p.base.Ended())
}

// Drain reads and discards until the peer closes its side or time is up. To close a socket that
// has unread bytes would reset the connection, and the peer would lose data. Once the mesh has ended,
// check says when time is up: this process may be late.
func (p *Peer) Drain(conn net.Conn) {
	b := p.base
	for {
		b.Mu.Lock()
		endBy, now := b.endBy, time.Now()
		limit := endBy
		if limit.IsZero() {
			limit = now.Add(b.Limits.Close)
		} else if b.extends() {
			limit = later(limit, now.Add(b.Limits.Close/closeChecks))
		}
		conn.SetReadDeadline(limit)
		b.Mu.Unlock()
		_, err := io.Copy(io.Discard, conn)
		b.Mu.Lock()
		again := errors.Is(err, os.ErrDeadlineExceeded) && (!b.endBy.Equal(endBy) || b.extends())
		b.Mu.Unlock()
		if !again {
			return
		}
	}
}

// extends reports whether check may still move endBy on. Mu is held.
func (b *Base) extends() bool { return b.checking != nil && !b.cut }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
