// Package hostmesh is the mesh of a rank whose host has other ranks of the group, in a group on several hosts.
package hostmesh

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend/gloo/internal/blame"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/shm"
)

// Remote is the mesh of all ranks of a group on several hosts.
type Remote interface {
	transport.Mesh
	transport.Poller
	// Withdraw takes a receive with a transport.Sharer back.
	Withdraw(r *transport.Request)
}

// Mesh carries messages between ranks of the host through memory. Everything else goes over connections. Both ranks of a pair know which way their messages go, so messages match as on any
// mesh. A receive from any rank is posted on both ways, and takes the first message on either.
type Mesh struct {
	Remote
	memory  *shm.Mesh
	members []int // the ranks on this host
	number  []int // by rank: its place in members, -1 if it is not there

	mu     sync.Mutex
	spares *relay
	wg     sync.WaitGroup // what withdraws
}

// New returns a mesh that owns local and the connections: it closes both. Members are the ranks on this host.
func New(local *shm.Group, all Remote, members []int, o shm.MeshOptions) (*Mesh, error) {
	m := &Mesh{Remote: all, members: members, number: make([]int, all.Size())}
	for r := range m.number {
		m.number[r] = -1
	}
	for i, r := range members {
		m.number[r] = i
	}
	var err error
	m.memory, err = shm.NewMesh(local, &hostView{Mesh: all, rank: m.number[all.Rank()], members: members}, o)
	return m, err
}

// Send implements transport.Mesh.
func (m *Mesh) Send(r *transport.Request) {
	if x := m.relay(r); x != nil {
		m.memory.Send(&x.Request)
	} else {
		m.Remote.Send(r)
	}
}

// Recv implements transport.Mesh.
func (m *Mesh) Recv(r *transport.Request) {
	if x := m.relay(r); x != nil {
		m.memory.Recv(&x.Request)
	} else {
		m.Remote.Recv(r)
	}
}

// RecvAny implements transport.Mesh.
func (m *Mesh) RecvAny(r *transport.Request) {
	e := &anyRecv{m: m, r: r}
	for _, h := range []*anyRecvPart{&e.near, &e.far} {
		h.either = e
		h.Slot, h.Buf, h.Owner = r.Slot, r.Buf, h
	}
	m.memory.RecvAny(&e.near.Request)
	if e.taker.Load() != nil {
		return
	}
	m.Remote.RecvAny(&e.far.Request)
	if e.taker.Load() == &e.near {
		m.Remote.Withdraw(&e.far.Request)
	}
	e.posted.Store(true)
	if e.dead.Load() != nil {
		m.later(e.inVain)
	}
}

// Close implements transport.Mesh.
func (m *Mesh) Close() error {
	err := m.memory.Close()
	m.wg.Wait()
	return err
}

// PollUntil moves the message of w in the calling goroutine until w has finished or is over, or done is closed. It
// returns at once if it cannot help.
func (m *Mesh) PollUntil(w shm.Waiter, done <-chan struct{}) {
	peer := -1
	if q, ok := w.(Peered); ok {
		peer = q.Peer()
	}
	switch {
	case peer < 0:
		m.MoveInBackground()
	case m.number[peer] >= 0:
		m.memory.PollUntil(w, done)
	default:
		m.Remote.PollUntil(w)
	}
}

// Peered is a message whose other end is known.
type Peered interface {
	// Peer returns the rank at the other end, -1 for a receive from any rank.
	Peer() int
}

// PollOnce moves the data that can be moved at once.
func (m *Mesh) PollOnce() { m.memory.PollOnce() }

// MoveInBackground starts a goroutine that moves the messages under way.
func (m *Mesh) MoveInBackground() {
	m.memory.MoveInBackground()
	m.Remote.ResumeReaders()
}

// relay returns a request through memory in place of r, nil if r's peer is on another host.
func (m *Mesh) relay(r *transport.Request) *relay {
	if r.Peer < 0 || r.Peer >= len(m.number) || m.number[r.Peer] < 0 || r.Peer == m.Rank() {
		return nil
	}
	m.mu.Lock()
	x := m.spares
	if x != nil {
		m.spares = x.next
	}
	m.mu.Unlock()
	if x == nil {
		x = &relay{m: m}
		x.Owner = x
	}
	x.r, x.Peer, x.Slot, x.Buf = r, m.number[r.Peer], r.Slot, r.Buf
	return x
}

// relay stands for a request through memory. There a peer has its number among the ranks of the
// host.
type relay struct {
	transport.Request
	m    *Mesh
	r    *transport.Request
	next *relay
}

// Ended implements transport.Owner.
func (x *relay) Ended(*transport.Request) {
	m, r, err := x.m, x.r, x.Err()
	x.r, x.Buf = nil, nil
	m.mu.Lock()
	x.next, m.spares = m.spares, x
	m.mu.Unlock()
	r.Complete(err)
}

