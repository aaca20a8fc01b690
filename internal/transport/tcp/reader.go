package tcp

import (
	"errors"
	"io"
	"net"
	"sync"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// readBuffer is what one read of a first connection may take in: many headers and
	// small messages. What is larger goes straight to its place.
	readBuffer = 16 << 10

	// readTurns is how often a reader reads before it looks at its deadline again.
	readTurns = 16
)

// errAgain says that there is nothing to be read at the moment.
var errAgain = errors.New("tcp: nothing to read yet")

// pollable is a connection that can be read without waiting.
type pollable interface {
	// tryRead reads what is there, first into a and then into b; errAgain if nothing is.
	tryRead(a, b []byte) (int, error)

	// await calls f, and again whenever something may have come, until it returns
	// true, the deadline is over or the connection is closed.
	await(f func(uintptr) bool) error

	// watch tells whether what comes is to wake who is in await. What is there when
	// that begins does.
	watch(on bool)
}

// input is the reading half of a connection. It keeps what is no whole frame yet, so
// who reads may stop at any byte, and somebody else go on.
//
// A first connection that is pollable has two kinds of readers that take turns: the pair's
// goroutine, which sleeps in between, and whoever is in Mesh.Help. The latter make the
// connection stop waking the former, since that costs more than most messages; Mesh.see
// undoes it.
type input struct {
	p    *pair
	conn net.Conn
	poll pollable // nil if only its goroutine reads
	bulk bool

	mu    sync.Mutex // held while reading, if it is pollable
	blind bool       // the connection does not wake its goroutine
	err   error      // why no more frames are read
	told  bool       // the pair knows why

	buf  []byte
	r, w int
	used bool // something has come

	busy bool // a payload is on its way:
	f    frame
	to   []byte // what is missing of it
	req  *transport.Request
	kept []byte
}

func newInput(p *pair, conn net.Conn, bulk bool) *input {
	in := &input{p: p, conn: conn, bulk: bulk}
	if bulk {
		in.buf = make([]byte, headerLen)
		return in
	}
	in.buf = make([]byte, readBuffer)
	in.poll, _ = conn.(pollable)
	return in
}

// read is the reader of the first connection.
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

// run reads frames until there are no more, and returns why, and whether the pair
// knows.
func (in *input) run() (error, bool) {
	if in.poll == nil {
		for in.err == nil {
			in.fail(in.next(in.wait))
		}
		return in.err, false
	}
	turn := in.turn
	for {
		err := in.poll.await(turn)
		in.mu.Lock()
		in.fail(err)
		if in.err != nil {
			in.see()
			in.mu.Unlock()
			return in.err, in.told
		}
		in.mu.Unlock()
	}
}

// turn is what the goroutine does when something may have come. It returns false if
// there is no more.
func (in *input) turn(uintptr) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	for range readTurns {
		if in.err != nil {
			break
		}
		err := in.next(in.poll.tryRead)
		if err == errAgain {
			return false
		}
		in.fail(err)
	}
	return true
}

// help is a turn of somebody who waits, unless another reads, or somebody who does not
// and looks only where the goroutine is not woken. It reports whether it has read
// something.
func (in *input) help(only bool) bool {
	if in.poll == nil || !in.mu.TryLock() {
		return false
	}
	defer in.mu.Unlock()
	if in.err != nil || only && !in.blind {
		return false
	}
	if !in.blind {
		in.blind = true
		in.poll.watch(false)
	}
	err := in.next(in.poll.tryRead)
	if err == errAgain {
		return false
	}
	if in.fail(err); in.err != nil {
		m := in.p.m
		m.Mu.Lock()
		if m.Ended() == nil {
			in.p.lost(in.err)
			in.told = true
		}
		m.Mu.Unlock()
		in.see()
	}
	return true
}

// see makes the connection wake its goroutine again. in.mu is held.
func (in *input) see() {
	if in.blind {
		in.blind = false
		in.poll.watch(true)
	}
}

