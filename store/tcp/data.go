package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/store"
)

// data has a server's keys, queues and waiters. It knows no sockets: do carries out a request and
// appends the reply to the peer's output.
type data struct {
	mu      sync.Mutex
	keys    map[string][]byte
	queues  map[string][][]byte  // none is empty
	waits   map[string]*waitList // none is empty
	lent    map[*byte]*loan      // by a long value's first byte
	bytes   int64                // see cost
	limits  Limits
	memory  int64     // limit of bytes, 0 for none; see charge
	self    greeting  // what HELLO is answered with
	scratch output    // the body of a native reply
	due     []*waiter // native, with nothing missing any more

	listing sync.Mutex // held by the one client that collects keys for a listing
	pacing  sync.Mutex // held during the pause of a listing
}

// Stored slices are never written to below their length, so that replies can
// refer to them after mu is released.

// peer is data's part of one connection.
type peer struct {
	session  *session // for the server; nil in tests
	dialect  *dialect
	out      output
	wait     *waiter      // its WAIT or BARRIER under way, in PyTorch's dialects
	handed   string       // the queue whose push ended its last wait, until it pops
	standing atomic.Int32 // see clients

	// In the native dialect.
	waits  map[uint32]*waiter // by their requests' numbers
	waited int                // their keys
	held   int                // the bytes of those
	wills  map[string]will    // by key
	parked []*waiter          // what could be answered, had out room for it
}

// loan has the peers that are to be sent a stored value, each as often as it is.
type loan struct {
	peers []*peer
	gone  int64 // its bytes once it is stored no more: they count for each of peers
}

// will is a COMPARE_SET to be carried out when the connection has ended.
type will struct{ expected, desired []byte }

// dropWill forgets the will for key, if there is one.
func (p *peer) dropWill(key string) {
	if w, there := p.wills[key]; there {
		p.session.hold(-w.cost(key))
		delete(p.wills, key)
	}
}

func (w will) cost(key string) int64 { return cost(key, w.expected) + int64(len(w.desired)) }

const (
	maxWills = 64      // of one connection
	maxWill  = 4 << 10 // bytes of key and values
)

// waiter is a request that waits for keys.
type waiter struct {
	peer   *peer
	id     uint32
	req    request
	places []place
	left   int // places not left, in PyTorch's dialects
	next   int // the index of the key waited for, in the native one
}

// cost is what w counts in ServerOptions.MaxHeld. A native waiter has a place for one of its keys only, and one with a
// large reply has none.
func (w *waiter) cost() int64 {
	n := perWait + w.req.held() + perKey*len(w.req.keys)
	if w.peer.dialect != native && w.req.query != qMultiGet {
		n += overhead * len(w.req.keys)
	}
	return int64(n)
}

// place is one waiter's place in the list of a key.
type place struct {
	*waiter
	key        string
	prev, next *place
	gone       bool
}

// waitList has the waiters of a key, in the order of their requests.
type waitList struct{ first, last *place }

// overhead is the size counted for a key, a queue or a queued element besides its bytes. It is
// about a map entry with two headers, rounded up as memory is.
const overhead = 128

// perWait and perKey are the sizes counted for a waiter with its places in maps, and for a key besides its bytes.
const (
	perWait = 384
	perKey  = 32
)

func newData(limits Limits, memory int64) *data {
	return &data{
		keys:   make(map[string][]byte),
		queues: make(map[string][][]byte),
		waits:  make(map[string]*waitList),
		lent:   make(map[*byte]*loan),
		limits: limits,
		memory: memory,
	}
}

// do carries out r, request id of p; only the native dialect has ids. It returns the other peers
// that now have output. After an error p's connection must be closed. do does not keep r.
func (d *data) do(p *peer, id uint32, r *request) (woken []*peer, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.settle()
	if p.dialect == native {
		return woken, d.take(p, id, r, &woken)
	}
	if r.query != qQueuePop || r.keys[0] != p.handed {
		d.passOn(p, &woken)
	}
	p.handed = ""

	// A client that cannot cancel a wait has given it up when it sends a request. It would take the answer to the
	// wait for that to the request.
	if p.dialect.number(qCancelWait) < 0 {
		d.drop(p.wait)
	}
	if d.large(r) > 0 {
		d.park(&waiter{peer: p, req: *r.clone()})
		return woken, nil
	}
	return woken, d.apply(p, r, &p.out, &woken)
}

