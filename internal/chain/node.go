package chain

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/internal/callback"
	"github.com/c10d-go/c10d/internal/transport"
)

// Options are a node's limits. The zero value works.
type Options struct {
	// Limits bound the messages without a callback.
	Limits callback.Limits

	// Workers is how many goroutines run callbacks; 0 means GOMAXPROCS.
	Workers int

	// Slot and the slot after it are the mesh's slots for the node's messages. No other code may
	// use them.
	Slot uint64
}

// Node is one rank's end of the chains that run over a mesh. It receives every message of its
// peers and passes it to its callback. Its methods may be called from many goroutines.
type Node struct {
	mesh     transport.Mesh
	opts     Options
	registry *callback.Registry
	ctx      context.Context
	stop     context.CancelFunc
	wg       sync.WaitGroup // readers and senders, which end with the goodbyes or the mesh
	watcher  sync.WaitGroup
	workers  sync.WaitGroup

	mu     sync.Mutex
	groups map[string]*Group
	left   []bool // by rank
	out    []*outbox
	jobs   queue[func()]
	wake   sync.Cond
	closed bool
}

// A message has a head of 32 bytes on one slot and, except for a goodbye, a body on the next:
//
//	 0  kind
//	 4  step
//	 8  number of the collective, or key
//	16  bytes of the group's name, at the beginning of the body
//	24  bytes of the body
const (
	headLen = 32
	maxName = 1024

	kindStep = 1 // of a collective
	kindRaw  = 2 // of Send; the step is who sends
	kindFail = 3 // a collective has failed on the sender; the rest of the body says why
	kindBye  = 4
)

type head struct {
	kind, step      uint32
	seq, name, body uint64
}

func (h *head) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b[0:], h.kind)
	le.PutUint32(b[4:], h.step)
	le.PutUint64(b[8:], h.seq)
	le.PutUint64(b[16:], h.name)
	le.PutUint64(b[24:], h.body)
}

func parseHead(b []byte, limit int64) (head, error) {
	le := binary.LittleEndian
	h := head{le.Uint32(b[0:]), le.Uint32(b[4:]), le.Uint64(b[8:]), le.Uint64(b[16:]), le.Uint64(b[24:])}
	switch {
	case h.kind == 0 || h.kind > kindBye:
		return h, fmt.Errorf("chain: a message of kind %d, want 1 to %d", h.kind, kindBye)
	case h.kind == kindBye && h != (head{kind: kindBye}):
		return h, fmt.Errorf("chain: a goodbye with %d bytes", h.body)
	case h.name > maxName || h.name > h.body || h.body > uint64(limit)+maxName:
		return h, fmt.Errorf("chain: a message of %d bytes for a group with a name of %d, the limits are %d and %d", h.body, h.name, limit, maxName)
	}
	return h, nil
}

// message is something to send.
type message struct {
	head head
	name string
	data []byte
	done func(error)
}

type outbox struct {
	messages queue[message]
	wake     chan struct{}
}

// queue is a FIFO whose front is taken in constant time.
type queue[T any] struct {
	items []T
	head  int
}

func (q *queue[T]) empty() bool { return q.head == len(q.items) }

func (q *queue[T]) push(x T) { q.items = append(q.items, x) }

func (q *queue[T]) pop() T {
	var zero T
	x := q.items[q.head]
	q.items[q.head] = zero
	if q.head++; 2*q.head >= len(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return x
}

// NewNode returns a node on mesh. The caller closes the node and then the mesh.
func NewNode(mesh transport.Mesh, o Options) *Node {
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.Limits.Bytes <= 0 {
		o.Limits.Bytes = 256 << 20
	}
	n := &Node{mesh: mesh, opts: o, registry: callback.NewRegistry(o.Limits), groups: make(map[string]*Group), left: make([]bool, mesh.Size()), out: make([]*outbox, mesh.Size())}
	n.wake.L = &n.mu
	n.ctx, n.stop = context.WithCancel(context.Background())
	for range o.Workers {
		n.workers.Go(n.work)
	}
	for peer := range n.out {
		if peer == mesh.Rank() {
			continue
		}
		n.out[peer] = &outbox{wake: make(chan struct{}, 1)}
		n.wg.Go(func() { n.send(peer) })
		n.wg.Go(func() { n.read(peer) })
	}
	n.watcher.Go(func() {
		select {
		case <-mesh.Failed():
			n.end(mesh.Fault())
		case <-n.ctx.Done():
		}
	})
	return n
}

var errClosed = errors.New("chain: the node is closed")

// Close ends every chain, sends all queued messages and then a goodbye, and waits for the goodbye
// of every other node. If ctx ends first, it aborts the mesh. Close does not close the mesh.
func (n *Node) Close(ctx context.Context) error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	for peer := range n.out {
		n.queue(peer, message{head: head{kind: kindBye}})
	}
	n.mu.Unlock()
	n.registry.End(errClosed)
	given := context.AfterFunc(ctx, func() {
		n.mesh.Abort(&transport.Fault{Kind: transport.FaultAborted, Rank: n.mesh.Rank(), Reporter: n.mesh.Rank(), Op: 0xff, Err: context.Cause(ctx)})
	})
	n.wg.Wait()
	var err error
	if !given() {
		err = fmt.Errorf("chain: not all ranks have closed their nodes: %w", context.Cause(ctx))
	}
	n.stop()
	n.watcher.Wait()
	n.mu.Lock()
	n.wake.Broadcast()
	n.mu.Unlock()
	n.workers.Wait()
	return err
}

