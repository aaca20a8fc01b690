package simkernels

import (
	"bytes"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
)

// ringTiles is the kernel of rings. Its protocol is that of ring.cu, with one channel. A tile of it fills the slots
// of all channels that lie side by side.
func ringTiles(k *sim.Run) error {
	x := ringer{k: k, c: direct.Read[direct.Ring](k.Arg(0))}
	c, ranks, place := x.c, int(x.c.Ranks), int(x.c.Place)
	if k.Load(c.Failed) != 0 {
		return nil
	}
	dtype, op := c.Reduction()
	combines := c.Shots&direct.Combines != 0
	red, err := op.Reduction(dtype, ranks)
	if err != nil {
		return err
	}
	a := arithmetic{dtype.Size(), red}
	own, last := 0, 0 // the step with this rank's part, and the last one
	if combines {
		own = ranks - 1
	}
	if last = own; c.Shots&direct.Collects != 0 {
		last += ranks - 1
	}
	x.t = k.Load(c.State)
	room := x.room()
	for at := 0; at < c.Part; at += room {
		n := min(room, c.Part-at)
		for s := range last + 1 {
			part := place - (s - own)
			if s < own {
				part = place - (s + 1)
			}
			part = (part + ranks) % ranks
			tile := make([]byte, n)
			if s > 0 {
				var ok bool
				if tile, ok = x.take(n); !ok {
					return nil
				}
			}
			if s <= own {
				operand := make([]byte, n)
				if p := within(c.From[part], at, n); p.N > 0 {
					copy(operand, k.Read(c.Src+driver.Ptr(p.Off), p.N))
				}
				if combines {
					a.before(operand)
				}
				if s == 0 {
					tile = operand
				} else {
					red.Combine(a.whole(tile), a.whole(operand))
				}
			}
			if s == own && combines && red.After != nil {
				red.After(a.whole(tile))
			}
			if p := within(c.To[part], at, n); s >= own && p.N > 0 {
				copy(k.Write(c.Dst+driver.Ptr(p.Off), p.N), tile)
			}
			if s < last {
				x.give(tile)
			}
		}
	}
	k.Store(c.State, x.t)
	if c.Number != 0 {
		k.Store(c.Host+20, c.Number)
	}
	return nil
}

// within returns the bytes of a part from an offset on, at most n.
func within(p direct.Span, at, n int) direct.Span {
	return direct.Span{Off: p.Off + at, N: max(min(p.N-at, n), 0)}
}

type ringer struct {
	k *sim.Run
	c direct.Ring
	t uint32 // tiles that have been sent
}

// room is the bytes of a tile.
func (x *ringer) room() int { return int(x.c.Channels) * window.RingSlotBytes }

// slot returns where tile t and its flag are among slots and flags.
func (x *ringer) slot(t uint32) (slot, flag driver.Ptr) {
	i := int(t % x.c.Depth)
	return driver.Ptr(i * x.room()), driver.Ptr(4 * i * int(x.c.Channels))
}

// give sends the next tile.
func (x *ringer) give(tile []byte) {
	slot, flag := x.slot(x.t)
	copy(x.k.Common(x.c.NextSlots+slot, len(tile)), tile)
	x.t++
	x.k.Store(x.c.NextFlags+flag, x.t)
}

// take gets the tile of the number that was sent last. It returns false if the call has failed.
func (x *ringer) take(n int) ([]byte, bool) {
	slot, flag := x.slot(x.t - 1)
	e := exchanger{k: x.k, c: direct.Call{Host: x.c.Host, Failed: x.c.Failed, Limit: x.c.Limit}}
	if !e.await(int(x.c.Before), x.c.Flags+flag, func(v uint32) bool { return v == x.t }) {
		return nil, false
	}
	return bytes.Clone(x.k.Common(x.c.Slots+slot, n)), true
}