// fail ends the reading with err, if it is one.
func (in *input) fail(err error) {
	if err == nil || in.err != nil {
		return
	}
	in.err = err
	if in.busy {
		in.busy, in.to = false, nil
		in.finish(err)
	}
}

// wait is tryRead for connections that are not pollable: it waits.
func (in *input) wait(a, _ []byte) (int, error) { return in.conn.Read(a) }

// next reads once, and does what has come.
func (in *input) next(read func(a, b []byte) (int, error)) error {
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
			in.to = in.to[k:]
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
			if in.to = in.to[n:]; len(in.to) > 0 {
				return nil
			}
			in.busy = false
			if err := in.finish(nil); err != nil {
				return err
			}
			continue
		}
		if in.w-in.r < headerLen {
			return nil
		}
		f, err := parseFrame(in.buf[in.r:])
		if err != nil {
			return in.p.Fault(transport.FaultProtocol, err)
		}
		in.r += headerLen
		if err := in.begin(f); err != nil {
			return err
		}
	}
}

// begin does what a frame says, or begins to read its payload.
func (in *input) begin(f frame) error {
	p := in.p
	if in.bulk && f.kind != kData {
		return p.s.protocol("%v on a connection for DATA", kindNames[f.kind])
	}
	switch f.kind {
	case kData:
		return in.beginData(f)
	case kEager:
		return in.beginEager(f)
	case kAbort:
		in.expect(f, make([]byte, f.call.What[0]))
		in.kept = in.to
		return nil
	}
	return p.onFrame(f)
}

// expect makes what comes next the payload of f.
func (in *input) expect(f frame, to []byte) {
	in.busy, in.f, in.to = true, f, to
}

// finish notes that the payload is in place, or that err is why it will not be.
func (in *input) finish(err error) error {
	m := in.p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	switch in.f.kind {
	case kData:
		return in.finishData(err)
	case kAbort:
		return in.finishAbort(err)
	}
	return in.finishEager(err)
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
	fault := p.s.repay(f.credit)
	if fault == nil && f.call != (transport.Call{}) {
		fault = p.heard(f)
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
		in.req, in.kept = nil, m.blocks.get(int(f.length))
		in.expect(f, in.kept)
		return nil
	}
	// What is in the buffer already needs no other turn of the lock.
	if in.w-in.r >= len(r.Buf) {
		in.r += copy(r.Buf, in.buf[in.r:in.w])
		p.s.taken(cost(f.length))
		r.Complete(nil)
		p.pump()
		return nil
	}
	in.req, in.kept = r, nil
	in.expect(f, r.Buf)
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
				p.s.taken(cost(f.length))
				p.pump()
			}
		case end != nil:
			r.Complete(end)
		default:
			p.Stranded.Push(r)
		}
		return err
	}
	a := arrival{length: f.length, block: in.kept, here: true}
	in.kept = nil
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
			fault := p.s.meet(r, a)
			p.pump()
			return asError(fault)
		}
	}
	if fault := p.s.keep(f.slot, a); fault != nil {
		return fault
	}
	p.pump()
	return nil
}

// beginData finds the place of a piece of a message. On connections but the first
// it waits for the message to begin.
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
		if ready {
			in.expect(f, to)
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
	p, words := in.p, in.kept
	in.kept = nil
	switch {
	case p.m.Ended() != nil:
		return errEnded
	case err != nil:
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
		fault = p.s.repay(f.credit)
	}
	if fault == nil && f.call != (transport.Call{}) {
		fault = p.heard(f)
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
				p.s.begin(r)
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
		p.Pinged(f.slot)
	case kPong:
		p.Ponged(f.slot, f.length, f.credit)
	}
	if fault != nil {
		return fault
	}
	p.pump()
	return nil
}

// readBulk is the reader of another connection of the peer's.
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
		// Who opened it gave that up, a moment after this rank agreed.
	case !p.bye:
		p.doubt(conn, err)
	}
	p.depart()
}
