package wire

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

// maxNotices bounds what one peer can make this rank remember: notifications
// that no request has met yet. Each may be on a slot of its own, about 150
// bytes then, so a hostile peer costs at most 40 MiB.
const maxNotices = 1 << 18

// limits are how long the end of a mesh may take.
type limits struct {
	// close is how long Close waits for peers to take what is queued.
	close time.Duration

	// abort bounds the whole end of a mesh that failed, and abortStep how long
	// a socket may take nothing before it is given up: a stopped peer with a
	// full socket holds nobody up, and a live one that is in the middle of a
	// large message still gets to the ABORT behind it.
	abort, abortStep time.Duration
}

var usual = limits{close: time.Second, abort: 500 * time.Millisecond, abortStep: 100 * time.Millisecond}

// noOp is Fault.Op where a fault belongs to no operation.
const noOp = 0xff

// Options are what Rendezvous needs of a mesh; the zero value works.
type Options struct {
	// Departed, if not nil, is called when the connection of a peer has ended
	// and the mesh works on without it. It must not block.
	Departed func(peer int)
}

// Mesh is a transport.Mesh whose connections are handed to it one by one.
// Requests to a peer that is not connected yet wait for its connection. Its
// methods may be called from many goroutines.
type Mesh struct {
	rank, size        int
	opts              Options
	limits            limits
	issued, completed atomic.Uint64
	failed            chan struct{}
	wg                sync.WaitGroup

	mu       sync.Mutex
	pairs    []*pair          // nil at the own rank
	any      map[uint64]*slot // receives from any rank that wait, by slot, in recvs
	fault    *transport.Fault
	closed   bool
	endBy    time.Time     // when connections are cut, once the mesh has ended
	arrivals uint64        // SEND_READYs noted so far: their order across peers
	round    uint64        // of Diagnose
	answered chan struct{} // closed and replaced at each PONG, and at each peer's first message

	freeSlots   *slot
	freeNotices *notice
}

var _ transport.Mesh = (*Mesh)(nil)

// New returns the mesh of rank in a group of size ranks, with no connections.
func New(rank, size int, opts Options) *Mesh {
	m := &Mesh{
		rank: rank, size: size, opts: opts, limits: usual,
		failed:   make(chan struct{}),
		pairs:    make([]*pair, size),
		any:      make(map[uint64]*slot),
		answered: make(chan struct{}),
	}
	for i := range m.pairs {
		if i != rank {
			m.pairs[i] = newPair(m, i)
		}
	}
	return m
}

// Attach gives the mesh its connection to peer and owns it from then on. It is
// an error if there is one already or the mesh has ended; conn is closed then.
func (m *Mesh) Attach(peer int, conn net.Conn) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.ended()
	switch {
	case err != nil:
	case peer < 0 || peer >= m.size || peer == m.rank:
		err = fmt.Errorf("wire: no connection to rank %d belongs to rank %d of %d", peer, m.rank, m.size)
	case m.pairs[peer].conn != nil:
		err = fmt.Errorf("wire: rank %d is connected already", peer)
	}
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	m.pairs[peer].start(conn)
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
	p := m.admit(r)
	if p == nil {
		return
	}
	p.enqueue(notification(opSendReady, r))
	s := p.slot(r.Slot)
	if s.wanted.head == nil {
		s.sends.push(r)
		return
	}
	p.answer(r, p.take(&s.wanted))
	p.tidy(s)
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.admit(r)
	if p == nil {
		return
	}
	s := p.slot(r.Slot)
	s.recvs.push(r)
	if s.offered.head != nil {
		if f := p.checkOffer(r, p.take(&s.offered)); f != nil {
			m.fail(f)
			return
		}
	} else if s.unmatched == nil {
		s.unmatched = r
	}
	p.enqueue(notification(opRecvReady, r))
}

// RecvAny implements transport.Mesh. The sender is the one whose message was
// announced first.
func (m *Mesh) RecvAny(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.ended(); err != nil {
		r.Complete(err)
		return
	}
	if isControl(r.Slot) {
		r.Complete(reservedSlot(r.Slot))
		return
	}
	var first *pair
	var at uint64
	for _, p := range m.pairs {
		if p == nil {
			continue
		}
		if s := p.slots[r.Slot]; s != nil && s.offered.head != nil && (first == nil || s.offered.head.order < at) {
			first, at = p, s.offered.head.order
		}
	}
	if first != nil {
		s := first.slots[r.Slot]
		first.bind(s, r, first.take(&s.offered))
		return
	}
	if m.size == 1 {
		r.Complete(errors.New("wire: receive from any rank in a group of one"))
		return
	}
	if last := m.lastDeparture(); last != nil {
		m.fail(last)
		r.Complete(m.fault)
		return
	}
	s := m.any[r.Slot]
	if s == nil {
		s = m.newSlot(r.Slot)
		m.any[r.Slot] = s
	}
	s.recvs.push(r)
}

// admit returns the pair that r is for. If there is none that works it ends r
// and returns nil.
func (m *Mesh) admit(r *transport.Request) *pair {
	switch err := m.ended(); {
	case err != nil:
		r.Complete(err)
	case r.Peer < 0 || r.Peer >= m.size || r.Peer == m.rank:
		r.Complete(fmt.Errorf("wire: rank %d has no peer %d in a group of %d", m.rank, r.Peer, m.size))
	case isControl(r.Slot):
		r.Complete(reservedSlot(r.Slot))
	case m.pairs[r.Peer].gone != nil:
		m.fail(m.pairs[r.Peer].gone)
		r.Complete(m.fault)
	default:
		return m.pairs[r.Peer]
	}
	return nil
}

