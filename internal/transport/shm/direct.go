package shm

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Limits say from how many bytes on a collective, or a message, goes from one
// rank's memory to another's with a single copy. A negative one stands for never. The bytes are those of
// the longest buffer of the call: a block a rank where there are blocks; of AllToAllV
// the longest block times the ranks.
type Limits struct {
	AllReduce, Reduce, ReduceScatter                            int64
	Broadcast, AllGather, AllGatherV, Gather, Scatter, AllToAll int64
	Message                                                     int64
}

// defaultLimits are where BenchmarkCopies found one copy to be faster. A single copy is made
// by one rank while two share the work of two copies, which go on at the same time:
// it wins where all ranks read at once, or where the lines that a rank has just
// written are slow to come to another. And it takes one or two more rounds of waiting, which
// weighs where ranks wait for a CPU.
func defaultLimits(ranks int, ownCPUs bool) Limits {
	l := never()
	switch {
	case ranks == 2 && ownCPUs:
		// Of 16 CPUs of a Xeon, staged and direct in us: all-gather of 256 KiB 25 and 17, of
		// 1 MiB 108 and 60, of 16 MiB 2160 and 1750; all-to-all of 1 MiB 135 and 87, of 16 MiB
		// 2240 and 1970; reduce-scatter of 256 KiB 24 and 21, of 16 MiB 1990 and 1800; scatter of
		// 1 MiB 54 and 41, of 16 MiB 1530 and 990; reduce of 256 KiB 28 and 45, of 4 MiB 590 and 590,
		// of 16 MiB 2410 and 2200. But broadcast of 1 MiB 126 and 153, of 16 MiB 1690 and 2060; gather 65
		// and 87, 1470 and 1570.
		l.Scatter, l.AllToAll, l.Reduce, l.ReduceScatter = 1<<20, 512<<10, 4<<20, 256<<10
		l.AllGather, l.AllGatherV = 256<<10, 256<<10
	case ownCPUs:
		// Of a broadcast the root's one copy into the shared memory serves all
		// others, from cache; so it is with an all-gather, and readers of the same pages
		// get in each other's way. Eight ranks on 16 CPUs, staged and direct in us: scatter
		// of 1 MiB 79 and 104, of 4 MiB 449 and 259, of 16 MiB 1700 and 402; all-to-all of
		// 1 MiB 249 and 212, of 16 MiB 3780 and 3410; reduce of 16 MiB 4290 and 3520; reduce-scatter of 16 MiB
		// 3450 and 2230. By BenchmarkCopies all-gather of 16 MiB 3040 and 4160, gather 1870 and 2700, a
		// message 4140 and 6140, all-reduce 6580 and 8730.
		l.Scatter, l.AllToAll, l.Reduce, l.ReduceScatter = 4<<20, 512<<10, 4<<20, 4<<20
		l.AllGatherV = 1 << 20 // staged, it is a broadcast after the other
	default:
		// Four ranks on two CPUs: all-to-all of 1 MiB 403 and 348, scatter of 4 MiB
		// 446 and 417, gather 517 and 426, messages of 128 KiB 48 and 36; all-gather is the same from 4 MiB on.
		l.AllToAll, l.Scatter, l.Gather, l.Message = 1<<20, 4<<20, 4<<20, 128<<10
	}
	return l
}

