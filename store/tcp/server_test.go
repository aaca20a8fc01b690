package tcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

var (
	v1d = torch1
	v2d = pytorch
)

// talk opens a connection in a dialect.
func talk(t testing.TB, s *Server, d *dialect) *raw {
	t.Helper()
	if d == v2d {
		return dialRaw(t, s.Addr().String(), opening...)
	}
	return dialRaw(t, s.Addr().String())
}

func u64(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

func cat(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case int:
			b = append(b, byte(p))
		case string:
			b = append(append(b, u64(uint64(len(p)))...), p...)
		case []byte:
			b = append(b, p...)
		case uint64:
			b = append(b, u64(p)...)
		}
	}
	return b
}

func number(q query, key string, n int64) *request {
	r := keyed(q, key)
	r.num = n
	return r
}

func waitFor(keys ...string) *request { return &request{query: qWait, keys: wireKeys(keys)} }

// holds reads a key with CHECK and GET.
func (r *raw) holds(d *dialect, key, want string) {
	r.Helper()
	r.request(d, keyed(qCheck, key))
	r.expect(ready)
	r.request(d, keyed(qGet, key))
	r.expect(cat(want)...)
}

func TestDialectsByteByByte(t *testing.T) {
	for name, test := range map[string]struct {
		send, want []byte
	}{
		"v2":          {cat(opening, 13, []byte{7, 0, 0, 0}, 1, "/a", "A", 3, "/a"), cat([]byte{7, 0, 0, 0}, "A")},
		"v1 with set": {cat(0, "/a", "A", 2, "/a"), cat("A")},
		"v1 with add": {cat(3, "/n", uint64(5)), cat(uint64(5))},
		"v1, a key with the length of VALIDATE's first byte": {cat(0, strings.Repeat("k", 0xce), "", 6), cat(uint64(1))},
	} {
		t.Run(name, func(t *testing.T) {
			c := dialRaw(t, serve(t, ServerOptions{}).Addr().String())
			for _, b := range test.send {
				c.send([]byte{b}) // the sockets do not delay
			}
			c.expect(test.want...)
		})
	}
}

func TestOneSegment(t *testing.T) {
	c := dialRaw(t, serve(t, ServerOptions{}).Addr().String(), cat(opening, 13, []byte{7, 0, 0, 0}, 1, "/p", "v", 3, "/p")...)
	c.expect(cat([]byte{7, 0, 0, 0}, "v")...)
}