func reservedSlot(slot uint64) error {
	return fmt.Errorf("wire: slot %#x: slots that begin with %#x are reserved", slot, controlPrefix)
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
	var last *transport.Fault
	var when uint64
	for _, p := range m.pairs {
		if p == nil {
			continue
		}
		if p.gone == nil {
			return nil
		}
		if p.goneAt >= when {
			last, when = p.gone, p.goneAt
		}
	}
	return last
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
	m.end(f, m.limits.abort)
	now, words := time.Now(), wordsHeaders(f.Words())
	for _, p := range m.pairs {
		if p != nil {
			p.dropSends(f)
			if p.version >= 2 && p.gone == nil {
				for _, h := range words {
					p.enqueue(item{h: h})
				}
			}
			p.finish(abortHeader(f), now.Add(m.limits.abortStep))
		}
	}
}

// Close implements transport.Mesh.
func (m *Mesh) Close() error {
	m.mu.Lock()
	if m.ended() == nil {
		m.end(transport.ErrClosed, m.limits.close)
		for _, p := range m.pairs {
			if p != nil {
				p.finish(control(ctlBye), m.endBy)
			}
		}
	}
	m.closed = true
	m.mu.Unlock()
	m.wg.Wait()
	return nil
}

// end completes all requests that no goroutine is working on.
func (m *Mesh) end(err error, limit time.Duration) {
	m.endBy = time.Now().Add(limit)
	for _, p := range m.pairs {
		if p == nil {
			continue
		}
		for _, s := range p.slots {
			s.sends.complete(err)
			s.recvs.complete(err)
		}
		clear(p.slots)
		p.stranded.complete(err)
	}
	for _, s := range m.any {
		s.recvs.complete(err)
	}
	clear(m.any)
	m.freeSlots, m.freeNotices = nil, nil
	m.wakeDiagnose()
}

// Foreign returns the ranks that have shown that they are not of this library: PyTorch's. A
// rank shows what it is with its first message.
func (m *Mesh) Foreign() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ranks []int
	for r, p := range m.pairs {
		if p != nil && p.other {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// Diagnose implements transport.Mesh.
func (m *Mesh) Diagnose(limit time.Duration) []transport.Health {
	timeout := time.NewTimer(limit)
	defer timeout.Stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.round++
	round := m.round
	ping := control(ctlPing)
	ping.offset = round
	for _, p := range m.pairs {
		if p != nil && p.native && p.gone == nil && m.ended() == nil {
			p.enqueue(item{h: ping})
			p.pinged = round
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
		h.Rank = i
		if p == nil {
			h.Native, h.Answered = true, true
			h.Issued, h.Completed = m.issued.Load(), m.completed.Load()
			continue
		}
		h.Native, h.Departed = p.native, p.gone != nil && p.gone.Kind == transport.FaultPeerLeft
		if p.pong.round >= round {
			h.Answered, h.Issued, h.Completed = true, p.pong.issued, p.pong.completed
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

// Newer reports whether peer is a rank of this library that speaks version 2 of the control
// messages. It waits for the first message of a peer that has sent none, until ctx or the mesh
// ends: PyTorch's ranks say nothing before they have something to say.
func (m *Mesh) Newer(ctx context.Context, peer int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pairs[peer]
	for !p.spoke && p.gone == nil && m.ended() == nil && ctx.Err() == nil {
		spoken := m.answered
		m.mu.Unlock()
		select {
		case <-spoken:
		case <-ctx.Done():
		}
		m.mu.Lock()
	}
	return p.version >= 2
}

// slot is what a pair knows of one slot. It exists while it holds something.
type slot struct {
	key       uint64
	sends     fifo               // sends that no RECV_READY has met
	recvs     fifo               // receives whose DATA has not come
	unmatched *transport.Request // the first of recvs that no SEND_READY has met; those behind it have met none either
	offered   notices            // SEND_READYs that no receive has met
	wanted    notices            // RECV_READYs that no send has met
	next      *slot              // in Mesh.freeSlots
}

func (s *slot) empty() bool {
	return s.sends.head == nil && s.recvs.head == nil && s.offered.head == nil && s.wanted.head == nil
}

func (m *Mesh) newSlot(key uint64) *slot {
	s := m.freeSlots
	if s == nil {
		s = new(slot)
	} else {
		m.freeSlots = s.next
	}
	*s = slot{key: key}
	return s
}

func (m *Mesh) freeSlot(s *slot) {
	s.next = m.freeSlots
	m.freeSlots = s
}

// fifo is a queue of requests, linked through Request.Next.
type fifo struct{ head, tail *transport.Request }

func (q *fifo) push(r *transport.Request) {
	r.Next = nil
	if q.head == nil {
		q.head = r
	} else {
		q.tail.Next = r
	}
	q.tail = r
}

func (q *fifo) pop() *transport.Request {
	r := q.head
	q.head = r.Next
	r.Next = nil
	return r
}

func (q *fifo) complete(err error) {
	for q.head != nil {
		q.pop().Complete(err)
	}
}

// notice is a notification that came before the request that it will meet.
type notice struct {
	length uint64
	order  uint64 // among the SEND_READYs of all peers
	next   *notice
}

type notices struct{ head, tail *notice }
