package shm

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/copies"
	"github.com/c10d-go/c10d/internal/lazytimer"
	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// firstBytes is how much of a message its first frame brings.
	firstBytes = 8 << 10

	// eager is the size up to which a message is sent whole, if the ring has room, before the
	// receiver asks for it. For 64 KiB that takes 7 us instead of 9.
	eager = 64 << 10

	// The next frames of such a message have restBytes. Those of a message that the receiver has
	// asked for have chunk bytes. 8 to 48 KiB make little difference.
	restBytes = 12 << 10
	chunk     = 32 << 10

	// turnBytes is how much a rank writes to one peer before it looks at the others.
	turnBytes = 64 << 10

	// A rank keeps maxStash bytes of a peer's unexpected messages, and what is in the ring.
	// Then it asks the peer to announce messages without data. It remembers maxNotices of
	// those, and leaves more in the ring.
	maxStash   = 1 << 20
	maxNotices = 1 << 18
	maxSpare   = 4 << 20 // bytes of arrivals that are kept for others

	// faultWait is how long a rank whose group has ended waits for the other mesh to say why. Every
	// deathCheck it looks whether the rank that ended the group has died.
	faultWait  = time.Second
	deathCheck = 2 * time.Millisecond
)

// Mesh is a transport.Mesh whose messages go through the memory of a Group. Another mesh of the
// same ranks notices when a rank dies, carries faults, and diagnoses timeouts. If one mesh
// ends, so does the other.
//
// From [Group.MappedLimits].Message on, the receiver copies a message in memory of Alloc from there. Other
// messages are copied twice.
//
// Send copies a message of up to 64 KiB into the memory and ends its request at once, if there
// is room. Larger messages follow in pieces when the receiver wants them. The goroutine in
// PollUntil moves them, or else a goroutine of the mesh, which sleeps while no request is under
// way.
type Mesh struct {
	transport.Mesh // deaths, faults, diagnosis
	g              *Group
	lazy           bool

	pending       atomic.Int64 // requests under way
	pollers       atomic.Int32 // goroutines in PollUntil
	turnedAway    atomic.Bool  // one of them returned at once and relies on the driver
	leftToPollers atomic.Bool  // the mesh's goroutine has left requests to them

	driver     sync.Mutex  // held by the goroutine that moves messages
	background atomic.Bool // that is the mesh's goroutine

	wake     chan struct{} // wakes that goroutine
	closed   chan struct{} // once Close has begun
	failOnce sync.Once     // of failSoon
	wg       sync.WaitGroup
	closing  sync.Once

	read       uint32 // see afterReads
	mu         sync.Mutex
	later      lazytimer.Timer  // wakes the mesh's goroutine
	end        error            // how requests end from now on, nil while the mesh works
	found      *transport.Fault // the fault that the mesh will end with; nothing moves any more
	faultSent  bool             // unlock has called Abort
	peers      []peer
	anyWaiting int // waiting receives from any rank
	shared     int // those of them that have a transport.Sharer
	posted     [buckets]transport.Requests
	early      [buckets]transport.Queue[*arrival]
	out        table
	in         table
	exposed    int // messages that receivers may be reading
	spares     [stashClasses]*arrival
	spare      int // the bytes of spares
}

// MeshOptions tune a Mesh. The zero value is right for most.
type MeshOptions struct {
	// Lazy leaves requests to goroutines in PollUntil until MoveInBackground is called. Set it
	// if nearly every post is followed by a wait. Otherwise each message that cannot end at
	// once wakes a goroutine of the mesh.
	Lazy bool
}

// peer is the state between this rank and another one.
type peer struct {
	rank    int
	seg     *segment
	w       writer
	r       reader
	pending int       // requests with it
	rest    *transfer // the receive that the next frameRest belongs to
	restOf  *arrival  // or the arrival
	long    uint8     // counts long messages to it, for probe
	far     uint8     // not zero if lines of the ring come slowly from its CPU
	stash   int       // bytes of its messages in arrivals
	notices int       // its messages in arrivals
	sends   transport.Requests
	asks    transport.Queue[*transfer] // a frameGo has to be sent
	streams transport.Queue[*transfer] // the receiver has asked for the rest
	reads   transport.Queue[*transfer] // to be copied from its arena
}

