package tcp

import (
	"errors"
	"net"
	"os"

	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/mesh"
)

const (
	// gatherFrames and gatherBytes bound one system call, so that slow requests complete one by
	// one.
	gatherFrames = 64
	gatherBytes  = 256 << 10

	// copyLimit is the payload up to which a copy behind its header is cheaper than a buffer of
	// its own.
	copyLimit = 8 << 10

	headBytes = 4*copyLimit + (gatherFrames+4)*headerLen

	// inlineTurns is how many times a goroutine that posts a request writes, also for others,
	// before the writer goroutine takes over.
	inlineTurns = 4
)

// lane is the writing half of a connection. A goroutine that posts a request and finds the lane
// idle writes as much as the socket takes without waiting. The lane's goroutine writes the
// rest. So posting never waits, and usually no other goroutine has to be woken. Mesh.Mu guards
// all but the fields of the goroutine that has set busy.
type lane struct {
	p    *pair
	conn net.Conn
	try  *tryWriter // nil if only the goroutine writes
	bulk bool
	wake chan struct{}

	busy   bool  // some goroutine writes
	handed bool  // the lane's goroutine has to write the rest of what was gathered
	broken error // why a write failed; what was gathered stays until the mesh ends

	items  [gatherFrames]item
	at     [gatherFrames + 1]int // where their headers begin in heads, and that of piece
	n      int
	piece  *transport.Request // of which size bytes are being written, from offset
	size   uint64
	offset uint64
	sealed bool   // what was gathered has its checksums
	bytes  uint64 // that were gathered
	heads  []byte // headers and small payloads
	all    net.Buffers
	bufs   net.Buffers // what is left to write
}

func newLane(p *pair, conn net.Conn, bulk bool) *lane {
	l := &lane{p: p, conn: conn, bulk: bulk, wake: make(chan struct{}, 1)}
	if bulk {
		l.heads = make([]byte, 0, headerLen)
	} else {
		l.heads = make([]byte, 0, headBytes)
		l.try = newTryWriter(conn)
	}
	return l
}

func (l *lane) wakeWriter() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// gather takes the next frames from the stream's queues and reports whether there were any.
func (l *lane) gather() bool {
	s := &l.p.s
	l.n, l.piece, l.heads, l.all = 0, nil, l.heads[:0], l.all[:0]
	l.sealed = !l.p.checksums
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
			l.items[l.n], l.at[l.n] = it, len(l.heads)
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
		l.at[l.n] = len(l.heads)
		l.header(f)
		l.all = append(l.all, l.heads[begun:], r.Buf[f.slot:f.slot+f.length])
		begun = len(l.heads)
		l.piece, l.offset, l.size = r, f.slot, f.length
	}
	if begun < len(l.heads) {
		l.all = append(l.all, l.heads[begun:])
	}
	l.bufs, l.bytes = l.all, 0
	for _, b := range l.all {
		l.bytes += uint64(len(b))
	}
	return len(l.all) > 0
}

func (l *lane) header(f frame) {
	n := len(l.heads)
	l.heads = l.heads[:n+headerLen]
	f.put(l.heads[n:])
}

// seal puts the checksums of payloads into the headers that were gathered. It is called without
// the mesh's lock, right before the bytes are written: they are in the cache then.
func (l *lane) seal() {
	if l.sealed {
		return
	}
	l.sealed = true
	for i := range l.n {
		if r := l.items[i].req; r != nil {
			seal(l.heads[l.at[i]:][:headerLen], r.Buf)
		}
	}
	if r := l.piece; r != nil {
		seal(l.heads[l.at[l.n]:][:headerLen], r.Buf[l.offset:l.offset+l.size])
	}
}

// complete ends the requests that were gathered: they are written, or err is why not. In that
// case the stream's pieces have been dropped.
func (l *lane) complete(err error) {
	if err == nil {
		l.p.sent += l.bytes
	}
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

// hasRequests reports whether what was gathered belongs to a request.
func (l *lane) hasRequests() bool {
	for i := range l.n {
		if l.items[i].req != nil {
			return true
		}
	}
	return l.piece != nil
}

// tryWrite writes without waiting and reports whether that was all.
func (l *lane) tryWrite() bool {
	l.seal()
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

// pump writes what is queued, or makes the lane's goroutine do so. It releases the mesh's lock
// while it writes.
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
			done = l.tryWrite()
			mu.Lock()
		}
		if !done {
			l.handed = true
			l.wakeWriter()
			return
		}
		l.complete(nil)
		if !l.gather() {
			break
		}
	}
	l.busy = false
	if l.p.Ending {
		l.wakeWriter()
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
			l.complete(nil)
		}
		l.busy = false
	}
}

// flush writes what was gathered. At the end of a mesh there is a deadline, which moves on
// while this goroutine may not have had the CPU.
func (l *lane) flush() error {
	l.seal()
	var last mesh.LastWrites
	for {
		err := writeAll(l.conn, &l.bufs)
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) || !l.p.m.MoreTime(l.conn, &last) {
			return err
		}
	}
}

// writeAll is bufs.WriteTo(c), which is fast only for connections of package net.
func writeAll(c net.Conn, bufs *net.Buffers) error {
	if own, ok := c.(interface {
		writeBuffers(*net.Buffers) (int64, error)
	}); ok {
		_, err := own.writeBuffers(bufs)
		return err
	}
	_, err := bufs.WriteTo(c)
	return err
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
