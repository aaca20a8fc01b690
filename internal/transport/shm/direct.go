package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/c10d-go/c10d/internal/copies"
)

// Limits are the sizes in bytes from which a collective or a message is not staged if its data are in
// memory of Alloc. A negative limit means never. The size is that of the call's longest buffer. Where a
// buffer has blocks, it is one block for each rank, and for AllToAll, which means AllToAllV, the longest block times
// the ranks.
type Limits struct {
	AllReduce, Reduce, ReduceScatter                            int64
	Broadcast, AllGather, AllGatherV, Gather, Scatter, AllToAll int64
	Message                                                     int64
}

// ReadLimits are the sizes in bytes from which a collective reads data that are in no memory of Alloc out of
// the other process. Sizes are as in Limits. All other collectives, and messages, are staged.
type ReadLimits struct {
	AllGather int64
	AllToAll  int64 // AllToAllV and AllGatherV
	Scatter   int64
}

// never is a limit that no size reaches.
const never = -1

// defaultReads returns the sizes from which c10d bench found one copy to be faster. One rank makes a single
// copy, while two ranks share the work of two copies. So a single copy wins only if all ranks read at once.
// It needs one or two more rounds of waiting, which are expensive where ranks share CPUs. Where copies are
// fast, two of them beat one out of another process.
//
// Times on 16 CPUs of a Xeon in us, staged and read:
//
//	                        256 KiB   1 MiB     4 MiB     16 MiB
//	2 ranks  all-gather      24  19   110  53   538 442   2290 1860
//	2 ranks  all-to-all               148 103   584 346   2540 1820
//	2 ranks  scatter                   62  36   411 295   1200  715
//	8 ranks  all-to-all               252 221   916 709   4880 4360
//	8 ranks  scatter                            468 273   2040  455
//
// A reduce-scatter of two ranks also gained: 109 and 72 us for 1 MiB, 2060 and 1980 for 16 MiB. It is staged,
// because reductions then need no second way to reach their operands.
func defaultReads(ranks int, ownCPUs, fast bool) ReadLimits {
	switch {
	case fast || !ownCPUs:
		return ReadLimits{never, never, never}
	case ranks == 2:
		return ReadLimits{AllGather: 256 << 10, AllToAll: 512 << 10, Scatter: 1 << 20}
	}
	return ReadLimits{AllGather: never, AllToAll: 512 << 10, Scatter: 4 << 20}
}

