package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/gloo"
)

// exchange is page-locked memory that the ranks of a host share, through which
// they all-reduce: each rank's device copies a chunk into the rank's slot, each
// rank's CPU combines its share of the chunk out of all ranks' slots into one that
// is common to all, and each device copies that. Nothing is copied within the host.
//
// Words order the ranks, which count chunks from the first one on, as all ranks do
// alike. A rank's slot is written again when all ranks have combined what was
// there, the common slot when all devices have copied it.
type exchange struct {
	rank, size int
	slots      int
	chunk      int // bytes of a slot
	region     *region
	d          driver.Driver
	crew       *crew
	eager      bool           // there is a CPU for everybody who waits
	left       []atomic.Int32 // parts of the share that are still to be combined, by slot

	memory driver.HostMemory // once it is page-locked; guarded by Backend.calls until then
	next   uint32            // the chunk that comes next; guarded by Backend.calls
	dev    int               // whose streams count, -1 before the first; guarded by Backend.calls
}

// The words of the exchange, one of each kind for each rank.
const (
	wordArrived = iota // chunks that have come from the rank's device
	wordDone           // chunks whose share the rank has combined
	wordTaken          // chunks that the rank's device has copied
	wordKinds
)

// exchangeLine keeps words apart: processors fetch lines of 64 bytes in pairs.
const exchangeLine = 128

// slotAlign is what slots are aligned to, shareAlign the shares of a chunk.
const (
	slotAlign  = 4096
	shareAlign = 128
)

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// exchangeBytes returns how large the memory is.
func exchangeBytes(size, slots, chunk int) int {
	return roundUp(size*wordKinds*exchangeLine, slotAlign) + (size+1)*slots*roundUp(chunk, slotAlign)
}

// offerExchange makes the memory of an exchange, if this rank is who does that, and
// returns its name; "" if there is none.
func (b *Backend) offerExchange() string {
	if b.rank != 0 || !b.exchangeable() {
		return ""
	}
	r, err := newRegion(exchangeBytes(b.size, b.options.Slots, b.options.Chunk))
	if err != nil {
		return "" // all-reduces go by the CPU backend
	}
	b.offered = r
	return r.name
}

// openExchange opens the memory of an exchange. All ranks are on this host.
func (b *Backend) openExchange(name string) {
	if !b.exchangeable() {
		return
	}
	r, err := openRegion(name, exchangeBytes(b.size, b.options.Slots, b.options.Chunk))
	if err != nil {
		return
	}
	cpus := usableCPUs() / b.size
	b.exchange = &exchange{
		rank: b.rank, size: b.size, slots: b.options.Slots, chunk: roundUp(b.options.Chunk, slotAlign), region: r, d: b.driver, dev: -1,
		crew: newCrew(crewOf(cpus)), eager: cpus >= eagerCPUs, left: make([]atomic.Int32, b.options.Slots),
	}
}

// noExchange is for when another rank has none.
func (b *Backend) noExchange() {
	if b.exchange != nil {
		b.exchange.region.leave()
		b.exchange = nil
	}
}

// settleExchange takes the memory's name away, when who opens it has done so.
func (b *Backend) settleExchange() error {
	r := b.offered
	if r == nil {
		return nil
	}
	b.offered = nil
	return errors.Join(r.hide(), r.leave())
}

// exchangeable reports whether the options leave the order of sums to this package.
func (b *Backend) exchangeable() bool {
	o, ok := b.options.CPUOptions.(gloo.Options)
	return b.size > 1 && b.missing == nil && b.options.CPU == gloo.Name && ok && o.Sums != gloo.SumsExact
}

// word returns where a rank's word is.
func (x *exchange) word(kind, rank int) int { return (kind*x.size + rank) * exchangeLine }

func (x *exchange) wordPtr(kind, rank int) driver.Ptr {
	return x.memory.Ptr() + driver.Ptr(x.word(kind, rank))
}

// in returns where a rank's slot is for a chunk, out where the common one is.
func (x *exchange) in(rank int, chunk uint32) int {
	return roundUp(x.size*wordKinds*exchangeLine, slotAlign) + (rank*x.slots+int(chunk%uint32(x.slots)))*x.chunk
}

func (x *exchange) out(chunk uint32) int { return x.in(x.size, chunk) }

func (x *exchange) ptr(at int) driver.Ptr { return x.memory.Ptr() + driver.Ptr(at) }

// all reports whether the words of all ranks have counted to n.
func (x *exchange) all(kind int, n uint32) bool {
	for r := range x.size {
		if !driver.AtLeast.Holds(x.memory.Load32(x.word(kind, r)), n) {
			return false
		}
	}
	return true
}

func (x *exchange) has(kind int, n uint32) bool {
	return driver.AtLeast.Holds(x.memory.Load32(x.word(kind, x.rank)), n)
}

func (x *exchange) store(kind int, n uint32) { x.memory.Store32(x.word(kind, x.rank), n) }

// share returns the bytes of n that part i of so many has.
func share(n, i, parts int) (lo, hi int) {
	each := roundUp((n+parts-1)/parts, shareAlign)
	return min(i*each, n), min((i+1)*each, n)
}

// reduceBlock is how many bytes are combined at a time, so that what has been
// combined stays in the first-level cache until the last rank's have been added.
const reduceBlock = 16 << 10

