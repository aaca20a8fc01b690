package wire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// readBuffer is what one read may take in: several notifications and small
	// payloads. Payloads beyond it are read straight into place.
	readBuffer = 16 << 10

	// gatherBytes is the payload after which the writer stops gathering, so
	// that requests complete one by one where each takes a while.
	gatherBytes = 256 << 10

	// gatherMessages bounds the buffers of one writev, of which Linux takes 1024.
	gatherMessages = 256

	// keepQueue is the longest queue that is kept for reuse once it is empty.
	keepQueue = 4096
)

var (
	errBye   = errors.New("wire: the peer said goodbye")
	errEnded = errors.New("wire: the mesh has ended")
)

// pair is the connection with one peer. Mesh.mu guards all but what its two
// goroutines keep to themselves.
type pair struct {
	m    *Mesh
	peer int
	conn net.Conn // nil until the peer is connected
	wake chan struct{}

	slots    map[uint64]*slot
	notices  int    // in all slots
	stranded fifo   // requests in no slot and no queue: the connection broke under them
	out      []item // for the writer
	ending   bool   // the writer leaves when out is empty
	broken   bool   // a write failed; the writer has left, and the reader will know why
	running  int    // goroutines

	native  bool             // HELLO came
	version uint64           // that it named
	spoke   bool             // any message came
	other   bool             // its first message was no HELLO: the peer is no rank of this library
	words   []byte           // WORDS that came
	gone    *transport.Fault // what a request that needs this peer makes of the mesh, once it has left
	goneAt  uint64           // order of departure
	ping    uint64           // the round of a PING to answer, 0 if there is none
	pinged  uint64           // the round of the last PING sent
	pong    struct{ round, issued, completed uint64 }

	heard bool // of the reader: a message has come

	headers [gatherMessages * headerLen]byte // of the writer
	buffers net.Buffers                      // of the writer
	rest    net.Buffers                      // of the writer: what one gathered write still has to send
	spare   []item                           // of the writer: the queue that out is exchanged with
}

// item is a message in a pair's queue. DATA has its request.
type item struct {
	h   header
	req *transport.Request
}

func notification(opcode uint64, r *transport.Request) item {
	return item{h: header{nbytes: headerLen, opcode: opcode, slot: r.Slot, length: uint64(len(r.Buf))}}
}

// chooser is a connection that stands for another one, which takes what is to be
// written in one piece. Chosen returns that, nil while it is not known.
type chooser interface{ Chosen() net.Conn }

func newPair(m *Mesh, peer int) *pair {
	return &pair{
		m: m, peer: peer,
		wake:  make(chan struct{}, 1),
		slots: make(map[uint64]*slot),
		out:   []item{{h: helloHeader()}},
	}
}

func (p *pair) start(conn net.Conn) {
	p.conn = conn
	p.running = 2
	p.m.wg.Add(2)
	go p.read()
	go p.write()
}

// leave is the end of the reader and of the writer. The last one closes the
// connection.
func (p *pair) leave() {
	p.m.mu.Lock()
	p.running--
	last := p.running == 0
	p.m.mu.Unlock()
	if last {
		p.conn.Close()
	}
	p.m.wg.Done()
}

// slot returns the pair's state for key, a new one if there was none.
func (p *pair) slot(key uint64) *slot {
	s := p.slots[key]
	if s == nil {
		s = p.m.newSlot(key)
		p.slots[key] = s
	}
	return s
}

// tidy forgets s if it holds nothing.
func (p *pair) tidy(s *slot) {
	if s.empty() && p.slots[s.key] == s {
		delete(p.slots, s.key)
		p.m.freeSlot(s)
	}
}

// note records a notification that has met no request.
func (p *pair) note(q *notices, length uint64) error {
	if p.notices == maxNotices {
		return p.protocolFault(fmt.Errorf("wire: rank %d has announced %d messages that nobody asked for", p.peer, maxNotices))
	}
	p.notices++
	m := p.m
	n := m.freeNotices
	if n == nil {
		n = new(notice)
	} else {
		m.freeNotices = n.next
	}
	m.arrivals++
	*n = notice{length: length, order: m.arrivals}
	if q.head == nil {
		q.head = n
	} else {
		q.tail.next = n
	}
	q.tail = n
	return nil
}

// take removes the oldest notification of q and returns its length.
func (p *pair) take(q *notices) uint64 {
	n := q.head
	q.head = n.next
	p.notices--
	n.next = p.m.freeNotices
	p.m.freeNotices = n
	return n.length
}

