package rendezvous

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what the tests wait for.
const patience = 20 * time.Second

var loopback = netip.MustParseAddr("127.0.0.1")

type outcome struct {
	rank int
	mesh transport.Mesh
	err  error
}

// start runs Connect for some ranks of a group.
func start(ctx context.Context, st store.Store, size int, edit func(*Config), ranks ...int) <-chan outcome {
	out := make(chan outcome, len(ranks))
	for _, r := range ranks {
		go func() {
			cfg := Config{Store: st, Rank: r, Size: size, Address: loopback, Timeout: patience}
			if edit != nil {
				edit(&cfg)
			}
			m, err := Connect(ctx, cfg)
			out <- outcome{r, m, err}
		}()
	}
	return out
}

// connect returns the meshes of a whole group.
func connect(t *testing.T, st store.Store, size int, edit func(*Config)) []transport.Mesh {
	var ranks []int
	for r := range size {
		ranks = append(ranks, r)
	}
	ms := make([]transport.Mesh, size)
	out := start(context.Background(), st, size, edit, ranks...)
	for range ranks {
		o := <-out
		require.NoError(t, o.err)
		ms[o.rank] = o.mesh
	}
	t.Cleanup(func() { closeAll(ms) })
	return ms
}

func closeAll(ms []transport.Mesh) {
	var wg sync.WaitGroup
	for _, m := range ms {
		wg.Go(func() { m.Close() })
	}
	wg.Wait()
}

// everyPair sends a message both ways between every two ranks.
func everyPair(t *testing.T, ms []transport.Mesh) {
	var all []*transport.Request
	for _, m := range ms {
		for j := range ms {
			if j == m.Rank() {
				continue
			}
			s, r := transport.NewRequest(), transport.NewRequest()
			s.Peer, s.Slot, s.Buf = j, 3, []byte{byte(m.Rank()), byte(j)}
			r.Peer, r.Slot, r.Buf = j, 3, make([]byte, 2)
			m.Recv(r)
			m.Send(s)
			all = append(all, s, r)
			t.Cleanup(func() { require.Equal(t, []byte{byte(j), byte(m.Rank())}, r.Buf) })
		}
	}
	for _, r := range all {
		require.NoError(t, await(t, r))
	}
}

func await(t *testing.T, r *transport.Request) error {
	t.Helper()
	select {
	case <-r.Done():
		return r.Err()
	case <-time.After(patience):
		require.FailNow(t, "request does not end")
		return nil
	}
}

// F-31: ranks meet and exchange messages both ways. TestF31Messages has large and unexpected ones,
// the tests of package transporttest tags and aborts; package pg has collectives on such meshes.
func TestF31WholeGroups(t *testing.T) {
	for _, gen := range []generation{G1, G2} {
		sizes := []int{1, 2, 3, 4, 5, 6, 7, 8, 9}
		if gen == G2 && testsize.Of(false, true, true) {
			sizes = append(sizes, 64)
		}
		for _, size := range sizes {
			t.Run(fmt.Sprintf("%v/%d", gen, size), func(t *testing.T) {
				ms := connect(t, store.NewHash(), size, func(c *Config) { gen.set(c) })
				for i, m := range ms {
					require.Equal(t, i, m.Rank())
					require.Equal(t, size, m.Size())
				}
				everyPair(t, ms)
			})
		}
	}
}

// counting counts the calls that need an answer of the store.
type counting struct {
	store.Store
	calls atomic.Int64
}

func (c *counting) Get(ctx context.Context, key string) ([]byte, error) {
	c.calls.Add(1)
	return c.Store.Get(ctx, key)
}

func (c *counting) MultiGet(ctx context.Context, keys []string) ([][]byte, error) {
	c.calls.Add(1)
	return c.Store.MultiGet(ctx, keys)
}

func (c *counting) Check(ctx context.Context, keys ...string) (bool, error) {
	c.calls.Add(1)
	return c.Store.Check(ctx, keys...)
}

// Ranks read addresses together. One is of PyTorch or has no native wire for another reason.
func TestAddressesAreReadTogether(t *testing.T) {
	const size = 64
	st := &counting{Store: store.NewHash()}
	var ready sync.WaitGroup
	ready.Add(size - 1)
	connect(t, st, size, func(c *Config) {
		G2.set(c)
		if c.Rank > 0 {
			c.Native = &Native{Record: []byte("record"), Connect: func(context.Context, [][]byte) (transport.Mesh, error) {
				ready.Done()
				ready.Wait() // all addresses are in the store
				return nil, nil
			}}
		}
	})
	// Two calls for addresses. One for all records, and three for each half, quarter and so on: are
	// both parts complete, and the complete one. Rank 0 reads addresses as they come.
	require.LessOrEqual(t, st.calls.Load(), int64(size*(2+1+3*6)+2*size))
}