// NewMesh returns a mesh over g and rest, which must have the same ranks. Close closes both.
func NewMesh(g *Group, rest transport.Mesh, o MeshOptions) (*Mesh, error) {
	if g.rank != rest.Rank() || g.size != rest.Size() {
		return nil, fmt.Errorf("shm: rank %d of %d in memory, rank %d of %d in the other mesh", g.rank, g.size, rest.Rank(), rest.Size())
	}
	m := &Mesh{
		Mesh: rest, g: g, lazy: o.Lazy,
		wake: make(chan struct{}, 1), closed: make(chan struct{}),
		peers: make([]peer, g.size),
	}
	if err := m.attach(); err != nil {
		return nil, err
	}
	m.wg.Add(2)
	go m.watch()
	go m.drive()
	rest.OnDeath(m.died)
	return m, nil
}

// attach makes m the mesh of its group.
func (m *Mesh) attach() error {
	g := m.g
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return ErrClosed
	}
	if g.mesh != nil {
		return errors.New("shm: the group has a mesh already")
	}
	g.mesh = m
	m.later.Check = func() {
		m.mu.Lock()
		m.later.Rest()
		m.mu.Unlock()
		m.MoveInBackground()
	}
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
	return nil
}

// died is told by the other mesh.
func (m *Mesh) died(f *transport.Fault) {
	m.g.Died(f.Rank, f)
	m.MoveInBackground() // if a request needs that rank, it ends
}