// enqueue hands it to the writer.
func (p *pair) enqueue(it item) {
	if p.broken {
		if it.req != nil {
			p.stranded.push(it.req)
		}
		return
	}
	p.out = append(p.out, it)
	p.wakeWriter()
}

func (p *pair) wakeWriter() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// answer sends DATA for r, a send that has met a RECV_READY for length bytes.
func (p *pair) answer(r *transport.Request, length uint64) {
	if n := uint64(len(r.Buf)); n != length {
		p.stranded.push(r)
		p.m.fail(p.mismatch(fmt.Errorf("wire: rank %d receives %d bytes on slot %#x where this rank sends %d: the ranks disagree on operation, size or dtype", p.peer, length, r.Slot, n)))
		return
	}
	n := uint64(len(r.Buf))
	p.enqueue(item{h: header{nbytes: headerLen + n, opcode: opData, slot: r.Slot, length: n}, req: r})
}

// checkOffer compares r with the SEND_READY that it has met.
func (p *pair) checkOffer(r *transport.Request, length uint64) *transport.Fault {
	if n := uint64(len(r.Buf)); n != length {
		return p.mismatch(&transport.SizeError{Peer: p.peer, Slot: r.Slot, Want: n, Got: length})
	}
	return nil
}

// bind makes r, a receive from any rank, one from this peer, which has
// announced length bytes.
func (p *pair) bind(s *slot, r *transport.Request, length uint64) {
	r.Peer = p.peer
	s.recvs.push(r)
	if f := p.checkOffer(r, length); f != nil {
		p.m.fail(f)
		return
	}
	p.enqueue(notification(opRecvReady, r))
}

func (p *pair) fault(kind transport.FaultKind, err error) *transport.Fault {
	return &transport.Fault{Kind: kind, Rank: p.peer, Reporter: p.m.rank, Op: noOp, Err: err}
}

func (p *pair) mismatch(err error) *transport.Fault {
	return p.fault(transport.FaultMismatch, err)
}

func (p *pair) protocolFault(err error) *transport.Fault {
	return p.fault(transport.FaultProtocol, err)
}

// dropSends ends the queued DATA that the writer has not taken.
func (p *pair) dropSends(err error) {
	keep := p.out[:0]
	for _, it := range p.out {
		if it.req != nil {
			it.req.Complete(err)
		} else {
			keep = append(keep, it)
		}
	}
	clear(p.out[len(keep):])
	p.out = keep
}

// finish makes last the last message, unless the peer has gone, and ends both
// goroutines. It wakes the reader out of whatever it is in.
func (p *pair) finish(last header, writeBy time.Time) {
	if p.conn == nil {
		return
	}
	if p.gone == nil && !p.broken {
		p.out = append(p.out, item{h: last})
	}
	p.ending = true
	p.conn.SetWriteDeadline(writeBy)
	p.conn.SetReadDeadline(time.Unix(1, 0))
	p.wakeWriter()
}

// write is the writer goroutine.
func (p *pair) write() {
	defer p.leave()
	for {
		batch := p.nextBatch()
		if batch == nil {
			if c, ok := p.conn.(interface{ CloseWrite() error }); ok {
				c.CloseWrite()
			}
			return
		}
		if n, err := p.transmit(batch); err != nil {
			p.writeFailed(batch[n:], err)
			return
		}
		clear(batch)
		if cap(batch) <= keepQueue {
			p.spare = batch[:0]
		}
	}
}

// nextBatch waits for messages and returns all that there are, nil at the end.
func (p *pair) nextBatch() []item {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(p.out) == 0 && p.ping == 0 && !p.ending {
		m.mu.Unlock()
		<-p.wake
		m.mu.Lock()
	}
	if p.ping != 0 && !p.ending {
		pong := control(ctlPong)
		pong.offset, pong.length, pong.roffset = p.ping, m.issued.Load(), m.completed.Load()
		p.out = append(p.out, item{h: pong})
		p.ping = 0
	}
	if len(p.out) == 0 {
		return nil
	}
	batch := p.out
	p.out, p.spare = p.spare, nil
	return batch
}

