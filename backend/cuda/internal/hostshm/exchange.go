// Package hostshm all-reduces device tensors of one host through page-locked memory. It has that
// memory, and the goroutines that combine the ranks' operands in it (decision 18).
package hostshm

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/internal/reduce"
)

// Exchange is page-locked memory that the ranks of a host share. They all-reduce through it, chunk
// by chunk:
//
//  1. Each rank's device copies the rank's operand into the rank's slot, or its host does.
//  2. Each rank's CPU combines its share of the chunk: it reads all ranks' slots, and writes the
//     slot that is common to all.
//  3. Each device, or its host, copies the common slot.
//
// Nothing else is copied within the host. Words in the memory order the hosts; they hold the numbers of
// chunks, which all ranks count alike. A host counts a chunk as arrived in its turn: when its device has
// copied the operand, and what was in the common slot before. So a rank's slot is written again when all ranks
// have combined what was there, the common slot when all devices have copied it.
//
// A rank that fails lets its streams go on. They may then write slots that others still combine, so
// the rank says first, in a word, that it has failed. A rank that has seen all shares of a chunk
// looks at these words before its device copies the chunk. So no operation ends well with a chunk
// that such a stream has spoilt.
type Exchange struct {
	Why error // why the ranks have none; what follows is not set then

	Rank, Size int
	Slots      int
	Chunk      int // bytes of a slot
	Region     *region.Region
	D          driver.Driver
	Crew       *crew
	Eager      bool     // there is a CPU for everybody who waits
	Members    []member // what those who combine keep

	// Unlocked is why this rank could not page-lock the memory. Its host copies then, as for
	// tensors that are not contiguous. The others need not know.
	Unlocked atomic.Pointer[error]

	Small atomic.Pointer[Small] // set by the first small operation

	Memory driver.HostMemory // once it is page-locked; guarded by Backend.calls until the first operation
	Next   uint64            // the chunk that comes next; guarded by Backend.calls
}

// Small is the kernel that does all that this rank's device does for a small operation, or why there is none. The
// others need not know.
type Small struct {
	Kernel driver.Function
	Why    error
}

// member is what one of a crew keeps from operation to operation.
type member struct {
	block    []byte // of reduceBlock bytes, what is being combined
	scratch  []byte // likewise, once something needs it
	accesses []driver.Access
}

// The words of the exchange, one of each kind for each rank.
const (
	WordArrived = iota // chunks that have come from the rank's device
	WordDone           // chunks whose share the rank has combined
	WordCalled         // one more than the first chunk of the operation that the rank is at; what it calls follows
	wordFailed         // not zero when the rank's streams do not wait for its host any more
	WordKinds
)

// exchangeLine keeps words apart: processors fetch lines of 64 bytes in pairs.
const exchangeLine = 128

// SlotAlign is what slots are aligned to, shareAlign the shares of a chunk.
const (
	SlotAlign  = 4096
	shareAlign = 128
)

// FirstChunk is the number of the first chunk; a variable for tests. Words have the
// last 32 bits of such numbers.
var FirstChunk uint64

func RoundUp(n, to int) int { return (n + to - 1) / to * to }

// sharedBytes is how much memory there is at least. CPUs have memory that they have just combined in
// their own caches, and a device writes such memory at half its speed or less. So there has to be
// much more memory than caches. Two ranks on 32 CPUs, with 2 MiB of second-level cache each, took
// for an all-reduce of 256 MiB:
//
//	memory, MiB    24    48   96   144
//	time, ms     19.6  10.3  9.2   8.5
const sharedBytes = 128 << 20

// Slots returns how many slots a rank has, at least so many.
func Slots(size, chunk, least int) int {
	const most = 64
	return min(max(sharedBytes/((size+1)*RoundUp(chunk, SlotAlign)), least), most)
}

// Bytes returns how large the memory is.
func Bytes(size, slots, chunk int) int {
	return RoundUp(size*WordKinds*exchangeLine, SlotAlign) + (size+1)*slots*RoundUp(chunk, SlotAlign)
}

