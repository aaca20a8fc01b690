// Package mem carries the messages of a group whose ranks all live in one
// process: a transport.Mesh without sockets, for tests and for trying things
// out. It can also play the faults of a network.
//
// A Fabric holds any number of groups. Each rank joins by the group's name:
//
//	f := mem.NewFabric()
//	m, err := f.Join("0", rank, size)
//
// Sends are matched with receives as on Gloo's wire and copied straight from
// one buffer to the other, so a send completes when its receive does. Every
// rank counts as native: it answers Diagnose and takes faults from others.
package mem

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

// Fabric connects ranks of one process. It is safe for many goroutines.
type Fabric struct {
	mu       sync.Mutex
	networks map[string]*network
	drop     func(group string, from int, r *transport.Request) bool
}

// NewFabric returns a fabric without groups.
func NewFabric() *Fabric { return &Fabric{networks: make(map[string]*network)} }

// DropIf calls drop with every message. If it returns true, the message gets lost: its send completes, its receive
// never does. Set it before ranks join. drop runs with the group's lock held.
func (f *Fabric) DropIf(drop func(group string, from int, r *transport.Request) bool) { f.drop = drop }

// Join returns rank's end of the group called name. It does not wait for the other ranks:
// messages to a rank that has not joined wait for it.
func (f *Fabric) Join(name string, rank, size int) (transport.Mesh, error) {
	if rank < 0 || rank >= size {
		return nil, fmt.Errorf("mem: rank %d is not within a group of %d", rank, size)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.networks[name]
	if n == nil {
		n = &network{name: name, drop: f.drop, ends: make([]*end, size), pairs: make(map[pairKey]*pairQueue), any: make(map[anyKey]*transport.Requests)}
		f.networks[name] = n
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.ends) != size {
		return nil, fmt.Errorf("mem: rank %d joins group %q with size %d, others with %d", rank, name, size, len(n.ends))
	}
	if n.ends[rank] != nil {
		return nil, fmt.Errorf("mem: rank %d is in group %q already", rank, name)
	}
	e := &end{net: n, rank: rank, failed: make(chan struct{})}
	n.ends[rank] = e
	if n.fault != nil { // the group failed before this rank came
		n.failLocked(rank, n.fault)
	}
	return e, nil
}

// networksOf returns the networks of a group: name/0, name/1 and so on if there are any, else name.
func (f *Fabric) networksOf(name string) (all []*network) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := 0; ; i++ {
		n := f.networks[fmt.Sprintf("%s/%d", name, i)]
		if n == nil {
			break
		}
		all = append(all, n)
	}
	if n := f.networks[name]; len(all) == 0 && n != nil {
		all = append(all, n)
	}
	return all
}

// Kill makes a rank of a group die as a process does: the others see its
// connections end without a goodbye. A group that has several networks, joined as
// name/0, name/1 and so on, loses the rank on all of them.
func (f *Fabric) Kill(name string, rank int) {
	for _, n := range f.networksOf(name) {
		n.mu.Lock()
		n.kill(rank)
		n.mu.Unlock()
	}
}

func (n *network) kill(rank int) {
	e := n.ends[rank]
	if e == nil || e.closed || e.fault.Load() != nil {
		return // it has left, or said why it ends
	}
	e.gone = transport.NewFault(transport.FaultPeerDied, rank, -1, nil)
	n.failLocked(rank, transport.NewFault(transport.FaultAborted, rank, rank, fmt.Errorf("mem: rank %d was killed", rank)))
	if n.dead == nil {
		n.dead = e.gone
	}
	if n.needs(rank) || len(n.any) > 0 {
		n.failAllLocked(e.gone)
		return
	}
	for r, other := range n.ends {
		if r != rank && other != nil && other.onDeath != nil {
			other.onDeath(e.gone)
		}
	}
}

// needs reports whether another rank waits for a message to or from one that is gone.
func (n *network) needs(rank int) bool {
	for k, q := range n.pairs {
		if k.from == rank && !q.recvs.Empty() || k.to == rank && !q.sends.Empty() {
			return true
		}
	}
	return false
}

// Freeze makes a rank stop as SIGSTOP does: nothing it sends arrives any more
// and it answers nobody. Networks are those of Kill.
func (f *Fabric) Freeze(name string, rank int) {
	for _, n := range f.networksOf(name) {
		n.mu.Lock()
		if n.frozen == nil {
			n.frozen = make(map[int]bool)
		}
		n.frozen[rank] = true
		n.mu.Unlock()
	}
}

type (
	pairKey struct {
		from, to int
		slot     uint64
	}
	anyKey struct {
		to   int
		slot uint64
	}
	pairQueue struct{ sends, recvs transport.Requests }
)

type network struct {
	name string
	drop func(group string, from int, r *transport.Request) bool

	mu     sync.Mutex
	fault  *transport.Fault // of the whole group, for ranks that join later
	ends   []*end
	frozen map[int]bool
	pairs  map[pairKey]*pairQueue
	free   []*pairQueue // empty queues to use again
	any    map[anyKey]*transport.Requests
	last   int              // who left last
	dead   *transport.Fault // of the first rank that was killed
}

