package tcp

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/store"
)

// dialFrom opens a connection from one of this host's loopback addresses.
func dialFrom(t testing.TB, s *Server, from string, first ...byte) *raw {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(t.Context(), "tcp", s.Addr().String())
	if err != nil && from != "127.0.0.1" {
		t.Skipf("no second loopback address: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	r := &raw{t, c, bufio.NewReader(c)}
	if len(first) > 0 {
		r.send(first)
	}
	return r
}

// accepted waits until the server has accepted n connections.
func accepted(t testing.TB, s *Server, n int) {
	t.Helper()
	until(t, func() bool { return s.Stats().Accepted == int64(n) })
}

// count makes the client a rank of the job.
func (r *raw) count(d store.Dialect) {
	r.Helper()
	r.request(d, &request{query: qAdd, keys: one(workers), num: 1})
	_, err := r.r.Discard(8)
	require.NoError(r, err)
}

// A new client makes the silent stranger go, then the guest that was silent longest, and no rank.
func TestWhoMakesRoom(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 5, MaxPerAddress: 5})
	rank := talk(t, s, v2d)
	rank.count(v2d)
	quiet, busy := talk(t, s, v2d), talk(t, s, v2d)
	quiet.open(v2d)
	busy.open(v2d)
	older := dialRaw(t, s.Addr().String())
	accepted(t, s, 4)
	younger := dialRaw(t, s.Addr().String())
	accepted(t, s, 5)
	busy.open(v2d)

	for _, goes := range []*raw{older, younger, quiet} {
		c := talk(t, s, v2d)
		c.open(v2d)
		goes.closed()
		c.count(v2d)
	}
	rank.open(v2d)
	busy.open(v2d)
	busy.count(v2d)

	c := dialRaw(t, s.Addr().String())
	c.closed() // all are ranks
	rank.open(v2d)
	require.Equal(t, Stats{Clients: 5, Accepted: 9, Refused: 4, Keys: 1, Bytes: cost(workers, []byte("5"))}, s.Stats())
}

// The guest that was silent longest goes, whoever was the first to speak.
func TestTheQuietestGuestGoes(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 3, MaxPerAddress: 3})
	quiet := dialRaw(t, s.Addr().String())
	accepted(t, s, 1)
	busy := talk(t, s, v2d)
	busy.open(v2d)
	quiet.send(opening)
	quiet.open(v2d)
	rank := talk(t, s, v2d)
	rank.count(v2d)
	busy.open(v2d)
	talk(t, s, v2d).open(v2d)
	quiet.closed()
	busy.open(v2d)
}

// One address does not take the places of others, and its ranks do not count.
func TestMaxPerAddress(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 5, MaxPerAddress: 2})
	other := dialFrom(t, s, "127.0.0.2")
	accepted(t, s, 1)
	rank := dialFrom(t, s, "127.0.0.1", opening...)
	rank.count(v2d)
	first, second := dialRaw(t, s.Addr().String()), talk(t, s, v2d)
	second.open(v2d)
	third := talk(t, s, v2d)
	third.open(v2d)
	first.closed()
	fourth := talk(t, s, v2d)
	fourth.open(v2d)
	second.closed()
	other.send(opening)
	other.open(v2d)
	third.open(v2d)
	rank.open(v2d)
	require.Equal(t, 4, s.Stats().Clients)
}

// The address with the most strangers makes room.
func TestCrowdedAddressMakesRoom(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 4, MaxPerAddress: 4})
	other := dialFrom(t, s, "127.0.0.2")
	accepted(t, s, 1)
	var crowd []*raw
	for i := range 3 {
		crowd = append(crowd, dialRaw(t, s.Addr().String()))
		accepted(t, s, 2+i)
	}
	talk(t, s, v2d).open(v2d)
	crowd[0].closed()
	other.send(opening)
	other.open(v2d)
}

// A Go client is a rank if it names the server's job, joins, or knows the token. The process that
// hosts the server needs none of these.
func TestWhoIsARank(t *testing.T) {
	for name, c := range map[string]struct {
		server ServerOptions
		client Options
		rank   bool
	}{
		"job":       {ServerOptions{Job: "j"}, Options{Job: "j"}, true},
		"no name":   {ServerOptions{Job: "j"}, Options{}, false},
		"no job":    {ServerOptions{}, Options{Job: "j"}, false},
		"joined":    {ServerOptions{}, Options{WorldSize: 2, Rank: 1}, true},
		"token":     {ServerOptions{Token: "secret of the store"}, Options{Token: "secret of the store"}, true},
		"anonymous": {ServerOptions{}, Options{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, c.server)
			works(t, join(t, s.Addr().String(), c.client))
			require.Equal(t, c.rank, ranksOf(s) == 1)
		})
	}
	s := join(t, local, Options{Server: true})
	require.Equal(t, 1, ranksOf(s.Server()))
}