// New returns this rank's part of an exchange in r, which has Bytes bytes.
func New(rank, size, slots, chunk int, r *region.Region, d driver.Driver) *Exchange {
	cpus := usableCPUs() / size
	x := &Exchange{
		Rank: rank, Size: size, Slots: slots, Chunk: RoundUp(chunk, SlotAlign), Region: r, D: d,
		Eager: cpus >= eagerCPUs, Next: FirstChunk,
	}
	x.Crew = newCrew(CrewOf(cpus), x.Eager)
	x.Members = make([]member, x.Crew.N)
	for kind := WordArrived; kind <= WordCalled; kind++ {
		driver.StoreWord(r.Bytes, x.Word(kind, x.Rank), uint32(FirstChunk))
	}
	return x
}

// Word returns where a rank's word is.
func (x *Exchange) Word(kind, rank int) int { return (kind*x.Size + rank) * exchangeLine }

// In returns where a rank's slot is for a chunk, Out where the common one is.
func (x *Exchange) In(rank int, chunk uint64) int {
	return RoundUp(x.Size*WordKinds*exchangeLine, SlotAlign) + (rank*x.Slots+int(chunk%uint64(x.Slots)))*x.Chunk
}

func (x *Exchange) Out(chunk uint64) int { return x.In(x.Size, chunk) }

func (x *Exchange) Ptr(at int) driver.Ptr { return x.Memory.Ptr() + driver.Ptr(at) }

// Uses appends what a host uses in the turn of a chunk, the rank's slot and the common one, or in one of all chunks.
func (x *Exchange) Uses(a []driver.Access, chunk uint64, all bool) []driver.Access {
	slots := 1
	if all {
		chunk, slots = 0, x.Slots
	}
	n := slots * x.Chunk
	return append(a, driver.Writes(x.Ptr(x.In(x.Rank, chunk)), n), driver.Shares(x.Ptr(x.Out(chunk)), n))
}

// has reports whether a rank's word has counted to n.
func (x *Exchange) has(kind, rank int, n uint64) bool {
	at := x.Word(kind, rank)
	if x.Memory == nil {
		return driver.AtLeast.Holds(driver.LoadWord(x.Region.Bytes, at), uint32(n))
	}
	return driver.AtLeast.Holds(x.Memory.Load32(at), uint32(n))
}

// Count has this rank's word be n.
func (x *Exchange) Count(kind int, n uint64) {
	at := x.Word(kind, x.Rank)
	if x.Memory == nil {
		driver.StoreWord(x.Region.Bytes, at, uint32(n))
		return
	}
	x.Memory.Store32(at, uint32(n))
}

// Await waits until the words of all ranks have counted to n. If something ends that, behind is the first other rank
// that has not, -1 if all have. Chunks that all have combined may be spoilt, if the streams of a rank go on by
// themselves. Then it waits for the reason, which is on its way.
func (x *Exchange) Await(o Asker, kind int, n uint64) (behind int, err error) {
	w := Watch{Eager: x.Eager}
	for r := range x.Size {
		for !x.has(kind, r, n) {
			if err := w.Poll(o); err != nil {
				return x.behind(kind, n), err
			}
		}
	}
	for w := (Watch{}); kind == WordDone && x.Failed(); {
		if err := w.Poll(o); err != nil {
			return -1, err
		}
	}
	return -1, nil
}

func (x *Exchange) behind(kind int, n uint64) int {
	for r := range x.Size {
		if r != x.Rank && !x.has(kind, r, n) {
			return r
		}
	}
	return -1
}

// Fail says that this rank's streams go on by themselves, before they do.
func (x *Exchange) Fail() { driver.StoreWord(x.Region.Bytes, x.Word(wordFailed, x.Rank), 1) }

// Failed reports whether a rank has said so.
func (x *Exchange) Failed() bool {
	for r := range x.Size {
		if driver.LoadWord(x.Region.Bytes, x.Word(wordFailed, r)) != 0 {
			return true
		}
	}
	return false
}

// Call tells the other ranks at which operation this one is: its first chunk, and its fingerprint. Called returns what
// another rank has told. No rank goes on to the next operation before all have looked: it waits for their shares of
// this one.
func (x *Exchange) Call(chunk uint64, c board.Said) {
	at := x.Said(x.Rank)
	for i, w := range c {
		driver.StoreWord(x.Region.Bytes, at+8*i, uint32(w))
		driver.StoreWord(x.Region.Bytes, at+8*i+4, uint32(w>>32))
	}
	x.Count(WordCalled, chunk+1)
}

