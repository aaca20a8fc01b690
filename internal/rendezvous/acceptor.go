package rendezvous

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/strangers"
)

const (
	// numberLimit is how long a connection may take to say its number.
	numberLimit = 10 * time.Second

	// acceptPause is the pause after a failed accept: out of descriptors, mostly.
	acceptPause = 50 * time.Millisecond
)

// acceptor holds the listeners of a rank, and the connections whose peer is not known yet.
type acceptor struct {
	wg        sync.WaitGroup
	failed    func(error)     // ends the meeting because no descriptor is left; set before the first add
	strangers *strangers.List // until it is known who they may be

	mu        sync.Mutex
	listeners []net.Listener
	ctx       context.Context // until stop
	cancel    context.CancelFunc
}

// newAcceptor returns the acceptor of a rank in a group of size ranks.
func newAcceptor(size int) *acceptor {
	d := &acceptor{strangers: strangers.New(size - 1)}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// add accepts the connections of l. Each is a stranger, and goes to enter, in a goroutine of its own, which
// owns it.
func (d *acceptor) add(l net.Listener, enter func(net.Conn)) {
	d.mu.Lock()
	d.listeners = append(d.listeners, l)
	d.mu.Unlock()
	d.wg.Go(func() {
		for {
			d.strangers.Pace()
			conn, err := l.Accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil:
				if openfiles.Exhausted(err) {
					d.failed(openfiles.Explain(err))
				}
				time.Sleep(acceptPause)
			case !d.strangers.Add(conn, numberLimit):
				conn.Close()
			default:
				d.wg.Go(func() { enter(conn) })
			}
		}
	})
}

// stop closes the listeners and the strangers.
func (d *acceptor) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cancel()
	for _, l := range d.listeners {
		l.Close()
	}
	d.strangers.Close()
}

// close is stop, and waits for the acceptor's goroutines.
func (d *acceptor) close() {
	d.stop()
	d.wg.Wait()
}

// known takes conn out of the strangers, and closes it unless it is to be taken.
func (d *acceptor) known(conn net.Conn, take bool) bool {
	if !take || !d.strangers.Remove(conn) {
		d.strangers.Refuse(conn)
		return false
	}
	conn.SetDeadline(time.Time{})
	return true
}

// readNumber reads the 8 bytes that a connection begins with.
func readNumber(conn net.Conn) (int64, error) {
	var b [8]byte
	_, err := io.ReadFull(conn, b[:])
	return int64(binary.LittleEndian.Uint64(b[:])), err
}