// leave removes a peer whose connection ended.
func (d *data) leave(p *peer) (woken []*peer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer d.settle()
	d.drop(p.wait)
	for _, w := range p.waits {
		d.drop(w)
	}
	p.parked = nil
	d.passOn(p, &woken)
	for key, w := range p.wills {
		// There is nobody to tell that it is refused, for example by the limit of memory.
		_ = d.apply(p, &request{query: qCompareSet, keys: one(key), vals: [][]byte{w.expected, w.desired}}, &p.out, &woken)
	}
	p.wills = nil
	d.takeBack(p, p.out.take().pieces)
	return woken
}

// listed is how many keys a listing takes while it holds mu, for about 40 microseconds.
const listed = 512

// A listing pauses after each piece when it has had freePieces. All listings of a server together
// do one piece in a pause. Without it, four clients that list 50 MiB of keys kept all threads
// busy, and Go looks for network events on a busy thread every 10 ms only. See TestAttacks.
const (
	freePieces = 8
	listPause  = 300 * time.Microsecond
)

// pace is called before piece i of a listing.
func (d *data) pace(i int) {
	if i >= freePieces {
		d.pacing.Lock()
		time.Sleep(listPause)
		d.pacing.Unlock()
	}
}

// list returns all keys and the size of a reply with them, 8 bytes and the key for each. It gives
// way to other requests after every few keys. A key that is set or deleted meanwhile may or may
// not be in the list.
func (d *data) list(p *peer, id uint32) (keys []string, size int, woken []*peer, err error) {
	d.listing.Lock()
	defer d.listing.Unlock()
	d.mu.Lock()
	d.passOn(p, &woken)
	p.handed = ""
	d.settle()
	used := p.uses(id)
	keys = make([]string, 0, len(d.keys)+listed)
	d.mu.Unlock()
	if used {
		return nil, 0, woken, idInUse(qListKeys, id)
	}

	// A map may change while it is ranged over.
	next, stop := iter.Pull(maps.Keys(d.keys))
	defer stop()
	more := true
	for piece := 0; more; piece++ {
		d.pace(piece)
		d.mu.Lock()
		for range listed {
			var k string
			if k, more = next(); !more {
				break
			}
			keys = append(keys, k)
			size += 8 + len(k)
		}
		d.mu.Unlock()
		if size > d.limits.Message {
			return nil, 0, woken, fmt.Errorf("%v of more than %d bytes: %w", qListKeys, d.limits.Message, store.ErrTooLarge)
		}
	}
	return keys, size, woken, nil
}

// sent notes that these parts of replies have been sent to p. It answers requests that were deferred because p's
// output was full. If the next reply is large it returns its size: answer is to be called when there is room.
func (d *data) sent(p *peer, pieces []piece) (large int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.takeBack(p, pieces)
	for len(p.parked) > 0 && large == 0 && !p.out.full() {
		if large = d.large(&p.parked[0].req); large == 0 {
			d.unpark(p)
		}
	}
	if len(p.parked) > 0 {
		p.out.hold()
	}
	return large
}

// answer answers the first request that was deferred.
func (d *data) answer(p *peer) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.unpark(p)
}

// The rest is called with mu held.

// park defers the reply to w until p's output has been sent and, if it is large, there is room.
func (d *data) park(w *waiter) {
	p := w.peer
	p.session.hold(w.cost())
	p.parked = append(p.parked, w)
	p.out.hold()
}

// unpark answers the first request that was deferred, unless the connection has ended.
func (d *data) unpark(p *peer) error {
	if len(p.parked) == 0 {
		return nil
	}
	w := p.parked[0]
	p.parked = p.parked[1:]
	p.session.hold(-w.cost())
	var woken []*peer // see settle
	switch {
	case p.dialect != native:
		return d.apply(p, &w.req, &p.out, &woken)
	case d.missing(&w.req) > 0:
		return d.serve(p, w.id, &w.req, &woken)
	}
	return d.reply(p, w.id, &w.req, &woken)
}

// large returns how much memory the reply to r takes, if that is more than others do.
func (d *data) large(r *request) (n int64) {
	if r.query != qMultiGet {
		return 0
	}
	for _, k := range r.keys {
		if size := len(d.keys[k]); size <= copied {
			n += 8 + int64(size)
		} else {
			n += 8 + perPiece
		}
	}
	if n < batch {
		n = 0
	}
	return n
}

