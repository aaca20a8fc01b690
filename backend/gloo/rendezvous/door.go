package rendezvous

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

const (
	// introduction is how long a connection may take to say its number.
	introduction = 10 * time.Second

	// maxStrangers bounds the connections that have not said it yet.
	maxStrangers = 1024

	// acceptPause is the pause after a failed accept: out of descriptors, mostly.
	acceptPause = 50 * time.Millisecond
)

var errTurnedAway = errors.New("rendezvous: no more connections are taken")

// door holds the listeners of a rank and the connections whose peer is not
// known yet.
type door struct {
	wg        sync.WaitGroup
	mu        sync.Mutex
	closed    bool
	listeners []net.Listener
	strangers map[net.Conn]bool
}

func newDoor() *door { return &door{strangers: make(map[net.Conn]bool)} }

// add makes l part of the door. Each connection goes to enter, in a goroutine
// of its own, which owns it.
func (d *door) add(l net.Listener, enter func(net.Conn)) {
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
				time.Sleep(acceptPause)
			default:
				d.wg.Go(func() { enter(conn) })
			}
		}
	})
}

// lock stops accepting and sends away who has not said a number.
func (d *door) lock() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	for _, l := range d.listeners {
		l.Close()
	}
	for conn := range d.strangers {
		conn.SetReadDeadline(time.Unix(1, 0))
	}
}

// close is lock, and waits for the door's goroutines.
func (d *door) close() {
	d.lock()
	d.wg.Wait()
}

// number reads the 8 bytes that a connection begins with.
func (d *door) number(conn net.Conn) (int64, error) {
	d.mu.Lock()
	if d.closed || len(d.strangers) == maxStrangers {
		d.mu.Unlock()
		return 0, errTurnedAway
	}
	d.strangers[conn] = true
	conn.SetReadDeadline(time.Now().Add(introduction))
	d.mu.Unlock()

	var b [8]byte
	_, err := io.ReadFull(conn, b[:])

	d.mu.Lock()
	delete(d.strangers, conn)
	d.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return int64(binary.LittleEndian.Uint64(b[:])), conn.SetReadDeadline(time.Time{})
}
