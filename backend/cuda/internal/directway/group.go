// Package directway has operations that one kernel of each rank does, on one stream (decision 25).
//
// A file calls only those below it:
//
//   - message: a send or a receive becomes a Call in the queue of its lane
//   - call: a collective becomes a Call, and its commands
//   - data, tree: the commands of each collective
//   - inside: kernels of one of several clusters
//   - group: the ranks connect, and part
//   - graph: calls that are captured
//   - bring: elements in order, and back
//   - memory: where peers write straight
//   - lanes: the lanes between ranks
//   - end: the life of a Call: under way, watched, blamed, ended
//   - sparse: sums of sparse tensors
//   - room, words: room for kernels on a device; words in the other ranks' pages
//   - commands: the commands of a stream, and how many there may be
//   - uses, members: memory that operations have in common; the ranks that take part
package directway

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/board"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/group"
	"github.com/c10d-go/c10d/backend/cuda/internal/kernels"
	"github.com/c10d-go/c10d/backend/cuda/internal/region"
	"github.com/c10d-go/c10d/backend/cuda/internal/registered"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/work"
)

// Group is a group's direct work: the memory that the ranks' kernels write, the kernels, and
// the operations that have not ended.
type Group struct {
	B *group.Engine

	// Members are the ranks of the engine that take part, this one among them. Nil means all.
	Members []int
	heard   int // how often connect has heard the others

	Forbidden  error                         // why the caller wants none
	Share      bool                          // some all-reduces go through memory that the ranks share all the same
	Ring       bool                          // some calls go round a ring, though all devices may reach each other
	Shared     atomic.Bool                   // ranks share a device
	Split      func(cliques []int)           // is told window.Window.Cliques, while the ranks connect; may be nil
	connecting sync.Mutex                    // held while the ranks connect
	asked      bool                          // they have
	why        error                         // they cannot
	unmeshed   error                         // why kernels do not reach all other devices, if a ring was tried then
	Open       atomic.Pointer[window.Window] // once they have, until it is closed

	Dev    int
	v      driver.Device
	stream driver.Stream         // of operations that are not part of a caller's stream
	others map[int]driver.Stream // by device: for tensors that are on another one
	window *window.Window
	comm   *direct.Comm
	place  directPlace          // where the kernels have room
	blocks int                  // of each kernel, until it is closed
	own    *region.Region       // where the others say that they have let go
	pages  []*region.Region     // the others'
	memory *registered.Registry // nil if the device's streams cannot write words
	lanes  lanes                // for messages
	graphs graphs               // calls that were captured
	turns  turns

	modules []driver.Module
	lister  driver.Function // brings lists in order
	sums    sums            // of sparse tensors

	// Guarded by engine.calls.
	tail *Call  // the last on the group's own stream, if it has no event
	made uint32 // operations

	mu       sync.Mutex
	line     queue    // of collectives
	busy     []*queue // that have operations
	watch    *time.Timer
	watching bool
	away     int           // goroutines that have let go of mu, and use the group or a stream meanwhile: of mark and blame
	pause    time.Duration // until the timer looks again
	closed   bool
	quit     bool // leave has told the others

	// Of Before, kept for the next one.
	uses []driver.Access
	used []bool
}

// Why is what Explain says of operations that are direct work.
const Why = "one kernel of each rank writes into the other ranks' memory"

// WhyRing is Why for operations that go round a ring.
const WhyRing = "one kernel of each rank writes into the next rank's memory"

// fewestAround is from how many ranks on a group that is no mesh looks for a ring, and else for cliques. Three have a
// ring only if one device reaches another one that does not reach it.
const fewestAround = 3

// Keep has the driver load the kernels for so many ranks when it opens devices: no image should be loaded while a stream
// waits. Ring is whether the group asks for a ring.
func Keep(d driver.Driver, ranks int, ring bool) {
	keep := func(image []byte, names ...string) { driver.Keep(d, image, names...) }
	if ring || ranks > fewestAround {
		direct.RingImage(keep)
	}
	if ranks <= window.MostRanks {
		direct.Images(ranks, keep)
	}
	driver.Keep(d, kernels.Lists, kernels.List)
	driver.Keep(d, kernels.COO, kernels.CooNames...)
}

// Can returns why the group has no direct work, as far as this needs no device.
func (d *Group) Can() error {
	b := d.B
	switch {
	case d.Size() < 2 || d.Size() > window.MostRingRanks:
		return errRanks
	case d.Forbidden != nil:
		return d.Forbidden
	}
	return b.Unreachable
}

var (
	errRanks     = fmt.Errorf("it is for 2 to %d ranks", window.MostRingRanks)
	errMeshRanks = fmt.Errorf("it is for 2 to %d ranks", window.MostRanks)
)

