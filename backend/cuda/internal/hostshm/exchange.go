// Package hostshm all-reduces device tensors of one host through page-locked memory. It has that
// memory, and the goroutines that combine the ranks' operands in it (decision 18).
package hostshm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/internal/reduce"
)

// Exchange is page-locked memory that the ranks of a host share. They all-reduce through it, chunk
// by chunk:
//
//  1. Each rank's device copies the rank's operand into the rank's slot.
//  2. Each rank's CPU combines its share of the chunk: it reads all ranks' slots, and writes the
//     slot that is common to all.
//  3. Each device copies the common slot.
//
// Nothing is copied within the host. Words in the memory order the ranks; they hold the numbers of
// chunks, which all ranks count alike. A rank's slot is written again when all ranks have combined
// what was there, the common slot when all devices have copied it.
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
	Eager      bool           // there is a CPU for everybody who waits
	Left       []atomic.Int32 // parts of the share that are still to be combined, by slot
	Members    []member       // what those who combine keep

	// Unlocked is why this rank could not page-lock the memory. Its host copies then, as for
	// tensors that are not contiguous. The others need not know.
	Unlocked atomic.Pointer[error]

	Memory driver.HostMemory // once it is page-locked; guarded by Backend.calls until the first operation
	Next   uint64            // the chunk that comes next; guarded by Backend.calls
	Number uint64            // of the operation that comes next; guarded by Backend.calls
	Dev    int               // whose streams count, -1 before the first; guarded by Backend.calls

	// Kernel does all that the device does for a small operation. There is none while the
	// ranks do not know, and where they do not have, a device each: one that waits in a
	// kernel keeps those of other processes waiting. Guarded by Backend.calls.
	Kernel driver.Function
	module driver.Module
	asked  bool                  // whether there is one
	Lacks  atomic.Pointer[error] // why there is none, for Explain
	device driver.Device         // dev, once this rank has shown it
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
	WordTaken          // chunks that the rank's device has copied
	WordGo             // chunks that the rank's host has let a kernel copy; the device's UUID follows
	WordCalled         // one more than the first chunk of the operation that the rank is at; what it calls follows
	wordFailed         // not zero when the rank's streams do not wait for its host any more
	WordKinds
)

// uuidAt is where in the line of wordGo a rank has its device's UUID.
const uuidAt = 16

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
		Eager: cpus >= eagerCPUs, Left: make([]atomic.Int32, slots), Next: FirstChunk, Dev: -1,
	}
	x.Crew = newCrew(CrewOf(cpus), x.Eager)
	x.Members = make([]member, x.Crew.N)
	for kind := WordArrived; kind <= WordGo; kind++ {
		driver.StoreWord(r.Bytes, x.Word(kind, x.Rank), uint32(FirstChunk))
	}
	driver.StoreWord(r.Bytes, x.Word(WordCalled, x.Rank), uint32(FirstChunk))
	return x
}

// Word returns where a rank's word is.
func (x *Exchange) Word(kind, rank int) int { return (kind*x.Size + rank) * exchangeLine }

func (x *Exchange) WordPtr(kind, rank int) driver.Ptr {
	return x.Memory.Ptr() + driver.Ptr(x.Word(kind, rank))
}

// In returns where a rank's slot is for a chunk, out where the common one is.
func (x *Exchange) In(rank int, chunk uint64) int {
	return RoundUp(x.Size*WordKinds*exchangeLine, SlotAlign) + (rank*x.Slots+x.Slot(chunk))*x.Chunk
}

func (x *Exchange) Out(chunk uint64) int { return x.In(x.Size, chunk) }

func (x *Exchange) Slot(chunk uint64) int { return int(chunk % uint64(x.Slots)) }

func (x *Exchange) Ptr(at int) driver.Ptr { return x.Memory.Ptr() + driver.Ptr(at) }

func (x *Exchange) load(at int) uint32 {
	if x.Memory == nil {
		return driver.LoadWord(x.Region.Bytes, at)
	}
	return x.Memory.Load32(at)
}

func (x *Exchange) store(at int, v uint32) {
	if x.Memory == nil {
		driver.StoreWord(x.Region.Bytes, at, v)
		return
	}
	x.Memory.Store32(at, v)
}

