package tcp

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
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
func (r *raw) count(d *dialect) {
	r.Helper()
	r.request(d, &request{query: qAdd, keys: one(workers), num: 1})
	must.Get(r.r.Discard(8))
}

// A new client makes the silent one go, then the guest that was silent longest, and no rank. Too many ranks are
// not believed.
func TestWhoMakesRoom(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 5})
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

	var c *raw
	for _, goes := range []*raw{older, younger, quiet} {
		c = talk(t, s, v2d)
		c.open(v2d)
		goes.closed()
	}
	rank.open(v2d)
	busy.open(v2d)
	busy.count(v2d)
	c.count(v2d) // one too many
	for range 5 {
		talk(t, s, v2d).open(v2d)
	}
	c.closed()
	rank.open(v2d)
	busy.open(v2d)
	require.Equal(t, Stats{Clients: 5, Accepted: 13, Refused: 8, Keys: 1, Bytes: cost(workers, []byte("3"))}, s.Stats())
}

// However many say that they are ranks and are silent then, a new rank gets in, and one that was there stays.
func TestFalseRanks(t *testing.T) {
	for name, opts := range map[string]ServerOptions{
		"the world is known":   {World: 2, MaxClients: 60},
		"the world is unknown": {MaxClients: 60},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, opts)
			first := join(t, s.Addr().String(), Options{WorldSize: 2, Rank: 0, NoWait: true})
			must.Get(first.Add(t.Context(), "x", 1))
			talk(t, s, v2d).count(v2d)
			for i := range 200 {
				d := []*dialect{v1d, v2d}[i%2]
				talk(t, s, d).count(d)
			}
			works(t, join(t, s.Addr().String(), Options{WorldSize: 2, Rank: 1}))
			works(t, first)
			require.LessOrEqual(t, ranksOf(s), 30)
		})
	}
}

// The guest that was silent longest goes, whoever was the first to speak.
func TestTheQuietestGuestGoes(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 3})
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

// The address with the most silent ones makes room, and then that with the most guests.
func TestCrowdedAddressMakesRoom(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 4})
	other := dialFrom(t, s, "127.0.0.2")
	accepted(t, s, 1)
	var crowd []*raw
	for i := range 3 {
		crowd = append(crowd, dialRaw(t, s.Addr().String()))
		accepted(t, s, 2+i)
	}
	for i := range 2 {
		crowd = append(crowd, talk(t, s, v2d))
		crowd[3+i].open(v2d)
		crowd[i].closed()
	}
	other.send(opening)
	other.open(v2d)
	for range 5 {
		talk(t, s, v2d).open(v2d)
	}
	crowd[3].closed()
	other.open(v2d) // it was silent for longer than those
}

// A server that refuses most connections closes 65 at once, each the oldest one of the address with the most.
func TestManyMakeRoomAtOnce(t *testing.T) {
	s := serve(t, ServerOptions{})
	var one, other []*raw
	for range 100 {
		one = append(one, dialRaw(t, s.Addr().String()))
	}
	accepted(t, s, 100)
	for range 90 {
		other = append(other, dialFrom(t, s, "127.0.0.2"))
	}
	accepted(t, s, 190)
	makeRoom := func() {
		s.clients.mu.Lock()
		defer s.clients.mu.Unlock()
		require.True(t, s.clients.makeRoom())
	}
	makeRoom()
	one[0].closed()
	require.Equal(t, 189, s.Stats().Clients)
	s.clients.hostile.Store(true)
	makeRoom()
	one[37].closed()
	other[27].closed()
	require.Equal(t, 124, s.Stats().Clients)
	for _, c := range []*raw{one[38], other[28]} {
		c.send(opening)
		c.open(v2d)
	}
}

// A Go client is a rank if it names the server's job, or joins. The process that
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

func ranksOf(s *Server) int {
	s.clients.mu.Lock()
	defer s.clients.mu.Unlock()
	return s.clients.in[claimed] + s.clients.in[proved]
}

