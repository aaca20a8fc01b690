package shm

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/backoff"
	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// first is how much of a message its first frame brings.
	first = 8 << 10

	// eager is up to how much a message goes without the receiver's consent, if
	// the ring has room for all of it. 64 KiB take 7 us so and 9 with consent
	// (BenchmarkProcesses, sendrecv).
	eager = 64 << 10

	// step is how much the frames after the first bring then, and chunk when the
	// receiver has consented; it makes little difference from 8 to 48 KiB.
	step  = 12 << 10
	chunk = 32 << 10

	// turn is how much a rank writes to one peer before it looks at the others.
	turn = 64 << 10

	// Of messages that a peer has sent and nobody expects a rank keeps maxStash
	// bytes, and what is in the ring; from then on the peer is asked to keep them and
	// only to say that there are some. Of those a rank remembers maxNotices; then
	// they stay in the ring.
	maxStash   = 1 << 20
	maxNotices = 1 << 18
	maxSpare   = 4 << 20 // bytes of arrivals that are kept for others

	// sip is how much of a message a rank reads from a peer's memory before it looks
	// at the others. Of memory of Alloc it takes a stretch: 16 MiB in 1000 us instead of 1230.
	sip = 256 << 10

	// wordOfFault is how long a rank waits for the other mesh to say why the ranks
	// have ended the group, which they say there first.
	wordOfFault = time.Second
)

// Mesh is a transport.Mesh whose messages go through the memory of a Group. What
// the memory cannot do it leaves to another mesh of the same ranks: to notice
// that one has died, to say why the group has ended, and to diagnose. If either
// ends, so do both.
//
// From [Limits].Message on the receiver reads a message out of the sender's memory, by those
// of [Group.MappedLimits] if it lies in memory of Alloc. Others are copied twice.
//
// A message of up to 64 KiB is copied into the memory by the goroutine that sends
// it, and its request ends at once, while there is room. Larger ones follow in
// pieces when the receiver wants them. Somebody has to see to that: whoever calls
// Help, or else a goroutine of the mesh, which sleeps while there is nothing to do.
type Mesh struct {
	transport.Mesh // what does the rest
	g              *Group
	lazy           bool

	pending atomic.Int64   // requests under way
	helpers atomic.Int32   // goroutines that want to drive
	refused atomic.Bool    // one of them was turned away and relies on who drives
	owed    atomic.Bool    // the mesh's goroutine has left work to helpers
	later   *backoff.Timer // kicks

	driver     sync.Mutex  // held by the goroutine that polls
	background atomic.Bool // which is the mesh's own

	kicks   chan struct{} // wake that one
	closed  chan struct{} // once Close has begun
	dooms   sync.Once
	wg      sync.WaitGroup
	closing sync.Once

	mu     sync.Mutex
	end    error            // what ends requests from now on
	found  *transport.Fault // will be the end, and nothing moves any more
	told   bool             // so unlock has said
	peers  []peer
	anys   int // receives from any rank that wait
	shared int // those of them that have a transport.Sharer
	posted [buckets]transport.Requests
	early  [buckets]transport.Queue[*arrival]
	out    table
	in     table
	lens   lens
	lent   int // messages that the receivers may be reading
	spares [stashClasses]*arrival
	spare  int // bytes of them
}

// MeshOptions tune a Mesh. The zero value is right for most.
type MeshOptions struct {
	// Lazy leaves messages that are under way to whoever calls Help until somebody calls
	// Kick, for callers that nearly always wait for what they post. Otherwise a
	// goroutine of the mesh is woken for each message that cannot end at once.
	Lazy bool
}

// peer is what there is between this rank and another.
type peer struct {
	rank    int
	seg     *segment
	w       writer
	r       reader
	pending int       // requests that name it
	rest    *transfer // the next frameRest belongs to it
	restOf  *arrival  // or to this
	stash   int       // bytes of its messages in arrivals
	notices int       // its messages in arrivals
	sends   transport.Requests
	asks    transport.Queue[*transfer] // frameGo has to be sent
	streams transport.Queue[*transfer] // the rest has been asked for
	reads   transport.Queue[*transfer] // to be read from its memory
}

