package tcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// scriptedNative answers one native client's requests by hand, after the
// handshake.
func scriptedNative(t *testing.T) (*Store, *raw) {
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
		c.Write(binary.LittleEndian.AppendUint32(nil, binary.LittleEndian.Uint32(b[6:])^accept))
		hello := make([]byte, 4+4+1+8)
		if _, err := io.ReadFull(c, hello); err != nil {
			return nil
		}
		c.Write(cat(u32(frameHead+8+8), u32(0), int(done), u64(8), u64(1)))
		return c
	})
	s := join(t, ln.Addr().String(), Options{})
	c := await(t, accepted)
	require.NotNil(t, c)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	s.mux.Load().grace = patience
	return s, &raw{t, c, bufio.NewReader(c)}
}

// asked reads one native request.
func (r *raw) asked(q query) (id uint32, req *request) {
	r.Helper()
	n := must.Get(readUint32(r.r))
	id = must.Get(readUint32(r.r))
	req = must.Get(readRequest(r.r, native, Limits{}.withDefaults()))
	require.Equal(r, q, req.query)
	require.EqualValues(r, 4+req.size(), n)
	return id, req
}

func u32(n uint32) []byte { return binary.LittleEndian.AppendUint32(nil, n) }

// answers sends a native reply.
func (r *raw) answers(id uint32, status byte, body ...byte) {
	r.Helper()
	r.send(cat(u32(uint32(frameHead+len(body))), u32(id), int(status), body))
}

// talkNative opens a native connection.
func talkNative(t *testing.T, s *Server) *raw {
	nonce := uint32(offer)<<16 | 0xabcd
	c := dialRaw(t, s.Addr().String(), cat(opening, 13, u32(nonce))...)
	c.expect(u32(nonce ^ accept)...)
	return c
}

func (r *raw) ask(id uint32, req *request) {
	r.Helper()
	r.send(appendFrame(nil, id, req))
}

func (r *raw) told(id uint32, status byte, body ...byte) {
	r.Helper()
	r.expect(cat(u32(uint32(frameHead+len(body))), u32(id), int(status), body)...)
}

func TestNativeBytes(t *testing.T) {
	server := serve(t, ServerOptions{})
	c, o := talkNative(t, server), talk(t, server, v2d)
	waiting := func(n int) { t.Helper(); until(t, func() bool { return server.Stats().Waiting == n }) }

	c.send([]byte{24, 0, 0, 0, 7, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, '/', 'a', 1, 0, 0, 0, 0, 0, 0, 0, 'x'})
	c.expect(5, 0, 0, 0, 7, 0, 0, 0, 0)
	c.ask(8, keyed(qGet, "a"))
	c.told(8, done, cat("x")...)

	// Several waits at once, answered as their keys come.
	c.ask(1, &request{query: qMultiGet, keys: wireKeys([]string{"b", "a", "c", "b"})})
	c.ask(2, keyed(qGet, "c"))
	c.ask(3, waitFor("b", "a"))
	c.ask(4, keyed(qQueueTake, "c"))
	c.ask(5, keyed(qGet, "b"))
	waiting(2)
	o.request(v2d, keyed(qQueuePush, "c", []byte("element"))) // no key for a get
	c.told(4, done, cat(uint64(1), "element")...)
	o.request(v2d, keyed(qSet, "c", []byte("C")))
	c.told(2, done, cat("C")...)
	c.ask(5|1<<31, &request{query: qGiveUp, num: 5})
	c.told(5, givenUp, 0, 0, 0, 0)
	o.request(v2d, keyed(qSet, "b", []byte("B")))
	c.told(1, done, cat("B", "x", "C", "B")...)
	c.told(3, done, 0)

	// A key that went while others were missing is waited for again.
	c.ask(1, &request{query: qMultiGet, keys: wireKeys([]string{"p", "q"})})
	waiting(1)
	o.request(v2d, keyed(qSet, "p", nil))
	o.request(v2d, keyed(qDelete, "p"))
	o.expect(u64(1)...)
	o.request(v2d, keyed(qSet, "q", nil))
	o.open(v2d)
	waiting(1)
	c.ask(9, &request{query: qGiveUp, num: 1})
	c.told(1, givenUp, 0, 0, 0, 0)
	c.ask(10, &request{query: qGiveUp, num: 77}) // nothing to give up is no error
	c.ask(11, &request{query: qPing, num: 5})
	c.told(11, done, 5, 0, 0, 0)
	waiting(0)

	for name, bad := range map[string][]byte{
		"length":      {20, 0, 0, 0, 1, 0, 0, 0, byte(qNumKeys)},
		"query":       {5, 0, 0, 0, 1, 0, 0, 0, byte(qWatch)},
		"VALIDATE":    cat(u32(9), u32(0), opening),
		"CANCEL_WAIT": {5, 0, 0, 0, 1, 0, 0, 0, byte(qCancelWait)},
	} {
		t.Run(name, func(t *testing.T) {
			c := talkNative(t, server)
			c.send(bad)
			c.closed()
		})
	}
	o.open(v2d)
}

