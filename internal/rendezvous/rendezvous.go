package rendezvous

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/transport"
	"github.com/c10d-go/c10d/internal/transport/wire"
	"github.com/c10d-go/c10d/internal/waiting"
	"github.com/c10d-go/c10d/store"
)

const (
	// refusals is how often a refused connection is tried again, for a listener whose queue is
	// full: as often as Gloo does, but with a pause.
	refusals     = 3
	refusalPause = 100 * time.Millisecond

	// departureGrace is how long the other ranks may still take to connect after a peer that is
	// not of this library has closed its connection. The peer may be done, or dead.
	departureGrace = 5 * time.Second

	// lastLook bounds the reading of the store after time has run out. It tells which missing
	// ranks have published nothing. Time without a CPU does not count.
	lastLook = 200 * time.Millisecond

	// resolveLimit bounds the look-up of the local host name.
	resolveLimit = 5 * time.Second

	// addressBatch is how many addresses are read at a time. In a group of 1024 ranks an address has
	// 8 KiB.
	addressBatch = 64
)

// Config is the input of Connect. Store, Rank and Size are required.
type Config struct {
	// Store is where the ranks meet, with the prefix of the group and of the Gloo context.
	// PyTorch's only keys below that are rank numbers.
	Store store.Store

	Rank, Size int

	// Address is where to listen. If it is not valid, Interface counts.
	Address netip.Addr

	// Interface names the network interface whose first address is listened on,
	// as a name in GLOO_SOCKET_IFNAME does. If empty, LocalAddr counts.
	Interface string

	// LocalAddr is this host's address towards the store. If it is not valid, Gloo's rule counts:
	// the address that the local host name resolves to, or 127.0.0.1 if this host has none of
	// those.
	//
	// Gloo's rule also chooses between IPv4 and IPv6, because PyTorch's ranks follow it. So if
	// LocalAddr has the other family, a loopback LocalAddr means the loopback address of the chosen
	// family, and another LocalAddr means Gloo's choice.
	LocalAddr netip.Addr

	// Timeout bounds Connect together with its context; 0 or less means
	// store.DefaultTimeout.
	Timeout time.Duration

	// Silence is how long the host of another rank may acknowledge nothing until the connection
	// with it ends. 0 means 15 seconds, negative means that it never ends.
	Silence time.Duration

	// Logger gets a line when this rank has waited 10 s for others, and more at growing
	// intervals. Nil means slog.Default().
	Logger *slog.Logger

	// LastSeen, if not nil, tells what is known of a rank that has published nothing.
	LastSeen func(ctx context.Context, rank int) string

	// Meeting, if not nil, is how the ranks find out who keeps them from meeting. All ranks are of
	// this library then.
	Meeting Meeting

	// Native, if not nil, is another way to connect ranks that have it.
	Native *Native
}

// Meeting is backend.Meeting.
type Meeting interface {
	// Lacks sets the function that says which ranks this one waits for at a moment.
	Lacks(func() []int)

	// Silent returns which ranks keep the others from meeting. It is called when time has run out
	// and this rank lacks some. None means that it is not known.
	Silent(lacking []int) []int
}

// Native is a wire that ranks may have besides Gloo's.
type Native struct {
	// Record is what the other ranks need to know of this one. It is published
	// before the Gloo address, under a key of its own.
	Record []byte

	// Connect is called once every rank has published its Gloo address, or its record. It gets the records by
	// rank, nil for ranks that have published none. Every rank gets the same. It returns the
	// mesh, or nil to go on with Gloo's wire.
	Connect func(ctx context.Context, records [][]byte) (transport.Mesh, error)

	// Only says that this rank takes no other wire. It does not listen for Gloo's wire, and
	// publishes that. Connect must not return nil then.
	Only bool
}

// recordKey is where a rank's record lies.
func recordKey(rank int) string { return fmt.Sprintf(recordFormat, rank) }

const recordFormat = "native_%d"

