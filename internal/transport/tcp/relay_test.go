package tcp

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/transporttest"
)

// relay stands between ranks. It delays each connection by itself, passes bytes on in parts, so
// that connections overtake each other, and can cut all of them.
type relay struct {
	rng  func() *rand.Rand
	left atomic.Int64 // bytes until everything is cut, if cutting
	cuts bool

	mu    sync.Mutex
	ls    []net.Listener
	conns []net.Conn
	wg    sync.WaitGroup
	ended bool
}

func newRelay(t testing.TB, cutAfter int64) *relay {
	seed := must.Rand(t).Uint64()
	var n atomic.Uint64
	r := &relay{rng: func() *rand.Rand { return rand.New(rand.NewPCG(seed, n.Add(1))) }, cuts: cutAfter > 0}
	r.left.Store(cutAfter)
	t.Cleanup(func() {
		r.cut()
		r.wg.Wait()
	})
	return r
}

// to returns an address that leads to addr through the relay.
func (r *relay) to(t testing.TB, addr address) address {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	r.mu.Lock()
	r.ls = append(r.ls, l)
	r.mu.Unlock()
	target := addr.places[0].String()
	r.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", target)
			if err != nil || !r.track(in, out) {
				in.Close()
				if err == nil {
					out.Close()
				}
				continue
			}
			r.wg.Go(func() { r.pass(in, out) })
			r.wg.Go(func() { r.pass(out, in) })
		}
	})
	addr.places = []netip.AddrPort{l.Addr().(*net.TCPAddr).AddrPort()}
	return addr
}

func (r *relay) track(conns ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns = append(r.conns, conns...)
	return !r.ended
}

// cut resets every connection.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	for _, l := range r.ls {
		l.Close()
	}
	for _, c := range r.conns {
		reset(c)
	}
}

func (r *relay) pass(from, to net.Conn) {
	rng := r.rng()
	b := make([]byte, 64<<10)
	slow := rng.IntN(3) // some connections are slower than others
	for {
		n, err := from.Read(b[:1+rng.IntN(len(b))>>(rng.IntN(4)*4)])
		for p := b[:n]; len(p) > 0; {
			k := 1 + rng.IntN(len(p))
			if rng.IntN(3) > 0 {
				k = len(p)
			}
			if rng.IntN(8) < slow {
				time.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond)
			}
			if _, err := to.Write(p[:k]); err != nil {
				reset(from)
				return
			}
			p = p[k:]
		}
		if r.cuts && n > 0 && r.left.Add(int64(-n)) <= 0 {
			r.cut()
			return
		}
		if err != nil {
			if err == io.EOF {
				to.(*net.TCPConn).CloseWrite()
			} else {
				reset(to)
			}
			return
		}
	}
}