// NewMesh lays a mesh over g and rest, which must have the same ranks. Close
// closes both.
func NewMesh(g *Group, rest transport.Mesh, o MeshOptions) (*Mesh, error) {
	if g.rank != rest.Rank() || g.size != rest.Size() {
		return nil, fmt.Errorf("shm: rank %d of %d in memory, rank %d of %d in the other mesh", g.rank, g.size, rest.Rank(), rest.Size())
	}
	m := &Mesh{
		Mesh: rest, g: g, lazy: o.Lazy,
		kicks: make(chan struct{}, 1), closed: make(chan struct{}),
		peers: make([]peer, g.size),
	}
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return nil, ErrClosed
	}
	if g.mesh != nil {
		return nil, errors.New("shm: the group has a mesh already")
	}
	g.mesh = m
	m.later = backoff.New(leaveFor, leaveFor, func() bool {
		m.Kick()
		return false
	})
	for i := range m.peers {
		p := &m.peers[i]
		p.rank, p.seg = i, &g.segs[i]
		if i == g.rank {
			continue
		}
		data, head, full := g.ringOf(g.rank, i)
		p.w = writer{data: data, head: head, full: full}
		data, head, full = g.ringOf(i, g.rank)
		p.r = reader{data: data, head: head, full: full}
	}
	m.wg.Add(2)
	go m.watch()
	go m.drive()
	return m, nil
}

// Send implements transport.Mesh.
func (m *Mesh) Send(r *transport.Request) {
	m.mu.Lock()
	p := m.admit(r)
	if p == nil {
		m.unlock()
		return
	}
	if atomic.LoadUint32(p.seg.left) != 0 {
		m.hold(p)
		p.sends.Push(r)
		m.left(p)
		m.unlock()
		return
	}
	if p.sends.Empty() && m.announceTo(p, r) {
		p.seg.ring()
	} else {
		m.hold(p)
		p.sends.Push(r)
	}
	m.unlockAfterPost()
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	m.mu.Lock()
	if p := m.admit(r); p != nil {
		m.hold(p)
		if !m.expected(r, p) {
			m.posted[bucketOf(r.Slot)].Push(r)
			m.receive(p)
		}
	}
	m.unlockAfterPost()
}

// RecvAny implements transport.Mesh.
func (m *Mesh) RecvAny(r *transport.Request) {
	m.mu.Lock()
	if m.end != nil {
		r.Complete(m.end)
	} else {
		r.Peer = anyone
		m.anys++
		if r.Shared() {
			m.shared++
		}
		m.pending.Add(1)
		if !m.expected(r, nil) {
			m.posted[bucketOf(r.Slot)].Push(r)
			for i := range m.peers {
				m.receive(&m.peers[i])
			}
		}
	}
	m.unlockAfterPost()
}

// anyone is the Peer of a receive from any rank while it waits.
const anyone = -1

// unlockAfterPost is unlock, and sees to it that somebody drives what has been posted.
func (m *Mesh) unlockAfterPost() {
	under := m.end == nil && m.pending.Load() > 0
	if under {
		m.g.self.ring()
	}
	m.unlock()
	if under && !m.lazy {
		m.Kick()
	}
}

// Kick wakes the mesh's goroutine, which works until no message is under way or
// somebody calls Help.
func (m *Mesh) Kick() {
	select {
	case m.kicks <- struct{}{}:
	default:
	}
}

// admit returns the peer that r is for. If there is none, it ends r.
func (m *Mesh) admit(r *transport.Request) *peer {
	switch {
	case m.end != nil:
		r.Complete(m.end)
	case r.Peer < 0 || r.Peer >= m.g.size || r.Peer == m.g.rank:
		r.Complete(fmt.Errorf("shm: rank %d has no peer %d in a group of %d", m.g.rank, r.Peer, m.g.size))
	default:
		return &m.peers[r.Peer]
	}
	return nil
}

// hold counts a request under way with p.
func (m *Mesh) hold(p *peer) {
	p.pending++
	m.pending.Add(1)
}

// finish ends a request that was held.
func (m *Mesh) finish(p *peer, r *transport.Request) {
	p.pending--
	m.pending.Add(-1)
	r.Complete(nil)
}

// unlock releases m.mu and ends the group if a message has shown that it must.
func (m *Mesh) unlock() {
	f := m.found
	if m.told {
		f = nil
	}
	m.told = m.found != nil
	m.mu.Unlock()
	if f != nil {
		m.Abort(f)
	}
}

