package tcp

import (
	"container/list"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/store"
)

// door keeps the number of a server's connections within limits. It knows three kinds:
//
//	stranger  has sent no message yet
//	guest     has sent one
//	rank      is a rank of the job: it has counted itself among the workers, named the job, or
//	          proved that it knows the token or has a certificate
//
// When there are too many, the stranger that has been silent longest makes room, and if there is
// none, the guest. It comes from the address with the most of them. Ranks stay.
type door struct {
	total, perAddress int
	clock             atomic.Int64 // counts connections; the time by which guests are silent

	mu        sync.Mutex
	closed    bool
	sessions  map[*session]struct{}
	addresses map[netip.Addr]*address
	accepted  int64
	refused   int64
}

// address has the connections from one address. Those silent longest come first.
type address struct {
	strangers list.List
	seconds   list.List // strangers that are taken for the second connections of old clients
	guests    list.List
	ranks     int
	old       int // connections on which a client of the old dialect has spoken
}

// doorPlace is what a door knows of a connection.
type doorPlace struct {
	at   *address
	from netip.Addr
	in   *list.List    // nil for a rank, and after the end
	elem *list.Element // its place there
	old  bool          // counted in address.old
	put  error         // why the door has closed it

	last atomic.Int64 // door.clock when its last request came; set without the lock
	seen int64        // last, when its place in guests was chosen
}

var (
	errMadeRoom = errors.New("closed to make room for another client, as the connection that was silent longest")
	errFull     = errors.New("too many clients, and all are ranks of the job: raise ServerOptions.MaxClients or the limit of descriptors")
	errClosing  = errors.New("the server is ending")
)

func newDoor(total, perAddress int) door {
	return door{total: total, perAddress: perAddress, sessions: make(map[*session]struct{}), addresses: make(map[netip.Addr]*address)}
}

// addressOf returns what counts as one address: with IPv6 a network of 64 bits.
func addressOf(a net.Addr) netip.Addr {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	ip := t.AddrPort().Addr().Unmap().WithZone("")
	if ip.Is6() {
		p, _ := ip.Prefix(64)
		return p.Addr()
	}
	return ip
}

// enter admits a new connection, and closes another one if there is no room.
func (d *door) enter(c *session) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.accepted++
	if d.closed {
		return errClosing
	}
	from := addressOf(c.raw.RemoteAddr())
	at := d.addresses[from]
	if at != nil && at.outsiders() >= d.perAddress {
		d.evict(at.quietest())
	}
	if len(d.sessions) >= d.total && !d.evict(d.quietest()) {
		d.refused++
		return errFull
	}
	if at = d.addresses[from]; at == nil {
		at = new(address)
		d.addresses[from] = at
	}
	d.sessions[c] = struct{}{}
	c.place.last.Store(d.clock.Add(1))
	c.place.at, c.place.from = at, from
	c.place.push(&at.strangers, c)
	return nil
}

// active notes that a request of c has come whole.
func (d *door) active(c *session) { c.place.last.Store(d.clock.Load()) }

// spoke notes that a client's first message has come.
func (d *door) spoke(c *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := &c.place
	if p.in != &p.at.strangers && p.in != &p.at.seconds {
		return
	}
	p.push(&p.at.guests, c)
	p.seen = p.last.Load()
	if c.peer.dialect == store.DialectV1 {
		p.old = true
		p.at.old++
	}
}

// joined notes that a client is a rank.
func (d *door) joined(c *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, in := d.sessions[c]; in && !c.peer.member.Load() {
		c.peer.member.Store(true)
		c.place.pull()
		c.place.at.ranks++
	}
}

// joinedFrom is joined for the connection from an address and a port.
func (d *door) joinedFrom(remote net.Addr) {
	d.mu.Lock()
	var found *session
	for c := range d.sessions {
		if c.raw.RemoteAddr().String() == remote.String() {
			found = c
		}
	}
	d.mu.Unlock()
	if found != nil {
		d.joined(found)
	}
}

// isSecond reports whether c, a stranger, may be the second connection of a client of the old
// dialect.
func (d *door) isSecond(c *session) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := &c.place
	if p.in == &p.at.strangers && p.at.seconds.Len() < p.at.old {
		p.push(&p.at.seconds, c)
	}
	return p.in == &p.at.seconds
}

// leave removes a connection that has ended, refused or not. It returns why, if the door has
// closed it.
func (d *door) leave(c *session, refused bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.place.put == nil {
		if refused && !d.closed {
			d.refused++
		}
		d.remove(c)
	}
	return c.place.put
}

// remove forgets c. d.mu is held, as in all that follow.
func (d *door) remove(c *session) {
	p := &c.place
	at := p.at
	delete(d.sessions, c)
	if p.in == nil {
		at.ranks--
	}
	p.pull()
	if p.old {
		at.old--
		if at.seconds.Len() > at.old {
			s := at.seconds.Back().Value.(*session)
			s.place.push(&at.strangers, s)
			at.strangers.MoveToFront(s.place.elem)
		}
	}
	if at.outsiders()+at.seconds.Len()+at.ranks == 0 {
		delete(d.addresses, p.from)
	}
}

// evict closes c, if it is not nil, and reports whether it did.
func (d *door) evict(c *session) bool {
	if c == nil {
		return false
	}
	d.refused++
	d.remove(c)
	c.place.put = errMadeRoom
	c.raw.Close()
	return true
}

// quietest returns the connection that makes room for another one, nil if all stay.
func (d *door) quietest() *session {
	var most *address
	for _, at := range d.addresses {
		if at.settleSeconds(); most == nil || at.strangers.Len() > most.strangers.Len() ||
			at.strangers.Len() == most.strangers.Len() && at.guests.Len() > most.guests.Len() {
			most = at
		}
	}
	if most == nil {
		return nil
	}
	return most.quietest()
}

func (at *address) outsiders() int { return at.strangers.Len() + at.guests.Len() }

// settleSeconds takes the oldest strangers for the second connections of old clients.
func (at *address) settleSeconds() {
	for at.seconds.Len() < at.old && at.strangers.Len() > 0 {
		c := at.strangers.Front().Value.(*session)
		c.place.push(&at.seconds, c)
	}
}

func (at *address) quietest() *session {
	at.settleSeconds()
	if e := at.strangers.Front(); e != nil {
		return e.Value.(*session)
	}
	var least *session
	for range at.guests.Len() {
		c := at.guests.Front().Value.(*session)
		last := c.place.last.Load()
		if last == c.place.seen {
			return c
		}
		c.place.seen = last
		at.guests.MoveToBack(c.place.elem)
		if least == nil || last < least.place.seen {
			least = c
		}
	}
	return least
}

// push moves c to the end of a list.
func (p *doorPlace) push(to *list.List, c *session) {
	p.pull()
	p.in, p.elem = to, to.PushBack(c)
}

// pull takes a connection out of its list.
func (p *doorPlace) pull() {
	if p.in != nil {
		p.in.Remove(p.elem)
		p.in, p.elem = nil, nil
	}
}

// makeRoom closes a connection, and reports whether it could.
func (d *door) makeRoom() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.evict(d.quietest())
}

// close lets nobody in any more, and returns those who are in. The second call returns none.
func (d *door) close() []*session {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	return slices.Collect(maps.Keys(d.sessions))
}

// stats returns the counters of connections.
func (d *door) stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Stats{Clients: len(d.sessions), Accepted: d.accepted, Refused: d.refused}
}
