package tcp

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/lazytimer"
	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

var limits = mesh.Limits{Close: time.Second, Step: 200 * time.Millisecond}

const (
	// reasonLimit is how long a peer may take to say, on the first connection, why another
	// connection has ended. If the peer is dead, its first connection ends at once too. A
	// firewall between the hosts may end one connection alone.
	reasonLimit = 5 * time.Second

	// pieceBytes is how much of a message goes over one connection before another message gets
	// its turn. All-reduces of 4 MiB between 2 polling ranks take 890 us with it, 1.25 times as
	// long with 256 KiB and 1.06 times with 2 MiB.
	pieceBytes = 1 << 20

	// bulkyBytes is the size from which messages go over the other connections. Within the host, the first
	// aloneMessages of a call need aloneBytes, unless another large one to the peer is offered or being written. An
	// all-reduce of 1 MiB between 2 ranks sends two messages of 512 KiB, one after the other. With 4 further
	// connections it took 475 us, and 403 us without.
	bulkyBytes    = 512 << 10
	aloneBytes    = 1 << 20
	aloneMessages = 2
)

// Mesh is a transport.Mesh over TCP. [Endpoint.Join] makes one. Its methods
// may be called from many goroutines.
type Mesh struct {
	mesh.Base
	opts     Options
	addrs    []address
	acceptor *acceptor
	watchers watchers
	stop     context.CancelFunc // of what dials
	ctx      context.Context

	// Guarded by Base.Mu:
	begun    sync.Cond // a message has begun, or the mesh has ended
	pairs    []*pair   // nil at the own rank, and where there is no connection yet
	blocks   blocks
	calls    calls
	joining  bool    // Join has not returned; a rank that dies now is needed
	asking   int     // peers that have asked for this rank's call and got no answer
	posting  int     // goroutines in Post
	deferred []*pair // pairs that have something to write once Post is done

	// Polling:
	sharesCPUs bool            // ranks of this host have less than a CPU each
	manyCPUs   bool            // each rank of this host has cpusForLanes
	pollers    atomic.Int64    // goroutines in PollUntil
	polls      atomic.Uint64   // calls of PollUntil so far
	idle       lazytimer.Timer // runs resumeIdle
	seen       uint64          // polls at its last run; guarded by Mu
}

var _ transport.Mesh = (*Mesh)(nil)

func newMesh(rank, size int, o Options) *Mesh {
	m := &Mesh{opts: o, pairs: make([]*pair, size)}
	m.Init(rank, size, limits, m.onEnd)
	m.begun.L = &m.Mu
	m.idle.Check = m.resumeIdle
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m
}

// onEnd stops what needs a mesh that works.
func (m *Mesh) onEnd() {
	m.stop()
	m.idle.Stop()
	if m.acceptor != nil {
		m.acceptor.close()
	}
	m.begun.Broadcast()
}

// attach gives the mesh its first connection to a peer, who said theirs, and owns it from then on.
// After an error the connection is the caller's.
func (m *Mesh) attach(peer int, conn net.Conn, theirs hello) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.Ended(); err != nil {
		return err
	}
	if m.pairs[peer] != nil {
		return fmt.Errorf("tcp: rank %d is connected already", peer)
	}
	p := &pair{m: m, inbound: make(map[net.Conn]struct{})}
	p.checksums = m.opts.TLS == nil && (m.opts.Checksum || theirs.checksums)
	p.Native, p.Near = true, tcpsock.IsLocal(conn)
	m.Add(peer, &p.Peer, p)
	p.s.init(m.Rank(), peer, min(m.opts.Eager, int(theirs.eager)), int64(min(uint64(m.opts.Window), theirs.window)), &m.blocks, &m.calls)
	if m.opts.Poll > 0 {
		conn = ownSocket(conn, &m.watchers)
	}
	p.first, p.in = newLane(p, conn, false), newInput(p, conn, false)
	m.pairs[peer] = p
	p.Run(p.read, p.first.write)
	return nil
}

// expect announces another connection of a peer. attachInbound completes it.
func (m *Mesh) expect(peer int, conn net.Conn) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.pairs[peer]
	if m.Ended() != nil || p == nil || p.Gone != nil || p.end != nil || len(p.inbound) == maxLanes {
		return false
	}
	p.inbound[conn] = struct{}{}
	return true
}

// attachInbound is attach for another connection of a peer. If the handshake failed, good is
// false, and the peer may have left meanwhile.
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
	if p.end != nil {
		conn.SetReadDeadline(time.Now().Add(m.opts.reasonLimit))
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
	p.s.bulky, p.s.alone = m.opts.bulkyBytes, m.opts.bulkyBytes
	if tcpsock.IsLocal(p.first.conn) {
		p.s.alone = m.opts.aloneBytes
	}
	m.Goroutines.Add(1)
	go l.write()
	return nil
}

// Sent returns how many bytes this rank has written to its connections with each rank so far, with
// headers.
func (m *Mesh) Sent() []uint64 {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	sent := make([]uint64, len(m.pairs))
	for r, p := range m.pairs {
		if p != nil {
			sent[r] = p.sent
		}
	}
	return sent
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

// Post is Recv for recvs and then Send for sends, each in their order. All frames that result
// leave together. A GRANT that has come counts, even if nobody has read it. So when two ranks
// exchange large messages, the later one sends its GRANT and its message in one system call.
func (m *Mesh) Post(recvs, sends []*transport.Request) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.posting++
	for _, r := range recvs {
		m.recv(r)
	}
	for _, r := range sends {
		m.readGrant(r)
		m.send(r)
	}
	m.posting--
	for m.posting == 0 && len(m.deferred) > 0 {
		last := len(m.deferred) - 1
		p := m.deferred[last]
		m.deferred = m.deferred[:last]
		p.deferred = false
		p.pump()
	}
}

// readGrant reads what the peer of a large send has sent, if the connection's reader is paused:
// the GRANT for the send may be there. It releases the mesh's lock meanwhile.
func (m *Mesh) readGrant(r *transport.Request) {
	if m.Ended() != nil || !m.IsPeer(r.Peer) {
		return
	}
	if p := m.pairs[r.Peer]; p.in.sock != nil && p.s.needsGrant(r) {
		m.Mu.Unlock()
		p.in.poll(true)
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
		m.openBulk(p)
	}
	p.pump()
}

func (m *Mesh) recv(r *transport.Request) {
	if !m.Admit(r) {
		return
	}
	p := m.pairs[r.Peer]
	if p.Gone != nil {
		// What it sent before is still here.
		if a, ok := p.s.in.Value(r.Slot); !ok || !a.here {
			p.EndWithGone(r)
			return
		}
	}
	p.recv(r)
}

// takeAny returns the receive from any rank that takes a message of p, nil if there is none.
func (m *Mesh) takeAny(p *pair, slot, length uint64) (*transport.Request, error) {
	r := m.NextAny(slot)
	if r == nil {
		return nil, nil
	}
	r.Peer = p.Rank
	if f := p.s.checkLength(r, length); f != nil {
		p.Stranded.Push(r)
		return nil, f
	}
	return r, nil
}
