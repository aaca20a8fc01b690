package strangers

import (
	"fmt"
	"net"
	"sync/atomic"
)

// mostBytes is how much a stranger may send before it has proved anything. A job's own certificates and a
// hello have 1 KiB, long chains of large keys 8. crypto/tls alone would take certificates of 256 KiB.
const mostBytes = 16 << 10

// Handshake is a connection during its handshake. A Read fails once mostBytes have come, until Proved.
// So a tls.Server that reads from it cannot be made to hold more for a stranger.
type Handshake struct {
	net.Conn
	proved atomic.Bool
	came   atomic.Int64
}

// InHandshake returns c with a count of what comes.
func InHandshake(c net.Conn) *Handshake { return &Handshake{Conn: c} }

// Proved ends the count: the other side has shown who it is.
func (h *Handshake) Proved() { h.proved.Store(true) }

// NetConn returns the connection without the count.
func (h *Handshake) NetConn() net.Conn { return h.Conn }

func (h *Handshake) Read(b []byte) (int, error) {
	if h.proved.Load() {
		return h.Conn.Read(b)
	}
	left := mostBytes - h.came.Load()
	if left <= 0 {
		return 0, fmt.Errorf("%v has sent %d bytes and not yet proved who it is", h.RemoteAddr(), mostBytes)
	}
	n, err := h.Conn.Read(b[:min(int64(len(b)), left)])
	h.came.Add(int64(n))
	return n, err
}
