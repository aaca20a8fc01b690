package rendezvous

import (
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/transport/wire"
)

// maxCandidates bounds the connections that claim to be one peer.
const maxCandidates = 16

// candidates has the connections that may be those of a peer without a proof. Such a peer says nothing
// when it connects, or its rank without a secret number. Several connections may claim to be the peer. The first one
// that sends a valid message is the peer, and the others are closed. Until then every candidate gets what the mesh
// writes. That contains no payload, because a payload is sent only after the peer has asked for it.
type candidates struct {
	fromPeerHost func(net.Conn) bool // whether it comes from the host where the peer listens
	dead         func() bool         // whether a peer without a connection counts as dead
	found        func()              // called when the peer is known
	wg           sync.WaitGroup

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced when something below changes
	all       []*candidate
	remote    net.Addr // of the last one
	lost      error    // how the last one ended
	lostAt    time.Time
	sent      []byte // all that the mesh wrote before the peer was known
	noMore    bool   // the mesh has called CloseWrite
	peer      *candidate
	unread    []byte // the first message of the peer, as far as it is unread
	closed    bool
	readUntil time.Time
}

type candidate struct {
	net.Conn
	flushed chan struct{} // closed when the peer has got sent
}

func newCandidates(fromPeerHost func(net.Conn) bool, dead func() bool, found func()) *candidates {
	return &candidates{fromPeerHost: fromPeerHost, dead: dead, found: found, changed: make(chan struct{})}
}

// add lets conn claim to be the peer and owns it.
func (c *candidates) add(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.peer != nil {
		conn.Close()
		return
	}
	if len(c.all) == maxCandidates {
		// Who comes from elsewhere makes room; else the new one is sent away.
		i := slices.IndexFunc(c.all, func(o *candidate) bool { return !c.fromPeerHost(o.Conn) })
		if i < 0 {
			conn.Close()
			return
		}
		c.all[i].Close()
		c.all = slices.Delete(c.all, i, i+1)
	}
	n := &candidate{conn, make(chan struct{})}
	c.all = append(c.all, n)
	c.remote = conn.RemoteAddr()
	c.notify()
	c.wg.Go(func() { c.readFirst(n) })
	c.wg.Go(func() { c.forward(n) })
}

// notify wakes all that wait for a change. c.mu is held.
func (c *candidates) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// empty reports whether no connection claims to be the peer.
func (c *candidates) empty() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.peer == nil && len(c.all) == 0
}

// readFirst reads the first message of a candidate.
func (c *candidates) readFirst(n *candidate) {
	first := make([]byte, wire.HeaderLen)
	_, err := io.ReadFull(n, first)
	if err == nil {
		err = wire.CheckFirst(first)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || c.closed || c.peer != nil || !slices.Contains(c.all, n) {
		n.Close()
		if i := slices.Index(c.all, n); i >= 0 && c.peer != n {
			c.all = slices.Delete(c.all, i, i+1)
			c.lost, c.lostAt = err, time.Now()
			c.notify()
		}
		return
	}
	for _, o := range c.all {
		if o != n {
			o.Close()
		}
	}
	c.peer, c.unread, c.all, c.remote = n, first, nil, n.RemoteAddr()
	n.SetReadDeadline(c.readUntil)
	c.notify()
	c.wg.Go(c.found)
}

// forward sends a candidate what the mesh has written, until the peer is known.
func (c *candidates) forward(n *candidate) {
	defer close(n.flushed)
	for told := 0; ; {
		c.mu.Lock()
		rest, changed, last := c.sent[told:], c.changed, c.noMore
		over := c.closed || c.peer != nil && c.peer != n || c.peer == nil && !slices.Contains(c.all, n)
		known := c.peer == n
		c.mu.Unlock()
		switch {
		case over:
			return
		case len(rest) > 0:
			if _, err := n.Write(rest); err != nil {
				return // hear finds out, too
			}
			told += len(rest)
		case last:
			closeWrite(n.Conn)
			return
		case known:
			return
		default:
			<-changed
		}
	}
}

func closeWrite(conn net.Conn) error {
	if w, ok := conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// Chosen returns the peer's connection once it is known, and nil before.
func (c *candidates) Chosen() net.Conn {
	c.mu.Lock()
	n := c.peer
	c.mu.Unlock()
	if n == nil {
		return nil
	}
	<-n.flushed
	return n.Conn
}

// Read waits until the peer is known.
func (c *candidates) Read(b []byte) (int, error) {
	for {
		c.mu.Lock()
		now, until := time.Now(), c.readUntil
		var err error
		switch {
		case c.peer != nil && len(c.unread) > 0:
			n := copy(b, c.unread)
			c.unread = c.unread[n:]
			c.mu.Unlock()
			return n, nil
		case c.peer != nil:
			n := c.peer
			c.mu.Unlock()
			return n.Read(b)
		case c.closed:
			err = net.ErrClosed
		case !until.IsZero() && !now.Before(until):
			err = os.ErrDeadlineExceeded
		case len(c.all) == 0 && c.lost != nil:
			end := c.lostAt.Add(departureGrace)
			if !now.Before(end) {
				if c.dead() {
					err = c.lost
				}
				end = now.Add(departureGrace)
			}
			if until.IsZero() || end.Before(until) {
				until = end
			}
		}
		changed := c.changed
		c.mu.Unlock()
		if err != nil {
			return 0, err
		}
		var late <-chan time.Time
		var timer *time.Timer
		if !until.IsZero() {
			timer = time.NewTimer(until.Sub(now))
			late = timer.C
		}
		select {
		case <-changed:
		case <-late:
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// Write keeps b for all candidates, or sends it to the peer.
func (c *candidates) Write(b []byte) (int, error) {
	if peer := c.Chosen(); peer != nil {
		return peer.Write(b)
	}
	c.mu.Lock()
	switch {
	case c.closed:
		c.mu.Unlock()
		return 0, net.ErrClosed
	case c.peer != nil: // since now
		c.mu.Unlock()
		return c.Chosen().Write(b)
	}
	defer c.mu.Unlock()
	c.sent = append(c.sent, b...)
	c.notify()
	return len(b), nil
}

// CloseWrite notes that the mesh writes no more.
func (c *candidates) CloseWrite() error {
	c.mu.Lock()
	c.noMore = true
	c.notify()
	c.mu.Unlock()
	if peer := c.Chosen(); peer != nil {
		return closeWrite(peer)
	}
	return nil
}

// Close ends all connections and returns when the goroutines have ended.
func (c *candidates) Close() error {
	c.mu.Lock()
	c.closed = true
	for _, n := range c.all {
		n.Close()
	}
	if c.peer != nil {
		c.peer.Close()
	}
	c.notify()
	c.mu.Unlock()
	c.wg.Wait()
	return nil
}

// SetReadDeadline sets the deadline of the peer's connection. Candidates have none.
func (c *candidates) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readUntil = t
	c.notify()
	if c.peer != nil {
		return c.peer.SetReadDeadline(t)
	}
	return nil
}

func (c *candidates) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.all {
		n.SetWriteDeadline(t)
	}
	if c.peer != nil {
		return c.peer.SetWriteDeadline(t)
	}
	return nil
}

func (c *candidates) SetDeadline(t time.Time) error {
	c.SetWriteDeadline(t)
	return c.SetReadDeadline(t)
}

// RemoteAddr is the peer's, or that of the last candidate.
func (c *candidates) RemoteAddr() net.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.remote
}

func (c *candidates) LocalAddr() net.Addr { return nil }
