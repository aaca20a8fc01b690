package tcp

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

var (
	errBye   = errors.New("tcp: the peer said goodbye")
	errEnded = errors.New("tcp: the mesh has ended")
)

// pair is the connection between this rank and a peer: the stream of messages, the first
// socket, and the sockets for large messages, which carry data one way each. Mesh.Mu guards it.
type pair struct {
	mesh.Peer
	m         *Mesh
	s         stream
	checksums bool // payloads have checksums, both ways; headers always have

	first    *lane
	in       *input
	bulk     []*lane // to the peer
	opening  bool    // bulk connections are open, being opened, or could not be opened
	inbound  map[net.Conn]struct{}
	filling  bool          // a request that the stream has forgotten is being read into
	deferred bool          // is in Mesh.deferred
	sent     uint64        // bytes that were written to its connections
	got      atomic.Uint64 // bytes of messages that were read from them

	end     *transport.Fault // why no more frames come; the peer's other connections may still bring something
	cutOff  bool             // the peer died while it said why the group ends
	suspect error            // why another connection ended; the first connection will tell more

	asked    opNumber // the operation that the peer asks about, until this rank has answered
	answered opNumber // the last operation about which the peer has answered
}

// corrupted returns the fault that a header of the peer was changed on the way.
func (p *pair) corrupted(err error) *transport.Fault {
	p.m.Mu.Lock()
	defer p.m.Mu.Unlock()
	return p.corruptedLocked(0, err)
}

// corruptedLocked returns the fault that a message of the peer on a slot was changed on the way.
func (p *pair) corruptedLocked(slot uint64, err error) *transport.Fault {
	f := p.Fault(transport.FaultCorrupted, err)
	f.Op, f.Seq = p.m.calls.operation(slot)
	return f
}

// Offered implements mesh.Link.
func (p *pair) Offered(slot uint64) (order uint64, ok bool) {
	a, ok := p.s.in.Value(slot)
	return a.order, ok && (a.here || p.Gone == nil)
}

// TakeOffered implements mesh.Link.
func (p *pair) TakeOffered(r *transport.Request) { p.recv(r) }

func (p *pair) recv(r *transport.Request) {
	if f := p.s.recv(r); f != nil {
		p.m.Fail(f)
		return
	}
	p.pump()
}

// Ping implements mesh.Link.
func (p *pair) Ping(q mesh.Ping) bool {
	about, deep := q.Pack()
	p.s.frames.push(item{f: frame{kind: kPing, slot: q.Round, length: about, handle: deep}})
	p.pump()
	return true
}

// Received implements mesh.Link.
func (p *pair) Received() uint64 { return p.got.Load() }

// Answer implements mesh.Link.
func (p *pair) Answer() { p.pump() }

// Waits implements mesh.Link.
func (p *pair) Waits() bool {
	if p.filling || !p.Stranded.Empty() || p.s.needsPeer() || p.first.hasRequests() {
		return true
	}
	return slices.ContainsFunc(p.bulk, (*lane).hasRequests)
}

// Conns implements mesh.Link.
func (p *pair) Conns() []net.Conn {
	conns := []net.Conn{p.first.conn}
	for _, l := range p.bulk {
		conns = append(conns, l.conn)
	}
	for c := range p.inbound {
		conns = append(conns, c)
	}
	return conns
}

// DropQueued implements mesh.Link.
func (p *pair) DropQueued(err error) { p.s.drop(err) }

// pump lets every idle lane write. During a Post it only notes that it has to.
func (p *pair) pump() {
	if p.m.posting > 0 {
		if !p.deferred {
			p.deferred = true
			p.m.deferred = append(p.m.deferred, p)
		}
		return
	}
	p.first.pump()
	if p.s.bulk.len() == 0 {
		return
	}
	n := p.s.bulk.len()
	if n < len(p.bulk) && len(p.s.bulk.front().req.Buf) > p.m.opts.pieceBytes {
		n = len(p.bulk) // one message keeps all of them busy
	}
	for _, l := range p.bulk {
		if !l.busy && n > 0 {
			l.wakeWriter()
			n--
		}
	}
}

func (p *pair) answerPing() {
	if a, ok := p.TakePing(); ok {
		p.s.frames.push(item{f: pongFrame(a)})
	}
}

