package shm

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/memfd"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/strangers"
)

// Endpoint is a rank that may join a group: a socket in the abstract namespace, which vanishes
// with the process. Every rank makes one and tells the others its address. Then each calls
// Join, once. A connection of another user's process is closed at once.
type Endpoint struct {
	listener *net.UnixListener
	addr     address
}

// NewEndpoint returns an endpoint. It has to be closed unless Join is called.
func NewEndpoint() (*Endpoint, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("shm: cannot identify the host: %w", err)
	}
	netns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("shm: cannot identify the network namespace: %w", err)
	}
	var random [32]byte
	rand.Read(random[:])
	a := address{
		host:   strings.TrimSpace(string(boot)) + "/" + netns,
		socket: hex.EncodeToString(random[:16]),
		token:  hex.EncodeToString(random[16:]),
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: "@c10d-" + a.socket})
	if err != nil {
		return nil, fmt.Errorf("shm: %w", openfiles.Explain(err))
	}
	return &Endpoint{listener: l, addr: a}, nil
}

// Addr returns the address that the other ranks need. It contains a secret of the group: a
// process on this host that knows it can join in place of a rank.
func (e *Endpoint) Addr() string { return e.addr.String() }

// Close closes the socket. Join does so too.
func (e *Endpoint) Close() error {
	if err := e.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("shm: %w", err)
	}
	return nil
}

// Join makes this rank one of the group whose addresses are addrs, in the order of the ranks;
// its own must be addrs[rank]. All ranks call it. It returns once each rank has seen what every
// other rank wrote to the memory. It fails with [ErrOtherHost], with an error of the kernel or
// of another rank, or at the end of ctx.
//
// A rank that fails early tells rank 0, and rank 0 tells the others. A rank that cannot reach
// rank 0 tells nobody. So ctx should have a deadline, or be canceled when some rank is known to
// have failed. Afterwards the caller has to make sure that Join succeeded on all ranks. The
// endpoint is closed in any case.
func (e *Endpoint) Join(ctx context.Context, rank int, addrs []string, o Options) (*Group, error) {
	defer e.Close()
	first, err := checkAddresses(rank, e.Addr(), addrs)
	if err != nil {
		return nil, err
	}
	var g *Group
	if rank == 0 {
		g, err = e.host(ctx, len(addrs), o)
	} else {
		g, err = guest(ctx, rank, len(addrs), first, o)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return nil, fmt.Errorf("shm: rank %d cannot join: %w", rank, err)
	}
	g.configure()
	return g, nil
}

// The packets between rank 0 and each other rank r:
//
//	rank r: hello, with rank 0's token
//	rank 0: the memory's descriptor, its nonce and its sizes
//	rank r: verdict: it has found the nonce and written its own word
//	rank 0: verdict: the words of all ranks are there
//	rank r: verdict: it sees all words, and has published whose memory it can read
//	rank 0: verdict: all ranks have done so
//
// A verdict begins with one of these bytes. The second one has a reason behind it.
const (
	verdictYes = 'y'
	verdictNo  = 'n'
)

const (
	helloSize = 8 + 4 + 4 + 32
	offerSize = 8 + 8 + 4 + 4 + 4 + 8

	// maxReason bounds a verdict.
	maxReason = 1024

	// greeting is how long a stranger may keep a connection.
	greeting = 10 * time.Second
)

func verdict(err error) []byte {
	if err == nil {
		return []byte{verdictYes}
	}
	s := string(verdictNo) + err.Error()
	return []byte(s[:min(len(s), maxReason)])
}

func readVerdict(c *net.UnixConn) error {
	var b [maxReason]byte
	n, err := c.Read(b[:])
	switch {
	case err != nil:
		return err
	case n > 0 && b[0] == verdictYes:
		return nil
	case n > 0 && b[0] == verdictNo:
		return fmt.Errorf("%s", b[1:n])
	}
	return fmt.Errorf("%q is no answer", b[:n])
}

// ackOf returns the word that rank r writes.
func ackOf(nonce uint64, r int) uint64 { return nonce + uint64(r) + 1 }

