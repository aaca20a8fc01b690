package tcp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/store"
)

// ServerOptions are the options of a server. The zero value serves every supported PyTorch, with
// PyTorch's limits and no authentication.
type ServerOptions struct {
	// Limits bound each client's requests.
	Limits Limits

	// World is the number of the job's ranks. The limits grow with it, up to 1048576. 0 means unknown.
	World int

	// MaxClients is the most connections at a time. One more closes another one, see "Who stays"
	// in the package's documentation. A Store of this package has one, a client of PyTorch's two at most. 0 means
	// 1024 and 64 for each rank of World, or 16384 if World is unknown. It is never more than half of the process's
	// limit of descriptors.
	MaxClients int

	// MaxMemory is the most bytes of keys, values, queues' names and queued elements, each
	// counted with 128 more for its bookkeeping. A request that would go over it is refused.
	// Ranks of the job may go a quarter over it. 0 means 1 GiB.
	MaxMemory int64

	// MaxHeld is the most bytes that the server holds for all clients without a certificate. It counts requests,
	// waits, wills and unread replies, but for the values that are stored. Long values and replies to MULTI_GET wait for
	// room. If there is too little, the server closes connections: see "Who stays". 0 means 4 MiB, and one longest value
	// (Limits.Value, at least 8 MiB) for each rank of World. There it counts 2 ranks at least, and 31 at most. Each pair
	// of ranks has 64 bytes more, because each rank may wait for the keys of all.
	MaxHeld int64

	// OpeningTimeout limits a client's handshake after its first byte: the rest of VALIDATE, or
	// the first request of a client that has no handshake. It also limits the handshake of TLS, from the begin of
	// the connection. 0 means 30 s, enough for two lost packets and a first value of 8
	// MiB at 3 Mbit/s.
	OpeningTimeout time.Duration

	// RequestTimeout limits the time from the first byte of a later request to its last. It also
	// limits the time to read a reply. 0 means 2 minutes, enough for 64 MiB at 5 Mbit/s.
	RequestTimeout time.Duration

	// TLS makes the server speak TLS only, and so to Go clients only.
	TLS *tls.Config

	// Job, if not empty, names the server's job. The server refuses Go clients with another name
	// in Options.Job; the error has both names.
	Job string

	// Logger gets a line at level Info when a client is refused or sends an invalid request, and
	// at level Debug when a client connects or leaves. Nil means no lines.
	Logger *slog.Logger

	plain bool // speak to Go clients as to PyTorch's, for tests
}

// Server is a TCPStore server. Make one with Listen. Its data live until Close.
type Server struct {
	ln   net.Listener
	opts ServerOptions
	data *data

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	clients   *clients
	strangers *strangers.List // with TLS, until they have proved who they are
	accepted  atomic.Int64
}

// Stats are a server's counters.
type Stats struct {
	Clients  int   // connections now
	Accepted int64 // connections since the start, refused ones included
	Refused  int64 // connections that the server closed: too many, not a client, over a limit, a bad request
	Keys     int   // ordinary keys
	Queues   int   // queues with an element
	Waiting  int   // keys with waiters; a Store of this package waits for one key at a time
	Bytes    int64 // as ServerOptions.MaxMemory counts
}

// Listen starts a server on addr, "host:port". Port 0 picks a free one.
//
// It listens on that host only; PyTorch's servers listen on all interfaces. An empty host, as in
// ":29500", means all interfaces, IPv4 and IPv6. ctx bounds the resolution of the host.
func Listen(ctx context.Context, addr string, o ...ServerOptions) (*Server, error) {
	opts := option.Last(o)
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, fmt.Errorf("tcp: server options: %w", err)
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", openfiles.Explain(err))
	}
	s := &Server{
		ln:        ln,
		opts:      opts,
		data:      newData(opts.Limits, opts.MaxMemory),
		clients:   newClients(opts),
		strangers: strangers.New(2 * opts.World),
	}
	s.data.self = greeting{rand.Uint64(), opts.Job}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.wg.Go(s.accept)
	return s, nil
}