var noWait = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("there is no room"))
	return ctx
}()

// end runs when the mesh has failed. All chains end with its fault, which names the rank.
func (n *Node) end(f *transport.Fault) {
	n.registry.End(fmt.Errorf("chain: rank %d: %w", n.mesh.Rank(), f))
	n.stop()
}

// work runs callbacks until the node is closed and none is left.
func (n *Node) work() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		for n.jobs.empty() {
			if n.closed && n.ctx.Err() != nil {
				return
			}
			n.wake.Wait()
		}
		job := n.jobs.pop()
		n.mu.Unlock()
		job()
		n.mu.Lock()
	}
}

// run makes a worker call f, or the caller if the workers have ended.
func (n *Node) run(f func()) {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		f()
		return
	}
	n.jobs.push(f)
	n.wake.Signal()
	n.mu.Unlock()
}

// post queues m for a peer, which may be this rank. It calls m.done once the data are no longer
// needed.
func (n *Node) post(peer int, m message) {
	if peer == n.mesh.Rank() {
		// A rank that sends to itself also receives, so it must not wait for room.
		m.done(n.deliver(noWait, peer, m.head, m.name, bytes.Clone(m.data)))
		return
	}
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		m.done(errClosed)
		return
	}
	n.queue(peer, m)
	n.mu.Unlock()
}

func (n *Node) queue(peer int, m message) {
	if o := n.out[peer]; o != nil {
		o.messages.push(m)
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// send is the sender to one peer. It ends with the goodbye. Once the mesh has failed, all queued
// messages fail.
func (n *Node) send(peer int) {
	o := n.out[peer]
	var b [headLen]byte
	hs, bs := transport.NewRequest(), transport.NewRequest()
	for {
		n.mu.Lock()
		if o.messages.empty() {
			n.mu.Unlock()
			<-o.wake
			continue
		}
		m := o.messages.pop()
		n.mu.Unlock()
		m.head.name, m.head.body = uint64(len(m.name)), uint64(len(m.name)+len(m.data))
		m.head.put(b[:])
		hs.Peer, hs.Slot, hs.Buf = peer, n.opts.Slot, b[:]
		n.mesh.Send(hs)
		var err error
		if m.head.kind != kindBye {
			// The name and the data are joined only here. The copy lives until it is sent.
			bs.Peer, bs.Slot, bs.Buf = peer, n.opts.Slot+1, append([]byte(m.name), m.data...)
			n.mesh.Send(bs)
			<-bs.Done()
			err = bs.Err()
		}
		<-hs.Done()
		if err = errors.Join(err, hs.Err()); err != nil {
			err = fmt.Errorf("chain: rank %d to rank %d: %w", n.mesh.Rank(), peer, err)
		}
		if m.done != nil {
			m.done(err)
		}
		if m.head.kind == kindBye {
			return
		}
	}
}

// read is the receiver from one peer. While there is no room for a message it does not read, so
// the peer's sends wait.
func (n *Node) read(peer int) {
	var b [headLen]byte
	r := transport.NewRequest()
	get := func(slot uint64, buf []byte) bool {
		r.Peer, r.Slot, r.Buf = peer, slot, buf
		n.mesh.Recv(r)
		<-r.Done()
		return r.Err() == nil
	}
	for get(n.opts.Slot, b[:]) {
		h, err := parseHead(b[:], n.opts.Limits.Bytes)
		if err != nil {
			n.mesh.Abort(&transport.Fault{Kind: transport.FaultProtocol, Rank: peer, Reporter: n.mesh.Rank(), Op: 0xff, Err: err})
			return
		}
		if h.kind == kindBye {
			n.leave(peer)
			return
		}
		body := make([]byte, h.body)
		if !get(n.opts.Slot+1, body) {
			return
		}
		// A refused message needs no answer: it is late, its group is over, or its collective has
		// failed.
		n.deliver(n.ctx, peer, h, string(body[:h.name]), body[h.name:])
	}
}

// leave notes that a peer has closed its node. Callbacks that wait for it end; messages that it
// has sent stay.
func (n *Node) leave(peer int) {
	n.mu.Lock()
	n.left[peer] = true
	var from []*Group
	for _, g := range n.groups {
		if slices.Contains(g.members, peer) {
			from = append(from, g)
		}
	}
	n.mu.Unlock()
	for _, g := range from {
		g.abandon(peer)
	}
}

func (n *Node) hasLeft(peer int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.left[peer]
}

// deliver passes a message to its callback.
func (n *Node) deliver(ctx context.Context, from int, h head, name string, data []byte) error {
	k := callback.Key{Group: groupKey(h.kind, name), Seq: h.seq, Step: h.step}
	if h.kind == kindFail {
		n.registry.EndCollective(groupKey(kindStep, name), h.seq, &remoteError{from, string(data)})
		return nil
	}
	err := n.registry.SetValue(ctx, k, data)
	if err != nil && h.kind == kindStep && !errors.Is(err, callback.ErrLate) {
		// A second value, or one that is too large, means that the ranks are out of step.
		n.registry.EndCollective(k.Group, k.Seq, fmt.Errorf("chain: from rank %d: %w", from, err))
	}
	return err
}

// groupKey separates the keys of collectives from those of Send.
func groupKey(kind uint32, name string) string {
	if kind == kindRaw {
		return "r" + name
	}
	return "c" + name
}
