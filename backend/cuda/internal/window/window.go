package window

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
)

const (
	// MostRanks is how many ranks a window can connect.
	MostRanks = 8

	// KeyBytes is the place for the key of a slot, and for a word of its data; see SlotBytes for the data.
	KeyBytes = 8

	// MostRegions is how many regions of a rank its peers can map; see Maps.
	MostRegions = 16
)

// SlotBytes returns how much data a slot holds, with so many ranks.
func SlotBytes(ranks int) int {
	if ranks == 2 {
		return 2048
	}
	return 1024
}

// Options is how a Window is made. All ranks need the same Ranks, Channels and Depth.
type Options struct {
	Driver driver.Driver
	Device driver.Device // of Driver

	Rank, Ranks int // Ranks is 2 to MostRanks, or with Next to MostRingRanks

	// Channels is how many warps of a rank can work at a time. 0 means 2048.
	Channels int

	// Depth is the number of slots of a channel, a power of two up to 1024. Two ranks need at least 4, and more
	// ranks 8. 0 means 16 for two ranks, 32 for three or four, and 8 for more. The defaults take 66 MiB of device memory for
	// 2 ranks, 194 MiB for 4 and 114 MiB for 8.
	Depth int

	// LaneChannels is how many warps send a message at a time, on each side of a lane. 0 means
	// that there are no lanes; see Lane.
	LaneChannels int

	// RingChannels is how many warps of a rank work in a ring at a time. 0 means that there is no ring; see Ring.
	RingChannels int

	// Next has a rank map the memory of the next rank in the ring only. Then the ring is all that there is: Channels,
	// Depth and LaneChannels are not used. The other ranks' devices need not be in reach.
	Next bool
}

// depthFor returns the default Options.Depth.
func depthFor(ranks int) int {
	switch {
	case ranks == 2:
		return 16
	case ranks <= 4:
		return 32
	}
	return 8
}

// ChannelBytes returns how much device memory a channel takes with the default Depth.
func ChannelBytes(ranks int) int {
	return (ranks-1)*depthFor(ranks)*(SlotBytes(ranks)+KeyBytes) + MostRanks*4 + 8
}

// LaneChannelBytes returns how much a channel of a lane takes at each end.
func LaneChannelBytes() int { return LaneDepth*(SlotBytes(2)+KeyBytes) + MostRanks*4 + 8 }

// LaneDepth is the number of slots of a channel of a lane.
const LaneDepth = 8

func (o *Options) check() error {
	if o.Driver == nil || o.Device == nil {
		return errors.New("window: Options.Driver and Options.Device are needed")
	}
	most := MostRanks
	if o.Next {
		most, o.Channels, o.Depth, o.LaneChannels = MostRingRanks, 0, 0, 0
	}
	if o.Ranks < 2 || o.Ranks > most || o.Rank < 0 || o.Rank >= o.Ranks {
		return fmt.Errorf("window: rank %d of %d: want 2 to %d ranks", o.Rank, o.Ranks, most)
	}
	if o.RingChannels < 0 || o.RingChannels > 1<<16 || o.Next && o.RingChannels == 0 {
		return fmt.Errorf("window: %d channels of a ring, want 1 to %d, or 0 for none", o.RingChannels, 1<<16)
	}
	if o.Next {
		return nil
	}
	o.Channels, o.Depth = cmp.Or(o.Channels, 2048), cmp.Or(o.Depth, depthFor(o.Ranks))
	if o.Channels < 1 || o.Channels > 1<<16 {
		return fmt.Errorf("window: %d channels, want 1 to %d", o.Channels, 1<<16)
	}
	if o.LaneChannels < 0 || o.LaneChannels > 1<<16 {
		return fmt.Errorf("window: %d channels of a lane, want 0 to %d", o.LaneChannels, 1<<16)
	}
	least := 8
	if o.Ranks == 2 {
		least = 4
	}
	if o.Depth < least || o.Depth > 1024 || o.Depth&(o.Depth-1) != 0 {
		return fmt.Errorf("window: a depth of %d slots, want a power of two from %d to 1024", o.Depth, least)
	}
	return nil
}