// Finish implements mesh.Link. It wakes readers out of whatever they are in.
func (p *pair) Finish(f *transport.Fault, writeBy time.Time) {
	if p.Gone == nil && f == nil {
		p.s.frames.push(item{f: frame{kind: kBye}})
	} else if p.Gone == nil {
		p.s.frames.push(abortItem(f))
	}
	p.Ending = true
	past := time.Unix(1, 0)
	p.first.conn.SetWriteDeadline(writeBy)
	p.first.conn.SetReadDeadline(past)
	p.first.wakeWriter()
	for _, l := range p.bulk {
		l.conn.SetWriteDeadline(writeBy)
		l.wakeWriter()
	}
	for c := range p.inbound {
		c.SetReadDeadline(past)
	}
}

// Cut implements mesh.Link.
func (p *pair) Cut() {
	past := time.Unix(1, 0)
	p.first.conn.SetWriteDeadline(past)
	for _, l := range p.bulk {
		l.conn.SetWriteDeadline(past)
	}
}

// writeFailed ends a lane whose connection broke. The reader of the first connection decides
// what becomes of its requests: there may be a BYE to read.
func (p *pair) writeFailed(l *lane) {
	m := p.m
	switch end := m.Ended(); {
	case end != nil:
		p.s.dropPieces(end)
		l.complete(end)
	case p.Gone != nil && l.hasRequests():
		m.Fail(p.Gone)
		l.complete(m.Ended())
	case p.Gone != nil:
		l.complete(nil)
	default:
		p.awaitReason(l.conn, l.broken)
	}
}

// awaitReason gives the peer reasonLimit to say on the first connection why another one ended.
func (p *pair) awaitReason(conn net.Conn, err error) {
	if p.suspect == nil {
		p.suspect = fmt.Errorf("tcp: another connection with rank %d at %v: %w", p.Rank, conn.RemoteAddr(), mesh.EndOf(conn, err))
		p.first.conn.SetReadDeadline(time.Now().Add(p.m.opts.reasonLimit))
	}
}

// EndRequests implements mesh.Link.
func (p *pair) EndRequests(err error) {
	p.s.end(err)
	for _, l := range slices.Concat(p.bulk, []*lane{p.first}) {
		if l.broken != nil {
			p.s.dropPieces(err)
			l.complete(err)
		}
	}
}

// lost decides how the mesh goes on when no more frames come from the peer, because of err.
func (p *pair) lost(err error) {
	var f *transport.Fault
	switch {
	case errors.As(err, &f):
		p.m.Fail(f)
	case errors.Is(err, errBye):
		p.ended(p.Fault(transport.FaultPeerLeft, nil))
	default:
		if p.suspect != nil {
			err = p.suspect
		} else {
			err = fmt.Errorf("tcp: connection with rank %d at %v: %w", p.Rank, p.first.conn.RemoteAddr(), mesh.EndOf(p.first.conn, err))
		}
		if p.Unsure(err) {
			p.Doubt(err)
			return
		}
		p.ended(p.Fault(transport.FaultPeerDied, err))
	}
}

// Died implements mesh.Link.
func (p *pair) Died(f *transport.Fault) { p.ended(f) }

// ended notes that the peer has said BYE, or that its first connection has ended without.
func (p *pair) ended(f *transport.Fault) {
	p.end = f
	for c := range p.inbound {
		c.SetReadDeadline(time.Now().Add(p.m.opts.reasonLimit)) // what is on its way is nearly here
	}
	p.m.begun.Broadcast()
	p.depart()
}

// depart lets a peer go that has left or died, once none of its connections can bring anything.
func (p *pair) depart() {
	if p.end == nil || p.Gone != nil || len(p.inbound) > 0 {
		return
	}
	needed := p.s.needsPeer() || p.unsent() || p.cutOff || p.m.joining && p.end.Kind == transport.FaultPeerDied
	if !p.Depart(p.end, needed) {
		return
	}
	p.first.conn.SetWriteDeadline(time.Now().Add(limits.Close))
	p.first.wakeWriter()
	for _, l := range p.bulk {
		l.wakeWriter()
	}
}

// unsent reports whether a connection broke before it had sent what a request waits for.
func (p *pair) unsent() bool {
	for _, l := range p.bulk {
		if l.broken != nil && l.hasRequests() {
			return true
		}
	}
	return p.first.broken != nil && (p.first.hasRequests() || p.s.queued())
}