// F-31: messages of 0 bytes to 64 MiB both ways at once, all sent before the first receive, need no
// room in sockets' buffers.
func TestF31Messages(t *testing.T) {
	ms := connect(t, store.NewHash(), 2, nil)
	var sends, recvs []*transport.Request
	for i, size := range []int{0, 1, 4 << 10, 1 << 20, 64 << 20} {
		for _, m := range ms {
			r := transport.NewRequest()
			r.Peer, r.Slot, r.Buf = 1-m.Rank(), uint64(i), bytes.Repeat([]byte{byte(10*i + m.Rank())}, size)
			m.Send(r)
			sends = append(sends, r)
		}
	}
	for i := len(sends) - 1; i >= 0; i-- { // in another order
		s, r := sends[i], transport.NewRequest()
		r.Peer, r.Slot, r.Buf = 1-s.Peer, s.Slot, make([]byte, len(s.Buf))
		ms[s.Peer].Recv(r)
		recvs = append(recvs, r)
	}
	for _, r := range slices.Concat(sends, recvs) {
		require.NoError(t, await(t, r))
	}
	for i, r := range recvs {
		require.True(t, bytes.Equal(sends[len(sends)-1-i].Buf, r.Buf))
	}
}

func TestFileStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	ms := connect(t, nil, 3, func(c *Config) {
		f, err := store.NewFile(path, 3)
		if err != nil {
			panic(err)
		}
		t.Cleanup(func() { f.Close() })
		c.Store = store.Prefix("0", f)
	})
	everyPair(t, ms)
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 loopback: ", err)
	}
	l.Close()
	for _, gen := range []generation{G1, G2} {
		ms := connect(t, store.NewHash(), 3, func(c *Config) {
			gen.set(c)
			c.Address = netip.MustParseAddr("::1")
		})
		everyPair(t, ms)
	}
}

func TestInterface(t *testing.T) {
	ifs, err := net.Interfaces()
	require.NoError(t, err)
	for _, i := range ifs {
		if i.Flags&net.FlagLoopback != 0 && i.Flags&net.FlagUp != 0 {
			ms := connect(t, store.NewHash(), 2, func(c *Config) { c.Address, c.Interface = netip.Addr{}, i.Name })
			everyPair(t, ms)
		}
	}
	_, err = Connect(context.Background(), Config{Store: store.NewHash(), Size: 2, Interface: "no-such-if"})
	require.ErrorContains(t, err, "no-such-if")

	// The host's own name, whatever it resolves to.
	everyPair(t, connect(t, store.NewHash(), 2, func(c *Config) { c.Address = netip.Addr{} }))
}

// TestNearer has ranks listen by which they reach the store, in the family of
// addresses that PyTorch's ranks choose.
func TestNearer(t *testing.T) {
	for _, c := range []struct{ choice, near, want string }{
		{"192.0.2.7", "", "192.0.2.7"},
		{"192.0.2.7", "127.0.0.1", "127.0.0.1"},
		{"192.0.2.7", "::1", "127.0.0.1"},
		{"127.0.1.1", "127.0.0.1", "127.0.1.1"},
		{"::1", "127.0.0.1", "::1"},
		{"127.0.1.1", "198.51.100.7", "198.51.100.7"},
		{"192.0.2.7", "198.51.100.7", "198.51.100.7"},
		{"2001:db8::7", "198.51.100.7", "2001:db8::7"},
		{"2001:db8::7", "2001:db8::8", "2001:db8::8"},
	} {
		near, _ := netip.ParseAddr(c.near)
		require.Equal(t, netip.MustParseAddr(c.want), listenInsteadOf(netip.MustParseAddr(c.choice), near), "%+v", c)
	}
	require.True(t, must.Get(listenAddr(t.Context(), Config{LocalAddr: loopback})).IsLoopback())
}

// generation is one of PyTorch's ranks, in the store of a Config.
type generation bool

const (
	G1 generation = true // up to 2.0
	G2 generation = false
)

func (g generation) set(c *Config) {
	if g {
		c.Store = torch1{c.Store}
	}
}

func (g generation) String() string {
	if g {
		return "G1"
	}
	return "G2"
}

