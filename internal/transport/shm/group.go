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

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// MaxRanks is how many ranks a group may have. For that many CPUs, two levels are faster.
	MaxRanks = 128

	// MaxElem is the largest element, in bytes, that a reduction takes.
	MaxElem = 64

	// depth is how many small pieces a rank has in flight. With as many a rank that only sends can be
	// 14 calls ahead. With four, a reduce, gather or scatter of 4 bytes took 3.4 us on average, and
	// takes 2.2 (4 ranks, two CPUs). It is a power of two because piece numbers wrap.
	depth = 16

	// largeDepth is how many large pieces a rank has in flight. Three are enough for ranks that wait
	// for nothing but data. It divides depth. With more, the pieces leave the CPU cache.
	largeDepth = 4

	// smallBytes is the room for a small piece.
	smallBytes = 8 << 10

	// line keeps the words of different writers apart. CPUs fetch lines of 64 bytes in pairs.
	line = 128

	// A piece must have room, for each rank, for the unit of any element, 63 bytes at most, and
	// for the lengths of AllToAllV.
	minShare = 4 << 10

	// A goroutine cannot be stopped for a garbage collection while it copies or reduces a
	// piece.
	maxPiece = 1 << 20
)

// Options tune a group. The zero value is right for most. All ranks use the
// sizes of rank 0.
type Options struct {
	// Piece is how many bytes a rank stages at a time. 0 means 256 KiB. The least is 4 KiB for
	// each rank, the most 1 MiB. A rank has four large pieces in the memory, which exist once they
	// are used.
	Piece int

	// OneShot is the size in bytes up to which each rank reduces everything by itself. 0 means
	// 32 KiB with up to four ranks, else 8 KiB. Negative means never. It cannot be more than a
	// piece.
	OneShot int

	reads      *ReadLimits // nil means defaultReads; all ranks have the same
	arena      int         // bytes of an arena, rank 0's count; 0 means the host's memory
	noArenas   errArenas   // why this rank has none; 0 means no reason
	section    int         // 0 means that it depends on the buffer; at least 4 KiB
	tile       int         // 0 means defaultTile; at least 4 KiB and at most a stretch
	slowCopies bool        // as if package copies were not faster than copy here
	readMemory readMemory  // nil means the system call
}

func (o Options) piece(ranks int) int {
	n := o.Piece
	if n == 0 {
		n = 256 << 10 // 64 KiB is slower from 1 MiB up, 128 and 512 KiB are the same
	}
	return min(max(n, ranks*minShare), maxPiece) &^ (line - 1)
}

