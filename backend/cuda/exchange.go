package cuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/reduce"
)

// exchange is page-locked memory that the ranks of a host share, through which
// they all-reduce: each rank's device copies a chunk into the rank's slot, each
// rank's CPU combines its share of the chunk out of all ranks' slots into one that
// is common to all, and each device copies that. Nothing is copied within the host.
//
// Words order the ranks, which count chunks from the first one on, as all ranks do
// alike. A rank's slot is written again when all ranks have combined what was
// there, the common slot when all devices have copied it.
//
// A rank that fails lets its streams go on, which then write slots that others may
// still be combining. It says so first, in a word. Who has seen all ranks' shares of
// a chunk looks at these words before the chunk leaves the host, so that no
// operation ends well with such a chunk.
type exchange struct {
	why error // why the ranks have none; what follows is not set then

	rank, size int
	slots      int
	chunk      int // bytes of a slot
	region     *region
	d          driver.Driver
	crew       *crew
	eager      bool           // there is a CPU for everybody who waits
	left       []atomic.Int32 // parts of the share that are still to be combined, by slot
	members    []member       // what those who combine keep

	// unlocked is why this rank could not page-lock the memory: its host copies then,
	// as it does for tensors that are not contiguous, and the others need not know.
	unlocked atomic.Pointer[error]

	memory driver.HostMemory // once it is page-locked; guarded by Backend.calls until the first operation
	next   uint64            // the chunk that comes next; guarded by Backend.calls
	number uint64            // of the operation that comes next; guarded by Backend.calls
	dev    int               // whose streams count, -1 before the first; guarded by Backend.calls

	// kernel does all that the device does for a small operation. There is none while the
	// ranks do not know, and where they do not have, a device each: one that waits in a
	// kernel keeps those of other processes waiting. Guarded by Backend.calls.
	kernel driver.Function
	module driver.Module
	asked  bool                  // whether there is one
	lacks  atomic.Pointer[error] // why there is none, for Explain
	device driver.Device         // dev, once this rank has shown it

	mu   sync.Mutex
	free []*shared // for later operations
}

// member is what one of a crew keeps from operation to operation.
type member struct {
	block    []byte // of reduceBlock bytes, what is being combined
	scratch  []byte // likewise, once something needs it
	accesses []driver.Access
}

// The words of the exchange, one of each kind for each rank.
const (
	wordArrived = iota // chunks that have come from the rank's device
	wordDone           // chunks whose share the rank has combined
	wordTaken          // chunks that the rank's device has copied
	wordGo             // chunks that the rank's host has let a kernel copy; the device's UUID follows
	wordCalled         // one more than the first chunk of the operation that the rank is at; what it calls follows
	wordFailed         // not zero when the rank's streams do not wait for its host any more
	wordKinds
)

// uuidAt is where in the line of wordGo a rank has its device's UUID.
const uuidAt = 16

// exchangeLine keeps words apart: processors fetch lines of 64 bytes in pairs.
const exchangeLine = 128

// slotAlign is what slots are aligned to, shareAlign the shares of a chunk.
const (
	slotAlign  = 4096
	shareAlign = 128
)

// firstChunk is the number of the first chunk; a variable for tests. Words have the
// last 32 bits of such numbers.
var firstChunk uint64

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// sharedBytes is how much memory there is at least. A device writes memory at half its speed
// or less while CPUs have it in caches of their own, as they have what they have combined not long ago:
// of two ranks on 32 CPUs with 2 MiB of second-level cache each, an all-reduce of 256 MiB took 19.6 ms through
// 24 MiB, 10.3 through 48, 9.2 through 96 and 8.5 through 144.
const sharedBytes = 128 << 20

// sharedSlots returns how many slots a rank has.
func sharedSlots(size, chunk int) int {
	const most = 64
	return min(max(sharedBytes/((size+1)*roundUp(chunk, slotAlign)), defaultSlots), most)
}

// exchangeBytes returns how large the memory is.
func exchangeBytes(size, slots, chunk int) int {
	return roundUp(size*wordKinds*exchangeLine, slotAlign) + (size+1)*slots*roundUp(chunk, slotAlign)
}

// unshared returns why this rank cannot all-reduce through shared memory.
func (b *Backend) unshared() error {
	o, ok := b.options.CPUOptions.(gloo.Options)
	switch {
	case b.missing != nil:
		return b.missing
	case b.options.CPU != gloo.Name || !ok:
		return fmt.Errorf("the host's part is done by backend %q, with options of its own", b.options.CPU)
	case o.Sums == gloo.SumsExact:
		return errors.New("sums are to be exact")
	}
	return nil
}