// What real servers answer to odd requests; where the two of PyTorch differ,
// the newer one.
func TestOddRequests(t *testing.T) {
	ok := func(b ...byte) []byte { return append([]byte{}, b...) }
	many := func(q int, n int) []byte {
		b := cat(q, uint64(n))
		for range n {
			b = append(b, cat("/k")...)
		}
		return b
	}
	for name, test := range map[string]struct {
		send []byte
		want []byte // nil: the connection is closed
	}{
		"unknown query":                  {ok(0xff), nil},
		"query after the last":           {ok(byte(qWatch)), nil},
		"VALIDATE again":                 {opening, nil},
		"cancel without wait":            {ok(12), ok(1)},
		"wait for no keys":               {cat(6, uint64(0)), ok(0)},
		"check of no keys":               {cat(5, uint64(0)), ok(0)},
		"multi get of no keys":           {cat(10, uint64(0)), ok()},
		"multi set of no keys":           {cat(11, uint64(0)), ok()},
		"wait for a present key, cancel": {cat(1, "/p", "", 6, uint64(1), "/p", 12), ok(0, 1)},
		"get of a missing key":           {cat(3, "/no"), cat("")},
		"multi get, one missing":         {cat(1, "/h", "1", 10, uint64(2), "/h", "/no"), cat("1", "")},
		"add to text":                    {cat(1, "/s", " 12abc", 4, "/s", uint64(1)), cat(uint64(13))},
		"add wraps":                      {cat(1, "/s", "9223372036854775807", 4, "/s", uint64(1)), cat(uint64(1 << 63))},
		"add to abc":                     {cat(1, "/s", "abc", 4, "/s", uint64(1)), nil},
		"add to nothing":                 {cat(1, "/s", "", 4, "/s", uint64(1)), nil},
		"add to 2^63":                    {cat(1, "/s", "9223372036854775808", 4, "/s", uint64(1)), nil},
		"barrier on abc":                 {cat(1, "/s", "abc", 18, "/s", uint64(1)), nil},
		"barrier of one":                 {cat(18, "/b1", uint64(1)), ok(0)},
		"barrier of none":                {cat(18, "/b0", uint64(0)), ok(0)},
		"key of 8192":                    {cat(1, strings.Repeat("k", 8192), "v"), ok()},
		"key of 8193":                    {cat(1, strings.Repeat("k", 8193), "v"), nil},
		"value of 8 MiB":                 {cat(1, "/b", strings.Repeat("v", 8<<20)), ok()},
		"value of 8 MiB and 1":           {cat(1, "/b", uint64(8<<20+1)), nil},
		"131072 keys":                    {many(5, 131072), ok(1)},
		"131073 keys":                    {cat(6, uint64(131073)), nil},
		"131073 values":                  {cat(11, uint64(131073)), nil},
		"key length 2^63":                {cat(1, uint64(1<<63)), nil},
		"value length 2^36":              {cat(1, "/k", uint64(1<<36)), nil},
		"value length 2^64-1":            {cat(14, "/k", uint64(1<<64-1)), nil},
		"64 MiB in a request":            {cat(11, uint64(9), bytes.Repeat(cat("/k", strings.Repeat("v", 8<<20)), 7), "/k", uint64(8<<20)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, ServerOptions{})
			good := talk(t, s, v2d)
			good.request(v2d, keyed(qSet, "mine", []byte("x")))
			good.open(v2d)
			c := talk(t, s, v2d)
			if test.want == nil {
				c.Write(test.send) // may fail, when it is closed early
				c.closed()
				until(t, func() bool { st := s.Stats(); return st.Clients == 1 && st.Refused == 1 })
			} else {
				c.send(test.send)
				c.expect(test.want...)
				c.open(v2d)
			}
			good.holds(v2d, "mine", "x")
		})
	}
}

func TestStrangers(t *testing.T) {
	for name, first := range map[string][]byte{
		"HTTP":                     []byte("GET / HTTP/1.0\r\n\r\n"),
		"TLS":                      {0x16, 3, 1, 2, 0},
		"SSH":                      []byte("SSH-2.0-x\r\n"),
		"VALIDATE, wrong number":   {0, 1, 2, 3, 4, 0, 0, 0, 0},
		"SMB":                      {0, 0, 0, 0xa4, 0xff, 'S', 'M', 'B', 0x72},
		"RDP":                      {3, 0, 0, 0x2b, 0x26, 0xe0, 0, 0, 0},
		"a query of later PyTorch": {9},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, ServerOptions{})
			c := dialRaw(t, s.Addr().String(), first...)
			if name == "TLS" {
				c.expect([]byte(alert)...)
			}
			c.closed()
			until(t, func() bool { return s.Stats().Refused == 1 })
		})
	}
}

// Only what has begun has to be finished in time.
func TestOpeningTimeout(t *testing.T) {
	s := serve(t, ServerOptions{OpeningTimeout: 50 * time.Millisecond})
	silent := talk(t, s, v1d)
	old := talk(t, s, v1d)
	old.open(v1d)
	modern := talk(t, s, v2d)
	modern.send([]byte{byte(qSet)}) // the opening is over; this may take its time

	for name, begun := range map[string][]byte{
		"half of VALIDATE":             opening[:3],
		"a zero":                       {0},
		"half of an old first request": cat(3, uint64(4), []byte("/n")),
	} {
		dialRaw(t, s.Addr().String(), begun...).closed()
		t.Log(name)
	}
	silent.open(v1d)
	old.open(v1d)
	modern.send(cat("/late", "x"))
	modern.holds(v2d, "late", "x")
}

