package tcp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/store"
)

// offer is the upper half of the nonce that offers the native dialect. accept is the bits that
// change in the answer. A PyTorch client's nonce is its process id, which is never so large. The
// third byte has its top bit set in every nonce. A server of PyTorch up to 2.0 takes VALIDATE and PING for a SET and
// the length of its key. With that bit the length is impossible, and the server closes the connection. Without
// it, the server may try to allocate that much.
//
// Releases before HELLO offered 0xc1d0, those before SET_WILL 0xc1d1. Beside one of them both
// sides speak PyTorch's protocol.
const (
	offer  = 0xc1d2
	accept = 1 << 16
)

// frameHead is what n counts of a reply without body.
const frameHead = 5

// Statuses.
const (
	done byte = iota
	givenUp
	notNumber
	tooLarge
	otherJob
)

// offered reports whether req, the first after VALIDATE, offers the native dialect and the server
// accepts.
func (c *session) offered(req *request) bool {
	return req.query == qPing && uint32(req.num)>>16 == offer && c.peer.dialect == pytorch && !c.server.opts.plain
}

// cut turns the end of a stream into io.ErrUnexpectedEOF, in the middle of a message.
func cut(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// mux is a client's connection in the native dialect, which any number of calls share. One
// goroutine writes their requests, all pending ones at once, and one reads the replies.
//
// A client and a server of this package speak the native dialect to each other. A client offers
// it with the nonce of the PING after VALIDATE. A server that accepts answers with another
// number. PyTorch's server echoes the nonce.
//
//	request   u32 n, u32 id, message         n counts what follows it
//	reply     u32 n, u32 id, u8 status, body
//
// A message is one of PyTorch's. Each has one reply, in any order. If the status is done,
// the body is PyTorch's reply, or empty if that has none, as for SET. Differences:
//
//   - GET, MULTI_GET and WAIT wait for their keys, any number of them at once. For GET and
//     MULTI_GET a queue is not a key.
//   - QUEUE_TAKE is QUEUE_POP of a queue that it waits for.
//   - GIVE_UP has the id of a waiting request and no reply. That request's reply then has the
//     status givenUp and the indices, u32 each, of the missing keys.
//   - A refused request gets a status and a text with the reason, and the connection goes on.
//   - An id is in use until its reply is sent. The server closes the connection of a client that
//     uses the id of a waiting request again.
//   - CANCEL_WAIT and BARRIER do not exist.
//   - SET_WILL is a COMPARE_SET that the server carries out when the connection ends, unless
//     DROP_WILL comes before. A connection has at most 64, of at most 4 KiB each.
//   - HELLO, the client's first request, names its job. The reply has the server's incarnation
//     and job. A client of another job is refused.
type mux struct {
	c     *conn
	grace time.Duration // how long a call that is given up may be held up
	ended sync.WaitGroup
	kick  chan struct{} // something is to be written, or the end has come

	mu    sync.Mutex
	err   error         // why it has ended
	out   []byte        // not yet written
	room  chan struct{} // closed when out is taken; nil without waiters
	calls []*call       // by id
	free  []uint32      // ids
	live  int           // calls without a reply
	ups   int           // GIVE_UPs that have not been written
}

// call is one request under way.
type call struct {
	query query
	keys  int
	reply
	missing []uint32 // indices of keys, if it was given up
	err     error
	over    chan struct{} // has a value once the above is filled in
	timer   *time.Timer
	buf     []byte

	// abandoned says that the caller has gone before the reply. An element of a queue then goes
	// back.
	abandoned bool
	queue     string
}

var callPool = sync.Pool{New: func() any {
	t := time.NewTimer(math.MaxInt64)
	t.Stop()
	return &call{over: make(chan struct{}, 1), timer: t}
}}

var (
	// errMuxEnded says that nothing was sent, as the connection had ended.
	errMuxEnded = errors.New("the connection has ended")
	errGivenUp  = errors.New("the wait was given up")
)

// pending is how many bytes may wait to be written before further calls block.
const pending = 1 << 20

// direct is the largest request that a caller writes itself, if no other is under way. The server
// has then read all earlier requests, so the socket's buffers have room and the write does not
// block. A GIVE_UP that waits to be written must go first: its id may be that of the new request.
const direct = 4 << 10

func newMux(c *conn, ended func()) *mux {
	m := &mux{c: c, grace: grace, kick: make(chan struct{}, 1)}
	m.ended.Go(m.write)
	m.ended.Go(func() {
		m.fail(m.read())
		ended()
	})
	return m
}

// close ends all calls with err and returns when the goroutines have ended.
func (m *mux) close(err error) {
	m.fail(err)
	m.ended.Wait()
}

func (m *mux) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return
	}
	m.err = err
	for _, c := range m.calls {
		if c != nil && !c.abandoned {
			c.err = err
			c.over <- struct{}{}
		}
	}
	m.calls, m.free, m.out = nil, nil, nil
	if m.room != nil {
		close(m.room)
		m.room = nil
	}
	m.c.Close()
	m.wakeWriter()
}