type end struct {
	net               *network
	rank              int
	issued, completed atomic.Uint64
	fault             atomic.Pointer[transport.Fault]
	failed            chan struct{}
	waiting           func() transport.Waiting // under net.mu, as all that follows
	closed            bool
	gone              *transport.Fault // once it has left or died: the fault of requests that need it
	onDeath           func(*transport.Fault)
}

func (e *end) Rank() int                     { return e.rank }
func (e *end) Size() int                     { return len(e.net.ends) }
func (e *end) Fault() *transport.Fault       { return e.fault.Load() }
func (e *end) Failed() <-chan struct{}       { return e.failed }
func (e *end) SetProgress(issued, ok uint64) { e.issued.Store(issued); e.completed.Store(ok) }

// SetWaiting implements transport.Mesh.
func (e *end) SetWaiting(f func() transport.Waiting) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	e.waiting = f
}

// waits returns for whom each rank waits by its messages, in no order. It is for all ranks at once, because groups may be large.
func (n *network) waits() [][]int {
	peers := make([][]int, len(n.ends))
	for k, q := range n.pairs {
		if !q.recvs.Empty() {
			peers[k.to] = append(peers[k.to], k.from)
		}
		if !q.sends.Empty() {
			peers[k.from] = append(peers[k.from], k.to)
		}
	}
	return peers
}

// links returns for whom the rank waits, and its oldest collective. peers are those of waits.
func (e *end) links(about, peers []int) (links []transport.Link, op uint8) {
	n := e.net
	w := transport.Waiting{Op: transport.NoOp}
	if e.waiting != nil {
		w = e.waiting()
	}
	all := slices.Concat(peers, about, slices.Collect(maps.Keys(w.Peers)))
	slices.Sort(all)
	for _, r := range slices.Compact(all) {
		l := transport.Link{Peer: r, Waits: slices.Contains(peers, r) || w.Peers[r] != 0, Answered: !n.frozen[r]}
		l.Sends, l.Recvs = w.Peers[r]&transport.NeedsSend != 0, w.Peers[r]&transport.NeedsRecv != 0
		if n.frozen[r] && slices.Contains(about, r) {
			l.Silent = time.Hour
		}
		if r != e.rank && (l.Waits || l.Silent > 0) {
			links = append(links, l)
		}
	}
	return links, w.Op
}

// OnDeath implements transport.Mesh.
func (e *end) OnDeath(f func(*transport.Fault)) {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	before := e.onDeath
	e.onDeath = func(x *transport.Fault) {
		if before != nil {
			before(x)
		}
		f(x)
	}
	for r, other := range n.ends {
		if r != e.rank && other != nil && other.gone != nil && other.gone.Kind == transport.FaultPeerDied {
			f(other.gone)
		}
	}
}

// refuse returns why no request can be posted, nil if one can.
func (e *end) refuse() error {
	if e.closed {
		return transport.ErrClosed
	}
	if f := e.fault.Load(); f != nil {
		return f
	}
	return nil
}

func (n *network) pair(k pairKey) *pairQueue {
	q := n.pairs[k]
	if q == nil {
		if i := len(n.free); i > 0 {
			q, n.free = n.free[i-1], n.free[:i-1]
		} else {
			q = new(pairQueue)
		}
		n.pairs[k] = q
	}
	return q
}

// release frees an empty queue. Slots count up and are never used again.
func (n *network) release(k pairKey, q *pairQueue) {
	if q.sends.Empty() && q.recvs.Empty() && n.pairs[k] == q {
		delete(n.pairs, k)
		n.free = append(n.free, q)
	}
}

func (e *end) Send(r *transport.Request) {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := e.refuse(); err != nil {
		r.Complete(err)
		return
	}
	if n.left(r.Peer) {
		e.leftLocked(r)
		return
	}
	if n.frozen[e.rank] || n.drop != nil && n.drop(n.name, e.rank, r) {
		r.Complete(nil)
		return
	}
	k := pairKey{e.rank, r.Peer, r.Slot}
	q := n.pair(k)
	if q.recvs.Empty() {
		if a := n.any[anyKey{r.Peer, r.Slot}]; a != nil && !n.frozen[r.Peer] {
			recv := a.Pop()
			if a.Empty() {
				delete(n.any, anyKey{r.Peer, r.Slot})
			}
			recv.Peer = e.rank
			q.recvs.Push(recv)
		}
	}
	q.sends.Push(r)
	n.match(k, q)
}

func (e *end) Recv(r *transport.Request) {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := e.refuse(); err != nil {
		r.Complete(err)
		return
	}
	k := pairKey{r.Peer, e.rank, r.Slot}
	q := n.pair(k)
	if q.sends.Empty() && n.left(r.Peer) {
		n.release(k, q)
		e.leftLocked(r)
		return
	}
	q.recvs.Push(r)
	n.match(k, q)
}