// defaultMapped returns the sizes from which c10d bench -alloc found memory of Alloc to be faster
// than staging. It needs one or two more rounds of waiting.
func defaultMapped(ranks int, ownCPUs, fast bool) Limits {
	l := uniform(never)
	switch {
	case ranks == 2 && ownCPUs && fast:
		// Times on 2 CPUs of an EPYC in us, staged and with Alloc (c10d bench without and with -alloc). One more copy
		// costs less there than reading an operand out of another CPU's cache.
		//
		//	                16 KiB     64 KiB    256 KiB   1 MiB     4 MiB     16 MiB
		//	scatter         1.0 1.4    2.3 1.9   6.4 3.1   26  10    144  42    663  232
		//	all-gather      1.5 1.5    3.1 2.1    10 4.0   39  20    159  82    886  607
		//	all-to-all      2.0 2.1    3.8 2.9    11 4.7   45  22    198  89   1160  654
		//	gather          1.1 1.1    2.2 1.7   6.3 3.6   26  20    138  82    552  593
		//	message         2.3 2.3    4.6 1.8    16 3.7   28  23    280 119   1320 1150
		//	reduce-scatter  2.2 2.6    4.7 5.0    17  17   69  83    368 354   1780 1830
		//	broadcast       3.1 2.8    6.3 5.4    17  19   50  57    156 215    659 1080
		//	reduce          1.6 1.6    4.0 4.0    13  13   50  97    201 375    989 1230
		//	all-reduce                 6.3 6.3    18  23   68  69    274 308   1300 1200
		//
		// An all-reduce of 64 MiB takes 7130 and 5400.
		l.Scatter, l.AllGather, l.AllGatherV, l.AllToAll, l.Gather, l.Message = 32<<10, 32<<10, 32<<10, 32<<10, 32<<10, 64<<10
		l.AllReduce = 8 << 20
	case ranks == 2 && ownCPUs:
		// Times on 16 CPUs of a Xeon in us, staged and with Alloc. Two ranks on 2 CPUs gain from 16 KiB
		// on.
		//
		//	                64 KiB     256 KiB   1 MiB     4 MiB     16 MiB
		//	broadcast       15   11     51  26                       1690 1340
		//	scatter         6.7 2.8     15   6                       1530  690
		//	all-gather      7.8 4.5     25  11                       2160 1390
		//	all-to-all      7.5 4.7     23   9                       2240 1480
		//	reduce-scatter  7.5 4.2     24  10                       1990 1170
		//	gather          5.8 5.2     15  10                       1470 1450
		//	message         8.5 3.1     24   8                       1550 1380
		//	reduce          7.8  13     28  32                       2410 1880
		//
		// An all-reduce of 64 KiB takes 6.5 us staged and 5.9 with Alloc on two CPUs, one of 256 KiB
		// 21 and 18. On 32 CPUs that is 9 and 14, and 35 and 36.
		l.Broadcast, l.Scatter, l.AllGather, l.AllGatherV, l.AllToAll, l.ReduceScatter = 16<<10, 16<<10, 16<<10, 16<<10, 16<<10, 16<<10
		l.Gather, l.Reduce, l.AllReduce, l.Message = 32<<10, 512<<10, 128<<10, 64<<10
	case ownCPUs:
		// Times of 8 ranks on 16 CPUs in us, staged and with Alloc:
		//
		//	                64 KiB     256 KiB   1 MiB     4 MiB       16 MiB
		//	scatter         9.8 7.9               79  11
		//	all-gather       15   9              178  62
		//	all-to-all       16 7.7              249 150
		//	reduce-scatter   21   8              226  71
		//	message         8.3 2.7               95  45
		//	gather                      25  13    80  53
		//	reduce                      83  47   281 151
		//	all-reduce                  95  86             1200  817
		//	broadcast                            179 275    705  949   2540 2310
		l.Scatter, l.AllToAll, l.ReduceScatter, l.AllGather, l.AllGatherV, l.Message = 64<<10, 64<<10, 64<<10, 64<<10, 64<<10, 64<<10
		//
		// At 64 KiB the two halves of an all-reduce, reduce-scatter and all-gather, take 17 us
		// together, and a staged all-reduce 26.
		l.Gather, l.Reduce, l.AllReduce, l.Broadcast = 128<<10, 256<<10, 64<<10, 8<<20
		if ranks <= 4 { // an all-reduce of 64 KiB takes 15 us staged and 17 with Alloc
			l.AllReduce = 128 << 10
		}
	default:
		// Times of 4 ranks on 2 CPUs in us, staged and with Alloc:
		//
		//	                128 KiB    256 KiB   512 KiB   1 MiB     4 MiB     16 MiB
		//	scatter         8.5 6.2
		//	all-to-all                  31  23
		//	reduce-scatter              39  32
		//	reduce                                63  48
		//	all-reduce                            99  80
		//	broadcast                                      110  83
		//	message                                        173  68
		//	all-gather                                               690 510
		//	gather                                                   240 290   1460 990
		l.Scatter, l.AllToAll, l.ReduceScatter = 128<<10, 256<<10, 256<<10
		l.Reduce, l.AllReduce = 512<<10, 512<<10
		l.Broadcast, l.Message, l.AllGather, l.AllGatherV, l.Gather = 1<<20, 1<<20, 4<<20, 1<<20, 16<<20
	}
	return l
}

func uniform(n int64) Limits { return Limits{n, n, n, n, n, n, n, n, n, n} }

// reaches reports whether a call of n bytes is large enough for a single copy.
func reaches(limit int64, n int) bool { return limit >= 0 && n > 0 && int64(n) >= limit }

// exposes reports whether ranks expose buffers in a call of n bytes, by the limits for any
// memory and for memory of Alloc. Below the first limit they expose only the latter.
func (g *Group) exposes(any, mapped int64, n int) bool {
	g.exposeAny = reaches(any, n)
	if !g.exposeAny && !(g.allocated && reaches(mapped, n)) {
		return false
	}
	g.room = large // also if ranks stage the call after all
	return true
}