// transmit writes batch and completes its requests. After an error it returns
// how many messages are done with.
func (p *pair) transmit(batch []item) (int, error) {
	done, run, used, bytes := 0, 0, 0, 0
	p.buffers = p.buffers[:0]
	for i := range batch {
		batch[i].h.put(p.headers[used:])
		used += headerLen
		if req := batch[i].req; req != nil && len(req.Buf) > 0 {
			p.buffers = append(p.buffers, p.headers[run:used], req.Buf)
			bytes += len(req.Buf)
			run = used
		}
		if i+1 < len(batch) && i+1-done < gatherMessages && bytes < gatherBytes {
			continue
		}
		if run < used {
			p.buffers = append(p.buffers, p.headers[run:used])
		}
		if err := p.flush(); err != nil {
			return done, err
		}
		for ; done <= i; done++ {
			if req := batch[done].req; req != nil {
				req.Complete(nil)
			}
		}
		run, used, bytes = 0, 0, 0
		p.buffers = p.buffers[:0]
	}
	return done, nil
}

// flush writes p.buffers. At the end of a mesh there is a deadline, which
// moves on while the peer keeps reading.
func (p *pair) flush() error {
	p.rest = p.buffers
	var to io.Writer = p.conn
	if c, ok := p.conn.(chooser); ok {
		if conn := c.Chosen(); conn != nil {
			to = conn
		}
	}
	for {
		n, err := p.rest.WriteTo(to)
		if err == nil || n == 0 || !errors.Is(err, os.ErrDeadlineExceeded) || !p.moreTime() {
			return err
		}
	}
}

func (p *pair) moreTime() bool {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	by := time.Now().Add(p.m.limits.abortStep)
	if !by.Before(p.m.endBy) {
		return false
	}
	p.conn.SetWriteDeadline(by)
	return true
}

// writeFailed is the end of the writer whose connection broke: what it could
// not send ends as the reader finds. There may still be a goodbye to read.
func (p *pair) writeFailed(unsent []item, err error) {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	p.broken = true
	for _, items := range [][]item{unsent, p.out} {
		for _, it := range items {
			if it.req != nil {
				p.stranded.push(it.req)
			}
		}
	}
	p.out = nil
	switch end := m.ended(); {
	case end != nil:
		p.stranded.complete(end)
	case p.gone == nil:
		p.conn.SetReadDeadline(time.Now().Add(m.limits.abort))
	case p.stranded.head != nil:
		m.fail(p.gone)
	}
}

// read is the reader goroutine.
func (p *pair) read() {
	defer p.leave()
	err := p.receive()
	m := p.m
	m.mu.Lock()
	if m.ended() == nil {
		p.lost(err)
	}
	survived := m.ended() == nil
	m.mu.Unlock()
	if survived && m.opts.Departed != nil {
		m.opts.Departed(p.peer)
	}
	p.drain()
}

// lost decides what it means that no more messages come, because of err.
func (p *pair) lost(err error) {
	m := p.m
	var f *transport.Fault
	switch {
	case errors.As(err, &f):
		m.fail(f)
		return
	case errors.Is(err, errBye):
		f = p.fault(transport.FaultPeerLeft, nil)
	default:
		f = p.fault(transport.FaultPeerDied, fmt.Errorf("wire: connection with rank %d at %v: %w", p.peer, p.conn.RemoteAddr(), err))
	}
	m.arrivals++
	p.gone, p.goneAt = f, m.arrivals
	if p.native && f.Kind == transport.FaultPeerDied || p.needed() || len(m.any) > 0 && m.lastDeparture() != nil {
		m.fail(f)
		return
	}
	for _, s := range p.slots {
		for _, q := range []*notices{&s.offered, &s.wanted} {
			for q.head != nil {
				p.take(q)
			}
		}
		m.freeSlot(s)
	}
	clear(p.slots)
	p.ending = true
	p.conn.SetWriteDeadline(time.Now().Add(m.limits.close))
	p.wakeWriter()
	m.wakeDiagnose()
}

// needed reports whether a request waits for this peer.
func (p *pair) needed() bool {
	for _, s := range p.slots {
		if s.sends.head != nil || s.recvs.head != nil {
			return true
		}
	}
	return p.stranded.head != nil
}

// drain reads and forgets until the peer closes its side or time is up.
// Closing a socket with unread bytes in it would reset the connection and with
// it what the peer has yet to receive.
func (p *pair) drain() {
	m := p.m
	for {
		m.mu.Lock()
		endBy := m.endBy
		limit := endBy
		if limit.IsZero() {
			limit = time.Now().Add(m.limits.close)
		}
		p.conn.SetReadDeadline(limit)
		m.mu.Unlock()
		io.Copy(io.Discard, p.conn)
		m.mu.Lock()
		again := !m.endBy.Equal(endBy)
		m.mu.Unlock()
		if !again {
			return
		}
	}
}