func ranksOf(s *Server) (n int) {
	s.door.mu.Lock()
	defer s.door.mu.Unlock()
	for _, at := range s.door.addresses {
		n += at.ranks
	}
	return n
}

// A silent connection ends, unless it can be the second one of an old client.
func TestFirstByteTimeout(t *testing.T) {
	s := serve(t, ServerOptions{FirstByteTimeout: 250 * time.Millisecond})
	// spoken returns a client that has spoken in time. On a busy machine it may take several tries.
	spoken := func(d store.Dialect) *raw {
		request, err := keyed(qCheck, "no such key").append(nil, d)
		require.NoError(t, err)
		for {
			c := talk(t, s, d)
			c.Write(request)
			if b, err := c.r.ReadByte(); err == nil {
				require.EqualValues(t, notReady, b)
				return c
			}
		}
	}
	talk(t, s, v1d).closed()
	modern := spoken(v2d)
	talk(t, s, v1d).closed()

	old := spoken(v1d)
	second := talk(t, s, v1d)
	until(t, func() bool {
		s.door.mu.Lock()
		defer s.door.mu.Unlock()
		for _, at := range s.door.addresses {
			return at.seconds.Len() == 1
		}
		return false
	})
	talk(t, s, v1d).closed()
	second.send([]byte{7, 3, 0, 0, 0, 0, 0, 0, 0, '/', 'w', 'k'})
	second.expect(3)
	old.open(v1d)
	modern.open(v2d)
}

// The second connections of old clients go last of all strangers, and with their clients.
func TestSecondConnections(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 4, MaxPerAddress: 4, FirstByteTimeout: time.Hour})
	old := talk(t, s, v1d)
	old.count(v1d)
	second := dialRaw(t, s.Addr().String())
	accepted(t, s, 2)
	for range 5 {
		talk(t, s, v2d).open(v2d)
	}
	second.open(v1d)
	old.open(v1d)
	require.NoError(t, second.Close())
	require.NoError(t, old.Close())
	until(t, func() bool { return s.Stats().Clients == 2 })
	s.door.mu.Lock()
	for _, at := range s.door.addresses {
		require.Zero(t, at.old)
		require.Zero(t, at.seconds.Len())
	}
	s.door.mu.Unlock()
}

// A request that has begun must be whole in time, in each dialect. A client that is silent between
// requests stays.
func TestRequestTimeout(t *testing.T) {
	s := serve(t, ServerOptions{RequestTimeout: 50 * time.Millisecond})
	silent := talk(t, s, v2d)
	silent.open(v2d)
	for name, c := range map[string]*raw{
		"old":    talk(t, s, v1d),
		"new":    talk(t, s, v2d),
		"native": talkNative(t, s),
	} {
		switch name {
		case "old":
			c.open(v1d)
			c.send([]byte{0})
		case "new":
			c.open(v2d)
			c.send(cat(1, "/k", uint64(1000), []byte("only a part")))
		case "native":
			c.send([]byte{9}) // of the length
		}
		c.closed()
	}
	until(t, func() bool { return s.Stats().Clients == 1 })
	silent.open(v2d)
}

// counted counts the reads of a connection.
type counted struct {
	net.Conn
	reads int
}

func (c *counted) Read(b []byte) (int, error) {
	c.reads++
	return c.Conn.Read(b)
}

// A client that sends a byte a second is read less often, unless it is a rank.
func TestDrips(t *testing.T) {
	for _, rank := range []bool{false, true} {
		t.Run(fmt.Sprintf("a rank %v", rank), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &Server{}
				s.ctx, s.cancel = context.WithCancel(t.Context())
				defer s.cancel()
				s.opts.RequestTimeout, s.opts.MaxHeld = time.Hour, 1<<20
				here, there := net.Pipe()
				defer here.Close()
				c := &session{server: s, begun: true}
				conn := &counted{Conn: here}
				c.conn = conn
				c.peer.member.Store(rank)
				end := time.Now().Add(time.Minute)
				go func() {
					defer there.Close()
					for time.Now().Before(end) {
						time.Sleep(time.Second)
						there.Write([]byte{0})
					}
				}()
				r := bufio.NewReader(&flushed{c: c})
				_, err := io.Copy(io.Discard, r)
				require.NoError(t, err)
				if rank {
					require.GreaterOrEqual(t, conn.reads, 60)
				} else {
					require.LessOrEqual(t, conn.reads, 20)
				}
			})
		})
	}
}

// A client that does not read its replies ends, with what is held for it.
func TestReplyTimeout(t *testing.T) {
	s := serve(t, ServerOptions{RequestTimeout: 200 * time.Millisecond})
	// A request of this size may take longer than the timeout.
	s.data.mu.Lock()
	err := s.data.put(new(peer), "/big", bytes.Repeat([]byte("v"), 8<<20))
	s.data.mu.Unlock()
	require.NoError(t, err)
	deaf := talk(t, s, v2d)
	deaf.open(v2d)
	for range 4 {
		deaf.request(v2d, keyed(qGet, "big"))
	}
	until(t, func() bool { return s.Stats().Clients == 0 })
	require.Zero(t, s.held.Load())
}

