package tcp

import (
	"bytes"
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"

	"github.com/c10d-go/c10d/store"
)

// data is what a server holds. It knows no sockets: do carries out a request
// and puts its reply into the peer's output.
type data struct {
	mu     sync.Mutex
	keys   map[string][]byte
	queues map[string][][]byte   // none is empty
	waits  map[string]*list.List // of *missing, in the order of arrival
	bytes  int64                 // see cost
	limits Limits
	memory int64 // limit of bytes, 0 for none
}

// Stored slices are never written to below their length, so that replies can
// refer to them after mu is released.

// peer is one connection as data sees it.
type peer struct {
	session *session // for the server
	dialect store.Dialect
	out     output
	wait    *waiter // its WAIT or BARRIER under way
	handed  string  // the queue whose push ended its last wait, until it pops
}

type waiter struct {
	peer    *peer
	missing map[string]*list.Element // in data.waits
}

// missing is one key that a waiter waits for.
type missing struct {
	*waiter
	key string
}

var errFull = errors.New("the store holds as many bytes as it may")

// overhead is what a key or a queued element is counted with beyond its bytes:
// about a map entry with its two headers.
const overhead = 64

func newData(limits Limits, memory int64) *data {
	return &data{
		keys:   make(map[string][]byte),
		queues: make(map[string][][]byte),
		waits:  make(map[string]*list.List),
		limits: limits,
		memory: memory,
	}
}

// do carries out r for p. It returns the other peers that have output now. An
// error means that p's connection has to be closed.
func (d *data) do(p *peer, r *request) (woken []*peer, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.handed != "" && (r.query != qQueuePop || r.keys[0] != p.handed) {
		d.passOn(p, &woken)
	}
	p.handed = ""

	// A client of the old dialect cannot take back a wait. When it sends
	// anything, it has given up, and an answer now would be taken for that of
	// its next request.
	if p.dialect == store.DialectV1 {
		d.drop(p)
	}

	var key string
	if len(r.keys) > 0 {
		key = r.keys[0]
	}
	switch r.query {
	case qSet:
		return woken, d.set(key, r.vals[0], &woken)

	case qCompareSet:
		held, ok := d.keys[key]
		expected, desired := r.vals[0], r.vals[1]
		switch {
		case ok && !bytes.Equal(held, expected):
			p.out.blob(held)
		case !ok && len(expected) > 0:
			p.out.blob(expected)
		default:
			if !ok || !bytes.Equal(held, desired) {
				if err := d.set(key, desired, &woken); err != nil {
					return woken, err
				}
			}
			p.out.blob(desired)
		}

	case qGet:
		p.out.blob(d.keys[key])

	case qAdd:
		n, err := d.add(key, r.num)
		if err != nil {
			return woken, err
		}
		p.out.int64(n)
		d.wake(key, &woken)

	case qCheck:
		answer := byte(ready)
		for _, k := range r.keys {
			if !d.has(k) {
				answer = notReady
				break
			}
		}
		p.out.byte(answer)

	case qWait:
		d.drop(p)
		for _, k := range r.keys {
			if !d.has(k) {
				d.await(p, k)
			}
		}
		if p.wait == nil {
			p.out.byte(ready)
		}

	case qNumKeys:
		p.out.int64(int64(len(d.keys)))

	case qDelete:
		held, ok := d.keys[key]
		n := int64(0)
		if ok {
			n = 1
			d.bytes -= cost(key, held)
			delete(d.keys, key)
		}
		p.out.int64(n)

	case qAppend:
		held := d.keys[key]
		if n := len(held) + len(r.vals[0]); n > d.limits.Message {
			return woken, fmt.Errorf("APPEND to %q makes %d bytes: %w", key, n, store.ErrTooLarge)
		}
		return woken, d.set(key, append(held, r.vals[0]...), &woken)

	case qMultiGet:
		size := 0
		for _, k := range r.keys {
			size += len(d.keys[k])
		}
		if size > d.limits.Message {
			return woken, fmt.Errorf("MULTI_GET of %d bytes: %w", size, store.ErrTooLarge)
		}
		for _, k := range r.keys {
			p.out.blob(d.keys[k])
		}

	case qMultiSet:
		for i, k := range r.keys {
			if err := d.set(k, r.vals[i], &woken); err != nil {
				return woken, err
			}
		}

	case qCancelWait:
		d.drop(p)
		p.out.byte(cancelled)

	case qPing:
		p.out.bytes(binary.LittleEndian.AppendUint32(nil, uint32(r.num)))

	case qQueuePush:
		if err := d.charge(cost("", r.vals[0])); err != nil {
			return woken, err
		}
		d.queues[key] = append(d.queues[key], r.vals[0])
		d.wakeOne(key, &woken)

	case qQueuePop:
		q := d.queues[key]
		p.out.int64(int64(len(q)))
		if len(q) == 0 {
			break
		}
		p.out.blob(q[0])
		d.bytes -= cost("", q[0])
		q[0] = nil
		if d.queues[key] = q[1:]; len(q) == 1 {
			delete(d.queues, key)
		}

	case qQueueLen:
		p.out.int64(int64(len(d.queues[key])))

	case qListKeys:
		size := 0
		for k := range d.keys {
			size += len(k)
		}
		if size > d.limits.Message {
			return woken, fmt.Errorf("LIST_KEYS of %d bytes: %w", size, store.ErrTooLarge)
		}
		p.out.int64(int64(len(d.keys)))
		for k := range d.keys {
			p.out.blob([]byte(k))
		}

	case qBarrier:
		d.drop(p)
		n, err := d.add(key, 1)
		if err != nil {
			return woken, err
		}
		if n < r.num && r.num > 1 {
			d.await(p, key)
			break
		}
		p.out.byte(ready)
		d.wake(key, &woken)

	case qWatch:
		p.out.byte(watched)

	default:
		return woken, malformedf("unexpected %v", r.query)
	}
	return woken, nil
}

