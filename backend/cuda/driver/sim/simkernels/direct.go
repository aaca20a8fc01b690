package simkernels

import (
	"bytes"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/internal/direct"
	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/tensor"
)

// exchangeTiles is the kernels of package direct. It has their results, waits for the peers as
// they do, and ends when they do. Its protocol is another one, because the simulator's checker
// understands words: a whole ring is one slot, and the first mark of the ring says which piece
// is in it. The tests of package direct model the real protocol.
func exchangeTiles(k *sim.Run, d tensor.DType) error {
	x := exchanger{k: k, c: direct.ParseCall(k.Arg(0))}
	c := x.c
	if k.Load(c.Failed) != 0 {
		return nil
	}
	x.piece = k.Load(c.State)
	room := c.Channels * c.Depth * window.SlotBytes
	for at := 0; at < c.Part; at += room {
		if !x.pass(at, min(room, c.Part-at), d) {
			return nil
		}
	}
	k.Store(c.State, x.piece)
	return nil
}

type exchanger struct {
	k     *sim.Run
	c     direct.Call
	piece uint32 // that has been passed last
}

// noPiece is the mark of a ring that has not been used.
const noPiece = 0xffffffff

// pass exchanges n bytes of the parts, from an offset on. It returns false if the call has
// failed.
func (x *exchanger) pass(at, n int, d tensor.DType) bool {
	k, c := x.k, x.c
	x.piece++
	// Parts may end in padding, and elements of a dtype do not.
	whole := n
	var red backend.Reduction
	if d != tensor.Invalid {
		whole = n / d.Size() * d.Size()
		var err error
		if red, err = c.Operator(d).Reduction(d, c.Ranks); err != nil {
			panic(err)
		}
	}
	operand := func(p int) []byte {
		b := x.part(p, at, n)
		if red.Before != nil {
			red.Before(b[:whole])
		}
		return b
	}
	for p := range c.Ranks {
		if p == c.Rank {
			continue
		}
		// The ring is free when the peer has taken the last piece.
		if !x.await(p, c.Credit+driver.Ptr(4*p), func(v uint32) bool { return v == x.piece-1 }) {
			return false
		}
		copy(k.Common(c.Peers[p].Slots, n), operand(p))
		k.Store(c.Peers[p].Marks, x.piece)
	}
	got := make([][]byte, c.Ranks)
	for p := range c.Ranks {
		if p == c.Rank {
			got[p] = operand(p)
			continue
		}
		from := p
		if p > c.Rank {
			from--
		}
		ring := driver.Ptr(from * c.Channels * c.Depth)
		if !x.await(p, c.Marks+ring*window.MarkBytes, func(v uint32) bool { return v == x.piece && v != noPiece }) {
			return false
		}
		got[p] = bytes.Clone(k.Common(c.Slots+ring*window.SlotBytes, n))
		k.Store(c.Peers[p].Credit, x.piece)
	}
	if d == tensor.Invalid {
		for p, b := range got {
			x.keep(p*c.DstStep, at, b)
		}
		return true
	}
	for _, b := range got[1:] {
		red.Combine(got[0][:whole], b[:whole])
	}
	if red.After != nil {
		red.After(got[0][:whole])
	}
	x.keep(0, at, got[0][:whole])
	return true
}

// part returns n bytes of a rank's part of src; zeros where it has ended.
func (x *exchanger) part(p, at, n int) []byte {
	b := make([]byte, n)
	at += p * x.c.SrcStep
	if left := x.c.SrcBytes - at; left > 0 {
		copy(b, x.k.Read(x.c.Src+driver.Ptr(at), min(n, left)))
	}
	return b
}

// keep puts what comes at an offset of a part of dst, as far as there is room.
func (x *exchanger) keep(part, at int, b []byte) {
	if left := x.c.DstBytes - part - at; left > 0 && len(b) > 0 {
		b = b[:min(len(b), left)]
		copy(x.k.Write(x.c.Dst+driver.Ptr(part+at), len(b)), b)
	}
}

// await waits for a word of a peer. It ends with the abort word, and with the limit.
func (x *exchanger) await(peer int, word driver.Ptr, ok func(uint32) bool) bool {
	k, c := x.k, x.c
	begin := time.Now()
	why := uint32(0)
	met := k.Spin(func() bool {
		if ok(k.Load(word)) {
			return true
		}
		switch {
		case k.Load(c.Host) != 0:
			why = 1
		case time.Since(begin) > c.Limit:
			why = 2
		}
		return why != 0
	})
	if why != 0 {
		k.Store(c.Failed, why)
		k.Store(c.Host+8, uint32(peer))
		k.Store(c.Host+4, why)
	}
	return met && why == 0
}
