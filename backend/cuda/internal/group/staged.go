package group

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/internal/place"
	"github.com/c10d-go/c10d/tensor"
)

// rawPlace is where the bytes of a tensor that is not contiguous are staged.
type rawPlace struct {
	p     *place.Place
	leg   int
	at    int
	read  bool
	write bool
}

// cut decides on pieces, alike on every rank. It returns the elements of the longest leg.
func (o *Operation) cut() (longest int) {
	wide := 1
	for i := range o.Legs {
		l := &o.Legs[i]
		longest = max(longest, l.N)
		wide = max(wide, l.size())
	}
	o.grain, o.pieces = max(longest, 1), 1
	switch {
	case o.Shared != nil:
		o.grain, o.pieces = o.Shared.grain, o.Shared.chunks
	case !o.Whole:
		o.grain = o.B.grain(wide, max(o.Width, 1), longest)
		o.pieces = max(1, (longest+o.grain-1)/o.grain)
	}
	return longest
}

// layout decides on pieces and staging.
func (o *Operation) layout() (bytes int) {
	longest, flat := o.cut(), true
	for i := range o.Legs {
		flat = flat && o.Legs[i].flat()
	}
	o.slots = min(o.pieces, o.B.Slots)
	o.at, o.turns = make([]int, len(o.Legs)), make([]hostTurn, 0, o.pieces)
	if o.inPlace() {
		return 0
	}
	most := o.grain
	if !flat {
		// The host brings the elements in order first, and cuts them then.
		o.slots, most = 1, longest
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		if o.Near != nil {
			continue
		}
		o.at[i] = o.slot
		o.slot += Align(min(l.N, most) * l.size())
	}
	bytes = o.slot * o.slots
	if flat {
		return bytes
	}
	for i := range o.Legs {
		l := &o.Legs[i]
		l.each(func(p *place.Place) {
			if p.Flat {
				return
			}
			r := rawPlace{p: p, leg: i, at: bytes, read: p == l.Src}
			for _, d := range l.Dst {
				r.write = r.write || d == p
			}
			o.raw = append(o.raw, r)
			bytes += Align(p.Hi - p.Lo)
		})
	}
	return bytes
}

func (o *Operation) fill(batch *feed) {
	base := o.staging.Ptr()
	for k := range o.pieces {
		slot := base + driver.Ptr(k%o.slots*o.slot)
		in, out := slot, slot
		if s := o.Shared; o.inPlace() {
			c := s.first + uint64(k)
			in, out = s.x.Ptr(s.x.In(s.x.Rank, c)), s.x.Ptr(s.x.Out(c))
		}
		for i := range o.Legs {
			l := &o.Legs[i]
			lo, hi := o.elements(l, k)
			if l.Src != nil && lo < hi {
				to := in + driver.Ptr(o.at[i])
				if o.Near != nil {
					to = o.Near.Ptr + driver.Ptr(o.Near.At[i])
				}
				batch.Copy(l.Src.Down, to, l.Src.Base+driver.Ptr(l.Src.Lo+lo*l.size()), (hi-lo)*l.size())
			}
		}
		batch.host(&o.turns, o.line.host, o.touched(slot, o.slot, k)...)
		for i := range o.Legs {
			l := &o.Legs[i]
			lo, hi := o.elements(l, k)
			for _, d := range l.Dst {
				if lo < hi {
					batch.Copy(d.Up, d.Base+driver.Ptr(d.Lo+lo*l.size()), out+driver.Ptr(o.at[i]), (hi-lo)*l.size())
				}
			}
		}
	}
}

// fillTurn moves everything down, gives the host one turn, and moves everything up.
func (o *Operation) fillTurn(batch *feed) {
	bytes := o.slot
	for _, r := range o.raw {
		bytes = r.at + Align(r.p.Hi-r.p.Lo)
	}
	o.allDown(batch)
	batch.host(&o.turns, o.line.host, o.touched(o.staging.Ptr(), bytes, everyPiece)...)
	o.allUp(batch)
}

// everyPiece is for a turn of all pieces.
const everyPiece = -1