// lend adds a stored value to a reply.
func (d *data) lend(p *peer, out *output, value []byte) {
	out.blob(value, true)
	if len(value) <= copied {
		return
	}
	l := d.lent[&value[0]]
	if l == nil {
		l = new(loan)
		d.lent[&value[0]] = l
	}
	l.peers = append(l.peers, p)
}

// takeBack ends the loans to p that these pieces are.
func (d *data) takeBack(p *peer, pieces []piece) {
	for _, v := range pieces {
		if !v.stored {
			continue
		}
		l := d.lent[&v.bytes[0]]
		last := len(l.peers) - 1
		for i := last; i >= 0; i-- { // who reads is among the last
			if l.peers[i] == p {
				l.peers[i], l.peers = l.peers[last], l.peers[:last]
				p.session.hold(-l.gone)
				break
			}
		}
		if len(l.peers) == 0 {
			delete(d.lent, &v.bytes[0])
		}
	}
}

// drops notes that a value is stored no more.
func (d *data) drops(value []byte) {
	if len(value) <= copied {
		return
	}
	if l := d.lent[&value[0]]; l != nil {
		l.gone = int64(len(value))
		for _, p := range l.peers {
			p.session.hold(l.gone)
		}
	}
}

// take carries out a new request of the native dialect.
func (d *data) take(p *peer, id uint32, r *request, woken *[]*peer) error {
	if r.query != qGiveUp && p.uses(id) {
		return idInUse(r.query, id)
	}
	return d.serve(p, id, r, woken)
}

func idInUse(q query, id uint32) error {
	return malformedf("%v with id %d, which a request that waits has", q, id)
}

// uses reports whether a native request with this id has no reply yet.
func (p *peer) uses(id uint32) bool {
	return p.waits[id] != nil || slices.ContainsFunc(p.parked, func(w *waiter) bool { return w.id == id })
}

// serve carries out a request of the native dialect, whose replies are framed.
func (d *data) serve(p *peer, id uint32, r *request, woken *[]*peer) error {
	switch r.query {
	case qGiveUp:
		d.giveUp(p, uint32(r.num))
		return nil
	case qWait, qGet, qMultiGet, qQueueTake:
		if missing := d.missing(r); missing > 0 {
			if p.waited+len(r.keys) > d.limits.Keys || p.held+r.held() > d.limits.Message {
				err := fmt.Errorf("%v: this connection waits for %d keys of %d bytes already: %w", r.query, p.waited, p.held, store.ErrTooLarge)
				p.out.frame(id, refused(err), []byte(err.Error()), nil)
			} else {
				d.await(&waiter{peer: p, id: id, req: *r.clone()}, missing)
			}
			return nil
		}
	}
	if d.large(r) > 0 {
		d.park(&waiter{peer: p, id: id, req: *r.clone()})
		return nil
	}
	return d.reply(p, id, r, woken)
}

// reply is serve for a request that need not wait.
func (d *data) reply(p *peer, id uint32, r *request, woken *[]*peer) error {
	body := &d.scratch
	err := d.apply(p, r, body, woken)
	if err == nil && uint64(body.size)+frameHead > math.MaxUint32 {
		err = fmt.Errorf("%v: a reply of %d bytes: %w", r.query, body.size, store.ErrTooLarge)
	}
	if err == nil {
		p.out.frame(id, done, nil, body)
	} else if status := refused(err); status != done {
		p.out.frame(id, status, []byte(err.Error()), nil)
		err = nil
		d.takeBack(p, body.pieces)
	}
	body.reset()
	return err
}

// refused returns the status of a native reply for err, or done if the connection must end.
func refused(err error) byte {
	switch {
	case errors.Is(err, store.ErrNotNumber):
		return notNumber
	case errors.Is(err, store.ErrTooLarge):
		return tooLarge
	case errors.Is(err, ErrOtherJob):
		return otherJob
	}
	return done
}

// missing returns how many keys r has to wait for. A key that r names twice counts twice.
func (d *data) missing(r *request) (n int) {
	for _, k := range r.keys {
		if !d.there(r.query, k) {
			n++
		}
	}
	return n
}

// there reports whether key exists for a query.
func (d *data) there(q query, key string) bool {
	ok := false
	switch q {
	case qGet, qMultiGet:
		_, ok = d.keys[key]
	case qQueueTake:
		ok = len(d.queues[key]) > 0
	case qWait:
		ok = d.has(key)
	}
	return ok
}

