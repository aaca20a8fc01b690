package tcp

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// filter stands between clients and a server as a server that knows less: it
// ends a connection on a request that knows does not accept.
type filter struct {
	net.Listener
	dialect *dialect // what the server behind is spoken to in
	knows   func(*request) bool
	backend string
}

// newFilter returns its address.
func newFilter(t *testing.T, d *dialect, knows func(*request) bool) string {
	ln, err := net.Listen("tcp", local)
	require.NoError(t, err)
	f := &filter{ln, d, knows, serve(t, ServerOptions{plain: true}).Addr().String()}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go f.relay(c)
		}
	}()
	t.Cleanup(func() { ln.Close(); <-ended })
	return ln.Addr().String()
}

func (f *filter) relay(c net.Conn) {
	defer c.Close()
	b, err := net.Dial("tcp", f.backend)
	if err != nil {
		return
	}
	defer b.Close()
	go io.Copy(c, b)
	r := bufio.NewReader(c)
	if f.dialect == v2d {
		if _, err := io.CopyN(b, r, int64(len(opening))); err != nil {
			return
		}
	}
	for {
		// As an old server does, it takes VALIDATE and PING for a SET with a key
		// of a length that cannot be.
		req, err := readRequest(r, f.dialect, Limits{}.withDefaults())
		if err != nil || !f.knows(req) {
			return
		}
		out, err := req.append(nil, f.dialect)
		if err != nil {
			return
		}
		if _, err := b.Write(out); err != nil {
			return
		}
	}
}

func TestOldServerIsFoundOut(t *testing.T) {
	addr := newFilter(t, v1d, func(*request) bool { return true })
	s := join(t, addr, Options{})
	require.Equal(t, v1d, s.dialer.dialect)
	works(t, s)
	c := must.Get(s.Clone(t.Context()))
	defer c.Close()
	require.True(t, store.IsTorch1(c))
	require.ErrorIs(t, must.Err(s.QueueLen(t.Context(), "q")), errors.ErrUnsupported)
	require.ErrorIs(t, must.Err(s.ListKeys(t.Context())), errors.ErrUnsupported)
	works(t, s)
}

// A server that closes a new connection to make room is no old server.
func TestNewServerIsFoundOut(t *testing.T) {
	server := serve(t, ServerOptions{})
	d, first := dialer{addr: server.Addr().String()}, true
	d.connectTo = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err == nil && first {
			first = false
			until(t, func() bool {
				server.clients.mu.Lock()
				defer server.clients.mu.Unlock()
				return server.clients.makeRoom()
			})
		}
		return c, err
	}
	c := must.Get(d.dialRetry(t.Context()))
	defer c.Close()
	require.Equal(t, pytorch, d.dialect)
	require.Equal(t, native, c.dialect)
}

// A server of the new dialect may lack what came later; to find out costs no
// connection that is in use.
func TestServerWithoutQueues(t *testing.T) {
	old := func(r *request) bool { return r.query <= qPing }
	s := join(t, newFilter(t, v2d, old), Options{})
	require.Equal(t, v2d, s.dialer.dialect)
	s.mu.Lock()
	first := s.atRest[0]
	s.mu.Unlock()
	for range 2 {
		require.ErrorIs(t, s.QueuePush(t.Context(), "q", nil), errors.ErrUnsupported)
		_, err := s.QueuePop(t.Context(), "q", true)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		_, err = s.ListKeys(t.Context())
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "LIST_KEYS")
	}
	s.mu.Lock()
	require.True(t, slices.Contains(s.atRest, first))
	s.mu.Unlock()
	works(t, s)

	s = join(t, newFilter(t, v2d, func(r *request) bool { return r.query <= qQueueLen }), Options{})
	require.NoError(t, s.QueuePush(t.Context(), "q", nil))
	require.ErrorIs(t, must.Err(s.ListKeys(t.Context())), errors.ErrUnsupported)
}