// Connect connects this rank with all others and returns their mesh. The caller has to close
// it. An error is an *Error, unless cfg is invalid.
func Connect(ctx context.Context, cfg Config) (transport.Mesh, error) {
	switch {
	case cfg.Size < 1 || cfg.Rank < 0 || cfg.Rank >= cfg.Size:
		return nil, fmt.Errorf("rendezvous: rank %d is not in a group of %d", cfg.Rank, cfg.Size)
	case cfg.Size == 1:
		return wire.New(0, 1, wire.Options{}), nil
	case cfg.Store == nil:
		return nil, errors.New("rendezvous: no store")
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = store.DefaultTimeout
	}
	m := newMeeting(cfg)
	m.host, _ = os.Hostname()
	m.host = m.host[:min(len(m.host), maxHost)]
	if cfg.Meeting != nil {
		cfg.Meeting.Lacks(m.lacking)
		defer cfg.Meeting.Lacks(nil)
	}
	if err, fault := m.run(ctx); err != nil {
		m.mesh.Abort(fault)
		m.acceptor.close()
		m.mesh.Close()
		return nil, err
	}
	return m.result(), nil
}

// meeting is one call of Connect.
type meeting struct {
	cfg      Config
	host     string // of this rank
	begun    time.Time
	mesh     *wire.Mesh
	acceptor *acceptor
	gone     chan int              // peers whose connection has ended
	died     chan *transport.Fault // of a peer of this library that has not said goodbye
	met      chan struct{}
	workers  sync.WaitGroup

	mu    sync.Mutex
	own   value
	peers []peer

	open   bool           // it is not known yet whether all ranks use the native wire
	native transport.Mesh // instead of mesh, if not nil

	connectingNative bool      // Native.Connect is running
	reported         []Missing // the ranks in the last log line
}

// peer is what is known of another rank.
type peer struct {
	stage stage
	host  string
	at    endpoint
	known bool  // its value has been read
	id    int64 // the number to say when connecting to it
	lazy  bool  // it may connect late, and says its rank then
}

// absent reports whether the peer is not connected.
func (p *peer) absent() bool { return p.stage != connected }

type stage int

const (
	unpublished stage = iota
	awaited           // it connects to us
	dialed            // we connect to it
	connected
)

func newMeeting(cfg Config) *meeting {
	m := &meeting{
		cfg:      cfg,
		begun:    time.Now(),
		acceptor: newAcceptor(cfg.Size),
		gone:     make(chan int, cfg.Size),
		died:     make(chan *transport.Fault, cfg.Size),
		met:      make(chan struct{}),
		peers:    make([]peer, cfg.Size),
		open:     cfg.Native != nil,
	}
	m.mesh = wire.New(cfg.Rank, cfg.Size, wire.Options{Departed: func(peer int) { m.gone <- peer }, Native: cfg.Meeting != nil})
	m.mesh.OnDeath(func(f *transport.Fault) { m.died <- f })
	return m
}

// run connects the ranks. With an error it returns what to tell the other ranks.
func (m *meeting) run(ctx context.Context) (*Error, *transport.Fault) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	defer waiting.Start(ctx, m.cfg.Logger, m.report)()
	work, stop := context.WithCancelCause(ctx)
	m.acceptor.failed = stop
	var failure error
	m.workers.Go(func() {
		if failure = m.work(work, stop); failure != nil {
			stop(failure)
		}
	})
	m.workers.Go(func() { m.watch(work, stop) })
	select {
	case <-m.met:
	case <-work.Done():
	}
	cause := context.Cause(work)
	stop(nil)
	m.workers.Wait()
	if errors.Is(cause, context.DeadlineExceeded) && errors.As(failure, new(*transport.Fault)) {
		cause = failure // the native wire knows which ranks it lacks
	}
	select {
	case <-m.met:
		return nil, nil
	default:
		return m.explain(ctx, cause)
	}
}

// work publishes this rank's address, reads those of the others, and connects. Ranks of this library alone first publish
// their records, which may be empty. A rank that takes only the native wire does not listen for Gloo's.
func (m *meeting) work(ctx context.Context, stop context.CancelCauseFunc) error {
	n, first := m.cfg.Native, m.cfg.Meeting != nil
	only := n != nil && n.Only
	if first && !only {
		var record []byte
		if n != nil {
			record = n.Record
		}
		err := m.cfg.Store.Set(ctx, recordKey(m.cfg.Rank), record)
		met := false
		if err == nil && n != nil {
			met, err = m.connectNative(ctx)
		}
		if err != nil || met {
			return err
		}
	}
	published, err := m.listen(ctx, only)
	if err != nil {
		return err
	}
	if n != nil && (only || !first) { // who has all addresses has all records
		err := m.cfg.Store.MultiSet(ctx, []string{recordKey(m.cfg.Rank), strconv.Itoa(m.cfg.Rank)}, [][]byte{n.Record, published})
		met := false
		if err == nil {
			met, err = m.connectNative(ctx)
		}
		if err != nil || met {
			return err
		}
	} else if err := m.cfg.Store.Set(ctx, strconv.Itoa(m.cfg.Rank), published); err != nil {
		return err
	}
	if only {
		return ErrWire
	}
	err = m.readAddresses(ctx, func(i int, b []byte) error {
		at, err := m.readValue(i, b)
		if err == nil && at.stage == dialed {
			m.workers.Go(func() {
				if err := m.dial(ctx, i, at); err != nil {
					stop(err)
				}
			})
		}
		return err
	})
	if err == nil {
		m.check()
	}
	return err
}