// giveUp cancels a waiting request. Its reply has the indices of the missing keys. A request that
// no longer waits has its reply already.
func (d *data) giveUp(p *peer, id uint32) {
	w := p.waits[id]
	if w == nil {
		return
	}
	var missing []byte
	for i, k := range w.req.keys {
		if !d.there(w.req.query, k) {
			missing = binary.LittleEndian.AppendUint32(missing, uint32(i))
		}
	}
	d.drop(w)
	p.out.frame(id, givenUp, missing, nil)
}

// apply carries out r at once and puts its reply into out.
func (d *data) apply(p *peer, r *request, out *output, woken *[]*peer) error {
	var key string
	if len(r.keys) > 0 {
		key = r.keys[0]
	}
	switch r.query {
	case qSet:
		return d.set(p, key, r.vals[0], woken)

	case qCompareSet:
		held, ok := d.keys[key]
		expected, desired := r.vals[0], r.vals[1]
		switch {
		case ok && !bytes.Equal(held, expected):
			d.lend(p, out, held)
		case !ok && len(expected) > 0:
			out.blob(expected, false)
		default:
			if !ok || !bytes.Equal(held, desired) {
				if err := d.set(p, key, desired, woken); err != nil {
					return err
				}
			}
			d.lend(p, out, d.keys[key])
		}

	case qGet:
		d.lend(p, out, d.keys[key])

	case qAdd:
		n, err := d.add(p, key, r.num)
		if err != nil {
			return err
		}
		out.int64(n)
		d.wake(key, woken)

	case qCheck:
		answer := byte(ready)
		for _, k := range r.keys {
			if !d.has(k) {
				answer = notReady
				break
			}
		}
		out.bytes(answer)

	case qWait:
		if p.dialect != native {
			d.drop(p.wait)
			if missing := d.missing(r); missing > 0 {
				d.await(&waiter{peer: p, req: *r.clone()}, missing)
				return nil
			}
		}
		out.bytes(ready)

	case qNumKeys:
		out.int64(int64(len(d.keys)))

	case qDelete:
		held, ok := d.keys[key]
		n := int64(0)
		if ok {
			n = 1
			d.bytes -= cost(key, held)
			d.drops(held)
			delete(d.keys, key)
		}
		out.int64(n)

	case qAppend:
		held := d.keys[key]
		if n := len(held) + len(r.vals[0]); n > d.limits.Message {
			return fmt.Errorf("APPEND to %q would make a value of %d bytes: %w", key, n, store.ErrTooLarge)
		}
		return d.set(p, key, append(held, r.vals[0]...), woken)

	case qMultiGet:
		size := 0
		for _, k := range r.keys {
			size += len(d.keys[k])
		}
		if size > d.limits.Message {
			return fmt.Errorf("MULTI_GET of %d bytes: %w", size, store.ErrTooLarge)
		}
		out.reserve(int(d.large(r)))
		for _, k := range r.keys {
			d.lend(p, out, d.keys[k])
		}

	case qMultiSet:
		for i, k := range r.keys {
			if err := d.set(p, k, r.vals[i], woken); err != nil {
				return err
			}
		}

	case qCancelWait:
		d.drop(p.wait)
		out.bytes(cancelled)

	case qPing:
		out.uint32(uint32(r.num))

	case qQueuePush:
		q, ok := d.queues[key]
		more := cost("", r.vals[0])
		if !ok {
			more += cost(key, nil)
		}
		if err := d.charge(p, key, more); err != nil {
			return err
		}
		d.queues[key] = append(q, r.vals[0])
		d.wakeOne(key, woken)

	case qQueuePop, qQueueTake:
		q := d.queues[key]
		out.int64(int64(len(q)))
		if len(q) == 0 {
			break
		}
		out.blob(q[0], false)
		d.bytes -= cost("", q[0])
		q[0] = nil
		if d.queues[key] = q[1:]; len(q) == 1 {
			d.bytes -= cost(key, nil)
			delete(d.queues, key)
		}

	case qQueueLen:
		out.int64(int64(len(d.queues[key])))

	case qBarrier:
		d.drop(p.wait)
		n, err := d.add(p, key, 1)
		if err != nil {
			return err
		}
		if n < r.num && r.num > 1 {
			d.await(&waiter{peer: p, req: *r.clone()}, 1)
			return nil
		}
		out.bytes(ready)
		d.wake(key, woken)

	case qWatch:
		out.bytes(watched)

	case qSetWill:
		if _, there := p.wills[key]; !there && len(p.wills) == maxWills {
			return fmt.Errorf("this connection has %d wills: %w", maxWills, store.ErrTooLarge)
		}
		if n := len(key) + len(r.vals[0]) + len(r.vals[1]); n > maxWill {
			return fmt.Errorf("a will of %d bytes, the limit is %d: %w", n, maxWill, store.ErrTooLarge)
		}
		if p.wills == nil {
			p.wills = make(map[string]will)
		}
		p.dropWill(key)
		p.wills[key] = will{r.vals[0], r.vals[1]}
		p.session.hold(p.wills[key].cost(key))

	case qDropWill:
		p.dropWill(key)

	case qHello:
		if err := d.self.admit(key); err != nil {
			return err
		}
		out.blob(d.self.encode(), false)

	default:
		return malformedf("unexpected %v", r.query)
	}
	return nil
}