// announceTo writes the first frame of r, which is pending only if there are
// to be more. It returns false if there is no room.
func (m *Mesh) announceTo(p *peer, r *transport.Request) bool {
	n, addr := min(len(r.Buf), first), uint64(0)
	if place := m.g.placeOf(r.Buf); place != 0 && from(m.g.mapped.Message, len(r.Buf)) {
		addr, n = place, 0
	} else if len(r.Buf) > eager && from(m.g.limits.Message, len(r.Buf)) {
		if p.w.room(0) == nil {
			return false
		}
		if addr = m.lens.lendable(m.g, r.Buf); addr != 0 {
			n = 0
		}
	}
	if n > 0 && atomic.LoadUint32(p.w.full) != 0 {
		n = 0
	}
	all := n == len(r.Buf) || n > 0 && len(r.Buf) <= eager && p.w.fits(len(r.Buf), first, step)
	room := p.w.room(n)
	if room == nil {
		return false
	}
	copy(room, r.Buf)
	f := frame{kind: frameFirst, size: uint32(n), slot: r.Slot, total: uint64(len(r.Buf)), addr: addr}
	if all {
		p.w.publish(f)
		for n < len(r.Buf) {
			p.seg.ring()
			more := min(len(r.Buf)-n, step)
			copy(p.w.room(more), r.Buf[n:])
			p.w.publish(frame{kind: frameRest, size: uint32(more)})
			n += more
		}
		r.Complete(nil)
		return true
	}
	t := m.transfer(&m.out, r, p)
	t.n, t.addr, f.id = n, addr, t.id
	if addr != 0 {
		m.lent++
	}
	m.hold(p)
	p.w.publish(f)
	return true
}

// expected gives r what has come for it, from p or anyone; false if nothing has.
func (m *Mesh) expected(r *transport.Request, p *peer) bool {
	l := &m.early[bucketOf(r.Slot)]
	for a := l.Front(); a != nil; a = a.next {
		if a.slot != r.Slot || p != nil && a.from != p.rank {
			continue
		}
		if p == nil && !r.Claim() {
			m.forget()
			return true
		}
		l.Remove(a)
		q := &m.peers[a.from]
		q.notices--
		q.stash -= len(a.data)
		if q.stash <= maxStash/2 && atomic.LoadUint32(q.r.full) != 0 {
			atomic.StoreUint32(q.r.full, 0)
		}
		if q.restOf == a {
			q.restOf = nil
		}
		m.match(q, r, frame{kind: frameFirst, id: a.id, slot: a.slot, total: a.total, addr: a.addr}, a.data)
		m.putArrival(a)
		return true
	}
	return false
}

// match begins a receive with the first frame of its message.
func (m *Mesh) match(p *peer, r *transport.Request, f frame, data []byte) {
	if r.Peer == anyone {
		r.Peer = p.rank
		m.anys--
		if r.Shared() {
			m.shared--
		}
		p.pending++
	}
	if f.total != uint64(len(r.Buf)) {
		m.mismatched(p, r, f)
		return
	}
	n := copy(r.Buf, data)
	if n == len(r.Buf) {
		m.finish(p, r)
		return
	}
	t := m.transfer(&m.in, r, p)
	t.n, t.far = n, f.id
	switch {
	case f.id == 0:
		p.rest = t
		return
	case f.addr != 0:
		t.addr = f.addr
		p.reads.Push(t)
		return
	}
	p.asks.Push(t)
	m.ask(p)
}

// mismatched ends the group: the ranks disagree on what they do.
func (m *Mesh) mismatched(p *peer, r *transport.Request, f frame) {
	m.posted[bucketOf(r.Slot)].Push(r) // it ends with the rest
	m.blame(transport.FaultMismatch, p.rank, &transport.SizeError{Peer: p.rank, Slot: r.Slot, Want: uint64(len(r.Buf)), Got: f.total})
}

// blame notes the fault for which unlock will end the group.
func (m *Mesh) blame(kind transport.FaultKind, rank int, err error) {
	if m.found == nil {
		m.found = transport.NewFault(kind, rank, m.g.rank, err)
	}
}

