package tcp

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/internal/strangers"
	"github.com/c10d-go/c10d/store"
)

// Standings: what a server knows of a client. Those of a lower standing make room first.
const (
	outside int32 = iota // not in the table
	silent               // has not sent a whole message
	guest                // has sent one
	claimed              // says that it is a rank: has counted itself, or named the job
	proved               // has a certificate, or is the process that hosts the server
	standings
)

// clients is the account of a server's connections and of the bytes that it holds for them. See "Who stays"
// in the package's documentation.
type clients struct {
	most    [standings]int // the limits of silent and of claimed ones
	total   int
	maxHeld int64

	clock   atomic.Int64 // counts connections; the time by which clients are silent
	held    atomic.Int64 // the sum of account.held
	refused atomic.Int64
	hostile atomic.Bool // most new ones are refused
	taking  sync.Mutex  // see take
	turns   int64       // how often it was taken

	mu        sync.Mutex
	leaving   int64 // the part of held of connections that were closed and have not ended
	closed    bool
	sessions  map[*session]struct{}
	in        [standings]int                 // how many there are; for outside, minus the number of all
	addresses map[netip.Addr]*[standings]int // the same for each address that has any
	seconds   seconds
}

// account is a connection's part of clients.
type account struct {
	last atomic.Int64 // clients.clock when its last request came
	held atomic.Int64 // bytes, see ServerOptions.MaxHeld
	turn atomic.Int64 // clients.turns when it last took room for a long value

	// Guarded by clients.mu.
	from  netip.Addr
	at    *[standings]int // in clients.addresses
	spoke bool            // has sent a whole message
	put   error           // why the server has closed it
	freed int64           // bytes in clients.leaving
}

var (
	errMadeRoom = errors.New("closed to make room for another client, as the connection that was silent longest")
	errFull     = errors.New("too many clients, and all are ranks of the job: raise ServerOptions.MaxClients or the limit of descriptors")
	errClosing  = errors.New("the server is ending")
)

// perRank is how many connections of each rank are believed to be one: those of its groups and its launcher.
const perRank = 8

func newClients(o ServerOptions) *clients {
	t := &clients{total: o.MaxClients, maxHeld: o.MaxHeld, sessions: make(map[*session]struct{}), addresses: make(map[netip.Addr]*[standings]int), seconds: make(seconds)}
	t.most[claimed] = o.MaxClients / 2
	if o.World > 0 {
		t.most[claimed] = min(perRank*o.World, t.most[claimed])
	}
	t.most[silent] = strangers.Limit(t.most[claimed])
	return t
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

// enter admits a connection, and closes another one if there is no room.
func (t *clients) enter(c *session, as int32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return errClosing
	}
	full := len(t.sessions) >= t.total
	if (full || as == silent && t.in[silent] >= t.most[silent]) && !t.makeRoom() {
		return errFull
	}
	c.from = addressOf(c.raw.RemoteAddr())
	if c.at = t.addresses[c.from]; c.at == nil {
		c.at = new([standings]int)
		t.addresses[c.from] = c.at
	}
	c.last.Store(t.clock.Add(1))
	t.sessions[c] = struct{}{}
	t.move(c, as)
	return nil
}

// move changes a standing. Too many claims are not believed. t.mu is held.
func (t *clients) move(c *session, to int32) {
	if to == claimed && t.in[claimed] >= t.most[claimed] {
		to = guest
	}
	is := c.peer.standing.Swap(to)
	t.in[is]--
	t.in[to]++
	c.at[is]--
	c.at[to]++
	if to != outside {
		return
	}
	delete(t.sessions, c)
	delete(t.seconds, c)
	if c.at[outside] == 0 {
		delete(t.addresses, c.from)
	}
}

// rise notes that a client has said something, and so has this standing or a higher one.
func (t *clients) rise(c *session, to int32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	is := c.peer.standing.Load()
	if is == outside {
		return
	}
	c.spoke = true
	if is < to {
		t.move(c, to)
	}
	t.seconds.add(c)
}

// own notes that the process that hosts the server has the connection from an address and a port.
func (t *clients) own(remote net.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.sessions {
		if c.raw.RemoteAddr().String() == remote.String() {
			t.move(c, proved)
		}
	}
}

// leave removes a connection that has ended, refused or not. It returns why, if the server has closed it.
func (t *clients) leave(c *session, refused bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.peer.standing.Load() != outside {
		t.move(c, outside)
	}
	t.held.Add(-c.held.Swap(0))
	t.leaving -= c.freed
	c.freed = 0
	if refused && c.put == nil && !t.closed {
		t.refused.Add(1)
	}
	return c.put
}

// atOnce is how many connections make room at once while most new ones are refused. To find one among 10 000 takes
// 0.3 ms.
const atOnce = 64

