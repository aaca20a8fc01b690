package tcpsock

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// network is a network in which each address answers in its own way.
type network struct {
	addrs   []netip.Addr
	answers map[string]answer // by address; without one, it drops packets
	mu      sync.Mutex
	tries   []string
	open    int // connections
	absent  error
}

type answer struct {
	after time.Duration
	err   error
}

func (n *network) lookup(context.Context, string, string) ([]netip.Addr, error) {
	return n.addrs, n.absent
}

func (n *network) connect(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	n.tries = append(n.tries, addr)
	a, ok := n.answers[addr]
	n.mu.Unlock()
	if !ok {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	select {
	case <-time.After(a.after):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if a.err != nil {
		return nil, a.err
	}
	n.mu.Lock()
	n.open++
	n.mu.Unlock()
	return &connection{net: n, addr: addr}, nil
}

type connection struct {
	net.Conn
	net  *network
	addr string
}

func (c *connection) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.net.open--
	return nil
}

// TestRace: one of a name's addresses that drops packets costs at most a second. The time is virtual.
func TestRace(t *testing.T) {
	const one, two, three = "192.0.2.1", "192.0.2.2", "2001:db8::3"
	refused := syscall.ECONNREFUSED
	for _, c := range []struct {
		name    string
		addrs   []string
		answers map[string]answer
		to      string
		err     error
		took    time.Duration
	}{
		{"the first", []string{one, two}, map[string]answer{"192.0.2.1:80": {after: time.Millisecond}}, "192.0.2.1:80", nil, time.Millisecond},
		{"the first drops packets", []string{one, two}, map[string]answer{"192.0.2.2:80": {}}, "192.0.2.2:80", nil, stagger},
		{"the second drops packets, and nobody listens on the first", []string{one, two}, map[string]answer{"192.0.2.1:80": {err: refused}}, "", refused, rest},
		{"the first drops packets, and nobody listens on the second", []string{one, two}, map[string]answer{"192.0.2.2:80": {err: refused}}, "", refused, stagger + rest},
		{"one refuses and the next is slow", []string{one, three}, map[string]answer{"192.0.2.1:80": {err: refused}, "[2001:db8::3]:80": {after: 900 * time.Millisecond}}, "[2001:db8::3]:80", nil, 900 * time.Millisecond},
		{"both refuse", []string{one, two}, map[string]answer{"192.0.2.1:80": {err: refused}, "192.0.2.2:80": {err: syscall.EHOSTUNREACH}}, "", refused, 0},
		{"two drop packets", []string{one, two, three}, map[string]answer{"[2001:db8::3]:80": {}}, "[2001:db8::3]:80", nil, 2 * stagger},
		{"all drop packets", []string{one, two}, nil, "", context.DeadlineExceeded, time.Minute},
		{"two answer", []string{one, two}, map[string]answer{"192.0.2.1:80": {after: stagger + 2}, "192.0.2.2:80": {after: 1}}, "192.0.2.2:80", nil, stagger + 1},
		{"two answer at once", []string{one, two}, map[string]answer{"192.0.2.1:80": {after: stagger + 1}, "192.0.2.2:80": {after: 1}}, "either", nil, stagger + 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &network{answers: c.answers}
				for _, a := range c.addrs {
					n.addrs = append(n.addrs, netip.MustParseAddr(a))
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				begun := time.Now()
				conn, err := race(ctx, "tcp", "name:80", n.lookup, n.connect)
				require.ErrorIs(t, err, c.err)
				require.Equal(t, c.took, time.Since(begun))
				n.mu.Lock()
				defer n.mu.Unlock()
				if c.err == nil {
					if c.to != "either" {
						require.Equal(t, c.to, conn.(*connection).addr)
					}
					require.Equal(t, 1, n.open, "connections")
				} else {
					require.Zero(t, n.open)
				}
			})
		})
	}
}

// TestRaceAsDialer: where there is nothing to choose, the dialer does the work, and errors are its own.
func TestRaceAsDialer(t *testing.T) {
	n := &network{answers: map[string]answer{"192.0.2.1:80": {}, "[fe80::1%lo]:80": {}, "/socket": {}, ":80": {}}, absent: &net.DNSError{Err: "no such host", Name: "name", IsNotFound: true}}
	for network, addrs := range map[string][]string{"tcp": {"192.0.2.1:80", "[fe80::1%lo]:80", ":80"}, "unix": {"/socket"}} {
		for _, addr := range addrs {
			must.Get(race(t.Context(), network, addr, n.lookup, n.connect))
			require.True(t, slices.Contains(n.tries, addr))
		}
	}
	_, err := race(t.Context(), "tcp", "name:80", n.lookup, n.connect)
	require.EqualError(t, err, "dial tcp: lookup name: no such host")
	var dns *net.DNSError
	require.True(t, errors.As(err, &dns) && dns.IsNotFound)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	n.absent, n.addrs = nil, []netip.Addr{netip.MustParseAddr("192.0.2.8"), netip.MustParseAddr("192.0.2.9")}
	require.ErrorIs(t, must.Err(race(ctx, "tcp", "name:80", n.lookup, n.connect)), context.Canceled)
}

// TestDial connects to a name.
func TestDial(t *testing.T) {
	l := must.Get(net.Listen("tcp", "localhost:0"))
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	require.NoError(t, must.Get(Dial(t.Context(), "tcp", "localhost:"+port)).Close())
}