func cost(key string, value []byte) int64 { return int64(len(key) + len(value) + overhead) }

// charge counts n bytes that p adds to a key or queue. Ranks may use a quarter more than the
// limit, so that other clients cannot fill the store. So may a client that joins.
func (d *data) charge(p *peer, key string, n int64) error {
	limit := d.memory
	if p.standing.Load() >= claimed || strings.HasPrefix(key, workers) {
		limit += limit / 4
	}
	if n > 0 && d.memory > 0 && d.bytes+n > limit {
		return fmt.Errorf("keys and values: %w of %d bytes", store.ErrTooLarge, d.memory)
	}
	d.bytes += n
	return nil
}

func (d *data) has(key string) bool {
	_, ok := d.keys[key]
	return ok || len(d.queues[key]) > 0
}

func (d *data) put(p *peer, key string, value []byte) error {
	more := cost(key, value)
	if held, ok := d.keys[key]; ok {
		more -= cost(key, held)
	}
	if err := d.charge(p, key, more); err != nil {
		return err
	}
	if held := d.keys[key]; len(held) > 0 && (len(value) == 0 || &held[0] != &value[0]) { // not in place, as APPEND may be
		d.drops(held)
	}
	d.keys[key] = value
	return nil
}

func (d *data) set(p *peer, key string, value []byte, woken *[]*peer) error {
	err := d.put(p, key, value)
	if err == nil {
		d.wake(key, woken)
	}
	return err
}

func (d *data) add(p *peer, key string, delta int64) (int64, error) {
	var n int64
	if held, ok := d.keys[key]; ok {
		var err error
		if n, err = store.ParseNumber(held); err != nil {
			return 0, fmt.Errorf("ADD to %q: %w", key, err)
		}
	}
	n += delta
	return n, d.put(p, key, strconv.AppendInt(nil, n, 10))
}

// await makes w wait for its missing keys. In PyTorch's dialects w has a place in the list of
// each of them, because there a key counts as seen even if it is deleted again. missing is the
// number of places. In the native dialect w is in the list of one missing key at a time. If n
// ranks each wait for all n keys, that costs n places and not n*n.
func (d *data) await(w *waiter, missing int) {
	p := w.peer
	p.session.hold(w.cost())
	if p.dialect == native {
		w.places = make([]place, 1)
		if p.waits == nil {
			p.waits = make(map[uint32]*waiter)
		}
		p.waits[w.id] = w
		p.waited += len(w.req.keys)
		p.held += w.req.held()
		d.advance(w)
		return
	}
	w.places = make([]place, 0, missing)
	for _, k := range w.req.keys {
		if d.there(w.req.query, k) {
			continue
		}
		if l := d.waits[k]; l != nil && l.last.waiter == w {
			continue // the second time in this request
		}
		w.places = append(w.places, place{})
		d.standInLine(w, &w.places[len(w.places)-1], k)
	}
	w.left = len(w.places)
	p.wait = w
}

// advance makes w, a native waiter, wait for its next missing key, and reports whether there is
// one.
func (d *data) advance(w *waiter) bool {
	for ; w.next < len(w.req.keys); w.next++ {
		if k := w.req.keys[w.next]; !d.there(w.req.query, k) {
			d.standInLine(w, &w.places[0], k)
			return true
		}
	}
	return false
}

