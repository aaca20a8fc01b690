package tcp

import (
	"bytes"
	"context"
	"io"
	"net"
	"strconv"
	"time"
)

// A client without TLS, to which a server with TLS answers with alert, says in clear text which rank
// it is before it leaves:
//
//	clearText rank " of " size "\n"
//
// The server keeps the number in a key. The other ranks wait for that rank, and read the key to name
// it. The number is not proved: it appears in messages and has no other effect.
const clearText = "\x00c10d-go without TLS: rank "

const (
	// mostClear bounds the ranks that a server keeps such a note of. Strangers can say all numbers.
	mostClear = 256

	// readClear bounds the bytes that a server reads after the alert.
	readClear = 4 << 10

	// sayClear bounds how long a client tells.
	sayClear = time.Second
)

// refusedKey is the key of a rank that was refused, beside those of ranks that have joined.
func refusedKey(rank int) string { return workers + "refused_" + strconv.Itoa(rank) }

// confess tells a server that has refused this side's clear text which rank this is. It first reads
// what the server has sent: otherwise closing would reset the connection and lose the words.
func (d *dialer) confess(c net.Conn) {
	if d.who == "" {
		return
	}
	c.SetDeadline(time.Now().Add(sayClear))
	if _, err := io.WriteString(c, clearText+d.who+"\n"); err != nil {
		return
	}
	if w, ok := c.(*net.TCPConn); ok {
		w.CloseWrite()
	}
	io.Copy(io.Discard, io.LimitReader(c, readClear))
}

// parseClear returns the rank in what a client without TLS has sent.
func parseClear(b []byte) (rank int, ok bool) {
	i := bytes.LastIndex(b, []byte(clearText))
	if i < 0 {
		return 0, false
	}
	line, _, ended := bytes.Cut(b[i+len(clearText):], []byte("\n"))
	first, second, parts := bytes.Cut(line, []byte(" of "))
	rank, err := strconv.Atoi(string(first))
	size, err2 := strconv.Atoi(string(second))
	if !ended || !parts || err != nil || err2 != nil || rank < 0 || rank >= size {
		return 0, false
	}
	return rank, true
}

// noteClear notes that a client without TLS has been refused.
func (c *session) noteClear(sent []byte) {
	rank, ok := parseClear(sent)
	if !ok {
		rank = -1 // a PyTorch rank, or a stranger
	}
	s := c.server
	s.clearMu.Lock()
	defer s.clearMu.Unlock()
	if len(s.clear) >= mostClear && !s.clear[rank] {
		return
	}
	if s.clear == nil {
		s.clear = make(map[int]bool)
	}
	s.clear[rank] = true
	if ok {
		s.opts.Logger.Warn("tcp store: a client that says it is a rank speaks no TLS", "rank", rank, "client", c.raw.RemoteAddr())
	}
	from := []byte(c.raw.RemoteAddr().String())
	woken, err := s.data.do(&c.peer, 0, &request{query: qSet, keys: one(refusedKey(rank)), vals: [][]byte{from}})
	if err == nil {
		c.wake(woken)
	}
}

// Refused returns the address of a process without TLS that a server with TLS has refused. The process
// said that it is this rank. ok is false if there was none. The number is not proved: use it for
// messages about missing ranks, as Worker. Rank -1 is the last process that did not say its rank.
func (s *Store) Refused(ctx context.Context, rank int) (from string, ok bool, err error) {
	wire := one(refusedKey(rank))
	rep, err := s.call(ctx, "refused", &request{query: qCheck, keys: wire})
	if err != nil || rep.num != ready {
		return "", false, err
	}
	from, err = s.workerText(ctx, wire[0])
	return from, err == nil, err
}