func TestServerComesLater(t *testing.T) {
	addr := freeport.Loopback(t)
	joined := go1(func() error {
		s, err := New(t.Context(), addr, Options{Timeout: patience, WorldSize: 2})
		if err == nil {
			err = s.Close()
		}
		return err
	})
	err := outOfTime(t, addr, Options{}, "refused")
	require.ErrorContains(t, err, addr)
	require.ErrorContains(t, err, "refused")

	host := join(t, addr, Options{Server: true, WorldSize: 2}) // waits for the other
	require.NoError(t, await(t, joined))
	require.Equal(t, "2", must.Get(host.readWire(t, workers)))
}

// readWire reads a key as it is on the wire.
func (s *Store) readWire(t *testing.T, wire string) (string, error) {
	v, err := s.get(t.Context(), "get", wire)
	return string(v), err
}

func TestWorkersThatDoNotCome(t *testing.T) {
	err := outOfTime(t, local, Options{Server: true, WorldSize: 3}, "1 of 3 ranks have joined")
	require.ErrorContains(t, err, "1 of 3 workers")

	s := join(t, local, Options{Server: true, WorldSize: 3, NoWait: true})
	n, err := s.NumKeys(t.Context())
	require.NoError(t, err)
	require.Zero(t, n, "nobody is counted")
	_, err = New(t.Context(), local, Options{Server: true, WorldSize: -1})
	require.ErrorContains(t, err, "WorldSize")
	for _, addr := range []string{"no port", "127.0.0.1:http", "127.0.0.1:0", "127.0.0.1:65536"} {
		_, err = New(t.Context(), addr)
		require.ErrorContains(t, err, addr)
		require.ErrorContains(t, err, "port")
	}
	_, err = New(t.Context(), local, Options{Server: true, Limits: Limits{Key: -1}})
	require.ErrorContains(t, err, "Key")
}

func TestServerDies(t *testing.T) {
	for name, d := range dialects {
		t.Run(name, func(t *testing.T) {
			server := serve(t, ServerOptions{})
			addr := server.Addr().String()
			s := join(t, addr, Options{dialect: d})
			require.NoError(t, s.Set(t.Context(), "k", nil))
			wait := go1(func() error { return s.Wait(t.Context(), "k", "never") })
			get := go1(func() error { _, err := s.Get(t.Context(), "later"); return err })
			until(t, func() bool { return server.Stats().Waiting == 2 })
			require.NoError(t, server.Close())

			err := await(t, wait)
			require.ErrorIs(t, err, ErrDisconnected)
			require.ErrorContains(t, err, addr)
			require.ErrorContains(t, err, `wait "k" "never"`)
			require.NotErrorIs(t, err, store.ErrTimeout)
			err = await(t, get)
			require.ErrorIs(t, err, ErrDisconnected)
			require.ErrorContains(t, err, `get "later"`)

			for range maxAtRest + 1 { // no call hangs or succeeds
				err = s.Set(t.Context(), "k", nil)
				require.ErrorContains(t, err, `set "k"`)
				require.ErrorContains(t, err, addr)
			}
			require.ErrorContains(t, must.Err(s.Clone(t.Context())), "clone")
		})
	}
}

// A server that has stopped, as by SIGSTOP, holds up a call until its context
// ends, and a wait a little longer.
func TestServerHangs(t *testing.T) {
	ln := must.Get(net.Listen("tcp", local))
	defer ln.Close()
	s := join(t, ln.Addr().String(), Options{dialect: v1d})
	s.dialer.dialect = v2d
	s.atRest[0].dialect = v2d // its handshake is done, say
	ctx, cancel := context.WithCancel(t.Context())
	wait := go1(func() error { return s.Wait(ctx, "k") })
	until(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.atRest) == 0 })
	cancel()
	err := await(t, wait)
	require.ErrorIs(t, err, context.Canceled)

	s.SetTimeout(30 * time.Millisecond)
	require.ErrorIs(t, s.Set(t.Context(), "k", nil), store.ErrTimeout)
	require.ErrorIs(t, s.Set(within(t, 20*time.Millisecond), "k", nil), store.ErrTimeout)
	_, err = New(within(t, 50*time.Millisecond), ln.Addr().String())
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// scripted answers one client's requests by hand, after the handshake.
func scripted(t *testing.T) (*Store, *raw) {
	ln, err := net.Listen("tcp", local)
	require.NoError(t, err)
	defer ln.Close()
	accepted := go1(func() net.Conn {
		c, err := ln.Accept()
		if err != nil {
			return nil
		}
		b := make([]byte, 10)
		if _, err := io.ReadFull(c, b); err != nil {
			return nil
		}
		c.Write(b[6:])
		return c
	})
	s := join(t, ln.Addr().String(), Options{})
	c := await(t, accepted)
	require.NotNil(t, c)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	s.patient()
	return s, &raw{t, c, bufio.NewReader(c)}
}