// layout is where things are in a rank's memory, as offsets.
type layout struct {
	ring, keys              int // bytes of the ring for one rank
	keysAt, credit, state   int
	failed, total, occupied int // after failed is the count of channels that have ended
	maps                    int // where the regions of the ranks are, MostRegions for each of MostRanks
	tries                   int // where the ranks write when they connect, tryBytes for each of MostRingRanks
	ringAt                  int // what a ring has: slots, flags, counts

	lanes, lanesAt int // what a lane has of slots, then of keys; the first one
	laneKeys       int // within a lane
	counts, countsAt,
	laneState int // what a lane has of credits, then of state; the first one; the state within
}

func (o Options) layout() (l layout) {
	slots := o.Channels * o.Depth // none with Next
	l.ring, l.keys = slots*SlotBytes(o.Ranks), slots*KeyBytes
	l.keysAt = (o.Ranks - 1) * l.ring
	l.lanesAt = l.keysAt + (o.Ranks-1)*l.keys
	l.laneKeys = o.LaneChannels * LaneDepth * SlotBytes(2)
	l.lanes = l.laneKeys + o.LaneChannels*LaneDepth*KeyBytes
	l.credit = l.lanesAt + o.lanes()*l.lanes
	l.state = l.credit + o.Channels*MostRanks*4
	const turns = MostRanks * 4
	l.countsAt = l.state + o.Channels*8 + turns
	l.laneState = o.LaneChannels * MostRanks * 4
	l.counts = l.laneState + o.LaneChannels*8 + turns
	l.failed = l.countsAt + o.lanes()*l.counts
	l.maps = l.failed + 8
	l.tries = l.maps + MostRanks*MostRegions*8
	l.ringAt = (l.tries + MostRingRanks*tryBytes + 255) / 256 * 256
	l.occupied = l.ringAt + o.RingChannels*RingChannelBytes(o.Ranks)
	// Whole pages of the device, so that nothing else lies in what other processes open.
	const page = 2 << 20
	l.total = (l.occupied + page - 1) / page * page
	return l
}

// lanes returns how many lanes end at a rank: one to each other rank, and one from there.
func (o Options) lanes() int {
	if o.LaneChannels == 0 {
		return 0
	}
	return 2 * (o.Ranks - 1)
}

// hostBytes is the page-locked memory of a rank: the words of the collectives, then those of each lane.
func (o Options) hostBytes() int { return (1 + o.lanes()) * hostEach }

// Exchange tells the other ranks why this one cannot go on, nil if it can, and something else of the same length on all
// ranks. All of them call it. It returns a reason of one of them, the same on all, and what else each has told. An error
// means that the ranks cannot talk to each other any more.
type Exchange func(why error, mine []byte) (reason error, all [][]byte, err error)

// Own is what a rank's kernels use of its own memory.
type Own struct {
	Slots, Keys   driver.Ptr // the rings for the tiles of the ranks in turn, this one's left out
	State, Credit driver.Ptr // behind the state is a counter of 4 bytes for each rank, MostRanks of them
	Failed        driver.Ptr // the count of channels that have ended comes after it
	Host          driver.Ptr // the abort word; the report and the number of the last call that has ended come after it
}

// Peer is the part of another rank's memory that is for this rank's kernels.
type Peer struct {
	Slots, Keys, Credit driver.Ptr
}

// Window is one rank's memory and its way to that of the others. Abort and Err may be
// called from any goroutine at any time, the other methods from one at a time.
type Window struct {
	o     Options
	l     layout
	mem   driver.Memory
	host  driver.HostMemory
	opens []driver.Memory // of the other ranks; nil for this one
	owner [16]byte        // this process, as handles have it
	uuids [][16]byte
	peers []int // devices that Reach has enabled
	order []int // of the ring

	cliques []int // if there is none

	connected, closed bool
	busy              bool // the device may still use the memory
	aborted           atomic.Bool
	mu                sync.Mutex // of host, against Close
}

