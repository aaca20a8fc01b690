package tcp

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
)

// ErrDisconnected is matched by the error of a call if the server closed the connection. The
// server ended, or it refused the request: the protocol has no error replies.
var ErrDisconnected = errors.New("the server closed the connection: it ended, or refused the request")

// Options say how to join a store. The zero value is a client that does not wait for other ranks.
type Options struct {
	// Server hosts the store in this process, and then joins it as a client. Close ends both.
	Server bool

	// Listen is where to listen as Server, "host:port". Empty means the address given to New.
	// ":29500" listens on all interfaces, as PyTorch always does. Use it if other hosts resolve
	// the host's name to another address.
	Listen string

	// ServerOptions are for the hosted server. If its TLS, Job, World or Limits are not set,
	// those of Options are used (WorldSize for World).
	ServerOptions ServerOptions

	// WorldSize is the number of ranks that join. Each of them adds one to a counter. New waits
	// for it to reach WorldSize on the rank that hosts the server, and nowhere else. 0 means not
	// to count.
	WorldSize int

	// Rank is this process's rank among WorldSize. Servers of this package store it, so that
	// messages can name the missing ranks; see Store.Worker. It is not used if WorldSize is 0.
	Rank int

	// NoWait joins without counting and waiting, whatever WorldSize is.
	NoWait bool

	// CountOnly counts this rank, and does not wait for the others.
	CountOnly bool

	// Once says that each group of ranks has a server of its own, which one of them hosts. New then does
	// not join a server that this rank has left (see Store.Leave), but waits for the next one at the
	// address: the host may not have closed the last one yet. It is not used if WorldSize is 0.
	Once bool

	// Timeout is the store's, see store.Store. It also limits New if its context has no deadline.
	Timeout time.Duration

	// Logger gets a line at level Warn when New has waited 10 s for the server or, on the rank
	// that hosts it, for other ranks. More lines follow at growing intervals. Nil means
	// slog.Default().
	Logger *slog.Logger

	// HostedBy names the process that hosts the server in those lines, for example "rank 0".
	// Empty means unknown.
	HostedBy string

	// ResolveTimeout is how long New looks up a host name that does not exist. 0 means 30 s,
	// since a cluster's DNS learns the names of pods with a delay.
	ResolveTimeout time.Duration

	// TLS encrypts the connection. Only servers of this package support it. An empty ServerName
	// is taken from the address. A hosting process needs a certificate here or in
	// ServerOptions.TLS.
	TLS *tls.Config

	// Job names this process's job. A server of this package for another job refuses the client,
	// and New fails at once with ErrOtherJob and both names. Every server accepts clients without
	// a name, and PyTorch's.
	Job string

	// Limits bound calls before anything is sent; the error is store.ErrTooLarge. Larger limits
	// also need a server with larger limits.
	Limits Limits

	dialect *dialect // the server's, for tests; nil: find out
}

// Store is a client of a TCPStore server. Make one with New. It implements
// store.Store, store.Cloner, store.Willer and store.LocalAddresser.
//
// To a server of this package it opens one connection, which all calls share at the same time. A
// Get takes one round trip, and a call that waits does not delay others. To a PyTorch server it
// opens one connection, which calls use in turns. Each call that waits for a key while that is in
// use gets another one. It keeps a few of them for later calls.
//
// A store does not outlive its server. When the server ends, calls fail with ErrDisconnected, and
// later with "connection refused". If another server of this package takes its place, calls fail
// with ErrRestarted, because that server is empty. PyTorch's servers cannot be told apart.
type Store struct {
	dialer  dialer
	name    string
	limits  Limits
	local   netip.Addr
	server  *Server
	grace   time.Duration // see there
	timeout atomic.Int64

	mux    atomic.Pointer[mux] // nil if the server is not of this package
	turn   chan struct{}       // held during a call that does not wait, or to renew mux
	ctx    context.Context
	cancel context.CancelFunc

	queues, listing atomic.Int32 // whether the server has them; see support

	mu     sync.Mutex
	conns  map[*conn]struct{} // all; nil when the store is closed
	atRest []*conn
}

