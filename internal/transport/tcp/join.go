package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/tcpsock"
	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// dialers bounds the connections that a rank makes at a time.
	dialers = 32

	// An address has several places. dial waits for a connection with one place for stagger, then
	// it also tries the next. If it has a connection, it waits for the answer for openStagger: a
	// rank answers once it has called Join and has a CPU. When both were 200 ms, 96 processes with
	// five places each made 11800 connections on two CPUs, and 6600 with these.
	stagger     = 200 * time.Millisecond
	openStagger = 2 * time.Second

	// joinLimit bounds a Join whose context has no deadline.
	joinLimit = 5 * time.Minute

	// hangUps is how often a connection that ends without an answer is tried again. The peer
	// closes the oldest connections when too many have not said hello. The first pause is
	// hangUpPause; it doubles.
	hangUps     = 5
	hangUpPause = 20 * time.Millisecond

	// lastAnswer is how long a rank that gives up waits for the answer to a hello. A peer that has
	// answered gets the reason. Otherwise it would take this rank for dead.
	lastAnswer = 100 * time.Millisecond
)

// Endpoint is a rank that may join a group: a listening socket. Every rank makes
// one and tells the others its address; then each calls Join, once.
type Endpoint struct {
	opts     Options
	addr     address
	listener net.Listener
	pending  pending
}

// Listen returns an endpoint. It has to be closed unless Join is called.
func Listen(o Options) (*Endpoint, error) {
	o, err := o.filled()
	if err != nil {
		return nil, err
	}
	l, places, err := listen(o.Host)
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", openfiles.Explain(err))
	}
	if len(places) == 0 {
		l.Close()
		return nil, errors.New("tcp: this host has no address that others can reach")
	}
	return &Endpoint{opts: o, addr: address{secure: o.TLS != nil, token: newToken(), places: places}, listener: l}, nil
}

// Addr returns the address that the other ranks need. It contains a secret of the group:
// without TLS, whoever knows it can take a rank's place.
func (e *Endpoint) Addr() string { return e.addr.String() }

// Close closes the listening socket. After Join the mesh does that.
func (e *Endpoint) Close() error {
	if err := e.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("tcp: %w", err)
	}
	return nil
}

// JoinError says which ranks could not be connected and why.
type JoinError struct {
	Rank, Size int
	Missing    []Missing // by rank
}

// Missing is a rank that is not connected.
type Missing struct {
	Rank int
	Err  error
}

func (e *JoinError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "tcp: rank %d of %d is not connected with ", e.Rank, e.Size)
	for i, m := range e.Missing {
		if i > 0 {
			b.WriteString("; ")
		}
		if i == 8 {
			fmt.Fprintf(&b, "and %d more", len(e.Missing)-i)
			break
		}
		fmt.Fprintf(&b, "rank %d: %v", m.Rank, m.Err)
	}
	return b.String()
}

// Unconnected returns the ranks of Missing.
func (e *JoinError) Unconnected() []int {
	ranks := make([]int, len(e.Missing))
	for i, m := range e.Missing {
		ranks[i] = m.Rank
	}
	return ranks
}

// Unwrap returns the reasons.
func (e *JoinError) Unwrap() []error {
	errs := make([]error, len(e.Missing))
	for i, m := range e.Missing {
		errs[i] = m.Err
	}
	return errs
}

var (
	errNotCalled   = errors.New("it has not connected to this rank")
	errGroupFailed = errors.New("given up because the group has failed")
	errElsewhere   = errors.New("connected at another place")
)

// isCause reports whether err is a reason for the group to fail.
func isCause(err error) bool {
	return err != nil && !errors.Is(err, errNotCalled) && !errors.Is(err, errGroupFailed)
}

