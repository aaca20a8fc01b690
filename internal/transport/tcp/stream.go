package tcp

import (
	"fmt"

	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// messageCost is what a message that nobody has asked for counts besides
	// its bytes, so that the window bounds empty messages too. It is about what
	// remembering one takes.
	messageCost = 128

	// maxOffers bounds the messages that a peer may have announced, and maxGrants
	// the receives, that have met nothing yet. Each takes about 100 bytes.
	maxOffers = 1 << 16
	maxGrants = 1 << 16
)

// stream is what one rank knows of its messages with one peer: which receives
// and sends have met, what may be sent, and what the other may send. It is pure:
// what it wants to transmit it appends to frames and pieces, and it touches no
// socket, lock or clock. It completes the requests that it holds.
type stream struct {
	rank, peer int
	eager      int   // the largest message that goes without being asked for
	window     int64 // what such messages may cost on either side before they are taken

	in     callback.Match[uint64, arrival, *transport.Request]
	out    callback.Match[sendKey, grant, *transport.Request]
	offers int                // values of in that are offers
	asked  int                // takers of out: sends that are announced
	held   transport.Requests // sends that may not even be announced yet

	landings []landing
	free     int32 // the first free landing, -1 if none
	landed   int   // landings in use
	granted  int   // landings that the peer knows of and has not begun to fill
	waiting  []uint32
	next     int // the first of waiting

	credit int64 // what may still be sent eagerly
	owed   int64 // what of the peer's has been taken since it was told
	used   int64 // what of the peer's has not been taken

	frames  ring[item]   // in this order, on the first connection
	pieces  ring[parcel] // messages that were granted, on the first connection too
	bulk    ring[parcel] // those for the other connections
	dropped error        // why there are no more of either
	bulky   int          // the size from which a message is for those; 0: they do not exist

	blocks *blocks
	calls  *calls
}

// arrival is a message that no receive has met: an offer, or one that is here.
type arrival struct {
	length uint64
	block  []byte // nil for an offer
	here   bool
	order  uint64 // among all peers
}

// sendKey tells large messages, whose receives ask for them, from small ones,
// which are asked for only once they are offered. Among those of one kind grants
// and sends meet in their order.
type sendKey struct {
	slot  uint64
	large bool
}

type grant struct {
	handle uint32
	length uint64
}

// landing is a receive that the peer fills piece by piece, in any order.
type landing struct {
	req           *transport.Request
	claimed, done uint64 // bytes
	granted       bool   // the peer knows of it
	opened        bool   // a message has met it
	next          int32
}

// item is a frame to transmit, with the message behind it if it is EAGER.
type item struct {
	f   frame
	req *transport.Request
}

// parcel is a message that is to be transmitted in pieces. The Tag of its request
// counts the bytes that have not been written and, in units of writing, who is at it.
type parcel struct {
	req    *transport.Request
	handle uint32
	offset uint64 // what has been taken
}

func (s *stream) init(rank, peer, eager int, window int64, b *blocks, c *calls) {
	*s = stream{rank: rank, peer: peer, eager: eager, window: window, credit: window, free: -1, blocks: b, calls: c}
	s.in.Values, s.in.Bytes = maxOffers+int(window/messageCost), window
	s.out.Values, s.out.Bytes = maxGrants, 1
}

func cost(length uint64) int64 { return int64(length) + messageCost }

func (s *stream) fault(kind transport.FaultKind, err error) *transport.Fault {
	return transport.NewFault(kind, s.peer, s.rank, err)
}

func (s *stream) protocol(format string, args ...any) *transport.Fault {
	return s.fault(transport.FaultProtocol, fmt.Errorf("tcp: "+format, args...))
}

// fits compares a receive with the message that it has met.
func (s *stream) fits(r *transport.Request, length uint64) *transport.Fault {
	if n := uint64(len(r.Buf)); n != length {
		return s.fault(transport.FaultMismatch, &transport.SizeError{Peer: s.peer, Slot: r.Slot, Want: n, Got: length})
	}
	return nil
}

// transmit appends a frame, and tells the peer on this occasion what it may send and
// what this rank has called.
func (s *stream) transmit(f frame, r *transport.Request) {
	f.credit = uint64(s.owed)
	if f.kind != kCredit {
		f.call = s.calls.of(f.slot)
	}
	s.owed = 0
	s.frames.push(item{f, r})
}

// send takes r over. Requests that end here end with the fault that is returned.
func (s *stream) send(r *transport.Request) *transport.Fault {
	if !s.held.Empty() {
		s.held.Push(r)
		return nil
	}
	return s.forward(r)
}