func (m *mux) wakeWriter() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// write is the goroutine that writes.
func (m *mux) write() {
	var spare []byte
	for range m.kick {
		m.mu.Lock()
		many := m.live > 1
		m.mu.Unlock()
		if many {
			runtime.Gosched() // others that are about to call come along
		}
		m.mu.Lock()
		b, ups := m.out, m.ups
		m.out = spare[:0]
		if m.room != nil {
			close(m.room)
			m.room = nil
		}
		err := m.err
		m.mu.Unlock()
		if err != nil {
			return
		}
		if len(b) > 0 {
			if _, err := m.c.Write(b); err != nil {
				m.fail(err)
				return
			}
		}
		if ups > 0 {
			m.mu.Lock()
			m.ups -= ups
			m.mu.Unlock()
		}
		if spare = b; cap(spare) > keptBuffer {
			spare = nil
		}
	}
}

// read is the goroutine that reads; it returns why it ended.
func (m *mux) read() error {
	r := m.c.r
	for {
		n, err := readUint32(r)
		if err != nil {
			return err
		}
		id, err := readUint32(r)
		if err != nil {
			return cut(err)
		}
		status, err := r.ReadByte()
		if err != nil {
			return cut(err)
		}
		m.mu.Lock()
		var c *call
		var q query
		var keys int
		if int(id) < len(m.calls) && m.calls[id] != nil {
			c = m.calls[id]
			q, keys = c.query, c.keys
		}
		m.mu.Unlock()
		if c == nil || n < frameHead {
			return malformedf("a reply of %d bytes to request %d, which there is not", n, id)
		}
		// The caller may abandon c meanwhile.
		got, err := readNative(r, q, keys, status, n-frameHead)
		if err != nil {
			return cut(err)
		}
		m.mu.Lock()
		if m.err != nil {
			m.mu.Unlock()
			return m.err
		}
		c = m.calls[id]
		m.calls[id] = nil
		m.free = append(m.free, id)
		m.live--
		if !c.abandoned {
			c.reply, c.missing, c.err = got.reply, got.missing, got.err
			c.over <- struct{}{}
		} else if c.queue != "" && got.err == nil && got.num > 0 {
			m.send(m.place(&call{query: qQueuePush, abandoned: true}), &request{query: qQueuePush, keys: one(c.queue), vals: [][]byte{got.value}})
		}
		m.mu.Unlock()
		if r.Buffered() == 0 {
			runtime.Gosched() // the callers go on before this looks for more
		}
	}
}

// outcome is the content of a native reply.
type outcome struct {
	reply
	missing []uint32
	err     error // of the request, not of reading
}

// maxText bounds the text of a refusal that is kept.
const maxText = 1 << 10

// readNative reads the rest of a reply, n bytes.
func readNative(r *bufio.Reader, q query, keys int, status byte, n uint32) (o outcome, err error) {
	switch status {
	case done:
		o.reply, err = readReply(r, q, keys, int64(n))
		if err == nil && o.size(q) != uint64(n) {
			err = malformedf("a reply to %v of %d bytes in a frame of %d", q, o.size(q), n)
		}
		return o, err
	case givenUp:
		if n%4 != 0 || int64(n/4) > int64(keys) {
			return o, malformedf("a reply to %v about %d keys that misses %d bytes of them", q, keys, n)
		}
		for range n / 4 {
			i, err := readUint32(r)
			if err == nil && int64(i) >= int64(keys) {
				err = malformedf("a reply to %v about %d keys that misses the one with index %d", q, keys, i)
			}
			if err != nil {
				return o, err
			}
			o.missing = append(o.missing, i)
		}
		o.err = errGivenUp
		return o, nil
	case notNumber, tooLarge, otherJob:
		if n > maxText {
			return o, malformedf("a refusal of %v in %d bytes", q, n)
		}
		text, err := readBytes(r, int(n), nil)
		if err != nil {
			return o, err
		}
		why := store.ErrNotNumber
		switch status {
		case tooLarge:
			why = store.ErrTooLarge
		case otherJob:
			why = ErrOtherJob
		}
		o.err = &refusal{string(text), why}
		return o, nil
	}
	return o, malformedf("a reply to %v with status %d", q, status)
}