// Join makes this rank one of the group whose addresses are addrs, in the order of the ranks;
// its own must be addrs[rank]. All ranks call it. It returns once every other rank is
// connected, or with a *[JoinError]. The greater rank of a pair connects to the other. A rank
// that fails tells the ranks that it is connected with, and their Join fails too. The endpoint
// belongs to the mesh afterwards.
func (e *Endpoint) Join(ctx context.Context, rank int, addrs []string) (*Mesh, error) {
	all, err := checkAddresses(rank, e.addr, addrs)
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, joinLimit)
		defer cancel()
	}
	m := newMesh(rank, len(addrs), e.opts)
	m.addrs, m.joining = all, true
	m.setShare(ranksOnHost(all, rank), min(runtime.NumCPU(), runtime.GOMAXPROCS(0)))
	d := &acceptor{
		m: m, listener: e.listener, connected: make(chan int, len(addrs)), exhausted: make(chan error, 1), taken: make(map[int]bool),
		strangers: strangers.New((len(addrs) - 1) * len(e.addr.places)), // a rank tries them all
	}
	m.acceptor = d
	m.Goroutines.Add(1)
	go d.accept()

	why := make([]error, len(addrs))
	for r := rank + 1; r < len(addrs); r++ {
		why[r] = errNotCalled
	}
	dialing, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	turn := make(chan struct{}, dialers)
	var wg sync.WaitGroup
	for r := range rank {
		why[r] = errors.New("no answer")
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			err := m.connect(dialing, r)
			mu.Lock()
			why[r] = err
			mu.Unlock()
			if err != nil {
				cancel(errGroupFailed)
			}
		})
	}
	dialed := make(chan struct{})
	go func() {
		wg.Wait()
		close(dialed)
	}()
	e.pending.watch(&mu, why)
	missing := len(addrs) - rank - 1
	for missing > 0 || dialed != nil {
		select {
		case r := <-d.connected:
			mu.Lock()
			why[r] = nil
			mu.Unlock()
			missing--
			continue
		case err := <-d.exhausted:
			mu.Lock()
			if r := slices.Index(why, errNotCalled); r >= 0 {
				why[r] = fmt.Errorf("this rank cannot accept its connection: %w", err)
				cancel(errGroupFailed)
			}
			mu.Unlock()
		case <-dialed:
			dialed = nil
			if dialing.Err() == nil {
				continue
			}
		case <-dialing.Done():
		case <-m.Failed():
		}
		if dialing.Err() == nil && m.Fault() == nil {
			continue
		}
		cancel(errGroupFailed)
		if dialed != nil {
			<-dialed
		}
		break
	}
	failure := &JoinError{Rank: rank, Size: len(addrs)}
	// Once one rank has failed, the others were not waited for.
	own := ctx.Err() == nil && m.Fault() == nil && slices.ContainsFunc(why, isCause)
	for r, err := range why {
		if err != nil && (!own || isCause(err)) {
			failure.Missing = append(failure.Missing, Missing{r, err})
		}
	}
	if len(failure.Missing) == 0 {
		m.Mu.Lock()
		m.joining = false
		m.Mu.Unlock()
		return m, nil
	}
	f := transport.NewFault(transport.FaultAborted, rank, rank, failure)
	switch err := ctx.Err(); {
	case errors.Is(err, context.Canceled):
		f = transport.CanceledBy(ctx, rank)
	case err != nil:
		f.Kind, f.Rank = transport.FaultTimeout, failure.Missing[0].Rank
	default:
		if i := slices.IndexFunc(failure.Missing, func(m Missing) bool { return errors.Is(m.Err, syscall.ECONNREFUSED) }); i >= 0 {
			f.Kind, f.Rank = transport.FaultPeerDied, failure.Missing[i].Rank // it had listened
		}
	}
	m.Abort(f)
	m.Close()
	cause := error(failure)
	if err := ctx.Err(); err != nil {
		cause = fmt.Errorf("%w: %w", failure, context.Cause(ctx))
	} else if was := m.Fault(); was != f {
		cause = fmt.Errorf("%w: %w", failure, was)
	}
	return nil, &joinFailure{cause, m.Fault()}
}

// joinFailure is the error of a Join with the fault that the other ranks are told.
type joinFailure struct {
	error
	fault *transport.Fault
}

func (e *joinFailure) Unwrap() []error { return []error{e.error, e.fault} }

// connect makes the first connection with rank r.
func (m *Mesh) connect(ctx context.Context, r int) error {
	conn, answer, err := m.dial(ctx, r, 0)
	if err != nil {
		return err
	}
	if err := m.attach(r, conn, answer); err != nil {
		m.sayWhy(conn)
		conn.Close()
		return err
	}
	return nil
}

// sayWhy sends an ABORT to a peer that has this rank, if the mesh has failed meanwhile. Else the peer would take this rank
// for the dead one.
func (m *Mesh) sayWhy(conn net.Conn) {
	if f := m.Fault(); f != nil {
		var b [headerLen]byte
		abort := abortItem(f)
		abort.f.put(b[:])
		conn.Write(append(b[:], f.Words()...))
	}
}