type torch1 struct{ store.Store }

func (torch1) IsTorch1() bool { return true }

func TestStoreTellsTheForm(t *testing.T) {
	for _, gen := range []generation{G1, G2} {
		st := store.NewHash()
		connect(t, st, 2, gen.set)
		b := must.Get(st.Get(context.Background(), "1"))
		require.Equal(t, bool(gen), must.Get(parseValue(b, 2)).perRank)
		require.Equal(t, bool(gen), must.Get(st.Check(context.Background(), "rank_0", "rank_1")))
	}
}

// peerValue is the value of a peer at a port of 127.0.0.1.
func peerValue(size int, l net.Listener) value {
	v := value{host: "peer", at: []endpoint{{l.Addr().(*net.TCPAddr).AddrPort(), noSeq}}}
	for i := range size {
		v.ids = append(v.ids, int64(i))
	}
	return v
}

func listen(t *testing.T, addr string) net.Listener {
	l := must.Get(net.Listen("tcp", addr))
	t.Cleanup(func() { l.Close() })
	return l
}

func set(t *testing.T, st store.Store, key string, b []byte) {
	require.NoError(t, st.Set(context.Background(), key, b))
}

// published waits for what a rank publishes.
func published(t *testing.T, st store.Store, rank, size int) value {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return must.Get(parseValue(must.Get(st.Get(ctx, strconv.Itoa(rank))), size))
}

// failure waits for a Connect that fails and returns its error.
func failure(t *testing.T, out <-chan outcome) *Error {
	t.Helper()
	select {
	case o := <-out:
		e := must.As[*Error](t, o.err)
		return e
	case <-time.After(patience + 10*time.Second):
		require.FailNow(t, "Connect does not return")
		return nil
	}
}

func g2(c *Config) { G2.set(c) }

func TestTimeouts(t *testing.T) {
	t.Parallel()
	// limit is time enough for what has to happen before.
	const limit = 5 * time.Second
	short := func(c *Config) {
		G2.set(c)
		c.Timeout = limit
	}
	t.Run("published nothing", func(t *testing.T) {
		t.Parallel()
		e := failure(t, start(context.Background(), store.NewHash(), 3, short, 1))
		require.Regexp(t, `^rendezvous: rank 1 of 3: rank 0 published no address within [\d.]+m?s; rank 2 published no address within`, e.Error())
		require.ErrorIs(t, e, context.DeadlineExceeded)
		require.True(t, e.Timeout())
	})
	t.Run("some are there", func(t *testing.T) {
		t.Parallel()
		// Rank 1 waits with rank 0 for rank 2, and learns from it.
		st := store.NewHash()
		patient := start(context.Background(), st, 3, g2, 1)
		e := failure(t, start(context.Background(), st, 3, short, 0))
		require.Len(t, e.Missing, 1)
		require.Equal(t, 2, e.Missing[0].Rank)
		e = failure(t, patient)
		f := must.As[*transport.Fault](t, e)
		require.Equal(t, transport.FaultTimeout, f.Kind)
		require.Equal(t, 2, f.Rank)
		require.Equal(t, 0, f.Reporter)
		require.ErrorContains(t, f, "rank 2 published no address within")
	})
	t.Run("did not connect", func(t *testing.T) {
		t.Parallel()
		st := store.NewHash()
		l := listen(t, "127.0.0.9:0") // greater: it would connect
		set(t, st, "1", peerValue(2, l).encode())
		e := failure(t, start(context.Background(), st, 2, short, 0))
		require.Contains(t, e.Error(), fmt.Sprintf("rank 1 (host peer, %v) did not connect within", l.Addr()))
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		st := store.NewHash()
		out := start(ctx, st, 2, g2, 0)
		published(t, st, 0, 2)
		cancel()
		e := failure(t, out)
		require.ErrorIs(t, e, context.Canceled)
		require.False(t, e.Timeout())
		require.Equal(t, 1, e.Missing[0].Rank)
	})
	t.Run("cancelled with a cause", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(context.Background())
		st := store.NewHash()
		out := start(ctx, st, 3, g2, 0)
		v := published(t, st, 0, 3)
		c := introduce(t, v.at[0].at, v.ids[1])
		defer c.Close()
		control := func(code, offset, length byte) []byte {
			h := make([]byte, 48)
			h[0], h[8], h[22], h[23], h[24], h[32] = 48, 2, code, 0xC1, offset, length
			return h
		}
		_, err := c.Write(append(control(1, 0, 3), control(4, 1, 0)...)) // HELLO of version 3, PING
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 2*48)) // HELLO, PONG
		require.NoError(t, err)
		cancel(errors.New("user pressed stop"))
		e := failure(t, out)
		require.ErrorIs(t, e, context.Canceled)
		require.ErrorContains(t, e, "user pressed stop")
		f := must.As[*transport.Fault](t, e)
		require.Equal(t, transport.FaultCanceled, f.Kind)
		told, _ := io.ReadAll(c)
		var words []byte
		for ; len(told) >= 48 && told[22] == 6; told = told[48:] {
			words = append(words, told[24:24+told[16]]...)
		}
		require.Contains(t, string(words), "user pressed stop", "the other rank hears why")
	})
	t.Run("closed store", func(t *testing.T) {
		st := store.NewHash()
		out := start(context.Background(), st, 2, g2, 0)
		published(t, st, 0, 2)
		require.NoError(t, st.Close())
		require.ErrorIs(t, failure(t, out), store.ErrClosed)
	})
}