var (
	_ store.Store  = (*Store)(nil)
	_ store.Cloner = (*Store)(nil)
	_ store.Willer = (*Store)(nil)

	_ store.LocalAddresser = (*Store)(nil)
)

// Whether the server knows a query from after PyTorch 2.2.
const (
	unknown int32 = iota
	has
	lacks
)

// maxAtRest is how many connections are kept for later. A rank of a process
// group rarely has more calls at once for long.
const maxAtRest = 4

// workers is the key, without "/", of c10d's counter of joined ranks.
const workers = "init/"

// New connects to the TCPStore server at addr, "host:port", after starting it if opts.Server is
// set. It tries again until ctx ends, or else for opts.Timeout, so the server may start later
// than its clients. If the host's name has several addresses, New tries them beside each other. It
// fails sooner if the host name does not exist (see Options.ResolveTimeout), if another service uses
// the port, or if the server refuses a certificate.
func New(ctx context.Context, addr string, o ...Options) (*Store, error) {
	opts := option.Last(o)
	start := time.Now()
	s, err := open(ctx, addr, opts)
	var e *store.Error
	if err != nil && !errors.As(err, &e) {
		e = &store.Error{Store: "tcp " + addr, Op: "open", Err: err}
		if e.Timeout() {
			e.After = time.Since(start)
		}
		err = e
	}
	return s, err
}

func open(ctx context.Context, addr string, opts Options) (*Store, error) {
	limits := opts.Limits.withDefaults()
	if err := limits.validate(opts.Job); err != nil {
		return nil, err
	}
	if opts.WorldSize < 0 {
		return nil, fmt.Errorf("WorldSize is %d, it must not be negative", opts.WorldSize)
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 && !opts.Server {
		return nil, fmt.Errorf("port %q is not a number from 1 to 65535", port)
	}
	ctx, cancel := store.WithTimeout(ctx, opts.Timeout)
	defer cancel()

	var server *Server
	if opts.Server {
		so := opts.ServerOptions
		if so.TLS == nil {
			so.TLS = opts.TLS
		}
		if so.Job == "" {
			so.Job = opts.Job
		}
		so.World = cmp.Or(so.World, opts.WorldSize)
		if so.Limits == (Limits{}) {
			so.Limits = opts.Limits
		}
		listen := opts.Listen
		if listen == "" {
			listen = addr
		}
		if server, err = Listen(ctx, listen, so); err != nil {
			if errors.Is(err, syscall.EADDRINUSE) {
				err = fmt.Errorf("%w: wait until its owner has ended, or choose another port (MASTER_PORT)", err)
			}
			return nil, err
		}
		port = strconv.Itoa(server.Addr().(*net.TCPAddr).Port)
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "localhost"
		}
	}
	d := dialer{addr: net.JoinHostPort(host, port), dialect: opts.dialect, tls: opts.TLS, job: opts.Job}
	ours := server != nil || d.tls != nil
	if ours && d.dialect == nil {
		d.dialect = pytorch
	}
	o := &progress{addr: d.addr, hostedBy: opts.HostedBy}
	defer waiting.Start(ctx, opts.Logger, o.report)()
	d.progress, d.resolveFor = o, opts.ResolveTimeout
	c, s, err := d.joinable(ctx, limits, opts)
	if err != nil {
		if server != nil {
			server.Close()
		}
		if opts.HostedBy != "" && errors.Is(err, errRefusedTLS) {
			err = fmt.Errorf("%s hosts the store: %w", opts.HostedBy, err)
		}
		return nil, ended(ctx, err)
	}
	s.server = server
	if server != nil {
		server.clients.own(c.LocalAddr())
	}
	if server != nil && !server.isLoopback() && s.local.IsLoopback() {
		s.local = netip.Addr{} // others may reach the server by another address
	}
	s.SetTimeout(opts.Timeout)
	if ours && d.dialect == pytorch {
		s.queues.Store(has)
		s.listing.Store(has)
	}
	if opts.WorldSize > 0 && !opts.NoWait {
		if err := s.join(ctx, opts.Rank, opts.WorldSize, server != nil && !opts.CountOnly, o); err != nil {
			s.Close()
			return nil, err
		}
	}
	return s, nil
}