// ErrUnreadable ends an operation that has to read the memory of a rank and cannot. Most likely
// the rank has died.
var ErrUnreadable = errors.New("shm: the memory of a rank cannot be read")

// mark identifies a process.
type mark [16]byte

// errOtherProcess says that the process with a rank's number is another process.
var errOtherProcess = errors.New("another process has its number")

// errNotInArena says that a rank has published a place outside its arena.
var errNotInArena = errors.New("the rank named a place outside its arena")

// process is how to read the memory of a rank.
type process struct {
	pid  int
	mark mark
	at   uint64 // address of the mark
}

// readMemory reads len(dst) bytes at addr in the memory of p, and checks that the process is p.
// It is (*vmReader).read, except in tests.
type readMemory func(w *vmReader, p *process, dst []byte, addr uint64) error

// The result of probe: the low byte of a word. Above it are the error number and the rank that
// cannot be read.
const (
	foundYes = iota + 1
	foundRefusal
	foundOtherProcess

	// foundFast says that copies are fast on this rank.
	foundFast = 1 << 63
)

// probe tries to read a random number in the memory of every other rank, and publishes the result.
func (g *Group) probe(o Options) {
	g.readMemory = (*vmReader).read
	if o.readMemory != nil {
		g.readMemory = o.readMemory
	}
	if g.tile = o.tile; g.tile == 0 {
		g.tile = defaultTile
	}
	g.section, g.readsFrom = o.section, o.reads
	g.processes, g.srcs, g.parts = make([]process, g.size), make([][]byte, g.size), make([][]byte, g.size)
	found := uint64(foundYes)
	g.oneProcess = true
	var got mark
	for r := range g.segs {
		s, p := &g.segs[r], &g.processes[r]
		*p = process{pid: int(*s.pid), mark: *s.mark, at: *s.markAt}
		g.oneProcess = g.oneProcess && p.mark == *ownMark()
		if r == g.rank || found != foundYes {
			continue
		}
		err := g.readMemory(&g.reader, p, got[:], p.at)
		var no syscall.Errno
		switch {
		case errors.As(err, &no):
			found = foundRefusal | uint64(no)<<8 | uint64(r)<<32
		case err != nil || got != p.mark:
			found = foundOtherProcess | uint64(r)<<32
		}
	}
	if copies.Fast() && !o.slowCopies {
		found |= foundFast
	}
	atomic.StoreUint64(g.self.found, found)
}

// agreeReads decides, from the results of all ranks, from which sizes on this group reads memory.
func (g *Group) agreeReads() {
	g.fast = true
	for r := range g.segs {
		v := atomic.LoadUint64(g.segs[r].found)
		g.fast = g.fast && v&foundFast != 0
		if g.whyStaged == "" {
			g.whyStaged = whyStaged(r, v&^foundFast)
		}
	}
	g.reads = defaultReads(g.size, g.spinFor > 0, g.fast)
	if g.readsFrom != nil {
		g.reads = *g.readsFrom
	}
	if g.size == 1 || g.whyStaged != "" {
		g.reads = ReadLimits{never, never, never}
	}
}

// whyStaged returns why rank r, which has found that, cannot read all others' memory, "" if it can.
func whyStaged(r int, found uint64) string {
	about, no := found>>32, syscall.Errno(found>>8&0xffffff)
	switch found & 0xff {
	case foundYes:
		return ""
	case foundOtherProcess:
		return fmt.Sprintf("rank %d finds another process where rank %d should be (another pid namespace)", r, about)
	}
	return fmt.Sprintf("rank %d cannot read the memory of rank %d: process_vm_readv: %v", r, about, no)
}

// ReadLimits returns the sizes from which memory that is not from Alloc is read out of other processes. All
// ranks of the group have the same.
func (g *Group) ReadLimits() ReadLimits { return g.reads }

// WhyStaged returns why ranks cannot read each other's memory, "" if they can.
func (g *Group) WhyStaged() string { return g.whyStaged }