// Send implements transport.Mesh.
func (m *Mesh) Send(r *transport.Request) {
	m.mu.Lock()
	p := m.admit(r)
	if p == nil {
		m.unlock()
		return
	}
	if m.g.gone(p.rank) != nil {
		m.addPending(p)
		p.sends.Push(r)
		m.peerGone(p)
		m.unlock()
		return
	}
	if p.sends.Empty() && m.sendFirst(p, r) {
		p.seg.wakeMesh()
	} else {
		m.addPending(p)
		p.sends.Push(r)
	}
	m.unlockAfterPost()
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	m.mu.Lock()
	if p := m.admit(r); p != nil {
		m.addPending(p)
		if !m.matchEarly(r, p) {
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
		m.anyWaiting++
		if r.Shared() {
			m.shared++
		}
		m.pending.Add(1)
		if !m.matchEarly(r, nil) {
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

// unlockAfterPost is unlock, and wakes a goroutine if one is needed for what was posted.
func (m *Mesh) unlockAfterPost() {
	under := m.end == nil && m.pending.Load() > 0
	if under {
		m.g.self.wakeMesh()
	}
	m.unlock()
	if under && !m.lazy {
		m.MoveInBackground()
	}
}

// MoveInBackground wakes the mesh's goroutine. It works until no request is under way or a
// goroutine calls PollUntil.
func (m *Mesh) MoveInBackground() {
	select {
	case m.wake <- struct{}{}:
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

// addPending counts a request with p as under way.
func (m *Mesh) addPending(p *peer) {
	p.pending++
	m.pending.Add(1)
}

// finish ends a request that was counted.
func (m *Mesh) finish(p *peer, r *transport.Request) {
	p.pending--
	m.pending.Add(-1)
	r.Complete(nil)
}

// unlock releases m.mu, and ends the group if a fault was found.
func (m *Mesh) unlock() {
	f := m.found
	if m.faultSent {
		f = nil
	}
	m.faultSent = m.found != nil
	m.mu.Unlock()
	if f != nil {
		m.Abort(f)
	}
}

// sendFirst writes the first frame of r, and the others if they fit. If more are to follow, r
// is pending. It returns false if there is no room.
func (m *Mesh) sendFirst(p *peer, r *transport.Request) bool {
	n, addr := min(len(r.Buf), firstBytes), uint64(0)
	if place := m.g.arenaPlace(r.Buf); place != 0 && reaches(m.g.mapped.Message, len(r.Buf)) {
		addr, n = place, 0
	}
	if n > 0 && atomic.LoadUint32(p.w.full) != 0 {
		n = 0
	}
	all := n == len(r.Buf) || n > 0 && len(r.Buf) <= eager && p.w.fits(len(r.Buf), firstBytes, restBytes)
	room := p.w.room(n)
	if room == nil {
		return false
	}
	if n < len(r.Buf) && n > 0 {
		p.probe(room, r.Buf)
	} else {
		copies.Bytes(room, r.Buf)
	}
	f := frame{kind: frameFirst, size: uint32(n), slot: r.Slot, total: uint64(len(r.Buf)), addr: addr}
	if all {
		p.w.publish(f)
		for n < len(r.Buf) {
			p.seg.wakeMesh()
			more := min(len(r.Buf)-n, restBytes)
			p.put(p.w.room(more), r.Buf[n:])
			p.w.publish(frame{kind: frameRest, size: uint32(more)})
			n += more
		}
		r.Complete(nil)
		return true
	}
	t := m.transfer(&m.out, r, p)
	t.n, t.addr, f.id = n, addr, t.id
	if addr != 0 {
		m.exposed++
	}
	m.addPending(p)
	p.w.publish(f)
	return true
}

const (
	// probeEvery is how many long messages come to one whose first frame is timed.
	probeEvery = 8

	// farFrom is how long copies.Bytes of a frame of firstBytes takes at least if the lines come from a CPU that shares no
	// cache with this one. Two CPUs of an EPYC (Zen 4) take 3.4 us, and 1 us if they share one.
	farFrom = 2 * time.Microsecond

	// farProbes is how many times in a row a frame has to take less until the CPU counts as near. One in ten does, because its
	// lines have left the other CPU's cache by then.
	farProbes = 4
)

// probe copies the first frame of a message of several. Now and then it finds out whether the peer's CPU is far away. A host
// of virtual machines may move CPUs at any time.
func (p *peer) probe(room, data []byte) {
	if p.long++; p.long%probeEvery != 1 {
		p.put(room, data)
		return
	}
	begin := time.Now()
	copies.Bytes(room, data)
	switch {
	case time.Since(begin) >= farFrom:
		p.far = farProbes
	case p.far > 0:
		p.far--
	}
}

// put copies a part of a message of several frames to the ring. If the peer's CPU is far, the copy goes past the caches, so that
// it does not wait for lines which that CPU has.
func (p *peer) put(room, data []byte) {
	if p.far > 0 {
		copies.Uncached(room, data)
	} else {
		copies.Bytes(room, data)
	}
}

// matchEarly gives r the oldest message that has come for it, from p or, if p is nil, from any
// rank. It returns false if there is none.
func (m *Mesh) matchEarly(r *transport.Request, p *peer) bool {
	l := &m.early[bucketOf(r.Slot)]
	for a := l.Front(); a != nil; a = a.next {
		if a.slot != r.Slot || p != nil && a.from != p.rank {
			continue
		}
		if p == nil && !r.Claim() {
			m.dropAny()
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
		m.anyWaiting--
		if r.Shared() {
			m.shared--
		}
		p.pending++
	}
	if f.total != uint64(len(r.Buf)) {
		m.mismatched(p, r, f)
		return
	}
	n := copies.Bytes(r.Buf, data)
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
	m.askRest(p)
}

// mismatched ends the group because a message has another length than its receive.
func (m *Mesh) mismatched(p *peer, r *transport.Request, f frame) {
	m.posted[bucketOf(r.Slot)].Push(r) // it ends with the rest
	m.setFault(transport.FaultMismatch, p.rank, &transport.SizeError{Peer: p.rank, Slot: r.Slot, Want: uint64(len(r.Buf)), Got: f.total})
}

// setFault notes the fault for which unlock ends the group.
func (m *Mesh) setFault(kind transport.FaultKind, rank int, err error) {
	if m.found == nil {
		m.found = transport.NewFault(kind, rank, m.g.rank, err)
	}
}

// askRest asks p for the rest of messages, as far as there is room for the frames.
func (m *Mesh) askRest(p *peer) (moved bool) {
	for t := p.asks.Front(); t != nil; t = p.asks.Front() {
		if p.w.room(0) == nil {
			break
		}
		p.asks.Pop()
		p.w.publish(frame{kind: frameGo, id: t.far, slot: uint64(t.id), total: uint64(t.n)})
		moved = true
	}
	if moved {
		p.seg.wakeMesh()
	}
	return moved
}

// receive handles the frames of p, turnBytes at most.
func (m *Mesh) receive(p *peer) (moved bool) {
	if p.rank == m.g.rank || m.end != nil || m.found != nil {
		return false
	}
	told := p.r.told
	for taken := 0; taken < turnBytes; {
		f, data, ok := p.r.next()
		if !ok {
			break
		}
		if f.kind == frameFirst && p.notices >= maxNotices && m.findPosted(p, f.slot) == nil {
			break
		}
		m.handleFrame(p, f, data)
		if m.found != nil {
			break
		}
		p.r.done(frameSize(int(f.size)))
		taken += len(data) + grain
		moved = true
	}
	if told != p.r.told {
		p.seg.wakeMesh()
	}
	return moved
}

// handleFrame does what a frame says.
func (m *Mesh) handleFrame(p *peer, f frame, data []byte) {
	switch f.kind {
	case frameFirst:
		if len(data) > firstBytes || uint64(len(data)) > f.total || uint64(len(data)) < f.total && f.id == 0 && (f.total > eager || f.addr != 0) || p.rest != nil || p.restOf != nil {
			break
		}
		if r := m.findPosted(p, f.slot); r != nil {
			m.posted[bucketOf(f.slot)].Remove(r)
			m.match(p, r, f, data)
			return
		}
		m.stash(p, f, data)
		return
	case frameRest:
		if a := p.restOf; a != nil && uint64(len(data)) <= a.total-uint64(len(a.data)) {
			a.data = append(a.data, data...)
			m.countStashed(p, len(data))
			if uint64(len(a.data)) == a.total {
				p.restOf = nil
			}
			return
		}
		if t := p.rest; t != nil && m.addData(p, t, data) {
			if t.r == nil {
				p.rest = nil
			}
			return
		}
	case frameGo:
		t := m.out.get(f.id, p)
		if t == nil || t.far != 0 || uint32(f.slot) == 0 || t.addr != 0 ||
			f.total != uint64(t.n) || t.n >= len(t.r.Buf) {
			break
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
		m.exposed--
		m.release(&m.out, t)
		m.finish(p, r)
		return
	case frameMore:
		if t := m.in.get(f.id, p); t != nil && t != p.rest && t.addr == 0 && m.addData(p, t, data) {
			return
		}
	}
	m.setFault(transport.FaultProtocol, p.rank, fmt.Errorf("shm: unexpected frame of kind %d with %d bytes for transfer %d", f.kind, f.size, f.id))
}

// addData adds data to the message that t receives, and ends t when it is complete. It returns
// false if there is too much.
func (m *Mesh) addData(p *peer, t *transfer, data []byte) bool {
	if len(data) > len(t.r.Buf)-t.n {
		return false
	}
	t.n += copies.Bytes(t.r.Buf[t.n:], data)
	if t.n == len(t.r.Buf) {
		r := t.r
		m.release(&m.in, t)
		m.finish(p, r)
	}
	return true
}

// findPosted returns the receive that a message matches: the oldest from p, else the oldest from any rank.
func (m *Mesh) findPosted(p *peer, slot uint64) *transport.Request {
	l := &m.posted[bucketOf(slot)]
	for r := l.Front(); r != nil; r = r.Next {
		if r.Slot == slot && r.Peer == p.rank {
			return r
		}
	}
	for r := l.Front(); r != nil; {
		next := r.Next
		if r.Slot == slot && r.Peer == anyone {
			if r.Claim() {
				return r
			}
			l.Remove(r)
			m.dropAny()
		}
		r = next
	}
	return nil
}

// dropAny no longer counts a shared receive from any rank.
func (m *Mesh) dropAny() {
	m.anyWaiting--
	m.shared--
	m.pending.Add(-1)
}

// Withdraw forgets a receive from any rank that has a transport.Sharer, unless a message has
// been taken for it.
func (m *Mesh) Withdraw(r *transport.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.Peer == anyone && m.posted[bucketOf(r.Slot)].Remove(r) {
		m.dropAny()
	}
}

// endSharedAny ends the shared receives from any rank, because they wait in vain.
func (m *Mesh) endSharedAny(gone int) {
	f := m.faultOf(gone)
	for i := range m.posted {
		l := &m.posted[i]
		for r := l.Front(); r != nil; {
			next := r.Next
			if r.Peer == anyone && r.Shared() {
				l.Remove(r)
				m.dropAny()
				r.Complete(f)
			}
			r = next
		}
	}
}

// stash keeps an unexpected message.
func (m *Mesh) stash(p *peer, f frame, data []byte) {
	room := len(data)
	if f.id == 0 {
		room = int(f.total) // the rest follows, if this is not all
	}
	a := m.getArrival(room)
	a.data = a.data[:len(data)]
	a.from, a.slot, a.total, a.id, a.addr = p.rank, f.slot, f.total, f.id, f.addr
	copies.Bytes(a.data, data)
	if len(data) < room {
		p.restOf = a
	}
	p.notices++
	m.countStashed(p, len(data))
	m.early[bucketOf(f.slot)].Push(a)
}

// countStashed counts n more bytes that are kept for p.
func (m *Mesh) countStashed(p *peer, n int) {
	if p.stash += n; p.stash > maxStash {
		atomic.StoreUint32(p.r.full, 1)
	}
}

// readMapped copies a stretch of a message from p's arena, and tells p when it has all of it.
func (m *Mesh) readMapped(p *peer) (moved bool) {
	t := p.reads.Front()
	if rest := t.r.Buf[t.n:]; len(rest) > 0 {
		n := min(len(rest), stretch)
		src := m.g.arenaBytes(p.rank, t.addr+uint64(t.n), n)
		if src == nil {
			m.setFault(transport.FaultProtocol, p.rank, errNotInArena)
			return false
		}
		copies.Bytes(rest, src)
		afterReads(&m.read)
		if m.g.refusal() != nil || atomic.LoadUint32(p.seg.left) != 0 {
			return false // the sender has its memory back; look ends the receive
		}
		t.n += n
		moved = true
	}
	if t.n < len(t.r.Buf) || p.w.room(0) == nil {
		return moved
	}
	p.reads.Pop()
	p.w.publish(frame{kind: frameDone, id: t.far})
	p.seg.wakeMesh()
	r := t.r
	m.release(&m.in, t)
	m.finish(p, r)
	return true
}

// transmit writes frames to p, turnBytes at most.
func (m *Mesh) transmit(p *peer) (moved bool) {
	if !p.asks.Empty() {
		moved = m.askRest(p)
	}
	wrote := false
	for r := p.sends.Pop(); r != nil; r = p.sends.Pop() {
		if !m.sendFirst(p, r) {
			p.sends.PushFront(r)
			break
		}
		// It counts as under way twice now, or, if that was all, once too often.
		p.pending--
		m.pending.Add(-1)
		wrote = true
	}
	for done := 0; done < turnBytes && !p.streams.Empty(); {
		t := p.streams.Front()
		n := min(len(t.r.Buf)-t.n, chunk, largest(len(p.w.data)))
		room := p.w.room(n)
		if room == nil {
			break
		}
		p.put(room, t.r.Buf[t.n:])
		p.w.publish(frame{kind: frameMore, size: uint32(n), id: t.far})
		p.seg.wakeMesh()
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
		p.seg.wakeMesh()
	}
	return moved || wrote
}

// progress moves what can be moved, and reports whether anything moved.
func (m *Mesh) progress() (moved bool) {
	m.mu.Lock()
	if m.end == nil && m.found == nil {
		for i := range m.peers {
			p := &m.peers[i]
			if p.pending == 0 && m.anyWaiting == 0 || i == m.g.rank {
				continue
			}
			if m.receive(p) {
				moved = true
			}
			if m.end == nil && m.found == nil && !p.reads.Empty() && m.readMapped(p) {
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

// checkEnd looks whether the group has ended, or a rank that is needed is gone.
func (m *Mesh) checkEnd() {
	m.mu.Lock()
	if m.end != nil {
		m.mu.Unlock()
		return
	}
	if err := m.g.refusal(); err != nil {
		m.mu.Unlock()
		m.failSoon(err)
		return
	}
	here, last, dead := 0, 0, -1
	for i := range m.peers {
		p := &m.peers[i]
		if i == m.g.rank {
			continue
		}
		switch m.g.gone(i) {
		case nil:
			here++
			continue
		case ErrLeft:
		default:
			dead = i
		}
		m.peerGone(p)
		last = i
	}
	if dead >= 0 && m.anyWaiting > 0 {
		for i := range m.peers { // who sent before counts
			m.receive(&m.peers[i])
		}
	}
	// A receive from any rank waits for the dead one too.
	if dead >= 0 {
		here, last = 0, dead
	}
	if here == 0 && m.shared > 0 && m.end == nil {
		m.endSharedAny(last)
	}
	if here == 0 && m.anyWaiting > 0 && m.g.size > 1 {
		m.setFaultGone(last)
	}
	m.unlock()
}

// peerGone takes the messages that p sent before it left the group or died, and ends the group if
// requests with p remain.
func (m *Mesh) peerGone(p *peer) {
	for m.receive(p) {
	}
	if p.pending > 0 {
		m.setFaultGone(p.rank)
	}
}

// setFaultGone is setFault for a rank that is gone, unless the group was aborted: then it may
// leave, and checkEnd finds the reason.
func (m *Mesh) setFaultGone(rank int) {
	if m.end == nil && m.g.refusal() == nil {
		f := m.faultOf(rank)
		m.setFault(f.Kind, rank, f.Err)
	}
}

// faultOf returns the fault of requests that need a rank that is gone.
func (m *Mesh) faultOf(rank int) *transport.Fault {
	if died, ok := m.g.gone(rank).(*transport.Fault); ok {
		return died
	}
	return transport.NewFault(transport.FaultPeerLeft, rank, m.g.rank, nil)
}

// failSoon ends the mesh because the group has ended, once the other mesh has said why, or
// after faultWait.
func (m *Mesh) failSoon(err error) {
	m.failOnce.Do(func() {
		m.wg.Add(1) // by a goroutine that drives, so it is not zero
		go func() {
			defer m.wg.Done()
			if m.awaitReason(err) {
				return
			}
			f := transport.NewFault(transport.FaultAborted, -1, m.g.rank, err)
			var at *RankError
			if errors.As(err, &at) {
				f.Rank = at.Rank
				switch died := m.g.Death(at.Rank); {
				case died != nil:
					f.Kind, f.Err = died.Kind, died.Err
				case errors.Is(err, ErrMismatch):
					f.Kind = transport.FaultMismatch
				case errors.Is(err, ErrLeft):
					f.Kind = transport.FaultPeerLeft
				}
			}
			m.Abort(f)
		}()
	})
}

// awaitReason waits until the other mesh has failed or the rank that err names is known to have died, faultWait at
// most. It reports whether the mesh has failed or closed.
func (m *Mesh) awaitReason(err error) bool {
	t := time.NewTicker(deathCheck)
	defer t.Stop()
	var at *RankError
	named := errors.As(err, &at)
	for end := time.Now().Add(faultWait); time.Now().Before(end) && !(named && m.g.Death(at.Rank) != nil); {
		select {
		case <-m.closed:
			return true
		case <-m.Mesh.Failed():
			return true
		case <-t.C:
		}
	}
	return false
}

// watch ends the mesh when the other one fails.
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

// fail ends all requests, and later ones, with err. The mesh no longer uses their buffers.
func (m *Mesh) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end != nil {
		return
	}
	m.end = err
	if m.exposed > 0 {
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
	m.g.self.wakeMesh()
}

// Close implements transport.Mesh. It closes the group and the other mesh too.
func (m *Mesh) Close() error {
	err := m.g.Close()
	m.wg.Wait()
	return errors.Join(err, m.Mesh.Close())
}

// detach is called before the group's memory is unmapped.
func (m *Mesh) detach() {
	m.fail(transport.ErrClosed)
	m.closing.Do(func() { close(m.closed) })
	m.mu.Lock()
	m.later.Stop()
	m.mu.Unlock()
	m.driver.Lock() // nobody looks at the memory any more
	defer m.driver.Unlock()
}
