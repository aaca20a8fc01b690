package wire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

const (
	// readBuffer is what one read may take: several notifications and small payloads. Larger
	// payloads are read straight into place.
	readBuffer = 16 << 10

	// gatherBytes is the payload after which the writer stops gathering, so that slow requests
	// complete one by one.
	gatherBytes = 256 << 10

	// gatherMessages bounds the buffers of one writev, of which Linux takes 1024.
	gatherMessages = 256

	// growBytes is what a receive with Grows allocates before a byte has come.
	growBytes = 1 << 20

	// keepQueue is the longest queue that is kept for reuse once it is empty.
	keepQueue = 4096
)

var (
	errBye   = errors.New("wire: the peer said goodbye")
	errEnded = errors.New("wire: the mesh has ended")
)

// pair is the connection with one peer. Mesh.Mu guards all but what its two goroutines keep to
// themselves.
type pair struct {
	mesh.Peer
	m    *Mesh
	conn net.Conn // nil until the peer is connected
	wake chan struct{}

	slots   map[uint64]*slot
	notices int    // in all slots
	out     []item // for the writer
	broken  bool   // a write failed; the writer has returned, and the reader finds out why

	version uint64 // of its HELLO
	known   bool   // a message has come
	foreign bool   // the first was no HELLO: the peer is not of this library
	words   []byte // of the WORDS that came
	links   [6]uint64
	linked  int  // of links
	writing bool // the writer has DATA of a request

	filling atomic.Bool   // the reader reads into the buffer of a request
	got     atomic.Uint64 // bytes of messages that were read

	received bool // of the reader: a message has come

	headers [gatherMessages * headerLen]byte // of the writer
	buffers net.Buffers                      // of the writer
	rest    net.Buffers                      // of the writer: what one gathered write still has to send
	spare   []item                           // of the writer: the slice that out is exchanged with
}

// item is a message in a pair's queue. DATA has its request.
type item struct {
	h   header
	req *transport.Request
}

func (it item) hasRequest() bool { return it.req != nil }

func notification(opcode uint64, r *transport.Request) item {
	return item{h: header{nbytes: headerLen, opcode: opcode, slot: r.Slot, length: uint64(r.Len())}}
}

func newPair(m *Mesh) *pair {
	return &pair{
		m:     m,
		wake:  make(chan struct{}, 1),
		slots: make(map[uint64]*slot),
		out:   []item{{h: helloHeader()}},
	}
}

