package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

const (
	// MaxRanks is how many ranks a group may have: a collective of that many
	// hosts' worth of CPUs is better done in two levels.
	MaxRanks = 128

	// MaxElem is the largest element, in bytes, that a reduction takes.
	MaxElem = 64

	// depth is how many pieces a rank has in flight. Three are enough for a rank
	// that waits for nobody but for data; the fourth lets one run ahead. It is a
	// power of two because piece numbers wrap.
	depth = 4

	// line keeps words of different writers apart: CPUs fetch lines of 64 bytes
	// in pairs.
	line = 128

	// A piece has room for the unit of the most awkward element, 63 bytes, for each
	// rank, and for the lengths of AllToAllV.
	minShare = 4 << 10

	// A goroutine cannot be stopped for a garbage collection while it copies or
	// reduces a piece.
	maxPiece = 1 << 20
)

// Options tune a group. The zero value is right for most. All ranks use the
// sizes of rank 0.
type Options struct {
	// Piece is how many bytes a rank stages at a time; 0 stands for 256 KiB.
	// It is clamped to 4 KiB a rank and 1 MiB. A rank's part of the memory is four
	// pieces, which exist once they have been used.
	Piece int

	// OneShot is up to how many bytes each rank reduces everything by itself;
	// 0 stands for 32 KiB with up to four ranks and 8 KiB with more, negative for never.
	// It cannot be more than a piece.
	OneShot int

	// Staged makes this rank read no other rank's memory with
	// process_vm_readv(2), and, because ranks do alike, the others neither: data go
	// through the shared memory, with two copies, but for those in memory of [Group.Alloc].
	Staged bool

	limits   *Limits   // nil stands for defaultLimits; those of rank 0 count
	arena    int       // bytes of an arena, those of rank 0; 0 stands for as many as there is memory
	noArenas errArenas // why this rank has none; 0 stands for nothing
	section  int       // 0 stands for defaultSection; at least 4 KiB
	tile     int       // 0 stands for defaultTile; at least 4 KiB and at most a stretch
	glimpse  glimpse   // nil stands for the system call; of this rank alone, for which then no other is in its process
}

func (o Options) directFrom() Limits {
	if o.limits != nil {
		return *o.limits
	}
	return uniform(byDefault)
}

func (o Options) piece(ranks int) int {
	n := o.Piece
	if n == 0 {
		n = 256 << 10 // 64 KiB is slower from 1 MiB up (BenchmarkProcesses), 128 and 512 KiB are the same
	}
	return min(max(n, ranks*minShare), maxPiece) &^ (line - 1)
}

func (o Options) oneShot(ranks int) int {
	n := o.OneShot
	if n == 0 {
		// BenchmarkProcesses: two ranks on two CPUs take as long either way from
		// 16 to 64 KiB; four take 22 us instead of 32 at 32 KiB, for they wait once
		// and not twice. But everybody's work grows with the ranks.
		n = 32 << 10
		if ranks > 4 {
			n = 8 << 10
		}
	}
	return min(max(n, 0), o.piece(ranks))
}

var (
	// ErrAborted ends the operations of a group on which some rank called
	// [Group.Abort], or gave up.
	ErrAborted = errors.New("shm: group aborted")
	// ErrClosed ends operations on a group that this rank has closed.
	ErrClosed = errors.New("shm: group closed")
	// ErrMismatch ends an operation that another rank called otherwise.
	ErrMismatch = errors.New("shm: ranks disagree on the operation")
	// ErrLeft ends an operation that needs a rank which has closed the group.
	ErrLeft = errors.New("shm: a rank has left the group")
)

// RankError says which rank ended an operation. It wraps ErrAborted,
// ErrMismatch, ErrLeft or ErrUnreadable.
type RankError struct {
	Rank int
	Err  error
}

func (e *RankError) Error() string { return fmt.Sprintf("%v (rank %d)", e.Err, e.Rank) }
func (e *RankError) Unwrap() error { return e.Err }