// dial connects with rank r at one of its places, whichever answers first.
func (m *Mesh) dial(ctx context.Context, r int, lane uint32) (net.Conn, hello, error) {
	type result struct {
		conn  net.Conn
		hello hello
		err   error
	}
	places := m.addrs[r].places
	if len(places) == 1 {
		conn, h, err := m.dialPlace(ctx, r, lane, places[0], func() {})
		return conn, h, err
	}
	ctx, stop := context.WithCancelCause(ctx)
	cancel := func() { stop(errElsewhere) }
	defer cancel()
	results, open := make(chan result), make(chan struct{}, len(places))
	timer := time.NewTimer(stagger)
	defer timer.Stop()
	begin := func(i int) {
		go func() {
			conn, h, err := m.dialPlace(ctx, r, lane, places[i], func() { open <- struct{}{} })
			results <- result{conn, h, err}
		}()
	}
	begin(0)
	begun, ended := 1, 0
	var won result
	var failure error
	for ended < begun {
		next := false
		select {
		case res := <-results:
			ended++
			switch {
			case res.err == nil && won.conn == nil:
				won = res
				cancel()
			case res.err == nil:
				res.conn.Close()
			case won.conn == nil:
				if failure == nil {
					failure = res.err
				} else {
					failure = fmt.Errorf("%w; %w", failure, res.err)
				}
				next = true
			}
		case <-open:
			timer.Reset(openStagger)
		case <-timer.C:
			select {
			case <-open: // this process is late, and not the peer's host
				timer.Reset(openStagger)
			default:
				next = true
			}
		}
		if next && begun < len(places) && won.conn == nil && ctx.Err() == nil {
			begin(begun)
			begun++
			timer.Reset(stagger)
		}
	}
	if won.conn != nil {
		return won.conn, won.hello, nil
	}
	return nil, hello{}, failure
}

// dialPlace connects with rank r at one place. It tries again if the peer closes the connection
// without an answer. It calls open when the peer's host has first taken a connection.
func (m *Mesh) dialPlace(ctx context.Context, r int, lane uint32, place netip.AddrPort, open func()) (net.Conn, hello, error) {
	open = sync.OnceFunc(open)
	pause := hangUpPause
	for try := 0; ; try++ {
		conn, h, err := m.tryPlace(ctx, r, lane, place, open)
		if !errors.Is(err, errHungUp) || try == hangUps {
			return conn, h, err
		}
		select {
		case <-ctx.Done():
			return conn, h, err
		case <-time.After(pause):
		}
		pause *= 2
	}
}

// tryPlace connects with rank r at one place. Both ranks prove who they are.
func (m *Mesh) tryPlace(ctx context.Context, r int, lane uint32, place netip.AddrPort, open func()) (net.Conn, hello, error) {
	fail := func(err error) (net.Conn, hello, error) {
		return nil, hello{}, fmt.Errorf("at %v: %w", place, err)
	}
	var d net.Dialer
	d.KeepAlive = -1 // tune sets it
	c, err := d.DialContext(ctx, "tcp", place.String())
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fail(openfiles.Explain(err))
	}
	open()
	tcp := c.(*net.TCPConn)
	ran := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ran)
		by := time.Unix(1, 0)
		if context.Cause(ctx) != errElsewhere {
			by = time.Now().Add(m.opts.lastAnswer)
		}
		tcp.SetDeadline(by)
	})
	conn, h, err := m.exchangeHello(tcp, r, lane, place)
	if !stop() {
		<-ran
		tcp.SetDeadline(time.Time{}) // the peer has this rank, and gets an ABORT
		if err == nil && context.Cause(ctx) == errElsewhere {
			err = errElsewhere
		}
	}
	if err != nil {
		tcp.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return fail(err)
	}
	return conn, h, nil
}

// exchangeHello sends a hello and waits for the answer. The peer answers once it has called
// Join, so there is no limit but the caller's.
func (m *Mesh) exchangeHello(tcp *net.TCPConn, r int, lane uint32, place netip.AddrPort) (net.Conn, hello, error) {
	if err := m.opts.tune(tcp); err != nil {
		return nil, hello{}, err
	}
	conn := net.Conn(tcp)
	if c := m.opts.TLS; c != nil {
		conn = tls.Client(tcp, credentials.ForHost(c, place.Addr().String()))
	}
	h := m.hello(m.addrs[r].token, lane)
	if _, err := conn.Write(h.encode()); err != nil {
		return nil, hello{}, hungUp(err)
	}
	var b [helloLen]byte
	if n, err := io.ReadFull(conn, b[:]); err != nil {
		if n == 0 {
			err = hungUp(err)
		}
		return nil, hello{}, fmt.Errorf("no answer: %w", err)
	}
	answer, err := parseHello(b[:], m.addrs[m.Rank()].token)
	switch {
	case err != nil:
		return nil, hello{}, err
	case answer.verdict != verdictOK:
		return nil, hello{}, fmt.Errorf("rank %d refuses: %s", r, verdicts[answer.verdict])
	case int(answer.rank) != r || int(answer.size) != m.Size() || answer.lane != lane:
		return nil, hello{}, fmt.Errorf("the answer is of rank %d of %d on connection %d, want rank %d of %d on %d", answer.rank, answer.size, answer.lane, r, m.Size(), lane)
	}
	return conn, answer, nil
}

// errHungUp is matched by the error of a connection that the peer closed before it had answered.
var errHungUp = errors.New("the peer closed the connection")

// hungUp adds errHungUp to err if err says that.
func hungUp(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("%w: %w", errHungUp, err)
	}
	return err
}