// refusal is the error of a request that the server did not carry out.
type refusal struct {
	text string
	why  error
}

func (r *refusal) Error() string { return "the server refused: " + r.text }
func (r *refusal) Unwrap() error { return r.why }

// place gives c an id, with mu held.
func (m *mux) place(c *call) uint32 {
	var id uint32
	if n := len(m.free); n > 0 {
		id = m.free[n-1]
		m.free = m.free[:n-1]
		m.calls[id] = c
	} else {
		id = uint32(len(m.calls))
		m.calls = append(m.calls, c)
	}
	m.live++
	return id
}

// send queues a request for the goroutine that writes. mu is held.
func (m *mux) send(id uint32, req *request) {
	m.out = appendFrame(m.out, id, req)
	m.wakeWriter()
}

func appendFrame(b []byte, id uint32, req *request) []byte {
	b = slices.Grow(b, 8+req.size())
	b = binary.LittleEndian.AppendUint32(b, uint32(4+req.size()))
	b = binary.LittleEndian.AppendUint32(b, id)
	b, _ = req.append(b, native)
	return b
}

// do carries out req. limit is the store's timeout if it applies, else 0. The error errMuxEnded
// means that nothing was sent. missing has the indices of the missing keys when a wait for
// several ran out of time.
func (m *mux) do(ctx context.Context, limit time.Duration, req *request) (rep reply, missing []uint32, err error) {
	if uint64(req.size())+4 > math.MaxUint32 {
		return rep, nil, fmt.Errorf("a request of %d bytes: %w", req.size(), store.ErrTooLarge)
	}
	c := callPool.Get().(*call)
	c.query, c.keys = req.query, len(req.keys)
	var timeout <-chan time.Time
	if limit > 0 {
		c.timer.Reset(limit)
		timeout = c.timer.C
	}
	m.mu.Lock()
	for m.err == nil && len(m.out) > pending {
		if m.room == nil {
			m.room = make(chan struct{})
		}
		room := m.room
		m.mu.Unlock()
		select {
		case <-room:
		case <-timeout:
			err = store.ErrTimeout
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			c.put()
			return rep, nil, err
		}
		m.mu.Lock()
	}
	if m.err != nil {
		m.mu.Unlock()
		c.put()
		return rep, nil, errMuxEnded
	}
	id := m.place(c)
	if m.live == 1 && m.ups == 0 && req.size() <= direct {
		m.mu.Unlock()
		c.buf = appendFrame(c.buf[:0], id, req)
		if _, err := m.c.Write(c.buf); err != nil {
			m.fail(err)
		}
	} else {
		m.send(id, req)
		m.mu.Unlock()
	}

	select {
	case <-c.over:
	case <-timeout:
		err = store.ErrTimeout
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err == nil || m.giveUp(c, id, req, err) {
		if rep, missing = c.reply, c.missing; c.err != errGivenUp || err == nil {
			err = c.err
		}
	}
	c.put()
	return rep, missing, err
}

// put makes c ready for another call. No other goroutine may hold it.
func (c *call) put() {
	c.timer.Stop()
	c.reply, c.missing, c.err = reply{}, nil, nil
	callPool.Put(c)
}

// giveUp ends a call for the reason why, when the caller stops waiting. It reports whether a
// reply has come; if not, c must not be used again.
//
// Most calls end at once. Two wait for the server's answer, at most for grace. A pop learns
// whether it got an element. A wait for several keys whose time is over learns which are missing.
func (m *mux) giveUp(c *call, id uint32, req *request, why error) bool {
	m.mu.Lock()
	if m.err != nil || m.calls[id] != c {
		m.mu.Unlock()
		<-c.over
		return true
	}
	ask := req.query == qQueueTake || len(req.keys) > 1 && !errors.Is(why, context.Canceled)
	switch req.query {
	case qWait, qGet, qMultiGet, qQueueTake:
		m.ups++
		m.send(id, &request{query: qGiveUp, num: int64(id)})
	default:
		ask = false
	}
	if ask {
		m.mu.Unlock()
		c.timer.Reset(m.grace)
		select {
		case <-c.over:
			return true
		case <-c.timer.C:
		}
		m.mu.Lock()
		if m.err != nil || m.calls[id] != c {
			m.mu.Unlock()
			<-c.over
			return true
		}
	}
	gone := &call{query: c.query, keys: c.keys, abandoned: true}
	if answers[req.query] == popped {
		gone.queue = req.keys[0]
	}
	m.calls[id] = gone
	m.mu.Unlock()
	return false
}

// validate is the handshake. It may offer the native dialect: if the server accepts, c speaks it. All goes out in one
// write: PyTorch's newer server forgets its handshake when the bytes of VALIDATE arrive in pieces.
func (c *conn) validate(offers bool) error {
	nonce := rand.Uint32() | 0x80<<16 // see offer
	if offers {
		nonce = offer<<16 | nonce&0xffff
	}
	err := c.send(&request{query: qValidate, num: int64(binary.LittleEndian.Uint32(opening[1:]))}, &request{query: qPing, num: int64(nonce)})
	if err != nil {
		return err
	}
	if b, err := c.r.Peek(4); err == nil && string(b) == alert[:4] {
		return errNeedsTLS
	}
	echo, err := readUint32(c.r)
	switch {
	case err != nil:
		return err
	case offers && echo == nonce^accept:
		c.dialect = native
	case echo != nonce:
		return stranger(binary.LittleEndian.AppendUint32(nil, echo))
	}
	return nil
}

// muxed returns the connection that calls share, or a new one if the current one is old, which
// has ended.
func (s *Store) muxed(ctx context.Context, old *mux) (*mux, error) {
	if m := s.mux.Load(); m != old {
		return m, nil
	}
	ctx, cancel := store.WithTimeout(ctx, s.Timeout())
	defer cancel()
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, store.WaitErr(ctx)
	case <-s.ctx.Done():
		return nil, store.ErrClosed
	}
	if m := s.mux.Load(); m != old {
		return m, nil
	}
	c, err := s.connect(ctx)
	if err != nil {
		if why := store.WaitErr(ctx); why != nil && !s.isClosed() {
			err = why
		}
		return nil, err
	}
	if c.dialect != native {
		s.drop(c)
		return nil, fmt.Errorf("the server at %s is of another kind than before", s.dialer.addr)
	}
	return s.share(c), nil
}