func (s *stream) forward(r *transport.Request) *transport.Fault {
	n := uint64(len(r.Buf))
	key := sendKey{r.Slot, n > uint64(s.eager)}
	if !key.large && s.credit >= cost(n) {
		s.credit -= cost(n)
		s.transmit(frame{kind: kEager, slot: r.Slot, length: n}, r)
		return nil
	}
	if g, ok := s.out.TakeValue(key); ok {
		if g.length != n {
			return s.unfitting(r, g)
		}
		s.transmit(frame{kind: kStart, slot: r.Slot, length: n, handle: g.handle}, nil)
		s.deliver(r, g.handle)
		return nil
	}
	if s.asked == maxOffers {
		s.held.Push(r)
		return nil
	}
	s.asked++
	s.out.Take(key, r)
	s.transmit(frame{kind: kOffer, slot: r.Slot, length: n}, nil)
	return nil
}

func (s *stream) deliver(r *transport.Request, handle uint32) {
	r.Tag = uint64(len(r.Buf))
	if r.Tag == 0 {
		r.Complete(nil) // an empty message that was offered for want of credit; its landing completes by itself
		return
	}
	if s.bulky > 0 && len(r.Buf) >= s.bulky {
		s.bulk.push(parcel{req: r, handle: handle})
	} else {
		s.pieces.push(parcel{req: r, handle: handle})
	}
}

// unfitting ends a send whose receive has another length.
func (s *stream) unfitting(r *transport.Request, g grant) *transport.Fault {
	f := s.fault(transport.FaultMismatch, fmt.Errorf("tcp: rank %d receives %d bytes on slot %#x where this rank sends %d: the ranks disagree on operation, size or dtype", s.peer, g.length, r.Slot, len(r.Buf)))
	r.Complete(f)
	return f
}

// wanting reports whether a send would have to be announced.
func (s *stream) wanting(r *transport.Request) bool {
	key := sendKey{r.Slot, len(r.Buf) > s.eager}
	_, granted := s.out.Value(key)
	return key.large && !granted
}

// recv takes r over.
func (s *stream) recv(r *transport.Request) *transport.Fault {
	if a, ok := s.in.TakeValue(r.Slot); ok {
		return s.meet(r, a)
	}
	r.Tag = noLanding
	if len(r.Buf) > s.eager {
		r.Tag = uint64(s.land(r))
		s.invite(uint32(r.Tag))
	}
	s.in.Take(r.Slot, r)
	return nil
}

// noLanding is the Tag of a receive that waits and has no landing.
const noLanding = 1 << 32

// meet joins a receive with a message that waited for it.
func (s *stream) meet(r *transport.Request, a arrival) *transport.Fault {
	f := s.fits(r, a.length)
	if a.here {
		s.taken(cost(a.length))
		if f == nil {
			copy(r.Buf, a.block)
		}
		s.blocks.put(a.block)
	} else {
		s.offers--
	}
	if f != nil {
		r.Complete(f)
		return f
	}
	if a.here {
		r.Complete(nil)
		return nil
	}
	s.open(r, s.land(r))
	return nil
}

// land makes a landing for r.
func (s *stream) land(r *transport.Request) uint32 {
	if s.free < 0 {
		s.landings = append(s.landings, landing{next: -1})
		s.free = int32(len(s.landings) - 1)
	}
	h := s.free
	l := &s.landings[h]
	s.free = l.next
	*l = landing{req: r}
	s.landed++
	return uint32(h)
}

// open makes a landing ready for a message that has met it. The peer is told
// of it, if it has not been.
func (s *stream) open(r *transport.Request, h uint32) {
	l := &s.landings[h]
	l.opened = true
	if len(r.Buf) == 0 {
		// Granted for the sake of the sender; no DATA will come.
		s.answer(h)
		s.finish(h)
		return
	}
	if l.granted {
		s.granted--
		s.inviteNext()
	} else if len(r.Buf) <= s.eager {
		s.answer(h)
	} else {
		s.invite(h)
	}
}

// invite tells the peer of a large receive, in the order of the receives, if
// not too many are without a message.
func (s *stream) invite(h uint32) {
	s.waiting = append(s.waiting, h)
	s.inviteNext()
}

func (s *stream) inviteNext() {
	for s.next < len(s.waiting) {
		h := s.waiting[s.next]
		if !s.landings[h].opened {
			if s.granted == maxGrants {
				break
			}
			s.granted++
		}
		s.next++
		s.answer(h)
	}
	if s.next == len(s.waiting) {
		s.waiting, s.next = s.waiting[:0], 0
	}
}