// The second connection of an old client never speaks, and stays as long as its first, also if another one was
// taken for it before.
func TestSecondConnections(t *testing.T) {
	s := serve(t, ServerOptions{MaxClients: 6})
	other := dialRaw(t, s.Addr().String())
	accepted(t, s, 1)
	old := talk(t, s, v1d)
	old.count(v1d)
	for range 5 {
		talk(t, s, v2d).open(v2d) // when there is no room, other is taken for the second one
	}
	other.send(opening)
	other.open(v2d)
	second := dialRaw(t, s.Addr().String())
	accepted(t, s, 8)
	for range 8 {
		talk(t, s, v2d).open(v2d)
	}
	second.send([]byte{7, 3, 0, 0, 0, 0, 0, 0, 0, '/', 'w', 'k'})
	second.expect(watched)
	old.open(v1d)
	require.NoError(t, second.Close())
	require.NoError(t, old.Close())
	require.NoError(t, other.Close())
	until(t, func() bool { return ranksOf(s) == 0 })
}

// A request that has begun must be whole in time, in each dialect. A client that is silent between
// requests stays.
func TestRequestTimeout(t *testing.T) {
	s := serve(t, ServerOptions{RequestTimeout: 500 * time.Millisecond}) // also of the replies
	silent, older, newer, native := talk(t, s, v2d), talk(t, s, v1d), talk(t, s, v2d), talkNative(t, s)
	silent.open(v2d)
	older.open(v1d)
	newer.open(v2d)
	older.send([]byte{0})
	newer.send(cat(1, "/k", uint64(1000), []byte("only a part")))
	native.send([]byte{9}) // of the length
	for _, c := range []*raw{older, newer, native} {
		c.closed()
	}
	until(t, func() bool { return s.Stats().Clients == 1 })
	silent.open(v2d)
}

// A client that does not read its replies ends, with what is held for it.
func TestReplyTimeout(t *testing.T) {
	s := serve(t, ServerOptions{RequestTimeout: 200 * time.Millisecond})
	// A request of this size may take longer than the timeout.
	s.data.mu.Lock()
	err := s.data.put(&peer{dialect: pytorch}, "/big", bytes.Repeat([]byte("v"), 8<<20))
	s.data.mu.Unlock()
	require.NoError(t, err)
	deaf := talk(t, s, v2d)
	deaf.open(v2d)
	for range 4 {
		deaf.request(v2d, keyed(qGet, "big"))
	}
	until(t, func() bool { return s.Stats().Clients == 0 })
	until(t, func() bool { return s.clients.held.Load() == 0 })
}

// waitForRoom sets roomWait for the servers that t starts from now on. They read it until they are closed.
func waitForRoom(t *testing.T, d time.Duration) {
	was := roomWait
	t.Cleanup(func() { roomWait = was })
	roomWait = d
}