// leave forgets a peer whose connection ended.
func (d *data) leave(p *peer) (woken []*peer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drop(p)
	if p.handed != "" {
		d.passOn(p, &woken)
	}
	return woken
}

// The rest is called with mu held.

func cost(key string, value []byte) int64 { return int64(len(key) + len(value) + overhead) }

func (d *data) charge(n int64) error {
	if n > 0 && d.memory > 0 && d.bytes+n > d.memory {
		return fmt.Errorf("%w: %d", errFull, d.memory)
	}
	d.bytes += n
	return nil
}

func (d *data) has(key string) bool {
	_, ok := d.keys[key]
	return ok || len(d.queues[key]) > 0
}

func (d *data) put(key string, value []byte) error {
	more := cost(key, value)
	if held, ok := d.keys[key]; ok {
		more -= cost(key, held)
	}
	if err := d.charge(more); err != nil {
		return err
	}
	d.keys[key] = value
	return nil
}

func (d *data) set(key string, value []byte, woken *[]*peer) error {
	err := d.put(key, value)
	if err == nil {
		d.wake(key, woken)
	}
	return err
}

func (d *data) add(key string, delta int64) (int64, error) {
	var n int64
	if held, ok := d.keys[key]; ok {
		var err error
		if n, err = store.ParseNumber(held); err != nil {
			return 0, fmt.Errorf("ADD to %q: %w", key, err)
		}
	}
	n += delta
	return n, d.put(key, strconv.AppendInt(nil, n, 10))
}

// await makes p wait for key as well.
func (d *data) await(p *peer, key string) {
	if p.wait == nil {
		p.wait = &waiter{peer: p, missing: make(map[string]*list.Element)}
	}
	if p.wait.missing[key] != nil {
		return
	}
	l := d.waits[key]
	if l == nil {
		l = list.New()
		d.waits[key] = l
	}
	p.wait.missing[key] = l.PushBack(&missing{p.wait, key})
}

// seen takes key off what w waits for, and answers w if it was the last.
func (d *data) seen(w *waiter, key string, woken *[]*peer) {
	d.forget(w, key)
	if len(w.missing) == 0 {
		w.peer.wait = nil
		w.peer.out.byte(ready)
		*woken = append(*woken, w.peer)
	}
}

func (d *data) forget(w *waiter, key string) {
	l := d.waits[key]
	l.Remove(w.missing[key])
	if l.Len() == 0 {
		delete(d.waits, key)
	}
	delete(w.missing, key)
}

// drop takes back p's wait.
func (d *data) drop(p *peer) {
	if p.wait == nil {
		return
	}
	for key := range p.wait.missing {
		d.forget(p.wait, key)
	}
	p.wait = nil
}

// wake tells all waiters that key was written.
func (d *data) wake(key string, woken *[]*peer) {
	for l := d.waits[key]; l != nil && l.Len() > 0; {
		d.seen(l.Front().Value.(*missing).waiter, key, woken)
	}
}

// wakeOne tells the waiters, in the order they came, that a queue has an
// element, up to and including the first that need wait for nothing else.
func (d *data) wakeOne(key string, woken *[]*peer) {
	for l := d.waits[key]; l != nil && l.Len() > 0; {
		w := l.Front().Value.(*missing).waiter
		last := len(w.missing) == 1
		d.seen(w, key, woken)
		if last {
			w.peer.handed = key
			return
		}
	}
}

// passOn is for a peer that was woken by a push and does not pop: the next
// waiter may.
func (d *data) passOn(p *peer, woken *[]*peer) {
	if len(d.queues[p.handed]) > 0 {
		d.wakeOne(p.handed, woken)
	}
}

// output is what is to be sent to a peer. Large pieces are kept by reference.
// data fills it with data.mu held, which gives the order; a server takes from
// it at any time.
type output struct {
	mu   sync.Mutex
	full net.Buffers
	tail []byte
}

// copied is the longest value that is copied to stand beside its length, for
// one write. Longer ones go out by writev.
const copied = 16 << 10

func (o *output) bytes(b []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(b) <= copied {
		o.tail = append(o.tail, b...)
		return
	}
	o.full = append(o.full, o.tail, b)
	o.tail = nil
}

func (o *output) byte(b byte) { o.bytes([]byte{b}) }

func (o *output) int64(n int64) { o.bytes(binary.LittleEndian.AppendUint64(nil, uint64(n))) }

func (o *output) blob(b []byte) {
	o.int64(int64(len(b)))
	o.bytes(b)
}

// take empties the output; nil means there was nothing.
func (o *output) take() net.Buffers {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := o.full
	if len(o.tail) > 0 {
		out = append(out, o.tail)
	}
	o.full, o.tail = nil, nil
	return out
}