// publishWords publishes a piece of two words, which lie beside its header, and returns its
// number.
func (g *Group) publishWords(a, b uint64) (p uint32, err error) {
	p = g.next
	if err := g.reserve(p); err != nil {
		return p, err
	}
	*g.self.slots[p%depth].words = [2]uint64{a, b}
	g.publish(p)
	return p, nil
}

// waitWords waits for the words that rank r publishes with piece p.
func (g *Group) waitWords(r int, p uint32) ([2]uint64, error) {
	if _, err := g.waitPiece(r, p); err != nil {
		return [2]uint64{}, err
	}
	return *g.segs[r].slots[p%depth].words, nil
}

// publish publishes piece p, whose data are in its slot.
func (g *Group) publish(p uint32) {
	s := &g.self.slots[p%depth]
	// Field by field: a copy of g.op would be read in larger parts than it was written, and wait for all stores before.
	h := s.op
	h.piece, h.kind, h.elem, h.root = p, g.op.kind, g.op.elem, g.op.root
	h.bytes, h.history = g.op.bytes, g.op.history
	g.markPublished(p)
}

func yesOrNo(ok bool) uint64 {
	if ok {
		return 1
	}
	return 0
}

// publishEmpty publishes a piece that no rank looks at. A header in its slot that is 2^32 pieces old would be taken for that
// of this piece.
func (g *Group) publishEmpty() (p uint32) {
	p = g.next
	if h := g.self.slots[p%depth].op; h.piece == p {
		h.kind = 0
	}
	g.markPublished(p)
	return p
}

// expose publishes where b is. The others may read it until all have said that they are done.
// If other processes cannot read b, as some device memory, ok is false, and all ranks stage the
// call.
func (g *Group) expose(b []byte) (p uint32, ok bool, err error) {
	g.exposed = b // this keeps b where it is, even if it was on a stack
	at := g.readableAddress(b)
	p, err = g.publishWords(at, uint64(len(b)))
	return p, at != 0 || len(b) == 0, err
}

// readableAddress returns where b is, 0 if it is empty or cannot be read by others. It asks the kernel whether
// both ends can be read.
func (g *Group) readableAddress(b []byte) uint64 {
	if at := g.arenaPlace(b); at != 0 {
		return at
	}
	if !g.exposeAny || len(b) == 0 {
		return 0
	}
	at, self := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), &g.processes[g.rank]
	if g.readMemory(&g.reader, self, g.probed[:1], at) != nil ||
		g.readMemory(&g.reader, self, g.probed[:1], at+uint64(len(b)-1)) != nil {
		return 0
	}
	return at
}

// exposedAddress waits for the n bytes that rank r exposes with piece p, and returns where they
// are; 0 if they cannot be read.
func (g *Group) exposedAddress(r int, p uint32, n int) (uint64, error) {
	said, err := g.waitWords(r, p)
	if err != nil {
		return 0, err
	}
	if has := said[1]; has != uint64(n) {
		return 0, g.disagree(r, "rank %d sends %d bytes to rank %d, which expects %d", r, has, g.rank, n)
	}
	return said[0], nil
}

// copyFrom copies from the memory of rank r, in stretches.
func (g *Group) copyFrom(r int, dst []byte, at uint64) error {
	for len(dst) > 0 {
		n := min(len(dst), stretch)
		if err := g.readFrom(r, dst[:n], at); err != nil {
			return err
		}
		dst, at = dst[n:], at+uint64(n)
	}
	return nil
}

// readFrom copies at most a stretch. The data count only if the owner has not given up
// meanwhile, which it says before it uses its buffer again.
func (g *Group) readFrom(r int, dst []byte, at uint64) error {
	var err error
	if at&inArena != 0 {
		if src := g.arenaBytes(r, at, len(dst)); src != nil {
			copies.Bytes(dst, src)
		} else {
			err = errNotInArena
		}
	} else {
		err = g.readMemory(&g.reader, &g.processes[r], dst, at)
	}
	return g.checkOwner(r, err)
}

// afterReads comes between reads of another rank's data and a look whether that rank has given up. Some CPUs would do
// the reads later. An atomic store comes after all reads before it, and an atomic load after that store. The word does
// not matter, if no other goroutine uses it.
func afterReads(word *uint32) { atomic.StoreUint32(word, 0) }