// What the server holds has one limit for all clients together. The one for which it holds most goes.
func TestMaxHeld(t *testing.T) {
	part := func(n, of int) []byte { return cat(1, "/k", uint64(of), make([]byte, n)) }
	waitForRoom(t, time.Millisecond)
	held := func(s *Server, least int64) { until(t, func() bool { return s.clients.held.Load() >= least }) }
	t.Run("requests", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 600 << 10})
		large, small, other := talk(t, s, v2d), talk(t, s, v2d), talk(t, s, v2d)
		large.count(v2d)
		small.open(v2d) // what the server reads together with the opening does not count
		large.send(part(300<<10, 350<<10))
		held(s, 350<<10)
		small.send(part(150<<10, 200<<10))
		held(s, 550<<10)
		other.send(part(90<<10, 100<<10))
		large.closed()
		small.send(make([]byte, 50<<10))
		small.open(v2d)
		other.send(make([]byte, 10<<10))
		other.open(v2d)
		until(t, func() bool { return s.clients.held.Load() == 0 })
	})
	t.Run("guests have half", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 600 << 10})
		rank, guest, other := talk(t, s, v2d), talk(t, s, v2d), talk(t, s, v2d)
		rank.count(v2d)
		guest.open(v2d) // what the server reads together with the opening does not count
		rank.send(part(240<<10, 250<<10))
		held(s, 250<<10)
		guest.send(part(190<<10, 200<<10))
		held(s, 450<<10)
		other.send(part(190<<10, 190<<10+1))
		guest.closed()
		rank.send(make([]byte, 10<<10))
		rank.open(v2d)
	})
	t.Run("more than all", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 600 << 10})
		rank, large := talk(t, s, v2d), talk(t, s, v2d)
		rank.count(v2d)
		rank.send(part(390<<10, 400<<10))
		held(s, 400<<10)
		large.send(part(100<<10, 700<<10))
		large.closed()
		rank.send(make([]byte, 10<<10))
		rank.open(v2d)
	})
	t.Run("many parts", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 600 << 10})
		c := talk(t, s, v2d)
		c.Write(cat(int(qMultiSet), uint64(100000), bytes.Repeat(cat("", ""), 6000))) // 96 KB, and 192 KB of strings
		c.closed()
	})
	t.Run("waits", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 20 << 10})
		many := func(n int) (keys []string) {
			for i := range n {
				keys = append(keys, strconv.Itoa(i))
			}
			return keys
		}
		first := talk(t, s, v2d)
		first.request(v2d, waitFor(many(50)...))
		until(t, func() bool { return s.Stats().Waiting == 50 })
		second := talk(t, s, v2d)
		second.request(v2d, waitFor(many(120)...))
		second.closed()
		asked := talkNative(t, s)
		asked.ask(1, waitFor(many(600)...))
		asked.closed()
		require.NoError(t, first.Close())
		until(t, func() bool { return s.Stats().Waiting == 0 })
		until(t, func() bool { return s.clients.held.Load() == 0 })
	})
	t.Run("many in one reply", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 64 << 10})
		c := talk(t, s, v2d)
		c.request(v2d, keyed(qSet, "x", make([]byte, 1000)))
		many := &request{query: qMultiGet, keys: slices.Repeat(one("/x"), 50)}
		c.request(v2d, many)
		must.Get(c.r.Discard(50 * 1008))
		c.open(v2d)
		many.keys = slices.Repeat(many.keys, 2)
		c.request(v2d, many)
		c.closed()
	})
	t.Run("listings", func(t *testing.T) {
		s := serve(t, ServerOptions{})
		c := talk(t, s, v2d)
		c.request(v2d, keyed(qSet, "k", nil))
		c.open(v2d)
		go c.Write(bytes.Repeat([]byte{byte(qListKeys)}, 1<<20)) // 18 MB of replies
		held(s, listPiece)
	})
	t.Run("wills", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 20 << 10})
		c := talkNative(t, s)
		for i := range 10 {
			c.ask(uint32(i), keyed(qSetWill, strconv.Itoa(i%2), nil, make([]byte, 4000)))
			c.told(uint32(i), done)
		}
		for i := range 5 {
			c.Write(appendFrame(nil, uint32(100+i), keyed(qSetWill, "more "+strconv.Itoa(i), nil, make([]byte, 4000))))
		}
		until(t, func() bool { return s.Stats().Refused == 1 })
	})
	t.Run("replies", func(t *testing.T) {
		s := serve(t, ServerOptions{MaxHeld: 12 << 20})
		deaf := talkNative(t, s)
		for i := range 10 {
			deaf.ask(uint32(i), keyed(qGet, strconv.Itoa(i)))
		}
		until(t, func() bool { return s.Stats().Waiting == 10 })
		good := join(t, s.Addr().String(), Options{})
		for i := range 10 {
			require.NoError(t, good.Set(t.Context(), strconv.Itoa(i), make([]byte, 4<<20)))
		}
		require.Zero(t, s.Stats().Refused) // they are stored anyway
		for i := range 10 {
			must.Get(good.Delete(t.Context(), strconv.Itoa(i)))
		}
		until(t, func() bool { return s.Stats().Refused == 1 })
		works(t, good)
		until(t, func() bool { return s.clients.held.Load() == 0 })
		require.Zero(t, lent(s))
	})
}