func (d *data) standInLine(w *waiter, at *place, key string) {
	l := d.waits[key]
	if l == nil {
		l = new(waitList)
		d.waits[key] = l
	}
	*at = place{waiter: w, key: key, prev: l.last}
	if l.last == nil {
		l.first = at
	} else {
		l.last.next = at
	}
	l.last = at
}

// seen removes a waiter from one list, and answers it if that was its last place.
func (d *data) seen(at *place, woken *[]*peer) {
	d.leaveLine(at)
	w := at.waiter
	p := w.peer
	if p.dialect == native {
		if !d.advance(w) {
			*woken = append(*woken, p)
			d.forget(w)
			d.due = append(d.due, w)
		}
		return
	}
	if w.left--; w.left == 0 {
		*woken = append(*woken, p)
		d.forget(w)
		p.out.bytes(ready)
	}
}

// settle answers native requests whose keys all exist. If a key was deleted meanwhile, the
// request waits again.
func (d *data) settle() {
	var woken []*peer // requests that wait wake no others
	for i, w := range d.due {
		d.due[i] = nil
		if p := w.peer; p.out.full() {
			d.park(w)
		} else {
			d.serve(p, w.id, &w.req, &woken)
		}
	}
	d.due = d.due[:0]
}

func (d *data) leaveLine(at *place) {
	l := d.waits[at.key]
	if at.prev == nil {
		l.first = at.next
	} else {
		at.prev.next = at.next
	}
	if at.next == nil {
		l.last = at.prev
	} else {
		at.next.prev = at.prev
	}
	if l.first == nil {
		delete(d.waits, at.key)
	}
	at.gone = true
}

// forget removes w from its peer's list.
func (d *data) forget(w *waiter) {
	p := w.peer
	p.session.hold(-w.cost())
	if p.dialect != native {
		p.wait = nil
		return
	}
	delete(p.waits, w.id)
	p.waited -= len(w.req.keys)
	p.held -= w.req.held()
}

// drop cancels a wait; nil is none.
func (d *data) drop(w *waiter) {
	if w == nil {
		return
	}
	for i := range w.places {
		if at := &w.places[i]; !at.gone {
			d.leaveLine(at)
		}
	}
	d.forget(w)
}

// wake notifies all waiters of an ordinary key that it was written.
func (d *data) wake(key string, woken *[]*peer) {
	l := d.waits[key]
	if l == nil {
		return
	}
	for at := l.first; at != nil; {
		next := at.next
		if at.req.query != qQueueTake {
			d.seen(at, woken)
		}
		at = next
	}
}

// wakeOne notifies the waiters of a queue that it has an element, in their order. It stops after
// the first that waits for no other key and may pop the element. In the native dialect that
// waiter is a QUEUE_TAKE, and gets the element.
func (d *data) wakeOne(key string, woken *[]*peer) {
	l := d.waits[key]
	if l == nil {
		return
	}
	for at := l.first; at != nil; {
		next, w := at.next, at.waiter
		switch {
		case w.req.query == qGet || w.req.query == qMultiGet || w.req.query == qBarrier:
		case w.req.query == qQueueTake:
			full := w.peer.out.full() // then it may not read for long
			d.seen(at, woken)
			if !full {
				return
			}
		default:
			last := w.left == 1 && w.peer.dialect != native
			d.seen(at, woken)
			if last {
				w.peer.handed = key
				return
			}
		}
		at = next
	}
}

// passOn wakes the next waiter when a peer was woken by a push and does not pop.
func (d *data) passOn(p *peer, woken *[]*peer) {
	if p.handed != "" && len(d.queues[p.handed]) > 0 {
		d.wakeOne(p.handed, woken)
	}
}

// output has the bytes to send to a peer. Long values are kept by reference. data fills it with
// data.mu held, which gives the order; a server takes from it at any time.
type output struct {
	mu sync.Mutex
	replies
}

// replies are what an output has.
type replies struct {
	own     *chunk // all bytes but those of pieces
	pieces  []piece
	size    int
	loose   int  // bytes of pieces that are not stored
	counted int  // bytes in ServerOptions.MaxHeld
	held    bool // more can come once this is sent
}

// piece is a long part of replies, which is not copied.
type piece struct {
	at     int // so many bytes of own come before
	bytes  []byte
	stored bool // see data.lend
}

// perPiece is the size counted for a piece besides its bytes: here, in a loan and in the call that sends it.
const perPiece = 160