// A get is one request, and a set too.
func TestNativeRoundTrips(t *testing.T) {
	s, server := scriptedNative(t)
	get := go1(func() error {
		v, err := s.Get(t.Context(), "k")
		if err == nil && string(v) != "value" {
			err = fmt.Errorf("got %q", v)
		}
		return err
	})
	id, req := server.asked(qGet)
	require.Equal(t, []string{"/k"}, req.keys)
	server.answers(id, done, cat("value")...)
	require.NoError(t, await(t, get))

	set := go1(func() error { return s.Set(t.Context(), "k", []byte("v")) })
	id, _ = server.asked(qSet)
	server.answers(id, done)
	require.NoError(t, await(t, set))

	many := go1(func() error {
		v, err := s.MultiGet(t.Context(), []string{"a", "b"})
		if err == nil && (len(v) != 2 || string(v[1]) != "B") {
			err = fmt.Errorf("got %q", v)
		}
		return err
	})
	id, _ = server.asked(qMultiGet)
	server.answers(id, done, cat("A", "B")...)
	require.NoError(t, await(t, many))
	require.Zero(t, server.r.Buffered())
}

// The values of one MultiGet are the caller's each on its own.
func TestMultiGetValues(t *testing.T) {
	for name, server := range map[string]ServerOptions{"native": {}, "plain": {plain: true}} {
		t.Run(name, func(t *testing.T) {
			s := join(t, local, Options{Server: true, ServerOptions: server})
			var keys []string
			var want [][]byte
			for i := range 3000 {
				n := []int{0, 1, i % 50, copied - 1, copied, copied + 1, 4 * copied}[i%7]
				keys = append(keys, fmt.Sprint(i))
				want = append(want, bytes.Repeat([]byte{byte(i)}, n))
			}
			require.NoError(t, s.MultiSet(t.Context(), keys, want))
			got := must.Get(s.MultiGet(t.Context(), keys))
			require.Equal(t, want, got)
			for i, v := range got {
				for j := range v {
					v[j] = ^v[j]
				}
				got[i] = append(v, "more"...)
			}
			for i, v := range got {
				turned := bytes.Clone(want[i])
				for j := range turned {
					turned[j] = ^turned[j]
				}
				require.Equal(t, append(turned, "more"...), v)
			}
		})
	}
}