// checkOwner returns why what was read from rank r, with err, does not count; nil if it does.
func (g *Group) checkOwner(r int, err error) error {
	afterReads(&g.read)
	if e := g.refusal(); e != nil {
		return e
	}
	if atomic.LoadUint32(g.segs[r].left) != 0 {
		return g.giveUp(&RankError{Rank: r, Err: ErrLeft})
	}
	if err != nil {
		if gone := g.gone(r); gone != nil {
			return g.giveUp(&RankError{Rank: r, Err: gone})
		}
		return g.giveUp(&RankError{Rank: r, Err: fmt.Errorf("%w: %w", ErrUnreadable, err)})
	}
	return g.askStop()
}

// checkOwners is checkOwner for what was read in the arenas of all ranks.
func (g *Group) checkOwners() error {
	afterReads(&g.read)
	if e := g.refusal(); e != nil {
		return e
	}
	for r := range g.segs {
		if atomic.LoadUint32(g.segs[r].left) != 0 {
			return g.giveUp(&RankError{Rank: r, Err: ErrLeft})
		}
	}
	return g.askStop()
}

// askStop returns why the call has to end, nil if it has not.
func (g *Group) askStop() error {
	if g.stop != nil {
		if err := g.stop(); err != nil {
			return g.giveUp(err)
		}
	}
	return nil
}

// endExposure ends what expose began. After an error other ranks may still be reading. They are
// told to discard it.
func (g *Group) endExposure(err error) error {
	if err != nil {
		if errors.Is(err, ErrClosed) {
			atomic.StoreUint32(g.self.left, 1)
		} else {
			g.signalAbort()
		}
	}
	g.exposed, g.exposedBlocks = nil, nil
	clear(g.addrs)
	return err
}

// errPanicked ends an exposure whose operator has panicked.
var errPanicked = errors.New("shm: the operator has panicked")

// exposing runs a collective that reduces what ranks expose. It ends the exposure also if an operator panics.
func (g *Group) exposing(run func() (ok bool, err error)) (ok bool, err error) {
	err = errPanicked
	defer func() { err = g.endExposure(err) }()
	ok, err = run()
	return ok, err
}

// roles are which ranks expose their buffers and which ranks read them.
type roles int

const (
	allToAll roles = iota
	rootExposes
	rootReads
)

// copyExposed runs a collective that only copies. Some ranks expose buffers of n bytes. Others
// read them, and the first ones wait for that. For rank r, into returns the buffer for its data,
// and where they begin in that rank's buffer. If the memory of one rank cannot be read, it
// returns false on all ranks, and nothing is done.
func (g *Group) copyExposed(who roles, lent []byte, n int, into func(r int) (dst []byte, off int)) (ok bool, err error) {
	root := int(g.op.root)
	lends := who == allToAll || (who == rootExposes) == (g.rank == root)
	reads := who == allToAll || !lends
	ok = true
	p := g.next
	if lends {
		_, ok, err = g.expose(lent)
	} else {
		g.publishEmpty()
	}
	if err == nil && reads {
		ok, err = g.readAll(who, p, n, ok, into)
	} else if err == nil {
		g.publishEmpty()
	}
	if err == nil && lends {
		ok, err = g.waitReaders(who, p+1, ok)
	}
	return ok, g.endExposure(err)
}

func (g *Group) readAll(who roles, p uint32, n int, ok bool, into func(r int) (dst []byte, off int)) (bool, error) {
	for i := 1; i < g.size; i++ {
		r := g.nth(i)
		if who == rootExposes && r != int(g.op.root) {
			continue
		}
		dst, off := into(r)
		size := n
		if size < 0 {
			size = len(dst)
		}
		at, err := g.exposedAddress(r, p, size)
		if err != nil {
			return false, err
		}
		ok = ok && (at != 0 || size == 0)
		if !ok {
			continue
		}
		if g.op.kind == opBroadcast {
			err = g.copyFromRotated(r, dst, at)
		} else {
			err = g.copyFrom(r, dst, at+uint64(off))
		}
		if err != nil {
			return false, err
		}
	}
	if who != rootExposes {
		g.allPublished(p)
	}
	_, err := g.publishWords(yesOrNo(ok), 0)
	return ok, err
}

