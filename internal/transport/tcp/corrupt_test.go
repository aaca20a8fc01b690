package tcp

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/internal/transport"
)

// flipper passes connections on to a rank and flips one bit of one of them.
type flipper struct {
	l    net.Listener
	conn int   // which connection, from 0
	back bool  // flips what the rank sends, not what it gets
	at   int64 // which byte
	bit  byte

	mu    sync.Mutex
	conns []net.Conn
	wg    sync.WaitGroup
	done  chan struct{} // the bit has been flipped
	seen  int64         // bytes of the connection and the direction
}

// newFlipper returns a flipper before the rank at to, and its address.
func newFlipper(t testing.TB, f *flipper, to address) (address, *flipper) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))
	f.l, f.done = l, make(chan struct{})
	target := to.places[0].String()
	f.wg.Go(func() {
		for n := 0; ; n++ {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", target)
			if err != nil {
				in.Close()
				continue
			}
			f.mu.Lock()
			f.conns = append(f.conns, in, out)
			f.mu.Unlock()
			f.wg.Go(func() { f.pass(in, out, n == f.conn && !f.back) })
			f.wg.Go(func() { f.pass(out, in, n == f.conn && f.back) })
		}
	})
	to.places = []netip.AddrPort{l.Addr().(*net.TCPAddr).AddrPort()}
	return to, f
}

func (f *flipper) pass(from, to net.Conn, flips bool) {
	b := make([]byte, 64<<10)
	seen := int64(0)
	for {
		n, err := from.Read(b)
		if k := f.at - seen; flips && k >= 0 && k < int64(n) {
			b[k] ^= 1 << f.bit
			close(f.done)
		}
		if seen += int64(n); flips {
			f.mu.Lock()
			f.seen = seen
			f.mu.Unlock()
		}
		if _, failed := to.Write(b[:n]); failed != nil || err != nil && err != io.EOF {
			reset(from)
			reset(to)
			return
		}
		if err == io.EOF {
			to.(*net.TCPConn).CloseWrite()
			return
		}
	}
}

func (f *flipper) close() {
	f.l.Close()
	f.mu.Lock()
	for _, c := range f.conns {
		reset(c)
	}
	f.mu.Unlock()
	f.wg.Wait()
}

// flippedExchange makes a group of two ranks with a flipper between them. They exchange messages of
// all kinds. It returns whether the bit was flipped, what the ranks know of it, and how many bytes
// went that way. A message that arrives is always right.
func flippedExchange(t testing.TB, o Options, flip *flipper, polls bool) (flipped bool, faults []error, seen int64) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var es [2]*Endpoint
	var addrs []string
	for i := range es {
		e := must.Get(Listen(o))
		es[i], addrs = e, append(addrs, e.Addr())
	}
	through, f := newFlipper(t, flip, es[0].addr)
	defer f.close()
	sizes := []int{0, 5, 700, 20 << 10, 100 << 10, 300 << 10}
	payload := func(rank, i int) []byte {
		b := make([]byte, sizes[i])
		for j := range b {
			b[j] = byte(j*7 + 31*rank + i)
		}
		return b
	}
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for rank, e := range es {
		wg.Go(func() {
			to := addrs
			if rank == 1 {
				to = []string{through.String(), addrs[1]}
			}
			m, err := e.Join(ctx, rank, to)
			if err != nil {
				errs[rank] = err
				cancel() // as the rendezvous does for the other rank
				return
			}
			defer m.Close()
			for i := range sizes {
				if sizes[i] == 20<<10 && rank == 0 {
					m.Announce(1, 7)
				}
				r := recv(m, 1-rank, uint64(i), bytes.Repeat([]byte("?"), sizes[i]))
				s := send(m, 1-rank, uint64(i), payload(rank, i))
				if polls {
					m.PollUntil(doneWaiter{r})
				}
				for _, q := range []*transport.Request{r, s} {
					if err := wait(t, q); err != nil {
						errs[rank] = m.Fault()
						return
					}
				}
				if !bytes.Equal(payload(1-rank, i), r.Buf) {
					errs[rank] = fmt.Errorf("message %d is wrong and nobody noticed", i)
					t.Error(errs[rank])
				}
			}
			if f := m.Fault(); f != nil {
				errs[rank] = f
			}
		})
	}
	wg.Wait()
	select {
	case <-f.done:
		flipped = true
	default:
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return flipped, errs, f.seen
}

type doneWaiter struct{ r *transport.Request }

func (w doneWaiter) Finished() bool { return len(w.r.Done()) > 0 }

// A bit that flips anywhere on the way is noticed: in a hello, its answer, a header, a message or a
// checksum. The error names the link. No rank gets a wrong message, hangs or panics.
func TestFlippedBits(t *testing.T) {
	rng := must.Rand(t)
	for name, o := range map[string]Options{
		"one connection": {Host: "127.0.0.1", Checksum: true},
		"more":           {Host: "127.0.0.1", Checksum: true, Lanes: 1, bulkyBytes: 64 << 10},
		"no polling":     {Host: "127.0.0.1", Checksum: true, Poll: -1},
	} {
		seed := rng.Uint64()
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 0))
			for _, back := range []bool{false, true} {
				_, errs, all := flippedExchange(t, o, &flipper{at: -1, back: back}, false)
				require.Equal(t, make([]error, 2), errs)
				places := []int64{}
				for at := int64(0); at < helloLen+4*headerLen; at += 1 + rng.Int64N(testsize.Of[int64](30, 20, 8)) {
					places = append(places, at)
				}
				for range testsize.Of(5, 10, 60) {
					places = append(places, rng.Int64N(all))
				}
				for _, at := range places {
					f := &flipper{at: at, bit: byte(rng.IntN(8)), back: back}
					if name == "more" {
						f.conn = rng.IntN(3)
					}
					flipped, errs, seen := flippedExchange(t, o, f, rng.IntN(2) == 0)
					where := fmt.Sprintf("connection %d, back %v, byte %d, bit %d", f.conn, back, at, f.bit)
					if !flipped || f.conn > 0 && at < helloLen {
						require.Equal(t, make([]error, 2), errs, where) // a connection that is not needed
						continue
					}
					noticed := 0
					for _, err := range errs {
						if err == nil {
							continue
						}
						noticed++
						if at >= helloLen {
							require.ErrorContains(t, err, "link between 0 and 1: bytes of a", where)
						}
					}
					// Not in a hello, after which the ranks may connect again, and not in BYE, which a
					// rank that closes too need not read. How many bytes come before it differs from time
					// to time, with those that go over other connections.
					if at >= helloLen && at < seen-headerLen {
						require.NotZero(t, noticed, where)
					}
				}
			}
		})
	}
}

// Headers have checksums without the option too, and it is enough that one rank has it.
func TestFlippedBitsOfHeaders(t *testing.T) {
	o := local
	for at := int64(helloLen); at < helloLen+headerLen; at++ {
		_, errs, _ := flippedExchange(t, o, &flipper{at: at, bit: byte(at % 8)}, false)
		require.ErrorContains(t, errs[0], "link between 0 and 1: bytes of a", "byte %d", at)
	}
	with := o
	with.Checksum = true
	for i, m := range join(t, 2, o, with) {
		require.True(t, m.pairs[1-i].checksums)
	}
}
