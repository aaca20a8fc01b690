// Package strangers bounds the connections of a process's listeners that have not yet said which rank they
// come from.
//
// A rank's listener accepts connections from anybody. Until a connection has proved that it
// belongs to the group it is a stranger: it has a deadline, and it counts. One more than the limit
// closes the oldest one, so that no number of silent strangers keeps a rank out. The limit leaves
// room for every rank of the group at once (see Limit). A rank that was closed all the same
// connects again.
//
// A process has a listener for each group, and a stranger costs it up to 80 KB during a TLS handshake. So all
// listeners of a process share the room, but for those of pages (see Apart).
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

// spare is how many strangers fit into a process besides the ranks of its groups. With it, a process needs
// 256 descriptors and goroutines more, and 20 MB.
const spare = 256

// Limit returns how many strangers a process takes whose listeners expect so many connections of other ranks.
func Limit(expected int) int { return spare + max(expected, 0) }

// room has the strangers of several Lists.
type room struct {
	mu    sync.Mutex
	limit int       // spare, and what the open Lists expect
	order list.List // of stranger, oldest first
}

// all has the strangers of all Lists of New.
var all = &room{limit: spare}

type stranger struct {
	net.Conn
	of *List
}

// List has the strangers of a listener. Its methods may be called from several goroutines. Make one
// with New.
type List struct {
	expected int
	all      *room

	// Guarded by all.mu:
	places  map[net.Conn]*list.Element // in all.order
	closed  bool
	refused int64 // strangers that were closed: wrong ones, silent ones, and those that made room
	pace    Pace
}

// New returns a list for a listener that expects so many connections of other ranks. Until Close there is room
// for them.
func New(expected int) *List {
	l := &List{expected: max(expected, 0), all: all, places: make(map[net.Conn]*list.Element)}
	all.mu.Lock()
	defer all.mu.Unlock()
	all.limit += l.expected
	return l
}

// Apart returns a list that has a room of its own: of visitors that may not close ranks.
func Apart(limit int) *List {
	return &List{all: &room{limit: limit}, places: make(map[net.Conn]*list.Element)}
}

// Add enters c, whose reads and writes fail after d. If there is no room it closes the oldest
// stranger of the process. It reports false if the list is closed: c must then be closed.
func (l *List) Add(c net.Conn, d time.Duration) bool {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	if l.closed {
		return false
	}
	if l.all.order.Len() >= l.all.limit {
		oldest := l.all.order.Front().Value.(stranger)
		oldest.of.remove(oldest.Conn)
		oldest.of.refused++
		oldest.Close()
	}
	l.places[c] = l.all.order.PushBack(stranger{c, l})
	c.SetDeadline(time.Now().Add(d))
	return true
}

// Remove takes c out and reports whether it was there: it is the caller's now, still with its
// deadline. Otherwise the list has closed c, or is closed itself.
func (l *List) Remove(c net.Conn) bool {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	return l.remove(c)
}

// Refuse closes c. If c was in the list, it was a stranger to the end, and counts for Pace.
func (l *List) Refuse(c net.Conn) {
	l.all.mu.Lock()
	if l.remove(c) {
		l.refused++
	}
	l.all.mu.Unlock()
	c.Close()
}

// Pace is called before each Accept. It sleeps for a moment if most of the last connections were
// refused.
func (l *List) Pace() {
	l.all.mu.Lock()
	hostile := l.pace.look(l.refused)
	l.all.mu.Unlock()
	if hostile {
		time.Sleep(pause)
	}
}

func (l *List) remove(c net.Conn) bool {
	e, there := l.places[c]
	if there {
		l.all.order.Remove(e)
		delete(l.places, c)
	}
	return there
}

// Len returns how many strangers there are.
func (l *List) Len() int {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	return len(l.places)
}

// Close makes the reads and writes of all strangers fail, and takes them out. Later ones are not taken.
func (l *List) Close() {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	if !l.closed {
		l.closed = true
		l.all.limit -= l.expected
	}
	for c := range l.places {
		c.SetDeadline(time.Unix(1, 0))
		l.remove(c)
	}
}
