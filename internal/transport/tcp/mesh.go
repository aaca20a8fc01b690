package tcp

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/backoff"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

var limits = mesh.Limits{Close: time.Second, Abort: 500 * time.Millisecond, AbortStep: 200 * time.Millisecond}

const (
	// doubtLimit is how long a peer may take to say on the first connection why
	// another has ended. If it is dead the first one ends as well, and at once; this
	// is for what lies between hosts and ends one connection alone.
	doubtLimit = 5 * time.Second

	// pieceBytes is how much of a message goes over one connection before
	// another may have the next part, or small messages on the first connection their
	// turn. With 256 KiB, all-reduces of 4 MiB take 1.25 times as long between 2 polling ranks
	// (1110 and 890 us), and with 2 MiB 1.06 times.
	pieceBytes = 1 << 20

	// bulkyBytes is the size from which messages go over the other connections.
	bulkyBytes = 512 << 10
)

// Mesh is a transport.Mesh over TCP. [Endpoint.Join] makes one. Its methods
// may be called from many goroutines.
type Mesh struct {
	mesh.Base
	opts  Options
	addrs []address
	door  *door
	stop  context.CancelFunc // of what dials
	ctx   context.Context

	// Guarded by Base.Mu:
	begun   sync.Cond // a message has begun, or the mesh has ended
	pairs   []*pair   // nil at the own rank, and where there is no connection yet
	blocks  blocks
	calls   calls
	asking  int     // peers that have asked and not been answered
	holding int     // how many are in Post
	held    []*pair // where something is to be written once they have left

	// Of those who poll:
	shares  bool           // a CPU with other ranks
	skip    atomic.Int64   // how often not to poll
	vain    atomic.Int64   // what skip was last
	helpers atomic.Int64   // how many there are
	helps   atomic.Uint64  // how many there have been
	idle    *backoff.Timer // resumeIdle
	seen    uint64         // helps at the last one; guarded by Mu
}

var _ transport.Mesh = (*Mesh)(nil)

func newMesh(rank, size int, o Options) *Mesh {
	m := &Mesh{opts: o, pairs: make([]*pair, size)}
	m.Init(rank, size, limits, m.onEnd)
	m.begun.L = &m.Mu
	m.idle = backoff.New(seeAfter, seeAfterMax, m.resumeIdle)
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m
}

// onEnd stops what needs a mesh that works.
func (m *Mesh) onEnd() {
	m.stop()
	m.idle.Stop()
	if m.door != nil {
		m.door.close()
	}
	m.begun.Broadcast()
}

// attach gives the mesh its first connection to a peer and owns it from then on.
// After an error the connection is the caller's.
func (m *Mesh) attach(peer int, conn net.Conn, eager, window uint64) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.Ended(); err != nil {
		return err
	}
	if m.pairs[peer] != nil {
		return fmt.Errorf("tcp: rank %d is connected already", peer)
	}
	p := &pair{m: m, inbound: make(map[net.Conn]struct{})}
	p.Native = true
	m.Add(peer, &p.Peer, p)
	p.s.init(m.Rank(), peer, min(m.opts.Eager, int(eager)), int64(min(uint64(m.opts.Window), window)), &m.blocks, &m.calls)
	if m.opts.Poll > 0 {
		conn = ownSocket(conn)
	}
	p.first, p.in = newLane(p, conn, false), newInput(p, conn, false)
	m.pairs[peer] = p
	p.Run(p.read, p.first.write)
	return nil
}

// expect announces another connection of a peer's, which attachInbound completes.
func (m *Mesh) expect(peer int, conn net.Conn) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.pairs[peer]
	if m.Ended() != nil || p == nil || p.Gone != nil || p.bye || len(p.inbound) == maxLanes {
		return false
	}
	p.inbound[conn] = struct{}{}
	return true
}

// attachInbound is attach for another connection of a peer's, or the end of
// it if the handshake was not good.
func (m *Mesh) attachInbound(peer int, conn net.Conn, good bool) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.pairs[peer]
	if !good || m.Ended() != nil {
		delete(p.inbound, conn)
		if m.Ended() == nil {
			p.depart()
		}
		return false
	}
	if p.bye {
		conn.SetReadDeadline(time.Now().Add(m.opts.doubtLimit))
	}
	m.Goroutines.Add(1)
	go p.readBulk(conn)
	return true
}

// attachBulk is attach for another connection to a peer.
func (m *Mesh) attachBulk(p *pair, conn net.Conn) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.Ended(); err != nil {
		return err
	}
	if p.Ending {
		return errEnded
	}
	l := newLane(p, conn, true)
	p.bulk = append(p.bulk, l)
	p.s.bulky = m.opts.bulkyBytes
	m.Goroutines.Add(1)
	go l.write()
	return nil
}

// Send implements transport.Mesh.
func (m *Mesh) Send(r *transport.Request) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.send(r)
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.recv(r)
}

// Post is Recv for recvs and then Send for sends, each in their order. All that this makes
// necessary leaves together, and what a peer has granted counts if it is here, though
// nobody has read it yet: of two ranks that trade large messages, who comes later writes
// nothing but the message, with the grant for the other's before it.
func (m *Mesh) Post(recvs, sends []*transport.Request) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.holding++
	for _, r := range recvs {
		m.recv(r)
	}
	for _, r := range sends {
		m.look(r)
		m.send(r)
	}
	m.holding--
	for m.holding == 0 && len(m.held) > 0 {
		last := len(m.held) - 1
		p := m.held[last]
		m.held = m.held[:last]
		p.held = false
		p.pump()
	}
}

// look reads what is there of the peer of a send that wants a grant, if no goroutine
// sleeps until something is. It lets go of the mesh's lock.
func (m *Mesh) look(r *transport.Request) {
	if m.Ended() != nil || !m.IsPeer(r.Peer) {
		return
	}
	if p := m.pairs[r.Peer]; p.in.poll != nil && p.s.wanting(r) {
		m.Mu.Unlock()
		p.in.help(true)
		m.Mu.Lock()
	}
}

func (m *Mesh) send(r *transport.Request) {
	if !m.Admit(r) {
		return
	}
	p := m.pairs[r.Peer]
	if p.Gone != nil {
		p.EndWithGone(r)
		return
	}
	if f := p.s.send(r); f != nil {
		m.Fail(f)
		return
	}
	if len(r.Buf) >= m.opts.bulkyBytes && !p.opening {
		p.opening = true
		m.open(p)
	}
	p.pump()
}

func (m *Mesh) recv(r *transport.Request) {
	if !m.Admit(r) {
		return
	}
	p := m.pairs[r.Peer]
	if p.Gone != nil {
		// What it sent before it left is still here.
		if a, ok := p.s.in.Value(r.Slot); !ok || !a.here {
			p.EndWithGone(r)
			return
		}
	}
	p.recv(r)
}

// takeAny returns the receive from any rank that takes a message of p's, nil if
// there is none.
func (m *Mesh) takeAny(p *pair, slot, length uint64) (*transport.Request, error) {
	r := m.NextAny(slot)
	if r == nil {
		return nil, nil
	}
	r.Peer = p.Rank
	if f := p.s.fits(r, length); f != nil {
		p.Stranded.Push(r)
		return nil, f
	}
	return r, nil
}
