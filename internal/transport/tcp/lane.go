package tcp

import (
	"errors"
	"net"
	"os"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// gatherFrames and gatherBytes bound what leaves in one system call, so
	// that requests complete one by one where each takes a while.
	gatherFrames = 64
	gatherBytes  = 256 << 10

	// copyLimit is the payload up to which a copy behind its header is cheaper
	// than a buffer of its own.
	copyLimit = 8 << 10

	headBytes = 4*copyLimit + (gatherFrames+4)*headerLen

	// inlineTurns is how often who posts a request writes for others too, before
	// the writer's goroutine takes over.
	inlineTurns = 4
)

// lane is the writing half of a connection. Whoever finds it idle writes, as
// far as the socket takes it without waiting; the rest is for the lane's
// goroutine, so that to post a request never waits, and a rank that has nothing
// else to do loses no time to a change of goroutines. Mesh.mu guards all but
// what belongs to who has made the lane busy.
type lane struct {
	p    *pair
	conn net.Conn
	try  *attempt // nil: only the goroutine writes
	bulk bool
	wake chan struct{}

	busy   bool  // somebody writes
	handed bool  // the goroutine is to go on with what has been gathered
	broken error // a write failed; what was gathered stays until the mesh ends

	items [gatherFrames]item
	n     int
	piece *transport.Request // part of it is being written
	size  uint64             // how much
	heads []byte             // headers and small payloads
	all   net.Buffers
	bufs  net.Buffers // what is left to write
}

func newLane(p *pair, conn net.Conn, bulk bool) *lane {
	l := &lane{p: p, conn: conn, bulk: bulk, wake: make(chan struct{}, 1)}
	if bulk {
		l.heads = make([]byte, 0, headerLen)
	} else {
		l.heads = make([]byte, 0, headBytes)
		l.try = newAttempt(conn)
	}
	return l
}

func (l *lane) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// gather takes what is next from the stream's queues and reports whether there
// was something.
func (l *lane) gather() bool {
	s := &l.p.s
	l.n, l.piece, l.heads, l.all = 0, nil, l.heads[:0], l.all[:0]
	begun := 0 // what of heads is not in all
	pieces, size := &s.bulk, uint64(l.p.m.opts.pieceBytes)
	if !l.bulk {
		pieces = &s.pieces
		l.p.answerPing()
		bytes := 0
		for s.frames.len() > 0 && l.n < gatherFrames && bytes < gatherBytes &&
			len(l.all)+4 < gatherVectors && cap(l.heads)-len(l.heads) >= copyLimit+2*headerLen {
			it := *s.frames.front()
			s.frames.pop()
			l.items[l.n] = it
			l.n++
			l.header(it.f)
			if it.req == nil {
				continue
			}
			if b := it.req.Buf; len(b) <= copyLimit {
				l.heads = append(l.heads, b...)
			} else {
				l.all = append(l.all, l.heads[begun:], b)
				begun = len(l.heads)
				bytes += len(b)
			}
		}
	}
	if (l.bulk || s.frames.len() == 0) && pieces.len() > 0 {
		r, f := cut(pieces, size)
		l.header(f)
		l.all = append(l.all, l.heads[begun:], r.Buf[f.slot:f.slot+f.length])
		begun = len(l.heads)
		l.piece, l.size = r, f.length
	}
	if begun < len(l.heads) {
		l.all = append(l.all, l.heads[begun:])
	}
	l.bufs = l.all
	return len(l.all) > 0
}

func (l *lane) header(f frame) {
	n := len(l.heads)
	l.heads = l.heads[:n+headerLen]
	f.put(l.heads[n:])
}

// settle ends what was gathered: it is written, or will not be because of err.
// In that case the stream's pieces have been dropped.
func (l *lane) settle(err error) {
	for i := range l.n {
		if r := l.items[i].req; r != nil {
			r.Complete(err)
		}
		l.items[i].req = nil
	}
	l.n = 0
	if r := l.piece; r != nil {
		l.piece = nil
		if err != nil {
			l.size = 0
		}
		l.p.s.wrote(r, l.size)
	}
	clear(l.all)
	l.bufs = nil
}

// holds reports whether a request waits for what was gathered.
func (l *lane) holds() bool {
	for i := range l.n {
		if l.items[i].req != nil {
			return true
		}
	}
	return l.piece != nil
}

// attempt writes what can be written without waiting, and reports whether that
// was all.
func (l *lane) attempt() bool {
	n := l.try.write(l.bufs)
	for len(l.bufs) > 0 && n >= len(l.bufs[0]) {
		n -= len(l.bufs[0])
		l.bufs = l.bufs[1:]
	}
	if len(l.bufs) == 0 {
		return true
	}
	l.bufs[0] = l.bufs[0][n:]
	return false
}

// pump writes what is queued, or sees to it that somebody does. It lets go of
// the mesh's lock in between.
func (l *lane) pump() {
	if l.busy || l.broken != nil || !l.gather() {
		return
	}
	l.busy = true
	mu := &l.p.m.Mu
	for turn := 0; ; turn++ {
		done := false
		if l.try != nil && turn < inlineTurns {
			mu.Unlock()
			done = l.attempt()
			mu.Lock()
		}
		if !done {
			l.handed = true
			l.rouse()
			return
		}
		l.settle(nil)
		if !l.gather() {
			break
		}
	}
	l.busy = false
	if l.p.Ending {
		l.rouse()
	}
}

// write is the lane's goroutine.
func (l *lane) write() {
	defer l.leave()
	m := l.p.m
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for {
		for !l.handed && (l.busy || !l.p.Ending) {
			m.Mu.Unlock()
			<-l.wake
			m.Mu.Lock()
			if l.bulk && !l.busy {
				l.handed = l.gather()
			}
		}
		if !l.handed && !l.gather() {
			return
		}
		l.busy, l.handed = true, false
		for more := true; more; more = l.gather() {
			m.Mu.Unlock()
			err := l.flush()
			m.Mu.Lock()
			if err != nil {
				l.broken = err
				l.p.writeFailed(l)
				return
			}
			l.settle(nil)
		}
		l.busy = false
	}
}

// flush writes what was gathered. At the end of a mesh there is a deadline,
// which moves on while the peer keeps reading. It moves on once in any case,
// for it may be that this goroutine has not had its turn before.
func (l *lane) flush() error {
	for tried := false; ; tried = true {
		n, err := writeAll(l.conn, &l.bufs)
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 && tried || !l.p.m.MoreTime(l.conn, !tried) {
			return err
		}
	}
}

// writeAll is bufs.WriteTo(c), which knows only the connections of package net.
func writeAll(c net.Conn, bufs *net.Buffers) (int64, error) {
	if own, ok := c.(interface {
		writeBuffers(*net.Buffers) (int64, error)
	}); ok {
		return own.writeBuffers(bufs)
	}
	return bufs.WriteTo(c)
}

// leave is the end of the goroutine.
func (l *lane) leave() {
	if l.bulk {
		l.conn.Close()
		l.p.m.Goroutines.Done()
		return
	}
	if c, ok := l.conn.(interface{ CloseWrite() error }); ok {
		c.CloseWrite()
	}
	l.p.Leave(l.conn)
}