func (m *Mesh) hello(t token, lane uint32) hello {
	return hello{
		lane: lane, rank: uint32(m.Rank()), size: uint32(m.Size()),
		eager: uint64(m.opts.Eager), window: uint64(m.opts.Window), checksums: m.opts.Checksum, token: t,
	}
}

// lanes returns how many more connections to open to the peer at the other end of c.
func (m *Mesh) lanes(c net.Conn) int {
	switch {
	case m.opts.Lanes != 0:
		return max(m.opts.Lanes, 0)
	case !tcpsock.IsLocal(c):
		return defaultLanes
	case m.manyCPUs:
		return localLanes
	}
	return 0
}

// openBulk opens the bulk connections to a peer, in the background. Messages use each as soon
// as it is open. Without any, the first connection carries them.
func (m *Mesh) openBulk(p *pair) {
	for i := range m.lanes(p.first.conn) {
		m.Goroutines.Add(1)
		go func() {
			defer m.Goroutines.Done()
			ctx, cancel := context.WithTimeout(m.ctx, m.opts.Handshake)
			defer cancel()
			conn, _, err := m.dial(ctx, p.Rank, uint32(i+1))
			if err == nil && m.attachBulk(p, conn) != nil {
				conn.Close()
			}
		}()
	}
}

// acceptor takes the connections that other ranks make to this one.
type acceptor struct {
	m         *Mesh
	listener  net.Listener
	connected chan int   // the ranks that have made their first connection
	exhausted chan error // no descriptor is left for a connection; for Join

	strangers *strangers.List // until they have said hello

	mu    sync.Mutex
	taken map[int]bool // ranks whose first connection has been accepted
}

func (d *acceptor) accept() {
	defer d.m.Goroutines.Done()
	for {
		d.strangers.Pace()
		c, err := d.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// No descriptors left, or the connection has ended already.
			if openfiles.Exhausted(err) {
				select {
				case d.exhausted <- openfiles.Explain(err):
				default:
				}
			}
			select {
			case <-d.m.ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		if !d.strangers.Add(c, d.m.opts.Handshake) {
			c.Close()
			return
		}
		d.m.Goroutines.Add(1)
		go func() {
			defer d.m.Goroutines.Done()
			if !d.handshake(c.(*net.TCPConn)) {
				d.strangers.Refuse(c)
			}
		}()
	}
}

// close stops accepting and ends every handshake.
func (d *acceptor) close() {
	d.listener.Close()
	d.strangers.Close()
}

// handshake finds out which rank has connected, and reports whether the mesh has taken the
// connection. A connection without the token gets no answer.
func (d *acceptor) handshake(tcp *net.TCPConn) bool {
	m := d.m
	conn, proved := net.Conn(tcp), func() {}
	if m.opts.TLS != nil {
		count := strangers.InHandshake(tcp)
		conn, proved = tls.Server(count, m.opts.TLS), count.Proved
	}
	var b [helloLen]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return false
	}
	h, err := parseHello(b[:], m.addrs[m.Rank()].token)
	if err != nil || !d.strangers.Remove(tcp) {
		return false
	}
	proved()
	verdict := uint32(verdictOK)
	known := h.rank < uint32(m.Size()) // as an int of 32 bits it may be negative
	peer := int(h.rank)
	switch {
	case h.size != uint32(m.Size()):
		verdict = verdictSize
	case !known || peer == m.Rank() || h.lane == 0 && peer < m.Rank():
		verdict = verdictRank
	case h.lane == 0 && !d.claim(peer):
		verdict = verdictTwice
	case h.lane > 0 && !m.expect(peer, conn):
		// From here on the peer has not left before this connection has ended, even if
		// its BYE on the first connection is read earlier.
		verdict = verdictEnded
	}
	answer := m.hello(token{}, h.lane)
	answer.verdict = verdict
	if known {
		answer.token = m.addrs[peer].token
	}
	err = m.opts.tune(tcp)
	if err == nil {
		_, err = conn.Write(answer.encode())
	}
	if verdict != verdictOK {
		return false
	}
	tcp.SetDeadline(time.Time{})
	switch {
	case h.lane > 0:
		return m.attachInbound(peer, conn, err == nil)
	case err != nil:
		d.release(peer)
		return false
	}
	if m.attach(peer, conn, h) != nil {
		m.sayWhy(conn)
		return false
	}
	d.connected <- peer
	return true
}

// claim reports whether this is the only first connection of a peer. It is asked before the
// answer is sent: if a peer tries two at once, both sides must keep the same one.
func (d *acceptor) claim(peer int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken[peer] {
		return false
	}
	d.taken[peer] = true
	return true
}

// release undoes claim for a connection that ended before it was used.
func (d *acceptor) release(peer int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.taken, peer)
}