// copyFromRotated begins at another offset on each rank, where all read the same data.
func (g *Group) copyFromRotated(r int, dst []byte, at uint64) error {
	nth := (g.rank - r + g.size) % g.size
	start := len(dst) / (g.size - 1) * (nth - 1) &^ (page - 1)
	if err := g.copyFrom(r, dst[start:], at+uint64(start)); err != nil {
		return err
	}
	return g.copyFrom(r, dst[:start], at)
}

// waitReaders waits until the reading ranks have said that they are done.
func (g *Group) waitReaders(who roles, p uint32, ok bool) (bool, error) {
	for i := 1; i < g.size; i++ {
		r := g.nth(i)
		if who == rootReads && r != int(g.op.root) {
			continue
		}
		said, err := g.waitWords(r, p)
		if err != nil {
			return false, err
		}
		ok = ok && said[0] != 0
	}
	if who != rootReads {
		g.allPublished(p)
	}
	return ok, nil
}

// allToAllVDirect is for blocks of any size, which the ranks have agreed on. It leaves out
// blocks of up to short bytes.
func (g *Group) allToAllVDirect(out, in [][]byte, short int) (ok bool, err error) {
	p, ok, err := g.exposeBlocks(blocks{each: in}, 0, short)
	for i := 1; i < g.size && err == nil; i++ {
		r := g.nth(i)
		var data []byte
		if data, err = g.waitPiece(r, p); err == nil {
			ok = ok && *word64(data, 8*g.size) != 0
			if ok && len(out[r]) > short {
				err = g.copyFrom(r, out[r], *word64(data, 8*g.rank))
			}
		}
	}
	if err == nil {
		g.allPublished(p)
		err = g.waitAllDone()
	}
	return ok, g.endExposure(err)
}

// scatterDirect is for a root whose blocks may lie anywhere in memory.
func (g *Group) scatterDirect(out []byte, in blocks) (ok bool, err error) {
	root, p := int(g.op.root), g.next
	if g.rank == root {
		_, ok, err = g.exposeBlocks(in, len(out), 0)
		if err == nil {
			copyTo(out, in.at(root, len(out)))
			g.publishEmpty()
			ok, err = g.waitReaders(rootExposes, p+1, ok)
		}
		return ok, g.endExposure(err)
	}
	g.publishEmpty()
	data, err := g.waitPiece(root, p)
	if err == nil {
		if ok = *word64(data, 8*g.size) != 0; ok {
			err = g.copyFrom(root, out, *word64(data, 8*g.rank))
		}
	}
	if err == nil {
		_, err = g.publishWords(yesOrNo(ok), 0)
	}
	return ok, g.endExposure(err)
}

// exposeBlocks exposes a block for each other rank, except those of up to short bytes. It
// publishes their addresses, and whether all can be read. n is the size of a block, unless
// blocks are slices of their own.
func (g *Group) exposeBlocks(in blocks, n, short int) (p uint32, ok bool, err error) {
	p = g.next
	if err := g.reserve(p); err != nil {
		return p, false, err
	}
	g.exposed, g.exposedBlocks = in.whole, in.each
	s := &g.self.slots[p%depth]
	ok = true
	for r := range g.size {
		at := uint64(0)
		if b := in.at(r, n); r != g.rank && len(b) > short {
			at = g.readableAddress(b)
			ok = ok && at != 0
		}
		*word64(s.large, 8*r) = at
	}
	*word64(s.large, 8*g.size) = yesOrNo(ok)
	g.publish(p)
	return p, ok, nil
}

// exchangeAddresses exposes b, and collects in g.addrs where the others have theirs. If the
// memory of one rank is not from Alloc, it returns false on all ranks.
func (g *Group) exchangeAddresses(b []byte) (ok bool, err error) {
	p, ok, err := g.expose(b)
	if err != nil {
		return false, err
	}
	for i := 1; i < g.size; i++ {
		r := g.nth(i)
		if g.addrs[r], err = g.exposedAddress(r, p, len(b)); err != nil {
			return false, err
		}
		ok = ok && g.addrs[r] != 0
	}
	g.allPublished(p)
	return ok, nil
}