// What the server holds for clients that are no ranks has a limit for all of them together.
func TestMaxHeld(t *testing.T) {
	part := func(n, of int) []byte { return cat(1, "/k", uint64(of), make([]byte, n)) }
	t.Run("requests", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 600 << 10})
		rank := talk(t, s, v2d)
		rank.count(v2d)
		rank.send(part(900<<10, 1<<20))
		slow := talk(t, s, v2d)
		slow.send(part(400<<10, 500<<10))
		until(t, func() bool { return s.held.Load() > 390<<10 })
		refused := talk(t, s, v2d)
		refused.Write(part(400<<10, 500<<10))
		refused.closed()
		until(t, func() bool { return s.held.Load() < 410<<10 })
		slow.send(make([]byte, 100<<10))
		slow.open(v2d)
		rank.send(make([]byte, 124<<10))
		rank.open(v2d)
		until(t, func() bool { return s.held.Load() == 0 })
	})
	t.Run("waits", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 20 << 10})
		var many []string
		for i := range 100 {
			many = append(many, strconv.Itoa(i))
		}
		first := talk(t, s, v2d)
		first.request(v2d, waitFor(many...))
		until(t, func() bool { return s.Stats().Waiting == 100 })
		second := talk(t, s, v2d)
		second.request(v2d, waitFor(many...))
		second.closed()
		asked := talkNative(t, s)
		asked.ask(1, waitFor(many...))
		_, err := readUint32(asked.r)
		require.NoError(t, err)
		asked.expect(1, 0, 0, 0, tooLarge)
		require.NoError(t, first.Close())
		until(t, func() bool { return s.Stats().Waiting == 0 })
		third := talk(t, s, v2d)
		third.request(v2d, waitFor(many...))
		until(t, func() bool { return s.Stats().Waiting == 100 })
	})
}

// Clients that have filled the store do not keep ranks from writing.
func TestRanksMayUseMoreMemory(t *testing.T) {
	s := serve(t, ServerOptions{MaxMemory: 10000})
	rank, guest := talk(t, s, v2d), talk(t, s, v2d)
	guest.request(v2d, keyed(qSet, "fills", bytes.Repeat([]byte("v"), 9800)))
	guest.open(v2d)
	rank.count(v2d)
	rank.request(v2d, keyed(qSet, "mine", bytes.Repeat([]byte("v"), 500)))
	rank.holds(v2d, "mine", strings.Repeat("v", 500))
	guest.request(v2d, keyed(qSet, "more", bytes.Repeat([]byte("v"), 500)))
	guest.closed()
}

// A listing has all keys that are there throughout, while others come and go, and does not hold up
// other clients.
func TestListKeysWhileTheyChange(t *testing.T) {
	s := serve(t, ServerOptions{})
	lister, changer := join(t, s.Addr().String(), Options{}), join(t, s.Addr().String(), Options{})
	const n = 8 * listed
	for i := range n {
		require.NoError(t, lister.Set(t.Context(), fmt.Sprint("stays ", i), nil))
	}
	stop := make(chan struct{})
	changes := go1(func() error {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return nil
			default:
			}
			k := fmt.Sprint("goes ", i%1000)
			if err := changer.Set(t.Context(), k, nil); err != nil {
				return err
			}
			if _, err := changer.Delete(t.Context(), k); err != nil {
				return err
			}
		}
	})
	for range 10 {
		keys, err := lister.ListKeys(t.Context())
		require.NoError(t, err)
		seen := make(map[string]bool)
		stays := 0
		for _, k := range keys {
			require.False(t, seen[k], "%q is listed twice", k)
			seen[k] = true
			if strings.HasPrefix(k, "stays ") {
				stays++
			}
		}
		require.Equal(t, n, stays)
	}
	close(stop)
	require.NoError(t, await(t, changes))
}

// The lock of the keys is free while a client that does not read gets a listing.
func TestListingHoldsNothingUp(t *testing.T) {
	s := serve(t, ServerOptions{})
	deaf, good := talk(t, s, v2d), talk(t, s, v2d)
	long := strings.Repeat("k", 8000)
	for i := range 1000 {
		deaf.request(v2d, keyed(qSet, fmt.Sprint(long, i), nil))
	}
	for range 4 {
		deaf.request(v2d, &request{query: qListKeys})
	}
	for i := range 100 {
		good.request(v2d, keyed(qSet, strconv.Itoa(i), []byte("x")))
		good.holds(v2d, strconv.Itoa(i), "x")
	}
	for range 4 {
		n, err := readInt64(deaf.r)
		require.NoError(t, err)
		require.GreaterOrEqual(t, n, int64(1000))
		keys, err := readBlobs(deaf.r, n, unframed)
		require.NoError(t, err)
		require.Len(t, keys, int(n))
	}
	deaf.open(v2d)
}