// joinable connects to a server that this rank may join, and returns the connection and a store over it.
func (d dialer) joinable(ctx context.Context, limits Limits, opts Options) (*conn, *Store, error) {
	var last error
	// said returns the error of the try before if the time has ended meanwhile, because it says more.
	said := func(err error) error {
		if ctx.Err() != nil && last != nil {
			return last
		}
		return err
	}
	for {
		try := d
		c, err := try.dialRetry(ctx)
		if err != nil {
			return nil, nil, said(err)
		}
		try.plain, try.progress = c.dialect != native, nil
		s := newStore(try, limits, c)
		if !opts.Once || opts.Server || opts.WorldSize == 0 {
			return c, s, nil
		}
		left, err := s.hasLeft(ctx, opts.Rank)
		if err == nil && !left {
			return c, s, nil
		}
		s.Close()
		if err == nil {
			err = errLeft
		} else if !errors.Is(err, ErrDisconnected) && !errors.Is(err, ErrRestarted) { // else it is ending, or has ended
			return nil, nil, said(err)
		}
		last = err
		d.progress.tried(err)
		select {
		case <-time.After(leftPause):
		case <-ctx.Done():
			return nil, nil, err
		}
	}
}

func newStore(d dialer, limits Limits, c *conn) *Store {
	s := &Store{
		dialer: d,
		name:   "tcp " + d.addr,
		limits: limits,
		local:  localAddr(c, d.addr),
		grace:  grace,
		turn:   make(chan struct{}, 1),
		conns:  map[*conn]struct{}{c: {}},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if c.dialect == native {
		s.queues.Store(has)
		s.listing.Store(has)
		s.share(c)
	} else {
		s.atRest = []*conn{c}
	}
	return s
}

// ended adds ctx's error to err if it is the cause of err.
func ended(ctx context.Context, err error) error {
	if e := store.WaitErr(ctx); e != nil && !errors.Is(err, e) {
		return fmt.Errorf("%w; last try: %w", e, err)
	}
	return err
}

// join counts this process, and waits for the other ranks if wait is set.
func (s *Store) join(ctx context.Context, rank, size int, wait bool, o *progress) error {
	if err := s.enroll(ctx, rank); err != nil {
		return err
	}
	const longest = 10 * time.Millisecond // PyTorch's interval
	pause := longest / 16
	rep, err := s.call(ctx, "join", &request{query: qAdd, keys: one(workers), num: 1})
	n := rep.num
	for ; err == nil && wait && n < int64(size); pause = min(2*pause, longest) {
		o.count(s, n, size)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		var v []byte
		if v, err = s.get(ctx, "join", workers); err == nil {
			n, err = store.ParseNumber(v)
		}
	}
	if err != nil && n > 0 && ctx.Err() != nil {
		return s.notJoined(ctx, n, size)
	}
	return err
}

// Addr returns the "host:port" that the store is connected to. In a hosting store the port is the
// one it listens on.
func (s *Store) Addr() string { return s.dialer.addr }

// LocalAddr returns the address of this host by which it reaches the server, see
// store.LocalAddresser.
func (s *Store) LocalAddr() netip.Addr { return s.local }

func localAddr(c *conn, addr string) netip.Addr {
	host, _, _ := net.SplitHostPort(addr)
	return store.LocalAddrFor(c.LocalAddr(), host)
}

// Server returns the server that this store hosts, or nil.
func (s *Store) Server() *Server { return s.server }

// Timeout returns the limit of a call whose context has no deadline.
func (s *Store) Timeout() time.Duration { return time.Duration(s.timeout.Load()) }

// SetTimeout changes that limit. It applies to all calls, not only to those that wait for a key,
// because a server may be unreachable without an error.
func (s *Store) SetTimeout(d time.Duration) {
	if d == 0 {
		d = store.DefaultTimeout
	}
	s.timeout.Store(int64(d))
}

// Clone opens another connection to the server. The clone of a hosting store
// does not host.
func (s *Store) Clone(ctx context.Context) (store.Store, error) {
	ctx, cancel := store.WithTimeout(ctx, s.Timeout())
	defer cancel()
	if s.isClosed() {
		return nil, s.fail(ctx, "clone", nil, time.Time{}, store.ErrClosed)
	}
	start := time.Now()
	d := s.dialer
	c, err := d.dial(ctx)
	if err != nil {
		return nil, s.fail(ctx, "clone", nil, start, err)
	}
	d.plain = c.dialect != native
	clone := newStore(d, s.limits, c)
	clone.local = s.local
	clone.SetTimeout(s.Timeout())
	clone.queues.Store(s.queues.Load())
	clone.listing.Store(s.listing.Load())
	return clone, nil
}

// Close ends pending calls, and the server if this store hosts it.
func (s *Store) Close() error {
	s.cancel()
	s.mu.Lock()
	for c := range s.conns {
		c.Close()
	}
	s.conns, s.atRest = nil, nil
	s.mu.Unlock()
	if m := s.mux.Load(); m != nil {
		m.close(store.ErrClosed)
	}
	if s.server != nil {
		return s.server.Close()
	}
	return nil
}

// Drain waits until the server that this store hosts has no other clients, or until ctx ends. Without
// a server it returns at once.
func (s *Store) Drain(ctx context.Context) {
	if s.server == nil {
		return
	}
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for s.server.Stats().Clients > s.connections() {
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// connections returns how many connections this store has.
func (s *Store) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

func (s *Store) isClosed() bool { return s.ctx.Err() != nil }

// take returns a connection for the caller alone.
func (s *Store) take(ctx context.Context) (*conn, error) {
	s.mu.Lock()
	n := len(s.atRest)
	if n == 0 {
		s.mu.Unlock()
		return s.connect(ctx)
	}
	c := s.atRest[n-1]
	s.atRest = s.atRest[:n-1]
	s.mu.Unlock()
	return c, nil
}

// connect opens another connection. It does not try twice, as the server was
// there before.
func (s *Store) connect(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	c, err := s.dialer.dial(ctx)
	if err != nil {
		if by, ok := ctx.Deadline(); ok && errors.Is(err, os.ErrDeadlineExceeded) && !time.Now().Before(by) {
			<-ctx.Done() // the socket's timer was first
		}
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		c.Close()
		return nil, store.ErrClosed
	}
	s.conns[c] = struct{}{}
	return c, nil
}

// rest takes back a connection that has nothing outstanding.
func (s *Store) rest(c *conn) {
	s.mu.Lock()
	full := len(s.atRest) >= maxAtRest
	if !full && s.conns != nil {
		s.atRest = append(s.atRest, c)
	}
	s.mu.Unlock()
	if full {
		s.drop(c)
	}
}

func (s *Store) drop(c *conn) {
	c.Close()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// exchange sends req and reads its reply on c. If read is nil, req has no reply, and is confirmed.
func exchange(ctx context.Context, c *conn, req *request, read func(*bufio.Reader) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if req.query == qQueuePop { // an element that is on its way would be lost
		late, cancel := lateBy(ctx, grace)
		defer cancel()
		ctx = late
	}
	defer guard(ctx, c)()
	if read != nil {
		if err := c.send(req); err != nil {
			return err
		}
		return read(c.r)
	}
	keys, err := c.confirm(req)
	if err == nil && keys < 0 {
		err = malformedf("a reply of %d keys", keys)
	}
	return err
}

// once carries out a request on any connection.
func (s *Store) once(ctx context.Context, req *request, read func(*bufio.Reader) error) error {
	c, err := s.take(ctx)
	if err != nil {
		return err
	}
	if err := exchange(ctx, c, req, read); err != nil {
		s.drop(c)
		return err
	}
	s.rest(c)
	return nil
}

// begin is the start of every call: it limits ctx and checks req.
func (s *Store) begin(ctx context.Context, req *request) (context.Context, context.CancelFunc, error) {
	ctx, cancel := store.WithTimeout(ctx, s.Timeout())
	err := ctx.Err()
	if s.isClosed() {
		err = store.ErrClosed
	}
	if err == nil {
		err = s.limits.check(req)
	}
	if err == nil {
		err = s.support(ctx, req.query)
	}
	return ctx, cancel, err
}

// call is a whole call that does not wait for a key, unless in the native dialect.
func (s *Store) call(ctx context.Context, op string, req *request) (reply, error) {
	if s.mux.Load() != nil {
		return s.ask(ctx, op, req)
	}
	return s.inTurn(ctx, op, req.clone())
}

// inTurn is call on the connection that calls use in turns.
func (s *Store) inTurn(ctx context.Context, op string, req *request) (rep reply, err error) {
	start := time.Now()
	ctx, cancel, err := s.begin(ctx, req)
	defer cancel()
	var read func(*bufio.Reader) error
	if answers[req.query] != nothing {
		read = replyInto(&rep, req)
	}
	if err == nil {
		select {
		case s.turn <- struct{}{}:
			err = s.once(ctx, req, read)
			<-s.turn
		case <-ctx.Done():
			err = ctx.Err()
		case <-s.ctx.Done():
			err = store.ErrClosed
		}
	}
	if err != nil {
		return rep, s.fail(ctx, op, req.names(), start, err)
	}
	return rep, nil
}

func replyInto(rep *reply, req *request) func(*bufio.Reader) error {
	return func(r *bufio.Reader) (err error) {
		*rep, err = readReply(r, req.query, len(req.keys), unframed)
		return err
	}
}

// fail makes the error of a call.
func (s *Store) fail(ctx context.Context, op string, keys []string, start time.Time, err error) error {
	e := &store.Error{Store: s.name, Op: op, Keys: keys, Err: err}
	switch why := store.WaitErr(ctx); {
	case s.isClosed():
		e.Err = store.ErrClosed
	case why != nil && (errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		e.Err = why
	case disconnected(err):
		e.Err = fmt.Errorf("%w (%w)", ErrDisconnected, err)
	}
	if e.Timeout() && !start.IsZero() {
		e.After = time.Since(start)
	}
	return e
}

// grace is how long a server may take to confirm that a wait is cancelled, normally a round trip.
// If the server hangs, a caller whose context ends waits this much longer.
const grace = time.Second

// lateBy returns a context that ends d after ctx.
func lateBy(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-time.After(d):
			cancel()
		case <-late.Done():
		}
	})
	return late, func() {
		stop()
		cancel()
	}
}

// await returns when all keys of req, a WAIT, are there, or ctx ends. It
// reports whether c can be used on.
func (s *Store) await(ctx context.Context, c *conn, req *request) (usable bool, err error) {
	release := guard(ctx, c)
	if err := c.send(req); err != nil {
		release()
		return false, err
	}
	answer, err := readFlag(c.r)
	release()
	if err == nil && answer != ready {
		err = malformedf("a reply of %d to WAIT", answer)
	}
	if err == nil {
		return true, nil
	}
	if ctx.Err() == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
		return false, err
	}

	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.grace)
	defer cancel()
	var last byte
	if cancelErr := exchange(late, c, &request{query: qCancelWait}, func(r *bufio.Reader) (err error) {
		if answer, err = readFlag(r); err != nil || answer == cancelled {
			return err
		}
		// The keys were set just now; the reply to CANCEL_WAIT follows.
		last, err = readFlag(r)
		return err
	}); cancelErr != nil {
		return false, err
	}
	if answer == cancelled {
		return true, ctx.Err()
	}
	return last == cancelled, nil
}