func (s *stream) answer(h uint32) {
	l := &s.landings[h]
	l.granted = true
	s.transmit(frame{kind: kGrant, slot: l.req.Slot, length: uint64(len(l.req.Buf)), handle: h}, nil)
}

func (s *stream) finish(h uint32) {
	l := &s.landings[h]
	r := l.req
	*l = landing{next: s.free}
	s.free = int32(h)
	s.landed--
	r.Complete(nil)
}

// taken notes that a message of the peer's no longer takes room here.
func (s *stream) taken(n int64) {
	s.used -= n
	s.owed += n
	if s.owed >= s.window/4 {
		s.transmit(frame{kind: kCredit}, nil)
	}
}

// repay is the credit that came with a frame.
func (s *stream) repay(n uint64) *transport.Fault {
	if n > uint64(s.window-s.credit) {
		return s.protocol("rank %d returns %d bytes of credit where %d are out", s.peer, n, s.window-s.credit)
	}
	s.credit += int64(n)
	return nil
}

// onEager is the header of a message whose payload comes next. It returns the
// receive that takes it, nil if there is none yet.
func (s *stream) onEager(f frame) (*transport.Request, *transport.Fault) {
	if f.length > uint64(s.eager) {
		return nil, s.protocol("EAGER message of %d bytes, the limit is %d", f.length, s.eager)
	}
	if s.used+cost(f.length) > s.window {
		return nil, s.protocol("EAGER message of %d bytes where the window has %d left", f.length, s.window-s.used)
	}
	s.used += cost(f.length)
	r, ok := s.in.Taker(f.slot)
	if !ok {
		return nil, nil
	}
	if fault := s.fits(r, f.length); fault != nil {
		return nil, fault
	}
	s.in.TakeTaker(f.slot)
	return r, nil
}

// keep stores an EAGER message that no receive took when its header came. One
// may have been posted since.
func (s *stream) keep(slot uint64, a arrival) *transport.Fault {
	r, ok, err := s.in.Put(slot, a, cost(a.length))
	switch {
	case err != nil:
		s.blocks.put(a.block)
		return s.protocol("%w", err)
	case ok:
		if f := s.fits(r, a.length); f != nil {
			s.blocks.put(a.block)
			if r.Tag == noLanding { // else its landing still has it, which ends with the stream
				r.Complete(f)
			}
			return f
		}
		return s.meet(r, a)
	}
	return nil
}

// onOffer is a message that waits for a grant.
func (s *stream) onOffer(f frame, order uint64) *transport.Fault {
	r, ok := s.in.Taker(f.slot)
	if !ok {
		if s.offers == maxOffers {
			return s.protocol("rank %d has announced %d messages that nobody asked for", s.peer, maxOffers)
		}
		if _, _, err := s.in.Put(f.slot, arrival{length: f.length, order: order}, 0); err != nil {
			return s.protocol("%w", err)
		}
		s.offers++
		return nil
	}
	if fault := s.fits(r, f.length); fault != nil {
		return fault
	}
	s.in.TakeTaker(f.slot)
	s.begin(r)
	return nil
}

// begin opens the landing of a receive that has met its message.
func (s *stream) begin(r *transport.Request) {
	if r.Tag == noLanding {
		s.open(r, s.land(r))
		return
	}
	h := uint32(r.Tag)
	l := &s.landings[h]
	l.opened = true
	if l.granted {
		s.granted--
		s.inviteNext()
	}
}

// onStart is a message that has been granted already.
func (s *stream) onStart(f frame) *transport.Fault {
	r, ok := s.in.Taker(f.slot)
	if !ok {
		return s.protocol("START of %d bytes on slot %#x, where nothing was granted", f.length, f.slot)
	}
	if fault := s.fits(r, f.length); fault != nil {
		return fault
	}
	if r.Tag != uint64(f.handle) || !s.landings[f.handle].granted {
		return s.protocol("START with grant %d on slot %#x, which has another", f.handle, f.slot)
	}
	s.in.TakeTaker(f.slot)
	s.begin(r)
	return nil
}

// onGrant is a receive of the peer's.
func (s *stream) onGrant(f frame) *transport.Fault {
	key := sendKey{f.slot, f.length > uint64(s.eager)}
	g := grant{f.handle, f.length}
	r, ok, err := s.out.Put(key, g, 0)
	switch {
	case err != nil:
		return s.protocol("rank %d has granted %d messages that nobody sends", s.peer, maxGrants)
	case !ok && !key.large:
		return s.protocol("GRANT of %d bytes on slot %#x for a message that was not offered", f.length, f.slot)
	case !ok:
		return nil
	case g.length != uint64(len(r.Buf)):
		return s.unfitting(r, g)
	}
	s.asked--
	s.deliver(r, g.handle)
	for !s.held.Empty() && s.asked < maxOffers {
		if f := s.forward(s.held.Pop()); f != nil {
			return f
		}
	}
	return nil
}