// However many clients read a long value at once, and however slowly, they stay.
func TestManyReadersOfALongValue(t *testing.T) {
	s := serve(t, ServerOptions{World: 2})
	good := join(t, s.Addr().String(), Options{})
	const size = 8 << 20
	require.NoError(t, good.Set(t.Context(), "x", make([]byte, size)))
	var all []*raw
	for range 10 {
		c := talk(t, s, v2d)
		c.request(v2d, keyed(qGet, "x"))
		all = append(all, c)
	}
	for _, c := range all {
		must.Get(c.r.Discard(8 + size))
		c.open(v2d)
	}
	until(t, func() bool { return s.clients.held.Load() == 0 })
	require.Zero(t, lent(s))
}

func lent(s *Server) int {
	s.data.mu.Lock()
	defer s.data.mu.Unlock()
	return len(s.data.lent)
}

// A client that does not read costs little more than a batch, however much it asks for.
func TestCostOfReplies(t *testing.T) {
	if race {
		t.Skip("the race detector allocates")
	}
	const n = 50
	for _, size := range []int{100, 1000, 15 << 10, 100 << 10} {
		for name, d := range map[string]*dialect{"old": v1d, "new": v2d, "native": native} {
			t.Run(fmt.Sprint(size, " ", name), func(t *testing.T) {
				s := serve(t, ServerOptions{})
				require.NoError(t, join(t, s.Addr().String(), Options{}).Set(t.Context(), "x", make([]byte, size)))
				var all []*raw
				for range n {
					c := talkNative(t, s)
					if d != native {
						c = talk(t, s, d)
						c.open(d)
					}
					all = append(all, c)
				}
				s.clients.mu.Lock()
				for c := range s.clients.sessions {
					c.wmu.Lock() // as a client that does not read
					defer c.wmu.Unlock()
				}
				s.clients.mu.Unlock()
				before := memory()
				var gets []byte
				for i := range 200 {
					if d == native {
						gets = appendFrame(gets, uint32(i), keyed(qGet, "x"))
					} else {
						gets, _ = keyed(qGet, "x").append(gets, d)
					}
				}
				for _, c := range all {
					c.Write(gets) // at once
				}
				until(t, func() bool { return s.clients.held.Load() >= n*batch })
				require.Less(t, int64(memory()-before), int64(n*6<<10))
				require.Less(t, s.clients.held.Load(), int64(n*4*batch))
			})
		}
	}
}

// A wait counts as much as it takes.
func TestCostOfWaits(t *testing.T) {
	if race {
		t.Skip("the race detector allocates")
	}
	for name, keys := range map[string]int{"of one key": 1, "of many keys": 100} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, ServerOptions{})
			c := talkNative(t, s)
			before := memory()
			const waits = 20000
			var b []byte
			n := waits / keys
			for i := range n {
				req := &request{query: qWait}
				for k := range keys {
					req.keys = append(req.keys, fmt.Sprintf("/%07d %07d", i, k))
				}
				b = appendFrame(b[:0], uint32(i), req)
				must.Get(c.Write(b))
			}
			until(t, func() bool { return s.Stats().Waiting == n })
			require.Less(t, int64(memory()-before), s.clients.held.Load()*5/4)
		})
	}
}

func memory() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// The server keeps nothing of a request that it has answered.
func TestAnsweredRequestsAreFree(t *testing.T) {
	s := serve(t, ServerOptions{})
	before := memory()
	const size = 4 << 20
	for range 10 {
		c := talk(t, s, v2d)
		c.request(v2d, keyed(qCompareSet, "none", make([]byte, size), make([]byte, size)))
		must.Get(c.r.Discard(8 + size))
	}
	require.Less(t, memory(), before+5*size)
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
	changes := go1(func() (err error) {
		defer must.Catch(&err)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return nil
			default:
			}
			k := fmt.Sprint("goes ", i%1000)
			must.Do(changer.Set(t.Context(), k, nil))
			must.Get(changer.Delete(t.Context(), k))
		}
	})
	for range 10 {
		keys := must.Get(lister.ListKeys(t.Context()))
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
		n := must.Get(readInt64(deaf.r))
		require.GreaterOrEqual(t, n, int64(1000))
		require.Len(t, must.Get(readBlobs(deaf.r, n, unframed)), int(n))
	}
	deaf.open(v2d)
}

