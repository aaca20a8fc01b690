package tcp

import (
	"fmt"

	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// messageCost is what an unexpected message counts besides its bytes, so that the window
	// bounds empty messages too. It is about the memory that the message's record takes.
	messageCost = 128

	// maxOffers and maxGrants bound the messages and the receives that a peer may have
	// announced without a match. Each takes about 100 bytes.
	maxOffers = 1 << 16
	maxGrants = 1 << 16
)

// stream is the state of the messages between this rank and a peer. It matches receives with
// messages and sends with grants, and counts credit. It is pure: it appends to frames and
// pieces what is to be transmitted, and uses no socket, lock or clock. It completes the
// requests that it holds.
type stream struct {
	rank, peer int
	eager      int   // the largest message that goes without a GRANT
	window     int64 // the limit for the cost of such messages, each way, that no receive has taken

	in          callback.Match[uint64, arrival, *transport.Request]
	out         callback.Match[sendKey, grant, *transport.Request]
	offers      int                // messages in in that were offered
	asked       int                // sends in out that were offered
	unannounced transport.Requests // sends that wait for the right to be offered

	landings []landing
	free     int32 // the first free landing, -1 if none
	landed   int   // landings in use
	granted  int   // landings that the peer knows of and has not begun to fill
	waiting  []uint32
	next     int // index of the first one in waiting

	credit int64 // what may still be sent eagerly
	owed   int64 // credit to give back to the peer
	used   int64 // cost of the peer's messages that no receive has taken

	frames  fifo[item]   // for the first connection, in this order
	pieces  fifo[parcel] // granted messages for the first connection
	bulk    fifo[parcel] // granted messages for the bulk connections
	dropped error        // why pieces and bulk have been emptied
	bulky   int          // the size from which a message goes to bulk; 0 without such connections
	alone   int          // the same for the first messages of a call, while no other is offered or being written
	sending int          // granted messages that are not written yet

	number    uint32 // of the last granted message's call
	delivered int    // granted messages of that call

	blocks *blocks
	calls  *calls
}

// arrival is a message that no receive has met: an offer, or a message that is here.
type arrival struct {
	length uint64
	block  []byte // nil for an offer
	here   bool
	order  uint64 // among all peers
}

// sendKey tells large messages from small ones. The receive of a large message sends a GRANT at
// once, that of a small one only when the message is offered. Within a key, grants and sends
// match in their order.
type sendKey struct {
	slot  uint64
	large bool
}

type grant struct {
	handle uint32
	length uint64
}

// landing is a receive that the peer fills in pieces, in any order.
type landing struct {
	req           *transport.Request
	claimed, done uint64 // bytes
	granted       bool   // the peer knows of it
	opened        bool   // a message has matched it
	next          int32
}

// item is a frame to transmit, with its payload if it is EAGER or ABORT.
type item struct {
	f   frame
	req *transport.Request
}