// All reports whether the words of all ranks have counted to n.
func (x *Exchange) All(kind int, n uint64) bool {
	for r := range x.Size {
		if !driver.AtLeast.Holds(x.load(x.Word(kind, r)), uint32(n)) {
			return false
		}
	}
	return true
}

func (x *Exchange) Has(kind int, n uint64) bool {
	return driver.AtLeast.Holds(x.load(x.Word(kind, x.Rank)), uint32(n))
}

func (x *Exchange) Count(kind int, n uint64) { x.store(x.Word(kind, x.Rank), uint32(n)) }

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

// Call tells the other ranks at which operation this one is: its number, its first chunk, and its
// fingerprint. Called returns what another rank has told.
//
// The others may go on to the next operation before a rank has looked: its crew may have combined
// its shares before. They do not go on to the one after that.
func (x *Exchange) Call(number, chunk uint64, c board.Said) {
	at := x.Said(x.Rank, number)
	for i, w := range c {
		driver.StoreWord(x.Region.Bytes, at+8*i, uint32(w))
		driver.StoreWord(x.Region.Bytes, at+8*i+4, uint32(w>>32))
	}
	driver.StoreWord(x.Region.Bytes, x.Word(WordCalled, x.Rank), uint32(chunk+1))
}

func (x *Exchange) Called(rank int, number uint64) (c board.Said) {
	at := x.Said(rank, number)
	for i := range c {
		c[i] = uint64(driver.LoadWord(x.Region.Bytes, at+8*i)) | uint64(driver.LoadWord(x.Region.Bytes, at+8*i+4))<<32
	}
	return c
}

// Met reports whether all ranks are at the operation that begins with a chunk.
func (x *Exchange) Met(chunk uint64) bool {
	for r := range x.Size {
		if !driver.AtLeast.Holds(driver.LoadWord(x.Region.Bytes, x.Word(WordCalled, r)), uint32(chunk+1)) {
			return false
		}
	}
	return true
}

func (x *Exchange) Said(rank int, number uint64) int {
	return x.Word(WordCalled, rank) + 4 + int(number%2)*len(board.Said{})*8
}

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

// show tells the other ranks which device this one has.
func (x *Exchange) show() error {
	v, err := x.D.Device(x.Dev)
	if err != nil {
		return err
	}
	uuid := v.Info().UUID
	at := x.Word(WordGo, x.Rank) + uuidAt
	for i := 0; i < len(uuid); i += 4 {
		driver.StoreWord(x.Region.Bytes, at+i, binary.NativeEndian.Uint32(uuid[i:]))
	}
	x.device = v
	return nil
}

// Small finds out whether there is a kernel for small operations, once all ranks have
// shown their devices. Where there is none the operations do without, and Explain says why.
func (x *Exchange) Small() error {
	if x.asked {
		return nil
	}
	if x.device == nil {
		if err := x.show(); err != nil {
			return err
		}
	}
	seen := make(map[[16]byte]bool)
	for r := range x.Size {
		var uuid [16]byte
		at := x.Word(WordGo, r) + uuidAt
		for i := 0; i < len(uuid); i += 4 {
			binary.NativeEndian.PutUint32(uuid[i:], driver.LoadWord(x.Region.Bytes, at+i))
		}
		if uuid == [16]byte{} {
			return nil
		}
		seen[uuid] = true
	}
	x.asked = true
	if len(seen) < x.Size {
		err := fmt.Errorf("the %d ranks share %d devices", x.Size, len(seen))
		x.Lacks.Store(&err)
		return nil
	}
	m, err := x.device.Load(kernels.PTX)
	if err != nil {
		x.Lacks.Store(&err)
		return nil
	}
	f, err := m.Function(kernels.Exchange)
	if err != nil {
		x.Lacks.Store(&err)
		return m.Close()
	}
	x.module, x.Kernel = m, f
	return nil
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
	if x.module != nil {
		err = x.module.Close()
	}
	if x.Memory != nil {
		err = errors.Join(err, x.Region.Unlock(x.D))
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

// Arrival is the word that all counters of arrivals write, so that they count in order. The
// kernels count on another stream than the copies do; that is the one on which both count what
// was taken.
func (x *Exchange) Arrival() driver.Access {
	return driver.Writes(x.WordPtr(WordArrived, x.Rank)+exchangeLine/2, 4)
}