// defaultMapped are where BenchmarkCopies found memory of Alloc to be faster than staging
// and than a single copy out of other processes. It takes as many rounds of waiting as that.
func defaultMapped(ranks int, ownCPUs bool) Limits {
	l := never()
	switch {
	case ranks == 2 && ownCPUs:
		// Of 16 CPUs, staged and with Alloc in us: broadcast of 64 KiB 15 and 11, of 256 KiB 51 and
		// 26, of 16 MiB 1690 and 1340; scatter 6.7 and 2.8, 15 and 6, 1530 and 690; all-gather 7.8 and 4.5, 25
		// and 11, 2160 and 1390; all-to-all 7.5 and 4.7, 23 and 9, 2240 and 1480; reduce-scatter 7.5 and
		// 4.2, 24 and 10, 1990 and 1170; gather 5.8 and 5.2, 15 and 10, 1470 and 1450; a message 8.5 and
		// 3.1, 24 and 8, 1550 and 1380; reduce 7.8 and 13, 28 and 32, 2410 and 1880; all-reduce of
		// 1 MiB 134 and 137, of 4 MiB 709 and 503. Two ranks on two CPUs gain from 16 KiB on.
		l.Broadcast, l.Scatter, l.AllGather, l.AllGatherV, l.AllToAll, l.ReduceScatter = 16<<10, 16<<10, 16<<10, 16<<10, 16<<10, 16<<10
		l.Gather, l.Reduce, l.AllReduce, l.Message = 32<<10, 512<<10, 4<<20, 64<<10
	case ownCPUs:
		// Eight ranks on 16 CPUs: scatter of 64 KiB 9.8 and 7.9, of 1 MiB 79 and 11; all-gather
		// 15 and 9, 178 and 62; all-to-all 16 and 7.7, 249 and 150; reduce-scatter 21 and 8, 226 and 71; a
		// message 8.3 and 2.7, 95 and 45; gather of 256 KiB 25 and 13, of 1 MiB 80 and 53; reduce of
		// 256 KiB 83 and 47, of 1 MiB 281 and 151; all-reduce of 64 KiB 26 and 27, of 256 KiB 95 and 86,
		// of 4 MiB 1200 and 817; broadcast of 1 MiB 179 and 275, of 4 MiB 705 and 949, of 16 MiB 2540 and 2310.
		l.Scatter, l.AllToAll, l.ReduceScatter, l.AllGather, l.AllGatherV, l.Message = 64<<10, 64<<10, 64<<10, 64<<10, 64<<10, 64<<10
		l.Gather, l.Reduce, l.AllReduce, l.Broadcast = 128<<10, 256<<10, 512<<10, 8<<20
	default:
		// Four ranks on two CPUs: scatter of 128 KiB 8.5 and 6.2; all-to-all of 256 KiB 31 and
		// 23, reduce-scatter 39 and 32; reduce of 512 KiB 63 and 48, all-reduce 99 and 80;
		// broadcast of 1 MiB 110 and 83, a message 173 and 68; all-gather of 4 MiB 690 and 510; gather of
		// 4 MiB 240 and 290, of 16 MiB 1460 and 990.
		l.Scatter, l.AllToAll, l.ReduceScatter = 128<<10, 256<<10, 256<<10
		l.Reduce, l.AllReduce = 512<<10, 512<<10
		l.Broadcast, l.Message, l.AllGather, l.AllGatherV, l.Gather = 1<<20, 1<<20, 4<<20, 1<<20, 16<<20
	}
	return l
}

// byDefault stands for a limit that is found out once all ranks have said where they may run.
const byDefault = -2

func never() Limits { return uniform(-1) }

func uniform(n int64) (l Limits) {
	for _, p := range l.all() {
		*p = n
	}
	return l
}

// limitCount is how many there are.
const limitCount = 10

// all lists the limits in the order in which rank 0 tells them.
func (l *Limits) all() [limitCount]*int64 {
	return [limitCount]*int64{
		&l.AllReduce, &l.Reduce, &l.ReduceScatter,
		&l.Broadcast, &l.AllGather, &l.AllGatherV, &l.Gather, &l.Scatter, &l.AllToAll,
		&l.Message,
	}
}

// from reports whether a call of n bytes is one for a single copy.
func from(limit int64, n int) bool { return limit >= 0 && n > 0 && int64(n) >= limit }

// lends reports whether ranks lend in a call of n bytes, by the limits for any memory and
// for that of Alloc. Below the first they lend only that.
func (g *Group) lends(any, mapped int64, n int) bool {
	g.private = from(any, n)
	return g.private || g.armed && from(mapped, n)
}