// ask asks for the rest of messages, as far as there is room for the question.
func (m *Mesh) ask(p *peer) (moved bool) {
	for t := p.asks.Front(); t != nil; t = p.asks.Front() {
		if p.w.room(0) == nil {
			break
		}
		p.asks.Pop()
		p.w.publish(frame{kind: frameGo, id: t.far, slot: uint64(t.id), total: uint64(t.n)})
		moved = true
	}
	if moved {
		p.seg.ring()
	}
	return moved
}

// receive takes what p has sent, but no more than a turn.
func (m *Mesh) receive(p *peer) (moved bool) {
	if p.rank == m.g.rank || m.end != nil || m.found != nil {
		return false
	}
	told := p.r.told
	for taken := 0; taken < turn; {
		f, data, ok := p.r.next()
		if !ok {
			break
		}
		if f.kind == frameFirst && p.notices >= maxNotices && m.find(p, f.slot) == nil {
			break
		}
		m.take(p, f, data)
		if m.found != nil {
			break
		}
		p.r.done(frameSize(int(f.size)))
		taken += len(data) + grain
		moved = true
	}
	if told != p.r.told {
		p.seg.ring()
	}
	return moved
}

// take does what a frame says.
func (m *Mesh) take(p *peer, f frame, data []byte) {
	switch f.kind {
	case frameFirst:
		if uint64(len(data)) > f.total || uint64(len(data)) < f.total && f.id == 0 && (f.total > eager || f.addr != 0) || p.rest != nil || p.restOf != nil {
			break
		}
		if r := m.find(p, f.slot); r != nil {
			m.posted[bucketOf(f.slot)].Remove(r)
			m.match(p, r, f, data)
			return
		}
		m.keep(p, f, data)
		return
	case frameRest:
		if a := p.restOf; a != nil && uint64(len(data)) <= a.total-uint64(len(a.data)) {
			a.data = append(a.data, data...)
			m.stashed(p, len(data))
			if uint64(len(a.data)) == a.total {
				p.restOf = nil
			}
			return
		}
		if t := p.rest; t != nil && m.put(p, t, data) {
			if t.r == nil {
				p.rest = nil
			}
			return
		}
	case frameGo:
		t := m.out.get(f.id, p)
		if t == nil || t.far != 0 || uint32(f.slot) == 0 || f.total >= uint64(len(t.r.Buf)) || t.addr == 0 && f.total != uint64(t.n) {
			break
		}
		if t.addr != 0 { // it cannot read it
			t.addr, t.n = 0, int(f.total)
			m.lent--
		}
		t.far = uint32(f.slot)
		p.streams.Push(t)
		return
	case frameDone:
		t := m.out.get(f.id, p)
		if t == nil || t.addr == 0 {
			break
		}
		r := t.r
		m.lent--
		m.release(&m.out, t)
		m.finish(p, r)
		return
	case frameMore:
		if t := m.in.get(f.id, p); t != nil && t != p.rest && t.addr == 0 && m.put(p, t, data) {
			return
		}
	}
	m.blame(transport.FaultProtocol, p.rank, fmt.Errorf("shm: frame %d of %d bytes for transfer %d", f.kind, f.size, f.id))
}

// put adds data to what t receives, and ends it when that is all; false if it is too much.
func (m *Mesh) put(p *peer, t *transfer, data []byte) bool {
	if len(data) > len(t.r.Buf)-t.n {
		return false
	}
	t.n += copy(t.r.Buf[t.n:], data)
	if t.n == len(t.r.Buf) {
		r := t.r
		m.release(&m.in, t)
		m.finish(p, r)
	}
	return true
}

// find returns the receive that was posted first of those that a message fits.
func (m *Mesh) find(p *peer, slot uint64) *transport.Request {
	l := &m.posted[bucketOf(slot)]
	for r := l.Front(); r != nil; {
		next := r.Next
		if r.Slot == slot && (r.Peer == p.rank || r.Peer == anyone) {
			if r.Peer != anyone || r.Claim() {
				return r
			}
			l.Remove(r)
			m.forget()
		}
		r = next
	}
	return nil
}

// forget no longer counts a shared receive from any rank.
func (m *Mesh) forget() {
	m.anys--
	m.shared--
	m.pending.Add(-1)
}

// Withdraw forgets a receive from any rank that has a transport.Sharer, unless a message
// has been taken for it.
func (m *Mesh) Withdraw(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Peer == anyone && m.posted[bucketOf(r.Slot)].Remove(r) {
		m.forget()
	}
}