func (o ServerOptions) withDefaults() ServerOptions {
	const mostRanks = 31
	o.World = min(o.World, 1<<20) // there are limits that grow with its square
	mostClients := 1 << 14
	if o.World > 0 {
		mostClients = 1<<10 + 64*o.World
	}
	o.Limits = o.Limits.withDefaults()
	o.MaxClients = cmp.Or(o.MaxClients, min(mostClients, cmp.Or(openfiles.Limit(), 1<<15)/2))
	o.MaxMemory = cmp.Or(o.MaxMemory, 1<<30)
	world := int64(o.World)
	o.MaxHeld = cmp.Or(o.MaxHeld, 4<<20+min(max(world, 2), mostRanks)*max(8<<20, int64(o.Limits.Value))+64*world*world)
	o.OpeningTimeout = cmp.Or(o.OpeningTimeout, 30*time.Second)
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 2*time.Minute)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

func (o *ServerOptions) validate() error {
	for _, f := range []struct {
		name string
		n    int64
	}{
		{"World", int64(o.World)}, {"MaxClients", int64(o.MaxClients)}, {"MaxMemory", o.MaxMemory}, {"MaxHeld", o.MaxHeld},
		{"OpeningTimeout", int64(o.OpeningTimeout)}, {"RequestTimeout", int64(o.RequestTimeout)},
	} {
		if f.n < 0 {
			return fmt.Errorf("%s is %d: it must not be negative", f.name, f.n)
		}
	}
	return o.Limits.validate(o.Job)
}

// Addr is the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// isLoopback reports whether only this host can reach the server.
func (s *Server) isLoopback() bool {
	at, ok := s.ln.Addr().(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// lastReplies is how long Close lets replies go out that are due already. Time for which this process
// waits for a CPU does not count.
const lastReplies = 100 * time.Millisecond

// Close ends all connections and returns when the server's goroutines have ended. It deletes the
// data. Clients still get the replies that are due. Of several clients that wait for a key, the
// first one to get it may call Close.
func (s *Server) Close() error {
	s.cancel()
	s.ln.Close()
	late, cancel := cputime.WithTimeout(context.Background(), lastReplies)
	defer cancel()
	s.clients.mu.Lock()
	s.clients.closed = true
	s.strangers.Close()
	sessions := slices.Collect(maps.Keys(s.clients.sessions))
	s.clients.mu.Unlock()
	for _, c := range sessions {
		s.wg.Go(func() {
			stop := context.AfterFunc(late, func() { c.raw.Close() })
			defer stop()
			c.wmu.Lock() // another goroutine may have taken the output, and be about to write it
			defer c.wmu.Unlock()
			c.send()
			c.raw.Close()
		})
	}
	s.wg.Wait()
	return nil
}

// Stats returns the current counters.
func (s *Server) Stats() Stats {
	t, d := s.clients, s.data
	t.mu.Lock()
	st := Stats{Clients: len(t.sessions) + s.strangers.Len(), Accepted: s.accepted.Load(), Refused: t.refused.Load()}
	t.mu.Unlock()
	d.mu.Lock()
	st.Keys, st.Queues, st.Waiting, st.Bytes = len(d.keys), len(d.queues), len(d.waits), d.bytes
	d.mu.Unlock()
	return st
}

func (s *Server) accept() {
	const longest = time.Second
	pause := 5 * time.Millisecond
	var pace strangers.Pace
	for {
		s.clients.hostile.Store(pace.Wait(s.clients.refused.Load()))
		conn, err := s.ln.Accept()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Probably no descriptors are left: new clients wait in the kernel's queue until one
			// leaves.
			s.clients.mu.Lock()
			closed := s.clients.makeRoom()
			s.clients.mu.Unlock()
			s.opts.Logger.Error("tcp store: accept", "err", openfiles.Explain(err), "pause", pause, "closed", closed)
			select {
			case <-time.After(pause):
			case <-s.ctx.Done():
				return
			}
			pause = min(2*pause, longest)
			continue
		}
		pause = 5 * time.Millisecond
		c := &session{server: s, raw: conn, conn: conn}
		c.peer.session, c.req.room = c, c.room
		if s.secured() {
			s.strangers.Add(conn, s.opts.OpeningTimeout)
		} else {
			err = s.clients.enter(c, silent)
		}
		s.accepted.Add(1)
		s.wg.Go(func() { c.serve(err) })
	}
}

// session is the server's side of one connection. One goroutine reads, carries out and answers
// requests. A second one runs while it sends the answer to a wait.
type session struct {
	server *Server
	raw    net.Conn // the socket
	conn   net.Conn // raw, or TLS over it; for the session's own goroutines
	peer   peer
	wmu    sync.Mutex  // held by who writes
	waking atomic.Bool // a goroutine is about to
	account

	// Of the goroutine that reads.
	req     request
	begun   bool  // a part of a request has come
	limited bool  // a read deadline is set
	came    int64 // bytes of the request
	reading int64 // bytes counted for it
}

// buffered is the size of each connection's read buffer. A rendezvous request has about 100
// bytes, and PyTorch's client sends up to 1440 at once. Longer values bypass the buffer.
const buffered = 1 << 10

// serve serves a client, if there was no err.
func (c *session) serve(err error) {
	log := c.server.opts.Logger.With("client", c.raw.RemoteAddr())
	log.Debug("tcp store: client connected")
	if err == nil {
		err = c.run()
	}
	c.raw.Close()
	c.wake(c.server.data.leave(&c.peer))
	if put := c.server.clients.leave(c, !gone(err)); put != nil {
		err = put
	} else if gone(err) {
		log.Debug("tcp store: client left", "err", err)
		return
	}
	log.Info("tcp store: client refused", "err", err)
}

// gone reports whether err means that the connection ended or broke, and not that a request was
// wrong.
func gone(err error) bool {
	var op *net.OpError
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.ErrClosedPipe) ||
		errors.As(err, &op) && !op.Timeout()
}