// Half a message, with as much announced as is allowed, costs neither the
// others' time nor memory.
func TestHalfMessages(t *testing.T) {
	s := serve(t, ServerOptions{})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const n = 200
	for i := range n {
		d := []*dialect{v1d, v2d}[i%2]
		c := talk(t, s, d)
		b := must.Get(keyed(qSet, "k", bytes.Repeat([]byte("v"), 100)).append(nil, d))
		copy(b[1+8+2:], u64(8<<20))
		c.send(b)
	}
	until(t, func() bool { return s.Stats().Clients == n })
	good := talk(t, s, v2d)
	good.request(v2d, keyed(qSet, "mine", []byte("x")))
	good.holds(v2d, "mine", "x")
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(n*8<<20/20), "memory for what was announced")

	half := talk(t, s, v2d)
	b := must.Get(keyed(qSet, "half", []byte("value")).append(nil, v2d))
	half.send(b[:len(b)-1])
	half.Close()
	until(t, func() bool { return s.Stats().Clients == n+1 })
	good.request(v2d, keyed(qCheck, "half"))
	good.expect(notReady)
	require.Zero(t, s.Stats().Refused)
}

// A client that does not read its replies holds up itself only.
func TestSlowReader(t *testing.T) {
	s := serve(t, ServerOptions{})
	big := strings.Repeat("v", 8<<20)
	slow, good := talk(t, s, v2d), talk(t, s, v2d)
	slow.send(cat(1, "/big", big))
	for range 8 {
		slow.send(cat(3, "/big"))
	}
	slow.send(cat(6, uint64(1), "/later"))
	for i := range 100 {
		k := strconv.Itoa(i)
		good.request(v2d, keyed(qSet, k, []byte("x")))
		good.holds(v2d, k, "x")
	}
	for range 8 {
		slow.expect(cat(big)...)
	}
	good.request(v2d, keyed(qSet, "later", nil))
	slow.expect(ready)
	slow.open(v2d)
}

func TestReplyLimit(t *testing.T) {
	s := serve(t, ServerOptions{Limits: Limits{Message: 1000}})
	c := talk(t, s, v2d)
	v := bytes.Repeat([]byte("v"), 400)
	c.request(v2d, keyed(qSet, "a", v))
	c.request(v2d, keyed(qAppend, "a", v))
	c.holds(v2d, "a", strings.Repeat("v", 800))
	c.request(v2d, keyed(qAppend, "a", v))
	c.closed()
	c = talk(t, s, v2d)
	c.holds(v2d, "a", strings.Repeat("v", 800))
	c.request(v2d, &request{query: qMultiGet, keys: []string{"/a", "/a"}})
	c.closed()
	c = talk(t, s, v2d)
	for i := range 4 {
		c.request(v2d, keyed(qSet, fmt.Sprint(i, strings.Repeat("k", 300)), nil))
	}
	c.open(v2d)
	c.request(v2d, &request{query: qListKeys})
	c.closed()
}

func TestMaxMemory(t *testing.T) {
	s := serve(t, ServerOptions{MaxMemory: 1000})
	v := bytes.Repeat([]byte("v"), 400)
	for name, r := range map[string]*request{
		"set":         keyed(qSet, "b", v),
		"append":      keyed(qAppend, "a", v),
		"compare set": keyed(qCompareSet, "b", nil, v),
		"multi set":   {query: qMultiSet, keys: []string{"/a", "/b"}, vals: [][]byte{v, v}},
		"push":        keyed(qQueuePush, "a", v),
	} {
		t.Run(name, func(t *testing.T) {
			c := talk(t, s, v2d)
			c.request(v2d, keyed(qSet, "a", bytes.Repeat(v, 2)))
			c.holds(v2d, "a", strings.Repeat("v", 800))
			require.EqualValues(t, 2+800+overhead, s.Stats().Bytes)
			if name == "multi set" {
				r.vals[0] = bytes.Repeat(v, 2)
			}
			c.request(v2d, r)
			c.closed()
			c = talk(t, s, v2d)
			c.holds(v2d, "a", strings.Repeat("v", 800))
			c.request(v2d, keyed(qDelete, "a"))
			c.expect(u64(1)...)
			require.Zero(t, s.Stats().Bytes)
			for range 10 {
				c.request(v2d, keyed(qQueuePush, "q", v))
				c.request(v2d, keyed(qQueuePop, "q"))
				c.expect(cat(uint64(1), string(v))...)
			}
			require.Zero(t, s.Stats().Bytes)
		})
	}
}

