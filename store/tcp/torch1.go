package tcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// torch1 is the protocol of PyTorch up to 2.0. It has no handshake, and its requests have other numbers. A wait
// cannot be cancelled.
var torch1 = &dialect{queries: []query{qSet, qCompareSet, qGet, qAdd, qCheck, qWait, qNumKeys, qWatch, qDelete}}

// IsTorch1 reports whether the server is one of PyTorch up to 2.0, see store.IsTorch1.
func (s *Store) IsTorch1() bool { return s.dialer.dialect == torch1 }

// dialBare connects without a handshake to a server that has closed a connection that began with one, which is why.
// An old server takes VALIDATE and PING for the impossible length of a key. A server that is about to end closes it,
// too: only an answer shows that it is an old one.
func (d *dialer) dialBare(ctx context.Context, why error) (*conn, error) {
	c, err := d.connect(ctx, torch1)
	if err != nil {
		return nil, why
	}
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	release := guard(short, c)
	keys, err := c.confirm()
	release()
	if err == nil && (keys < 0 || keys > math.MaxInt32) {
		c.Close()
		return nil, stranger(binary.LittleEndian.AppendUint64(nil, uint64(keys)))
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("the server at this port is no TCPStore, or is ending; as a client of PyTorch 2.2 or later: %w; as one up to 2.0: %w", why, err)
	}
	// A server of this package serves both, and may have closed the first connection to make room for another client.
	if again, err := d.validated(ctx); err == nil {
		c.Close()
		d.dialect = pytorch
		return again, nil
	} else if !disconnected(err) {
		c.Close()
		return nil, err
	}
	d.dialect = torch1
	return c, nil
}

// detect returns the dialect of a client by its first bytes. It reads VALIDATE.
func detect(r *bufio.Reader) (*dialect, error) {
	first, err := r.Peek(1)
	if err == nil && first[0] == opening[0] {
		// VALIDATE, or else a SET without handshake: then these are the lower bytes of its key's length, and
		// VALIDATE's would be 1015412686.
		if first, err = r.Peek(len(opening)); err == nil && bytes.Equal(first, opening) {
			r.Discard(len(opening))
			return pytorch, nil
		}
	}
	return torch1, err
}

// seconds has the clients of PyTorch up to 2.0, each with its second connection, which never speaks. A client whose
// second one is not known yet has nil.
type seconds map[*session]*session

// add notes that c has sent a message.
func (p seconds) add(c *session) {
	if _, in := p[c]; !in && c.peer.dialect == torch1 {
		p[c] = nil
	}
}

// raise gives second connections the standing of the first ones. Each is taken to be the oldest silent one from the
// address of its first. t.mu is held.
func (p seconds) raise(t *clients) {
	for c, second := range p {
		if second == nil || second.spoke || second.peer.standing.Load() == outside {
			if c.at[silent] == 0 {
				continue
			}
			second = t.first(func(o *session) bool { return o.at == c.at && o.peer.standing.Load() == silent })
			p[c] = second
		}
		if is := c.peer.standing.Load(); is != second.peer.standing.Load() {
			t.move(second, is)
		}
	}
}