// forsake ends the shared receives from any rank, now that nobody is left.
func (m *Mesh) forsake(last int) {
	f := transport.NewFault(transport.FaultPeerLeft, last, m.g.rank, nil)
	for i := range m.posted {
		l := &m.posted[i]
		for r := l.Front(); r != nil; {
			next := r.Next
			if r.Peer == anyone && r.Shared() {
				l.Remove(r)
				m.forget()
				r.Complete(f)
			}
			r = next
		}
	}
}

// keep remembers a message that nobody expects.
func (m *Mesh) keep(p *peer, f frame, data []byte) {
	room := len(data)
	if f.id == 0 {
		room = int(f.total) // the rest follows, if this is not all
	}
	a := m.getArrival(room)
	a.data = a.data[:len(data)]
	a.from, a.slot, a.total, a.id, a.addr = p.rank, f.slot, f.total, f.id, f.addr
	copy(a.data, data)
	if len(data) < room {
		p.restOf = a
	}
	p.notices++
	m.stashed(p, len(data))
	m.early[bucketOf(f.slot)].Push(a)
}

// stashed counts n bytes that are kept aside for p.
func (m *Mesh) stashed(p *peer, n int) {
	if p.stash += n; p.stash > maxStash {
		atomic.StoreUint32(p.r.full, 1)
	}
}

// read reads some of a message out of p's memory, and tells p when that was all of it. If
// it cannot be read, p is asked to send it.
func (m *Mesh) read(p *peer) (moved bool) {
	t := p.reads.Front()
	if rest := t.r.Buf[t.n:]; len(rest) > 0 {
		n := min(len(rest), sip)
		if t.addr&inArena != 0 {
			n = min(len(rest), stretch)
		}
		var err error
		if t.addr&inArena == 0 {
			err = m.g.glimpse(&m.lens.window, &m.g.places[p.rank], rest[:n], t.addr+uint64(t.n))
		} else if src := m.g.shown(p.rank, t.addr+uint64(t.n), n); src != nil {
			copy(rest, src)
		} else {
			err = errStray
		}
		if m.g.refused() != nil || atomic.LoadUint32(p.seg.left) != 0 {
			return false // the sender has its memory back; look ends the receive
		}
		if err != nil {
			p.reads.Pop()
			t.addr = 0
			p.asks.Push(t)
			m.ask(p)
			return true
		}
		t.n += n
		moved = true
	}
	if t.n < len(t.r.Buf) || p.w.room(0) == nil {
		return moved
	}
	p.reads.Pop()
	p.w.publish(frame{kind: frameDone, id: t.far})
	p.seg.ring()
	r := t.r
	m.release(&m.in, t)
	m.finish(p, r)
	return true
}

// transmit writes to p what can be written, but no more than a turn.
func (m *Mesh) transmit(p *peer) (moved bool) {
	if !p.asks.Empty() {
		moved = m.ask(p)
	}
	wrote := false
	for r := p.sends.Pop(); r != nil; r = p.sends.Pop() {
		if !m.announceTo(p, r) {
			p.sends.PushFront(r)
			break
		}
		// It counts as under way twice now, or, if that was all, once too often.
		p.pending--
		m.pending.Add(-1)
		wrote = true
	}
	for done := 0; done < turn && !p.streams.Empty(); {
		t := p.streams.Front()
		n := min(len(t.r.Buf)-t.n, chunk, largest(len(p.w.data)))
		room := p.w.room(n)
		if room == nil {
			break
		}
		copy(room, t.r.Buf[t.n:])
		p.w.publish(frame{kind: frameMore, size: uint32(n), id: t.far})
		p.seg.ring()
		t.n += n
		done += n
		moved = true
		if t.n == len(t.r.Buf) {
			p.streams.Pop()
			r := t.r
			m.release(&m.out, t)
			m.finish(p, r)
		}
	}
	if wrote {
		p.seg.ring()
	}
	return moved || wrote
}