// anyRecv is a receive from any rank, posted on both ways.
type anyRecv struct {
	m         *Mesh
	r         *transport.Request
	near, far anyRecvPart
	taker     atomic.Pointer[anyRecvPart]     // whose mesh has a message for it, or has failed
	forsaken  atomic.Int32                    // on how many ways nobody is left
	posted    atomic.Bool                     // on both
	dead      atomic.Pointer[transport.Fault] // of a rank that has died, under its number in the group
	none      anyRecvPart                     // the taker if a rank has died and no other sent before
}

type anyRecvPart struct {
	transport.Request
	either *anyRecv
}

// Claim implements transport.Sharer.
func (h *anyRecvPart) Claim(*transport.Request) bool {
	return h.either.taker.CompareAndSwap(nil, h) || h.either.taker.Load() == h
}

// Ended implements transport.Owner.
func (h *anyRecvPart) Ended(*transport.Request) {
	e, err := h.either, h.Err()
	m := e.m
	var f *transport.Fault
	errors.As(err, &f)
	if f != nil && f.Kind == transport.FaultPeerDied && m.Fault() == nil {
		died := *f
		if h == &e.near {
			died.Rank = m.members[f.Rank]
		}
		if e.dead.CompareAndSwap(nil, &died) && e.posted.Load() {
			m.later(e.inVain)
		}
		return
	}
	if f != nil && f.Kind == transport.FaultPeerLeft && e.taker.Load() == nil {
		// What others on this host sent before they left may still be in memory, and
		// on the other way there may be others.
		last := e.forsaken.Add(1) == 2
		m.later(func() {
			m.memory.MoveInBackground()
			if last && h.Claim(nil) {
				m.Abort(&transport.Fault{Kind: f.Kind, Rank: e.last(), Reporter: m.Rank(), Op: f.Op, Seq: f.Seq, Err: f.Err})
				e.r.Complete(m.end())
			}
		})
		return
	}
	if !h.Claim(nil) {
		return
	}
	if h == &e.near {
		if err == nil {
			e.r.Peer = m.members[h.Peer]
		}
		m.later(func() { m.Remote.Withdraw(&e.far.Request) })
	} else {
		if err == nil {
			e.r.Peer = h.Peer
		}
		m.later(func() { m.memory.Withdraw(&e.near.Request) })
	}
	e.r.Complete(err)
}

// inVain ends the receive, and the mesh, because a rank has died, unless another one had sent before.
func (e *anyRecv) inVain() {
	if e.taker.CompareAndSwap(nil, &e.none) {
		e.m.Abort(e.dead.Load())
		e.r.Complete(e.m.end())
	}
}

// end returns how requests end, once the mesh has failed or been closed.
func (m *Mesh) end() error {
	if f := m.Fault(); f != nil {
		return f
	}
	return transport.ErrClosed
}

// last returns the rank that left last, as far as the connections know.
func (e *anyRecv) last() int {
	var f *transport.Fault
	errors.As(e.far.Err(), &f)
	return f.Rank
}

// later calls f in a goroutine, when the caller has released its locks.
func (m *Mesh) later(f func()) { m.wg.Go(f) }

// hostView is the mesh of all ranks for the ranks of one host, under their numbers on the host.
type hostView struct {
	transport.Mesh
	rank    int
	members []int
}

// OnDeath tells of ranks of the host, under their numbers there.
func (n *hostView) OnDeath(f func(*transport.Fault)) {
	n.Mesh.OnDeath(func(died *transport.Fault) {
		if i := slices.Index(n.members, died.Rank); i >= 0 {
			here := *died
			here.Rank = i
			f(&here)
		}
	})
}

func (n *hostView) Rank() int { return n.rank }
func (n *hostView) Size() int { return len(n.members) }

// Abort aborts the mesh of all ranks with f, under the numbers of the group.
func (n *hostView) Abort(f *transport.Fault) {
	all := *f
	all.Rank, all.Reporter, all.Err = n.of(f.Rank), n.of(f.Reporter), Renumbered(f.Err, n.members)
	n.Mesh.Abort(&all)
}

func (n *hostView) of(number int) int {
	if number < 0 || number >= len(n.members) {
		return number
	}
	return n.members[number]
}

// Renumbered returns an error of the ranks of one host with the numbers of the group. Members are nil if they have
// those.
func Renumbered(err error, members []int) error {
	if members == nil {
		return err
	}
	var size *transport.SizeError
	var calls *transport.Disagreement
	var at *shm.RankError
	switch {
	case errors.As(err, &calls):
		all := *calls
		for i, r := range all.Ranks {
			all.Ranks[i] = members[r]
		}
		return &all
	case errors.As(err, &size):
		all := *size
		all.Peer = members[size.Peer]
		return &all
	case errors.As(err, &at):
		why := at.Err
		if !slices.Contains([]error{shm.ErrAborted, shm.ErrMismatch, shm.ErrLeft}, why) {
			why = fmt.Errorf("%w, by their numbers among ranks %s", why, blame.List(members))
		}
		return &shm.RankError{Rank: members[at.Rank], Err: why}
	}
	return err
}
