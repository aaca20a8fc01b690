package run_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/gloo/internal/run"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/tcp"
	"github.com/c10d-go/c10d/internal/transport/wire"
	"github.com/c10d-go/c10d/work"
)

// cables is a Fabric with one relay for each connection: a pipe in memory for Gloo's wire, and a real connection over
// loopback for the native one. A relay can stop, as a cut cable does, or pass bytes on slowly.
type cables struct {
	t     testing.TB
	size  int
	wires string // "gloo" or "tcp"

	mu    sync.Mutex
	gate  *sync.Cond
	cut   map[[2]int]bool
	slow  map[[2]int]*limiter // by link
	ends  []net.Conn
	over  bool
	wg    sync.WaitGroup
	wire  []*wire.Mesh
	tcps  []*tcp.Endpoint
	addrs []string
}

// cableLimit is the timeout of operations that need a link which is cut. The ranks have a tenth of it to answer each
// other, also where they wait for a CPU.
const cableLimit = 8 * time.Second

// limiter passes rate bytes a second, of all that share it.
type limiter struct {
	mu   sync.Mutex
	rate int
	free time.Time // when the bytes before have passed
}

// limiterBurst is for how long bytes may pass faster to make up for a limiter that slept too long.
const limiterBurst = 200 * time.Millisecond

func (l *limiter) pass(n int) {
	l.mu.Lock()
	if least := time.Now().Add(-limiterBurst); l.free.Before(least) {
		l.free = least
	}
	l.free = l.free.Add(time.Duration(n) * time.Second / time.Duration(l.rate))
	free := l.free
	l.mu.Unlock()
	time.Sleep(time.Until(free))
}

// onCables runs a test on both wires, on Gloo's in virtual time.
func onCables(t *testing.T, name string, do func(t *testing.T, wires string)) {
	t.Run("gloo, "+name, func(t *testing.T) {
		run.VirtualTime(t, func(t *testing.T) { do(t, "gloo") })
	})
	t.Run("tcp, "+name, func(t *testing.T) {
		t.Parallel()
		do(t, "tcp")
	})
}

func newCables(t testing.TB, wires string, size int) *cables {
	c := &cables{t: t, size: size, wires: wires, cut: map[[2]int]bool{}, slow: map[[2]int]*limiter{}}
	c.gate = sync.NewCond(&c.mu)
	if wires == "gloo" {
		c.wire = make([]*wire.Mesh, size)
		for r := range c.wire {
			c.wire[r] = wire.New(r, size, wire.Options{})
		}
		for i := range size {
			for j := range i {
				a, in := net.Pipe()
				out, b := net.Pipe()
				c.connect(i, j, in, out)
				require.NoError(t, c.wire[i].Attach(j, a))
				require.NoError(t, c.wire[j].Attach(i, b))
			}
		}
	} else {
		for range size {
			e := must.Get(tcp.Listen(tcp.Options{Host: "127.0.0.1"}))
			c.tcps, c.addrs = append(c.tcps, e), append(c.addrs, e.Addr())
		}
	}
	t.Cleanup(c.close)
	return c
}

func (*cables) Kill(string, int)   {}
func (*cables) Freeze(string, int) {}