// takes reads one request.
func (r *raw) takes(q query) *request {
	r.Helper()
	req := must.Get(readRequest(r.r, v2d, Limits{}.withDefaults()))
	require.Equal(r, q, req.query)
	return req
}

// A store tells by which address its ranks are reached: a loopback one if only
// this host reaches the server, none if it cannot tell.
func TestLocalAddr(t *testing.T) {
	local := func(addr string, o Options) netip.Addr {
		s := join(t, addr, o)
		c := must.Get(s.Clone(t.Context()))
		defer c.Close()
		require.Equal(t, s.LocalAddr(), store.LocalAddrOf(store.Prefix("p", c)))
		return s.LocalAddr()
	}
	loopback := netip.MustParseAddr("127.0.0.1")
	require.Equal(t, loopback, local("127.0.0.1:0", Options{Server: true}))
	require.False(t, local("127.0.0.1:0", Options{Server: true, Listen: ":0"}).IsValid())
	server := serve(t, ServerOptions{})
	_, port, err := net.SplitHostPort(server.Addr().String())
	require.NoError(t, err)
	require.Equal(t, loopback, local(server.Addr().String(), Options{}))
	require.Equal(t, loopback, local(net.JoinHostPort("localhost", port), Options{}))
}

// The key comes when the wait has just been given up: then the wait succeeds.
func TestCancelRace(t *testing.T) {
	s, server := scripted(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := go1(func() error { return s.Wait(ctx, "k") })
	server.takes(qWait)
	cancel()
	server.takes(qCancelWait)
	server.send([]byte{0, 1})
	require.NoError(t, await(t, done))

	// A get has no time left to get.
	ctx, cancel = context.WithCancel(t.Context())
	done = go1(func() error { _, err := s.Get(ctx, "k"); return err })
	server.takes(qWait)
	cancel()
	server.takes(qCancelWait)
	server.send([]byte{0, 1})
	require.ErrorIs(t, await(t, done), context.Canceled)
}

func TestRepliesThatAreNone(t *testing.T) {
	for name, test := range map[string]struct {
		call  func(*Store) error
		reply []byte
	}{
		"check":        {func(s *Store) error { _, err := s.Check(t.Context(), "k"); return err }, []byte{2}},
		"wait":         {func(s *Store) error { return s.Wait(t.Context(), "k") }, []byte{1}},
		"confirmation": {func(s *Store) error { return s.Set(t.Context(), "k", nil) }, u64(1 << 63)},
		"list":         {func(s *Store) error { _, err := s.ListKeys(t.Context()); return err }, u64(1 << 63)},
		"blob":         {func(s *Store) error { _, err := s.CompareSet(t.Context(), "k", nil, nil); return err }, u64(1 << 63)},
		"pop":          {func(s *Store) error { _, err := s.QueuePop(t.Context(), "k", false); return err }, append(u64(1), u64(1<<63)...)},
		"cut and over": {func(s *Store) error { _, err := s.NumKeys(t.Context()); return err }, []byte{1, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			s, server := scripted(t)
			s.queues.Store(has)
			s.listing.Store(has)
			done := go1(func() error { return test.call(s) })
			_, err := server.r.Peek(1)
			require.NoError(t, err)
			server.send(test.reply)
			if name == "cut and over" {
				_, err = server.r.Discard(1) // so that it closes without reset
				require.NoError(t, err)
				server.Close()
			}
			err = await(t, done)
			require.Error(t, err)
			require.ErrorContains(t, err, s.Addr())
			require.NotErrorIs(t, err, store.ErrTimeout)
			s.mu.Lock()
			require.Empty(t, s.conns, "the connection is not used again")
			s.mu.Unlock()
		})
	}
}

func TestMissingKeysAreNamed(t *testing.T) {
	for name, opts := range map[string]ServerOptions{"native": {}, "plain": {plain: true}} {
		t.Run(name, func(t *testing.T) {
			s := join(t, local, Options{Server: true, ServerOptions: opts})
			s.patient()
			require.NoError(t, s.Set(t.Context(), "a", nil))
			require.NoError(t, s.Set(t.Context(), "c", nil))
			// expires ends the call's time once the server has it.
			expires := func(call func(ctx context.Context) error) *store.Error {
				ctx := newExpiring(t)
				done := go1(func() error { return call(ctx) })
				until(t, func() bool { return s.Server().Stats().Waiting > 0 })
				ctx.expire()
				e := must.As[*store.Error](t, await(t, done))
				return e
			}
			e := expires(func(ctx context.Context) error { return s.Wait(ctx, "a", "b", "c", "d", "b") })
			require.Equal(t, []string{"b", "d"}, e.Keys)
			require.Positive(t, e.After)
			e = expires(func(ctx context.Context) error { _, err := s.MultiGet(ctx, []string{"a", "b"}); return err })
			require.Equal(t, []string{"b"}, e.Keys)
			require.EqualValues(t, 1, s.Server().Stats().Accepted, "on the same connection")
		})
	}
}

// patient gives the server all the time that it takes to say that a wait is over.
func (s *Store) patient() {
	s.grace = patience
	if m := s.mux.Load(); m != nil {
		m.grace = patience
	}
}

func TestClientLimits(t *testing.T) {
	s := join(t, local, Options{Server: true})
	over := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, store.ErrTooLarge)
	}
	long, big := strings.Repeat("k", 8192), make([]byte, 8<<20+1)
	over(s.Set(t.Context(), long, nil))
	require.NoError(t, s.Set(t.Context(), long[1:], nil))
	over(s.Set(t.Context(), "k", big))
	require.NoError(t, s.Set(t.Context(), "k", big[1:]))
	_, err := s.Get(t.Context(), long)
	over(err)
	_, err = s.QueuePop(t.Context(), long, true)
	over(err)
	over(s.Wait(t.Context(), make([]string, 131073)...))
	require.NoError(t, s.Append(t.Context(), "k", big[1:]))
	require.Len(t, must.Get(s.Get(t.Context(), "k")), 16<<20)
	require.Zero(t, s.Server().Stats().Refused)

	wide := join(t, local, Options{Server: true, Limits: Limits{Value: 9 << 20}})
	require.NoError(t, wide.Set(t.Context(), "k", big))
}