func TestRefused(t *testing.T) {
	st := store.NewHash()
	l := listen(t, "127.0.0.8:0") // where nobody else takes the port
	v := peerValue(2, l)
	l.Close()
	set(t, st, "1", v.encode())
	e := failure(t, start(context.Background(), st, 2, func(c *Config) {
		G2.set(c)
		c.Address = netip.MustParseAddr("127.0.0.9")
	}, 0))
	require.Contains(t, e.Error(), fmt.Sprintf("rank 1 (host peer, %v) refused the connection", l.Addr()))
	require.False(t, e.Timeout())
}

func TestUnusableValues(t *testing.T) {
	g1 := value{perRank: true, at: []endpoint{at("127.0.0.1:9")}}
	for name, c := range map[string]struct {
		value []byte
		gen   generation
		want  string
		is    error
	}{
		"other form":   {g1.encode(), G2, "rank 1 published its address in another form than this rank: ranks of two generations of PyTorch, up to 2.0 and later, cannot be in one group", ErrGeneration},
		"other form 2": {value{at: g1.at}.encode(), G1, "rank 1 (127.0.0.1:9) published", ErrGeneration},
		"garbage":      {[]byte("garbage"), G2, "rank 1 published 7 bytes, which is not the form of a Gloo address", ErrAddress},
		"other family": {value{at: []endpoint{at("[::1]:9")}}.encode(), G2, "IPv6", ErrAddress},
	} {
		t.Run(name, func(t *testing.T) {
			st := store.NewHash()
			set(t, st, "1", c.value)
			e := failure(t, start(context.Background(), st, 2, func(cfg *Config) { c.gen.set(cfg) }, 0))
			if name != "other form 2" {
				require.Contains(t, e.Error(), c.want)
			}
			require.ErrorIs(t, e, c.is)
			require.Equal(t, 1, e.Missing[0].Rank)
		})
	}
}

func introduce(t *testing.T, addr netip.AddrPort, id int64) net.Conn {
	c := must.Get(net.Dial("tcp", addr.String()))
	t.Cleanup(func() { c.Close() })
	must.Get(c.Write(binary.LittleEndian.AppendUint64(nil, uint64(id))))
	return c
}

func closed(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err)
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded))
}

// Strangers with a wrong number, a taken one or none are sent away, and the
// group meets in spite of them.
func TestStrangers(t *testing.T) {
	st := store.NewHash()
	out := start(context.Background(), st, 3, g2, 0)
	v := published(t, st, 0, 3)
	silent := must.Get(net.Dial("tcp", v.at[0].at.String()))
	defer silent.Close()
	half := must.Get(net.Dial("tcp", v.at[0].at.String()))
	half.Write([]byte{1, 0, 0})
	half.Close()
	require.Len(t, v.ids, 3)
	// The numbers of ranks, the one for this rank itself, and numbers of nobody.
	for _, id := range []int64{0, 1, 2, v.ids[0], 3, -1, 1 << 40, 0x2f20544547} {
		c := introduce(t, v.at[0].at, id)
		c.Write(bytes.Repeat([]byte("garbage!"), 100))
		closed(t, c)
	}
	rest := start(context.Background(), st, 3, g2, 1, 2)
	ms := make([]transport.Mesh, 3)
	for range 3 {
		select {
		case o := <-out:
			require.NoError(t, o.err)
			ms[o.rank] = o.mesh
		case o := <-rest:
			require.NoError(t, o.err)
			ms[o.rank] = o.mesh
		}
	}
	defer closeAll(ms)
	closed(t, silent)
	everyPair(t, ms)
}