// CanMesh is Can for calls whose kernels reach all other devices.
func (d *Group) CanMesh() error {
	if n := d.Size(); n < 2 || n > window.MostRanks {
		return errMeshRanks
	}
	return d.Can()
}

// Mesh returns nil if the ranks have connected and kernels reach all other devices. Otherwise they may reach the
// next one in a ring.
func (d *Group) Mesh() error {
	if err := d.CanMesh(); err != nil {
		return err
	}
	err := d.Has()
	if err == group.ErrNotAsked {
		return err
	}
	return cmp.Or(d.unmeshed, err)
}

// Order returns the ranks in the order of the group's ring, nil if there is none.
func (d *Group) Order() []int {
	d.connecting.Lock()
	defer d.connecting.Unlock()
	if d.comm == nil {
		return nil
	}
	return d.comm.Order()
}

// Ready returns nil if the ranks are connected. The first call connects them: all come to it in the order of the group's
// collectives.
func (d *Group) Ready(ctx context.Context, op work.OpType, dev int, print board.Call) error {
	if d.Open.Load() != nil {
		return nil
	}
	if err := group.Captured(ctx, op); err != nil {
		return err
	}
	d.connecting.Lock()
	defer d.connecting.Unlock()
	if !d.asked {
		if err := d.meet(ctx, op, dev, print); err != nil {
			return err
		}
	}
	return d.why
}

// Has returns nil if the ranks are connected, else why not, group.ErrNotAsked if no call before has asked for kernels. It
// asks nobody.
func (d *Group) Has() error {
	if d.Open.Load() != nil {
		return nil
	}
	d.connecting.Lock()
	defer d.connecting.Unlock()
	if !d.asked {
		return group.ErrNotAsked
	}
	return d.why
}

// meet connects the ranks, in a call. The caller holds connecting.
func (d *Group) meet(ctx context.Context, op work.OpType, dev int, print board.Call) error {
	err := d.B.Together(ctx, op, print, func(q *group.Operation) (err error) {
		d.why, err = d.connect(q, dev)
		return err
	})
	if err != nil {
		// The group has ended; what comes next says so.
		return errors.Join(err, d.giveUp())
	}
	d.opened()
	return nil
}

// opened notes that the ranks have connected, or cannot.
func (d *Group) opened() {
	d.asked = true
	if d.why == nil {
		d.Open.Store(d.window)
		if d.B.Broken() != nil {
			d.window.Abort()
		}
	}
}

// connect makes this rank's window and kernels, and opens the other ranks' memory. If that is not
// possible it returns why; all ranks return the same. An error ends the group.
func (d *Group) connect(q *group.Operation, dev int) (why, err error) {
	b := d.B
	tell := func(why error, mine []byte) (error, [][]byte, error) { return d.hear(q, why, mine) }
	mine := make([]byte, 16+region.NameLen)
	if why = d.Forbidden; why == nil {
		why = d.prepare(dev)
	}
	if why == nil {
		why = b.SeesWords(q.Ctx, q.Left(), dev)
	}
	if why == nil {
		binary.LittleEndian.PutUint32(mine, directChannels(d.v, d.Size()))
		binary.LittleEndian.PutUint32(mine[4:], uint32(d.blocks))
		binary.LittleEndian.PutUint32(mine[8:], uint32(d.lanes.channels))
		binary.LittleEndian.PutUint32(mine[12:], ringChannels(d.v, d.Size()))
		copy(mine[16:], d.own.Name)
	}
	reason, all, err := tell(why, mine)
	o := window.Options{Driver: b.Driver, Device: d.v, Rank: d.Rank(), Ranks: d.Size()}
	ring := 0
	if err == nil && reason == nil {
		least := func(at int) (n int) {
			for r, b := range all {
				if x := int(binary.LittleEndian.Uint32(b[at:])); r == 0 || x < n {
					n = x
				}
			}
			return n
		}
		d.keepPlace(least(4))
		d.keepLanes(least(8))
		o.Channels, o.LaneChannels = least(0), d.lanes.channels
		if ring = least(12); d.Ring {
			o.RingChannels = ring
		}
		if why = d.openPages(all); why == nil && d.Size() <= window.MostRanks {
			d.window, why = window.New(q.Ctx, o)
		}
		reason, _, err = tell(why, nil)
	}
	if d.own != nil {
		err = errors.Join(err, d.own.Hide()) // who opens it has done so
	}
	if err == nil && reason == nil {
		mesh := errMeshRanks
		if d.window != nil {
			mesh, err = d.reach(q, tell)
		}
		reason = mesh
		around := d.Members == nil && d.Size() >= fewestAround && !d.Shared.Load()
		if err == nil && mesh != nil && around {
			d.unmeshed = mesh
			o.Next, o.RingChannels = true, ring
			reason, err = d.reachNext(q, tell, o)
		}
	}
	if err == nil && reason == nil {
		err = d.settle(tell)
	}
	var freed error
	if err == nil && reason != nil {
		if w := d.window; w != nil && w.Cliques() != nil && d.Split != nil {
			d.Split(w.Cliques())
		}
		freed = d.release()
	}
	if err == nil && d.Members == nil && (reason != nil || d.unmeshed != nil || d.Share) {
		// All-reduces go through the host, or some do.
		err = b.Share(q.Ctx, q.Left())
	}
	return reason, errors.Join(err, freed)
}

