package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// closeLimit is how long Close waits for peers to take what is queued.
	closeLimit = time.Second

	// abortLimit bounds the whole end of a mesh that failed, and abortStep how
	// long a socket may take nothing before it is given up: a stopped peer
	// with a full socket holds nobody up, and a live one that is in the middle
	// of a large message still gets to the ABORT behind it.
	abortLimit = 500 * time.Millisecond
	abortStep  = 200 * time.Millisecond

	// doubtLimit is how long a peer may take to say on the first connection why
	// another has ended. If it is dead the first one ends as well, and at once; this
	// is for what lies between hosts and ends one connection alone.
	doubtLimit = 5 * time.Second

	// pieceBytes is how much of a message goes over one connection before
	// another may have the next part, or small messages on the first connection their
	// turn. With 256 KiB, all-reduces of 4 MiB take 1.25 times as long between 2 polling ranks
	// (1110 and 890 us), and with 2 MiB 1.06 times.
	pieceBytes = 1 << 20

	// bulkyBytes is the size from which messages go over the other connections.
	bulkyBytes = 512 << 10
)

// noOp is Fault.Op where a fault belongs to no operation.
const noOp = 0xff

// Mesh is a transport.Mesh over TCP. [Endpoint.Join] makes one. Its methods
// may be called from many goroutines.
type Mesh struct {
	rank, size        int
	opts              Options
	addrs             []address
	door              *door
	issued, completed atomic.Uint64
	failed            chan struct{}
	stop              context.CancelFunc // of what dials
	ctx               context.Context
	wg                sync.WaitGroup

	mu       sync.Mutex
	begun    sync.Cond       // a message has begun, or the mesh has ended
	pairs    []*pair         // nil at the own rank, and where there is no connection yet
	any      map[uint64]fifo // receives from any rank that wait, by slot
	fault    *transport.Fault
	closed   bool
	endBy    time.Time // when connections are cut, once the mesh has ended
	arrivals uint64    // messages noted so far: their order across peers
	round    uint64    // of Diagnose
	answered chan struct{}
	blocks   blocks
	calls    calls
	asking   int     // peers that have asked and not been answered
	holding  int     // how many are in Post
	held     []*pair // where something is to be written once they have left

	// Of those who poll:
	shares  bool          // a CPU with other ranks
	skip    atomic.Int64  // how often not to poll
	vain    atomic.Int64  // what skip was last
	helpers atomic.Int64  // how many there are
	helps   atomic.Uint64 // how many there have been
	later   *time.Timer   // under mu, as what follows
	armed   bool
	sight   time.Duration // what the timer is set to
	seen    uint64        // helps when it rang last
}

var _ transport.Mesh = (*Mesh)(nil)

func newMesh(rank, size int, o Options) *Mesh {
	m := &Mesh{
		rank: rank, size: size, opts: o,
		failed:   make(chan struct{}),
		pairs:    make([]*pair, size),
		any:      make(map[uint64]fifo),
		answered: make(chan struct{}),
	}
	m.begun.L = &m.mu
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m
}

// attach gives the mesh its first connection to a peer and owns it from then on.
// After an error the connection is the caller's.
func (m *Mesh) attach(peer int, conn net.Conn, eager, window uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.ended(); err != nil {
		return err
	}
	if m.pairs[peer] != nil {
		return fmt.Errorf("tcp: rank %d is connected already", peer)
	}
	p := &pair{m: m, peer: peer, inbound: make(map[net.Conn]struct{})}
	p.s.init(m.rank, peer, min(m.opts.Eager, int(eager)), int64(min(uint64(m.opts.Window), window)), &m.blocks, &m.calls)
	if m.opts.Poll > 0 {
		conn = ownSocket(conn)
	}
	p.first, p.in = newLane(p, conn, false), newInput(p, conn, false)
	p.running = 2
	m.pairs[peer] = p
	m.wg.Add(2)
	go p.read()
	go p.first.write()
	return nil
}

// expect announces another connection of a peer's, which attachInbound completes.
func (m *Mesh) expect(peer int, conn net.Conn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pairs[peer]
	if m.ended() != nil || p == nil || p.gone != nil || p.bye || len(p.inbound) == maxLanes {
		return false
	}
	p.inbound[conn] = struct{}{}
	return true
}

// attachInbound is attach for another connection of a peer's, or the end of
// it if the handshake was not good.
func (m *Mesh) attachInbound(peer int, conn net.Conn, good bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pairs[peer]
	if !good || m.ended() != nil {
		delete(p.inbound, conn)
		if m.ended() == nil {
			p.depart()
		}
		return false
	}
	if p.bye {
		conn.SetReadDeadline(time.Now().Add(m.opts.doubtLimit))
	}
	m.wg.Add(1)
	go p.readBulk(conn)
	return true
}

// attachBulk is attach for another connection to a peer.
func (m *Mesh) attachBulk(p *pair, conn net.Conn) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.ended(); err != nil {
		return err
	}
	if p.ending {
		return errEnded
	}
	l := newLane(p, conn, true)
	p.bulk = append(p.bulk, l)
	p.s.bulky = m.opts.bulkyBytes
	m.wg.Add(1)
	go l.write()
	return nil
}