// ErrUnreadable ends an operation that has to read the memory of a rank and cannot:
// most likely the rank has died.
var ErrUnreadable = errors.New("shm: the memory of a rank cannot be read")

// mark tells one process from all others.
type mark [16]byte

// errStranger says that there is a process under the number of a rank which is not that rank.
var errStranger = errors.New("another process has its number")

// errStray says that a rank has told a place that is not in its arena.
var errStray = errors.New("it is not where the rank says")

// place is where a rank's memory is.
type place struct {
	pid   int
	mark  mark
	at    uint64 // address of the mark
	local bool   // in this process
}

// glimpse reads len(dst) bytes at addr in the memory of p, all of them or none that count,
// and makes sure that it was p which it read. It is (*window).read but in tests.
type glimpse func(w *window, p *place, dst []byte, addr uint64) error

// What a rank has found out about the memory of the others, in the low byte of a
// word; above it, the error number and the rank that it is about.
const (
	foundYes = iota + 1
	foundRefusal
	foundStranger
	foundOff

	// foundCalls says that the system call works, for ranks of this process too.
	foundCalls = 1 << 7
)

// probe tries to read the memory of all other ranks, by a random number that each has put
// there, and tells the others how it went.
func (g *Group) probe(o Options) {
	g.glimpse = (*window).read
	if o.glimpse != nil {
		g.glimpse = o.glimpse
	}
	if g.tile = o.tile; g.tile == 0 {
		g.tile = defaultTile
	}
	if g.section = o.section; g.section == 0 {
		g.section = defaultSection
	}
	g.places, g.srcs = make([]place, g.size), make([][]byte, g.size)
	for r := range g.segs {
		s := &g.segs[r]
		g.places[r] = place{pid: int(*s.pid), mark: *s.mark, at: *s.markAt, local: *s.mark == *here() && o.glimpse == nil}
	}
	atomic.StoreUint64(g.self.found, g.look(o))
}

func (g *Group) look(o Options) uint64 {
	if o.Staged {
		return foundOff
	}
	found, calls := uint64(foundYes), uint64(foundCalls)
	var got mark
	for r := range g.places {
		if r == g.rank {
			continue
		}
		err := g.glimpse(&g.lens.window, &g.places[r], got[:], g.places[r].at)
		if err == nil && got != g.places[r].mark {
			err = errStranger
		}
		if err == nil {
			continue
		}
		calls = 0
		if g.places[r].local || found != foundYes {
			continue
		}
		found = foundRefusal | uint64(r)<<32
		var no syscall.Errno
		if errors.Is(err, errStranger) {
			found = foundStranger | uint64(r)<<32
		} else if errors.As(err, &no) {
			found |= uint64(no) << 8
		}
	}
	return found | calls
}

// agree decides from what all ranks have found out whether this group copies directly.
func (g *Group) agreeDirect() {
	if g.limits == uniform(byDefault) {
		g.limits = defaultLimits(g.size, g.spinFor > 0)
	}
	g.inside = true
	for r := range g.places {
		g.inside = g.inside && g.places[r].local
	}
	calls := true
	for r := range g.segs {
		v := atomic.LoadUint64(g.segs[r].found)
		calls = calls && v&foundCalls != 0
		about, no := v>>32, syscall.Errno(v>>8&0xffffff)
		switch v & 0xff &^ foundCalls {
		case foundYes:
			continue
		case foundOff:
			g.why = fmt.Sprintf("rank %d is told not to", r)
		case foundStranger:
			g.why = fmt.Sprintf("rank %d finds another process where rank %d should be: they are in different pid namespaces", r, about)
		default:
			g.why = fmt.Sprintf("rank %d cannot read the memory of rank %d: process_vm_readv: %v%s", r, about, no, hint(no))
		}
		g.limits = never()
		return
	}
	if g.size == 1 {
		g.limits = never()
	}
	if !calls {
		g.limits.Message = -1
	}
}