// combine combines bytes lo to hi of a chunk of all ranks, in rank order.
func (x *exchange) combine(chunk uint32, red *backend.Reduction, lo, hi int, scratch []byte) {
	if lo == hi {
		return
	}
	if _, ok := x.d.(driver.Observer); ok {
		all := make([]driver.Access, 0, x.size+1)
		for r := range x.size {
			all = append(all, driver.Reads(x.ptr(x.in(r, chunk)+lo), hi-lo))
		}
		driver.HostAccess(x.d, "combining", append(all, driver.Writes(x.ptr(x.out(chunk)+lo), hi-lo))...)
	}
	mem := x.memory.Bytes()
	for ; lo < hi; lo += reduceBlock {
		n := min(reduceBlock, hi-lo)
		out := mem[x.out(chunk)+lo:][:n]
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
				in = scratch[:copy(scratch, in)]
				red.Before(in)
			}
			red.Combine(out, in)
		}
		if red.After != nil {
			red.After(out)
		}
	}
}

// prepare page-locks the memory, on the first call. The caller holds Backend.calls.
func (x *exchange) prepare() error {
	if x.memory != nil {
		return nil
	}
	m, err := x.region.lock(x.d)
	if err != nil {
		return fmt.Errorf("page-locking %d bytes that the ranks share: %w", len(x.region.page.bytes), err)
	}
	x.memory = m
	return nil
}

// close frees everything. Nothing uses it any more.
func (x *exchange) close() error {
	if x == nil {
		return nil
	}
	x.crew.close()
	var err error
	if x.memory != nil {
		err = x.region.unlock(x.d)
	}
	return errors.Join(err, x.region.leave())
}

// region is memory that processes of a host share. Ranks of one process have one,
// and page-lock it once for each driver.
type region struct {
	page *page
	name string

	// Guarded by regions.
	uses   int
	locked map[driver.Driver]*lockedRegion
}

type lockedRegion struct {
	memory driver.HostMemory
	uses   int
}

var regions struct {
	sync.Mutex
	by map[string]*region
}

// newRegion makes a region of n bytes. Others open it by its name.
func newRegion(n int) (*region, error) {
	p, err := newPages(n)
	if err != nil {
		return nil, err
	}
	regions.Lock()
	defer regions.Unlock()
	return addRegion(p, p.name), nil
}

// addRegion notes a region; the caller holds regions.
func addRegion(p *page, name string) *region {
	r := &region{page: p, name: name, uses: 1, locked: make(map[driver.Driver]*lockedRegion)}
	if regions.by == nil {
		regions.by = make(map[string]*region)
	}
	regions.by[name] = r
	return r
}

// openRegion opens a region of n bytes.
func openRegion(name string, n int) (*region, error) {
	regions.Lock()
	defer regions.Unlock()
	if r := regions.by[name]; r != nil {
		if len(r.page.bytes) != n {
			return nil, fmt.Errorf("shared memory has %d bytes, want %d", len(r.page.bytes), n)
		}
		r.uses++
		return r, nil
	}
	p, err := openPages(name, n)
	if err != nil {
		return nil, err
	}
	return addRegion(p, name), nil
}

// hide takes the region's name away, when all who may open it have.
func (r *region) hide() error {
	regions.Lock()
	defer regions.Unlock()
	return r.page.hide()
}

// lock page-locks the region for a driver.
func (r *region) lock(d driver.Driver) (driver.HostMemory, error) {
	regions.Lock()
	defer regions.Unlock()
	l := r.locked[d]
	if l == nil {
		m, err := d.RegisterHost(r.page.bytes)
		if err != nil {
			return nil, err
		}
		l = &lockedRegion{memory: m}
		r.locked[d] = l
	}
	l.uses++
	return l.memory, nil
}

func (r *region) unlock(d driver.Driver) error {
	regions.Lock()
	defer regions.Unlock()
	l := r.locked[d]
	if l.uses--; l.uses > 0 {
		return nil
	}
	delete(r.locked, d)
	return l.memory.Close()
}

// unmap frees the memory of a region; a variable for tests of programs that use it
// for too long.
var unmap = (*page).close

// leave ends one use, the last one with the memory.
func (r *region) leave() error {
	regions.Lock()
	defer regions.Unlock()
	if r.uses--; r.uses > 0 {
		return nil
	}
	delete(regions.by, r.name)
	return unmap(r.page)
}

// crew is goroutines that combine parts of a rank's share side by side. They sleep
// while there is nothing to do.
type crew struct {
	n    int
	quit atomic.Bool // what they do is of no use any more

	mu     sync.Mutex
	cond   sync.Cond
	job    func(i int)
	number uint64 // of the job
	busy   int    // who has not done with it
	closed bool
	wg     sync.WaitGroup
}

func newCrew(n int) *crew {
	c := &crew{n: max(n, 1)}
	c.cond.L = &c.mu
	return c
}

// start has the first n of the crew do f. The job before has ended.
func (c *crew) start(n int, f func(i int)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.number == 0 {
		for i := range c.n {
			c.wg.Go(func() { c.member(i) })
		}
	}
	c.number++
	c.quit.Store(false)
	c.job, c.busy = func(i int) {
		if i < n {
			f(i)
		}
	}, c.n
	c.cond.Broadcast()
}

// end waits for the job to end; with stop what is left of it is not done.
func (c *crew) end(stop bool) {
	c.quit.Store(stop)
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.busy > 0 {
		c.cond.Wait()
	}
	c.job = nil
}

func (c *crew) member(i int) {
	for done := uint64(0); ; {
		c.mu.Lock()
		for c.number == done && !c.closed {
			c.cond.Wait()
		}
		f := c.job
		if c.number == done {
			c.mu.Unlock()
			return
		}
		done = c.number
		c.mu.Unlock()
		f(i)
		c.mu.Lock()
		if c.busy--; c.busy == 0 {
			c.cond.Broadcast()
		}
		c.mu.Unlock()
	}
}

func (c *crew) close() {
	c.mu.Lock()
	c.closed = true
	c.cond.Broadcast()
	c.mu.Unlock()
	c.wg.Wait()
}
