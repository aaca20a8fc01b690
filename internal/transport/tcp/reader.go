package tcp

import (
	"errors"
	"hash/crc32"
	"io"
	"net"
	"sync"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

const (
	// readBuffer is what one read of a first connection may take: many headers and small
	// messages. Larger payloads are read straight to their place.
	readBuffer = 16 << 10

	// maxReads is how often a reader reads before it looks at its deadline again.
	maxReads = 16
)

// errAgain says that nothing can be read at the moment.
var errAgain = errors.New("tcp: nothing to read yet")

// pollable is a connection that can be read without waiting.
type pollable interface {
	// tryRead reads into a and then into b. It returns errAgain if nothing is there.
	tryRead(a, b []byte) (int, error)

	// await calls f, and again each time something may have come, until f returns true, the
	// deadline is over or the connection is closed.
	await(f func() bool) error

	// notify sets whether arriving data wake the goroutine in await. Data that are there
	// already when it is set count.
	notify(on bool)
}

// input is the reading half of a connection. It keeps incomplete frames, so a reader may stop
// at any byte and another one go on.
//
// A pollable first connection is read by two kinds of readers in turn: the pair's goroutine,
// which sleeps in between, and goroutines in Mesh.PollUntil. The latter pause the former,
// because to wake it costs more than most messages. Mesh.ResumeReaders undoes that.
type input struct {
	p    *pair
	conn net.Conn
	sock pollable // nil if only its goroutine reads
	bulk bool

	mu       sync.Mutex // held while reading, if the connection is pollable
	paused   bool       // the connection does not wake its goroutine
	err      error      // why no more frames are read
	reported bool       // lost has been called

	buf  []byte
	r, w int
	used bool // something has come

	busy  bool // a payload is on its way:
	f     frame
	to    []byte // the part of it that is missing
	sum   uint32 // the checksum of the part that is there, if the pair has payload checksums
	req   *transport.Request
	block []byte
}

func newInput(p *pair, conn net.Conn, bulk bool) *input {
	in := &input{p: p, conn: conn, bulk: bulk}
	if bulk {
		in.buf = make([]byte, headerLen)
		return in
	}
	in.buf = make([]byte, readBuffer)
	in.sock, _ = conn.(pollable)
	return in
}

// read is the reader goroutine of the first connection.
func (p *pair) read() {
	defer p.Leave(p.first.conn)
	err, told := p.in.run()
	m := p.m
	m.Mu.Lock()
	if m.Ended() == nil && !told {
		p.lost(err)
	}
	m.Mu.Unlock()
	p.Drain(p.first.conn)
}

// run reads frames until there are no more. It returns why, and whether lost has been called.
func (in *input) run() (error, bool) {
	if in.sock == nil {
		for in.err == nil {
			in.fail(in.readOnce(in.readBlocking))
		}
		return in.err, false
	}
	readAvailable := in.readAvailable
	for {
		err := in.sock.await(readAvailable)
		in.mu.Lock()
		in.fail(err)
		if in.err != nil {
			in.resumeLocked()
			in.mu.Unlock()
			return in.err, in.reported
		}
		in.mu.Unlock()
	}
}

// readAvailable reads what is there. It returns false once nothing is.
func (in *input) readAvailable() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	for range maxReads {
		if in.err != nil {
			break
		}
		err := in.readOnce(in.sock.tryRead)
		if err == errAgain {
			return false
		}
		in.fail(err)
	}
	return true
}

// poll reads once, unless somebody else is reading, and reports whether something came. With
// pausedOnly it does nothing if the goroutine is not paused.
func (in *input) poll(pausedOnly bool) bool {
	if in.sock == nil || !in.mu.TryLock() {
		return false
	}
	defer in.mu.Unlock()
	if in.err != nil || pausedOnly && !in.paused {
		return false
	}
	if !in.paused {
		in.paused = true
		in.sock.notify(false)
	}
	err := in.readOnce(in.sock.tryRead)
	if err == errAgain {
		return false
	}
	if in.fail(err); in.err != nil {
		m := in.p.m
		m.Mu.Lock()
		if m.Ended() == nil {
			in.p.lost(in.err)
			in.reported = true
		}
		m.Mu.Unlock()
		in.resumeLocked()
	}
	return true
}

// resumeLocked lets the connection wake its goroutine again. in.mu is held.
func (in *input) resumeLocked() {
	if in.paused {
		in.paused = false
		in.sock.notify(true)
	}
}

// fail ends the reading with err, unless err is nil.
func (in *input) fail(err error) {
	if err == nil || in.err != nil {
		return
	}
	in.err = err
	if in.busy {
		in.busy, in.to = false, nil
		in.endPayload(err)
	}
}

// readBlocking is tryRead for connections that are not pollable.
func (in *input) readBlocking(a, _ []byte) (int, error) { return in.conn.Read(a) }

