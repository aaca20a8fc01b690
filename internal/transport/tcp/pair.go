package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

var (
	errBye   = errors.New("tcp: the peer said goodbye")
	errEnded = errors.New("tcp: the mesh has ended")
)

// pair is everything between this rank and a peer: the stream of messages, the
// first connection, and those for large messages, which carry data one way
// each. Mesh.mu guards it.
type pair struct {
	m    *Mesh
	peer int
	s    stream

	first   *lane
	in      *input
	bulk    []*lane // to the peer
	opening bool    // they are being opened, are open, or could not be opened
	inbound map[net.Conn]struct{}
	running int  // goroutines of the first connection
	filling bool // a request that no stream knows of any more is being read to
	ending  bool
	held    bool // is in Mesh.held

	stranded fifo             // receives whose connection broke under them
	bye      bool             // the peer has said goodbye; its other connections may still bring something
	suspect  error            // what happened to another connection: the first one will tell why
	gone     *transport.Fault // what a request that needs this peer makes of the mesh, once it has left
	goneAt   uint64           // order of departure

	ping   uint64 // the round of a PING to answer, 0 if there is none
	pinged uint64 // the round of the last PING sent
	pong   struct{ round, issued, completed uint64 }

	asked    maybe // the operation that the peer asks about, until this rank has answered
	answered maybe // the last operation of which the peer has answered what it called
}

func (p *pair) fault(kind transport.FaultKind, err error) *transport.Fault {
	return p.s.fault(kind, err)
}

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
	if p.ping != 0 && !p.ending {
		p.s.frames.push(item{f: frame{kind: kPong, slot: p.ping, length: p.m.issued.Load(), credit: p.m.completed.Load()}})
		p.ping = 0
	}
}

// leave is the end of the reader and of the writer of the first connection. The
// last one closes it.
func (p *pair) leave() {
	p.m.mu.Lock()
	p.running--
	last := p.running == 0
	p.m.mu.Unlock()
	if last {
		p.first.conn.Close()
	}
	p.m.wg.Done()
}

// finish makes last the last frame, unless the peer has gone, and ends all
// goroutines. It wakes readers out of whatever they are in.
func (p *pair) finish(last item, writeBy time.Time) {
	if p.gone == nil {
		p.s.frames.push(last)
	}
	p.ending = true
	past := time.Unix(1, 0)
	if p.m.opts.TLS != nil {
		writeBy = p.m.endBy // a TLS connection does not survive a deadline
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
	switch end := m.ended(); {
	case end != nil:
		p.s.dropPieces(end)
		l.settle(end)
	case p.gone != nil && l.holds():
		m.fail(p.gone)
		l.settle(m.ended())
	case p.gone != nil:
		l.settle(nil)
	default:
		p.doubt(l.conn, l.broken)
	}
}

// doubt gives the peer a moment to say on the first connection why another
// ended.
func (p *pair) doubt(conn net.Conn, err error) {
	if p.suspect == nil {
		p.suspect = fmt.Errorf("tcp: another connection with rank %d at %v: %w", p.peer, conn.RemoteAddr(), err)
		p.first.conn.SetReadDeadline(time.Now().Add(p.m.opts.doubtLimit))
	}
}

// end completes what nobody is working on.
func (p *pair) end(err error) {
	p.s.end(err)
	p.stranded.complete(err)
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
		p.m.fail(f)
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
			err = fmt.Errorf("tcp: connection with rank %d at %v: %w", p.peer, p.first.conn.RemoteAddr(), err)
		}
		p.gone = p.fault(transport.FaultPeerDied, err)
		p.m.fail(p.gone)
	}
}

// depart lets a peer go that has said goodbye, once nothing more of it is
// under way.
func (p *pair) depart() {
	if !p.bye || p.gone != nil || len(p.inbound) > 0 {
		return
	}
	m := p.m
	m.arrivals++
	p.gone, p.goneAt = p.fault(transport.FaultPeerLeft, nil), m.arrivals
	if p.s.needed() || p.stranded.head != nil || p.unsent() || m.forsaken() {
		m.fail(p.gone)
		return
	}
	p.ending = true
	p.first.conn.SetWriteDeadline(time.Now().Add(closeLimit))
	p.first.rouse()
	for _, l := range p.bulk {
		l.rouse()
	}
	m.wakeDiagnose()
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

// drain reads and forgets until the peer closes its side or time is up.
// Closing a socket with unread bytes in it would reset the connection and with
// it what the peer has yet to receive.
func (p *pair) drain() {
	m, conn := p.m, p.first.conn
	for {
		m.mu.Lock()
		endBy := m.endBy
		limit := endBy
		if limit.IsZero() {
			limit = time.Now().Add(closeLimit)
		}
		conn.SetReadDeadline(limit)
		m.mu.Unlock()
		io.Copy(io.Discard, conn)
		m.mu.Lock()
		again := !m.endBy.Equal(endBy)
		m.mu.Unlock()
		if !again {
			return
		}
	}
}