// secured reports whether clients have to prove who they are.
func (s *Server) secured() bool { return s.opts.TLS != nil }

// prove does the handshake of TLS.
func (c *session) prove() error {
	stop := context.AfterFunc(c.server.ctx, func() { c.raw.Close() })
	defer stop()
	begun := strangers.InHandshake(c.raw)
	t := tls.Server(begun, c.server.opts.TLS)
	if err := t.Handshake(); err != nil {
		var plain tls.RecordHeaderError
		if errors.As(err, &plain) {
			c.alert()
		}
		return fmt.Errorf("TLS: %w", err)
	}
	c.conn = t
	begun.Proved()
	return nil
}

func (c *session) run() error {
	s := c.server
	if s.secured() {
		err := c.prove()
		if !s.strangers.Remove(c.raw) && s.ctx.Err() == nil {
			err = errMadeRoom
		}
		if err != nil {
			return err
		}
		c.raw.SetDeadline(time.Time{})
		as := silent
		if s.opts.TLS.ClientAuth == tls.RequireAndVerifyClientCert {
			as = proved
		}
		if err := s.clients.enter(c, as); err != nil {
			return err
		}
	}
	// Replies are sent before the next read from the socket, so replies to requests that arrived
	// together go out together.
	r := bufio.NewReaderSize(&flushed{c}, buffered)
	if err := c.open(r); err != nil {
		return err
	}
	if c.peer.dialect == pytorch {
		s.clients.rise(c, guest)
	}
	err := c.requests(r)
	c.flush()
	return err
}

// flushed sends a session's output before each read from its connection.
type flushed struct{ c *session }

// perPart is what each key and value of an incomplete request counts, besides the bytes that have come and the buffer
// for the next ones.
const perPart = 64

// A long value waits for room for roomWait at most, and looks every roomPause. 600 MB come in 5 s at 1 Gbit/s.
var roomWait = 5 * time.Second // a variable for tests

const roomPause = 10 * time.Millisecond

func (f *flushed) Read(b []byte) (int, error) {
	c := f.c
	if err := c.flush(); err != nil {
		return 0, err
	}
	if c.begun {
		if !c.limited {
			c.limit(c.server.opts.RequestTimeout)
		}
		c.room(len(b))
	}
	n, err := c.conn.Read(b)
	c.came += int64(n)
	return n, err
}

// room counts a request that is not whole, with a buffer for n more bytes.
func (c *session) room(n int) error {
	now := c.came + int64(n+perPart*(len(c.req.keys)+len(c.req.vals)))
	if now-c.reading > wholePiece {
		c.take(now - c.reading)
	} else {
		c.hold(now - c.reading)
	}
	c.reading = now
	return c.ebb()
}