// waitAllDone says that this rank is done, and waits until all others say so.
func (g *Group) waitAllDone() error {
	p, err := g.publishWords(0, 0)
	for r := 0; r < g.size && err == nil; r++ {
		if r != g.rank {
			_, err = g.waitPiece(r, p)
		}
	}
	if err == nil {
		g.allPublished(p)
	}
	return err
}

// defaultTile is how much of each operand a rank has in cache at a time. Two ranks are a few
// percent slower with 64 and with 512 KiB.
const defaultTile = 128 << 10

// reduceExposed reduces, in the order of the ranks, what all expose from offset off on. own is
// this rank's operand. dst may be own.
func (g *Group) reduceExposed(dst, own []byte, off int) error {
	if g.scratch == nil {
		g.scratch = make([]byte, g.tile)
	}
	u := unit(g.by.Elem)
	for step := g.tile / u * u; len(dst) > 0; {
		n := min(len(dst), step)
		if err := g.mapOperands(own[:n], off); err != nil {
			return err
		}
		if err := g.reduceTile(dst[:n], own[:n]); err != nil {
			return err
		}
		dst, own, off = dst[n:], own[n:], off+n
	}
	return nil
}

// mapOperands notes in g.srcs as much of each operand as own has of this rank's, from offset off on.
func (g *Group) mapOperands(own []byte, off int) error {
	for r := range g.srcs {
		if g.srcs[r] = own; r != g.rank {
			g.srcs[r] = g.arenaBytes(r, g.addrs[r]+uint64(off), len(own))
		}
		if g.srcs[r] == nil {
			clear(g.srcs)
			return g.checkOwner(r, errNotInArena)
		}
	}
	return nil
}

// reduceTile reduces the operands of mapOperands. Other ranks have this rank's operand in their caches. So a
// result that replaces it goes to scratch memory first, where copies are fast. Two ranks take 75 us for an all-reduce of 1 MiB, and
// took 114.
//
// Where copies are not fast, the lines of a result that fits into the caches are claimed instead. That takes two ranks
// on 16 CPUs of a Xeon 123 us for 1 MiB, and four 171. Without claims it is 160 and 191. Eight ranks take the same time
// either way.
func (g *Group) reduceTile(dst, own []byte) error {
	acc, inPlace := dst, same(dst, own)
	if inPlace && (g.fast || g.by.Join == nil && g.rank > 0) {
		acc = g.scratch[:len(dst)]
	}
	if inPlace && !g.fast && g.by.Join != nil && g.op.bytes <= shortBuffer {
		g.reduceClaimed(acc)
	} else {
		g.reduceOperands(acc)
	}
	copyTo(dst, acc)
	return g.checkOwners()
}

// claimAhead is how many bytes of a result are claimed at a time. With 1 to 4 KiB it takes the same.
const claimAhead = 2 << 10

// reduceClaimed is reduceOperands with Join. It claims the lines of the result before it writes them.
func (g *Group) reduceClaimed(acc []byte) {
	u := unit(g.by.Elem)
	step := max(claimAhead/u, 1) * u
	defer clear(g.srcs)
	defer clear(g.parts)
	copies.Claim(acc[:min(step, len(acc))])
	for at := 0; at < len(acc); at += step {
		end := min(at+step, len(acc))
		copies.Claim(acc[end:min(end+step, len(acc))])
		for r, src := range g.srcs {
			g.parts[r] = src[at:end]
		}
		g.by.Join(acc[at:end], g.parts)
	}
}

// A rank reduces a section of its share and then copies the others' sections, while the caches have them. They have all of
// a buffer of up to shortBuffer bytes anyway, so there the whole share is one section.
//
// The table has times of longer buffers in us, by the length of a section. They are medians of five runs of c10d bench
// -alloc on 16 CPUs of a Xeon.
//
//	                 1 MiB   2 MiB   4 MiB   16 MiB
//	2 ranks  16 MiB   1760    1680    1650
//	2 ranks  64 MiB   7250            6190     7670
//	4 ranks  16 MiB   2440    2130    1910
//	4 ranks  64 MiB  12900           11300    11400
//	8 ranks  16 MiB   2910    2520    2490
//	8 ranks  64 MiB  18300           15100    15800
//
// Two CPUs of an EPYC take the same time for 16 MiB with all of these. For 64 MiB they take 5570 us with 1 MiB, and 6480
// us with 4 MiB.
const (
	shortBuffer    = 2 << 20
	defaultSection = 4 << 20
	sectionOnAMD   = 1 << 20
)