// Join implements gloo's joiner.
func (c *cables) Join(_ string, rank, size int) (transport.Mesh, error) {
	if c.wires == "gloo" {
		return c.wire[rank], nil
	}
	addrs := append([]string{}, c.addrs...)
	for j := range rank {
		f := strings.Split(addrs[j], ";")
		addrs[j] = strings.Join(append(f[:3:3], c.relay(rank, j, f[3])), ";")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return c.tcps[rank].Join(ctx, rank, addrs)
}

// relay returns an address for one connection between two ranks, which leads to another address.
func (c *cables) relay(i, j int, to string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(c.t, err)
	c.wg.Go(func() {
		defer l.Close()
		in, err := l.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", to)
		if err != nil {
			in.Close()
			return
		}
		for _, x := range []net.Conn{in, out} { // so that few bytes are on their way
			x.(*net.TCPConn).SetReadBuffer(32 << 10)
			x.(*net.TCPConn).SetWriteBuffer(32 << 10)
		}
		c.connect(i, j, in, out)
	})
	return l.Addr().String()
}

// connect passes bytes on between the two ends of a connection between two ranks.
func (c *cables) connect(i, j int, in, out net.Conn) {
	c.mu.Lock()
	c.ends = append(c.ends, in, out)
	c.mu.Unlock()
	c.wg.Go(func() { c.pass(i, j, in, out) })
	c.wg.Go(func() { c.pass(i, j, out, in) })
}

func (c *cables) pass(i, j int, from, to net.Conn) {
	b := make([]byte, 4<<10)
	for {
		n, err := from.Read(b)
		c.mu.Lock()
		for c.cut[[2]int{j, i}] && !c.over {
			c.gate.Wait()
		}
		limits := []*limiter{c.slow[[2]int{j, i}], c.slow[[2]int{i, i}], c.slow[[2]int{j, j}]}
		c.mu.Unlock()
		for _, l := range limits {
			if l != nil && n > 0 {
				l.pass(n)
			}
		}
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				from.Close()
				return
			}
		}
		if err != nil {
			if half, ok := to.(*net.TCPConn); ok {
				half.CloseWrite()
			} else {
				to.Close()
			}
			return
		}
	}
}

// break breaks the link between i and j.
func (c *cables) breakLink(i, j int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut[[2]int{min(i, j), max(i, j)}] = true
}

// slowDown makes a link slow, or a rank if i and j are the same.
func (c *cables) slowDown(i, j, rate int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.slow[[2]int{min(i, j), max(i, j)}] = &limiter{rate: rate}
}

func (c *cables) close() {
	c.mu.Lock()
	c.over = true
	for _, x := range c.ends {
		x.Close()
	}
	c.gate.Broadcast()
	c.mu.Unlock()
	c.wg.Wait()
}

// whatIsBlamed runs operations on all ranks, lets fault happen before, and returns the error of each
// rank.
func (c *cables) whatIsBlamed(fault func(), operations func(*gloo.Backend) error) []error {
	errs := make([]error, c.size)
	var ready, all sync.WaitGroup
	ready.Add(c.size)
	happened := make(chan struct{})
	for r := range c.size {
		all.Go(func() {
			b, err := gloo.New(context.Background(), backend.Options{
				Rank: r, Size: c.size, Timeout: time.Minute, Specific: gloo.Options{Fabric: c, Interfaces: []string{"lo"}},
			})
			if err != nil {
				ready.Done()
				errs[r] = err
				return
			}
			defer b.Close()
			errs[r] = barrier(b)
			ready.Done()
			<-happened
			if errs[r] == nil {
				errs[r] = operations(b)
			}
		})
	}
	ready.Wait()
	fault()
	close(happened)
	all.Wait()
	return errs
}