// The words of the host's memory.
const (
	abortWord = 4 * iota
	whyWord
	peerWord
	channelWord
	tileWord
	doneWord
	hostEach = 64
)

// New makes a rank's own memory and clears it. It waits for its device.
func New(ctx context.Context, o Options) (_ *Window, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	w := &Window{o: o, l: o.layout()}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close())
		}
	}()
	if w.mem, err = o.Device.Alloc(w.l.total); err != nil {
		return nil, w.wrap(err, "%d bytes for the rings", w.l.total)
	}
	if w.host, err = o.Driver.AllocHost(o.hostBytes() + 2*tryBytes); err != nil {
		return nil, w.wrap(err, "the abort word")
	}
	if err = w.clear(ctx); err != nil {
		return nil, err
	}
	return w, nil
}

// wrap says which rank and device an error is of.
func (w *Window) wrap(err error, format string, args ...any) error {
	return fmt.Errorf("window: rank %d on device %d: %s: %w", w.o.Rank, w.o.Device.ID().Index, fmt.Sprintf(format, args...), err)
}

// clear brings the rank's own memory to where nothing has been pushed.
func (w *Window) clear(ctx context.Context) error {
	s, err := w.o.Device.NewStream(driver.StreamOptions{Name: fmt.Sprintf("rank %d window", w.o.Rank)})
	if err != nil {
		return w.wrap(err, "a stream to clear the rings")
	}
	defer s.Close()
	err = s.Memset(w.mem.Ptr(), 0xff, w.l.credit)
	if err == nil {
		err = s.Memset(w.mem.Ptr()+driver.Ptr(w.l.credit), 0, w.l.total-w.l.credit)
	}
	if err = cmp.Or(err, w.settle(ctx, s)); err != nil {
		return w.wrap(err, "clearing the rings")
	}
	for at := 0; at < w.o.hostBytes(); at += 4 {
		w.host.Store32(at, 0)
	}
	w.aborted.Store(false)
	return nil
}

// settleLimit bounds how long a failed call waits for what it has enqueued. It is a fill of
// about 100 MiB: less than a millisecond on a device that works.
const settleLimit = 5 * time.Second

// settle waits until a stream has done what it was given. After an error the window is busy if the stream may not
// have done that.
func (w *Window) settle(ctx context.Context, s driver.Stream) error {
	ended := settle(ctx, s)
	if ended != nil {
		late, cancel := context.WithTimeout(context.Background(), settleLimit)
		defer cancel()
		w.busy = settle(late, s) != nil
	}
	return ended
}

func settle(ctx context.Context, s driver.Stream) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	defer e.Release()
	return e.Sync(ctx)
}

// greeting is what a rank tells, after the handle of its memory.
type greeting struct {
	handle driver.MemoryHandle
	told   struct {
		At    uint64    // its memory, for ranks of the same process
		Dev   uint32    // its device
		Alike [4]uint32 // channels, slots, channels of lanes and of the ring
	}
}