// waiting is a whole call in PyTorch's dialects that waits for keys and then calls then on the
// same connection. wire are the keys as the server knows them.
func (s *Store) waiting(ctx context.Context, op string, start time.Time, wire []string, then func(context.Context, *conn) error) error {
	req := &request{query: qWait, keys: wire}
	keys := req.names()
	ctx, cancel, err := s.begin(ctx, req)
	defer cancel()
	var c *conn
	if err == nil {
		c, err = s.take(ctx)
	}
	if err != nil {
		return s.fail(ctx, op, keys, start, err)
	}
	usable, err := s.await(ctx, c, req)
	if err == nil && then != nil {
		err = then(ctx, c)
		usable = usable && err == nil
	}
	if err != nil && usable && len(keys) > 1 && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		keys, usable = s.stillMissing(ctx, c, keys, wire)
	}
	if usable {
		s.rest(c)
	} else {
		s.drop(c)
	}
	if err != nil {
		return s.fail(ctx, op, keys, start, err)
	}
	return nil
}

// stillMissing returns the missing ones of keys, for an error message, and whether c is still
// usable. If the server does not answer it returns keys.
func (s *Store) stillMissing(ctx context.Context, c *conn, keys, wire []string) (_ []string, usable bool) {
	const most = 256 // in one go
	if len(keys) > most {
		return keys, true
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.grace)
	defer cancel()
	defer guard(ctx, c)()
	reqs := make([]*request, len(wire))
	for i := range wire {
		reqs[i] = &request{query: qCheck, keys: wire[i : i+1]}
	}
	if err := c.send(reqs...); err != nil {
		return keys, false
	}
	var missing []string
	for i := range wire {
		answer, err := readFlag(c.r)
		if err != nil {
			return keys, false
		}
		if answer == notReady && !slices.Contains(missing, keys[i]) {
			missing = append(missing, keys[i])
		}
	}
	if len(missing) == 0 {
		return keys, true
	}
	return missing, true
}