// host is Join of rank 0.
func (e *Endpoint) host(ctx context.Context, size int, o Options) (*Group, error) {
	piece := o.piece(size)
	var random [8]byte
	rand.Read(random[:])
	nonce := binary.NativeEndian.Uint64(random[:])
	arena, none := arenaSize(size, o)
	fd, err := create(fileSize(size, piece, arena))
	if err != nil && arena > 0 {
		arena, none = 0, arenasFailed(err)
		fd, err = create(fileSize(size, piece, 0))
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	mem, err := mapMemory(fd, memorySize(size, piece))
	if err != nil {
		return nil, err
	}
	g := newGroup(mem, 0, size, piece, o.oneShot(size))
	*word64(mem, atMagic), *word64(mem, atNonce) = magic, nonce
	if none == nil {
		none = g.mapArenas(fd, arenasAt(size, piece), arena)
	}
	g.tellArenas(none)
	if err := g.introduce(nonce); err != nil {
		g.undo()
		return nil, err
	}

	offer := make([]byte, 0, offerSize)
	offer = binary.NativeEndian.AppendUint64(offer, magic)
	offer = binary.NativeEndian.AppendUint64(offer, nonce)
	for _, n := range []int{size, piece, g.oneShot} {
		offer = binary.NativeEndian.AppendUint32(offer, uint32(n))
	}
	offer = binary.NativeEndian.AppendUint64(offer, uint64(arena))
	conns, err := e.welcome(ctx, size, offer, fd)
	defer func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	}()
	defer context.AfterFunc(ctx, func() {
		for _, c := range conns[1:] {
			if c != nil {
				c.SetReadDeadline(time.Unix(1, 0)) // verdicts are sent all the same
			}
		}
	})()
	for round := range 2 {
		for r := 1; r < size && err == nil; r++ {
			if err = readVerdict(conns[r]); err != nil {
				err = fmt.Errorf("rank %d: %w", r, err)
			}
		}
		if err == nil {
			err = g.checkAcks(nonce)
		}
		for r := 1; r < size; r++ {
			if conns[r] == nil {
				continue
			}
			if _, werr := conns[r].Write(verdict(err)); werr != nil && err == nil {
				err = fmt.Errorf("rank %d: %w", r, werr)
			}
		}
		if err != nil {
			g.undo()
			return nil, err
		}
		if round == 0 {
			g.probe(o)
		}
	}
	return g, nil
}

// welcome passes the memory to all other ranks. It returns the connections, after an error too.
func (e *Endpoint) welcome(ctx context.Context, size int, offer []byte, fd int) ([]*net.UnixConn, error) {
	type guest struct {
		rank int
		conn *net.UnixConn
		err  error // no more come, for this reason
	}
	var (
		conns   = make([]*net.UnixConn, size)
		guests  = make(chan guest)
		done    = make(chan struct{})
		failed  error
		group   sync.WaitGroup
		unknown = strangers.New(size - 1)
	)
	group.Add(1)
	go func() {
		defer group.Done()
		for {
			c, err := e.listener.AcceptUnix()
			if err != nil {
				select {
				case guests <- guest{err: openfiles.Explain(err)}:
				case <-done:
				}
				return
			}
			if memfd.SameUser(c) != nil {
				c.Close()
				continue
			}
			if !unknown.Add(c, greeting) {
				c.Close()
				return
			}
			group.Add(1)
			go func() {
				defer group.Done()
				r, err := e.greet(c, size)
				if !unknown.Remove(c) { // closed meanwhile
					c.Close()
					return
				}
				if err == nil {
					_, _, err = c.WriteMsgUnix(offer, unix.UnixRights(fd), nil)
				}
				if err == nil {
					select {
					case guests <- guest{rank: r, conn: c}:
						return
					case <-done:
					}
				}
				c.Close()
			}()
		}
	}()
	for n := 1; n < size && failed == nil; {
		select {
		case g := <-guests:
			if g.err != nil {
				failed = fmt.Errorf("%d of %d other ranks have come: %w", n-1, size-1, g.err)
				continue
			}
			if conns[g.rank] != nil {
				g.conn.Close()
				continue
			}
			conns[g.rank] = g.conn
			n++
		case <-ctx.Done():
			failed = fmt.Errorf("%d of %d other ranks have come", n-1, size-1)
		}
	}
	close(done)
	e.listener.Close()
	unknown.Close()
	group.Wait()
	for _, c := range conns {
		if c != nil {
			c.SetDeadline(time.Time{})
		}
	}
	return conns, failed
}

// greet reads the hello of a rank, or of a stranger.
func (e *Endpoint) greet(c *net.UnixConn, size int) (rank int, err error) {
	var b [helloSize + 1]byte
	n, err := c.Read(b[:])
	if err != nil {
		return 0, err
	}
	rank = int(binary.NativeEndian.Uint32(b[8:]))
	if n != helloSize || binary.NativeEndian.Uint64(b[:]) != magic ||
		subtle.ConstantTimeCompare(b[16:helloSize], []byte(e.addr.token)) != 1 ||
		binary.NativeEndian.Uint32(b[12:]) != uint32(size) || rank < 1 || rank >= size {
		return 0, errors.New("not a rank of this group")
	}
	return rank, nil
}