// A number counts once.
func TestNumberIsTaken(t *testing.T) {
	st := store.NewHash()
	out := start(context.Background(), st, 3, g2, 0)
	v := published(t, st, 0, 3)
	first := introduce(t, v.at[0].at, v.ids[1])
	_, err := io.ReadFull(first, make([]byte, 48)) // its mesh speaks
	require.NoError(t, err)
	closed(t, introduce(t, v.at[0].at, v.ids[1]))
	second := introduce(t, v.at[0].at, v.ids[2])
	o := <-out
	require.NoError(t, o.err)
	require.NoError(t, second.Close())
	require.NoError(t, first.Close())
	require.NoError(t, o.mesh.Close())
}

// A rank that dies once it is connected ends the rendezvous of the other ranks,
// which wait for a third.
func TestPeerDiesMeanwhile(t *testing.T) {
	t.Parallel()
	hello := make([]byte, 48)
	hello[0], hello[8], hello[22], hello[23], hello[32] = 48, 2, 1, 0xC1, 1
	t.Run("rank of this library", func(t *testing.T) {
		st := store.NewHash()
		out := start(context.Background(), st, 3, g2, 0)
		v := published(t, st, 0, 3)
		c := introduce(t, v.at[0].at, v.ids[1])
		c.Write(hello)
		c.Close()
		f := must.As[*transport.Fault](t, failure(t, out))
		require.Equal(t, transport.FaultPeerDied, f.Kind)
		require.Equal(t, 1, f.Rank)
	})
	t.Run("PyTorch rank", func(t *testing.T) {
		st := store.NewHash()
		out := start(context.Background(), st, 3, g2, 0)
		v := published(t, st, 0, 3)
		introduce(t, v.at[0].at, v.ids[1]).Close()
		e := failure(t, out)
		require.Contains(t, e.Error(), "rank 1 closed its connection before all ranks had met")
		require.Less(t, e.After, patience)
	})
}

// A peer that published no pair numbers may connect when it needs us: its
// number is its rank, and ours is ours.
func TestLazyPeer(t *testing.T) {
	t.Parallel()
	t.Run("this rank connects", func(t *testing.T) {
		st := store.NewHash()
		l := listen(t, "127.0.0.1:0")
		v := peerValue(2, l)
		v.ids = nil
		set(t, st, "1", v.encode())
		out := start(context.Background(), st, 2, func(c *Config) {
			G2.set(c)
			c.Address = netip.MustParseAddr("127.0.0.9")
		}, 0)
		c := must.Get(l.Accept())
		defer c.Close()
		b := make([]byte, 8)
		must.Get(io.ReadFull(c, b))
		require.Equal(t, make([]byte, 8), b)
		o := <-out
		require.NoError(t, o.err)
		c.Close()
		require.NoError(t, o.mesh.Close())
	})
	t.Run("the peer connects late", func(t *testing.T) {
		st := store.NewHash()
		v := peerValue(2, listen(t, "127.0.0.9:0"))
		v.ids = nil
		set(t, st, "1", v.encode())
		out := start(context.Background(), st, 2, g2, 0)
		o := <-out
		require.NoError(t, o.err)
		defer o.mesh.Close()
		r := transport.NewRequest()
		r.Peer, r.Slot, r.Buf = 1, 4, make([]byte, 2)
		o.mesh.Recv(r)
		c := introduce(t, published(t, st, 0, 2).at[0].at, 1)
		var b [96]byte // SEND_READY and DATA
		for i, w := range []uint64{48, 2, 4, 0, 2, 0, 50, 1, 4, 0, 2, 0} {
			binary.LittleEndian.PutUint64(b[8*i:], w)
		}
		must.Get(c.Write(append(b[:], "ok"...)))
		require.NoError(t, await(t, r))
		require.Equal(t, "ok", string(r.Buf))
	})
	t.Run("the peer never connects", func(t *testing.T) {
		st := store.NewHash()
		v := peerValue(2, listen(t, "127.0.0.9:0"))
		v.ids = nil
		set(t, st, "1", v.encode())
		o := <-start(context.Background(), st, 2, g2, 0)
		require.NoError(t, o.err)
		require.NoError(t, o.mesh.Close())
	})
}