// Rank returns this rank's number.
func (m *Mesh) Rank() int { return m.rank }

// Size returns the number of ranks.
func (m *Mesh) Size() int { return m.size }

// SetProgress sets what this rank answers to a PING.
func (m *Mesh) SetProgress(issued, completed uint64) {
	m.issued.Store(issued)
	m.completed.Store(completed)
}

// Failed is closed once the mesh has a fault.
func (m *Mesh) Failed() <-chan struct{} { return m.failed }

// Fault returns what ended the mesh, nil while it works.
func (m *Mesh) Fault() *transport.Fault {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fault
}

// Send implements transport.Mesh.
func (m *Mesh) Send(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.send(r)
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recv(r)
}

// Post is Recv for recvs and then Send for sends, each in their order. All that this makes
// necessary leaves together, and what a peer has granted counts if it is here, though
// nobody has read it yet: of two ranks that trade large messages, who comes later writes
// nothing but the message, with the grant for the other's before it.
func (m *Mesh) Post(recvs, sends []*transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holding++
	for _, r := range recvs {
		m.recv(r)
	}
	for _, r := range sends {
		m.look(r)
		m.send(r)
	}
	m.holding--
	for m.holding == 0 && len(m.held) > 0 {
		last := len(m.held) - 1
		p := m.held[last]
		m.held = m.held[:last]
		p.held = false
		p.pump()
	}
}

// look reads what is there of the peer of a send that wants a grant, if no goroutine
// sleeps until something is. It lets go of the mesh's lock.
func (m *Mesh) look(r *transport.Request) {
	if m.ended() != nil || r.Peer < 0 || r.Peer >= m.size || r.Peer == m.rank {
		return
	}
	if p := m.pairs[r.Peer]; p.in.poll != nil && p.s.wanting(r) {
		m.mu.Unlock()
		p.in.help(true)
		m.mu.Lock()
	}
}

func (m *Mesh) send(r *transport.Request) {
	p := m.admit(r)
	switch {
	case p == nil:
		return
	case p.gone != nil:
		m.fail(p.gone)
		r.Complete(m.ended())
		return
	}
	if f := p.s.send(r); f != nil {
		m.fail(f)
		return
	}
	if len(r.Buf) >= m.opts.bulkyBytes && !p.opening {
		p.opening = true
		m.open(p)
	}
	p.pump()
}

func (m *Mesh) recv(r *transport.Request) {
	p := m.admit(r)
	if p == nil {
		return
	}
	if p.gone != nil {
		// What it sent before it left is still here.
		if a, ok := p.s.in.Value(r.Slot); !ok || !a.here {
			m.fail(p.gone)
			r.Complete(m.ended())
			return
		}
	}
	if f := p.s.recv(r); f != nil {
		m.fail(f)
		return
	}
	p.pump()
}

// RecvAny implements transport.Mesh. The sender is the one whose message came
// first.
func (m *Mesh) RecvAny(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.ended(); err != nil {
		r.Complete(err)
		return
	}
	var first *pair
	var at uint64
	for _, p := range m.pairs {
		if p == nil {
			continue
		}
		a, ok := p.s.in.Value(r.Slot)
		if ok && (a.here || p.gone == nil) && (first == nil || a.order < at) {
			first, at = p, a.order
		}
	}
	if first != nil {
		if !r.Claim() {
			return
		}
		r.Peer = first.peer
		if f := first.s.recv(r); f != nil {
			m.fail(f)
			return
		}
		first.pump()
		return
	}
	if m.size == 1 {
		r.Complete(errors.New("tcp: receive from any rank in a group of one"))
		return
	}
	if last := m.lastDeparture(); last != nil {
		if !r.Shared() {
			m.fail(last)
		}
		r.Complete(last)
		return
	}
	q := m.any[r.Slot]
	q.push(r)
	m.any[r.Slot] = q
}

// takeAny returns the receive from any rank that takes a message of p's, nil if
// there is none.
func (m *Mesh) takeAny(p *pair, slot, length uint64) (*transport.Request, error) {
	q, ok := m.any[slot]
	if !ok {
		return nil, nil
	}
	defer func() { m.setAny(slot, q) }()
	for q.head != nil && !q.head.Claim() {
		q.pop()
	}
	if q.head == nil {
		return nil, nil
	}
	if f := p.s.fits(q.head, length); f != nil {
		return nil, f
	}
	r := q.pop()
	r.Peer = p.peer
	return r, nil
}

func (m *Mesh) setAny(slot uint64, q fifo) {
	if q.head == nil {
		delete(m.any, slot)
	} else {
		m.any[slot] = q
	}
}

// Withdraw forgets a receive from any rank that has a transport.Sharer, unless a message
// has been taken for it.
func (m *Mesh) Withdraw(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if q, ok := m.any[r.Slot]; ok {
		m.setAny(r.Slot, q.without(r))
	}
}

