package rendezvous

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/openfiles"
)

const (
	// numberLimit is how long a connection may take to say its number.
	numberLimit = 10 * time.Second

	// maxStrangers bounds the connections that have not said it yet. One more closes the
	// oldest, so that a stranger with many connections keeps no rank out.
	maxStrangers = 1024

	// acceptPause is the pause after a failed accept: out of descriptors, mostly.
	acceptPause = 50 * time.Millisecond
)

var errTurnedAway = errors.New("rendezvous: no more connections are taken")

// acceptor holds the listeners of a rank, and the connections whose peer is not known yet.
type acceptor struct {
	wg        sync.WaitGroup
	failed    func(error) // ends the meeting because no descriptor is left; set before the first add
	mu        sync.Mutex
	closed    bool
	listeners []net.Listener
	strangers []net.Conn      // oldest first
	ctx       context.Context // until stop
	cancel    context.CancelFunc
}

func newAcceptor() *acceptor {
	d := new(acceptor)
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// add accepts the connections of l. Each goes to enter, in a goroutine of its own, which owns
// it.
func (d *acceptor) add(l net.Listener, enter func(net.Conn)) {
	d.mu.Lock()
	d.listeners = append(d.listeners, l)
	d.mu.Unlock()
	d.wg.Go(func() {
		for {
			conn, err := l.Accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil:
				if openfiles.Exhausted(err) {
					d.failed(openfiles.Explain(err))
				}
				time.Sleep(acceptPause)
			default:
				d.wg.Go(func() { enter(conn) })
			}
		}
	})
}

// stop closes the listeners, and the connections that have not said a number.
func (d *acceptor) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.cancel()
	for _, l := range d.listeners {
		l.Close()
	}
	for _, conn := range d.strangers {
		conn.SetReadDeadline(time.Unix(1, 0))
	}
}

// close is stop, and waits for the acceptor's goroutines.
func (d *acceptor) close() {
	d.stop()
	d.wg.Wait()
}

// readNumber reads the 8 bytes that a connection begins with.
func (d *acceptor) readNumber(conn net.Conn) (int64, error) {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return 0, errTurnedAway
	}
	if len(d.strangers) == maxStrangers {
		d.strangers[0].Close()
		d.strangers = slices.Delete(d.strangers, 0, 1)
	}
	d.strangers = append(d.strangers, conn)
	conn.SetReadDeadline(time.Now().Add(numberLimit))
	d.mu.Unlock()

	var b [8]byte
	_, err := io.ReadFull(conn, b[:])

	d.mu.Lock()
	if i := slices.Index(d.strangers, conn); i >= 0 {
		d.strangers = slices.Delete(d.strangers, i, i+1)
	}
	d.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return int64(binary.LittleEndian.Uint64(b[:])), conn.SetReadDeadline(time.Time{})
}