// Ranks that all set a longest value at once wait for each other.
func TestLongValuesAtOnce(t *testing.T) {
	const ranks = 12
	s := serve(t, ServerOptions{World: 2}) // 20 MiB
	var all []<-chan error
	value := make([]byte, 8<<20)
	for r := range ranks {
		rank := join(t, s.Addr().String(), Options{WorldSize: ranks, Rank: r, NoWait: r < ranks-1})
		all = append(all, go1(func() error { return rank.Set(t.Context(), strconv.Itoa(r), value) }))
	}
	for _, err := range all {
		require.NoError(t, await(t, err))
	}
	require.Zero(t, s.Stats().Refused)
}

// False ranks that hold much less than a longest value each, and together all, do not keep a rank from writing one.
func TestFalseRanksHoldRoom(t *testing.T) {
	waitForRoom(t, 50*time.Millisecond)
	s := serve(t, ServerOptions{World: 2, Job: "j"})
	rank := join(t, s.Addr().String(), Options{Job: "j"})
	for range perRank*2 - 1 {
		c := talk(t, s, v2d)
		c.count(v2d)
		go c.Write(cat(1, "/k", uint64(1200<<10), make([]byte, 1100<<10)))
	}
	until(t, func() bool { return s.clients.held.Load() > 14<<20 })
	require.NoError(t, rank.Set(t.Context(), "x", make([]byte, 8<<20)))
}

// A long value for which there is no room closes nobody that has little: an agent that waits has a will, and its
// job ends when its connection does.
func TestLongValuesCloseNoSmallOnes(t *testing.T) {
	waitForRoom(t, 50*time.Millisecond)
	s := serve(t, ServerOptions{World: 2, MaxHeld: 12 << 20})
	agent := join(t, s.Addr().String(), Options{WorldSize: 2, Rank: 0, NoWait: true})
	require.NoError(t, agent.SetWill(t.Context(), "alive", nil, []byte("dead")))
	waits := go1(func() error { return agent.Wait(t.Context(), "goes on") })
	until(t, func() bool { return s.Stats().Waiting == 1 })
	small, large := talk(t, s, v2d), talk(t, s, v2d)
	small.send(cat(int(qSet), "/small", uint64(300<<10), make([]byte, 250<<10)))
	until(t, func() bool { return s.clients.held.Load() > 250<<10 })
	const half = 6<<20 - 32<<10
	go large.Write(cat(int(qMultiSet), uint64(2), "/a", uint64(half), make([]byte, half), "/b", uint64(half), make([]byte, half-1)))
	large.closed()
	require.NoError(t, join(t, s.Addr().String(), Options{}).Set(t.Context(), "goes on", nil))
	require.NoError(t, await(t, waits))
}

// However large the world is, there are limits.
func TestLimitsOfALargeWorld(t *testing.T) {
	for _, world := range []int{1 << 20, 1 << 29, math.MaxInt} {
		o := ServerOptions{World: world}.withDefaults()
		require.Greater(t, o.MaxHeld, int64(64<<40))
		require.Positive(t, o.MaxClients)
		require.Positive(t, newClients(o).most[silent])
	}
}

// Ranks that all wait for the keys of all, as those of one group do when they meet, have room for that.
func TestEachWaitsForAll(t *testing.T) {
	for name, ranks := range map[string]int{"the world is known": 1024, "the world is unknown": 512} {
		t.Run(name, func(t *testing.T) {
			opts := ServerOptions{World: ranks}
			if name == "the world is unknown" {
				opts.World = 0
			}
			keys := make([]string, ranks)
			for i := range keys {
				keys[i] = fmt.Sprintf("/attempt_0/default/%04d", i)
			}
			waits := (&waiter{peer: &peer{dialect: native}, req: request{query: qWait, keys: keys}}).cost()
			require.Less(t, int64(ranks)*waits, opts.withDefaults().MaxHeld)
		})
	}
}
