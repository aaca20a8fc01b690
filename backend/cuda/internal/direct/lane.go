package direct

import (
	"fmt"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// Lane sends messages from one rank to another one, or receives them. Message number i that is sent
// is message number i that is received. A message is a move of two ranks, whose kernels meet in the
// lane: a send ends when its receive has the bytes.
//
// A lane has rings and counters of its own. So the messages of a lane must follow each other on the
// device, and are in no order with those of other lanes and with the collectives. All kernels that may
// wait at the same time must have room on the device.
//
// Its methods may be called from many goroutines.
type Lane struct {
	c    *Comm // of the two ranks: the sender is 0
	send bool
}

// Lane returns the lane to another rank, or the one from there. The window must have lanes. A lane
// ends with its Comm.
func (c *Comm) Lane(peer int, send bool) (*Lane, error) {
	channels, ok := c.w.HasLanes()
	if !ok || peer < 0 || peer >= c.ranks || peer == c.rank {
		return nil, fmt.Errorf("direct: a lane of rank %d and rank %d of a window with lanes of %d channels", c.rank, peer, channels)
	}
	l := &Lane{send: send, c: &Comm{w: c.w, o: c.o, ranks: 2, rank: 1, channels: channels, shape: c.shape, moves: c.lanes, quiet: true}}
	if send {
		l.c.rank = 0
	}
	l.c.o.Blocks = min(LaneBlocks(channels), c.o.Blocks)
	own, other := c.w.Lane(peer, send)
	l.c.setUp(own, window.LaneDepth, func(int) window.Peer { return other }, func(int) int { return peer })
	return l, nil
}

// LaneBlocks is how many blocks of 512 threads have a warp for each channel.
func LaneBlocks(channels int) int { return (channels + 15) / 16 }

// Send sends n bytes at src. It is for lanes to a rank.
func (l *Lane) Send(s Launcher, src driver.Ptr, n int) error {
	if !l.send {
		return fmt.Errorf("direct: a send on a lane from a rank")
	}
	m := movement{what: "send", src: src, most: n}
	m.send[1].N = n
	return l.c.move(s, &m)
}

// Recv receives n bytes to dst. It is for lanes from a rank. The kernel fails if another length is sent;
// see window.Failure. Into is as in Form.
func (l *Lane) Recv(s Launcher, dst driver.Ptr, n int, into Into) error {
	if l.send {
		return fmt.Errorf("direct: a receive on a lane to a rank")
	}
	m := movement{what: "recv", dst: dst, most: n, into: into}
	m.take[0].N = n
	return l.c.move(s, &m)
}
