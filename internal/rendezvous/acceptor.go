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
	strangers *strangers.List // until they have said a number

	mu        sync.Mutex
	listeners []net.Listener
	ctx       context.Context // until stop
	cancel    context.CancelFunc
}

// newAcceptor returns the acceptor of a rank in a group of size ranks.
func newAcceptor(size int) *acceptor {
	d := &acceptor{strangers: strangers.New(strangers.Limit(size - 1))}
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

// readNumber reads the 8 bytes that a connection begins with. Until then conn is a stranger.
func (d *acceptor) readNumber(conn net.Conn) (int64, error) {
	if !d.strangers.Add(conn, numberLimit) {
		return 0, net.ErrClosed
	}
	var b [8]byte
	_, err := io.ReadFull(conn, b[:])
	return int64(binary.LittleEndian.Uint64(b[:])), err
}