// chunk is a reusable piece of output.
type chunk struct{ b []byte }

// batch is how much of replies, besides stored values, is sent before the next request of the same client is carried
// out. A client that does not read costs about this much. Two batches fit into a chunk that is used again.
const batch = 1 << 10

var chunks = sync.Pool{New: func() any { return &chunk{make([]byte, 0, batch)} }}

func (c *chunk) free() {
	if c != nil && cap(c.b) <= 2*batch {
		c.b = c.b[:0]
		chunks.Put(c)
	}
}

// copied is the longest value that is copied next to its length. Longer ones go out by writev.
const copied = batch

// room returns the chunk to append n bytes to. It is called with mu held.
func (o *output) room(n int) *chunk {
	if o.own == nil {
		o.own = chunks.Get().(*chunk)
	}
	o.size += n
	return o.own
}

// reserve makes room for n bytes in own.
func (o *output) reserve(n int) {
	o.mu.Lock()
	c := o.room(0)
	c.b = slices.Grow(c.b, n)
	o.mu.Unlock()
}

// add adds b, maybe by reference. It is called with mu held.
func (o *output) add(b []byte, stored bool) {
	c := o.room(len(b))
	if len(b) <= copied {
		c.b = append(c.b, b...)
		return
	}
	o.pieces = append(o.pieces, piece{len(c.b), b, stored})
	if !stored {
		o.loose += len(b)
	}
}

func (o *output) bytes(b ...byte) {
	o.mu.Lock()
	c := o.room(len(b))
	c.b = append(c.b, b...) // b is not kept
	o.mu.Unlock()
}

func (o *output) uint32(n uint32) { o.bytes(byte(n), byte(n>>8), byte(n>>16), byte(n>>24)) }

func (o *output) int64(n int64) {
	o.uint32(uint32(n))
	o.uint32(uint32(n >> 32))
}

// blob adds a value, which may be a stored one, with its length.
func (o *output) blob(b []byte, stored bool) {
	o.int64(int64(len(b)))
	o.mu.Lock()
	o.add(b, stored)
	o.mu.Unlock()
}

// frame adds a native reply, whose body is text or else body. It may take body's chunk.
func (o *output) frame(id uint32, status byte, text []byte, body *output) {
	size := len(text)
	if body != nil {
		size = body.size
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.room(4 + frameHead)
	c.b = binary.LittleEndian.AppendUint32(c.b, uint32(frameHead+size))
	c.b = binary.LittleEndian.AppendUint32(c.b, id)
	c.b = append(c.b, status)
	o.add(text, false)
	if body == nil || body.own == nil {
		return
	}
	own, at := body.own.b, 0
	for _, v := range body.pieces {
		o.add(own[at:v.at], false)
		o.add(v.bytes, v.stored)
		at = v.at
	}
	o.add(own[at:], false)
	if len(own) > copied {
		body.own = nil // parts of it are o's now
	}
}

// reset empties the output for its own use again.
func (o *output) reset() {
	o.own.free()
	o.replies = replies{}
}

// cost is how much memory r takes, but for stored values.
func (r *replies) cost() int {
	n := r.loose + perPiece*len(r.pieces)
	if r.own != nil {
		n += len(r.own.b)
	}
	return n
}

// full reports whether what there is has to be sent before more is added.
func (o *output) full() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.held || o.cost() >= batch
}

// hold notes that there will be more once this is sent.
func (o *output) hold() {
	o.mu.Lock()
	o.held = true
	o.mu.Unlock()
}

// count returns how many bytes are to be counted in addition to room, if there is a batch.
func (o *output) count(room int64) (n int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.counted += int(room)
	if all := o.cost(); all >= batch {
		all += cap(o.own.b) - len(o.own.b)
		n = int64(all - o.counted)
		o.counted = all
	}
	return n
}

// take empties the output. The caller sends it, and frees own.
func (o *output) take() replies {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.replies
	o.replies = replies{}
	return r
}

// send writes r.
func (r *replies) send(w io.Writer) error {
	own, at := r.own.b, 0
	if r.pieces == nil {
		_, err := w.Write(own)
		return err
	}
	all := make(net.Buffers, 0, 2*len(r.pieces)+1)
	for _, v := range r.pieces {
		all = append(all, own[at:v.at], v.bytes)
		at = v.at
	}
	all = append(all, own[at:])
	_, err := all.WriteTo(w)
	return err
}