// Group is one rank's end of a set of ranks that share memory. Make one with
// [Endpoint.Join].
//
// All ranks call the same collectives in the same order with the same sizes. A
// Group does one at a time: calls from several goroutines queue up, in no
// particular order. Buffers belong to the call until it returns, with or
// without an error; then nobody changes them any more. After an error others may still
// read what they were lent, to no effect.
//
// A collective takes a function stop, which may be nil. While the call waits,
// it asks stop every few microseconds at first, later every few milliseconds;
// what stop returns, if not nil, ends the call and aborts the group, because a
// rank that gives up is out of step with the others for good. That is the
// place for contexts and deadlines.
type Group struct {
	rank, size int
	piece      int
	oneShot    int
	spinFor    time.Duration

	mu   sync.Mutex // held by the collective that runs
	segs []segment
	self *segment
	next uint32 // number of the next piece
	seen uint32 // all ranks have published the pieces before this one
	stop func() error
	op   header
	past [depth]uint64 // history of the piece that was published last with each slot

	// The operation that collectives belong to; see call.go.
	number   uint32
	history  uint64
	describe func(what [2]uint64) string

	// What is copied straight out of other ranks' memory; see direct.go.
	limits     Limits
	why        string // there is no such thing
	places     []place
	inside     bool // all ranks are in this process
	glimpse    glimpse
	lens       lens
	lent       []byte
	lentBlocks [][]byte
	addrs      []uint64 // where the others have what they lend
	scratch    []byte   // two tiles
	srcs       [][]byte // for weave
	tile       int
	section    int
	private    bool // this call may lend other memory than that of Alloc

	// What the others see without copying; see arena.go.
	arenas      [][]byte // by rank; nil if there are none
	own         *arena
	whyNoArenas string
	mapped      Limits
	armed       bool // all ranks have called Alloc, and count on mapped

	failure atomic.Pointer[error] // why the group refuses; set once
	life    sync.Mutex            // held while the memory must stay mapped, outside collectives
	mem     []byte
	mesh    *Mesh
	closed  bool
}

// segment is what a rank owns of the memory.
type segment struct {
	abort   *uint32 // rank+1 of who aborted; written by anybody
	waiters *uint32 // how many sleep on a word of this rank
	left    *uint32 // this rank has closed the group
	ack     *uint64
	bell    *uint32 // counts up when a message has moved that this rank's Mesh may wait for
	dozing  *uint32 // how many sleep on bell
	cpus    []byte  // those the rank may run on
	quota   *uint32
	pid     *uint64 // what the others need to read the memory of the rank's process
	markAt  *uint64
	mark    *mark
	found   *uint64 // whether this rank can read that of the others
	mapped  *uint64 // whether it has mapped their arenas
	reading *uint32 // rank+1 of the one in this process that it reads from at the moment
	last    *uint64 // entered, and the number of its last call; see call.go
	calls   *[rememberCalls]called
	slots   [depth]slot
}

// slot holds a piece. Its owner writes all of it, but for the data of rank 0,
// into which the owners of shares put the result of an all-reduce.
type slot struct {
	reduced *uint32 // number of the piece whose share is reduced, plus one
	in      *uint32 // number of the piece that is published, plus one
	op      *header
	data    []byte
}

// header tells which call a staged piece belongs to. It lies beside slot.in, so
// that looking at it costs nothing.
type header struct {
	piece   uint32
	kind    kind
	elem    uint8
	root    uint16
	bytes   uint64
	history uint64 // of the operation, see transport.Call
}

// isFor reports whether h is that of piece p of an operation. (For == the compiler makes a call.)
func (h *header) isFor(op *header, p uint32) bool {
	return h.history == op.history && h.bytes == op.bytes && h.piece == p && h.kind == op.kind && h.elem == op.elem && h.root == op.root
}

// tells reports whether it is of piece p. A rank that publishes a piece without data writes none.
func (h *header) tells(p uint32) bool { return h.piece == p && h.kind != 0 }

