package tcpsock

import (
	"context"
	"net"
	"net/netip"
	"time"
)

const (
	// stagger is how long Dial waits for one address before it tries the next beside it. It is RFC 8305's
	// Connection Attempt Delay.
	stagger = 250 * time.Millisecond

	// rest is how long Dial waits for the last addresses once one has failed, for example because nobody
	// listens there yet. The caller's next try may meet a server there. The kernel repeats a lost
	// request to connect after 1 s, which another try does too.
	rest = time.Second
)

// Dial connects as a net.Dialer does, but tries all addresses of a host's name at once. One of them may drop
// packets. A net.Dialer would wait for that one until the deadline, or for a part of the time.
func Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	return DialWith(ctx, new(net.Dialer), network, addr)
}

// DialWith is Dial with d's settings.
func DialWith(ctx context.Context, d *net.Dialer, network, addr string) (net.Conn, error) {
	return race(ctx, network, addr, net.DefaultResolver.LookupNetIP, d.DialContext)
}

// race is Dial over a resolver and a dialer.
func race(ctx context.Context, network, addr string, lookup func(ctx context.Context, network, host string) ([]netip.Addr, error),
	connect func(ctx context.Context, network, addr string) (net.Conn, error)) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if _, e := netip.ParseAddr(host); network != "tcp" || err != nil || e == nil || host == "" {
		return connect(ctx, network, addr)
	}
	ips, err := lookup(ctx, "ip", host)
	if err == nil && len(ips) == 0 {
		err = &net.DNSError{Err: "no address", Name: host, IsNotFound: true}
	}
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}

	ctx, cancel := context.WithCancel(ctx)
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result)
	begun, ended := 0, 0
	defer func() {
		cancel()
		for ; ended < begun; ended++ {
			if r := <-results; r.conn != nil {
				r.conn.Close()
			}
		}
	}()
	begin := func() {
		at := net.JoinHostPort(ips[begun].Unmap().String(), port)
		begun++
		go func() {
			conn, err := connect(ctx, network, at)
			results <- result{conn, err}
		}()
	}
	var first error
	next := time.NewTimer(0)
	defer next.Stop()
	var over <-chan time.Time
	for ended < len(ips) {
		select {
		case <-next.C:
			if begun < len(ips) {
				begin()
				next.Reset(stagger)
			}
			if begun == len(ips) && first != nil && over == nil {
				over = time.After(rest)
			}
		case r := <-results:
			ended++
			if r.err == nil {
				return r.conn, nil
			}
			if first == nil {
				first = r.err
			}
			next.Reset(0)
		case <-over:
			return nil, first
		}
	}
	return nil, first
}