// readAddresses gives the values of the other ranks to take, in order. It reads those that are in
// the store together, addressBatch at most. A rank that is late delays only those behind it.
func (m *meeting) readAddresses(ctx context.Context, take func(rank int, value []byte) error) error {
	var ranks []int
	var keys []string
	for i := range m.peers {
		if i != m.cfg.Rank {
			ranks, keys = append(ranks, i), append(keys, strconv.Itoa(i))
		}
	}
	for n := addressBatch; len(keys) > 0; n = min(2*n, addressBatch) {
		if n = min(n, len(keys)); n > 1 {
			there, err := m.cfg.Store.Check(ctx, keys[:n]...)
			if err != nil {
				return err
			}
			if !there {
				n = 1
			}
		}
		values, err := m.cfg.Store.MultiGet(ctx, keys[:n])
		if err != nil {
			return err
		}
		for i, v := range values {
			if err := take(ranks[i], v); err != nil {
				return err
			}
		}
		ranks, keys = ranks[n:], keys[n:]
	}
	return nil
}

// connectNative returns true if the ranks have connected by the native wire.
func (m *meeting) connectNative(ctx context.Context) (bool, error) {
	records, err := m.records(ctx)
	if err != nil {
		return false, err
	}
	m.setConnectingNative(true)
	mesh, err := m.cfg.Native.Connect(ctx, records)
	m.setConnectingNative(false)
	if err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open, m.native = false, mesh
	if mesh != nil {
		m.acceptor.stop()
		close(m.met)
	}
	return mesh != nil, nil
}

// cameKey is the key that a rank writes first.
func (m *meeting) cameKey(rank int) string {
	if m.cfg.Meeting != nil {
		return recordKey(rank)
	}
	return strconv.Itoa(rank)
}

// records returns the native records of all ranks.
func (m *meeting) records(ctx context.Context) ([][]byte, error) {
	addresses, keys := make([]string, m.cfg.Size), make([]string, m.cfg.Size)
	for r := range keys {
		addresses[r], keys[r] = strconv.Itoa(r), recordKey(r)
	}
	if m.cfg.Meeting == nil {
		if err := m.cfg.Store.Wait(ctx, addresses...); err != nil {
			return nil, err
		}
		there, err := m.there(ctx, keys)
		if err != nil {
			return nil, err
		}
		keys = slices.DeleteFunc(keys, func(key string) bool { return !there[key] })
	}
	values, err := m.cfg.Store.MultiGet(ctx, keys)
	records := make([][]byte, m.cfg.Size)
	for i, v := range values {
		var r int
		if _, bad := fmt.Sscanf(keys[i], recordFormat, &r); bad == nil && len(v) > 0 {
			records[r] = v
		}
	}
	return records, err
}

// there returns which keys are in the store, as far as it answers. Few missing ones cost few calls.
func (m *meeting) there(ctx context.Context, keys []string) (map[string]bool, error) {
	found := make(map[string]bool)
	var look func(keys []string) error
	look = func(keys []string) error {
		all, err := m.cfg.Store.Check(ctx, keys...)
		if half := len(keys) / 2; err == nil && !all && half > 0 {
			return errors.Join(look(keys[:half]), look(keys[half:]))
		}
		for _, key := range keys {
			found[key] = err == nil && all
		}
		return err
	}
	if len(keys) == 0 {
		return found, nil
	}
	return found, look(keys)
}