type kind uint8

const (
	opAllReduce kind = iota + 1
	opReduce
	opBroadcast
	opAllGather
	opReduceScatter
	opAllToAll
	opAllToAllV
	opGather
	opScatter
	opBarrier
	opAllGatherV
	opAlloc
)

func (k kind) String() string {
	names := [...]string{"nothing", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "all_to_all", "gather", "scatter", "barrier", "all_gather", "Alloc"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("operation %d", uint8(k))
}

// Layout of the memory: a page that says what it is, a segment a rank, and the
// rings for messages. From the next huge page on, the arenas follow.
const (
	page = 4096

	atMagic = 0
	atNonce = 8

	atAbort   = 0 * line
	atWaiters = 1 * line
	atLeft    = 2 * line
	atAck     = 3 * line
	atBell    = 4 * line
	atDozing  = 5 * line
	atCPUs    = 6 * line
	atQuota   = atCPUs + maxCPUs/8
	maxCPUs   = 1024
	atProcess = 8 * line // pid, address of the mark, the mark
	atFound   = 9 * line // and whether it has the arenas
	atReading = 10 * line
	atLast    = 11 * line
	atCalls   = 18 * line // to page; line 16 is atCPU

	atReduced = 0
	atIn      = 64
	atOp      = atIn + 8
	atData    = line
)

// magic is "c10dshm5".
const magic = 0x356d687364303163

func segmentSize(piece int) int { return (page + depth*(atData+piece) + page - 1) &^ (page - 1) }

func memorySize(ranks, piece int) int {
	return ringsAt(ranks, piece) + ranks*(ranks-1)*ringSpace(ranks)
}

func arenasAt(ranks, piece int) int {
	return (memorySize(ranks, piece) + hugePage - 1) &^ (hugePage - 1)
}

// fileSize is what there is with arenas of so many bytes, if there are any.
func fileSize(ranks, piece, arena int) int {
	if arena == 0 {
		return memorySize(ranks, piece)
	}
	return arenasAt(ranks, piece) + ranks*arena
}

func ringsAt(ranks, piece int) int { return page + ranks*segmentSize(piece) }

func word32(b []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&b[off : off+4][0])) }
func word64(b []byte, off int) *uint64 { return (*uint64)(unsafe.Pointer(&b[off : off+8][0])) }

// newGroup lays a group over mem, which is aligned to a page.
func newGroup(mem []byte, rank, size, piece, oneShot int) *Group {
	g := &Group{rank: rank, size: size, piece: piece, oneShot: oneShot, mem: mem, segs: make([]segment, size), addrs: make([]uint64, size)}
	for r := range g.segs {
		b := mem[page+r*segmentSize(piece):][:segmentSize(piece)]
		s := &g.segs[r]
		s.abort, s.waiters, s.left = word32(b, atAbort), word32(b, atWaiters), word32(b, atLeft)
		s.bell, s.dozing = word32(b, atBell), word32(b, atDozing)
		s.ack, s.cpus, s.quota = word64(b, atAck), b[atCPUs:atQuota:atQuota], word32(b, atQuota)
		s.pid, s.markAt, s.mark = word64(b, atProcess), word64(b, atProcess+8), (*mark)(b[atProcess+16:])
		s.found, s.mapped, s.reading = word64(b, atFound), word64(b, atFound+8), word32(b, atReading)
		s.last, s.calls = word64(b, atLast), (*[rememberCalls]called)(unsafe.Pointer(&b[atCalls:page][0]))
		for i := range s.slots {
			p := b[page+i*(atData+piece):][:atData+piece]
			s.slots[i] = slot{
				reduced: word32(p, atReduced), in: word32(p, atIn),
				op: (*header)(unsafe.Pointer(&p[atOp])), data: p[atData:],
			}
		}
	}
	g.self = &g.segs[rank]
	return g
}

