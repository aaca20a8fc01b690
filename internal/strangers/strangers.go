// Package strangers bounds the connections of a listener that have not yet said which rank they
// come from.
//
// A rank's listener accepts connections from anybody. Until a connection has proved that it
// belongs to the group it is a stranger: it has a deadline, and it counts. One more than the limit
// closes the oldest one, so that no number of silent strangers keeps a rank out. The limit leaves
// room for every rank of the group at once (see Limit). A rank that was closed all the same
// connects again.
//
// Closing connections as fast as they come would take the CPUs from the job. So a listener accepts
// more slowly while it refuses most of them (see Pace).
package strangers

import (
	"container/list"
	"net"
	"sync"
	"time"
)

// spare is how many strangers fit besides the ranks of a group. With it, a listener needs a few
// hundred descriptors and goroutines more than its group.
const spare = 512

// Limit returns how many strangers a rank takes that expects so many connections of other ranks.
func Limit(expected int) int { return spare + max(expected, 0) }

// List has the strangers of a rank. Its methods may be called from several goroutines. Make one
// with New.
type List struct {
	mu     sync.Mutex
	limit  int
	order  list.List // of net.Conn, oldest first
	places map[net.Conn]*list.Element
	closed bool

	refused int64 // strangers that were closed: wrong ones, silent ones, and those that made room
	pace    Pace
}

// New returns a list of at most limit strangers.
func New(limit int) *List {
	return &List{limit: limit, places: make(map[net.Conn]*list.Element)}
}

// Add enters c, whose reads and writes fail after d. If the list is full it closes the oldest
// stranger. It reports false if the list is closed: c must then be closed.
func (l *List) Add(c net.Conn, d time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	if l.order.Len() >= l.limit {
		oldest := l.order.Front().Value.(net.Conn)
		l.remove(oldest)
		l.refused++
		oldest.Close()
	}
	l.places[c] = l.order.PushBack(c)
	c.SetDeadline(time.Now().Add(d))
	return true
}

// Remove takes c out and reports whether it was there: it is the caller's now, still with its
// deadline. Otherwise the list has closed c, or is closed itself.
func (l *List) Remove(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.remove(c) && !l.closed
}

// Refuse closes c. If c was in the list, it was a stranger to the end, and counts for Pace.
func (l *List) Refuse(c net.Conn) {
	l.mu.Lock()
	if l.remove(c) {
		l.refused++
	}
	l.mu.Unlock()
	c.Close()
}

// Pace is called before each Accept. It sleeps for a moment if most of the last connections were
// refused.
func (l *List) Pace() {
	l.mu.Lock()
	hostile := l.pace.look(l.refused)
	l.mu.Unlock()
	if hostile {
		time.Sleep(pause)
	}
}

func (l *List) remove(c net.Conn) bool {
	e, there := l.places[c]
	if there {
		l.order.Remove(e)
		delete(l.places, c)
	}
	return there
}

// Len returns how many strangers there are.
func (l *List) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.order.Len()
}

// Close makes the reads and writes of all strangers fail. Later ones are not taken.
func (l *List) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for c := range l.places {
		c.SetDeadline(time.Unix(1, 0))
	}
}