// ebb waits while the server holds too much: connections that it has closed have not ended.
func (c *session) ebb() error {
	for t := c.server.clients; ; time.Sleep(5 * roomPause) { // thousands may wait
		switch is := c.peer.standing.Load(); {
		case is == outside:
			return net.ErrClosed
		case is == proved || t.held.Load() <= t.maxHeld:
			return nil
		case c.server.ctx.Err() != nil:
			return net.ErrClosed
		}
	}
}

// take is hold for n more bytes. It waits until there is room: others' requests will be whole soon, and their replies
// sent. After roomWait it closes others.
func (c *session) take(n int64) {
	t := c.server.clients
	switch {
	case c.peer.standing.Load() == proved:
		c.hold(n)
		return
	case c.held.Load()+n > t.maxHeld:
		t.mu.Lock()
		t.holdsTooMuch(c, c.held.Load()+n)
		t.mu.Unlock()
		return
	}
	limit := t.maxHeld - t.maxHeld/8
	for begun := time.Now(); c.peer.standing.Load() != outside && c.server.ctx.Err() == nil; time.Sleep(roomPause) {
		t.taking.Lock()
		room := t.held.Load()+n <= limit
		if room {
			t.turns++
			c.turn.Store(t.turns)
			c.hold(n)
		}
		t.taking.Unlock()
		if room {
			return
		}
		if time.Since(begun) > roomWait {
			limit = t.maxHeld
			t.relieve(c, n)
		}
	}
}

// limit sets a deadline for reads until whole.
func (c *session) limit(d time.Duration) {
	c.limited = true
	c.conn.SetReadDeadline(time.Now().Add(d))
}

// whole notes that a request has come whole. It counts until it is carried out.
func (c *session) whole() {
	c.begun, c.came = false, 0
	if c.limited {
		c.limited = false
		c.conn.SetReadDeadline(time.Time{})
	}
}

// requests carries out the client's requests until its connection ends.
func (c *session) requests(r *bufio.Reader) error {
	s, req := c.server, &c.req
	for first := true; ; first = false {
		if _, err := r.Peek(1); err != nil {
			return err
		}
		c.begun = true
		var id, size uint32
		if c.peer.dialect == native {
			var err error
			if size, err = readUint32(r); err != nil {
				return err
			}
			if id, err = readUint32(r); err != nil {
				return cut(err)
			}
		}
		if err := req.readFrom(r, c.peer.dialect, s.opts.Limits); err != nil {
			if c.peer.dialect == native {
				err = cut(err)
			}
			return err
		}
		if c.peer.dialect == native && uint64(size) != 4+uint64(req.size()) {
			return malformedf("%v in a frame of %d bytes", req.query, size)
		}
		c.whole()
		c.last.Store(s.clients.clock.Load())
		if first {
			s.clients.rise(c, guest)
			if c.offered(req) {
				c.peer.dialect = native
				req.num ^= accept
				c.peer.out.uint32(uint32(req.num))
				continue
			}
		}
		if req.query == qListKeys {
			if err := c.list(id); err != nil {
				return err
			}
			continue
		}
		woken, err := s.data.do(&c.peer, id, req)
		c.wake(woken)
		if err != nil {
			return err
		}
		if c.joins(req) {
			s.clients.rise(c, claimed)
		}
		req.reset()
		c.hold(-c.reading)
		c.reading = 0
		if c.peer.out.full() {
			c.hold(c.peer.out.count(0))
			if err := c.ebb(); err != nil {
				return err
			}
			if err := c.flush(); err != nil {
				return err
			}
		}
	}
}

// alert tells a client that only one side speaks TLS. It then reads the client's bytes: otherwise
// closing would reset the connection and lose the alert.
func (c *session) alert() {
	io.WriteString(c.raw, alert)
	if w, ok := c.raw.(*net.TCPConn); ok {
		w.CloseWrite()
	}
	c.raw.SetReadDeadline(time.Now().Add(time.Second))
	io.Copy(io.Discard, io.LimitReader(c.raw, 64<<10))
}