func (o Options) oneShot(ranks int) int {
	n := o.OneShot
	if n == 0 {
		// Two ranks on two CPUs take as long either way from 16 to 64 KiB.
		// Four take 22 us instead of 32 at 32 KiB, because they wait once and not twice. But
		// each rank's work grows with the number of ranks.
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

// RankError says which rank ended an operation. It wraps ErrAborted, ErrMismatch, ErrLeft,
// ErrUnreadable, or the *transport.Fault of [Group.Died].
type RankError struct {
	Rank int
	Err  error
}

func (e *RankError) Error() string { return fmt.Sprintf("%v (rank %d)", e.Err, e.Rank) }
func (e *RankError) Unwrap() error { return e.Err }

// Group is one rank's end of a set of ranks that share memory. [Endpoint.Join] makes one.
//
// All ranks call the same collectives in the same order with the same sizes. A Group runs one
// at a time. Calls from several goroutines wait for each other, in no particular order. Buffers
// belong to the call until it returns, with or without an error. Afterwards no rank changes
// them. After an error others may still read them, but then do not use what they read.
//
// A collective takes a function stop, which may be nil: it is the place for contexts and
// deadlines. A waiting call asks it every few microseconds at first, later every few
// milliseconds. An error from it ends the call and aborts the group: a rank that gives up cannot
// get into step with the others again.
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
	read uint32 // see afterReads
	stop func() error

	waitsFor atomic.Int32 // the rank that a collective waits for, sleeping, and 1 more; 0: none
	op       header
	by       Operator // of a reduction

	room room // where the pieces of op lie

	early  int  // see setEarly
	posted bool // the piece before next is of a collective that this rank has not run yet; see post

	// The operation that collectives belong to; see call.go.
	number   uint32
	history  uint64
	describe func(what [2]uint64) string

	// What is copied straight out of other ranks' memory; see direct.go.
	reads         ReadLimits
	readsFrom     *ReadLimits // those of the options
	whyStaged     string      // "" if data can be copied straight out of other ranks' memory
	processes     []process
	oneProcess    bool // all ranks are in this process
	fast          bool // copies.Fast on all ranks, unless a rank is of another build
	readMemory    readMemory
	reader        vmReader
	probed        mark
	exposed       []byte
	exposedBlocks [][]byte
	addrs         []uint64 // where the others have what they expose
	scratch       []byte   // a tile
	srcs, parts   [][]byte // for reduceOperands and reduceClaimed
	tile          int
	section       int  // 0 means that it depends on the buffer
	exposeAny     bool // this call may expose memory that is not from Alloc

	// What the others see without copying; see arena.go.
	arenas      [][]byte // by rank; nil if there are none
	own         *arena
	whyNoArenas string
	mapped      Limits
	allocated   bool // all ranks have called Alloc, and use mapped

	failure atomic.Pointer[error]              // why the group refuses; set once
	deaths  atomic.Pointer[[]*transport.Fault] // by rank, of those that have died; nil if none has
	life    sync.Mutex                         // held while the memory must stay mapped, outside collectives
	mem     []byte
	mesh    *Mesh
	closed  bool
}

// segment is a rank's part of the memory.
type segment struct {
	abort   *uint32 // rank+1 of the rank that aborted; any rank writes it
	waiters *uint32 // how many ranks sleep on a word of this one
	left    *uint32 // this rank has closed the group
	ack     *uint64
	moves   *uint32 // counts messages that this rank's Mesh may wait for
	dozing  *uint32 // how many goroutines sleep on moves
	cpus    []byte  // that the rank may run on
	quota   *uint32
	pid     *uint64 // for the others, to read the memory of the rank's process
	markAt  *uint64
	mark    *mark
	found   *uint64 // whether this rank can read that of the others
	mapped  *uint64 // whether it has mapped their arenas
	last    *uint64 // the number of its last call, with the mark entered; see call.go
	calls   *[rememberCalls]called
	slots   [depth]slot
}

// slot holds a piece. Its owner writes all of it. Only into the data of rank 0 other ranks
// write, the results of their shares of an all-reduce.
type slot struct {
	reduced *uint32 // number of the piece whose share is reduced, plus one
	head    []byte  // the line of in, op and what is beside
	in      *uint32 // number of the published piece, plus one
	op      *header
	words   *[2]uint64         // with the header: see publishWords
	beside  *[besideBytes]byte // the same place: see Group.staged
	small   []byte
	large   []byte // slots that are largeDepth apart have the same
}

// room is where a piece lies in its slot.
type room uint8

const (
	beside room = iota // beside the header
	small
	large
)

// header tells which call a staged piece belongs to. It shares a cache line with slot.in, so
// reading it costs nothing.
type header struct {
	piece   uint32
	kind    kind
	elem    uint8
	root    uint16
	bytes   uint64
	history uint64 // see transport.Call
}

// isFor reports whether h is the header of piece p of an operation. For == the compiler makes a
// call.
func (h *header) isFor(op *header, p uint32) bool {
	return h.history == op.history && h.bytes == op.bytes && h.piece == p && h.kind == op.kind && h.elem == op.elem && h.root == op.root
}

// isOf reports whether h belongs to piece p. A piece without data has no header.
func (h *header) isOf(p uint32) bool { return h.piece == p && h.kind != 0 }

type kind uint8

const (
	opAllReduce kind = iota + 1
	opReduce
	opBroadcast
	opAllGather
	opReduceScatter
	opAllToAllV
	opGather
	opScatter
	opBarrier
	opAllGatherV
	opAlloc
)

func (k kind) String() string {
	names := [...]string{"nothing", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier", "all_gather", "Alloc"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("operation %d", uint8(k))
}

// Layout of the memory: a page with the magic number, a segment for each rank, and the
// rings for messages. The arenas begin at the next huge page.
const (
	page = 4096

	atMagic = 0
	atNonce = 8

	atAbort   = 0 * line
	atWaiters = 1 * line
	atLeft    = 2 * line
	atAck     = 3 * line
	atMoves   = 4 * line
	atDozing  = 5 * line
	atCPUs    = 6 * line
	atQuota   = atCPUs + maxCPUs/8
	maxCPUs   = 1024
	atProcess = 8 * line // pid, address of the mark, the mark
	atFound   = 9 * line // and whether it has the arenas
	atLast    = 10 * line
	atCalls   = 18 * line // to page; line 16 is atCPU

	atReduced = 0
	atIn      = 64
	atOp      = atIn + 8
	atBeside  = atOp + 24
	atData    = line
)

// Compile-time checks: what is beside a header follows it, in its cache line.
const (
	_ = uint(atBeside - atOp - unsafe.Sizeof(header{}))
	_ = uint(64 - (atBeside - atIn) - besideBytes)
)

// magic is "c10dshm8".
const magic = 0x386d687364303163

func largesAt() int { return page + depth*(atData+smallBytes) }

func segmentSize(piece int) int { return (largesAt() + largeDepth*piece + page - 1) &^ (page - 1) }

func memorySize(ranks, piece int) int {
	return ringsAt(ranks, piece) + ranks*(ranks-1)*ringSpace(ranks)
}

func arenasAt(ranks, piece int) int {
	return (memorySize(ranks, piece) + hugePage - 1) &^ (hugePage - 1)
}

// fileSize returns the size of the file with arenas of so many bytes, or with none.
func fileSize(ranks, piece, arena int) int {
	if arena == 0 {
		return memorySize(ranks, piece)
	}
	return arenasAt(ranks, piece) + ranks*arena
}

func ringsAt(ranks, piece int) int { return page + ranks*segmentSize(piece) }

func word32(b []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&b[off : off+4][0])) }
func word64(b []byte, off int) *uint64 { return (*uint64)(unsafe.Pointer(&b[off : off+8][0])) }