// words are 64-bit numbers as bytes: a message.
func words(ns ...uint64) (b []byte) {
	for _, n := range ns {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return b
}

func take(t *testing.T, c net.Conn, n int) []byte {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	b := make([]byte, n)
	must.Get(io.ReadFull(c, b))
	return b
}

// ended waits for the end of a connection, whatever comes before.
func ended(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	_, err := io.Copy(io.Discard, c)
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the connection is still there")
}

func awaitHello(t *testing.T, c net.Conn) {
	t.Helper()
	require.Equal(t, words(48, 2, 0xC101<<48, 0, 4, 0), take(t, c, 48))
}

// slow is a store in which nobody finds out whether there is a key, until it is closed.
type slow struct {
	store.Store
	closed chan struct{}
}

func (s slow) Check(ctx context.Context, keys ...string) (bool, error) {
	<-s.closed
	return false, ctx.Err()
}

// Connections whose peer is being looked up count as strangers: one too many closes the oldest.
func TestStrangersAreLookedUp(t *testing.T) {
	for name, c := range map[string]struct {
		gen generation
		say []byte
	}{"no number": {G1, nil}, "a rank": {G2, binary.LittleEndian.AppendUint64(nil, 1)}} {
		t.Run(name, func(t *testing.T) {
			st := slow{store.NewHash(), make(chan struct{})}
			ctx, cancel := context.WithCancel(context.Background())
			out := start(ctx, st, 2, func(cfg *Config) { c.gen.set(cfg) }, 0)
			at := published(t, st.Store, 0, 2).at[0].at
			var all []net.Conn
			for range strangers.Limit(1) + 1 {
				conn := must.Get(net.Dial("tcp", at.String()))
				defer conn.Close()
				conn.Write(c.say)
				all = append(all, conn)
			}
			ended(t, all[0])
			cancel()
			close(st.closed)
			require.Error(t, (<-out).err)
			for _, conn := range all {
				ended(t, conn)
			}
		})
	}
}

// A peer that says nothing and ends counts as gone, once all ranks have met.
func TestASilentPeerDies(t *testing.T) {
	t.Parallel()
	st := store.NewHash()
	peer := value{perRank: true, at: []endpoint{{listen(t, "127.0.0.9:0").Addr().(*net.TCPAddr).AddrPort(), noSeq}}}
	set(t, st, "1", peer.encode())
	out := start(context.Background(), st, 2, func(c *Config) { G1.set(c) }, 0)
	c := must.Get(net.Dial("tcp", published(t, st, 0, 2).at[0].at.String()))
	awaitHello(t, c)
	o := <-out
	require.NoError(t, o.err)
	defer o.mesh.Close()
	r := transport.NewRequest()
	r.Peer, r.Slot, r.Buf = 1, 4, make([]byte, 2)
	o.mesh.Recv(r)
	require.NoError(t, c.Close())
	f := must.As[*transport.Fault](t, await(t, r))
	require.Equal(t, transport.FaultPeerDied, f.Kind)
	require.Equal(t, 1, f.Rank)
}

// Neither a group that met nor one that did not leaves a descriptor open.
func TestDescriptors(t *testing.T) {
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("cannot count descriptors: ", err)
		}
		return len(fds)
	}
	round := func() {
		for _, gen := range []generation{G1, G2} {
			st, edit := store.NewHash(), func(c *Config) { gen.set(c) }
			ms := make([]transport.Mesh, 4)
			out := start(context.Background(), st, 4, edit, 0, 1, 2, 3)
			for i := range ms {
				o := <-out
				require.NoError(t, o.err)
				ms[i] = o.mesh
			}
			closeAll(ms)
			out = start(context.Background(), store.NewHash(), 4, func(c *Config) {
				gen.set(c)
				c.Timeout = 50 * time.Millisecond
			}, 0, 1)
			failure(t, out)
			failure(t, out)
		}
	}
	round()
	before := count()
	for range 3 {
		round()
	}
	require.Eventually(t, func() bool { return count() <= before }, patience, time.Millisecond)
}

func TestTimeoutBelowZero(t *testing.T) {
	st := store.NewHash()
	defer st.Close()
	everyPair(t, connect(t, st, 2, func(c *Config) { c.Timeout = -1 }))
}

func TestBadConfig(t *testing.T) {
	for _, c := range []Config{
		{Store: store.NewHash()},
		{Store: store.NewHash(), Size: 2, Rank: 2},
		{Store: store.NewHash(), Size: 2, Rank: -1},
		{Size: 2},
	} {
		require.ErrorContains(t, must.Err(Connect(context.Background(), c)), "rendezvous: ")
	}
}