// share makes c the connection that calls share.
func (s *Store) share(c *conn) *mux {
	m := newMux(c, func() { s.drop(c) })
	s.mux.Store(m)
	return m
}

// ask is a whole call in the native dialect.
func (s *Store) ask(ctx context.Context, op string, req *request) (reply, error) {
	start := time.Now()
	err := ctx.Err()
	if s.isClosed() {
		err = store.ErrClosed
	}
	if err == nil {
		err = s.limits.check(req)
	}
	var rep reply
	var missing []uint32
	if err == nil {
		limit := max(s.Timeout(), 0)
		if _, ok := ctx.Deadline(); ok {
			limit = 0
		}
		m := s.mux.Load()
		rep, missing, err = m.do(ctx, limit, req)
		if err == errMuxEnded {
			if m, err = s.muxed(ctx, m); err == nil {
				rep, missing, err = m.do(ctx, limit, req)
			}
		}
		if err == errMuxEnded { // twice: the server does not want us
			err = io.EOF
		}
	}
	if err == nil {
		return rep, nil
	}
	names := req.names()
	if missing != nil && len(names) == len(req.keys) { // not for keys of the store itself
		var few []string
		for _, i := range missing {
			if !slices.Contains(few, names[i]) {
				few = append(few, names[i])
			}
		}
		names = few
	}
	return rep, s.fail(ctx, op, names, start, err)
}
