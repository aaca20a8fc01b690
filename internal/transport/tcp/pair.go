package tcp

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

var (
	errBye   = errors.New("tcp: the peer said goodbye")
	errEnded = errors.New("tcp: the mesh has ended")
)

// pair is everything between this rank and a peer: the stream of messages, the
// first connection, and those for large messages, which carry data one way
// each. Mesh.mu guards it.
type pair struct {
	mesh.Peer
	m *Mesh
	s stream

	first   *lane
	in      *input
	bulk    []*lane // to the peer
	opening bool    // they are being opened, are open, or could not be opened
	inbound map[net.Conn]struct{}
	filling bool // a request that no stream knows of any more is being read to
	held    bool // is in Mesh.held

	bye     bool  // the peer has said goodbye; its other connections may still bring something
	suspect error // what happened to another connection: the first one will tell why

	asked    maybe // the operation that the peer asks about, until this rank has answered
	answered maybe // the last operation of which the peer has answered what it called
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
func (p *pair) Ping(round uint64) bool {
	p.s.frames.push(item{f: frame{kind: kPing, slot: round}})
	p.pump()
	return true
}

// DropQueued implements mesh.Link.
func (p *pair) DropQueued(err error) { p.s.drop(err) }

// pump lets every idle lane write, or those that are in Post when they have done.
func (p *pair) pump() {
	if p.m.holding > 0 {
		if !p.held {
			p.held = true
			p.m.held = append(p.m.held, p)
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
			l.rouse()
			n--
		}
	}
}

func (p *pair) answerPing() {
	if round, issued, completed, ok := p.TakePing(); ok {
		p.s.frames.push(item{f: frame{kind: kPong, slot: round, length: issued, credit: completed}})
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
	if p.m.opts.TLS != nil {
		writeBy = p.m.EndBy() // a TLS connection does not survive a deadline
	}
	p.first.conn.SetWriteDeadline(writeBy)
	p.first.conn.SetReadDeadline(past)
	p.first.rouse()
	for _, l := range p.bulk {
		l.conn.SetWriteDeadline(writeBy)
		l.rouse()
	}
	for c := range p.inbound {
		c.SetReadDeadline(past)
	}
}

// writeFailed is the end of a lane whose connection broke. What it could not
// send ends as the reader of the first connection finds; there may still be a
// goodbye to read.
func (p *pair) writeFailed(l *lane) {
	m := p.m
	switch end := m.Ended(); {
	case end != nil:
		p.s.dropPieces(end)
		l.settle(end)
	case p.Gone != nil && l.holds():
		m.Fail(p.Gone)
		l.settle(m.Ended())
	case p.Gone != nil:
		l.settle(nil)
	default:
		p.doubt(l.conn, l.broken)
	}
}

// doubt gives the peer a moment to say on the first connection why another
// ended.
func (p *pair) doubt(conn net.Conn, err error) {
	if p.suspect == nil {
		p.suspect = fmt.Errorf("tcp: another connection with rank %d at %v: %w", p.Rank, conn.RemoteAddr(), err)
		p.first.conn.SetReadDeadline(time.Now().Add(p.m.opts.doubtLimit))
	}
}

// EndRequests implements mesh.Link.
func (p *pair) EndRequests(err error) {
	p.s.end(err)
	for _, l := range slices.Concat(p.bulk, []*lane{p.first}) {
		if l.broken != nil {
			p.s.dropPieces(err)
			l.settle(err)
		}
	}
}

// lost decides what it means that no more frames come, because of err.
func (p *pair) lost(err error) {
	var f *transport.Fault
	switch {
	case errors.As(err, &f):
		p.m.Fail(f)
	case errors.Is(err, errBye):
		p.bye = true
		for c := range p.inbound {
			c.SetReadDeadline(time.Now().Add(p.m.opts.doubtLimit)) // what is on its way is nearly here
		}
		p.depart()
	default:
		if p.suspect != nil {
			err = p.suspect
		} else {
			err = fmt.Errorf("tcp: connection with rank %d at %v: %w", p.Rank, p.first.conn.RemoteAddr(), err)
		}
		p.Gone = p.Fault(transport.FaultPeerDied, err)
		p.m.Fail(p.Gone)
	}
}

// depart lets a peer go that has said goodbye, once nothing more of it is
// under way.
func (p *pair) depart() {
	if !p.bye || p.Gone != nil || len(p.inbound) > 0 {
		return
	}
	if !p.Depart(p.Fault(transport.FaultPeerLeft, nil), p.s.needed() || p.unsent()) {
		return
	}
	p.first.conn.SetWriteDeadline(time.Now().Add(limits.Close))
	p.first.rouse()
	for _, l := range p.bulk {
		l.rouse()
	}
}

// unsent reports whether a connection broke under something that a request
// waits for.
func (p *pair) unsent() bool {
	for _, l := range p.bulk {
		if l.broken != nil && l.holds() {
			return true
		}
	}
	return p.first.broken != nil && p.first.holds()
}