// progress moves what can be moved.
func (m *Mesh) progress() (moved bool) {
	m.mu.Lock()
	if m.end == nil && m.found == nil {
		for i := range m.peers {
			p := &m.peers[i]
			if p.pending == 0 && m.anys == 0 || i == m.g.rank {
				continue
			}
			if m.receive(p) {
				moved = true
			}
			if m.end == nil && m.found == nil && !p.reads.Empty() && m.read(p) {
				moved = true
			}
			if m.end == nil && m.found == nil && (!p.sends.Empty() || !p.streams.Empty() || !p.asks.Empty()) && m.transmit(p) {
				moved = true
			}
		}
	}
	m.unlock()
	return moved
}

// look finds out why there may be no use in waiting on.
func (m *Mesh) look() {
	m.mu.Lock()
	if m.end != nil {
		m.mu.Unlock()
		return
	}
	if err := m.g.refused(); err != nil {
		m.mu.Unlock()
		m.doom(err)
		return
	}
	here, last := 0, 0
	for i := range m.peers {
		p := &m.peers[i]
		switch {
		case i == m.g.rank:
		case atomic.LoadUint32(p.seg.left) == 0:
			here++
		default:
			m.left(p)
			last = i
		}
	}
	if here == 0 && m.shared > 0 && m.end == nil {
		m.forsake(last)
	}
	if here == 0 && m.anys > 0 && m.g.size > 1 {
		m.blameLeft(last)
	}
	m.unlock()
}

// left takes what p, which has left the group, sent before, and ends the group if
// something is missing.
func (m *Mesh) left(p *peer) {
	for m.receive(p) {
	}
	if p.pending > 0 {
		m.blameLeft(p.rank)
	}
}

// blameLeft is blame for leaving, which a rank may do once the group has been
// aborted; then look finds that out.
func (m *Mesh) blameLeft(rank int) {
	if m.end == nil && m.g.refused() == nil {
		m.blame(transport.FaultPeerLeft, rank, nil)
	}
}

// doom ends the mesh because the group has been ended, as soon as the other mesh
// has said why, or after a while without.
func (m *Mesh) doom(err error) {
	m.dooms.Do(func() {
		m.wg.Add(1) // by a goroutine that drives, so it is not zero
		go func() {
			defer m.wg.Done()
			t := time.NewTimer(wordOfFault)
			defer t.Stop()
			select {
			case <-m.closed:
			case <-m.Mesh.Failed():
			case <-t.C:
				f := transport.NewFault(transport.FaultAborted, -1, m.g.rank, err)
				var at *RankError
				if errors.As(err, &at) {
					f.Rank = at.Rank
					switch {
					case errors.Is(err, ErrMismatch):
						f.Kind = transport.FaultMismatch
					case errors.Is(err, ErrLeft):
						f.Kind = transport.FaultPeerLeft
					}
				}
				m.Abort(f)
			}
		}()
	})
}

// watch ends the mesh when the other one does.
func (m *Mesh) watch() {
	defer m.wg.Done()
	select {
	case <-m.closed:
	case <-m.Mesh.Failed():
		m.fail(m.Mesh.Fault())
		m.g.Abort(m.Mesh.Fault())
	}
}

// Abort implements transport.Mesh.
func (m *Mesh) Abort(f *transport.Fault) {
	m.Mesh.Abort(f)
	if first := m.Mesh.Fault(); first != nil {
		f = first
	}
	m.fail(f)
	m.g.Abort(f)
}

// fail ends all requests, and later ones, with err. Nobody touches their buffers any more.
func (m *Mesh) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end != nil {
		return
	}
	m.end = err
	if m.lent > 0 {
		// Who is reading what the senders now get back has to know it.
		if errors.Is(err, transport.ErrClosed) {
			atomic.StoreUint32(m.g.self.left, 1)
		} else {
			m.g.abort(err)
		}
	}
	for i := range m.posted {
		m.posted[i].Complete(err)
	}
	for i := range m.peers {
		m.peers[i].sends.Complete(err)
	}
	m.out.drop(err)
	m.in.drop(err)
	m.pending.Store(0)
	m.g.self.ring()
}

// Close implements transport.Mesh. It closes the group and the other mesh too.
func (m *Mesh) Close() error {
	err := m.g.Close()
	m.wg.Wait()
	return errors.Join(err, m.Mesh.Close())
}

// detach is called before the group's memory goes.
func (m *Mesh) detach() {
	m.fail(transport.ErrClosed)
	m.closing.Do(func() { close(m.closed) })
	m.later.Stop()
	m.driver.Lock() // nobody looks at the memory any more
	defer m.driver.Unlock()
}