// The name of a queue counts as long as the queue has an element.
func TestMaxMemoryOfQueues(t *testing.T) {
	s := serve(t, ServerOptions{MaxMemory: 1000})
	name := strings.Repeat("q", 400)
	c := talk(t, s, v2d)
	c.request(v2d, keyed(qQueuePush, name+"1", nil))
	c.open(v2d)
	one := s.Stats().Bytes
	require.EqualValues(t, 1+401+2*overhead, one)
	c.request(v2d, keyed(qQueuePush, name+"1", []byte("v")))
	c.open(v2d)
	require.EqualValues(t, one+1+overhead, s.Stats().Bytes)
	c.request(v2d, keyed(qQueuePush, name+"2", nil))
	c.closed()
	c = talk(t, s, v2d)
	for left := range 2 {
		c.request(v2d, keyed(qQueuePop, name+"1"))
		c.expect(cat(uint64(2-left), strings.Repeat("v", left))...)
	}
	require.Zero(t, s.Stats().Bytes)
}

func TestServerOptions(t *testing.T) {
	for name, o := range map[string]ServerOptions{
		"clients": {MaxClients: -1},
		"memory":  {MaxMemory: -1},
		"timeout": {OpeningTimeout: -1},
		"limit":   {Limits: Limits{Keys: -1}},
		"world":   {World: -1},
		"held":    {MaxHeld: -1},
		"request": {RequestTimeout: -1},
	} {
		require.ErrorContains(t, must.Err(Listen(t.Context(), local, o)), "tcp: server options", name)
	}
	s := serve(t, ServerOptions{})
	require.ErrorContains(t, must.Err(Listen(t.Context(), s.Addr().String())), s.Addr().String())
}

// The server binds what it is told and nothing else.
func TestBinds(t *testing.T) {
	s := serve(t, ServerOptions{})
	_, port, err := net.SplitHostPort(s.Addr().String())
	require.NoError(t, err)
	require.Error(t, must.Err(net.Dial("tcp", "127.0.0.2:"+port)))
	all, err := Listen(t.Context(), ":0")
	require.NoError(t, err)
	defer all.Close()
	_, port, err = net.SplitHostPort(all.Addr().String())
	require.NoError(t, err)
	for _, host := range []string{"127.0.0.2", "127.0.0.1", "localhost"} {
		works(t, join(t, net.JoinHostPort(host, port), Options{}))
	}
}

func TestServerClose(t *testing.T) {
	s := serve(t, ServerOptions{})
	a, b, c := talk(t, s, v2d), talk(t, s, v1d), talk(t, s, v1d)
	a.open(v2d)
	a.request(v2d, waitFor("never"))
	b.open(v1d)
	require.NoError(t, s.Close())
	a.closed()
	b.closed()
	c.closed()
	require.NoError(t, s.Close())
	require.Zero(t, s.Stats().Clients)
}

func TestWaits(t *testing.T) {
	for name, d := range dialects {
		t.Run(name, func(t *testing.T) {
			s := serve(t, ServerOptions{})
			w, o := talk(t, s, d), talk(t, s, d)
			waiting := func(keys int) {
				t.Helper()
				until(t, func() bool { return s.Stats().Waiting == keys })
			}
			set := func(key string) { t.Helper(); o.request(d, keyed(qSet, key, nil)); o.open(d) }

			w.request(d, waitFor("twice", "twice"))
			waiting(1)
			set("twice")
			w.expect(ready)

			// A key that is deleted again has been there.
			w.request(d, waitFor("a", "b"))
			waiting(2)
			set("a")
			waiting(1)
			o.request(d, keyed(qDelete, "a"))
			o.expect(u64(1)...)
			set("b")
			w.expect(ready)
			w.open(d)

			// Two clients, and one that leaves.
			x := talk(t, s, d)
			gone := talk(t, s, d)
			w.request(d, waitFor("both"))
			x.request(d, waitFor("both", "more"))
			gone.request(d, waitFor("both", "gone"))
			waiting(3)
			gone.Close()
			waiting(2)
			set("both")
			w.expect(ready)
			waiting(1)
			set("more")
			x.expect(ready)
			w.open(d)
			x.open(d)

			// Compare-and-set wakes when it changes something.
			w.request(d, waitFor("cs"))
			waiting(1)
			o.request(d, keyed(qCompareSet, "cs", []byte("x"), []byte("y")))
			o.expect(cat("x")...)
			require.Equal(t, 1, s.Stats().Waiting)
			o.request(d, keyed(qCompareSet, "cs", nil, []byte("y")))
			o.expect(cat("y")...)
			w.expect(ready)
			w.open(d)
		})
	}
}