// With a server of PyTorch's, calls in a row use one connection; those that
// wait get their own.
func TestConnections(t *testing.T) {
	server := serve(t, ServerOptions{plain: true})
	s := join(t, server.Addr().String(), Options{})
	s.patient()
	for range 10 {
		works(t, s)
		ctx := newExpiring(t)
		wait := go1(func() error { return s.Wait(ctx, "never") })
		until(t, func() bool { return server.Stats().Waiting == 1 })
		ctx.expire()
		require.ErrorIs(t, await(t, wait), store.ErrTimeout)
	}
	require.EqualValues(t, 1, server.Stats().Accepted)
	const n = 20
	var waits []<-chan error
	for range n {
		waits = append(waits, go1(func() error { return s.Wait(t.Context(), "go") }))
	}
	until(t, func() bool { return server.Stats().Clients == n || server.Stats().Clients == n+1 })
	require.NoError(t, s.Set(t.Context(), "go", nil))
	for _, w := range waits {
		require.NoError(t, await(t, w))
	}
	until(t, func() bool { return server.Stats().Clients <= maxAtRest })
	works(t, s)
}

// onPop is a connection that calls a function after it has sent QUEUE_POP.
type onPop struct {
	net.Conn
	f func()
}

func (c onPop) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if query(b[0]) == qQueuePop {
		c.f()
	}
	return n, err
}