// Connect opens the memory of the other ranks. All ranks have to call it, once. If one of them cannot, it returns the
// reason, the same on all ranks. An error is one of the exchange.
func (w *Window) Connect(ctx context.Context, exchange Exchange) (reason, err error) {
	if w.connected || w.closed {
		return nil, w.wrap(errors.New("want a window that was not connected or closed before"), "Connect")
	}
	handle, mine := w.mem.Export()
	if mine != nil {
		handle = driver.MemoryHandle{Len: 1}
	}
	w.owner = handle.Owner
	var g greeting
	g.told.At, g.told.Dev, g.told.Alike = uint64(w.mem.Ptr()), uint32(w.o.Device.ID().Index), w.o.alike()
	b, err := handle.AppendBinary(nil)
	if err == nil {
		b, err = binary.Append(b, binary.LittleEndian, g.told)
	}
	if err != nil {
		return nil, err
	}
	if mine != nil {
		mine = w.wrap(mine, "a handle of the rings")
	}
	reason, told, err := exchange(mine, b)
	if cmp.Or(err, reason) != nil {
		return reason, err
	}
	all, mine := w.greetings(told)
	if mine == nil && !w.o.Next {
		mine = w.openAll(ctx, all)
	}
	reason, _, err = exchange(mine, nil)
	if cmp.Or(err, reason) == nil && w.o.RingChannels > 0 {
		reason, err = w.arrange(ctx, exchange, all)
	}
	if cmp.Or(err, reason) == nil && w.o.Next {
		reason, _, err = exchange(w.openAll(ctx, all), nil)
	}
	if cmp.Or(err, reason) != nil {
		return reason, errors.Join(err, w.Detach())
	}
	w.connected = true
	return nil, nil
}

// alike returns the options that all ranks need alike.
func (o *Options) alike() [4]uint32 {
	return [4]uint32{uint32(o.Channels), uint32(o.Depth), uint32(o.LaneChannels), uint32(o.RingChannels)}
}

// greetings reads what the ranks have told.
func (w *Window) greetings(told [][]byte) ([]greeting, error) {
	w.opens = make([]driver.Memory, w.o.Ranks)
	w.uuids = make([][16]byte, w.o.Ranks)
	all := make([]greeting, w.o.Ranks)
	for r, b := range told {
		g := &all[r]
		if err := g.handle.UnmarshalBinary(b[:driver.MemoryHandleSize]); err != nil {
			return nil, w.wrap(err, "the handle of rank %d", r)
		}
		if _, err := binary.Decode(b[driver.MemoryHandleSize:], binary.LittleEndian, &g.told); err != nil {
			return nil, w.wrap(err, "what rank %d tells", r)
		}
		w.uuids[r] = g.handle.UUID
		if own := w.o.alike(); g.told.Alike != own {
			return nil, w.wrap(errors.New("all ranks need the same Options"),
				"channels, slots, channels of lanes and of the ring are %d, those of rank %d %d", own, r, g.told.Alike)
		}
		if g.handle.Len != uint64(w.l.total) {
			return nil, w.wrap(fmt.Errorf("it has %d bytes, want %d", g.handle.Len, w.l.total), "the memory of rank %d", r)
		}
	}
	w.uuids[w.o.Rank] = w.o.Device.Info().UUID
	return all, nil
}

// openAll opens the memory of the others, or of the next one, and tries the way there.
func (w *Window) openAll(ctx context.Context, all []greeting) (err error) {
	with := w.order
	if w.o.Next {
		with = []int{with[(slices.Index(with, w.o.Rank)+1)%len(with)]}
	} else {
		with = make([]int, 0, len(all))
		for r := range all {
			if r != w.o.Rank {
				with = append(with, r)
			}
		}
	}
	for _, r := range with {
		err = cmp.Or(err, w.open(all, r))
	}
	for _, r := range with {
		if err == nil {
			err = w.try(ctx, r)
		}
	}
	return err
}

// open opens the memory of another rank.
func (w *Window) open(all []greeting, r int) (err error) {
	if w.opens[r], err = w.Reach(all[r].handle, driver.Ptr(all[r].told.At)); err != nil {
		w.opens[r] = nil
		return w.wrap(err, "the memory of rank %d on its device %d", r, all[r].told.Dev)
	}
	return nil
}

// tryBytes is what a rank writes to another one's memory when they connect.
const tryBytes = 64