// claim returns where a piece goes. ready is false if the piece has come
// before the START of its message, on another connection.
func (s *stream) claim(f frame) (to []byte, ready bool, fault *transport.Fault) {
	if uint64(f.handle) >= uint64(len(s.landings)) || !s.landings[f.handle].granted {
		return nil, true, s.protocol("DATA of %d bytes for grant %d, which there is not", f.length, f.handle)
	}
	l := &s.landings[f.handle]
	if !l.opened {
		return nil, false, nil
	}
	size := uint64(len(l.req.Buf))
	if f.slot > size || f.length > size-f.slot || f.length > size-l.claimed {
		return nil, true, s.protocol("DATA of %d bytes at %d of a message of %d, of which %d are taken", f.length, f.slot, size, l.claimed)
	}
	l.claimed += f.length
	return l.req.Buf[f.slot : f.slot+f.length], true, nil
}

// arrived notes that a piece is in place, or that it will not be because the
// stream has ended with err.
func (s *stream) arrived(f frame, err error) {
	l := &s.landings[f.handle]
	l.done += f.length
	switch {
	case err != nil:
		if l.done == l.claimed {
			r := l.req
			l.req = nil
			r.Complete(err)
		}
	case l.done == uint64(len(l.req.Buf)):
		s.finish(f.handle)
	}
}

// unclaim notes that the connection broke under a piece.
func (s *stream) unclaim(f frame) { s.landings[f.handle].claimed -= f.length }

// writing is added to the Tag of a request for each of its pieces that is being
// written. What is below it counts bytes.
const writing = 1 << 48

// cut takes the next piece of at most n bytes off a queue.
func cut(q *ring[parcel], n uint64) (*transport.Request, frame) {
	p := q.front()
	n = min(n, uint64(len(p.req.Buf))-p.offset)
	r, f := p.req, frame{kind: kData, handle: p.handle, slot: p.offset, length: n}
	r.Tag += writing
	if p.offset += n; p.offset == uint64(len(r.Buf)) {
		q.pop()
	}
	return r, f
}

// wrote notes that n bytes of a piece of r have gone out, and that nobody is at
// it any more.
func (s *stream) wrote(r *transport.Request, n uint64) {
	r.Tag -= writing + n
	switch {
	case r.Tag == 0:
		r.Complete(nil)
	case s.dropped != nil && r.Tag < writing:
		r.Complete(s.dropped)
	}
}

// needed reports whether a request waits for the peer. One whose last bytes
// somebody is writing does not count.
func (s *stream) needed() bool {
	_, _, recvs := s.in.Waiting()
	_, _, sends := s.out.Waiting()
	return recvs > 0 || sends > 0 || !s.held.Empty() || s.landed > 0 || s.pieces.len() > 0 || s.bulk.len() > 0
}

// end completes what only waits to be met. What is queued for transmission stays.
// Messages that are coming in right now end when those who read them say so.
func (s *stream) end(err error) {
	s.in.Drop(nil, func(_ uint64, a arrival) { s.blocks.put(a.block) }, func(_ uint64, r *transport.Request) {
		if r.Tag == noLanding {
			r.Complete(err)
		}
	})
	s.out.Drop(nil, nil, func(_ sendKey, r *transport.Request) { r.Complete(err) })
	s.held.Complete(err)
	for i := range s.landings {
		if l := &s.landings[i]; l.req != nil && l.claimed == l.done {
			r := l.req
			l.req = nil
			r.Complete(err)
		}
	}
	s.offers, s.asked = 0, 0
	s.waiting, s.next = nil, 0
}

// drop forgets what is queued for transmission.
func (s *stream) drop(err error) {
	for ; s.frames.len() > 0; s.frames.pop() {
		if r := s.frames.front().req; r != nil {
			r.Complete(err)
		}
	}
	s.dropPieces(err)
}

// dropPieces is drop for messages in pieces. From then on a request ends when
// nobody is at it, though not all of it has been written.
func (s *stream) dropPieces(err error) {
	if s.dropped == nil {
		s.dropped = err
	}
	for _, q := range []*ring[parcel]{&s.pieces, &s.bulk} {
		for ; q.len() > 0; q.pop() {
			if r := q.front().req; r.Tag < writing {
				r.Complete(err)
			}
		}
	}
}