// All calls of a client share one connection, and one that waits holds up no
// other.
func TestNativeOneConnection(t *testing.T) {
	s := join(t, local, Options{Server: true})
	var waits []<-chan error
	for i := range 50 {
		waits = append(waits, go1(func() error {
			v, err := s.Get(t.Context(), fmt.Sprint("later ", i))
			if err == nil && string(v) != fmt.Sprint(i) {
				err = fmt.Errorf("got %q for %d", v, i)
			}
			return err
		}))
	}
	until(t, func() bool { return s.Server().Stats().Waiting == len(waits) })
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			for j := range 50 {
				key, want := fmt.Sprint(i, " ", j), strings.Repeat(fmt.Sprint(i), j)
				if err := s.Set(t.Context(), key, []byte(want)); err != nil {
					t.Error(err)
				}
				if v, err := s.Get(t.Context(), key); err != nil || string(v) != want {
					t.Errorf("get: %q, %v", v, err)
				}
				if _, err := s.Add(t.Context(), "n", 1); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1000, must.Get(s.Add(t.Context(), "n", 0)))
	for i := range waits {
		require.NoError(t, s.Set(t.Context(), fmt.Sprint("later ", i), fmt.Append(nil, i)))
	}
	for _, w := range waits {
		require.NoError(t, await(t, w))
	}
	require.EqualValues(t, 1, s.Server().Stats().Accepted)
}

// What a server refuses is the error of that call, and no other's.
func TestNativeRefusals(t *testing.T) {
	s := join(t, local, Options{Server: true, ServerOptions: ServerOptions{MaxMemory: 1000, Limits: Limits{Value: 500, Keys: 4, Message: 5000}}})
	later := go1(func() error { _, err := s.Get(t.Context(), "later"); return err })
	until(t, func() bool { return s.Server().Stats().Waiting == 1 })

	require.NoError(t, s.Set(t.Context(), "text", []byte("abc")))
	_, err := s.Add(t.Context(), "text", 1)
	require.ErrorIs(t, err, store.ErrNotNumber)
	require.ErrorContains(t, err, `add "text"`)
	v := make([]byte, 500)
	require.NoError(t, s.Set(t.Context(), "a", v))
	err = s.Set(t.Context(), "b", v)
	require.ErrorIs(t, err, store.ErrTooLarge)
	require.ErrorContains(t, err, "1000")
	require.ErrorContains(t, err, `set "b"`)
	require.False(t, must.Get(s.Check(t.Context(), "b")))
	err = s.Wait(t.Context(), "m1", "m2", "m3", "m4") // with the one above 5
	require.ErrorIs(t, err, store.ErrTooLarge)

	require.NoError(t, s.Set(t.Context(), "later", nil))
	require.NoError(t, await(t, later))
	require.EqualValues(t, 1, s.Server().Stats().Accepted)
	require.Zero(t, s.Server().Stats().Refused)
}

// One connection's waits hold no more than a message's worth of keys.
func TestNativeWaitsAreBounded(t *testing.T) {
	const message = 10_000
	server := serve(t, ServerOptions{Limits: Limits{Message: message}})
	c := talkNative(t, server)
	key := strings.Repeat("k", 990)
	const n = 10
	for i := range uint32(n) {
		c.ask(i, keyed(qGet, fmt.Sprint(key, i)))
	}
	until(t, func() bool { return server.Stats().Waiting == n })
	c.ask(n, keyed(qGet, key+"10"))
	size := must.Get(readUint32(c.r))
	require.EqualValues(t, n, must.Get(readUint32(c.r)))
	status := must.Get(c.r.ReadByte())
	o := must.Get(readNative(c.r, qGet, 1, status, size-frameHead))
	require.ErrorIs(t, o.err, store.ErrTooLarge)
	require.ErrorContains(t, o.err, "this connection waits for")

	c.ask(n+1, &request{query: qGiveUp, num: 3})
	c.told(3, givenUp, 0, 0, 0, 0)
	c.ask(n, keyed(qGet, key+"x"))
	until(t, func() bool { return server.Stats().Waiting == n })
}