// newGroup makes a group over mem, which is aligned to a page.
func newGroup(mem []byte, rank, size, piece, oneShot int) *Group {
	g := &Group{rank: rank, size: size, piece: piece, oneShot: oneShot, mem: mem, segs: make([]segment, size), addrs: make([]uint64, size)}
	for r := range g.segs {
		b := mem[page+r*segmentSize(piece):][:segmentSize(piece)]
		s := &g.segs[r]
		s.abort, s.waiters, s.left = word32(b, atAbort), word32(b, atWaiters), word32(b, atLeft)
		s.moves, s.dozing = word32(b, atMoves), word32(b, atDozing)
		s.ack, s.cpus, s.quota = word64(b, atAck), b[atCPUs:atQuota:atQuota], word32(b, atQuota)
		s.pid, s.markAt, s.mark = word64(b, atProcess), word64(b, atProcess+8), (*mark)(b[atProcess+16:])
		s.found, s.mapped = word64(b, atFound), word64(b, atFound+8)
		s.last, s.calls = word64(b, atLast), (*[rememberCalls]called)(unsafe.Pointer(&b[atCalls:page][0]))
		for i := range s.slots {
			p := b[page+i*(atData+smallBytes):][:atData+smallBytes]
			s.slots[i] = slot{
				reduced: word32(p, atReduced), head: p[atIn : atIn+line], in: word32(p, atIn),
				op:    (*header)(unsafe.Pointer(&p[atOp])),
				small: p[atData:], large: b[largesAt()+i%largeDepth*piece:][:piece],
				words: (*[2]uint64)(unsafe.Pointer(&p[atBeside])), beside: (*[besideBytes]byte)(p[atBeside:]),
			}
		}
	}
	g.self = &g.segs[rank]
	return g
}