// readOnce reads once and handles what has come.
func (in *input) readOnce(read func(a, b []byte) (int, error)) error {
	a, b := in.to, in.buf
	if in.busy {
		in.r, in.w = 0, 0 // all of it has been copied
		if in.bulk {
			b = nil
		}
	} else {
		in.w = copy(in.buf, in.buf[in.r:in.w])
		in.r = 0
		a, b = in.buf[in.w:], nil
	}
	n, err := read(a, b)
	switch {
	case n > 0:
		in.used = true
		if k := min(n, len(in.to)); in.busy {
			in.filled(k)
			n -= k
		}
		in.w += n
	case err == io.EOF && (in.busy || in.w > 0):
		return io.ErrUnexpectedEOF
	case err != nil:
		return err
	}
	for {
		if in.busy {
			n := copy(in.to, in.buf[in.r:in.w])
			in.r += n
			if in.filled(n); len(in.to) > 0 {
				return nil
			}
			in.busy, in.to = false, nil // nothing of a request's buffer may stay here
			if err := in.endPayload(nil); err != nil {
				return err
			}
			continue
		}
		if in.w-in.r < headerLen {
			return nil
		}
		f, err := parseFrame(in.buf[in.r:])
		if err == errHeaderCorrupted {
			return in.p.corrupted(err)
		}
		if err != nil {
			return in.p.Fault(transport.FaultProtocol, err)
		}
		in.r += headerLen
		if err := in.handle(f); err != nil {
			return err
		}
	}
}

// handle does what a frame says, or begins to read its payload.
func (in *input) handle(f frame) error {
	p := in.p
	if in.bulk && f.kind != kData {
		return p.s.protocol("%v on a connection for DATA", kindNames[f.kind])
	}
	if f.kind != kPing && f.kind != kPong {
		p.got.Add(headerLen)
	}
	switch f.kind {
	case kData:
		return in.beginData(f)
	case kEager:
		return in.beginEager(f)
	case kAbort:
		in.expectPayload(f, make([]byte, f.call.What[0]))
		in.block = in.to
		return nil
	}
	return p.onFrame(f)
}

// expectPayload makes the next bytes the payload of f.
func (in *input) expectPayload(f frame, to []byte) {
	in.busy, in.f, in.to, in.sum = true, f, to, 0
}

// filled notes that the next n bytes of the payload are in place. It adds them to the checksum
// while they are in the cache.
func (in *input) filled(n int) {
	if in.p.checksums {
		in.sum = crc32.Update(in.sum, castagnoli, in.to[:n])
	}
	in.to = in.to[n:]
	in.p.got.Add(uint64(n))
}

// endPayload notes that the payload is in place, or, with an err, that it does not come.
func (in *input) endPayload(err error) error {
	m := in.p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err == nil && in.p.checksums && in.sum != in.f.sum {
		err = in.p.corruptedLocked(in.slot(), errMessageCorrupted)
	}
	switch in.f.kind {
	case kData:
		return in.finishData(err)
	case kAbort:
		return in.finishAbort(err)
	}
	return in.finishEager(err)
}

// slot returns the slot of the message whose payload is on its way.
func (in *input) slot() uint64 {
	switch in.f.kind {
	case kEager:
		return in.f.slot
	case kData:
		return in.p.s.landings[in.f.handle].req.Slot
	}
	return 0
}

// asError keeps a nil fault from becoming an error that is not nil.
func asError(f *transport.Fault) error {
	if f == nil {
		return nil
	}
	return f
}

func (in *input) beginEager(f frame) error {
	p, m := in.p, in.p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Ended() != nil {
		return errEnded
	}
	fault := p.s.addCredit(f.credit)
	if fault == nil && f.call != (transport.Call{}) {
		fault = p.compareCall(f)
	}
	var r *transport.Request
	if fault == nil {
		r, fault = p.s.onEager(f)
	}
	if fault != nil {
		return fault
	}
	if r == nil {
		var err error
		if r, err = m.takeAny(p, f.slot, f.length); err != nil {
			return err
		}
	}
	if r == nil {
		in.req, in.block = nil, m.blocks.get(int(f.length))
		in.expectPayload(f, in.block)
		return nil
	}
	// The payload is in the buffer already.
	if in.w-in.r >= len(r.Buf) {
		n := copy(r.Buf, in.buf[in.r:in.w])
		if p.checksums && crc32.Checksum(r.Buf, castagnoli) != f.sum {
			p.Stranded.Push(r)
			return p.corruptedLocked(f.slot, errMessageCorrupted)
		}
		in.r += n
		p.got.Add(uint64(n))
		p.s.giveBack(cost(f.length))
		r.Complete(nil)
		p.pump()
		return nil
	}
	in.req, in.block = r, nil
	in.expectPayload(f, r.Buf)
	p.filling = true
	return nil
}