// try writes to the memory of another rank and reads that back. A device may be said to reach another one and not
// do so: with some IOMMUs and PCIe switches, and in some virtual machines. Then data would be lost, or kernels would
// wait until their time is over.
func (w *Window) try(ctx context.Context, r int) error {
	s, err := w.o.Device.NewStream(driver.StreamOptions{Name: fmt.Sprintf("rank %d try", w.o.Rank)})
	if err != nil {
		return w.wrap(err, "a stream to try the way to rank %d", r)
	}
	defer s.Close()
	from := w.host.Ptr() + driver.Ptr(w.o.hostBytes())
	h := w.host.Bytes()[w.o.hostBytes():]
	driver.HostAccess(w.o.Driver, "trying the way to another rank", driver.Writes(from, len(h)))
	for i := range tryBytes {
		h[i], h[tryBytes+i] = byte(1+16*r+7*i), 0
	}
	at := w.opens[r].Ptr() + driver.Ptr(w.l.tries+w.o.Rank*tryBytes)
	err = cmp.Or(s.Copy(at, from, tryBytes), s.Copy(from+tryBytes, at, tryBytes))
	limit, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	if err = cmp.Or(err, w.settle(limit, s)); w.busy {
		return w.wrap(err, "trying the way to the memory of rank %d", r)
	}
	driver.HostAccess(w.o.Driver, "looking what came back", driver.Reads(from, len(h)))
	if err == nil && !bytes.Equal(h[:tryBytes], h[tryBytes:]) {
		err = errors.New("what it writes there does not come: peer access does not work, though CUDA has it")
	}
	if err != nil {
		return w.wrap(err, "the memory of rank %d", r)
	}
	return nil
}

// Reach makes another rank's memory usable for kernels of this device. At is its address in the other rank's
// process. It is for ranks whose windows this one has opened.
func (w *Window) Reach(h driver.MemoryHandle, at driver.Ptr) (driver.Memory, error) {
	if h.Owner != w.owner {
		return w.o.Device.OpenMemory(h)
	}
	for i := range w.o.Driver.Count() {
		v, err := w.o.Driver.Device(i)
		if err != nil {
			return nil, err
		}
		if v.Info().UUID != h.UUID {
			continue
		}
		if i != w.o.Device.ID().Index {
			if err := w.o.Device.EnablePeer(i); err != nil {
				return nil, err
			}
			w.peers = append(w.peers, i)
		}
		return v.Borrow(at, int(h.Len))
	}
	return nil, errors.New("it is on a device of this process that this rank's driver does not have")
}

// disable takes back what Reach has enabled.
func (w *Window) disable() error {
	var errs []error
	for _, to := range w.peers {
		errs = append(errs, w.o.Device.DisablePeer(to))
	}
	w.peers = nil
	return errors.Join(errs...)
}

// Rank returns the rank of the window, and how many there are.
func (w *Window) Rank() (rank, ranks int) { return w.o.Rank, w.o.Ranks }

// Shape returns the channels of a window and the slots of a channel.
func (w *Window) Shape() (channels, depth int) { return w.o.Channels, w.o.Depth }

// NextOnly reports whether a rank maps the memory of the next rank in the ring only; see Options.Next.
func (w *Window) NextOnly() bool { return w.o.Next }

// Device returns the device of the window.
func (w *Window) Device() driver.Device { return w.o.Device }

// SharedDevice returns two ranks that have the same device. It is for windows that are
// connected.
func (w *Window) SharedDevice() (a, b int, shared bool) {
	for b, u := range w.uuids {
		for a := range b {
			if w.uuids[a] == u {
				return a, b, true
			}
		}
	}
	return 0, 0, false
}

// Own returns the addresses of this rank's memory.
func (w *Window) Own() Own {
	at := func(offset int) driver.Ptr { return w.mem.Ptr() + driver.Ptr(offset) }
	return Own{Slots: at(0), Keys: at(w.l.keysAt), State: at(w.l.state), Credit: at(w.l.credit), Failed: at(w.l.failed), Host: w.host.Ptr()}
}