// forsaken ends the shared receives from any rank if nobody is left, and reports
// whether there are others then.
func (m *Mesh) forsaken() bool {
	last := m.lastDeparture()
	if last == nil {
		return false
	}
	for slot, q := range m.any {
		var own fifo
		for q.head != nil {
			if r := q.pop(); r.Shared() {
				r.Complete(last)
			} else {
				own.push(r)
			}
		}
		m.setAny(slot, own)
	}
	return len(m.any) > 0
}

// admit returns the pair that r is for. If there is none that works it ends r
// and returns nil.
func (m *Mesh) admit(r *transport.Request) *pair {
	if err := m.ended(); err != nil {
		r.Complete(err)
		return nil
	}
	if r.Peer < 0 || r.Peer >= m.size || r.Peer == m.rank {
		r.Complete(fmt.Errorf("tcp: rank %d has no peer %d in a group of %d", m.rank, r.Peer, m.size))
		return nil
	}
	return m.pairs[r.Peer]
}

// ended returns how requests end from now on, nil while the mesh works.
func (m *Mesh) ended() error {
	switch {
	case m.fault != nil:
		return m.fault
	case m.closed:
		return transport.ErrClosed
	}
	return nil
}

// lastDeparture returns why no peer is left, nil if one is.
func (m *Mesh) lastDeparture() *transport.Fault {
	var last *pair
	for i, p := range m.pairs {
		switch {
		case i == m.rank:
		case p == nil || p.gone == nil:
			return nil
		case last == nil || p.goneAt > last.goneAt:
			last = p
		}
	}
	if last == nil {
		return nil
	}
	return last.gone
}

// Abort implements transport.Mesh.
func (m *Mesh) Abort(f *transport.Fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail(f)
}

// fail ends the mesh with f: the first fault stays. Every peer that did not end
// its side already gets an ABORT, even if another rank noticed the fault: a
// connection that ends without one would make the peer blame this rank.
func (m *Mesh) fail(f *transport.Fault) {
	if m.ended() != nil {
		return
	}
	m.fault = f
	close(m.failed)
	for _, p := range m.pairs {
		if p != nil {
			p.s.drop(f)
		}
	}
	m.end(f, abortLimit)
	by := time.Now().Add(abortStep)
	for _, p := range m.pairs {
		if p != nil {
			p.finish(abortItem(f), by)
		}
	}
}

// Close implements transport.Mesh.
func (m *Mesh) Close() error {
	m.mu.Lock()
	if m.ended() == nil {
		m.end(transport.ErrClosed, closeLimit)
		for _, p := range m.pairs {
			if p != nil {
				p.finish(item{f: frame{kind: kBye}}, m.endBy)
			}
		}
	}
	m.closed = true
	m.mu.Unlock()
	m.wg.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.pairs {
		if p != nil {
			p.s.drop(m.ended())
		}
	}
	return nil
}

// end completes all requests that no goroutine is working on.
func (m *Mesh) end(err error, limit time.Duration) {
	m.stop()
	if m.later != nil {
		m.later.Stop()
	}
	if m.door != nil {
		m.door.close()
	}
	m.endBy = time.Now().Add(limit)
	for _, p := range m.pairs {
		if p != nil {
			p.end(err)
		}
	}
	for _, q := range m.any {
		q.complete(err)
	}
	clear(m.any)
	m.begun.Broadcast()
	m.wakeDiagnose()
}

// Diagnose implements transport.Mesh.
func (m *Mesh) Diagnose(limit time.Duration) []transport.Health {
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.round++
	round := m.round
	for _, p := range m.pairs {
		if p != nil && p.gone == nil && m.ended() == nil {
			p.pinged = round
			p.s.frames.push(item{f: frame{kind: kPing, slot: round}})
			p.pump()
		}
	}
	for expired := false; !expired && m.ended() == nil && !m.allAnswered(round); {
		answered := m.answered
		m.mu.Unlock()
		select {
		case <-answered:
		case <-timeout.C:
			expired = true
		}
		m.mu.Lock()
	}
	health := make([]transport.Health, m.size)
	for i, p := range m.pairs {
		h := &health[i]
		h.Rank, h.Native = i, true
		switch {
		case i == m.rank:
			h.Answered, h.Issued, h.Completed = true, m.issued.Load(), m.completed.Load()
		case p != nil:
			h.Departed = p.gone != nil && p.gone.Kind == transport.FaultPeerLeft
			if p.pong.round >= round {
				h.Answered, h.Issued, h.Completed = true, p.pong.issued, p.pong.completed
			}
		}
	}
	return health
}

func (m *Mesh) allAnswered(round uint64) bool {
	for _, p := range m.pairs {
		if p != nil && p.gone == nil && p.pinged >= round && p.pong.round < round {
			return false
		}
	}
	return true
}

func (m *Mesh) wakeDiagnose() {
	close(m.answered)
	m.answered = make(chan struct{})
}