// An old client that sends something has given up its wait.
func TestOldAbandonedWait(t *testing.T) {
	s := serve(t, ServerOptions{})
	w, o := talk(t, s, v1d), talk(t, s, v1d)
	w.request(v1d, waitFor("never"))
	until(t, func() bool { return s.Stats().Waiting == 1 })
	w.request(v1d, &request{query: qNumKeys})
	w.expect(u64(0)...)
	require.Zero(t, s.Stats().Waiting)
	o.request(v1d, keyed(qSet, "never", nil))
	o.open(v1d)
	w.request(v1d, &request{query: qNumKeys})
	w.expect(u64(1)...)

	// Also when the second thing is a wait for the same.
	w.request(v1d, waitFor("x"))
	w.request(v1d, waitFor("x", "y")) // y tells that it has been read
	until(t, func() bool { return s.Stats().Waiting == 2 })
	o.request(v1d, keyed(qSet, "x", nil))
	o.request(v1d, keyed(qSet, "y", nil))
	w.expect(ready)
	w.open(v1d)
}

func TestOldWatch(t *testing.T) {
	s := serve(t, ServerOptions{})
	w, o := talk(t, s, v1d), talk(t, s, v1d)
	w.send([]byte{7, 3, 0, 0, 0, 0, 0, 0, 0, '/', 'w', 'k'})
	w.expect(3)
	o.request(v1d, keyed(qSet, "wk", nil))
	o.open(v1d)
	w.open(v1d)
}

func TestNewWaits(t *testing.T) {
	s := serve(t, ServerOptions{})
	w, o := talk(t, s, v2d), talk(t, s, v2d)
	waiting := func(n int) { t.Helper(); until(t, func() bool { return s.Stats().Waiting == n }) }

	// Cancelled; then the key comes.
	w.request(v2d, waitFor("k"))
	waiting(1)
	w.send([]byte{12})
	w.expect(1)
	o.request(v2d, keyed(qSet, "k", nil))
	o.open(v2d)
	w.open(v2d)

	// The client may set what it waits for itself.
	w.request(v2d, waitFor("self"))
	w.request(v2d, keyed(qSet, "self", nil))
	w.expect(ready)

	// Of two waits the second counts.
	w.request(v2d, waitFor("first"))
	w.request(v2d, waitFor("second"))
	w.request(v2d, keyed(qSet, "first", nil))
	w.open(v2d)
	w.request(v2d, keyed(qSet, "second", nil))
	w.expect(ready)
	w.open(v2d)

	// A wait and its cancelling race with the key: 01, or 00 01.
	for i := range 300 {
		k := strconv.Itoa(i)
		w.request(v2d, waitFor(k))
		done := go1(func() error { _, err := o.Write(cat(1, "/"+k, "")); return err })
		w.send([]byte{12})
		b := must.Get(w.r.ReadByte())
		if b == ready {
			w.expect(1)
		} else {
			require.EqualValues(t, 1, b)
		}
		require.NoError(t, await(t, done))
		w.open(v2d)
	}
}

func TestBarrier(t *testing.T) {
	s := serve(t, ServerOptions{})
	a, b := talk(t, s, v2d), talk(t, s, v2d)
	hex := []byte{0x12, 2, 0, 0, 0, 0, 0, 0, 0, '/', 'b', 2, 0, 0, 0, 0, 0, 0, 0}
	a.send(hex)
	until(t, func() bool { return s.Stats().Waiting == 1 })
	b.send(hex)
	b.expect(0)
	a.expect(0)
	a.holds(v2d, "b", "2")
	require.Equal(t, hex, must.Get(number(qBarrier, "b", 2).append(nil, v2d)))

	// Given up, a caller stays counted.
	a.request(v2d, number(qBarrier, "c", 2))
	until(t, func() bool { return s.Stats().Waiting == 1 })
	a.send([]byte{12})
	a.expect(1)
	b.request(v2d, number(qBarrier, "c", 2))
	b.expect(0)
	a.open(v2d)

	// Any write to the key releases.
	a.request(v2d, number(qBarrier, "d", 9))
	until(t, func() bool { return s.Stats().Waiting == 1 })
	b.request(v2d, keyed(qSet, "d", []byte("x")))
	a.expect(0)
}