// parcel is a message that is transmitted in pieces. The Tag of its request counts the bytes
// that have not been written, and in units of writing the goroutines that write.
type parcel struct {
	req    *transport.Request
	handle uint32
	offset uint64 // bytes that were cut off already
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

// checkLength compares a receive with the message that it has matched.
func (s *stream) checkLength(r *transport.Request, length uint64) *transport.Fault {
	if n := uint64(len(r.Buf)); n != length {
		return s.fault(transport.FaultMismatch, &transport.SizeError{Peer: s.peer, Slot: r.Slot, Want: n, Got: length})
	}
	return nil
}

// transmit queues a frame. The credit that is owed and this rank's call go with it.
func (s *stream) transmit(f frame, r *transport.Request) {
	f.credit = uint64(s.owed)
	if f.kind != kCredit {
		f.call = s.calls.behind(f.slot)
	}
	s.owed = 0
	s.frames.push(item{f: f, req: r})
}

// send takes r over. If r ends here, it ends with the returned fault.
func (s *stream) send(r *transport.Request) *transport.Fault {
	if !s.unannounced.Empty() {
		s.unannounced.Push(r)
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
			return s.wrongLength(r, g)
		}
		s.transmit(frame{kind: kStart, slot: r.Slot, length: n, handle: g.handle}, nil)
		s.deliver(r, g.handle)
		return nil
	}
	if s.asked == maxOffers {
		s.unannounced.Push(r)
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
	from := s.bulky
	if number, ok := numberOf(r.Slot); !ok || number != s.number {
		s.number, s.delivered = number, 0
	}
	if s.delivered++; s.sending == 0 && s.asked == 0 && s.delivered <= aloneMessages {
		from = s.alone
	}
	s.sending++
	if s.bulky > 0 && len(r.Buf) >= from {
		s.bulk.push(parcel{req: r, handle: handle})
	} else {
		s.pieces.push(parcel{req: r, handle: handle})
	}
}

// wrongLength ends a send whose receive has another length.
func (s *stream) wrongLength(r *transport.Request, g grant) *transport.Fault {
	f := s.fault(transport.FaultMismatch, fmt.Errorf("tcp: rank %d receives %d bytes on slot %#x where this rank sends %d: the ranks disagree on operation, size or dtype", s.peer, g.length, r.Slot, len(r.Buf)))
	r.Complete(f)
	return f
}

// needsGrant reports whether a send is large and has no GRANT yet.
func (s *stream) needsGrant(r *transport.Request) bool {
	key := sendKey{r.Slot, len(r.Buf) > s.eager}
	_, granted := s.out.Value(key)
	return key.large && !granted
}

// recv takes r over.
func (s *stream) recv(r *transport.Request) *transport.Fault {
	if a, ok := s.in.TakeValue(r.Slot); ok {
		return s.match(r, a)
	}
	r.Tag = noLanding
	if len(r.Buf) > s.eager {
		r.Tag = uint64(s.newLanding(r))
		s.queueGrant(uint32(r.Tag))
	}
	s.in.Take(r.Slot, r)
	return nil
}

// noLanding is the Tag of a receive that waits and has no landing.
const noLanding = 1 << 32

// match joins a receive with a message that waited for it.
func (s *stream) match(r *transport.Request, a arrival) *transport.Fault {
	f := s.checkLength(r, a.length)
	if a.here {
		s.giveBack(cost(a.length))
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
	s.openLanding(r, s.newLanding(r))
	return nil
}

// newLanding makes a landing for r.
func (s *stream) newLanding(r *transport.Request) uint32 {
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

// openLanding readies a landing for the message that has matched it, and grants it to the peer
// if that has not happened.
func (s *stream) openLanding(r *transport.Request, h uint32) {
	l := &s.landings[h]
	l.opened = true
	if len(r.Buf) == 0 {
		// Granted for the sake of the sender; no DATA will come.
		s.sendGrant(h)
		s.finish(h)
		return
	}
	if l.granted {
		s.granted--
		s.sendGrants()
	} else if len(r.Buf) <= s.eager {
		s.sendGrant(h)
	} else {
		s.queueGrant(h)
	}
}

// queueGrant queues a GRANT for a large receive, in the order of the receives.
func (s *stream) queueGrant(h uint32) {
	s.waiting = append(s.waiting, h)
	s.sendGrants()
}

// sendGrants sends queued GRANTs, while fewer than maxGrants have no message.
func (s *stream) sendGrants() {
	for s.next < len(s.waiting) {
		h := s.waiting[s.next]
		if !s.landings[h].opened {
			if s.granted == maxGrants {
				break
			}
			s.granted++
		}
		s.next++
		s.sendGrant(h)
	}
	if s.next == len(s.waiting) {
		s.waiting, s.next = s.waiting[:0], 0
	}
}

func (s *stream) sendGrant(h uint32) {
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

// giveBack notes that a message of the peer takes no memory here any more.
func (s *stream) giveBack(n int64) {
	s.used -= n
	s.owed += n
	if s.owed >= s.window/4 {
		s.transmit(frame{kind: kCredit}, nil)
	}
}

// addCredit adds the credit that came with a frame.
func (s *stream) addCredit(n uint64) *transport.Fault {
	if n > uint64(s.window-s.credit) {
		return s.protocol("rank %d returns %d bytes of credit where %d are out", s.peer, n, s.window-s.credit)
	}
	s.credit += int64(n)
	return nil
}

// onEager handles the header of a message whose payload follows. It returns the receive that
// takes the payload, nil if there is none yet.
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
	if fault := s.checkLength(r, f.length); fault != nil {
		return nil, fault
	}
	s.in.TakeTaker(f.slot)
	return r, nil
}

// store keeps an EAGER message that no receive took when its header came. One may have been
// posted since.
func (s *stream) store(slot uint64, a arrival) *transport.Fault {
	r, ok, err := s.in.Put(slot, a, cost(a.length))
	switch {
	case err != nil:
		s.blocks.put(a.block)
		return s.protocol("%w", err)
	case ok:
		if f := s.checkLength(r, a.length); f != nil {
			s.blocks.put(a.block)
			if r.Tag == noLanding { // else its landing still has it, which ends with the stream
				r.Complete(f)
			}
			return f
		}
		return s.match(r, a)
	}
	return nil
}

// onOffer handles a message that waits for a GRANT.
func (s *stream) onOffer(f frame, order uint64) *transport.Fault {
	r, ok := s.in.Taker(f.slot)
	if !ok {
		if s.offers == maxOffers {
			return s.protocol("rank %d has announced %d messages that no receive has taken", s.peer, maxOffers)
		}
		if _, _, err := s.in.Put(f.slot, arrival{length: f.length, order: order}, 0); err != nil {
			return s.protocol("%w", err)
		}
		s.offers++
		return nil
	}
	if fault := s.checkLength(r, f.length); fault != nil {
		return fault
	}
	s.in.TakeTaker(f.slot)
	s.beginReceive(r)
	return nil
}

// beginReceive opens the landing of a receive that has matched its message.
func (s *stream) beginReceive(r *transport.Request) {
	if r.Tag == noLanding {
		s.openLanding(r, s.newLanding(r))
		return
	}
	h := uint32(r.Tag)
	l := &s.landings[h]
	l.opened = true
	if l.granted {
		s.granted--
		s.sendGrants()
	}
}

// onStart handles the beginning of a message that has a GRANT.
func (s *stream) onStart(f frame) *transport.Fault {
	r, ok := s.in.Taker(f.slot)
	if !ok {
		return s.protocol("START of %d bytes on slot %#x, without a GRANT", f.length, f.slot)
	}
	if fault := s.checkLength(r, f.length); fault != nil {
		return fault
	}
	if r.Tag != uint64(f.handle) || !s.landings[f.handle].granted {
		return s.protocol("START with grant %d on slot %#x, whose grant is another one", f.handle, f.slot)
	}
	s.in.TakeTaker(f.slot)
	s.beginReceive(r)
	return nil
}

// onGrant handles a receive of the peer.
func (s *stream) onGrant(f frame) *transport.Fault {
	key := sendKey{f.slot, f.length > uint64(s.eager)}
	g := grant{f.handle, f.length}
	r, ok, err := s.out.Put(key, g, 0)
	switch {
	case err != nil:
		return s.protocol("rank %d has granted %d messages that this rank does not send", s.peer, maxGrants)
	case !ok && !key.large:
		return s.protocol("GRANT of %d bytes on slot %#x for a message that was not offered", f.length, f.slot)
	case !ok:
		return nil
	case g.length != uint64(len(r.Buf)):
		return s.wrongLength(r, g)
	}
	s.asked--
	s.deliver(r, g.handle)
	for !s.unannounced.Empty() && s.asked < maxOffers {
		if f := s.forward(s.unannounced.Pop()); f != nil {
			return f
		}
	}
	return nil
}

// claim returns the place of a piece. ready is false if the piece came before the START of its
// message, on another connection.
func (s *stream) claim(f frame) (to []byte, ready bool, fault *transport.Fault) {
	if uint64(f.handle) >= uint64(len(s.landings)) || !s.landings[f.handle].granted {
		return nil, true, s.protocol("DATA of %d bytes for unknown grant %d", f.length, f.handle)
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

// arrived notes that a piece is in place. If the stream has ended, err is why, and the piece
// does not count.
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

// writing is added to the Tag of a request for each of its pieces that is being written. The
// bits below it count bytes.
const writing = 1 << 48

// cut takes the next piece, of at most n bytes, off a queue.
func cut(q *fifo[parcel], n uint64) (*transport.Request, frame) {
	p := q.front()
	n = min(n, uint64(len(p.req.Buf))-p.offset)
	r, f := p.req, frame{kind: kData, handle: p.handle, slot: p.offset, length: n}
	r.Tag += writing
	if p.offset += n; p.offset == uint64(len(r.Buf)) {
		q.pop()
	}
	return r, f
}

// wrote notes that n bytes of a piece of r have gone out, and that its writing has ended.
func (s *stream) wrote(r *transport.Request, n uint64) {
	r.Tag -= writing + n
	switch {
	case r.Tag == 0:
		s.sending--
		r.Complete(nil)
	case s.dropped != nil && r.Tag < writing:
		r.Complete(s.dropped)
	}
}

// needsPeer reports whether a request waits for the peer. A request whose last bytes are being
// written does not count.
func (s *stream) needsPeer() bool {
	_, _, recvs := s.in.Waiting()
	_, _, sends := s.out.Waiting()
	return recvs > 0 || sends > 0 || !s.unannounced.Empty() || s.landed > 0 || s.pieces.len() > 0 || s.bulk.len() > 0
}

// queued reports whether a message waits in frames to be written.
func (s *stream) queued() bool {
	for i := range s.frames.len() {
		if s.frames.at(i).req != nil {
			return true
		}
	}
	return false
}

// end completes the requests that wait to be matched. Queued frames stay. A message that is
// being read ends when its reader calls arrived.
func (s *stream) end(err error) {
	s.in.Drop(func(a arrival) { s.blocks.put(a.block) }, func(r *transport.Request) {
		if r.Tag == noLanding {
			r.Complete(err)
		}
	})
	s.out.Drop(nil, func(r *transport.Request) { r.Complete(err) })
	s.unannounced.Complete(err)
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

// drop empties the queues.
func (s *stream) drop(err error) {
	for ; s.frames.len() > 0; s.frames.pop() {
		if r := s.frames.front().req; r != nil {
			r.Complete(err)
		}
	}
	s.dropPieces(err)
}

// dropPieces empties the queues of pieces. From then on a request ends when no piece of it is
// being written, even if bytes are missing.
func (s *stream) dropPieces(err error) {
	if s.dropped == nil {
		s.dropped = err
	}
	for _, q := range []*fifo[parcel]{&s.pieces, &s.bulk} {
		for ; q.len() > 0; q.pop() {
			if r := q.front().req; r.Tag < writing {
				r.Complete(err)
			}
		}
	}
}