// receive reads messages until there are no more, and returns why.
func (p *pair) receive() error {
	in := bufio.NewReaderSize(p.conn, readBuffer)
	for {
		b, err := in.Peek(headerLen)
		if err != nil {
			return err
		}
		h, err := parseHeader(b)
		if err != nil {
			return p.protocolFault(err)
		}
		in.Discard(headerLen)
		switch {
		case h.opcode == opData:
			err = p.onData(h, in)
		case h.opcode == opRecvReady:
			err = p.onRecvReady(h)
		case isControl(h.slot):
			err = p.onControl(h)
		default:
			err = p.onSendReady(h)
		}
		if err != nil {
			return err
		}
		if !p.heard {
			p.heard = true
			p.recognise()
		}
	}
}

// recognise notes what the peer is, by its first message.
func (p *pair) recognise() {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.spoke, p.other = true, !p.native
	p.m.wakeDiagnose()
}

func (p *pair) onData(h header, in *bufio.Reader) error {
	r, err := p.claim(h)
	if err != nil {
		return err
	}
	if _, err = io.ReadFull(in, r.Buf); err == nil {
		r.Complete(nil)
		return nil
	}
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	if end := p.m.ended(); end != nil {
		r.Complete(end)
	} else {
		p.stranded.push(r)
	}
	return err
}

// claim takes the receive that DATA is for out of its slot.
func (p *pair) claim(h header) (*transport.Request, error) {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended() != nil {
		return nil, errEnded
	}
	s := p.slots[h.slot]
	if s == nil || s.recvs.head == nil || s.recvs.head == s.unmatched {
		return nil, p.protocolFault(fmt.Errorf("wire: DATA of %d bytes on slot %#x that was not asked for or not announced", h.length, h.slot))
	}
	r := s.recvs.pop()
	p.tidy(s)
	if n := uint64(len(r.Buf)); n != h.length {
		p.stranded.push(r)
		return nil, p.mismatch(&transport.SizeError{Peer: p.peer, Slot: h.slot, Want: n, Got: h.length})
	}
	return r, nil
}

func (p *pair) onRecvReady(h header) error {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended() != nil {
		return errEnded
	}
	s := p.slot(h.slot)
	if s.sends.head == nil {
		return p.note(&s.wanted, h.length)
	}
	r := s.sends.pop()
	p.tidy(s)
	p.answer(r, h.length)
	return nil
}

func (p *pair) onSendReady(h header) error {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended() != nil {
		return errEnded
	}
	s := p.slot(h.slot)
	if r := s.unmatched; r != nil {
		s.unmatched = r.Next
		if f := p.checkOffer(r, h.length); f != nil {
			return f
		}
		return nil
	}
	if waiting := m.any[h.slot]; waiting != nil {
		r := waiting.recvs.pop()
		if waiting.recvs.head == nil {
			delete(m.any, h.slot)
			m.freeSlot(waiting)
		}
		p.bind(s, r, h.length)
		return nil
	}
	return p.note(&s.offered, h.length)
}

func (p *pair) onControl(h header) error {
	m := p.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended() != nil {
		return errEnded
	}
	code := controlCode(h.slot)
	if p.heard == (code == ctlHello) || !p.native && code != ctlHello {
		return p.protocolFault(fmt.Errorf("wire: control message %d out of place", code))
	}
	switch code {
	case ctlHello:
		p.native, p.version = true, h.length
	case ctlBye:
		return errBye
	case ctlWords:
		words, err := parseWords(p.words, h)
		if err != nil {
			return p.protocolFault(err)
		}
		p.words = words
	case ctlAbort:
		f, err := parseAbort(h, m.size)
		if err != nil {
			return p.protocolFault(err)
		}
		f.Err = transport.Heard(p.words)
		p.gone = f
		return f
	case ctlPing:
		p.ping = h.offset
		p.wakeWriter()
	case ctlPong:
		p.pong.round, p.pong.issued, p.pong.completed = h.offset, h.length, h.roffset
		m.wakeDiagnose()
	default:
		return p.protocolFault(fmt.Errorf("wire: unknown control message %d", code))
	}
	return nil
}