// configure decides how to wait and how to copy, once all ranks have said which CPUs they may
// use and whose memory they can read.
func (g *Group) configure() {
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
	g.agreeReads()
	g.agreeArenas(func(r int) uint64 { return atomic.LoadUint64(g.segs[r].mapped) })
	g.setEarly()
}

// Rank returns this rank's number.
func (g *Group) Rank() int { return g.rank }

// Size returns how many ranks there are.
func (g *Group) Size() int { return g.size }

// OneShot returns the size up to which each rank reduces everything by itself.
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
	if uint64(by) > uint64(g.size) { // no rank writes that
		return g.fail(fmt.Errorf("%w by a rank that does not exist", ErrAborted))
	}
	return g.fail(&RankError{Rank: int(by) - 1, Err: ErrAborted})
}

// fail makes the group refuse with err, and returns the first such error.
func (g *Group) fail(err error) error {
	g.failure.CompareAndSwap(nil, &err)
	return *g.failure.Load()
}

// Abort ends the operation that runs, and all later ones, on every rank. On this rank the error
// wraps ErrAborted and err, on the others it is a *RankError with this rank. Abort does not
// wait, and may be called at any time from any goroutine. Only the first reason counts.
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
	g.signalAbort()
}

// signalAbort aborts the other ranks.
func (g *Group) signalAbort() {
	for r := range g.segs {
		atomic.CompareAndSwapUint32(g.segs[r].abort, 0, uint32(g.rank)+1)
	}
	for r := range g.segs {
		g.segs[r].wakeAll()
		g.segs[r].wakeMesh()
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

// Died notes that a rank has died: f says how that was noticed. From now on calls of this rank end, with f in a
// *RankError, if they wait for that rank or if it has not made the same call. What it has published stays.
// Died does not wait.
func (g *Group) Died(rank int, f *transport.Fault) {
	g.life.Lock()
	defer g.life.Unlock()
	if g.closed {
		return
	}
	all := make([]*transport.Fault, g.size)
	if was := g.deaths.Load(); was != nil {
		copy(all, *was)
	}
	all[rank] = f
	g.deaths.Store(&all)
	g.segs[rank].wakeAll() // who waits for that rank
	g.self.wakeMesh()
}

// gone returns why rank r does no more: ErrLeft, or the fault of its death. It returns nil if r is there.
func (g *Group) gone(r int) error {
	if atomic.LoadUint32(g.segs[r].left) != 0 {
		return ErrLeft
	}
	if f := g.Death(r); f != nil {
		return f
	}
	return nil
}

// Death returns the fault of Died, nil if rank r has not died as far as this rank knows.
func (g *Group) Death(r int) *transport.Fault {
	if d := g.deaths.Load(); d != nil {
		return (*d)[r]
	}
	return nil
}

// uncalled ends the group if a rank has died and has not made the call that runs now. A rank that only sends,
// as the root of a broadcast, would notice several calls later.
func (g *Group) uncalled() error {
	d := g.deaths.Load()
	if d == nil || atomic.LoadUint64(g.self.last)&entered == 0 {
		return nil
	}
	for r, died := range *d {
		last := atomic.LoadUint64(g.segs[r].last)
		if died != nil && (last&entered == 0 || int32(uint32(last)-g.number) < 0) {
			return g.giveUp(&RankError{Rank: r, Err: died})
		}
	}
	return nil
}

// Close ends the operation that runs here, leaves the group and frees its memory. What this
// rank has from Alloc stays until it is freed. Ranks that need this one later get ErrLeft. Data
// that it has published stay. Close may be called more than once.
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
		g.segs[r].wakeMesh()
	}
	mem := g.mem
	g.mem, g.segs, g.self = nil, nil, nil
	if err := errors.Join(unmap(mem), g.dropArenas()); err != nil {
		return fmt.Errorf("shm: unmap: %w", err)
	}
	return nil
}

// undo unmaps the memory of a group that failed to join.
func (g *Group) undo() {
	unmap(g.mem)
	g.dropArenas()
}