func reset(c net.Conn) {
	c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// joinThrough is join with a relay before every rank.
func joinThrough(t testing.TB, r *relay, size int, o Options) []*Mesh {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	es := make([]*Endpoint, size)
	addrs := make([]string, size)
	for i := range es {
		e := must.Get(Listen(o))
		es[i], addrs[i] = e, r.to(t, e.addr).String()
	}
	ms, errs := make([]*Mesh, size), make([]error, size)
	var wg sync.WaitGroup
	for i, e := range es {
		wg.Go(func() {
			ms[i], errs[i] = e.Join(ctx, i, addrs)
		})
	}
	wg.Wait()
	for i, m := range ms {
		require.NoError(t, errs[i], "rank %d", i)
		t.Cleanup(func() { m.Close() })
	}
	return ms
}

// Everything works over connections that are slow, cut bytes into parts and
// overtake each other.
func TestMeshThroughRelay(t *testing.T) {
	t.Parallel()
	o := Options{Host: "127.0.0.1", Lanes: 3, bulkyBytes: 100 << 10, pieceBytes: 32 << 10}
	transporttest.Run(t, transporttest.Config{
		New: func(t testing.TB, size int) []transport.Mesh {
			return meshes(joinThrough(t, newRelay(t, 0), size, o))
		},
		Kill: kill,
		// The relay loses what it holds when a rank dies.
		No: []transporttest.Feature{transporttest.Allocations, transporttest.Early},
	})
}

// All connections end at some byte: every request ends, what was received is
// right, and each side blames the other.
func TestCut(t *testing.T) {
	t.Parallel()
	rng := must.Rand(t)
	for range 30 {
		after := int64(2*helloLen + 1 + rng.IntN(8<<20))
		o := Options{Host: "127.0.0.1", Lanes: 2, bulkyBytes: 100 << 10, pieceBytes: 64 << 10}
		ms := joinThrough(t, newRelay(t, after), 2, o)
		var wg sync.WaitGroup
		for i, m := range ms {
			for _, n := range []int{0, 10, 5000, 200 << 10, 1 << 20} {
				wg.Go(func() {
					out, in := bytes.Repeat([]byte{byte(n + i)}, n), make([]byte, n)
					want := bytes.Repeat([]byte{byte(n + 1 - i)}, n)
					for {
						s, r := send(m, 1-i, uint64(n), out), recv(m, 1-i, uint64(n), in)
						errS, errR := wait(t, s), wait(t, r)
						if errR == nil && !bytes.Equal(want, in) {
							t.Errorf("other bytes came")
						}
						if errS != nil || errR != nil {
							return
						}
						clear(in)
					}
				})
			}
		}
		wg.Wait()
		for i, m := range ms {
			f := failed(t, m)
			require.Equal(t, transport.FaultPeerDied, f.Kind, "%v", f)
			// A rank that was faster may have told that it lost this one.
			require.Contains(t, []int{1 - i, i}, f.Rank)
		}
	}
}

// A receiver that does not receive holds no more than the window; the sender's
// messages wait, and all of them arrive once they are wanted.
func TestSlowReceiver(t *testing.T) {
	o := local
	o.Eager, o.Window = 16<<10, 256<<10
	ms := join(t, 2, o)
	const n, size = 2000, 10 << 10
	var sends []*transport.Request
	for i := range n {
		sends = append(sends, send(ms[0], 1, 1, bytes.Repeat([]byte{byte(i)}, size)))
	}
	// The last of them has been announced, so all that will come has come.
	eventually(t, "all messages are announced", func() bool {
		ms[1].Mu.Lock()
		defer ms[1].Mu.Unlock()
		v, _, _ := ms[1].pairs[0].s.in.Waiting()
		return v == n
	})
	ms[1].Mu.Lock()
	s := &ms[1].pairs[0].s
	require.LessOrEqual(t, s.used, s.window)
	require.Greater(t, s.used, s.window-size-messageCost)
	require.Equal(t, n-int(s.used/cost(size)), s.offers)
	ms[1].Mu.Unlock()
	in := make([]byte, size)
	for i := range n {
		require.NoError(t, wait(t, recv(ms[1], 0, 1, in)))
		require.Equal(t, bytes.Repeat([]byte{byte(i)}, size), in, "message %d", i)
	}
	for _, r := range sends {
		require.NoError(t, wait(t, r))
	}
	ms[1].Mu.Lock()
	defer ms[1].Mu.Unlock()
	require.LessOrEqual(t, ms[1].blocks.kept, keepBlocks)
	require.Zero(t, s.used)
}

// Many peers at once do not exceed what the windows allow, together.
func TestManySlowReceivers(t *testing.T) {
	o := local
	o.Window = 512 << 10
	const size = 9
	ms := join(t, size, o)
	var wg sync.WaitGroup
	for r := 1; r < size; r++ {
		wg.Go(func() {
			for i := range 100 {
				send(ms[r], 0, uint64(i), make([]byte, 60<<10))
			}
		})
	}
	wg.Wait()
	eventually(t, "all messages are announced", func() bool {
		ms[0].Mu.Lock()
		defer ms[0].Mu.Unlock()
		total := 0
		for _, p := range ms[0].pairs[1:] {
			v, b, _ := p.s.in.Waiting()
			if b > 512<<10 {
				t.Errorf("%d bytes of rank %d", b, p.Rank)
			}
			total += v
		}
		return total == 100*(size-1)
	})
}