func hint(no syscall.Errno) string {
	switch no {
	case syscall.EPERM:
		return " (Yama's ptrace_scope, seccomp, another user or pid namespace)"
	case syscall.ENOSYS:
		return " (kernel or seccomp)"
	case syscall.ESRCH, syscall.EFAULT:
		return " (different pid namespaces)"
	}
	return ""
}

// Limits returns from how many bytes on data are copied only once. All ranks of the group have
// the same.
func (g *Group) Limits() Limits { return g.limits }

// WhyStaged returns why data are copied twice, but for those in memory of Alloc; "" if they need not be.
func (g *Group) WhyStaged() string { return g.why }

// say publishes a piece that consists of two words, and returns its number.
func (g *Group) say(a, b uint64) (p uint32, err error) {
	p = g.next
	if err := g.reserve(p); err != nil {
		return p, err
	}
	s := &g.self.slots[p%depth]
	*word64(s.data, 0), *word64(s.data, 8) = a, b
	g.publish(p)
	return p, nil
}

// publish publishes piece p, which is in its slot.
func (g *Group) publish(p uint32) {
	s := &g.self.slots[p%depth]
	h := g.op
	h.piece = p
	*s.op = h
	g.issue(p)
}

func yesOrNo(ok bool) uint64 {
	if ok {
		return 1
	}
	return 0
}

// pass publishes a piece that nobody looks at.
func (g *Group) pass() (p uint32) {
	p = g.next
	g.issue(p)
	return p
}

// lend publishes where b is, for the others to read until all have said that they are done.
// Memory that other processes cannot read, as that of some devices, is not
// lent: then all ranks go on as if there were nothing to lend.
func (g *Group) lend(b []byte) (p uint32, ok bool, err error) {
	g.lent = b // which keeps it where it is, even if it was on a stack
	at := g.lendable(b)
	p, err = g.say(at, uint64(len(b)))
	return p, at != 0 || len(b) == 0, err
}

