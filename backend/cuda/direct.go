package cuda

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// DirectWork is the name of the all-reduce work in which one kernel of each rank does everything: the
// kernels write into each other's memory and wait for each other (decision 24). It is for two
// ranks on one host, each with a device of its own that reaches the other's. Its priority is 200.
const DirectWork = "direct"

// directRanks is how many ranks a group with direct work has.
const directRanks = 2

// directLimit is how long a kernel waits for its peer if nobody aborts it. The rank aborts it when
// the operation's time is over, and a process that dies takes its kernels along.
const directLimit = 24 * time.Hour

var errDirectRanks = fmt.Errorf("it is for %d ranks", directRanks)

// keepDirect has the driver load the kernels when it opens devices: no image may be loaded while a
// stream waits.
func keepDirect(d driver.Driver) {
	direct.Images(directRanks, func(image []byte, kernels ...string) { driver.Keep(d, image, kernels...) })
}

// directCan returns why no direct work can do a call. The answer is the same on every rank.
func directCan(h *host) error {
	t, op := h.call.Tensors[0], h.call.Op
	if h.b.size != directRanks {
		return errDirectRanks
	}
	if err := direct.Supports(op, t.DType()); err != nil {
		return err
	}
	return deviceCan(h)
}

// directMeet connects the ranks at the first call.
func directMeet(h *host) error {
	if err := deviceMeet(h); err != nil {
		return err
	}
	return h.b.neighbours.made().noDirect
}

// prepareDirectWork makes the call's operation a direct one.
func prepareDirectWork(h *host) error {
	if err := prepareDeviceWork(h); err != nil {
		return err
	}
	h.op.device.direct = h.b.neighbours.made().direct
	return nil
}

// A window has directMostChannels, or fewer on a device with less memory: it takes at most a part in
// directShare of it. A channel takes 34 KiB.
const (
	directMostChannels = 2048
	directChannelBytes = 34 << 10
	directShare        = 1 << 10
)

// directChannels returns how many channels a window on a device has.
func directChannels(v driver.Device) uint32 {
	return uint32(min(max(v.Info().Memory/directShare/directChannelBytes, 1), directMostChannels))
}

// directLink is this rank's window and its kernels. The zero pointer is none.
type directLink struct {
	window *window.Window
	comm   *direct.Comm
	place  directPlace // taken, until close
}

// directPlace is a device on which kernels of this process wait for others.
type directPlace struct {
	d   driver.Driver
	dev int
}

// directGroups are the groups of this process that have direct work, by device. Kernels of several
// groups that wait for each other's peers must all fit on a device: else one group's kernels
// could keep another one's from starting, on each device the other way round.
var directGroups = struct {
	sync.Mutex
	of map[directPlace]int
}{of: make(map[directPlace]int)}

// takePlace counts a group on its device, unless its kernels might not fit beside those of others.
func (l *directLink) takePlace(d driver.Driver, v driver.Device) error {
	i, threads := v.Info(), 2048 // per multiprocessor
	if i.Minor != 0 {
		threads = 1536
	}
	most := i.Multiprocessors * threads / direct.MostThreads
	directGroups.Lock()
	defer directGroups.Unlock()
	place := directPlace{d, v.ID().Index}
	if n := directGroups.of[place]; n >= max(most, 1) {
		return fmt.Errorf("%d groups of this process have direct work on device %d, and kernels of more might not fit", n, place.dev)
	}
	directGroups.of[place]++
	l.place = place
	return nil
}

func (l *directLink) leavePlace() {
	directGroups.Lock()
	defer directGroups.Unlock()
	if l.place.d != nil {
		if directGroups.of[l.place]--; directGroups.of[l.place] == 0 {
			delete(directGroups.of, l.place) // and with it the driver
		}
		l.place = directPlace{}
	}
}

// connectDirect makes the ring's direct link, or finds out why there is none, with the other rank. An
// error means that the ranks cannot talk to each other any more.
func (r *ring) connectDirect(q *operation) error {
	if r.b.size != directRanks {
		r.noDirect = errDirectRanks
		return nil
	}
	l := new(directLink)
	agree := func(why error) (reason, err error) {
		reason, _, err = r.b.hear(q.ctx, q.left(), told(why, nil))
		return reason, err
	}
	exchange := func(ctx context.Context, mine []byte) ([][]byte, error) {
		_, all, err := r.b.hear(ctx, q.left(), told(nil, mine))
		return all, err
	}
	why := l.takePlace(r.b.driver, r.v)
	mine := binary.LittleEndian.AppendUint32(nil, directChannels(r.v))
	reason, all, err := r.b.hear(q.ctx, q.left(), told(why, mine))
	if err == nil && reason == nil {
		channels := directMostChannels
		for _, b := range all {
			channels = min(channels, int(binary.LittleEndian.Uint32(b)))
		}
		l.window, why = window.New(q.ctx, window.Options{Driver: r.b.driver, Device: r.v, Rank: r.b.rank, Ranks: r.b.size, Channels: channels})
		reason, err = agree(why)
	}
	if err == nil && reason == nil {
		why = l.window.Connect(q.ctx, exchange)
		if why == nil {
			l.comm, why = direct.New(l.window, direct.Options{Limit: directLimit})
		}
		reason, err = agree(why)
	}
	if err != nil {
		return errors.Join(err, l.close())
	}
	if reason == nil {
		r.direct = l
		return nil
	}
	r.noDirect = reason
	// Both have detached before one of them frees its memory.
	why = l.detach()
	_, err = agree(nil)
	return errors.Join(err, why, l.close())
}

// err returns why a kernel did not do its work.
func (l *directLink) err() error {
	if l == nil {
		return nil
	}
	return l.comm.Err()
}

// abort ends the waits of this rank's kernels.
func (l *directLink) abort() {
	if l != nil {
		l.window.Abort()
	}
}

// detach lets go of the other rank's memory. This rank's kernels have ended.
func (l *directLink) detach() error {
	if l == nil || l.window == nil {
		return nil
	}
	return l.window.Detach()
}

// keep leaves the memory to the other rank for good, and returns nil. This rank's kernels have ended.
func (l *directLink) keep() *directLink {
	if l != nil {
		l.leavePlace()
	}
	return nil
}

// close frees everything. The other rank has detached.
func (l *directLink) close() error {
	if l == nil {
		return nil
	}
	l.leavePlace()
	var errs []error
	if l.comm != nil {
		errs = append(errs, l.comm.Close())
	}
	if l.window != nil {
		errs = append(errs, l.window.Close())
	}
	return errors.Join(errs...)
}

// push adds the kernels that all-reduce n elements at a place on the ring's device.
func (w *deviceWork) push(at driver.Ptr, n int) {
	if w.err == nil {
		w.err = w.direct.comm.AllReduce(launcher{w}, at, at, n, w.places[0].t.DType(), w.reduce)
	}
}

// launcher adds launches to the work, on the ring's stream.
type launcher struct{ w *deviceWork }

func (x launcher) Launch(l *driver.Launch) error {
	w := x.w
	if w.fits(1) {
		b := w.ring.box()
		b.more = append(b.more[:0], l.Access...)
		b.Launch = driver.Launch{Function: l.Function, Grid: l.Grid, Block: l.Block, Args: b.args.Set(l.Args), Access: b.more}
		w.batch.Launch(w.ring.stream, &b.Launch)
	}
	return w.err
}