// A pop whose context ends while its element is on its way returns the element.
func TestPopOnItsWay(t *testing.T) {
	server := serve(t, ServerOptions{plain: true})
	end := func() {}
	d := dialer{addr: server.Addr().String(), dialect: pytorch, plain: true}
	d.connectTo = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		return onPop{c, func() { end() }}, err
	}
	c := must.Get(d.dial(t.Context()))
	s := newStore(d, Limits{}.withDefaults(), c)
	defer s.Close()
	for i := range 20 {
		require.NoError(t, s.QueuePush(t.Context(), "q", []byte("v")))
		ctx, cancel := context.WithCancel(t.Context())
		end = cancel
		v := must.Get(s.QueuePop(ctx, "q", i%2 == 0))
		require.Equal(t, "v", string(v))
	}
}

func TestCloseWhileConnecting(t *testing.T) {
	ln := must.Get(net.Listen("tcp", local))
	defer ln.Close()
	s := join(t, ln.Addr().String(), Options{dialect: v1d})
	s.dialer.dialect = v2d // whose handshake this server does not answer
	wait := go1(func() error { return s.Wait(t.Context(), "k") })
	until(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.atRest) == 0 })
	other := go1(func() error { return s.Set(t.Context(), "k", nil) })
	until(t, func() bool { return len(s.turn) == 1 })
	third := go1(func() error { return s.Set(t.Context(), "k", nil) })
	require.NoError(t, s.Close())
	for _, c := range []<-chan error{wait, other, third} {
		require.ErrorIs(t, await(t, c), store.ErrClosed)
	}
}

func readRequest(r *bufio.Reader, d *dialect, l Limits) (*request, error) {
	req := new(request)
	return req, req.readFrom(r, d, l)
}

// A store with a server waits in Drain for the server's other clients, and no longer than its context.
func TestDrain(t *testing.T) {
	host := must.Get(New(t.Context(), "127.0.0.1:0", Options{Server: true}))
	defer host.Close()
	host.Drain(t.Context())
	guest := must.Get(New(t.Context(), host.Addr()))
	require.NoError(t, guest.Set(t.Context(), "k", nil))
	guest.Drain(t.Context())

	ended, end := context.WithCancel(t.Context())
	end()
	host.Drain(ended)
	drained := go1(func() error { host.Drain(t.Context()); return nil })
	select {
	case <-drained:
		t.Fatal("a client is left")
	case <-time.After(50 * time.Millisecond):
	}
	require.NoError(t, guest.Close())
	require.NoError(t, await(t, drained))
}

// TestOnce: a rank does not join a server that it has left. It waits for the next one at the address.
func TestOnce(t *testing.T) {
	for name, dialect := range map[string]*dialect{"found out": nil, "v1": torch1, "v2": pytorch} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			first := must.Get(Listen(ctx, "127.0.0.1:0"))
			defer first.Close()
			addr := first.Addr().String()
			join := func(rank int) (*Store, error) {
				return New(ctx, addr, Options{WorldSize: 3, Rank: rank, Once: true, CountOnly: true, dialect: dialect})
			}
			one := must.Get(join(1))
			require.NoError(t, one.Leave(ctx, 1))
			require.NoError(t, one.Close())
			two, err := join(2) // has not left
			require.NoError(t, err)
			require.NoError(t, two.Close())

			before := first.Stats().Accepted
			short := newExpiring(t)
			refused := go1(func() error {
				return must.Err(New(short, addr, Options{WorldSize: 3, Rank: 1, Once: true, dialect: dialect}))
			})
			until(t, func() bool { return first.Stats().Accepted > before+1 }) // a second try follows a refusal
			short.expire()
			err = await(t, refused)
			require.ErrorIs(t, err, store.ErrTimeout)
			require.ErrorContains(t, err, "belongs to a group that this rank has left")

			again := make(chan error, 1)
			go func() {
				var err error
				one, err = join(1)
				again <- err
			}()
			before = first.Stats().Accepted
			until(t, func() bool { return first.Stats().Accepted > before+1 })
			require.NoError(t, first.Close())
			second := must.Get(Listen(ctx, addr))
			defer second.Close()
			require.NoError(t, <-again)
			require.NoError(t, one.Set(ctx, "k", nil))
			require.NoError(t, one.Close())
			require.Positive(t, second.Stats().Keys)
		})
	}
}