// reach opens the memory of the other ranks, or of the next one, and loads the kernels. If a rank cannot, nothing is
// left open, and all return why.
func (d *Group) reach(q *group.Operation, tell window.Exchange) (reason, err error) {
	reason, err = d.window.Connect(q.Ctx, tell)
	if err == nil && reason == nil {
		reason, _, err = tell(d.load(), nil)
	}
	if err == nil && reason != nil {
		// All have detached before one of them frees its memory.
		why := errors.Join(d.closeMemory(), d.window.Detach())
		_, _, err = tell(nil, nil)
		err = errors.Join(err, why)
	}
	return reason, err
}

// load loads the kernels, and makes what they use besides the window.
func (d *Group) load() (err error) {
	_, _, shared := d.window.SharedDevice()
	d.Shared.Store(shared)
	if d.comm, err = direct.New(d.window, direct.Options{Blocks: d.blocks, Limit: directLimit}); err != nil {
		return err
	}
	if err = d.loadOthers(); err == nil && d.v.Info().StreamValues && !d.window.NextOnly() {
		pages := slices.Insert(slices.Clone(d.pages), d.Rank(), d.own)
		d.memory, err = registered.New(d.window, pages, region.PageSize)
	}
	return err
}

// reachNext is reach for a group that is no mesh. It frees what the group has made for one.
func (d *Group) reachNext(q *group.Operation, tell window.Exchange, o window.Options) (reason, err error) {
	d.keepLanes(0)
	if err := d.drop(); err != nil {
		return nil, err
	}
	var why error
	d.window, why = window.New(q.Ctx, o)
	if reason, _, err = tell(why, nil); err == nil && reason == nil {
		reason, err = d.reach(q, tell)
	}
	return reason, err
}

// pageBytes is what a rank shares with the others: a page of words, and its registry.
const pageBytes = region.PageSize + registered.Bytes

// directLimit is how long a kernel waits for its peer if nobody aborts it. The rank aborts it when
// the operation's time is over, and a process that dies takes its kernels along.
const directLimit = 24 * time.Hour

// prepare makes what a rank has of its own, but the window.
func (d *Group) prepare(dev int) (err error) {
	d.Dev = dev
	if d.v, err = d.B.Driver.Device(dev); err != nil {
		return err
	}
	if err = d.takePlace(d.v); err != nil {
		return err
	}
	d.takeLanes()
	if d.stream, err = d.v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d direct", d.B.Rank)}); err != nil {
		return err
	}
	if d.own, err = region.New(pageBytes); err != nil {
		return fmt.Errorf("a page of words: %w", err)
	}
	return nil
}

// loadOthers loads the kernels that bring lists of tensors in order, and those that add sparse tensors.
func (d *Group) loadOthers() error {
	m, all, err := kernels.Open(d.v, kernels.Lists, kernels.List)
	if err == nil {
		d.modules, d.lister = append(d.modules, m), all[kernels.List]
		m, d.sums.kernels, err = kernels.LoadCoo(d.v)
	}
	if err == nil {
		d.modules = append(d.modules, m)
	}
	return err
}

func (d *Group) openPages(all [][]byte) error {
	for r, b := range all {
		if r == d.Rank() {
			continue
		}
		p, err := region.Open(string(bytes.TrimRight(b[16:][:region.NameLen], "\x00")), pageBytes)
		if err != nil {
			return fmt.Errorf("the page of rank %d: %w", d.Of(r), err)
		}
		d.pages = append(d.pages, p)
	}
	return nil
}

// Abort ends the waits of this rank's kernels: the group has failed.
func (d *Group) Abort() {
	if w := d.Open.Load(); w != nil {
		w.Abort()
		if d.mu.TryLock() { // who has it may be the caller, and sweeps
			d.leave()
			d.mu.Unlock()
		}
	}
}