// A call that is given up ends at once, and its reply, which comes later, is
// nobody's.
func TestNativeGivenUp(t *testing.T) {
	s, server := scriptedNative(t)
	ctx, cancel := context.WithCancel(t.Context())
	get := go1(func() error { _, err := s.Get(ctx, "k"); return err })
	first, _ := server.asked(qGet)
	cancel()
	require.ErrorIs(t, await(t, get), context.Canceled)
	_, req := server.asked(qGiveUp)
	require.EqualValues(t, first, req.num)

	late := newExpiring(t)
	set := go1(func() error { return s.Set(late, "k", nil) })
	second, _ := server.asked(qSet)
	require.NotEqual(t, first, second, "a number is not used again before its reply came")
	late.expire()
	err := await(t, set)
	require.ErrorIs(t, err, store.ErrTimeout)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	late = newExpiring(t)
	count := go1(func() error { return must.Err(s.NumKeys(late)) })
	third, _ := server.asked(qNumKeys)
	late.expire()
	require.ErrorIs(t, await(t, count), store.ErrTimeout)

	server.answers(second, done)
	server.answers(third, done, u64(3)...)
	server.answers(first, done, cat("value")...)
	add := go1(func() error {
		n, err := s.Add(t.Context(), "n", 1)
		if err == nil && n != 9 {
			err = fmt.Errorf("got %d", n)
		}
		return err
	})
	id, _ := server.asked(qAdd)
	server.answers(id, done, u64(9)...)
	require.NoError(t, await(t, add))
}

// lateGiveUp is a connection that holds up GIVE_UPs.
type lateGiveUp struct {
	net.Conn
	begun, release chan struct{}
}

func (c *lateGiveUp) Write(b []byte) (int, error) {
	if len(b) > 8 && query(b[8]) == qGiveUp {
		c.begun <- struct{}{}
		<-c.release
	}
	return c.Conn.Write(b)
}

// The reply to a wait may come before its GIVE_UP has been written. The next call gets its number, and
// must not be given up.
func TestNativeGiveUpIsLate(t *testing.T) {
	server := serve(t, ServerOptions{})
	late := &lateGiveUp{begun: make(chan struct{}, 1), release: make(chan struct{})}
	d := dialer{addr: server.Addr().String(), dialect: pytorch}
	d.connectTo = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		late.Conn = c
		return late, err
	}
	c, err := d.dial(t.Context())
	require.NoError(t, err)
	s := newStore(d, Limits{}.withDefaults(), c)
	defer s.Close()
	waiting := func(n int) func() bool { return func() bool { return server.Stats().Waiting == n } }

	ctx, cancel := context.WithCancel(t.Context())
	first := go1(func() error { _, err := s.Get(ctx, "first"); return err })
	until(t, waiting(1))
	cancel()
	require.ErrorIs(t, await(t, first), context.Canceled)
	await(t, late.begun)
	other := join(t, server.Addr().String(), Options{})
	require.NoError(t, other.Set(t.Context(), "first", nil))
	m := s.mux.Load()
	until(t, func() bool { m.mu.Lock(); defer m.mu.Unlock(); return m.live == 0 })

	second := go1(func() string { v, err := s.Get(within(t, patience), "second"); return fmt.Sprint(string(v), err) })
	until(t, func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.out) > 0 || waiting(1)() })
	close(late.release)
	_, err = s.NumKeys(t.Context()) // after the GIVE_UP
	require.NoError(t, err)
	require.NoError(t, other.Set(t.Context(), "second", []byte("value")))
	require.Equal(t, "value<nil>", await(t, second))
}

// If a server gives up a call that nobody has given up, the call fails. Its key may be one of the
// store's own.
func TestNativeGivenUpByTheServer(t *testing.T) {
	s, server := scriptedNative(t)
	for q, call := range map[query]func() error{
		qGet: func() error { _, err := s.Get(t.Context(), "k"); return err },
		qAdd: func() error { _, err := s.Joined(t.Context()); return err },
	} {
		end := go1(call)
		id, _ := server.asked(q)
		server.answers(id, givenUp, u32(0)...)
		require.ErrorIs(t, await(t, end), errGivenUp)
	}
}

