package simkernels

import (
	"bytes"
	"encoding/binary"
	"math/bits"
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
// understands words: a whole ring is one slot, and the first key of the ring says which piece
// is in it. The tests of package direct model the real protocol.
func exchangeTiles(k *sim.Run) error {
	x := newExchanger(k, direct.Read[direct.Call](k.Arg(0)))
	c := x.c
	if k.Load(c.Failed) != 0 {
		return nil
	}
	x.piece = k.Load(c.State)
	room := x.room()
	for at := 0; at < c.Part; at += room {
		if !x.pass(at, min(room, c.Part-at)) {
			return nil
		}
	}
	x.end()
	return nil
}

// moveTiles is the kernels of moves. The first piece is tile 0 in direct.cu: a length, the longest span that
// the sender knows of, and where it lets the peer write. If all ranks are open, the peers write there, and
// another piece says that all is there.
func moveTiles(k *sim.Run) error {
	m := direct.Read[direct.Move](k.Arg(0))
	x := newExchanger(k, m.Call)
	if k.Load(x.c.Failed) != 0 {
		return nil
	}
	x.piece = k.Load(x.c.State)
	most, open := x.c.Part, m.Open != 0
	var into [window.MostRanks]direct.Place
	told := x.swap(
		func(p int) []byte {
			b := binary.NativeEndian.AppendUint64(nil, uint64(m.Send[p].N))
			b = binary.NativeEndian.AppendUint64(b, uint64(x.c.Part))
			b = binary.NativeEndian.AppendUint64(b, uint64(m.Into[p]))
			return append(b, byte(m.Open))
		},
		func(int) int { return 25 },
		func(p int, b []byte) bool {
			if int(binary.NativeEndian.Uint64(b)) != m.Take[p].N {
				x.fail(p, window.Unlike)
				return false
			}
			most = max(most, int(binary.NativeEndian.Uint64(b[8:])))
			into[p] = direct.Place(binary.NativeEndian.Uint64(b[16:]))
			open = open && b[24] != 0
			return true
		})
	if !told {
		return nil
	}
	if open && most > 0 {
		if x.straight(m, into) {
			x.end()
		}
		return nil
	}
	room := x.room()
	for at := 0; at < most; at += room {
		left := func(s direct.Span) int { return max(min(s.N-at, room), 0) }
		sent := func(p int) []byte {
			if n := left(m.Send[p]); n > 0 {
				return k.Read(x.c.Src+driver.Ptr(m.Send[p].Off+at), n)
			}
			return nil
		}
		kept := func(p int, b []byte) bool {
			copy(k.Write(x.c.Dst+driver.Ptr(m.Take[p].Off+at), len(b)), b)
			return true
		}
		if own := sent(x.rank); len(own) > 0 {
			kept(x.rank, bytes.Clone(own))
		}
		if !x.swap(sent, func(p int) int { return left(m.Take[p]) }, kept) {
			return nil
		}
	}
	x.end()
	return nil
}

// spreadTiles is an all_reduce or a reduce of two ranks. The first piece tells where the peer may write, or read. If
// both are open, each combines its half and puts it to both, or the root reads the other one's operand. Another piece
// says that all is there, or has been read.
func spreadTiles(k *sim.Run) error {
	m := direct.Read[direct.Spread](k.Arg(0))
	x := newExchanger(k, m.One)
	if k.Load(x.c.Failed) != 0 {
		return nil
	}
	x.piece = k.Load(x.c.State)
	var into [window.MostRanks]direct.Place
	into[1-x.rank] = m.Into
	open, told := x.tell(m.Open != 0, &into)
	if !told {
		return nil
	}
	reads := x.c.Roles.Owners != 3
	if open && reads {
		if x.pull(m, into[1-x.rank]) {
			x.end()
		}
		return nil
	}
	if open {
		x.c = m.Two
	}
	room := x.room()
	for at := 0; at < x.c.Part; at += room {
		if !x.pass(at, min(room, x.c.Part-at)) {
			return nil
		}
	}
	if open {
		if !x.reach(1-x.rank, m.Maps, m.Failed, into[1-x.rank], x.rank*x.c.Part, k.Read(x.c.Dst, x.c.DstBytes)) || !x.meet() {
			return nil
		}
	}
	x.end()
	return nil
}

// bothTiles is two shots in one launch. With a head, the first piece tells where the peers may write. The owner of a
// part combines it, and passes it on to the takers. If all are open, it puts the part to them instead, and another piece
// says that all is there.
func bothTiles(k *sim.Run, m direct.Move, head bool) error {
	x := newExchanger(k, m.Call)
	c := x.c
	if k.Load(c.Failed) != 0 {
		return nil
	}
	x.piece = k.Load(c.State)
	open, into := m.Open != 0, m.Into
	if head {
		var told bool
		if open, told = x.tell(m.Open != 0, &into); !told {
			return nil
		}
	}
	part := func(p int) int { return bits.OnesCount8(c.Roles.Owners & (1<<p - 1)) }
	giver, owner, taker := in(c.Roles.Givers, x.rank), in(c.Roles.Owners, x.rank), in(c.Roles.Takers, x.rank)
	own := part(x.rank)
	a := x.arithmetic()
	room := x.room()
	for at := 0; at < c.Part; at += room {
		n := min(room, c.Part-at)
		operand := func(p int) []byte {
			b := x.part(part(p), at, n)
			a.before(b)
			return b
		}
		got := make([][]byte, x.ranks)
		if giver && owner {
			got[x.rank] = operand(x.rank)
		}
		ok := x.swap(
			func(p int) []byte {
				if giver && in(c.Roles.Owners, p) {
					return operand(p)
				}
				return nil
			},
			func(p int) int { return n * one(owner && in(c.Roles.Givers, p)) },
			func(p int, b []byte) bool {
				got[p] = b
				return true
			})
		if !ok {
			return nil
		}
		var sum []byte
		if owner {
			sum = a.combine(got)
		}
		if owner && taker {
			x.keep(own*c.DstStep, at, sum)
		}
		passed := open || x.swap(
			func(p int) []byte {
				if in(c.Roles.Takers, p) {
					return sum
				}
				return nil
			},
			func(p int) int { return n * one(taker && in(c.Roles.Owners, p)) },
			func(p int, b []byte) bool {
				x.keep(part(p)*c.DstStep, at, b)
				return true
			})
		if !passed {
			return nil
		}
		for p := range x.ranks {
			if open && owner && p != x.rank && in(c.Roles.Takers, p) && !x.reach(p, m.Maps[p], m.Failed[p], into[p], at, x.inside(own, at, sum)) {
				return nil
			}
		}
	}
	if open && !x.meet() {
		return nil
	}
	x.end()
	return nil
}

// in reports whether a rank is in a set.
func in(set uint8, rank int) bool { return set>>rank&1 != 0 }

// one is 1 if something is so.
func one(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

// inside returns what of a piece, at an offset of a part, comes before the end of the call's data.
func (x *exchanger) inside(part, at int, b []byte) []byte {
	return b[:max(min(len(b), x.c.DstBytes-part*x.c.DstStep-at), 0)]
}

// tell gives each peer a piece that says where it may write, and whether it may. It replaces into by what the
// peers tell. Open reports whether all may; ok is false if the call has failed.
func (x *exchanger) tell(mine bool, into *[window.MostRanks]direct.Place) (open, ok bool) {
	open, own := mine, *into
	ok = x.swap(
		func(p int) []byte {
			b := binary.NativeEndian.AppendUint64(nil, uint64(own[p]))
			if mine {
				return append(b, 1)
			}
			return append(b, 0)
		},
		func(int) int { return 9 },
		func(p int, b []byte) bool {
			into[p] = direct.Place(binary.NativeEndian.Uint64(b))
			open = open && b[8] != 0
			return true
		})
	return open, ok
}

// reach writes b at an offset from where a peer has told. It returns false if the peer has failed.
func (x *exchanger) reach(p int, maps, failed driver.Ptr, into direct.Place, off int, b []byte) bool {
	k := x.k
	if why := k.Load(failed); why != 0 {
		x.fail(p, window.Aborted)
		return false
	}
	copy(x.theirs(maps, into, off, len(b)), b)
	return true
}

// theirs returns n bytes at an offset from where a peer has told.
func (x *exchanger) theirs(maps driver.Ptr, at direct.Place, off, n int) []byte {
	entry := maps + driver.Ptr(8*(at.Region()-1))
	base := driver.Ptr(x.k.Load(entry)) | driver.Ptr(x.k.Load(entry+4))<<32
	return x.k.Reached(base+driver.Ptr(at.Off()+off), n)
}

// pull is a reduce of two ranks whose root reads the other one's operand. Then a piece tells that rank so. It returns
// false if the call has failed.
func (x *exchanger) pull(m direct.Spread, at direct.Place) bool {
	c, peer := x.c, 1-x.rank
	root := in(c.Roles.Owners, x.rank)
	if root {
		if x.k.Load(m.Failed) != 0 {
			x.fail(peer, window.Aborted) // its memory may have been freed
			return false
		}
		a := x.arithmetic()
		operands := make([][]byte, x.ranks)
		operands[x.rank] = x.part(0, 0, c.Part)
		operands[peer] = bytes.Clone(x.theirs(m.Maps, at, 0, c.Part))
		for _, b := range operands {
			a.before(b)
		}
		x.keep(0, 0, a.combine(operands))
		if x.k.Load(m.Failed) != 0 {
			x.fail(peer, window.Aborted)
			return false
		}
	}
	return x.swap(func(int) []byte { return make([]byte, one(root)) }, func(int) int { return one(!root) }, func(int, []byte) bool { return true })
}

// meet waits until all peers have said that all is there.
func (x *exchanger) meet() bool {
	return x.swap(func(int) []byte { return []byte{1} }, func(int) int { return 1 }, func(int, []byte) bool { return true })
}

// straight writes the spans where the peers have told, and waits until they have done so. It returns false if
// the call has failed.
func (x *exchanger) straight(m direct.Move, into [window.MostRanks]direct.Place) bool {
	k := x.k
	for p, s := range m.Send[:x.ranks] {
		if s.N == 0 {
			continue
		}
		b := k.Read(x.c.Src+driver.Ptr(s.Off), s.N)
		if p == x.rank {
			b = bytes.Clone(b)
			copy(k.Write(x.c.Dst+driver.Ptr(m.Take[p].Off), s.N), b)
			continue
		}
		if !x.reach(p, m.Maps[p], m.Failed[p], into[p], 0, b) {
			return false
		}
	}
	return x.meet()
}

// end notes the pieces of the call, and tells the host that it has ended.
func (x *exchanger) end() {
	x.k.Store(x.c.State, x.piece)
	if x.c.Number != 0 {
		x.k.Store(x.c.Host+20, x.c.Number)
	}
}

// swap gives each peer a piece and takes one from each. Pieces without bytes do not travel. It returns
// false if the call has failed.
func (x *exchanger) swap(sent func(peer int) []byte, size func(peer int) int, taken func(peer int, b []byte) bool) bool {
	k, c := x.k, x.c
	x.piece++
	for p := range x.ranks {
		b := []byte(nil)
		if p != x.rank {
			b = sent(p)
		}
		if len(b) == 0 {
			continue
		}
		if !x.free(p) {
			return false
		}
		copy(k.Common(c.Peers[p].Slots, len(b)), b)
		k.Store(c.Peers[p].Keys, x.piece)
	}
	for p := range x.ranks {
		if p == x.rank {
			continue
		}
		if n := size(p); n > 0 {
			b, ok := x.come(p, n)
			if !ok || !taken(p, b) {
				return false
			}
		}
		k.Store(c.Peers[p].Credit, x.piece)
	}
	return true
}

type exchanger struct {
	k           *sim.Run
	c           direct.Call
	ranks, rank int
	depth       int // slots of all channels of a ring
	dtype       tensor.DType
	op          backend.ReduceOp
	piece       uint32 // that has been passed last
}

func newExchanger(k *sim.Run, c direct.Call) *exchanger {
	x := &exchanger{k: k, c: c, ranks: int(c.Ranks), rank: int(c.Rank), depth: int(c.Channels * c.Depth)}
	x.dtype, x.op = c.Reduction()
	return x
}

// room is the bytes of a ring.
func (x *exchanger) room() int { return x.depth * window.SlotBytes(x.ranks) }

// noPiece is the key of a ring that has not been used.
const noPiece = 0xffffffff

// pass exchanges n bytes of the parts, from an offset on, and keeps what becomes of them. It returns false if the
// call has failed.
func (x *exchanger) pass(at, n int) bool {
	if d := x.dtype; d != tensor.Invalid {
		sum, ok := x.combine(at, n)
		if ok {
			x.keep(0, at, sum[:n/d.Size()*d.Size()])
		}
		return ok
	}
	got, ok := x.exchange(at, n, func([]byte) {})
	for p, b := range got {
		if in(x.c.Roles.Givers, p) && in(x.c.Roles.Owners, x.rank) {
			x.keep(p*x.c.DstStep, at, b)
		}
	}
	return ok
}

// combine exchanges n bytes of the parts, from an offset on, and combines them. It returns false if the call has failed.
func (x *exchanger) combine(at, n int) ([]byte, bool) {
	a := x.arithmetic()
	got, ok := x.exchange(at, n, a.before)
	if !ok {
		return nil, false
	}
	return a.combine(got), true
}

// arithmetic is what becomes of operands. Parts may end in padding, and elements of a dtype do not.
type arithmetic struct {
	size int
	red  backend.Reduction
}

// arithmetic returns that of a call. If that combines nothing there is one operand, and nothing becomes of it.
func (x *exchanger) arithmetic() arithmetic {
	d := x.dtype
	if d == tensor.Invalid {
		return arithmetic{size: 1}
	}
	red, err := x.op.Reduction(d, x.ranks)
	if err != nil {
		panic(err)
	}
	return arithmetic{d.Size(), red}
}

// whole returns the elements of an operand without padding.
func (a arithmetic) whole(b []byte) []byte { return b[:len(b)/a.size*a.size] }

func (a arithmetic) before(b []byte) {
	if a.red.Before != nil {
		a.red.Before(a.whole(b))
	}
}

// combine combines the operands that are there, in the order of the ranks.
func (a arithmetic) combine(operands [][]byte) (sum []byte) {
	for _, b := range operands {
		switch {
		case sum == nil:
			sum = b
		case b != nil:
			a.red.Combine(a.whole(sum), a.whole(b))
		}
	}
	if a.red.After != nil {
		a.red.After(a.whole(sum))
	}
	return sum
}

// exchange gives each peer n bytes of its part, from an offset on, and returns what each rank has for this one. It
// returns false if the call has failed.
func (x *exchanger) exchange(at, n int, before func(b []byte)) ([][]byte, bool) {
	k, c := x.k, x.c
	x.piece++
	operand := func(p int) []byte {
		b := x.part(p, at, n)
		before(b)
		return b
	}
	for p := range x.ranks {
		if p == x.rank {
			continue
		}
		if !x.free(p) {
			return nil, false
		}
		copy(k.Common(c.Peers[p].Slots, n), operand(p))
		k.Store(c.Peers[p].Keys, x.piece)
	}
	got := make([][]byte, x.ranks)
	for p := range x.ranks {
		if p == x.rank {
			got[p] = operand(p)
			continue
		}
		var ok bool
		if got[p], ok = x.come(p, n); !ok {
			return nil, false
		}
		k.Store(c.Peers[p].Credit, x.piece)
	}
	return got, true
}

// free waits until a peer's ring is free: the peer has taken the last piece, or may take a later one that
// this rank does not send.
func (x *exchanger) free(p int) bool {
	return x.await(p, x.c.Credit+driver.Ptr(4*p), func(v uint32) bool { return int32(v-(x.piece-1)) >= 0 })
}

// come waits for a piece of a peer, of n bytes.
func (x *exchanger) come(p, n int) ([]byte, bool) {
	from := p
	if p > x.rank {
		from--
	}
	ring := driver.Ptr(from * x.depth)
	if !x.await(p, x.c.Keys+ring*window.KeyBytes, func(v uint32) bool { return v == x.piece && v != noPiece }) {
		return nil, false
	}
	return bytes.Clone(x.k.Common(x.c.Slots+driver.Ptr(from*x.room()), n)), true
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
			why = window.Aborted
		case time.Since(begin) > c.Limit:
			why = window.TimedOut
		}
		return why != 0
	})
	if why != 0 {
		x.fail(peer, why)
	}
	return met && why == 0
}

// fail reports why the call and all later ones fail.
func (x *exchanger) fail(peer int, why uint32) {
	x.k.Store(x.c.Failed, why)
	x.k.Store(x.c.Host+8, uint32(peer))
	x.k.Store(x.c.Host+4, why)
}