// Maps returns where this rank's kernels read the addresses of a rank's regions, 8 bytes for each. Regions
// are memory that kernels of other ranks may write or read beside the window. Whoever maps one writes its address
// there. Window does not use them.
func (w *Window) Maps(rank int) driver.Ptr {
	return w.mem.Ptr() + driver.Ptr(w.l.maps+rank*MostRegions*8)
}

// Failed returns where this rank's kernels read whether a call of another rank has failed. It is for windows
// that are connected.
func (w *Window) Failed(rank int) driver.Ptr { return w.opens[rank].Ptr() + driver.Ptr(w.l.failed) }

// Peer returns where this rank writes in another one's memory. It is for windows that are
// connected.
func (w *Window) Peer(rank int) Peer {
	base := w.opens[rank].Ptr()
	from := w.o.Rank
	if from > rank {
		from--
	}
	return Peer{
		Slots:  base + driver.Ptr(from*w.l.ring),
		Keys:   base + driver.Ptr(w.l.keysAt+from*w.l.keys),
		Credit: base + driver.Ptr(w.l.credit+4*w.o.Rank),
	}
}

// HasLanes reports whether the window has lanes, and of how many channels.
func (w *Window) HasLanes() (channels int, ok bool) { return w.o.LaneChannels, w.o.LaneChannels > 0 }

// Lane returns what this rank's kernels use of the lane to another rank, or of the one from there. A
// lane is a window of two ranks in the memory of the window: its sender is rank 0 and its receiver
// rank 1. It has rings and counters of its own, so its calls are in no order with those of other lanes
// and with collectives. Abort, Err and the failed word are the window's. It is for windows that are
// connected and have lanes.
func (w *Window) Lane(peer int, send bool) (Own, Peer) {
	at := func(base driver.Ptr, of, with int, send bool) (slots, keys, credit, state driver.Ptr) {
		i := w.o.lane(of, with, send)
		lane, counts := base+driver.Ptr(w.l.lanesAt+i*w.l.lanes), base+driver.Ptr(w.l.countsAt+i*w.l.counts)
		return lane, lane + driver.Ptr(w.l.laneKeys), counts, counts + driver.Ptr(w.l.laneState)
	}
	own := w.Own()
	own.Slots, own.Keys, own.Credit, own.State = at(w.mem.Ptr(), w.o.Rank, peer, send)
	own.Host += driver.Ptr((1 + w.o.lane(w.o.Rank, peer, send)) * hostEach)
	var p Peer
	p.Slots, p.Keys, p.Credit, _ = at(w.opens[peer].Ptr(), peer, w.o.Rank, !send)
	if !send {
		p.Credit += 4 // of rank 1 of the lane
	}
	return own, p
}

// lane returns the number that a lane has at one of its ends.
func (o Options) lane(of, with int, send bool) int {
	if with > of {
		with--
	}
	if send {
		return 2 * with
	}
	return 2*with + 1
}

// Access appends what kernels do with the memory of all ranks.
func (w *Window) Access(a []driver.Access) []driver.Access {
	a = append(a, driver.Shares(w.mem.Ptr(), w.l.total), driver.Shares(w.host.Ptr(), w.o.hostBytes()))
	for _, m := range w.opens {
		if m != nil {
			a = append(a, driver.Shares(m.Ptr(), m.Len()))
		}
	}
	return a
}

// Ended returns the number of the last call of this rank that has ended, as kernels write it. The window
// must not be closed.
func (w *Window) Ended() uint32 { return w.host.Load32(doneWord) }

// Why a kernel makes its call fail, as direct.cu numbers it.
const (
	Aborted  = 1
	TimedOut = 2
	Unlike   = 3
)

// Failure is how a kernel ended that could not do its work.
type Failure struct {
	Rank, Device int
	Peer         int  // the rank whose data or whose room it waited for
	Aborted      bool // by Abort
	Unlike       bool // the peer sent another length than this rank expected; else the wait took too long
	Message      bool // it was in a lane
	Channel      int
	Tile         uint32
}