// A wait for several keys that runs out of time learns which were missing; if
// they came just now it succeeds; if the server hangs it ends without.
func TestNativeMissing(t *testing.T) {
	s, server := scriptedNative(t)
	// wait returns a wait that has been asked for and then given up.
	wait := func() (result <-chan error, id uint32) {
		ctx := newExpiring(t)
		result = go1(func() error { return s.Wait(ctx, "a", "b", "c") })
		id, _ = server.asked(qWait)
		ctx.expire()
		server.asked(qGiveUp)
		return result, id
	}
	w, id := wait()
	server.answers(id, givenUp, cat(u32(0), u32(2))...)
	err := await(t, w)
	e := must.As[*store.Error](t, err)
	require.Equal(t, []string{"a", "c"}, e.Keys)
	require.ErrorIs(t, err, store.ErrTimeout)

	w, id = wait()
	server.answers(id, done, 0)
	require.NoError(t, await(t, w))

	s.mux.Load().grace = time.Millisecond
	w, id = wait()
	err = await(t, w)
	require.ErrorAs(t, err, &e)
	require.Equal(t, []string{"a", "b", "c"}, e.Keys)
	require.ErrorIs(t, err, store.ErrTimeout)
	server.answers(id, givenUp, u32(0)...)
	works := go1(func() error { _, err := s.NumKeys(t.Context()); return err })
	id, _ = server.asked(qNumKeys)
	server.answers(id, done, u64(0)...)
	require.NoError(t, await(t, works))
}

// An element of a queue is not lost between a server that gave it and a client
// that had given up.
func TestNativeTake(t *testing.T) {
	s, server := scriptedNative(t)
	pop := func(ctx context.Context) <-chan error {
		return go1(func() error {
			v, err := s.QueuePop(ctx, "q", true)
			if err == nil && string(v) != "element" {
				err = fmt.Errorf("got %q", v)
			}
			return err
		})
	}
	element := cat(uint64(1), "element")
	ctx, cancel := context.WithCancel(t.Context())
	p := pop(ctx)
	id, _ := server.asked(qQueueTake)
	cancel()
	server.asked(qGiveUp)
	server.answers(id, done, element...)
	require.NoError(t, await(t, p))

	s.mux.Load().grace = time.Millisecond
	ctx, cancel = context.WithCancel(t.Context())
	p = pop(ctx)
	id, _ = server.asked(qQueueTake)
	cancel()
	server.asked(qGiveUp)
	require.ErrorIs(t, await(t, p), context.Canceled) // the server hangs
	server.answers(id, done, element...)
	id, req := server.asked(qQueuePush)
	require.Equal(t, []string{"/q"}, req.keys)
	require.Equal(t, "element", string(req.vals[0]))
	server.answers(id, done)
}

// A client that gives two requests one id loses its connection. The server keeps nothing of it:
// no wait, no bytes, no element of a queue.
func TestNativeIDInUse(t *testing.T) {
	const clients, long = 30, 32 << 10
	key := strings.Repeat("k", long-10)
	second := map[string]*request{
		"wait":       waitFor(key, "never 2"),
		"queue take": keyed(qQueueTake, "q"),
		"set":        keyed(qSet, "a", []byte("A")),
	}
	for name, req := range second {
		t.Run(name, func(t *testing.T) {
			server := serve(t, ServerOptions{MaxClients: 4, MaxMemory: 4 << 20, Limits: Limits{Key: long}})
			for range clients {
				c := talkNative(t, server)
				require.NoError(t, c.SetDeadline(time.Now().Add(20*time.Second)))
				c.ask(1, keyed(qQueueTake, "q"))
				c.ask(2, waitFor(key, "never"))
				until(t, func() bool { return server.Stats().Waiting == 2 })
				c.ask(2, req)
				c.closed()
				until(t, func() bool { return server.Stats().Clients == 0 })
				require.Zero(t, server.Stats().Waiting)
			}
			require.Zero(t, server.Stats().Bytes)
			require.EqualValues(t, clients, server.Stats().Refused)
			elementIsThere(t, server)
		})
	}
}