// Close frees everything. What another rank may still write stays.
func (d *Group) Close() error {
	d.connecting.Lock()
	defer d.connecting.Unlock()
	d.mu.Lock()
	d.closed = true
	if d.watch != nil {
		d.watch.Stop()
	}
	d.mu.Unlock()
	if d.Open.Load() == nil {
		d.asked, d.why = true, work.ErrClosed
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), group.CloseLimit)
	defer cancel()
	if n := d.stuck(ctx); n > 0 {
		d.B.InUse.Store(true)
		d.keepPlace(0)
		d.keepLanes(0)
		return fmt.Errorf("cuda: %d operations that failed have not left the device after %v, whose memory stays", n, group.CloseLimit)
	}
	if s := d.sums.stream; s != nil && !group.Drained(ctx, []driver.Stream{s}) {
		d.B.InUse.Store(true)
		return fmt.Errorf("cuda: a sparse all_reduce that failed has not left the device after %v, and its memory stays",
			group.CloseLimit)
	}
	d.line.forget(d)
	d.endGraphs()
	limit := group.CloseLimit
	if d.B.Broken() != nil || d.B.CPUErr() != nil {
		limit = group.Linger
	}
	err := d.letGo(limit)
	d.mu.Lock() // the timer may be at leave
	d.Open.Store(nil)
	d.mu.Unlock()
	d.why = work.ErrClosed
	return errors.Join(err, d.release())
}

// giveUp frees what an attempt to connect has made. A rank that has come further may have started kernels, which
// write to this rank's memory.
func (d *Group) giveUp() (err error) {
	if d.comm != nil {
		err = d.letGo(group.Linger)
	}
	return errors.Join(err, d.release())
}

// letGo lets go of the other ranks' memory, and waits until they have let go of this rank's. This rank's kernels have
// ended.
func (d *Group) letGo(limit time.Duration) error {
	err := errors.Join(d.closeMemory(), d.window.Detach())
	d.leaveLanes()
	for _, p := range d.pages {
		word(p, d.Rank(), wordGone).Store(d.made + 1)
	}
	if !d.gone(limit) {
		d.window, d.sums.own = nil, nil // the memory is kept for good: nobody can tell whether the others will let go
	}
	return err
}

// stuck waits for the kernels of operations that have failed, and for goroutines that are at one without the lock. It
// returns how many operations have not ended when ctx has.
func (d *Group) stuck(ctx context.Context) int {
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		d.mu.Lock()
		d.sweepAll()
		d.mark()
		n, away := len(d.open()), d.away
		d.mu.Unlock()
		if n+away == 0 || ctx.Err() != nil {
			return n
		}
		time.Sleep(pause)
	}
}

// gone waits until all other ranks have let go of this rank's memory; false if that takes too long.
func (d *Group) gone(limit time.Duration) bool {
	for end := time.Now().Add(limit); ; time.Sleep(200 * time.Microsecond) {
		left := 0
		for r := range d.Size() {
			if r != d.Rank() && word(d.own, r, wordGone).Load() == 0 {
				left++
			}
		}
		if left == 0 || time.Now().After(end) {
			return left == 0
		}
	}
}

// closeMemory lets go of the other ranks' memory, besides their windows.
func (d *Group) closeMemory() error {
	err := d.sums.close()
	if d.memory != nil {
		err = errors.Join(err, d.memory.Close())
		d.memory = nil
	}
	return err
}

// release frees what is there; nothing uses it any more.
func (d *Group) release() error {
	d.keepPlace(0)
	d.freeGraphs()
	if d.turns.m != nil {
		d.B.Scratch.Put(d.Dev, d.turns.m)
		d.turns = turns{}
	}
	errs := []error{d.closeLanes(), d.drop()}
	for _, p := range append(d.pages, d.own) {
		if p != nil {
			errs = append(errs, p.Leave())
		}
	}
	if d.stream != nil {
		errs = append(errs, d.stream.Close())
	}
	for _, s := range d.others {
		errs = append(errs, s.Close())
	}
	d.pages, d.own, d.stream, d.others = nil, nil, nil, nil
	return errors.Join(errs...)
}

// drop frees the window and what uses it.
func (d *Group) drop() error {
	errs := []error{d.closeMemory(), d.sums.free()}
	if d.comm != nil {
		errs = append(errs, d.comm.Close())
	}
	errs = append(errs, closeAll(d.modules))
	d.modules, d.lister = nil, nil
	if d.window != nil {
		errs = append(errs, d.window.Close())
	}
	d.comm, d.window = nil, nil
	return errors.Join(errs...)
}

// HasLanes returns nil if messages of tag 0 go from device to device, as far as this rank knows.
func (d *Group) HasLanes() error {
	if err := d.Mesh(); err != nil {
		return err
	}
	d.lanes.mu.Lock()
	defer d.lanes.mu.Unlock()
	switch {
	case d.lanes.state == laneOpen:
		return nil
	case d.lanes.channels == 0:
		return errNoLanes
	}
	return errAnyBefore
}

var (
	errNoLanes   = errors.New("the kernels of messages have no room on a rank's device beside those of collectives and of another group")
	errAnyBefore = errors.New("a rank has received from any rank before the first collective")
)