// support returns an error if the server does not know q. PyTorch's servers then close the
// connection, so it tries once, on a separate connection, where the dialect does not tell.
func (s *Store) support(ctx context.Context, q query) error {
	unsupported := fmt.Errorf("the server does not know %v: %w", q, errors.ErrUnsupported)
	if s.dialer.dialect.number(q) < 0 {
		return unsupported
	}
	probe := &request{query: qListKeys}
	read := func(r *bufio.Reader) error {
		n, err := readInt64(r)
		if err == nil {
			_, err = readBlobs(r, n, unframed)
		}
		return err
	}
	known := &s.listing
	switch q {
	case qQueuePush, qQueuePop, qQueueLen:
		probe = &request{query: qQueueLen, keys: []string{"/"}}
		read = func(r *bufio.Reader) error { _, err := readInt64(r); return err }
		known = &s.queues
	case qListKeys:
	default:
		return nil
	}
	switch known.Load() {
	case has:
		return nil
	case lacks:
		return unsupported
	}
	c, err := s.connect(ctx)
	if err != nil {
		return err
	}
	if err = exchange(ctx, c, probe, read); err == nil {
		s.rest(c)
		known.Store(has)
		return nil
	}
	s.drop(c)
	if !disconnected(err) {
		return err
	}
	if c, err = s.connect(ctx); err != nil {
		return err // the server is gone
	}
	s.rest(c)
	known.Store(lacks)
	return unsupported
}
