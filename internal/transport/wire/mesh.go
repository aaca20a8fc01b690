package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

// maxNotices bounds the notifications of one peer that no request has matched. Each may have a
// slot of its own and then takes about 150 bytes, so a hostile peer costs at most 40 MiB.
const maxNotices = 1 << 18

var limits = mesh.Limits{Close: time.Second, Step: 100 * time.Millisecond}

// Options is what package rendezvous sets. The zero value works.
type Options struct {
	// Departed, if not nil, is called when the connection of a peer has ended and the mesh goes
	// on without it. It must not block.
	Departed func(peer int)

	// Native says that all peers are ranks of this library. Otherwise a rank is known as one once
	// it has said so, and PyTorch ranks never do.
	Native bool
}

// LimitSilence makes a connection end once the other host has acknowledged nothing for d. 0 means
// 15 seconds, negative means never.
func LimitSilence(conn net.Conn, d time.Duration) error { return mesh.LimitSilence(conn, d) }

// Mesh is a transport.Mesh whose connections are attached one by one. Requests to a peer that
// is not connected yet wait for its connection. Its methods may be called from many goroutines.
type Mesh struct {
	mesh.Base
	opts Options

	// Guarded by Base.Mu:
	pairs       []*pair // nil at the own rank
	freeSlots   *slot
	freeNotices *notice
}

var _ transport.Mesh = (*Mesh)(nil)

// New returns the mesh of rank in a group of size ranks, with no connections.
func New(rank, size int, opts Options) *Mesh {
	m := &Mesh{opts: opts, pairs: make([]*pair, size)}
	m.Init(rank, size, limits, func() { m.freeSlots, m.freeNotices = nil, nil })
	for i := range m.pairs {
		if i != rank {
			m.pairs[i] = newPair(m)
			m.pairs[i].Native = opts.Native
			m.Add(i, &m.pairs[i].Peer, m.pairs[i])
		}
	}
	return m
}

// Attach gives the mesh its connection to peer and owns it from then on. If there is one
// already, or the mesh has ended, Attach closes conn and returns an error.
func (m *Mesh) Attach(peer int, conn net.Conn) error {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	err := m.Ended()
	switch {
	case err != nil:
	case !m.IsPeer(peer):
		err = fmt.Errorf("wire: a connection to rank %d, which is no peer of rank %d of %d", peer, m.Rank(), m.Size())
	case m.pairs[peer].conn != nil:
		err = fmt.Errorf("wire: rank %d is connected already", peer)
	}
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	m.pairs[peer].start(conn)
	return nil
}

// Send implements transport.Mesh.
func (m *Mesh) Send(r *transport.Request) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.admit(r)
	if p == nil {
		return
	}
	p.enqueue(notification(opSendReady, r))
	s := p.slot(r.Slot)
	if s.wanted.Empty() {
		s.sends.Push(r)
		return
	}
	p.answer(r, p.take(&s.wanted))
	p.tidy(s)
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.admit(r)
	if p == nil {
		return
	}
	s := p.slot(r.Slot)
	s.recvs.Push(r)
	if !s.offered.Empty() {
		if f := p.checkOffer(r, p.take(&s.offered)); f != nil {
			m.Fail(f)
			return
		}
	} else if s.unmatched == nil {
		s.unmatched = r
	}
	p.enqueue(notification(opRecvReady, r))
}

// RecvAny implements transport.Mesh. It takes the message that was announced first.
func (m *Mesh) RecvAny(r *transport.Request) {
	if isControl(r.Slot) {
		r.Complete(reservedSlot(r.Slot))
		return
	}
	m.Base.RecvAny(r)
}

// admit returns the pair that r is for. If there is none that works, it ends r and returns nil.
func (m *Mesh) admit(r *transport.Request) *pair {
	switch {
	case !m.Admit(r):
	case isControl(r.Slot):
		r.Complete(reservedSlot(r.Slot))
	case m.pairs[r.Peer].Gone != nil:
		m.pairs[r.Peer].EndWithGone(r)
	default:
		return m.pairs[r.Peer]
	}
	return nil
}

func reservedSlot(slot uint64) error {
	return fmt.Errorf("wire: slot %#x: slots that begin with %#x are reserved", slot, controlPrefix)
}

// Foreign returns the ranks that are not of this library: PyTorch's. A rank shows what it is
// with its first message.
func (m *Mesh) Foreign() []int {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	var ranks []int
	for r, p := range m.pairs {
		if p != nil && p.foreign {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// SpeaksVersion2 reports whether peer is a rank of this library that speaks version 2 of the control
// messages. It waits for the peer's first message, until ctx or the mesh ends. A PyTorch rank
// sends none before its first operation.
func (m *Mesh) SpeaksVersion2(ctx context.Context, peer int) bool {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	p := m.pairs[peer]
	m.Await(ctx, func() bool { return p.known || p.Gone != nil })
	return p.version >= 2
}

// slot is the state of one slot of a pair. It exists while it holds something.
type slot struct {
	key       uint64
	sends     transport.Requests // without a RECV_READY
	recvs     transport.Requests // whose DATA has not come
	unmatched *transport.Request // the first of recvs without a SEND_READY; those behind it have none either
	offered   notices            // SEND_READYs without a receive
	wanted    notices            // RECV_READYs without a send
	next      *slot              // in Mesh.freeSlots
}

func (s *slot) empty() bool {
	return s.sends.Empty() && s.recvs.Empty() && s.offered.Empty() && s.wanted.Empty()
}

func (m *Mesh) newSlot(key uint64) *slot {
	s := m.freeSlots
	if s == nil {
		s = new(slot)
	} else {
		m.freeSlots = s.next
	}
	*s = slot{key: key}
	return s
}

func (m *Mesh) freeSlot(s *slot) {
	s.next = m.freeSlots
	m.freeSlots = s
}

// notice is a notification that came before its request.
type notice struct {
	length uint64
	order  uint64 // among the SEND_READYs of all peers
	next   *notice
}

func (n *notice) Link() **notice { return &n.next }

type notices = transport.Queue[*notice]