func (e *end) RecvAny(r *transport.Request) {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := e.refuse(); err != nil {
		r.Complete(err)
		return
	}
	for from := range n.ends {
		k := pairKey{from, e.rank, r.Slot}
		if q := n.pairs[k]; q != nil && !q.sends.Empty() {
			r.Peer = from
			q.recvs.Push(r)
			n.match(k, q)
			return
		}
	}
	switch {
	case n.dead != nil:
		r.Peer = n.dead.Rank
		e.leftLocked(r)
		return
	case len(n.ends) > 1 && n.alone(e.rank):
		r.Peer = n.last
		e.leftLocked(r)
		return
	}
	k := anyKey{e.rank, r.Slot}
	if n.any[k] == nil {
		n.any[k] = new(transport.Requests)
	}
	n.any[k].Push(r)
}

func (n *network) left(rank int) bool { return n.ends[rank] != nil && n.ends[rank].gone != nil }

// leftLocked fails the group because r needs a rank that has left or died.
func (e *end) leftLocked(r *transport.Request) {
	f := e.net.ends[r.Peer].gone
	r.Complete(f)
	e.net.failAllLocked(f)
}

// match copies the messages of one pair and slot that have both a send and a receive.
func (n *network) match(k pairKey, q *pairQueue) {
	defer n.release(k, q)
	if n.frozen[k.from] || n.frozen[k.to] {
		return
	}
	for !q.sends.Empty() && !q.recvs.Empty() {
		s, r := q.sends.Pop(), q.recvs.Pop()
		if len(s.Buf) != len(r.Buf) {
			err := &transport.SizeError{Peer: k.from, Slot: k.slot, Want: uint64(len(r.Buf)), Got: uint64(len(s.Buf))}
			f := transport.NewFault(transport.FaultMismatch, k.from, k.to, err)
			s.Complete(f)
			r.Complete(f)
			n.failAllLocked(f)
			return
		}
		copy(r.Buf, s.Buf)
		s.Complete(nil)
		r.Complete(nil)
	}
}

func (n *network) failAllLocked(f *transport.Fault) {
	if n.fault == nil {
		n.fault = f
	}
	for r := range n.ends {
		if !n.frozen[r] {
			n.failLocked(r, f)
		}
	}
}

// failLocked ends rank's mesh with f, unless it has ended already.
func (n *network) failLocked(rank int, f *transport.Fault) {
	e := n.ends[rank]
	if e == nil || e.closed || !e.fault.CompareAndSwap(nil, f) {
		return
	}
	n.dropRequests(rank, f)
	close(e.failed)
}

// dropRequests completes everything that rank has posted.
func (n *network) dropRequests(rank int, err error) {
	for k, q := range n.pairs {
		if k.from == rank {
			q.sends.Complete(err)
		}
		if k.to == rank {
			q.recvs.Complete(err)
		}
		n.release(k, q)
	}
	for k, q := range n.any {
		if k.to == rank {
			q.Complete(err)
			delete(n.any, k)
		}
	}
}

func (e *end) Abort(f *transport.Fault) {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	if e.closed || e.fault.Load() != nil {
		return
	}
	if e.net.frozen[e.rank] {
		e.net.failLocked(e.rank, f)
		return
	}
	e.net.failAllLocked(f)
}

// alone reports whether every rank but rank has left.
func (n *network) alone(rank int) bool {
	for r := range n.ends {
		if r != rank && !n.left(r) {
			return false
		}
	}
	return true
}

func (e *end) Diagnose(_ time.Duration, about ...int) []transport.Health {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	out := make([]transport.Health, len(e.net.ends))
	waits := e.net.waits()
	for r, p := range e.net.ends {
		out[r] = transport.Health{Rank: r, Native: true}
		if p == nil || e.net.frozen[r] || e.net.frozen[e.rank] && r != e.rank {
			continue
		}
		out[r].Answered = p.fault.Load() == nil && !p.closed
		out[r].Departed = p.gone != nil
		out[r].Died = p.gone != nil && p.gone.Kind == transport.FaultPeerDied
		out[r].Issued, out[r].Completed = p.issued.Load(), p.completed.Load()
		out[r].Links, out[r].Op = p.links(about, waits[r])
	}
	return out
}

func (e *end) Close() error {
	n := e.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	n.dropRequests(e.rank, transport.ErrClosed)
	if e.fault.Load() != nil {
		return nil
	}
	e.gone = transport.NewFault(transport.FaultPeerLeft, e.rank, -1, nil)
	n.last = e.rank
	// Whoever waits for a message of this rank waits in vain.
	if n.needs(e.rank) {
		n.failAllLocked(e.gone)
	}
	for k := range n.any {
		if n.alone(k.to) {
			n.failAllLocked(e.gone)
			break
		}
	}
	return nil
}
