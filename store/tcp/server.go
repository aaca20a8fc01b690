package tcp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/store"
)

// ServerOptions are the options of a server. The zero value serves every supported PyTorch, with
// PyTorch's limits and no authentication.
type ServerOptions struct {
	// Limits bound each client's requests.
	Limits Limits

	// MaxClients is the most connections at a time; the server closes further ones. A PyTorch
	// client up to 2.0 has two; later ones and a Store of this package have one. 0 means the
	// process's limit of descriptors.
	MaxClients int

	// MaxMemory is the most bytes of keys, values, queues' names and queued
	// elements, each counted with 64 more for its bookkeeping. A request that
	// would go over it is refused. 0 means no limit.
	MaxMemory int64

	// OpeningTimeout limits a client's handshake after its first byte: the rest of VALIDATE, or
	// in the old dialect the first request. With TLS or Token it begins with the connection and
	// includes their handshakes. Before the first byte, and after the handshake, a client may be
	// silent for ever. 0 means 30 s, enough for two lost packets and a first value of 8 MiB at 3
	// Mbit/s.
	OpeningTimeout time.Duration

	// NoV1 refuses the dialect of PyTorch up to 2.0. That dialect has no handshake, so the server
	// carries out any bytes that look like a request. The limits bound the damage.
	NoV1 bool

	// TLS makes the server speak TLS only, and so to Go clients only.
	TLS *tls.Config

	// Token, if not empty, is a secret that each client must prove to know. Only Go clients can.
	// It is never sent. Without TLS the following bytes are neither encrypted nor protected
	// against a man in the middle.
	Token string

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

	mu       sync.Mutex
	closed   bool
	sessions map[*session]struct{}
	accepted int64
	refused  int64
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
func Listen(ctx context.Context, addr string, opts ServerOptions) (*Server, error) {
	if opts.OpeningTimeout == 0 {
		opts.OpeningTimeout = 30 * time.Second
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	opts.Limits = opts.Limits.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, fmt.Errorf("tcp: server options: %w", err)
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", openfiles.Explain(err))
	}
	s := &Server{
		ln:       ln,
		opts:     opts,
		data:     newData(opts.Limits, opts.MaxMemory),
		sessions: make(map[*session]struct{}),
	}
	s.data.self = greeting{rand.Uint64(), opts.Job}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.wg.Go(s.accept)
	return s, nil
}

func (o *ServerOptions) validate() error {
	if o.MaxClients < 0 || o.MaxMemory < 0 || o.OpeningTimeout < 0 {
		return fmt.Errorf("MaxClients %d, MaxMemory %d and OpeningTimeout %v must not be negative",
			o.MaxClients, o.MaxMemory, o.OpeningTimeout)
	}
	if limit := min(o.Limits.Key, maxGreeting); len(o.Job) > limit {
		return fmt.Errorf("the name of a job of %d bytes: %w of %d", len(o.Job), store.ErrTooLarge, limit)
	}
	return o.Limits.validate()
}

// Addr is the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// isLoopback reports whether only this host can reach the server.
func (s *Server) isLoopback() bool {
	at, ok := s.ln.Addr().(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// Close ends all connections and returns when the server's goroutines have ended. It deletes the
// data.
func (s *Server) Close() error {
	s.cancel()
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		s.ln.Close()
		for c := range s.sessions {
			c.raw.Close()
		}
	}
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// Stats returns the current counters.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	st := Stats{Clients: len(s.sessions), Accepted: s.accepted, Refused: s.refused}
	s.mu.Unlock()
	d := s.data
	d.mu.Lock()
	st.Keys, st.Queues, st.Waiting, st.Bytes = len(d.keys), len(d.queues), len(d.waits), d.bytes
	d.mu.Unlock()
	return st
}

func (s *Server) accept() {
	const longest = time.Second
	pause := 5 * time.Millisecond
	for {
		conn, err := s.ln.Accept()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Probably no descriptors are left: new clients wait in the kernel's queue until one
			// leaves.
			s.opts.Logger.Error("tcp store: accept", "err", openfiles.Explain(err), "pause", pause)
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
		c.peer.session = c
		s.mu.Lock()
		s.accepted++
		full := s.opts.MaxClients > 0 && len(s.sessions) >= s.opts.MaxClients
		switch {
		case s.closed:
			conn.Close()
		case full:
			s.refused++
			conn.Close()
		default:
			s.sessions[c] = struct{}{}
			s.wg.Go(c.serve)
		}
		s.mu.Unlock()
		if full {
			s.opts.Logger.Info("tcp store: client refused", "client", conn.RemoteAddr(), "err", "too many clients")
		}
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
}

// buffered is the size of each connection's read buffer. A rendezvous request has about 100
// bytes, and PyTorch's client sends up to 1440 at once. Longer values bypass the buffer. busy is
// the size for a client that has filled its buffer once.
const (
	buffered = 1 << 10
	busy     = 8 << 10
)

// batch is how many bytes of replies are sent before the next request of the same client is read.
const batch = 256 << 10

func (c *session) serve() {
	log := c.server.opts.Logger.With("client", c.raw.RemoteAddr())
	log.Debug("tcp store: client connected")
	err := c.run()
	c.raw.Close()
	c.wake(c.server.data.leave(&c.peer))

	s := c.server
	s.mu.Lock()
	delete(s.sessions, c)
	refused := !s.closed && !gone(err)
	if refused {
		s.refused++
	}
	s.mu.Unlock()
	if refused {
		log.Info("tcp store: client refused", "err", err)
	} else {
		log.Debug("tcp store: client left", "err", err)
	}
}

// gone reports whether err means that the connection ended or broke, and not that a request was
// wrong.
func gone(err error) bool {
	var op *net.OpError
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.ErrClosedPipe) ||
		errors.As(err, &op) && !op.Timeout()
}

func (c *session) run() error {
	s := c.server
	if s.opts.TLS != nil || s.opts.Token != "" {
		c.conn.SetReadDeadline(time.Now().Add(s.opts.OpeningTimeout))
		if s.opts.TLS != nil {
			t := tls.Server(c.conn, s.opts.TLS)
			if err := t.HandshakeContext(s.ctx); err != nil {
				var plain tls.RecordHeaderError
				if errors.As(err, &plain) {
					c.alert()
				}
				return fmt.Errorf("TLS: %w", err)
			}
			c.conn = t
		}
		if s.opts.Token != "" {
			if err := admit(c.conn, s.opts.Token); err != nil {
				if errors.Is(err, errSpeaksTLS) {
					c.alert()
				}
				return err
			}
		}
		c.conn.SetReadDeadline(time.Time{})
	}
	// Replies are sent before the next read from the socket, so replies to requests that arrived
	// together go out together.
	src := &flushed{c: c}
	r := bufio.NewReaderSize(src, buffered)
	if err := c.open(r); err != nil {
		return err
	}
	err := c.requests(r, src)
	c.flush()
	return err
}

// flushed sends a session's output before each read from its connection.
type flushed struct {
	c     *session
	whole bool // the last read filled the buffer
}

func (f *flushed) Read(b []byte) (int, error) {
	if err := f.c.flush(); err != nil {
		return 0, err
	}
	n, err := f.c.conn.Read(b)
	f.whole = n == len(b)
	return n, err
}

// requests carries out the client's requests until its connection ends.
func (c *session) requests(r *bufio.Reader, src *flushed) error {
	s := c.server
	req := new(request)
	for first := true; ; first = false {
		if src.whole && r.Buffered() == 0 && r.Size() < busy {
			r = bufio.NewReaderSize(src, busy)
		}
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
		if first {
			if c.peer.dialect == store.DialectV1 {
				c.conn.SetReadDeadline(time.Time{})
			}
			if c.offered(req) {
				c.peer.dialect = native
				req.num ^= accept
				c.peer.out.uint32(uint32(req.num))
				continue
			}
		}
		woken, err := s.data.do(&c.peer, id, req)
		c.wake(woken)
		if err != nil {
			return err
		}
		if c.peer.out.full(batch) {
			if err := c.flush(); err != nil {
				return err
			}
		}
	}
}

// alert tells a client that only one side speaks TLS. It first reads the client's bytes:
// otherwise closing would reset the connection and lose the alert.
func (c *session) alert() {
	io.WriteString(c.raw, alert)
	if w, ok := c.raw.(*net.TCPConn); ok {
		w.CloseWrite()
	}
	c.raw.SetReadDeadline(time.Now().Add(time.Second))
	io.Copy(io.Discard, io.LimitReader(c.raw, 64<<10))
}

// open detects the client's dialect and reads VALIDATE.
func (c *session) open(r *bufio.Reader) error {
	first, err := r.Peek(1)
	if err != nil {
		return err
	}
	c.conn.SetReadDeadline(time.Now().Add(c.server.opts.OpeningTimeout))
	if first[0] == tlsBegin[0] {
		// No query of any dialect.
		if b, err := r.Peek(len(tlsBegin)); err == nil && string(b) == tlsBegin {
			c.alert()
		}
		return errSpeaksTLS
	}
	c.peer.dialect = store.DialectV1
	if first[0] == 0 {
		// VALIDATE, or else a SET of the old dialect: then these are the lower
		// bytes of its key's length, and VALIDATE's would be 1015412686.
		b, err := r.Peek(len(opening))
		if err != nil {
			return err
		}
		if bytes.Equal(b, opening) {
			r.Discard(len(opening))
			c.peer.dialect = store.DialectV2
			c.conn.SetReadDeadline(time.Time{})
		}
	}
	if c.peer.dialect == store.DialectV1 && c.server.opts.NoV1 {
		return malformedf("the connection begins with %#x, not with VALIDATE", first[0])
	}
	return nil
}

// flush sends the output.
func (c *session) flush() error {
	if !c.peer.out.any() {
		return nil
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	for {
		head, tail, held := c.peer.out.take()
		var err error
		switch {
		case head != nil:
			if tail != nil {
				head = append(head, tail.b)
			}
			_, err = head.WriteTo(c.conn)
		case tail != nil:
			_, err = c.conn.Write(tail.b)
		}
		tail.free()
		if err != nil || !held {
			return err
		}
		c.server.data.resume(&c.peer)
	}
}

// wake sends the output of other peers. It must not wait for them, because one may not be
// reading. A peer has at most one goroutine that waits to send and one that sends. Until a peer's
// own goroutine reads another request, its output is bounded by the keys that it waited for.
func (c *session) wake(peers []*peer) {
	for _, p := range peers {
		if o := p.session; o != c && o.waking.CompareAndSwap(false, true) {
			c.server.wg.Go(func() {
				o.waking.Store(false)
				o.flush()
			})
		}
	}
}