// settle decides how to wait and how to copy, once all ranks have said where they
// may run and whose memory they can read.
func (g *Group) settle() {
	quota, n := uint32(maxCPUs), 0
	var union [maxCPUs / 64]uint64
	for r := range g.segs {
		quota = min(quota, atomic.LoadUint32(g.segs[r].quota))
		for i := range union {
			union[i] |= binary.NativeEndian.Uint64(g.segs[r].cpus[8*i:])
		}
	}
	for _, w := range union {
		n += bits.OnesCount64(w)
	}
	if g.size <= min(n, int(quota)) {
		g.spinFor = spinFor
	}
	g.agreeDirect()
	g.agreeArenas(func(r int) uint64 { return atomic.LoadUint64(g.segs[r].mapped) })
}

// Rank returns this rank's number.
func (g *Group) Rank() int { return g.rank }

// Size returns how many ranks there are.
func (g *Group) Size() int { return g.size }

// OneShot returns up to how many bytes each rank reduces everything by itself.
func (g *Group) OneShot() int { return g.oneShot }

// Err returns why the group refuses operations, nil while it works.
func (g *Group) Err() error {
	if p := g.failure.Load(); p != nil {
		return *p
	}
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return ErrClosed
	}
	return g.aborted()
}

// aborted returns the error if some rank has aborted the group.
func (g *Group) aborted() error {
	by := atomic.LoadUint32(g.self.abort)
	if by == 0 {
		return nil
	}
	return g.fail(&RankError{Rank: int(by) - 1, Err: ErrAborted})
}

// fail makes the group refuse with err, or with what came first, which it returns.
func (g *Group) fail(err error) error {
	g.failure.CompareAndSwap(nil, &err)
	return *g.failure.Load()
}

// Abort ends the operation that runs, and all later ones, on every rank: here
// with an error that wraps ErrAborted and err, on the others with a *RankError that
// names this rank. It waits for nobody and may be called at any time, from any
// goroutine. Only the first of several reasons counts.
func (g *Group) Abort(err error) {
	g.life.Lock()
	defer g.life.Unlock()
	if !g.closed {
		g.abort(err)
	}
}

// abort is Abort while the memory is known to stay mapped.
func (g *Group) abort(err error) {
	if err == nil {
		err = ErrAborted
	} else if !errors.Is(err, ErrAborted) {
		err = fmt.Errorf("%w: %w", ErrAborted, err)
	}
	g.fail(err)
	g.tell()
}

// tell aborts the other ranks.
func (g *Group) tell() {
	for r := range g.segs {
		atomic.CompareAndSwapUint32(g.segs[r].abort, 0, uint32(g.rank)+1)
	}
	for r := range g.segs {
		g.segs[r].wakeAll()
		g.segs[r].ring()
	}
}

func (s *segment) wakeAll() {
	if atomic.LoadUint32(s.waiters) == 0 {
		return
	}
	for i := range s.slots {
		wake(s.slots[i].in)
		wake(s.slots[i].reduced)
	}
}

// Close leaves the group and frees its memory, after the operation that runs
// here, if any, has been ended. What this rank has from Alloc stays until it is freed. Ranks that need this one later get ErrLeft; what it
// has done for them by now stays. It may be called more than once.
func (g *Group) Close() error {
	g.life.Lock()
	m := g.mesh
	g.life.Unlock()
	if m != nil {
		m.detach()
	}
	g.fail(ErrClosed)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	atomic.StoreUint32(g.self.left, 1)
	g.self.wakeAll()
	for r := range g.segs {
		g.segs[r].ring()
	}
	mem := g.mem
	g.mem, g.segs, g.self = nil, nil, nil
	if err := errors.Join(unmap(mem), g.dropArenas()); err != nil {
		return fmt.Errorf("shm: unmap: %w", err)
	}
	return nil
}

// undo unmaps the memory of a group that has come to nothing.
func (g *Group) undo() {
	unmap(g.mem)
	g.dropArenas()
}