func TestQueueWakes(t *testing.T) {
	s := serve(t, ServerOptions{})
	var w [4]*raw
	for i := range w {
		w[i] = talk(t, s, v2d)
	}
	o := talk(t, s, v2d)
	// queued makes w[i] the last in the line for q.
	queued := func(i int, keys ...string) {
		t.Helper()
		w[i].request(v2d, waitFor(keys...))
		w[i].request(v2d, keyed(qQueueLen, "other"))
		w[i].expect(u64(0)...)
	}
	push := func(v string) { o.request(v2d, keyed(qQueuePush, "q", []byte(v))); o.open(v2d) }
	pop := func(i, length int, v string) {
		t.Helper()
		w[i].request(v2d, keyed(qQueuePop, "q"))
		w[i].expect(cat(uint64(length), v)...)
	}

	// One push, one waiter, in turn.
	queued(0, "q")
	queued(1, "q")
	push("a")
	w[0].expect(ready)
	w[1].open(v2d)
	pop(0, 1, "a")
	push("b")
	w[1].expect(ready)
	pop(1, 1, "b")

	// One that waits for more does not take the turn of another.
	queued(0, "q", "key")
	queued(1, "q")
	push("c")
	w[1].expect(ready)
	pop(1, 1, "c")
	o.request(v2d, keyed(qSet, "key", nil))
	w[0].expect(ready)

	// Who is woken and does not pop passes it on: by leaving,
	queued(0, "q")
	queued(1, "q")
	queued(2, "q")
	queued(3, "q")
	push("d")
	w[0].Close()
	w[1].expect(ready)
	// by giving up late,
	w[1].send([]byte{12})
	w[1].expect(1)
	w[2].expect(ready)
	// or by doing something else.
	w[2].open(v2d)
	w[3].expect(ready)
	pop(3, 1, "d")

	// A plain key releases all who wait for the name.
	queued(1, "q")
	queued(2, "q")
	o.request(v2d, keyed(qSet, "q", nil))
	w[1].expect(ready)
	w[2].expect(ready)
}

// waiters returns who waits for a key.
func waiters(server *Server, key string) (all []*peer) {
	server.data.mu.Lock()
	defer server.data.mu.Unlock()
	if l := server.data.waits[key]; l != nil {
		for at := l.first; at != nil; at = at.next {
			all = append(all, at.peer)
		}
	}
	return all
}

// Of many clients that wait for a key, the first one to get it closes the server. The others get it
// too: it was due to them before.
func TestCloseSendsReplies(t *testing.T) {
	server := serve(t, ServerOptions{})
	const clients = 64
	var stores [clients]*Store
	for i := range stores {
		stores[i] = join(t, server.Addr().String(), Options{})
	}
	var once sync.Once
	errs := make(chan error, clients)
	for _, s := range stores {
		go func() {
			_, err := s.Get(t.Context(), "k")
			once.Do(func() { server.Close() })
			errs <- err
		}()
	}
	until(t, func() bool { return len(waiters(server, "/k")) == clients })
	setter := join(t, server.Addr().String(), Options{})
	go setter.Set(t.Context(), "k", []byte("v")) // may lose the server
	for range clients {
		require.NoError(t, await(t, errs))
	}
}

// Close does not end a connection before a goroutine that has taken its replies has written them.
func TestCloseAwaitsWriter(t *testing.T) {
	server := serve(t, ServerOptions{})
	got := make(chan error, 1)
	s := join(t, server.Addr().String(), Options{})
	go func() {
		_, err := s.Get(t.Context(), "k")
		got <- err
	}()
	d := server.data
	until(t, func() bool { return len(waiters(server, "/k")) == 1 })
	p := waiters(server, "/k")[0]
	c := p.session
	c.wmu.Lock()
	require.Equal(t, []*peer{p}, must.Get(d.do(&peer{dialect: pytorch}, 0, keyed(qSet, "k", []byte("v")))))
	r := p.out.take()
	closed := make(chan struct{})
	go func() {
		server.Close()
		close(closed)
	}()
	until(t, func() bool {
		server.clients.mu.Lock()
		defer server.clients.mu.Unlock()
		return server.clients.closed
	})
	time.Sleep(lastReplies / 10) // Close would end the connection now
	err := r.send(c.conn)
	c.wmu.Unlock()
	require.NoError(t, err)
	require.NoError(t, await(t, got))
	<-closed
}