// sectionOf returns how much of a buffer of n bytes a rank reduces before it copies.
func (g *Group) sectionOf(n int) int {
	switch {
	case g.section > 0:
		return g.section
	case n > shortBuffer && g.fast:
		return sectionOnAMD
	}
	return defaultSection
}

// allReduceMapped reduces a share of each section on each rank, in its own buffer. Then every rank copies
// the other shares from there, while they are in the caches of the ranks that reduced them. A rank works on
// the next section instead of waiting.
func (g *Group) allReduceMapped(buf []byte) (ok bool, err error) {
	ok, err = g.exchangeAddresses(buf)
	if !ok || err != nil {
		return ok, err
	}
	u := unit(g.by.Elem)
	section := g.sectionOf(len(buf)) / u * u * g.size
	n, first := pieces(len(buf), section), g.next
	for k := -1; k < n; k++ {
		if k+1 < n {
			b := cut(buf, k+1, section)
			lo, hi := share(len(b), g.rank, g.size, u)
			if err := g.reduceExposed(b[lo:hi], b[lo:hi], (k+1)*section+lo); err != nil {
				return false, err
			}
			if _, err := g.publishWords(0, 0); err != nil {
				return false, err
			}
		}
		if k < 0 {
			continue
		}
		b, p := cut(buf, k, section), first+uint32(k)
		for i := 1; i < g.size; i++ {
			r := g.nth(i)
			if _, err := g.waitPiece(r, p); err != nil {
				return false, err
			}
			lo, hi := share(len(b), r, g.size, u)
			src := g.arenaBytes(r, g.addrs[r]+uint64(k*section+lo), hi-lo)
			if src == nil {
				return false, g.checkOwner(r, errNotInArena)
			}
			copyTo(b[lo:hi], src)
		}
		g.allPublished(p)
		if err := g.checkOwners(); err != nil {
			return false, err
		}
	}
	return true, g.waitAllDone()
}

// reduceMapped reduces a share of each section on every rank, into its slot. root copies it
// from there.
func (g *Group) reduceMapped(out, in []byte, root int) (ok bool, err error) {
	ok, err = g.exchangeAddresses(in)
	if !ok || err != nil {
		return ok, err
	}
	u := unit(g.by.Elem)
	section := g.piece / u * u * g.size
	for k := 0; k < pieces(len(in), section) && err == nil; k++ {
		err = g.reduceSection(cut(out, k, section), cut(in, k, section), k*section, root)
	}
	if err == nil {
		err = g.waitAllDone()
	}
	return true, err
}

func (g *Group) reduceSection(out, in []byte, off, root int) error {
	u := unit(g.by.Elem)
	p := g.next
	if err := g.reserve(p); err != nil {
		return err
	}
	s := &g.self.slots[p%depth]
	lo, hi := share(len(in), g.rank, g.size, u)
	dst := s.large[:hi-lo]
	if g.rank == root {
		dst = out[lo:hi]
	}
	if err := g.reduceExposed(dst, in[lo:hi], off+lo); err != nil {
		return err
	}
	g.publish(p)
	if g.rank != root {
		return nil
	}
	for i := 1; i < g.size; i++ {
		r := g.nth(i)
		data, err := g.waitPiece(r, p)
		if err != nil {
			return err
		}
		lo, hi := share(len(in), r, g.size, u)
		copies.Bytes(out[lo:hi], data)
	}
	g.allPublished(p)
	return nil
}

// reduceScatterMapped reduces a block on each rank.
func (g *Group) reduceScatterMapped(out, in []byte) (ok bool, err error) {
	ok, err = g.exchangeAddresses(in)
	if !ok || err != nil {
		return ok, err
	}
	off := g.rank * len(out)
	if err = g.reduceExposed(out, in[off:][:len(out)], off); err == nil {
		err = g.waitAllDone()
	}
	return true, err
}