// watch notices the end of the mesh and of peers.
func (m *meeting) watch(ctx context.Context, stop context.CancelCauseFunc) {
	var grace <-chan time.Time
	gone := -1 // the first peer that has left
	for {
		select {
		case <-ctx.Done():
		case <-m.mesh.Failed():
			stop(m.mesh.Fault())
		case f := <-m.died:
			stop(f)
		case i := <-m.gone:
			if gone < 0 {
				gone, grace = i, time.After(departureGrace)
			}
			continue
		case <-grace:
			stop(m.peerFailure(gone, transport.FaultPeerDied, "closed its connection before all ranks had met", net.ErrClosed))
		}
		return
	}
}

// listen opens this rank's listeners, unless it takes only the native wire, and returns the value to publish. The host name,
// which PyTorch up to 2.0 reads before that, is published already.
func (m *meeting) listen(ctx context.Context, only bool) (published []byte, err error) {
	v := value{perRank: perRank(m.cfg.Store), host: m.host}
	open := func(addr netip.Addr, enter func(net.Conn, net.Listener)) error {
		l, err := net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		if err != nil {
			return openfiles.Explain(err)
		}
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		v.at = append(v.at, endpoint{netip.AddrPortFrom(addr, port), noSeq})
		m.acceptor.add(l, func(conn net.Conn) { enter(conn, l) })
		return nil
	}
	if only {
		v = valueNotListening(v.perRank, m.host, m.cfg.Size)
	} else {
		addr, err := listenAddr(ctx, m.cfg)
		if err == nil && !v.perRank {
			err = open(addr, func(conn net.Conn, _ net.Listener) { m.identify(conn) })
			v.ids = newIDs(m.cfg.Size)
		}
		for i := range m.peers {
			if v.perRank && i != m.cfg.Rank && err == nil {
				err = open(addr, func(conn net.Conn, l net.Listener) { m.claim(i, conn, l) })
			}
		}
		if err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	m.own = v
	m.mu.Unlock()
	if v.perRank {
		err = m.cfg.Store.Set(ctx, fmt.Sprintf("rank_%d", m.cfg.Rank), []byte(m.host))
	}
	return v.encode(), err
}

// listenAddr returns the address that cfg asks for.
func listenAddr(ctx context.Context, cfg Config) (netip.Addr, error) {
	if cfg.Address.IsValid() {
		return cfg.Address.Unmap(), nil
	}
	if cfg.Interface != "" {
		return interfaceAddr(cfg.Interface)
	}
	ctx, cancel := context.WithTimeout(ctx, resolveLimit)
	defer cancel()
	if host, err := os.Hostname(); err == nil {
		addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		for _, a := range addrs {
			if a = a.Unmap(); canListen(a) {
				return listenInsteadOf(a, cfg.LocalAddr), nil
			}
		}
	}
	return listenInsteadOf(loopback4, cfg.LocalAddr), nil
}

var loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// listenInsteadOf returns where to listen, from Gloo's choice and Config.LocalAddr.
func listenInsteadOf(choice, local netip.Addr) netip.Addr {
	switch {
	case !local.IsValid():
		return choice
	case !local.IsLoopback():
		if local.Is4() == choice.Is4() {
			return local
		}
		return choice
	case choice.IsLoopback():
		return choice
	}
	same := loopback4
	if choice.Is6() {
		same = netip.IPv6Loopback()
	}
	if canListen(same) {
		return same
	}
	return local
}

func canListen(a netip.Addr) bool {
	l, err := net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
	if err != nil {
		return false
	}
	l.Close()
	return true
}

func interfaceAddr(name string) (netip.Addr, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("interface %s: %w", name, err)
	}
	addrs, err := i.Addrs()
	if err != nil {
		return netip.Addr{}, fmt.Errorf("interface %s: %w", name, err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			if p.Addr().IsLinkLocalUnicast() && p.Addr().Is6() {
				return p.Addr().WithZone(name), nil
			}
			return p.Addr().Unmap(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("interface %s has no address", name)
}

// identify takes a connection of the shared listener. Its first 8 bytes are the number that
// this rank has published for the peer. A peer that has published no numbers says its rank.
func (m *meeting) identify(conn net.Conn) {
	n, err := readNumber(conn)
	switch i, proven := m.rankOf(n); {
	case err != nil || i < 0:
		m.acceptor.strangers.Refuse(conn)
	case !proven:
		m.claim(i, conn, nil)
	case m.acceptor.known(conn, true):
		m.attach(i, conn, awaited)
	}
}

// rankOf returns the rank that says the number n when it connects, -1 if none does. It is proven if
// this rank has published the number for it.
func (m *meeting) rankOf(n int64) (rank int, proven bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := slices.Index(m.own.ids, n); i >= 0 && i != m.cfg.Rank {
		return i, true
	}
	if n >= 0 && n < int64(m.cfg.Size) && n != int64(m.cfg.Rank) {
		return int(n), false
	}
	return -1, false
}

// claim makes conn the connection with rank i, which proves nothing. The rank must have published an address by which it is
// to connect, and no numbers. The listener, if not nil, is for this rank alone.
func (m *meeting) claim(i int, conn net.Conn, l net.Listener) {
	if !m.acceptor.known(conn, m.hasValue(i)) {
		return
	}
	m.mu.Lock()
	may := m.peers[i].stage == awaited && (l != nil || m.peers[i].lazy)
	m.mu.Unlock()
	if !may {
		conn.Close()
	} else if m.attach(i, conn, awaited) && l != nil {
		l.Close()
	}
}

// hasValue reports whether rank i has published a usable address, which it looks up if
// it has not been read yet.
func (m *meeting) hasValue(i int) bool {
	m.mu.Lock()
	known, ready := m.peers[i].known, len(m.own.at) > 0
	m.mu.Unlock()
	if known || !ready {
		return known
	}
	ctx, cancel := context.WithTimeout(m.acceptor.ctx, numberLimit)
	defer cancel()
	key := strconv.Itoa(i)
	if ok, err := m.cfg.Store.Check(ctx, key); err != nil || !ok {
		return false
	}
	b, err := m.cfg.Store.Get(ctx, key)
	if err != nil {
		return false
	}
	_, err = m.readValue(i, b)
	return err == nil
}

// attach makes conn the connection with rank i, if the other side was to connect or nothing is
// known of it. It owns conn and reports whether it was used.
func (m *meeting) attach(i int, conn net.Conn, as stage) bool {
	m.mu.Lock()
	now := m.peers[i].stage
	if now != as && now != unpublished {
		m.mu.Unlock()
		conn.Close()
		return false
	}
	m.peers[i].stage = connected
	m.mu.Unlock()
	wire.LimitSilence(conn, m.cfg.Silence)
	if m.mesh.Attach(i, conn) != nil {
		return false
	}
	m.check()
	return true
}

// check closes met when no rank is missing, and stops the acceptor when no rank is to connect.
func (m *meeting) check() {
	m.mu.Lock()
	defer m.mu.Unlock()
	missing, late := m.open, m.open
	for i := range m.peers {
		if p := &m.peers[i]; i != m.cfg.Rank && p.absent() {
			late = true
			missing = missing || !p.lazy || p.stage != awaited
		}
	}
	if !late {
		m.acceptor.stop()
	}
	select {
	case <-m.met:
	default:
		if !missing {
			close(m.met)
		}
	}
}

// readValue takes in the value that rank i published.
func (m *meeting) readValue(i int, b []byte) (peer, error) {
	v, err := parseValue(b, m.cfg.Size)
	if err != nil {
		return peer{}, m.peerFailure(i, transport.FaultMismatch, "published "+err.Error(), ErrAddress)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.peers[i]
	if v.at[0] == notListening {
		p.host = v.host
		return peer{}, m.peerFailureLocked(i, transport.FaultMismatch,
			"takes only the native wire (it has TLS, or Options.Wire is native or tcp), and this rank needs Gloo's", ErrWire)
	}
	if v.perRank != m.own.perRank {
		return peer{}, m.peerFailureLocked(i, transport.FaultMismatch, "published its address in another form than this rank", ErrGeneration)
	}
	p.host, p.at = v.host, v.forPeer(i, m.cfg.Rank)
	p.known, p.id, p.lazy = true, int64(m.cfg.Rank), !v.perRank && len(v.ids) == 0
	if len(v.ids) > 0 {
		p.id = v.ids[m.cfg.Rank]
	}
	own := m.own.forPeer(m.cfg.Rank, i)
	order, err := compare(own, p.at)
	if err != nil {
		return peer{}, m.peerFailureLocked(i, transport.FaultMismatch, fmt.Sprintf("listens where it cannot meet this rank at %v: %v", own.at, err), ErrAddress)
	}
	if p.stage == unpublished {
		p.stage = awaited
		if order > 0 {
			p.stage = dialed
		}
	}
	return *p, nil
}

// dial connects to rank i.
func (m *meeting) dial(ctx context.Context, i int, p peer) error {
	var d net.Dialer
	var conn net.Conn
	var err error
	for try := 0; ; try++ {
		conn, err = d.DialContext(ctx, "tcp", p.at.at.String())
		if try == refusals || !errors.Is(err, syscall.ECONNREFUSED) {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(refusalPause):
		}
	}
	if err == nil && !m.own.perRank {
		// Gloo expects all 8 bytes in its first read.
		_, err = conn.Write(binary.LittleEndian.AppendUint64(nil, uint64(p.id)))
	}
	switch {
	case err == nil:
		m.attach(i, conn, dialed)
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case openfiles.Exhausted(err):
		return openfiles.Explain(err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return m.peerFailure(i, transport.FaultPeerDied, "refused the connection: it has ended, or an earlier run left its address in the store", err)
	}
	return m.peerFailure(i, transport.FaultPeerDied, "could not be reached", err)
}

func (m *meeting) peerFailure(i int, kind transport.FaultKind, what string, err error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peerFailureLocked(i, kind, what, err)
}

func (m *meeting) peerFailureLocked(i int, kind transport.FaultKind, what string, err error) error {
	p := m.peers[i]
	return &peerFailure{Missing{Rank: i, Host: p.host, Addr: p.at.at, What: what}, kind, err}
}

// explain makes the error of a failed meeting from its cause, and the fault for the ranks that
// are connected already.
func (m *meeting) explain(ctx context.Context, cause error) (*Error, *transport.Fault) {
	e := &Error{Rank: m.cfg.Rank, Size: m.cfg.Size, After: time.Since(m.begun), Err: cause}
	// The fault gets the text of e, not e, which unwraps to the fault.
	f := transport.NewFault(transport.FaultAborted, m.cfg.Rank, m.cfg.Rank, nil)
	defer func() {
		if f.Err == nil {
			f.Err = errors.New(e.Error())
		}
		e.fault = f
	}()
	var c *peerFailure
	var was *transport.Fault
	switch {
	case errors.As(cause, &c):
		e.Missing, e.Err = []Missing{c.Missing}, c.err
		f.Kind, f.Rank = c.kind, c.Rank
		return e, f
	case errors.As(cause, &was): // of a peer, or of the native wire
		*f = *was
		var partial interface{ Unconnected() []int }
		if errors.As(cause, &partial) {
			m.judge(ctx, e, f, partial.Unconnected(), partial.Unconnected())
		}
		return e, f
	case errors.Is(ctx.Err(), context.Canceled):
		f.Kind = transport.FaultCanceled
		if told := transport.CanceledBy(ctx, m.cfg.Rank); told.Kind == transport.FaultAborted { // another rank has said why there is no group
			e.Err, *f = told.Err, *told
			return e, f
		}
	case ctx.Err() != nil, errors.Is(cause, store.ErrTimeout):
		f.Kind = transport.FaultTimeout
	default:
		var lost *store.Error
		if errors.As(cause, &lost) {
			m.mu.Lock()
			e.Missing = m.reported
			m.mu.Unlock()
		}
		return e, f
	}
	if err := ctx.Err(); err != nil {
		e.Err = err
		if why := context.Cause(ctx); why != err {
			e.Err = fmt.Errorf("%w: %w", err, why)
		}
	}
	look, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), lastLook)
	defer cancel()
	e.Missing = m.missing(look)
	if f.Kind == transport.FaultTimeout && len(e.Missing) > 0 {
		f.Rank = e.Missing[0].Rank
	}
	lacks := m.lacking()
	m.judge(ctx, e, f, lacks, slices.DeleteFunc(slices.Clone(lacks), m.untried))
	return e, f
}

// judge finds out which of the missing ranks do not run, once time has run out here or on another rank. The other
// missing ranks are alive, and their links are broken, or slow, if this rank has tried to connect with them.
func (m *meeting) judge(ctx context.Context, e *Error, f *transport.Fault, lacks, tried []int) {
	var told interface{ Culprit() int }
	late := errors.Is(context.Cause(ctx), context.DeadlineExceeded) && errors.As(context.Cause(ctx), &told)
	if m.cfg.Meeting == nil || len(lacks) == 0 || !late && f.Kind != transport.FaultTimeout {
		return
	}
	var silent []int
	if late {
		silent = []int{told.Culprit()}
	} else if silent = m.cfg.Meeting.Silent(lacks); len(silent) > 0 {
		look, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), lastLook)
		defer cancel()
		e.Missing, f.Rank = m.silent(look, silent), silent[0]
	}
	if slices.Contains(silent, m.cfg.Rank) { // this rank had stopped
		return
	}
	e.lacks = slices.DeleteFunc(slices.Clone(tried), func(r int) bool { return slices.Contains(silent, r) })
	if len(silent) == 0 && len(e.lacks) > 0 {
		f.Rank = -1
		e.Err = fmt.Errorf("%w: %s and this rank reach the store, and not each other", e.Err, waiting.Ranks(e.lacks))
	}
}

// lacking returns the ranks that are not connected. The native wire has a list of its own, so there
// are none while it connects.
func (m *meeting) lacking() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ranks []int
	for i := range m.peers {
		if i != m.cfg.Rank && !m.connectingNative && m.peers[i].absent() {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

// untried reports whether this rank has not tried to connect with another one, because a rank has published nothing yet.
func (m *meeting) untried(rank int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peers[rank].stage == unpublished
}

// silent describes the ranks that did not answer.
func (m *meeting) silent(ctx context.Context, ranks []int) []Missing {
	var all []Missing
	for _, i := range ranks {
		if i < 0 || i >= len(m.peers) || i == m.cfg.Rank {
			continue
		}
		m.mu.Lock()
		p := m.peers[i]
		m.mu.Unlock()
		x := Missing{Rank: i, Host: p.host, Addr: p.at.at, What: "published its address and does not answer: it has stopped, or its host is away"}
		if !p.known {
			ok, err := m.cfg.Store.Check(ctx, m.cameKey(i))
			if err == nil && !ok {
				x.What = "published no address"
				if len(all) < maxLastSeen && m.cfg.LastSeen != nil {
					x.Last = m.cfg.LastSeen(ctx, i)
				}
			}
		}
		all = append(all, x)
	}
	return all
}

// missing lists the ranks that are not connected. It leaves out ranks that may themselves be
// waiting for others, unless all are. A rank first waits to learn which ranks
// have a native wire. Then it reads the addresses of the ranks one after the other.
func (m *meeting) missing(ctx context.Context) []Missing {
	var all, waiters []Missing
	var unseen []string
	m.mu.Lock()
	for i := range m.peers {
		if i != m.cfg.Rank && m.peers[i].stage == unpublished {
			unseen = append(unseen, m.cameKey(i))
		}
	}
	m.mu.Unlock()
	came, _ := m.there(ctx, unseen)
	for i := range m.peers {
		m.mu.Lock()
		p := m.peers[i]
		m.mu.Unlock()
		if i == m.cfg.Rank || !p.absent() {
			continue
		}
		x, waits := Missing{Rank: i, Host: p.host, Addr: p.at.at}, false
		switch p.stage {
		case dialed:
			x.What = "took no connection"
		case awaited:
			x.What, waits = "did not connect", true
		case unpublished:
			if came[m.cameKey(i)] {
				x.What, waits = "did not connect", true
				break
			}
			x.What = "published no address"
			if len(all) < maxLastSeen && m.cfg.LastSeen != nil {
				x.Last = m.cfg.LastSeen(ctx, i)
			}
		}
		if waits {
			waiters = append(waiters, x)
		} else {
			all = append(all, x)
		}
	}
	if len(all) == 0 {
		return waiters
	}
	return all
}

// result returns the mesh of a meeting that has succeeded.
func (m *meeting) result() transport.Mesh {
	if m.native != nil {
		m.acceptor.close()
		m.mesh.Close()
		return m.native
	}
	m.mu.Lock()
	late := false
	for i := range m.peers {
		late = late || i != m.cfg.Rank && m.peers[i].absent()
	}
	m.mu.Unlock()
	if late {
		return &openMesh{m.mesh, m.acceptor}
	}
	m.acceptor.close()
	return m.mesh
}

// openMesh is a mesh to which peers may still connect.
type openMesh struct {
	*wire.Mesh
	acceptor *acceptor
}

func (m *openMesh) Close() error {
	m.acceptor.close()
	return m.Mesh.Close()
}