func (in *input) finishEager(err error) error {
	p, m, f := in.p, in.p.m, in.f
	end := m.Ended()
	p.filling = false
	if r := in.req; r != nil {
		in.req = nil
		switch {
		case err == nil:
			r.Complete(nil)
			if end == nil {
				p.s.giveBack(cost(f.length))
				p.pump()
			}
		case end != nil:
			r.Complete(end)
		default:
			p.Stranded.Push(r)
		}
		return err
	}
	a := arrival{length: f.length, block: in.block, here: true}
	in.block = nil
	if end != nil || err != nil {
		m.blocks.put(a.block)
		if end != nil {
			return errEnded
		}
		return err
	}
	a.order = m.NextArrival()
	if _, ok := p.s.in.Taker(f.slot); !ok {
		r, err := m.takeAny(p, f.slot, f.length)
		if err != nil {
			m.blocks.put(a.block)
			return err
		}
		if r != nil {
			fault := p.s.match(r, a)
			p.pump()
			return asError(fault)
		}
	}
	if fault := p.s.store(f.slot, a); fault != nil {
		return fault
	}
	p.pump()
	return nil
}

// beginData finds the place of a piece of a message. On bulk connections it waits for the START
// of the message.
func (in *input) beginData(f frame) error {
	p, m := in.p, in.p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for {
		if m.Ended() != nil {
			return errEnded
		}
		to, ready, fault := p.s.claim(f)
		if fault == nil && !ready && !in.bulk {
			fault = p.s.protocol("DATA for grant %d before its START", f.handle)
		}
		if fault != nil {
			return fault
		}
		if !ready && p.end != nil {
			return io.ErrUnexpectedEOF // the peer died before it sent the START
		}
		if ready {
			in.expectPayload(f, to)
			return nil
		}
		m.begun.Wait()
	}
}

func (in *input) finishData(err error) error {
	p, m := in.p, in.p.m
	if err == nil {
		p.s.arrived(in.f, m.Ended())
		return nil
	}
	if end := m.Ended(); end != nil {
		p.s.arrived(in.f, end)
	} else {
		p.s.unclaim(in.f)
	}
	return err
}

func (in *input) finishAbort(err error) error {
	p, words := in.p, in.block
	in.block = nil
	switch {
	case p.m.Ended() != nil:
		return errEnded
	case err != nil:
		p.cutOff = true
		return err
	}
	told, err := parseAbort(in.f, words, p.m.Size())
	if err != nil {
		return p.Fault(transport.FaultProtocol, err)
	}
	p.Gone = told
	return told
}

func (p *pair) onFrame(f frame) error {
	m := p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Ended() != nil {
		return errEnded
	}
	var fault *transport.Fault
	switch f.kind {
	case kOffer, kStart, kGrant, kCredit, kCall:
		fault = p.s.addCredit(f.credit)
	}
	if fault == nil && f.kind != kPong && f.call != (transport.Call{}) {
		fault = p.compareCall(f)
	}
	if fault != nil {
		return fault
	}
	switch f.kind {
	case kOffer:
		order := m.NextArrival()
		if _, ok := p.s.in.Taker(f.slot); !ok {
			r, err := m.takeAny(p, f.slot, f.length)
			if err != nil {
				return err
			}
			if r != nil {
				r.Tag = noLanding
				p.s.beginReceive(r)
				break
			}
		}
		fault = p.s.onOffer(f, order)
		m.begun.Broadcast()
	case kStart:
		fault = p.s.onStart(f)
		m.begun.Broadcast()
	case kGrant:
		fault = p.s.onGrant(f)
	case kCall:
		p.onCall(f)
	case kBye:
		return errBye
	case kPing:
		ping, err := mesh.UnpackPing(f.slot, f.length, f.handle, m.Size())
		if err != nil {
			return p.s.protocol("%w", err)
		}
		p.Pinged(ping)
	case kPong:
		a, err := parsePong(f, m.Size())
		if err != nil {
			return p.s.protocol("%w", err)
		}
		p.Ponged(a)
	}
	if fault != nil {
		return fault
	}
	p.pump()
	return nil
}

// readBulk is the reader goroutine of a bulk connection.
func (p *pair) readBulk(conn net.Conn) {
	m := p.m
	defer m.Goroutines.Done()
	defer conn.Close()
	in := newInput(p, conn, true)
	err, _ := in.run()
	m.Mu.Lock()
	defer m.Mu.Unlock()
	delete(p.inbound, conn)
	if m.Ended() != nil {
		return
	}
	var f *transport.Fault
	switch {
	case errors.As(err, &f):
		m.Fail(f)
	case err == io.EOF && !in.used:
		// The peer gave the connection up while this rank accepted it.
	case p.end == nil:
		p.awaitReason(conn, err)
	}
	p.depart()
}