// share makes the exchange, with the other ranks. If one of them cannot, there is
// none on any rank, and all know why. An error is one of telling each other.
func (b *Backend) share(ctx context.Context, timeout time.Duration) error {
	if b.size == 1 {
		return nil
	}
	if !b.oneHost {
		b.exchange.Store(&exchange{why: errors.New("the ranks are on several hosts")})
		return nil
	}
	bytes := exchangeBytes(b.size, b.sharedSlots, b.options.Chunk)
	why := b.unshared()
	var r *region
	if why == nil && b.rank == 0 {
		r, why = newRegion(bytes)
	}
	mine := make([]byte, regionNameLen)
	if r != nil {
		copy(mine, r.name)
	}
	why, all, err := b.hear(ctx, timeout, told(why, mine))
	if err == nil && why == nil {
		if b.rank != 0 {
			r, why = openRegion(string(trimZeros(all[0])), bytes)
		}
		var x *exchange
		if why == nil {
			x = b.newExchange(r)
		}
		if why, _, err = b.hear(ctx, timeout, told(why, nil)); err == nil && why == nil {
			// Who opens the memory has done so.
			b.exchange.Store(x)
			return r.hide()
		}
	}
	if r != nil {
		err = errors.Join(err, r.leave())
	}
	if err == nil {
		b.exchange.Store(&exchange{why: why})
	}
	return err
}

func (b *Backend) newExchange(r *region) *exchange {
	cpus := usableCPUs() / b.size
	x := &exchange{
		rank: b.rank, size: b.size, slots: b.sharedSlots, chunk: roundUp(b.options.Chunk, slotAlign), region: r, d: b.driver,
		eager: cpus >= eagerCPUs, left: make([]atomic.Int32, b.sharedSlots), next: firstChunk, dev: -1,
	}
	x.crew = newCrew(crewOf(cpus), x.eager)
	x.members = make([]member, x.crew.n)
	for kind := wordArrived; kind <= wordGo; kind++ {
		driver.StoreWord(r.bytes, x.word(kind, x.rank), uint32(firstChunk))
	}
	driver.StoreWord(r.bytes, x.word(wordCalled, x.rank), uint32(firstChunk))
	return x
}

// usable returns the exchange that a backend's ranks have, nil if they have none.
func (b *Backend) usable() *exchange {
	if x := b.exchange.Load(); x != nil && x.why == nil {
		return x
	}
	return nil
}

// word returns where a rank's word is.
func (x *exchange) word(kind, rank int) int { return (kind*x.size + rank) * exchangeLine }

func (x *exchange) wordPtr(kind, rank int) driver.Ptr {
	return x.memory.Ptr() + driver.Ptr(x.word(kind, rank))
}

// in returns where a rank's slot is for a chunk, out where the common one is.
func (x *exchange) in(rank int, chunk uint64) int {
	return roundUp(x.size*wordKinds*exchangeLine, slotAlign) + (rank*x.slots+x.slot(chunk))*x.chunk
}

func (x *exchange) out(chunk uint64) int { return x.in(x.size, chunk) }

func (x *exchange) slot(chunk uint64) int { return int(chunk % uint64(x.slots)) }

func (x *exchange) ptr(at int) driver.Ptr { return x.memory.Ptr() + driver.Ptr(at) }

func (x *exchange) load(at int) uint32 {
	if x.memory == nil {
		return driver.LoadWord(x.region.bytes, at)
	}
	return x.memory.Load32(at)
}

func (x *exchange) store(at int, v uint32) {
	if x.memory == nil {
		driver.StoreWord(x.region.bytes, at, v)
		return
	}
	x.memory.Store32(at, v)
}

// all reports whether the words of all ranks have counted to n.
func (x *exchange) all(kind int, n uint64) bool {
	for r := range x.size {
		if !driver.AtLeast.Holds(x.load(x.word(kind, r)), uint32(n)) {
			return false
		}
	}
	return true
}

func (x *exchange) has(kind int, n uint64) bool {
	return driver.AtLeast.Holds(x.load(x.word(kind, x.rank)), uint32(n))
}

func (x *exchange) count(kind int, n uint64) { x.store(x.word(kind, x.rank), uint32(n)) }

// fail says that this rank's streams go on by themselves, before they do.
func (x *exchange) fail() { driver.StoreWord(x.region.bytes, x.word(wordFailed, x.rank), 1) }

// failed reports whether a rank has said so.
func (x *exchange) failed() bool {
	for r := range x.size {
		if driver.LoadWord(x.region.bytes, x.word(wordFailed, r)) != 0 {
			return true
		}
	}
	return false
}

// call tells the other ranks what this one is at, the operation with a number, which
// begins with a chunk; called what another rank has told.
//
// A rank whose crew has combined its shares may not have looked yet when the others
// go on to the next operation, but has when they go on to the one after that.
func (x *exchange) call(number, chunk uint64, c said) {
	at := x.said(x.rank, number)
	for i, w := range c {
		driver.StoreWord(x.region.bytes, at+8*i, uint32(w))
		driver.StoreWord(x.region.bytes, at+8*i+4, uint32(w>>32))
	}
	driver.StoreWord(x.region.bytes, x.word(wordCalled, x.rank), uint32(chunk+1))
}