// touched is what the host uses in the turn of a piece: the staging and, in the ranks' exchange, slots.
func (o *Operation) touched(p driver.Ptr, n, piece int) []driver.Access {
	all := append(o.accesses[:0], driver.Writes(p, n))
	if o.Near != nil {
		all[0] = driver.Writes(o.Near.Ptr, o.Near.Bytes)
	}
	if s := o.Shared; s != nil && s.x.Memory != nil {
		all = s.x.Uses(all, s.first+uint64(max(piece, 0)), piece == everyPiece)
	}
	o.accesses = all
	return all
}

// allDown copies the inputs to the staging memory. allUp copies the outputs from there.
func (o *Operation) allDown(to Commander) {
	down := func(p *place.Place, at int) {
		p.Each(func(s place.Span) {
			to.Copy(p.Down, o.staging.Ptr()+driver.Ptr(at+s.Off-p.Lo), p.Base+driver.Ptr(s.Off), s.N)
		})
	}
	for i := range o.Legs {
		if l := &o.Legs[i]; l.Src != nil && l.Src.Flat {
			down(l.Src, o.at[i])
		}
	}
	for _, r := range o.raw {
		if r.read {
			down(r.p, r.at)
		}
	}
}

func (o *Operation) allUp(to Commander) {
	up := func(p *place.Place, at int) {
		p.Each(func(s place.Span) {
			to.Copy(p.Up, p.Base+driver.Ptr(s.Off), o.staging.Ptr()+driver.Ptr(at+s.Off-p.Lo), s.N)
		})
	}
	for i := range o.Legs {
		for _, d := range o.Legs[i].Dst {
			if d.Flat {
				up(d, o.at[i])
			}
		}
	}
	for _, r := range o.raw {
		if r.write {
			up(r.p, r.at)
		}
	}
}

// runTurn does all pieces in one turn, between bringing elements in order and
// putting them back.
func (o *Operation) runTurn() error {
	if err := o.begin(&o.turns, 0); err != nil {
		return err
	}
	if err := o.packRaw(); err != nil {
		return err
	}
	if err := o.callAll(func(l *Leg, i, lo int) []byte { return o.staging.Bytes()[o.at[i]+lo*l.size():] }); err != nil {
		return err
	}
	if err := o.unpackRaw(); err != nil {
		return err
	}
	o.done(&o.turns, 0)
	return nil
}

// callAll does the host's part of all pieces. From returns the bytes of a leg from an element on.
func (o *Operation) callAll(from func(l *Leg, i, lo int) []byte) error {
	shadows := make([]*tensor.Tensor, len(o.Legs))
	for k := range o.pieces {
		err := o.shadow(shadows, k, from)
		if err == nil {
			err = o.Call(o, shadows)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// shadow makes the CPU tensors of piece k.
func (o *Operation) shadow(shadows []*tensor.Tensor, k int, from func(l *Leg, i, lo int) []byte) (err error) {
	for i := range o.Legs {
		l := &o.Legs[i]
		lo, hi := o.elements(l, k)
		if shadows[i], err = tensor.FromBytes(l.DType, from(l, i, lo)[:(hi-lo)*l.size()], hi-lo); err != nil {
			return err
		}
	}
	return nil
}

// packRaw has the host bring elements in order that were copied as they lie, unpackRaw
// has it put them back.
func (o *Operation) packRaw() error {
	return o.eachRaw(func(r rawPlace) bool { return r.read }, (*tensor.Tensor).Pack)
}

func (o *Operation) unpackRaw() error {
	return o.eachRaw(func(r rawPlace) bool { return r.write }, (*tensor.Tensor).Unpack)
}

func (o *Operation) eachRaw(which func(rawPlace) bool, f func(t *tensor.Tensor, packed []byte) error) error {
	for _, r := range o.raw {
		if !which(r) {
			continue
		}
		l := &o.Legs[r.leg]
		t, err := r.p.Over(o.staging.Bytes()[r.at:][:r.p.Hi-r.p.Lo])
		if err == nil {
			err = f(t, o.staging.Bytes()[o.at[r.leg]:][:l.N*l.size()])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inTurn reports whether the operation is one turn of the host.
func (o *Operation) inTurn() bool { return len(o.raw) > 0 }

// elements returns the range of a leg that piece k takes.
func (o *Operation) elements(l *Leg, k int) (from, to int) {
	return min(k*o.grain, l.N), min((k+1)*o.grain, l.N)
}

const stagingAlign = 256

func Align(n int) int { return (n + stagingAlign - 1) &^ (stagingAlign - 1) }