// work20 runs 20 operations on so many bytes that use all links together, until one fails.
func work20(b *gloo.Backend, bytes int, timeout time.Duration) error {
	ctx := context.Background()
	n := bytes / 4 / b.Size() * b.Size()
	in, out := vec(make([]float32, n)...), vec(make([]float32, n)...)
	for range 10 {
		err := wait(b.AllReduce(ctx, list(in), backend.AllReduceOptions{Timeout: timeout}))
		if err == nil {
			err = wait(b.AllToAllSingle(ctx, out, in, nil, nil, backend.AllToAllOptions{Timeout: timeout}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// blamed describes what an error blames: a rank, or a link.
func blamed(err error) string {
	var l *work.LinkError
	var e *work.Error
	switch {
	case errors.As(err, &l):
		return l.Error()
	case errors.As(err, &e):
		return fmt.Sprintf("rank %d", e.Peer)
	}
	return fmt.Sprint(err)
}

// TestBrokenLinksAreNamed: two ranks do not hear each other, and every rank names the link between
// them.
func TestBrokenLinksAreNamed(t *testing.T) {
	for _, link := range [][2]int{{0, 1}, {1, 3}} {
		onCables(t, fmt.Sprintf("%d-%d", link[0], link[1]), func(t *testing.T, wires string) {
			c := newCables(t, wires, 4)
			cut := func() { c.breakLink(link[0], link[1]) }
			errs := c.whatIsBlamed(cut, func(b *gloo.Backend) error { return work20(b, 64<<10, cableLimit) })
			for r, err := range errs {
				require.Equal(t, fmt.Sprintf("link between %d and %d", link[0], link[1]), blamed(err), "rank %d: %v", r, err)
				require.ErrorIs(t, err, work.ErrTimeout)
				require.Regexp(t, `link between \d and \d: no data for \d+\.\d s, both alive`, err.Error())
			}
		})
	}
}

// TestALinkBrokenInAnotherGroup: one rank is in an operation. All others wait in another group, such as
// that of DETAIL's checks, for two ranks that do not hear each other. Seen from this group they are idle.
func TestALinkBrokenInAnotherGroup(t *testing.T) {
	for _, tc := range []struct{ size, a, b int }{{3, 0, 2}, {5, 0, 4}, {5, 3, 4}} {
		onCables(t, fmt.Sprintf("%d ranks, %d-%d", tc.size, tc.a, tc.b), func(t *testing.T, wires string) {
			c := newCables(t, wires, tc.size)
			failed := make(chan bool)
			errs := c.whatIsBlamed(func() { c.breakLink(tc.a, tc.b) }, func(b *gloo.Backend) error {
				if b.Rank() == 1 {
					defer close(failed)
				} else {
					<-failed
				}
				return wait(b.AllReduce(context.Background(), list(vec(1)), backend.AllReduceOptions{Timeout: cableLimit}))
			})
			for r, err := range errs {
				require.Equal(t, fmt.Sprintf("link between %d and %d", tc.a, tc.b), blamed(err), "rank %d: %v", r, err)
			}
		})
	}
}

// TestMonitoredBarrierNamesABrokenLink: rank 0 misses a rank that has come, and does not blame it.
func TestMonitoredBarrierNamesABrokenLink(t *testing.T) {
	onCables(t, "0-1", func(t *testing.T, wires string) {
		c := newCables(t, wires, 3)
		errs := c.whatIsBlamed(func() { c.breakLink(0, 1) }, func(b *gloo.Backend) error {
			return b.MonitoredBarrier(context.Background(), backend.MonitoredBarrierOptions{Timeout: cableLimit})
		})
		for r, err := range errs {
			require.Equal(t, "link between 0 and 1", blamed(err), "rank %d: %v", r, err)
			require.ErrorIs(t, err, work.ErrTimeout)
		}
	})
}

// TestNobodyIsBlamedForASlowNetwork: one rank or one link passes 2 Mbit/s. Every error shows how long answers take. In real
// time a rank may have waited for a CPU. It then says that instead.
func TestNobodyIsBlamedForASlowNetwork(t *testing.T) {
	for name, ends := range map[string][2]int{"rank": {1, 1}, "link": {1, 2}} {
		onCables(t, name, func(t *testing.T, wires string) {
			c := newCables(t, wires, 4)
			slow := func() { c.slowDown(ends[0], ends[1], 250_000) }
			errs := c.whatIsBlamed(slow, func(b *gloo.Backend) error { return work20(b, 8<<20, time.Second) })
			for r, err := range errs {
				require.Equal(t, "rank -1", blamed(err), "rank %d: %v", r, err)
				require.ErrorIs(t, err, work.ErrTimeout)
				require.Regexp(t, `: (the operation was too slow|rank \d waited for a CPU .*)(\n|; )ranks \d and \d: answers take \d+`, err.Error())
			}
		})
	}
}