func (p *pair) start(conn net.Conn) {
	p.conn, p.Near = conn, tcpsock.IsLocal(conn)
	p.Run(p.read, p.write)
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

// tidy frees s if it holds nothing.
func (p *pair) tidy(s *slot) {
	if s.empty() && p.slots[s.key] == s {
		delete(p.slots, s.key)
		p.m.freeSlot(s)
	}
}

// note keeps a notification that has matched no request.
func (p *pair) note(q *notices, length uint64) error {
	if p.notices == maxNotices {
		return p.protocolFault(fmt.Errorf("wire: rank %d has announced %d messages that no request has taken", p.Rank, maxNotices))
	}
	p.notices++
	m := p.m
	n := m.freeNotices
	if n == nil {
		n = new(notice)
	} else {
		m.freeNotices = n.next
	}
	*n = notice{length: length, order: m.NextArrival()}
	q.Push(n)
	return nil
}

// take removes the oldest notification of q and returns its length.
func (p *pair) take(q *notices) uint64 {
	n := q.Pop()
	p.notices--
	n.next = p.m.freeNotices
	p.m.freeNotices = n
	return n.length
}

// enqueue gives a message to the writer.
func (p *pair) enqueue(it item) {
	if p.broken {
		if it.req != nil {
			p.Stranded.Push(it.req)
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

// answer sends DATA for r, a send that has matched a RECV_READY for length bytes.
func (p *pair) answer(r *transport.Request, length uint64) {
	if n := uint64(len(r.Buf)); n != length {
		p.Stranded.Push(r)
		p.m.Fail(p.mismatch(fmt.Errorf("wire: rank %d receives %d bytes on slot %#x where this rank sends %d: the ranks disagree on operation, size or dtype", p.Rank, length, r.Slot, n)))
		return
	}
	n := uint64(len(r.Buf))
	p.enqueue(item{h: header{nbytes: headerLen + n, opcode: opData, slot: r.Slot, length: n}, req: r})
}

// checkOffer compares r with the SEND_READY that it has matched.
func (p *pair) checkOffer(r *transport.Request, length uint64) *transport.Fault {
	if n := uint64(r.Len()); n != length {
		return p.mismatch(&transport.SizeError{Peer: p.Rank, Slot: r.Slot, Want: n, Got: length})
	}
	return nil
}

// bind makes r, a receive from any rank, a receive from this peer, which has announced length
// bytes.
func (p *pair) bind(s *slot, r *transport.Request, length uint64) {
	r.Peer = p.Rank
	s.recvs.Push(r)
	if f := p.checkOffer(r, length); f != nil {
		p.m.Fail(f)
		return
	}
	p.enqueue(notification(opRecvReady, r))
}

func (p *pair) mismatch(err error) *transport.Fault {
	return p.Fault(transport.FaultMismatch, err)
}

func (p *pair) protocolFault(err error) *transport.Fault {
	return p.Fault(transport.FaultProtocol, err)
}

// Offered implements mesh.Link.
func (p *pair) Offered(slot uint64) (order uint64, ok bool) {
	if s := p.slots[slot]; s != nil && !s.offered.Empty() {
		return s.offered.Front().order, true
	}
	return 0, false
}

// TakeOffered implements mesh.Link.
func (p *pair) TakeOffered(r *transport.Request) {
	s := p.slots[r.Slot]
	p.bind(s, r, p.take(&s.offered))
}

// Ping implements mesh.Link.
func (p *pair) Ping(q mesh.Ping) bool {
	if p.Native {
		ping := control(ctlPing)
		about, deep := q.Pack()
		ping.offset, ping.length, ping.roffset = q.Round, about, uint64(deep)
		p.enqueue(item{h: ping})
	}
	return p.Native
}

// Received implements mesh.Link.
func (p *pair) Received() uint64 { return p.got.Load() }

// Answer implements mesh.Link.
func (p *pair) Answer() { p.wakeWriter() }

// Waits implements mesh.Link.
func (p *pair) Waits() bool {
	return p.writing || p.filling.Load() || !p.Stranded.Empty() || p.needed() || slices.ContainsFunc(p.out, item.hasRequest)
}

// Conns implements mesh.Link.
func (p *pair) Conns() []net.Conn {
	if p.conn == nil {
		return nil
	}
	return []net.Conn{p.conn}
}

// EndRequests implements mesh.Link.
func (p *pair) EndRequests(err error) {
	for _, s := range p.slots {
		s.sends.Complete(err)
		s.recvs.Complete(err)
	}
	clear(p.slots)
}

// DropQueued implements mesh.Link.
func (p *pair) DropQueued(err error) {
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

// Finish implements mesh.Link. It wakes the reader out of whatever it is in.
func (p *pair) Finish(f *transport.Fault, writeBy time.Time) {
	if p.conn == nil {
		return
	}
	if p.Gone == nil && !p.broken {
		last := control(ctlBye)
		if f != nil {
			last = abortHeader(f, p.version)
			if p.version >= 2 {
				for _, h := range wordsHeaders(f.Words()) {
					p.out = append(p.out, item{h: h})
				}
			}
		}
		p.out = append(p.out, item{h: last})
	}
	p.Ending = true
	p.conn.SetWriteDeadline(writeBy)
	p.conn.SetReadDeadline(time.Unix(1, 0))
	p.wakeWriter()
}

// Cut implements mesh.Link.
func (p *pair) Cut() {
	if p.conn != nil {
		p.conn.SetWriteDeadline(time.Unix(1, 0))
	}
}

// write is the writer goroutine.
func (p *pair) write() {
	defer p.Leave(p.conn)
	for {
		batch := p.nextBatch()
		if batch == nil {
			if c, ok := p.conn.(interface{ CloseWrite() error }); ok {
				c.CloseWrite()
			}
			return
		}
		if n, err := p.transmit(batch); err != nil {
			p.writeFailed(batch[n:])
			return
		}
		clear(batch)
		if cap(batch) <= keepQueue {
			p.spare = batch[:0]
		}
	}
}

// nextBatch waits for messages and returns all of them, nil at the end.
func (p *pair) nextBatch() []item {
	m := p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p.writing = false
	for len(p.out) == 0 && !p.PingWaits() && !p.Ending {
		m.Mu.Unlock()
		<-p.wake
		m.Mu.Lock()
	}
	if a, ok := p.TakePing(); ok {
		if p.version >= 4 && len(a.Links) > 0 {
			for _, h := range linksHeaders(a) {
				p.out = append(p.out, item{h: h})
			}
		}
		pong := control(ctlPong)
		pong.slot |= uint64(a.Op)
		pong.offset, pong.length, pong.roffset = a.Round, a.Issued, a.Completed
		p.out = append(p.out, item{h: pong})
	}
	if len(p.out) == 0 {
		return nil
	}
	batch := p.out
	p.writing = slices.ContainsFunc(batch, item.hasRequest)
	p.out, p.spare = p.spare, nil
	return batch
}

// transmit writes batch and completes its requests. After an error it returns how many messages
// are done.
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

// flush writes p.buffers. At the end of a mesh there is a deadline, which moves on while this
// goroutine may not have had the CPU.
func (p *pair) flush() error {
	p.rest = p.buffers
	var last mesh.LastWrites
	for {
		_, err := p.rest.WriteTo(p.conn)
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || !p.m.MoreTime(p.conn, &last) {
			return err
		}
	}
}

// writeFailed ends the writer whose connection broke. The reader decides what becomes of the
// unsent requests: there may be a BYE to read.
func (p *pair) writeFailed(unsent []item) {
	m := p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p.broken = true
	for _, items := range [][]item{unsent, p.out} {
		for _, it := range items {
			if it.req != nil {
				p.Stranded.Push(it.req)
			}
		}
	}
	p.out = nil
	switch end := m.Ended(); {
	case end != nil:
		p.Stranded.Complete(end)
	case p.Gone == nil:
		p.conn.SetReadDeadline(time.Now().Add(m.Limits.Close))
	case !p.Stranded.Empty():
		m.Fail(p.Gone)
	}
}

// read is the reader goroutine.
func (p *pair) read() {
	defer p.Leave(p.conn)
	err := p.receive()
	m := p.m
	m.Mu.Lock()
	if m.Ended() == nil {
		p.lost(err)
	}
	survived := m.Ended() == nil && p.Gone != nil
	m.Mu.Unlock()
	if survived && m.opts.Departed != nil {
		m.opts.Departed(p.Rank)
	}
	p.Drain(p.conn)
}

// lost decides how the mesh goes on when no more messages come from the peer, because of err.
func (p *pair) lost(err error) {
	m := p.m
	var f *transport.Fault
	switch {
	case errors.As(err, &f):
		m.Fail(f)
		return
	case errors.Is(err, errBye):
		f = p.Fault(transport.FaultPeerLeft, nil)
	default:
		err = fmt.Errorf("wire: connection with rank %d at %v: %w", p.Rank, p.conn.RemoteAddr(), mesh.EndOf(p.conn, err))
		if p.Unsure(err) {
			p.Doubt(err)
			return
		}
		f = p.Fault(transport.FaultPeerDied, err)
	}
	p.depart(f)
}

// Died implements mesh.Link.
func (p *pair) Died(f *transport.Fault) { p.depart(f) }

// depart lets a peer go that has left or died.
func (p *pair) depart(f *transport.Fault) {
	m := p.m
	if !p.Depart(f, p.needed() || len(p.words) > 0) { // the words of an ABORT that has not come
		return
	}
	for _, s := range p.slots {
		for _, q := range []*notices{&s.offered, &s.wanted} {
			for !q.Empty() {
				p.take(q)
			}
		}
		m.freeSlot(s)
	}
	clear(p.slots)
	p.conn.SetWriteDeadline(time.Now().Add(m.Limits.Close))
	p.wakeWriter()
}

// needed reports whether a request waits for this peer.
func (p *pair) needed() bool {
	for _, s := range p.slots {
		if !s.sends.Empty() || !s.recvs.Empty() {
			return true
		}
	}
	return false
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
		if !isControl(h.slot) {
			p.got.Add(headerLen)
		}
		switch {
		case h.opcode == opData:
			err = p.onData(h, in)
		case h.opcode == opRecvReady:
			err = p.handle(h, p.onRecvReady)
		case isControl(h.slot):
			err = p.handle(h, p.onControl)
		default:
			err = p.handle(h, p.onSendReady)
		}
		if err != nil {
			return err
		}
		if !p.received {
			p.received = true
			p.recognise()
		}
	}
}

// recognise notes what the peer is, from its first message.
func (p *pair) recognise() {
	p.m.Mu.Lock()
	defer p.m.Mu.Unlock()
	p.known, p.foreign = true, !p.Native
	p.m.Changed()
}

func (p *pair) onData(h header, in *bufio.Reader) error {
	r, err := p.claim(h)
	if err != nil {
		return err
	}
	if r.Grows > 0 {
		err = p.fillGrowing(r, in)
	} else {
		err = p.fill(r.Buf, in)
	}
	p.filling.Store(false)
	if err == nil {
		r.Complete(nil)
		return nil
	}
	p.m.Mu.Lock()
	defer p.m.Mu.Unlock()
	if end := p.m.Ended(); end != nil {
		r.Complete(end)
	} else {
		p.Stranded.Push(r)
	}
	return err
}

// fill reads a payload, and counts what has come of it.
func (p *pair) fill(b []byte, in *bufio.Reader) error {
	for len(b) > 0 {
		n, err := in.Read(b)
		p.got.Add(uint64(n))
		b = b[n:]
		switch {
		case err == io.EOF && len(b) > 0:
			return io.ErrUnexpectedEOF
		case err != nil && len(b) > 0:
			return err
		}
	}
	return nil
}

// fillGrowing is fill for memory that is at most twice as long as what has come, and growBytes.
func (p *pair) fillGrowing(r *transport.Request, in *bufio.Reader) error {
	for have := 0; have < r.Grows; have = len(r.Buf) {
		longer := make([]byte, have+min(max(have, growBytes), r.Grows-have))
		copy(longer, r.Buf)
		r.Buf = longer
		if err := p.fill(longer[have:], in); err != nil {
			return err
		}
	}
	return nil
}

// claim takes the receive for a DATA out of its slot.
func (p *pair) claim(h header) (*transport.Request, error) {
	m := p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Ended() != nil {
		return nil, errEnded
	}
	s := p.slots[h.slot]
	if s == nil || s.recvs.Empty() || s.recvs.Front() == s.unmatched {
		return nil, p.protocolFault(fmt.Errorf("wire: DATA of %d bytes on slot %#x without RECV_READY or SEND_READY", h.length, h.slot))
	}
	r := s.recvs.Pop()
	p.tidy(s)
	if n := uint64(r.Len()); n != h.length {
		p.Stranded.Push(r)
		return nil, p.mismatch(&transport.SizeError{Peer: p.Rank, Slot: h.slot, Want: n, Got: h.length})
	}
	p.filling.Store(true)
	return r, nil
}

// handle calls f with Mesh.Mu held, unless the mesh has ended.
func (p *pair) handle(h header, f func(header) error) error {
	p.m.Mu.Lock()
	defer p.m.Mu.Unlock()
	if p.m.Ended() != nil {
		return errEnded
	}
	return f(h)
}

func (p *pair) onRecvReady(h header) error {
	s := p.slot(h.slot)
	if s.sends.Empty() {
		return p.note(&s.wanted, h.length)
	}
	r := s.sends.Pop()
	p.tidy(s)
	p.answer(r, h.length)
	return nil
}

func (p *pair) onSendReady(h header) error {
	m := p.m
	s := p.slot(h.slot)
	if r := s.unmatched; r != nil {
		s.unmatched = r.Next
		if f := p.checkOffer(r, h.length); f != nil {
			return f
		}
		return nil
	}
	if r := m.NextAny(h.slot); r != nil {
		p.bind(s, r, h.length)
		return nil
	}
	return p.note(&s.offered, h.length)
}

func (p *pair) onControl(h header) error {
	m := p.m
	code := controlCode(h.slot)
	if p.received == (code == ctlHello) || !p.Native && code != ctlHello {
		return p.protocolFault(fmt.Errorf("wire: control message %d at the wrong time", code))
	}
	switch code {
	case ctlHello:
		p.Native, p.version = true, h.length
	case ctlBye:
		return errBye
	case ctlWords:
		words, err := parseWords(p.words, h)
		if err != nil {
			return p.protocolFault(err)
		}
		p.words = words
	case ctlAbort:
		f, err := parseAbort(h, m.Size())
		if err != nil {
			return p.protocolFault(err)
		}
		f.Err = transport.RemoteCause(p.words)
		p.Gone = f
		return f
	case ctlPing:
		ping, err := mesh.UnpackPing(h.offset, h.length, uint32(h.roffset), m.Size())
		if err != nil {
			return p.protocolFault(fmt.Errorf("wire: %w", err))
		}
		p.Pinged(ping)
		if p.PingWaits() {
			p.wakeWriter()
		}
	case ctlLinks:
		if p.linked == len(p.links) {
			return p.protocolFault(errors.New("wire: LINKS without a PONG"))
		}
		copy(p.links[p.linked:], []uint64{h.offset, h.length, h.roffset})
		p.linked += 3
	case ctlPong:
		a := mesh.Pong{Round: h.offset, Issued: h.length, Completed: h.roffset, Op: uint8(h.slot)}
		if err := a.Unpack([mesh.MaxLinks]uint64(p.links[:]), m.Size()); err != nil {
			return p.protocolFault(fmt.Errorf("wire: %w", err))
		}
		p.links, p.linked = [6]uint64{}, 0
		p.Ponged(a)
	default:
		return p.protocolFault(fmt.Errorf("wire: unknown control message %d", code))
	}
	return nil
}