func (x *Exchange) Called(rank int) (c board.Said) {
	at := x.Said(rank)
	for i := range c {
		c[i] = uint64(driver.LoadWord(x.Region.Bytes, at+8*i)) | uint64(driver.LoadWord(x.Region.Bytes, at+8*i+4))<<32
	}
	return c
}

// Said returns where a rank tells what it calls.
func (x *Exchange) Said(rank int) int { return x.Word(WordCalled, rank) + 4 }

// Share returns the bytes of n that part i of so many has.
func Share(n, i, parts int) (lo, hi int) {
	each := RoundUp((n+parts-1)/parts, shareAlign)
	return min(i*each, n), min((i+1)*each, n)
}

// reduceBlock is how many bytes are combined at a time. The result stays in the first-level
// cache until the last rank's bytes have been added. Then it is written past the caches: an
// all-reduce of 16 MiB by two ranks took 0.88 ms when devices fetched it out of the caches,
// and takes 0.59.
const reduceBlock = 16 << 10

// Combine combines bytes lo to hi of a chunk of all ranks, in rank order.
func (x *Exchange) Combine(chunk uint64, red *backend.Reduction, lo, hi int, m *member) {
	if lo == hi {
		return
	}
	if _, ok := x.D.(driver.Observer); ok && x.Memory != nil {
		all := m.accesses[:0]
		for r := range x.Size {
			all = append(all, driver.Reads(x.Ptr(x.In(r, chunk)+lo), hi-lo))
		}
		m.accesses = append(all, driver.Writes(x.Ptr(x.Out(chunk)+lo), hi-lo))
		driver.HostAccess(x.D, "combining", m.accesses...)
	}
	if m.block == nil {
		m.block = make([]byte, reduceBlock)
	}
	if red.Before != nil && m.scratch == nil {
		m.scratch = make([]byte, reduceBlock)
	}
	mem := x.Region.Bytes
	for ; lo < hi; lo += reduceBlock {
		n := min(reduceBlock, hi-lo)
		out := m.block[:n]
		for r := range x.Size {
			in := mem[x.In(r, chunk)+lo:][:n]
			if r == 0 {
				copy(out, in)
				if red.Before != nil {
					red.Before(out)
				}
				continue
			}
			if red.Before != nil {
				in = m.scratch[:copy(m.scratch, in)]
				red.Before(in)
			}
			red.Combine(out, in)
		}
		if red.After != nil {
			red.After(out)
		}
		reduce.Uncached(mem[x.Out(chunk)+lo:][:n], out)
	}
}

// Prepare page-locks the memory, once. The caller holds Backend.calls.
func (x *Exchange) Prepare() {
	if x.Memory != nil || x.Unlocked.Load() != nil {
		return
	}
	m, err := x.Region.Lock(x.D)
	if err != nil {
		err = fmt.Errorf("page-locking %d bytes that the ranks share: %w", len(x.Region.Bytes), err)
		x.Unlocked.Store(&err)
		return
	}
	x.Memory = m
}

// Rest ends the goroutines that combine, which have nothing to do any more.
func (x *Exchange) Rest() {
	if x != nil {
		x.Crew.close()
	}
}

// Close frees everything. Nothing uses it any more.
func (x *Exchange) Close() error {
	if x == nil {
		return nil
	}
	x.Rest()
	var err error
	if x.Memory != nil {
		err = x.Region.Unlock(x.D)
	}
	return errors.Join(err, x.Region.Leave())
}

const (
	// mostCrew is how many goroutines of a rank combine its share at most: four are as fast as
	// the copies. Twelve make all-reduces of up to 1 MiB slower.
	//
	// They leave spareCPUs of the rank's CPUs free: for the goroutine that enqueues, the one
	// that waits, and the rank's worker.
	mostCrew  = 4
	spareCPUs = 3

	// eagerCPUs is how many CPUs a rank needs for its goroutines to poll without
	// letting others go first.
	eagerCPUs = 4
)

// CrewOf returns how many goroutines of a rank combine its share, if it may use so
// many CPUs.
var CrewOf = func(cpus int) int { return min(cpus-spareCPUs, mostCrew) }

// usableCPUs returns how many CPUs this process may use at a time.
func usableCPUs() int { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) }