// elementIsThere pushes an element and expects that it waits for whoever comes.
func elementIsThere(t *testing.T, server *Server) {
	t.Helper()
	s := join(t, server.Addr().String(), Options{})
	require.NoError(t, s.QueuePush(t.Context(), "q", []byte("element")))
	require.EqualValues(t, 1, must.Get(s.QueueLen(t.Context(), "q")))
	require.Equal(t, "element", string(must.Get(s.QueuePop(t.Context(), "q", false))))
}

// A client that goes away while it waits for an element does not get one.
func TestNativeTakerLeaves(t *testing.T) {
	server := serve(t, ServerOptions{})
	for range 3 {
		c := talkNative(t, server)
		c.ask(1, keyed(qQueueTake, "q"))
		c.ask(2, keyed(qQueueTake, "q"))
		until(t, func() bool { return server.Stats().Waiting == 1 })
		require.NoError(t, c.Close())
		until(t, func() bool { return server.Stats().Clients == 0 })
		require.Zero(t, server.Stats().Waiting)
	}
	elementIsThere(t, server)
}

// An id is in use until its reply is sent, also if the reply waits for room.
func TestNativeIDOfAParkedReply(t *testing.T) {
	d := newData(Limits{}.withDefaults(), 0)
	p := &peer{dialect: native}
	require.NoError(t, must.Err(d.do(p, 1, keyed(qQueueTake, "q"))))
	p.out.blob(make([]byte, batch), false)
	must.Get(d.do(&peer{dialect: pytorch}, 0, keyed(qQueuePush, "q", []byte("element"))))
	require.Len(t, p.parked, 1)
	require.ErrorContains(t, must.Err(d.do(p, 1, keyed(qNumKeys, ""))), "id 1")
	d.leave(p)
	require.Empty(t, d.waits)
	require.Len(t, d.queues["/q"], 1)
}

// A reply of many small values stays as it is until it is sent, whatever others ask meanwhile.
func TestNativeReplyWaitsUnchanged(t *testing.T) {
	d := newData(Limits{}.withDefaults(), 0)
	first, second := &peer{dialect: native}, &peer{dialect: native}
	want := make(map[*peer]string)
	for _, p := range []*peer{first, second} {
		r := &request{query: qMultiGet}
		for i := range 200 {
			r.keys = append(r.keys, fmt.Sprint(p == first, i))
			value := bytes.Repeat([]byte{byte(i), byte(len(want))}, 100)
			d.keys[r.keys[i]] = value
			want[p] += string(cat(u64(uint64(len(value))), value))
		}
		must.Get(d.do(p, 7, r))
		require.NoError(t, d.answer(p))
	}
	for p, body := range want {
		r := p.out.take()
		var got bytes.Buffer
		require.NoError(t, r.send(&got))
		require.Equal(t, r.size, got.Len())
		require.Equal(t, string(cat(u32(uint32(frameHead+len(body))), u32(7), int(done), []byte(body))), got.String())
	}
}

func TestNativeRepliesThatAreNone(t *testing.T) {
	for name, reply := range map[string][]byte{
		"to no request":       cat(u32(5), u32(77), 0),
		"a long value":        cat(u32(5+9), u32(1), 0, u64(1<<30), 0),
		"without status":      cat(u32(4), u32(0), 0),
		"too long":            cat(u32(5+9), u32(0), 0, u64(1), 0),
		"too short":           cat(u32(5+7), u32(0), 0, u64(1)),
		"unknown status":      cat(u32(5), u32(0), 9),
		"missing too many":    cat(u32(5+8), u32(0), int(givenUp), u64(0)),
		"missing no key":      cat(u32(5+4), u32(0), int(givenUp), u32(0)),
		"missing half a key":  cat(u32(5+2), u32(0), int(givenUp), 0, 0),
		"a refusal without e": cat(u32(5+maxText+1), u32(0), int(tooLarge), make([]byte, maxText+1)),
	} {
		t.Run(name, func(t *testing.T) {
			s, server := scriptedNative(t)
			num := go1(func() error { _, err := s.NumKeys(t.Context()); return err })
			id, _ := server.asked(qNumKeys)
			require.Zero(t, id)
			get := go1(func() error { _, err := s.Get(t.Context(), "k"); return err })
			server.asked(qGet)
			server.send(reply)
			for call, c := range map[string]<-chan error{"num keys": num, `get "k"`: get} {
				err := await(t, c)
				require.ErrorContains(t, err, call)
				require.ErrorContains(t, err, s.Addr())
				require.NotErrorIs(t, err, store.ErrTimeout)
			}
			server.closed()
			until(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.conns) == 0 })
		})
	}
}