// open finds out the client's dialect and reads VALIDATE.
func (c *session) open(r *bufio.Reader) error {
	first, err := r.Peek(1)
	if err != nil {
		return err
	}
	c.begun = true
	c.limit(c.server.opts.OpeningTimeout)
	if first[0] == tlsBegin[0] {
		// No query of any dialect.
		if b, err := r.Peek(len(tlsBegin)); err == nil && string(b) == tlsBegin {
			c.alert()
		}
		return errSpeaksTLS
	}
	if c.peer.dialect, err = detect(r); c.peer.dialect == pytorch {
		c.whole()
	}
	return err
}

// joins reports whether req, which was carried out, says that its client is a rank of the job.
func (c *session) joins(req *request) bool {
	switch req.query {
	case qAdd:
		return req.keys[0] == workers && req.num > 0
	case qHello:
		return req.keys[0] != "" && req.keys[0] == c.server.opts.Job
	}
	return false
}

// flush sends the output.
func (c *session) flush() error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.send()
}

// send is flush with wmu held. After an error the connection is closed: a part of a reply may
// have been sent.
func (c *session) send() error {
	var room int64
	for {
		c.hold(c.peer.out.count(room))
		r := c.peer.out.take()
		var err error
		if r.size > 0 {
			c.conn.SetWriteDeadline(time.Now().Add(c.server.opts.RequestTimeout))
			err = r.send(c.conn)
		}
		r.own.free()
		c.hold(-int64(r.counted))
		room = 0
		if r.pieces != nil || r.held {
			room = c.server.data.sent(&c.peer, r.pieces)
		}
		if room > 0 && err == nil {
			c.take(room)
			if err = c.ebb(); err == nil {
				err = c.server.data.answer(&c.peer)
			}
		}
		if err != nil {
			c.raw.Close()
			return err
		}
		if !r.held && room == 0 {
			return nil
		}
	}
}

// list answers LIST_KEYS. The reply goes out in pieces and is never in memory as a whole.
func (c *session) list(id uint32) error {
	keys, size, woken, err := c.server.data.list(&c.peer, id)
	c.wake(woken)
	if isNative := c.peer.dialect == native; err != nil && isNative && refused(err) != done {
		c.peer.out.frame(id, refused(err), []byte(err.Error()), nil)
		return nil
	} else if err == nil && isNative && uint64(size)+8+frameHead > math.MaxUint32 {
		err = malformedf("%v: a reply of %d bytes: %w", qListKeys, size, store.ErrTooLarge)
	}
	if err != nil {
		return err
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if err := c.send(); err != nil {
		return err
	}
	held := int64(listPiece + 16*len(keys) + size) // a string has 16 bytes besides
	c.hold(held)
	defer c.hold(-held)
	if err := c.ebb(); err != nil {
		return err
	}
	piece := make([]byte, 0, listPiece)
	if c.peer.dialect == native {
		piece = binary.LittleEndian.AppendUint32(piece, uint32(frameHead+8+size))
		piece = binary.LittleEndian.AppendUint32(piece, id)
		piece = append(piece, done)
	}
	piece = binary.LittleEndian.AppendUint64(piece, uint64(len(keys)))
	c.conn.SetWriteDeadline(time.Now().Add(c.server.opts.RequestTimeout))
	pieces := 0
	for i, k := range keys {
		piece = binary.LittleEndian.AppendUint64(piece, uint64(len(k)))
		piece = append(piece, k...)
		if len(piece) < listPiece-c.server.opts.Limits.Key && i < len(keys)-1 {
			continue
		}
		if _, err := c.conn.Write(piece); err != nil {
			return err
		}
		piece = piece[:0]
		pieces++
		c.server.data.pace(pieces)
	}
	if len(piece) > 0 {
		_, err = c.conn.Write(piece)
	}
	return err
}

// listPiece is how many bytes of a listing are sent at a time.
const listPiece = 64 << 10

// wake sends the output of other peers. It must not wait for them, because one may not be
// reading. A peer has at most one goroutine that waits to send and one that sends. Until a peer's
// own goroutine reads another request, its output is bounded by the keys that it waited for.
func (c *session) wake(peers []*peer) {
	for _, p := range peers {
		o := p.session
		if o == c {
			continue
		}
		o.hold(p.out.count(0))
		if o.waking.CompareAndSwap(false, true) {
			c.server.wg.Go(func() {
				o.wmu.Lock()
				defer o.wmu.Unlock()
				o.waking.Store(false)
				o.send()
			})
		}
	}
}