// guest is Join of the other ranks.
func guest(ctx context.Context, rank, size int, first address, o Options) (*Group, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unixpacket", "@c10d-"+first.socket)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w, or rank 0 has given up: %w", ErrOtherHost, err)
	}
	if err != nil {
		return nil, openfiles.Explain(err)
	}
	defer conn.Close()
	c := conn.(*net.UnixConn)
	if err := memfd.SameUser(c); err != nil {
		return nil, fmt.Errorf("%w (rank 0): ranks that share memory must run as one user", err)
	}
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()

	hello := binary.NativeEndian.AppendUint64(nil, magic)
	hello = binary.NativeEndian.AppendUint32(hello, uint32(rank))
	hello = binary.NativeEndian.AppendUint32(hello, uint32(size))
	hello = append(hello, first.token...)
	if _, err := c.Write(hello); err != nil {
		return nil, err
	}
	g, nonce, err := receive(c, rank, size, o)
	if err == nil {
		err = g.introduce(nonce)
	}
	for round := range 2 {
		if _, werr := c.Write(verdict(err)); err == nil {
			err = werr
		}
		if err == nil {
			err = readVerdict(c)
		}
		if err != nil {
			if g != nil {
				g.undo()
			}
			return nil, err
		}
		if err = g.checkAcks(nonce); err == nil && round == 0 {
			g.probe(o)
		}
	}
	return g, nil
}

// receive gets the memory from rank 0 and looks for the nonce in it.
func receive(c *net.UnixConn, rank, size int, o Options) (*Group, uint64, error) {
	var b [offerSize + 1]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := c.ReadMsgUnix(b[:], oob)
	if err != nil {
		return nil, 0, err
	}
	fds := memfd.Descriptors(oob[:oobn])
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	u32 := func(off int) int { return int(binary.NativeEndian.Uint32(b[off:])) }
	nonce, piece, oneShot := binary.NativeEndian.Uint64(b[8:]), u32(20), u32(24)
	arena := binary.NativeEndian.Uint64(b[28:])
	if n != offerSize || binary.NativeEndian.Uint64(b[:]) != magic || u32(16) != size || len(fds) != 1 ||
		piece < size*minShare || piece > maxPiece || piece%line != 0 || oneShot < 0 || oneShot > piece ||
		arena > maxArenas/uint64(size) || arena%hugePage != 0 || strconv.IntSize < 64 && arena > 0 {
		return nil, 0, fmt.Errorf("rank 0 sent an invalid offer of %d bytes and %d descriptors", n, len(fds))
	}
	if err := sealed(fds[0], fileSize(size, piece, int(arena))); err != nil {
		return nil, 0, err
	}
	mem, err := mapMemory(fds[0], memorySize(size, piece))
	if err != nil {
		return nil, 0, err
	}
	if *word64(mem, atMagic) != magic || *word64(mem, atNonce) != nonce {
		unmap(mem)
		return nil, 0, fmt.Errorf("%w: the memory from rank 0 is not the memory that rank 0 sees", ErrOtherHost)
	}
	g := newGroup(mem, rank, size, piece, oneShot)
	none := arenasAllowed(o)
	if none == nil && arena > 0 {
		none = g.mapArenas(fds[0], arenasAt(size, piece), int(arena))
	}
	g.tellArenas(none)
	return g, nonce, nil
}

// introduce publishes what the other ranks need to know of this one.
func (g *Group) introduce(nonce uint64) error {
	if err := usable(g.self.cpus); err != nil {
		return fmt.Errorf("cannot find out which CPUs may be used: %w", err)
	}
	atomic.StoreUint32(g.self.quota, uint32(quota()))
	*g.self.pid, *g.self.mark, *g.self.markAt = uint64(os.Getpid()), *ownMark(), uint64(uintptr(unsafe.Pointer(ownMark())))
	atomic.StoreUint64(g.self.ack, ackOf(nonce, g.rank))
	return nil
}

// tellArenas publishes whether this rank has arenas, and if not why.
func (g *Group) tellArenas(none error) {
	said := errArenas(arenasYes)
	errors.As(none, &said)
	atomic.StoreUint64(g.self.mapped, uint64(said))
}

func (g *Group) checkAcks(nonce uint64) error {
	for r := range g.segs {
		if got := atomic.LoadUint64(g.segs[r].ack); got != ackOf(nonce, r) {
			return fmt.Errorf("%w: rank %d does not see what rank %d wrote", ErrOtherHost, g.rank, r)
		}
	}
	return nil
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// create returns a file that no process can shrink.
func create(size int) (int, error) {
	fd, err := memfd.Create("c10d", size)
	if err != nil {
		return -1, err
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("%d bytes of shared memory: %w", size, err)
	}
	return fd, nil
}

func sealed(fd, size int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("fstat: %w", err)
	}
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("seals: %w", err)
	}
	if st.Size != int64(size) || got&seals != seals {
		return fmt.Errorf("rank 0 handed over %d bytes with seals %#x, want %d with %#x", st.Size, got, size, seals)
	}
	return nil
}

func mapMemory(fd, size int) ([]byte, error) {
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	return mem, nil
}