// lendable returns where b is, 0 if there is nothing or it cannot be read.
func (g *Group) lendable(b []byte) uint64 {
	if at := g.placeOf(b); at != 0 {
		return at
	}
	if !g.private {
		return 0
	}
	if g.inside && len(b) > 0 {
		return addressOf(b)
	}
	return g.lens.lendable(g, b)
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// lens is what one who reads other ranks' memory needs; one at a time uses it.
type lens struct {
	window
	probed mark
}

// lendable is Group.lendable if not all ranks are in this process: it asks the kernel.
func (l *lens) lendable(g *Group, b []byte) uint64 {
	if len(b) == 0 {
		return 0
	}
	at, self := addressOf(b), &g.places[g.rank]
	if g.glimpse(&l.window, self, l.probed[:1], at) != nil ||
		g.glimpse(&l.window, self, l.probed[:1], at+uint64(len(b)-1)) != nil {
		return 0
	}
	return at
}

// borrow waits for what rank r lends with piece p, n bytes, and returns where it is; 0
// if nobody can read it.
func (g *Group) borrow(r int, p uint32, n int) (uint64, error) {
	data, err := g.arrived(r, p)
	if err != nil {
		return 0, err
	}
	at, has := *word64(data, 0), *word64(data, 8)
	if has != uint64(n) {
		return 0, g.unfit(r, "rank %d sends %d bytes to rank %d, which expects %d", r, has, g.rank, n)
	}
	return at, nil
}

// peek returns n bytes of what rank r lends, off bytes from its beginning, without a copy if
// it lies in its arena, else read into buf. Whoever has used them asks lentTo.
func (g *Group) peek(r int, buf []byte, off, n int) ([]byte, error) {
	at := g.addrs[r] + uint64(off)
	if b := g.shown(r, at, n); b != nil {
		return b, nil
	}
	buf = buf[:n]
	return buf, g.read(r, buf, at)
}

// pull copies from the memory of rank r. It looks around every so often.
func (g *Group) pull(r int, dst []byte, at uint64) error {
	for len(dst) > 0 {
		n := min(len(dst), stretch)
		if err := g.read(r, dst[:n], at); err != nil {
			return err
		}
		dst, at = dst[n:], at+uint64(n)
	}
	return nil
}

// read copies at most a stretch. What it has read counts only if the lender is known to have
// waited: one that gives up says so first.
func (g *Group) read(r int, dst []byte, at uint64) error {
	p := &g.places[r]
	var err error
	if at&inArena != 0 {
		if src := g.shown(r, at, len(dst)); src != nil {
			copy(dst, src)
		} else {
			err = errStray
		}
	} else if p.local {
		// The lender, if it gives up, waits for this word before it takes its
		// memory back.
		atomic.StoreUint32(g.self.reading, uint32(r)+1)
		if !g.over(r) {
			copyUnseen(dst, at)
		}
		atomic.StoreUint32(g.self.reading, 0)
	} else {
		err = g.glimpse(&g.lens.window, p, dst, at)
	}
	return g.lentTo(r, err)
}

// lentTo returns why what was read from rank r, with err, does not count; nil if it does.
func (g *Group) lentTo(r int, err error) error {
	if e := g.refused(); e != nil {
		return e
	}
	if atomic.LoadUint32(g.segs[r].left) != 0 {
		return g.giveUp(&RankError{Rank: r, Err: ErrLeft})
	}
	if err != nil {
		return g.giveUp(&RankError{Rank: r, Err: fmt.Errorf("%w: %w", ErrUnreadable, err)})
	}
	if g.stop != nil {
		if err := g.stop(); err != nil {
			return g.giveUp(err)
		}
	}
	return nil
}

// over reports whether the memory of rank r is no longer lent.
func (g *Group) over(r int) bool {
	return atomic.LoadUint32(g.self.abort) != 0 || atomic.LoadUint32(g.segs[r].left) != 0
}

// takeBack ends what lend began. With an error the others may not be done: they are told that
// what they read from now on does not count.
func (g *Group) takeBack(err error) error {
	if err != nil {
		if errors.Is(err, ErrClosed) {
			atomic.StoreUint32(g.self.left, 1)
		} else {
			g.tell()
		}
		for r := range g.segs {
			for g.places[r].local && atomic.LoadUint32(g.segs[r].reading) == uint32(g.rank)+1 {
				yield()
				runtime.Gosched()
			}
		}
	}
	g.lent, g.lentBlocks = nil, nil
	clear(g.addrs)
	return err
}

// roles are who lends and who reads.
type roles int

const (
	allToAll roles = iota
	rootLends
	rootReads
)

// move does a collective whose data only move: ranks lend, others read, and all who
// lent wait for that. Each lender says that it lends n bytes; into tells where what
// comes from rank r goes, and from which offset there it comes. It returns false, with
// nothing done, on all ranks, if the memory of one cannot be read.
func (g *Group) move(who roles, lent []byte, n int, into func(r int) (dst []byte, off int)) (ok bool, err error) {
	root := int(g.op.root)
	lends := who == allToAll || (who == rootLends) == (g.rank == root)
	reads := who == allToAll || !lends
	ok = true
	p := g.next
	if lends {
		_, ok, err = g.lend(lent)
	} else {
		g.pass()
	}
	if err == nil && reads {
		ok, err = g.readAll(who, p, n, ok, into)
	} else if err == nil {
		g.pass()
	}
	if err == nil && lends {
		ok, err = g.allDone(who, p+1, ok)
	}
	return ok, g.takeBack(err)
}

func (g *Group) readAll(who roles, p uint32, n int, ok bool, into func(r int) (dst []byte, off int)) (bool, error) {
	for i := 1; i < g.size; i++ {
		r := (g.rank + i) % g.size
		if who == rootLends && r != int(g.op.root) {
			continue
		}
		dst, off := into(r)
		size := n
		if size < 0 {
			size = len(dst)
		}
		at, err := g.borrow(r, p, size)
		if err != nil {
			return false, err
		}
		ok = ok && (at != 0 || size == 0)
		if !ok {
			continue
		}
		if g.op.kind == opBroadcast {
			err = g.pullTurned(r, dst, at)
		} else {
			err = g.pull(r, dst, at+uint64(off))
		}
		if err != nil {
			return false, err
		}
	}
	if who != rootLends {
		g.all(p)
	}
	_, err := g.say(yesOrNo(ok), 0)
	return ok, err
}

// pullTurned begins somewhere else on each rank, where all read the same.
func (g *Group) pullTurned(r int, dst []byte, at uint64) error {
	nth := (g.rank - r + g.size) % g.size
	start := len(dst) / (g.size - 1) * (nth - 1) &^ (page - 1)
	if err := g.pull(r, dst[start:], at+uint64(start)); err != nil {
		return err
	}
	return g.pull(r, dst[:start], at)
}

// allDone waits until those who read have said that they are done.
func (g *Group) allDone(who roles, p uint32, ok bool) (bool, error) {
	for i := 1; i < g.size; i++ {
		r := (g.rank + i) % g.size
		if who == rootReads && r != int(g.op.root) {
			continue
		}
		data, err := g.arrived(r, p)
		if err != nil {
			return false, err
		}
		ok = ok && *word64(data, 0) != 0
	}
	if who != rootReads {
		g.all(p)
	}
	return ok, nil
}

// allToAllVDirect is for blocks of any size, which the ranks have agreed on. It leaves those
// that are not longer than short.
func (g *Group) allToAllVDirect(out, in [][]byte, short int) (ok bool, err error) {
	p, ok, err := g.lendBlocks(blocks{each: in}, 0, short)
	for i := 1; i < g.size && err == nil; i++ {
		r := (g.rank + i) % g.size
		var data []byte
		if data, err = g.arrived(r, p); err == nil {
			ok = ok && *word64(data, 8*g.size) != 0
			if ok && len(out[r]) > short {
				err = g.pull(r, out[r], *word64(data, 8*g.rank))
			}
		}
	}
	if err == nil {
		g.all(p)
		err = g.adjourn()
	}
	return ok, g.takeBack(err)
}

// scatterDirect is for a root that has blocks of any place in memory.
func (g *Group) scatterDirect(out []byte, in blocks) (ok bool, err error) {
	root, p := int(g.op.root), g.next
	if g.rank == root {
		_, ok, err = g.lendBlocks(in, len(out), 0)
		if err == nil {
			copyTo(out, in.at(root, len(out)))
			g.pass()
			ok, err = g.allDone(rootLends, p+1, ok)
		}
		return ok, g.takeBack(err)
	}
	g.pass()
	data, err := g.arrived(root, p)
	if err == nil {
		if ok = *word64(data, 8*g.size) != 0; ok {
			err = g.pull(root, out, *word64(data, 8*g.rank))
		}
	}
	if err == nil {
		_, err = g.say(yesOrNo(ok), 0)
	}
	return ok, g.takeBack(err)
}

// lendBlocks is lend of a block, of n bytes unless it is a slice of its own, for each other
// rank, those that are not longer than short left out: their places, and whether all
// can be read.
func (g *Group) lendBlocks(in blocks, n, short int) (p uint32, ok bool, err error) {
	p = g.next
	if err := g.reserve(p); err != nil {
		return p, false, err
	}
	g.lent, g.lentBlocks = in.whole, in.each
	s := &g.self.slots[p%depth]
	ok = true
	for r := range g.size {
		at := uint64(0)
		if b := in.at(r, n); r != g.rank && len(b) > short {
			at = g.lendable(b)
			ok = ok && at != 0
		}
		*word64(s.data, 8*r) = at
	}
	*word64(s.data, 8*g.size) = yesOrNo(ok)
	g.publish(p)
	return p, ok, nil
}

// meet lends b and collects where all others have theirs, in g.addrs. It returns false, on
// all ranks, if the memory of one cannot be read.
func (g *Group) meet(b []byte) (ok bool, err error) {
	p, ok, err := g.lend(b)
	if err != nil {
		return false, err
	}
	for i := 1; i < g.size; i++ {
		r := (g.rank + i) % g.size
		if g.addrs[r], err = g.borrow(r, p, len(b)); err != nil {
			return false, err
		}
		ok = ok && g.addrs[r] != 0
	}
	g.all(p)
	return ok, nil
}

// adjourn says that this rank has done what it had to, and waits until all others say so.
func (g *Group) adjourn() error {
	p, err := g.say(0, 0)
	for r := 0; r < g.size && err == nil; r++ {
		if r != g.rank {
			_, err = g.arrived(r, p)
		}
	}
	if err == nil {
		g.all(p)
	}
	return err
}

// defaultTile is how much of each operand a rank has in cache at a time. Two ranks are a few
// percent slower with 64 and 512 KiB (BenchmarkCopies, C10D_SHM_TILE).
const defaultTile = 128 << 10

// fold reduces, in the order of the ranks, what all have off bytes from the
// beginning of what they lend; own is this rank's. Dst may be own.
func (g *Group) fold(dst, own []byte, off, unit int, combine func(dst, src []byte)) error {
	if g.scratch == nil {
		g.scratch = make([]byte, 2*g.tile)
	}
	for step := g.tile / unit * unit; len(dst) > 0; {
		n := min(len(dst), step)
		if err := g.foldTile(dst[:n], own[:n], off, combine); err != nil {
			return err
		}
		dst, own, off = dst[n:], own[n:], off+n
	}
	return nil
}

func (g *Group) foldTile(dst, own []byte, off int, combine func(dst, src []byte)) error {
	acc, other := dst, g.scratch[g.tile:][:len(dst)]
	if g.rank == 0 {
		copyTo(acc, own)
	} else {
		if same(dst, own) {
			acc = g.scratch[:len(dst)]
		}
		if err := g.read(0, acc, g.addrs[0]+uint64(off)); err != nil {
			return err
		}
	}
	for r := 1; r < g.size; r++ {
		if r == g.rank {
			combine(acc, own)
			continue
		}
		src, err := g.peek(r, other, off, len(dst))
		if err != nil {
			return err
		}
		combine(acc, src)
		if err := g.lentTo(r, nil); err != nil {
			return err
		}
	}
	copyTo(dst, acc)
	return nil
}

// allReduceDirect: each rank reduces a share in its own buffer, and reads the other
// shares out of the others'.
func (g *Group) allReduceDirect(buf []byte, elem int, combine func(dst, src []byte)) (ok bool, err error) {
	ok, err = g.meet(buf)
	if !ok || err != nil {
		return ok, g.takeBack(err)
	}
	if g.placeOf(buf) != 0 && g.allShown() {
		return true, g.takeBack(g.allReduceShown(buf, elem, combine))
	}
	u := unit(elem)
	lo, hi := share(len(buf), g.rank, g.size, u)
	if err = g.fold(buf[lo:hi], buf[lo:hi], lo, u, combine); err != nil {
		return false, g.takeBack(err)
	}
	p, err := g.say(0, 0)
	for i := 1; i < g.size && err == nil; i++ {
		r := (g.rank + i) % g.size
		lo, hi := share(len(buf), r, g.size, u)
		if _, err = g.arrived(r, p); err == nil {
			err = g.pull(r, buf[lo:hi], g.addrs[r]+uint64(lo))
		}
	}
	if err == nil {
		g.all(p)
		err = g.adjourn()
	}
	return true, g.takeBack(err)
}

// allShown reports whether what the others lend since meet lies in arenas.
func (g *Group) allShown() bool {
	for r := range g.size {
		if r != g.rank && g.addrs[r]&inArena == 0 {
			return false
		}
	}
	return true
}

// defaultSection is how much of a buffer a rank reduces before it takes what the others have. Two
// ranks take 1480 us for 16 MiB with 1 MiB, 1910 with 256 KiB and 3100 with 64 MiB, on CPUs that are
// far from each other 2000, 2700 and 2960 (BenchmarkCopies, C10D_SHM_SECTION).
const defaultSection = 1 << 20

// allReduceShown is allReduceDirect section by section: shares are taken while they are in
// the caches of those who reduced them. In the next section there is something to do
// for a rank that would have to wait.
func (g *Group) allReduceShown(buf []byte, elem int, combine func(dst, src []byte)) error {
	u := unit(elem)
	section := g.section / u * u * g.size
	n, first := pieces(len(buf), section), g.next
	for k := -1; k < n; k++ {
		if k+1 < n {
			b := cut(buf, k+1, section)
			lo, hi := share(len(b), g.rank, g.size, u)
			if err := g.fold(b[lo:hi], b[lo:hi], (k+1)*section+lo, u, combine); err != nil {
				return err
			}
			if _, err := g.say(0, 0); err != nil {
				return err
			}
		}
		if k < 0 {
			continue
		}
		b, p := cut(buf, k, section), first+uint32(k)
		for i := 1; i < g.size; i++ {
			r := (g.rank + i) % g.size
			if _, err := g.arrived(r, p); err != nil {
				return err
			}
			lo, hi := share(len(b), r, g.size, u)
			if err := g.pull(r, b[lo:hi], g.addrs[r]+uint64(k*section+lo)); err != nil {
				return err
			}
		}
		g.all(p)
	}
	return g.adjourn()
}

// reduceDirect: each rank reduces a share of each section into its slot, out of which
// root takes it.
func (g *Group) reduceDirect(out, in []byte, root, elem int, combine func(dst, src []byte)) (ok bool, err error) {
	ok, err = g.meet(in)
	if !ok || err != nil {
		return ok, g.takeBack(err)
	}
	u := unit(elem)
	section := g.piece / u * u * g.size
	for k := 0; k < pieces(len(in), section) && err == nil; k++ {
		err = g.reduceSection(cut(out, k, section), cut(in, k, section), k*section, root, u, combine)
	}
	if err == nil {
		err = g.adjourn()
	}
	return true, g.takeBack(err)
}

func (g *Group) reduceSection(out, in []byte, off, root, u int, combine func(dst, src []byte)) error {
	p := g.next
	if err := g.reserve(p); err != nil {
		return err
	}
	s := &g.self.slots[p%depth]
	lo, hi := share(len(in), g.rank, g.size, u)
	dst := s.data[:hi-lo]
	if g.rank == root {
		dst = out[lo:hi]
	}
	if err := g.fold(dst, in[lo:hi], off+lo, u, combine); err != nil {
		return err
	}
	g.publish(p)
	if g.rank != root {
		return nil
	}
	for i := 1; i < g.size; i++ {
		r := (g.rank + i) % g.size
		data, err := g.arrived(r, p)
		if err != nil {
			return err
		}
		lo, hi := share(len(in), r, g.size, u)
		copy(out[lo:hi], data)
	}
	g.all(p)
	return nil
}

// reduceScatterDirect: each rank reduces its block.
func (g *Group) reduceScatterDirect(out, in []byte, elem int, combine func(dst, src []byte)) (ok bool, err error) {
	ok, err = g.meet(in)
	if !ok || err != nil {
		return ok, g.takeBack(err)
	}
	off := g.rank * len(out)
	if err = g.fold(out, in[off:][:len(out)], off, unit(elem), combine); err == nil {
		err = g.adjourn()
	}
	return true, g.takeBack(err)
}