func (f *Failure) Error() string {
	what := "waited too long for"
	switch {
	case f.Aborted:
		what = "was aborted while it waited for"
	case f.Unlike:
		what = "expects another length than is sent by"
	}
	return fmt.Sprintf("window: a kernel of rank %d on device %d %s rank %d (channel %d, tile %d)", f.Rank, f.Device, what, f.Peer, f.Channel, f.Tile)
}

// Is reports whether target is ErrAborted and Abort ended the kernel.
func (f *Failure) Is(target error) bool { return target == ErrAborted && f.Aborted }

// ErrAborted is the error of a window after Abort, if no kernel was waiting. A *Failure matches it
// if Abort ended the kernel.
var ErrAborted = errors.New("window: aborted")

// Abort ends the waits of this rank's kernels, and refuses new ones, until Reset. It does
// not wait for the device.
func (w *Window) Abort() {
	w.aborted.Store(true)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.host != nil {
		for at := 0; at < w.o.hostBytes(); at += hostEach {
			w.host.Store32(at+abortWord, 1)
		}
	}
}

// Aborted reports whether Abort was called.
func (w *Window) Aborted() bool { return w.aborted.Load() }

// Err returns what a kernel reported, a *Failure, or ErrAborted, or nil while all is well.
func (w *Window) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.host != nil {
		for at := 0; at < w.o.hostBytes(); at += hostEach {
			why := w.host.Load32(at + whyWord)
			if why == 0 {
				continue
			}
			f := &Failure{
				Rank: w.o.Rank, Device: w.o.Device.ID().Index, Peer: int(w.host.Load32(at + peerWord)), Aborted: why == Aborted, Unlike: why == Unlike,
				Channel: int(w.host.Load32(at + channelWord)), Tile: w.host.Load32(at + tileWord),
			}
			if at > 0 {
				// The rank in the lane stands for one of the window.
				f.Message = true
				if f.Peer = (at/hostEach - 1) / 2; f.Peer >= w.o.Rank {
					f.Peer++
				}
			}
			return f
		}
	}
	if w.aborted.Load() {
		return ErrAborted
	}
	return nil
}

// Reset makes the window usable again after a failure. All ranks call it, each when its own
// kernels have ended. It waits for its device.
func (w *Window) Reset(ctx context.Context, exchange Exchange) error {
	if !w.connected || w.closed {
		return w.wrap(errors.New("want a window that is connected"), "Reset")
	}
	// No rank clears its rings while another one may still write there, and no rank goes on
	// before all are clear.
	if reason, _, err := exchange(nil, nil); cmp.Or(err, reason) != nil {
		return cmp.Or(err, reason)
	}
	reason, _, err := exchange(w.clear(ctx), nil)
	return cmp.Or(err, reason)
}

// Detach lets go of the memory of the other ranks. This rank's kernels must have ended. It
// may be called more than once.
func (w *Window) Detach() error {
	if w.busy {
		w.connected = false
		return nil // the device may still use what Connect has tried
	}
	var errs []error
	for r, m := range w.opens {
		if m == nil {
			continue
		}
		if err := m.Close(); err != nil {
			errs = append(errs, w.wrap(err, "letting go of the memory of rank %d", r))
		}
		w.opens[r] = nil
	}
	w.connected = false
	return errors.Join(append(errs, w.disable())...)
}

// Close detaches, and frees the rank's own memory. All ranks must have detached: later writes
// would go to memory of somebody else. A rank that cannot know that, because a peer does not
// answer, keeps the memory and only detaches. Close may be called more than once.
func (w *Window) Close() error {
	err := w.Detach()
	w.closed = true
	if w.busy {
		return errors.Join(err, w.wrap(errors.New("the device did not end its work"), "the memory is kept"))
	}
	if w.mem != nil {
		err = errors.Join(err, w.mem.Close())
		w.mem = nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.host != nil {
		err = errors.Join(err, w.host.Close())
		w.host = nil
	}
	return err
}
