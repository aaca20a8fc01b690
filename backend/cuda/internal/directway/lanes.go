package directway

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// lanes has a group's messages of tag 0 (decision 38). There is a lane from each rank to each other
// one. Ranks count the messages of a lane alike, so the lane needs no tags.
//
// The ranks connect in a collective, and messages are in no order with collectives. So a rank may have
// received through the host what another one is about to send through the lane. When the ranks connect
// they therefore tell each other how many messages each pair has had. Both ranks of a pair go on
// through the host up to the larger number.
type lanes struct {
	// Set when the ranks connect.
	channels int // 0: there are none
	blocks   int // that directPlaces has for the kernels

	mu      sync.Mutex
	state   laneState
	settled chan struct{} // closed when the state is no longer settling
	// Messages through the host: those so far, and later how many there are still to be.
	hosted [2][window.MostRanks]uint32
	any    bool // a receive from any rank was among them

	all     [2][window.MostRanks]*lane // by direction and peer
	seeking int                        // receives from any rank that have no source yet
}

// laneState is how far a group's lanes are.
type laneState int

const (
	laneHosted   laneState = iota // messages go through the host, and are counted
	laneSettling                  // the ranks tell each other the counts
	laneOpen                      // messages go through the lanes
	laneNever                     // there are no lanes
)

// The directions of lanes.
const (
	out = 0
	in  = 1
)

// lane is the messages from this rank to another one, or from there. Guarded by the engine's Calls.
type lane struct {
	queue
	l        *direct.Lane
	peer     int
	dir      int
	stream   driver.Stream // of messages that are not part of a caller's stream
	next     uint32        // the number of the next message
	deferred int           // messages that are to be enqueued by a goroutine
}

// full reports whether a lane's stream has no room for another message.
func (d *Group) full(x *lane) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return x.queue.full()
}

// laneChannels returns how many channels the lanes have: as many as 8 blocks of 512 threads with up to 4 ranks,
// and 4 blocks with more. The first group of a device has 16 blocks if it has 2 ranks. A lane takes 16 KiB of
// device memory for a channel at each end.
func (d *Group) laneChannels() int {
	ranks, channels := d.Size(), 128
	switch {
	case ranks == 2 && d.blocks == mostBlocks:
		channels = 256
	case ranks > 4:
		channels = 64
	}
	return max(min(channels, int(d.v.Info().Memory/directShare)/(window.LaneChannelBytes()*2*(ranks-1))), 1)
}

// takeLanes reserves room for the kernels of the lanes on the group's device. All of them may wait at the same
// time. There are no lanes if all kernels but the largest collective would then take half of the device.
func (d *Group) takeLanes() {
	l := &d.lanes
	if l.channels = 0; d.Members != nil || d.Size() > window.MostRanks {
		return
	}
	channels := d.laneChannels()
	want := 2 * (d.Size() - 1) * direct.LaneBlocks(channels)
	directPlaces.Lock()
	defer directPlaces.Unlock()
	if beside(directPlaces.of[d.place], want) < multiprocessors(d.v)/2 {
		l.channels, l.blocks = channels, want
		d.note()
	}
}

// keepLanes keeps the lanes if all ranks have room for them. It gives the room back otherwise.
func (d *Group) keepLanes(channels int) {
	l := &d.lanes
	if l.channels = min(l.channels, channels); l.channels > 0 || l.blocks == 0 {
		return
	}
	directPlaces.Lock()
	defer directPlaces.Unlock()
	l.blocks = 0
	d.note()
}

// settle has the ranks tell each other how many messages have gone through the host, and opens the
// lanes. All ranks call it at the same time. A message that is posted meanwhile waits.
func (d *Group) settle(tell window.Exchange) (err error) {
	l := &d.lanes
	l.mu.Lock()
	if l.channels == 0 {
		l.state = laneNever
		l.mu.Unlock()
		return nil
	}
	l.state, l.settled = laneSettling, make(chan struct{})
	mine := []byte{0}
	if l.any {
		mine[0] = 1
	}
	mine, err = binary.Append(mine, binary.LittleEndian, l.hosted)
	l.mu.Unlock()
	_, all, failed := tell(nil, mine)
	l.mu.Lock()
	defer l.mu.Unlock()
	defer close(l.settled)
	l.state = laneNever
	if err = cmp.Or(failed, err); err != nil {
		return err
	}
	if slices.ContainsFunc(all, func(b []byte) bool { return b[0] != 0 }) {
		// A receive from any rank may still wait at a host, for the first message of one that would send
		// it elsewhere.
		return nil
	}
	for p := range d.Size() {
		if p == d.Rank() {
			continue
		}
		theirs := l.hosted
		if _, err := binary.Decode(all[p][1:], binary.LittleEndian, &theirs); err != nil {
			return err
		}
		for dir := range l.all {
			l.hosted[dir][p] = max(theirs[1-dir][d.Rank()], l.hosted[dir][p]) - l.hosted[dir][p]
			x, err := d.comm.Lane(p, dir == out)
			if err != nil {
				return err
			}
			l.all[dir][p] = &lane{l: x, peer: p, dir: dir}
		}
	}
	l.state = laneOpen
	return nil
}

// leaveLanes tells the others that this rank takes part in no more messages.
func (d *Group) leaveLanes() {
	for dir := range d.lanes.all {
		for p, x := range d.lanes.all[dir] {
			if x != nil {
				word(d.pageOf(p), d.Rank(), wordLeft+4*dir).Store(x.next + 1)
			}
		}
	}
}

// closeLanes ends the lanes' streams. No message is on its way. A call that is refused may look at the lanes.
func (d *Group) closeLanes() error {
	var errs []error
	d.B.Calls.Lock()
	for dir := range d.lanes.all {
		for p, x := range d.lanes.all[dir] {
			if x == nil {
				continue
			}
			x.forget(d)
			if x.stream != nil {
				errs = append(errs, x.stream.Close())
			}
			d.lanes.all[dir][p] = nil
		}
	}
	d.B.Calls.Unlock()
	d.lanes.mu.Lock()
	d.lanes.state = laneNever
	d.lanes.mu.Unlock()
	d.keepLanes(0)
	return errors.Join(errs...)
}

// streamOf returns a lane's own stream. The caller holds the engine's Calls.
func (d *Group) streamOf(x *lane) (driver.Stream, error) {
	if x.stream == nil {
		to := "to"
		if x.dir == in {
			to = "from"
		}
		s, err := d.v.NewStream(driver.StreamOptions{High: true, Name: fmt.Sprintf("rank %d direct %s %d", d.B.Rank, to, x.peer)})
		if err != nil {
			return nil, err
		}
		x.stream = s
	}
	return x.stream, nil
}