func (x *exchange) called(rank int, number uint64) (c said) {
	at := x.said(rank, number)
	for i := range c {
		c[i] = uint64(driver.LoadWord(x.region.bytes, at+8*i)) | uint64(driver.LoadWord(x.region.bytes, at+8*i+4))<<32
	}
	return c
}

// met reports whether all ranks are at the operation that begins with a chunk.
func (x *exchange) met(chunk uint64) bool {
	for r := range x.size {
		if !driver.AtLeast.Holds(driver.LoadWord(x.region.bytes, x.word(wordCalled, r)), uint32(chunk+1)) {
			return false
		}
	}
	return true
}

func (x *exchange) said(rank int, number uint64) int {
	return x.word(wordCalled, rank) + 4 + int(number%2)*len(said{})*8
}

// share returns the bytes of n that part i of so many has.
func share(n, i, parts int) (lo, hi int) {
	each := roundUp((n+parts-1)/parts, shareAlign)
	return min(i*each, n), min((i+1)*each, n)
}

// reduceBlock is how many bytes are combined at a time, so that what has been
// combined stays in the first-level cache until the last rank's have been added. From
// there it goes past the caches: of 16 MiB an all-reduce of two ranks took 0.88 ms when
// devices fetched it out of them, so it takes 0.59.
const reduceBlock = 16 << 10

// combine combines bytes lo to hi of a chunk of all ranks, in rank order.
func (x *exchange) combine(chunk uint64, red *backend.Reduction, lo, hi int, m *member) {
	if lo == hi {
		return
	}
	if _, ok := x.d.(driver.Observer); ok && x.memory != nil {
		all := m.accesses[:0]
		for r := range x.size {
			all = append(all, driver.Reads(x.ptr(x.in(r, chunk)+lo), hi-lo))
		}
		m.accesses = append(all, driver.Writes(x.ptr(x.out(chunk)+lo), hi-lo))
		driver.HostAccess(x.d, "combining", m.accesses...)
	}
	if m.block == nil {
		m.block = make([]byte, reduceBlock)
	}
	if red.Before != nil && m.scratch == nil {
		m.scratch = make([]byte, reduceBlock)
	}
	mem := x.region.bytes
	for ; lo < hi; lo += reduceBlock {
		n := min(reduceBlock, hi-lo)
		out := m.block[:n]
		for r := range x.size {
			in := mem[x.in(r, chunk)+lo:][:n]
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
		reduce.Uncached(mem[x.out(chunk)+lo:][:n], out)
	}
}

// prepare page-locks the memory, once. The caller holds Backend.calls.
func (x *exchange) prepare() {
	if x.memory != nil || x.unlocked.Load() != nil {
		return
	}
	m, err := x.region.lock(x.d)
	if err != nil {
		err = fmt.Errorf("page-locking %d bytes that the ranks share: %w", len(x.region.bytes), err)
		x.unlocked.Store(&err)
		return
	}
	x.memory = m
}

// show tells the other ranks which device this one has.
func (x *exchange) show() error {
	v, err := x.d.Device(x.dev)
	if err != nil {
		return err
	}
	uuid := v.Info().UUID
	at := x.word(wordGo, x.rank) + uuidAt
	for i := 0; i < len(uuid); i += 4 {
		driver.StoreWord(x.region.bytes, at+i, binary.NativeEndian.Uint32(uuid[i:]))
	}
	x.device = v
	return nil
}

// small finds out whether there is a kernel for small operations, once all ranks have
// shown their devices. Where there is none the operations do without, and Explain says why.
func (x *exchange) small() error {
	if x.asked {
		return nil
	}
	if x.device == nil {
		if err := x.show(); err != nil {
			return err
		}
	}
	seen := make(map[[16]byte]bool)
	for r := range x.size {
		var uuid [16]byte
		at := x.word(wordGo, r) + uuidAt
		for i := 0; i < len(uuid); i += 4 {
			binary.NativeEndian.PutUint32(uuid[i:], driver.LoadWord(x.region.bytes, at+i))
		}
		if uuid == [16]byte{} {
			return nil
		}
		seen[uuid] = true
	}
	x.asked = true
	if len(seen) < x.size {
		err := fmt.Errorf("the %d ranks share %d devices", x.size, len(seen))
		x.lacks.Store(&err)
		return nil
	}
	m, err := x.device.Load(kernels.PTX)
	if err != nil {
		x.lacks.Store(&err)
		return nil
	}
	f, err := m.Function(kernels.Exchange)
	if err != nil {
		x.lacks.Store(&err)
		return m.Close()
	}
	x.module, x.kernel = m, f
	return nil
}

// rest ends the goroutines that combine, which have nothing to do any more.
func (x *exchange) rest() {
	if x != nil {
		x.crew.close()
	}
}

// close frees everything. Nothing uses it any more.
func (x *exchange) close() error {
	if x == nil {
		return nil
	}
	x.rest()
	var err error
	if x.module != nil {
		err = x.module.Close()
	}
	if x.memory != nil {
		err = errors.Join(err, x.region.unlock(x.d))
	}
	return errors.Join(err, x.region.leave())
}