// The element of a pop that does not wait goes back too, if the caller has gone.
func TestNativePopGivenUp(t *testing.T) {
	s, server := scriptedNative(t)
	ctx, cancel := context.WithCancel(t.Context())
	pop := go1(func() error { _, err := s.QueuePop(ctx, "q", false); return err })
	id, _ := server.asked(qQueuePop)
	cancel()
	require.ErrorIs(t, await(t, pop), context.Canceled)
	server.answers(id, done, cat(u64(1), "abc")...)
	_, req := server.asked(qQueuePush)
	require.Equal(t, []string{"/q"}, req.keys)
	require.Equal(t, "abc", string(req.vals[0]))
}

// Clone reads what a call uses that connects again.
func TestNativeCloneWhileConnecting(t *testing.T) {
	server := serve(t, ServerOptions{})
	s := join(t, server.Addr().String(), Options{})
	for range 20 {
		s.mux.Load().c.Close()
		again := go1(func() error {
			s.NumKeys(t.Context()) // may be the one that fails
			return must.Err(s.NumKeys(t.Context()))
		})
		require.NoError(t, must.Get(s.Clone(t.Context())).Close())
		require.NoError(t, await(t, again))
	}
}

// A connection that breaks fails the calls under way and is replaced by the
// next call.
func TestNativeConnectionBreaks(t *testing.T) {
	server := serve(t, ServerOptions{})
	s := join(t, server.Addr().String(), Options{})
	wait := go1(func() error { return s.Wait(t.Context(), "never") })
	until(t, func() bool { return server.Stats().Waiting == 1 })
	server.clients.mu.Lock()
	for c := range server.clients.sessions {
		c.raw.Close()
	}
	server.clients.mu.Unlock()
	require.ErrorIs(t, await(t, wait), ErrDisconnected)
	works(t, s)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { works(t, s) })
	}
	wg.Wait()
	require.EqualValues(t, 2, server.Stats().Accepted)
}

// A server that has stopped, as by SIGSTOP, holds up a call until its context
// ends, however much is to be sent.
func TestNativeServerHangs(t *testing.T) {
	s, _ := scriptedNative(t)
	value := make([]byte, 1<<20)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			err := s.Set(within(t, 50*time.Millisecond), "k", value)
			if !errors.Is(err, store.ErrTimeout) {
				t.Errorf("the set ended with %v", err)
			}
		})
	}
	wg.Wait()
	m := s.mux.Load()
	m.mu.Lock()
	require.LessOrEqual(t, len(m.out), pending+len(value)+100)
	m.mu.Unlock()
	wait := go1(func() error { return s.Wait(t.Context(), "k") })
	require.NoError(t, s.Close())
	require.ErrorIs(t, await(t, wait), store.ErrClosed)
}