// makeRoom closes a connection, and reports whether it could. If the listener refuses most clients, it closes more
// connections of the same standing: each time the oldest of the address with most connections, but never the last
// one of an address. t.mu is held.
func (t *clients) makeRoom() bool {
	t.seconds.raise(t)
	c := t.first(func(c *session) bool { return c.peer.standing.Load() < claimed })
	if c == nil {
		return false
	}
	is := c.peer.standing.Load()
	t.evict(c, errMadeRoom)
	if !t.hostile.Load() {
		return true
	}
	alike := make(map[*[standings]int][]*session)
	for c := range t.sessions {
		if c.peer.standing.Load() == is {
			alike[c.at] = append(alike[c.at], c)
		}
	}
	for _, all := range alike {
		slices.SortFunc(all, func(a, b *session) int { return cmp.Compare(a.last.Load(), b.last.Load()) })
	}
	for range atOnce {
		var most *[standings]int
		for at, all := range alike {
			if len(all) > max(1, len(alike[most])) {
				most = at
			}
		}
		if most == nil {
			break
		}
		t.evict(alike[most][0], errMadeRoom)
		alike[most] = alike[most][1:]
	}
	return true
}

// first returns the connection that goes first of those that may. Silent ones go before guests, and those from the
// address with the most of them before others. Of these it is the one that has sent nothing for longest. t.mu is held.
func (t *clients) first(may func(*session) bool) (first *session) {
	var best [3]int64
	for c := range t.sessions {
		if is := c.peer.standing.Load(); may(c) {
			order := [3]int64{int64(is), -int64(c.at[is]), c.last.Load()}
			if first == nil || slices.Compare(order[:], best[:]) < 0 {
				first, best = c, order
			}
		}
	}
	return first
}

// evict closes c. t.mu is held.
func (t *clients) evict(c *session, why error) {
	t.refused.Add(1)
	t.move(c, outside)
	c.freed = c.held.Load()
	t.leaving += c.freed
	c.put = why
	c.raw.Close()
}

// hold counts n more bytes that the server holds for c, or fewer. If there are too many for all, some
// connections are closed, maybe this one.
func (c *session) hold(n int64) {
	if c == nil || n == 0 {
		return
	}
	if is := c.peer.standing.Load(); is == outside || is == proved {
		return
	}
	t := c.server.clients
	c.held.Add(n)
	all := t.held.Add(n)
	if c.peer.standing.Load() == outside {
		t.held.Add(-c.held.Swap(0))
	} else if all > t.maxHeld && n > 0 {
		t.relieve(nil, 0)
	}
}

// long is how much a server holds for one client with a long request. An eighth of it for each false rank fits
// into MaxHeld.
const long = 256 << 10

// relieve closes connections if the server would hold more than maxHeld with so many bytes more for one, until a
// 64th is free. First those go that have long requests, the oldest first, and then those for which it holds most,
// but only guests while guests have more than half. Nobody goes for one that would have much more: if that does not
// help, one goes itself.
func (t *clients) relieve(one *session, more int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := func() int64 { return t.held.Load() - t.leaving + more }
	if now() <= t.maxHeld {
		return
	}
	type holder struct {
		*session
		n     int64
		order int64
	}
	var all []holder
	var guests, least int64
	enough := t.maxHeld - t.maxHeld/64
	if one != nil {
		least, enough = (one.held.Load()+more)/16, t.maxHeld
	}
	for c := range t.sessions {
		n := c.held.Load()
		if c == one {
			n += more
		}
		if c.peer.standing.Load() < claimed {
			guests += n
		}
		if n == 0 || n < least || c == one {
			continue
		}
		order := -n
		if n >= long {
			order = math.MinInt64 + c.turn.Load()
		}
		all = append(all, holder{c, n, order})
	}
	slices.SortFunc(all, func(a, b holder) int { return cmp.Compare(a.order, b.order) })
	helped := one == nil
	for _, c := range all {
		switch {
		case now() <= enough:
			return
		case c.peer.standing.Load() < claimed:
			guests -= c.n
		case guests > t.maxHeld/2:
			continue
		}
		t.holdsTooMuch(c.session, c.n)
		helped = true
	}
	if !helped {
		t.holdsTooMuch(one, one.held.Load()+more)
	}
}

// holdsTooMuch closes c, for which the server would hold n bytes. t.mu is held.
func (t *clients) holdsTooMuch(c *session, n int64) {
	if c.peer.standing.Load() != outside {
		t.evict(c, fmt.Errorf("the server holds %d bytes for its clients, and would hold %d for this one; ServerOptions.MaxHeld is %d: %w", t.held.Load(), n, t.maxHeld, store.ErrTooLarge))
	}
}