// A client with many waits that does not read makes the server hold no more
// than one message's worth of replies, and gets them all when it reads.
func TestNativeSlowReader(t *testing.T) {
	const message, n = 1 << 20, 100
	server := serve(t, ServerOptions{Limits: Limits{Message: message}})
	slow, good := talkNative(t, server), join(t, server.Addr().String(), Options{})
	value := make([]byte, message/4)
	for i := range n {
		slow.ask(uint32(i), keyed(qGet, fmt.Sprint(i)))
		slow.ask(uint32(n+i), keyed(qQueueTake, fmt.Sprint("q", i)))
	}
	until(t, func() bool { return server.Stats().Waiting == 2*n })
	var p *peer
	server.clients.mu.Lock()
	for c := range server.clients.sessions {
		c.server.data.mu.Lock()
		if len(c.peer.waits) > 0 {
			p = &c.peer
		}
		c.server.data.mu.Unlock()
	}
	server.clients.mu.Unlock()
	require.NotNil(t, p)
	for i := range n {
		require.NoError(t, good.Set(t.Context(), fmt.Sprint(i), value))
		require.NoError(t, good.QueuePush(t.Context(), fmt.Sprint("q", i), value))
		p.out.mu.Lock()
		require.LessOrEqual(t, p.out.cost(), batch+2*len(value))
		p.out.mu.Unlock()
	}
	got := make(map[uint32]bool)
	for range 2 * n {
		size := must.Get(readUint32(slow.r))
		id := must.Get(readUint32(slow.r))
		q := qGet
		if id >= n {
			q = qQueueTake
		}
		status := must.Get(slow.r.ReadByte())
		require.Equal(t, done, status)
		require.Len(t, must.Get(readNative(slow.r, q, 1, status, size-frameHead)).value, len(value))
		require.False(t, got[id])
		got[id] = true
	}
	slow.ask(1, &request{query: qPing, num: 5})
	slow.told(1, done, 5, 0, 0, 0)
}

// A steady state of calls allocates the value of a get and little else.
func TestNativeAllocations(t *testing.T) {
	if race {
		t.Skip("the race detector allocates")
	}
	s := join(t, local, Options{Server: true})
	value := []byte("127.0.0.1:12345")
	call := func() {
		require.NoError(t, s.Set(t.Context(), "k", value))
		must.Get(s.Get(t.Context(), "k"))
	}
	call()
	// Of the client the keys' wire form and the value, of the server the keys,
	// the stored value and what it reads.
	require.LessOrEqual(t, testing.AllocsPerRun(1000, call), 14.0)
}

// A client whose first server is PyTorch's speaks PyTorch's protocol to the next server too. The
// other way round it does not go on.
func TestNativeThenPlain(t *testing.T) {
	server := serve(t, ServerOptions{})
	s := join(t, server.Addr().String(), Options{})
	require.NotNil(t, s.mux.Load())
	server.Close()
	until(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.conns) == 0 })
	ln := must.Get(net.Listen("tcp", server.Addr().String()))
	ln.Close()
	other := must.Get(Listen(t.Context(), server.Addr().String(), ServerOptions{plain: true}))
	defer other.Close()
	err := s.Set(t.Context(), "k", nil)
	require.ErrorContains(t, err, "of another kind than before")
	require.ErrorContains(t, err, `set "k"`)

	plain := join(t, other.Addr().String(), Options{})
	require.Nil(t, plain.mux.Load())
	require.Equal(t, v2d, plain.dialer.dialect)
	clone := must.Get(plain.Clone(t.Context()))
	defer clone.Close()
	works(t, clone.(*Store))
}

// A connection has a bounded number of wills, and each a bounded size.
func TestWillLimits(t *testing.T) {
	s := join(t, serve(t, ServerOptions{}).Addr().String(), Options{})
	ctx := t.Context()
	for i := range maxWills {
		require.NoError(t, s.SetWill(ctx, fmt.Sprint(i), nil, nil))
	}
	require.ErrorIs(t, s.SetWill(ctx, "more", nil, nil), store.ErrTooLarge)
	require.NoError(t, s.SetWill(ctx, "0", nil, []byte("again")))
	require.NoError(t, s.DropWill(ctx, "1"))
	require.ErrorIs(t, s.SetWill(ctx, "more", nil, make([]byte, maxWill)), store.ErrTooLarge)
	require.NoError(t, s.SetWill(ctx, "more", nil, nil))
}
