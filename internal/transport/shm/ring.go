package shm

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"github.com/c10d-go/c10d/internal/copies"
)

// A ring carries frames from one rank to another. Each ring has one writer and one
// reader. A frame begins at a multiple of grain, with a word that is zero until the
// frame is there. The writer sets the word of the next frame to zero before it
// publishes a frame. So a small message moves one cache line from CPU to CPU.
//
//	 0  kind and length of the payload
//	 4  id      of a transfer: the sender's in a first, else the receiver's
//	 8  slot    of a first; the other id in a go
//	16  total   of a first: length of the message; of a go: how much has come
//	24  addr    of a first: the message in the sender's memory, 0 if it is sent
//	32  payload
const (
	grain     = 64
	frameHead = 32
)

const (
	frameFirst = iota + 1
	// frameGo asks for the rest of one, to be sent.
	frameGo
	// frameMore brings some of it.
	frameMore
	// frameRest brings some of the message whose frameFirst was the last before it.
	frameRest
	// framePad fills the ring up to its end.
	framePad
	// frameDone says that the message has been read where it was.
	frameDone
)

const (
	// A send_recv of 1 MiB takes 70 us with 512 KiB, 123 us with 64 KiB.
	minRing = 64 << 10
	maxRing = 512 << 10

	// inbound bounds the size of all rings to one rank, as far as minRing allows.
	inbound = 4 << 20
)

// ringSize returns the bytes of a ring: a power of two.
func ringSize(ranks int) int {
	n := maxRing
	for n > minRing && n*(ranks-1) > inbound {
		n /= 2
	}
	return n
}

// ringSpace returns the bytes of a ring with its reader's words.
func ringSpace(ranks int) int { return ringSize(ranks) + page }

const (
	atHead = 0 // the reader's position
	atFull = 4 // set while the reader has no room for unexpected messages
)

// ringOf returns the ring from one rank to another.
func (g *Group) ringOf(from, to int) (data []byte, head, full *uint32) {
	i := from*(g.size-1) + to
	if to > from {
		i--
	}
	n := ringSpace(g.size)
	b := g.mem[ringsAt(g.size, g.piece)+i*n:][:n]
	return b[page:], word32(b, atHead), word32(b, atFull)
}

func frameSize(payload int) uint32 { return uint32(frameHead+payload+grain-1) &^ (grain - 1) }

// largest returns the largest payload of a frame: with padding before it, the frame takes at
// most half of the ring.
func largest(ring int) int { return ring/4 - grain }

// frame is the header of a frame.
type frame struct {
	kind, size uint32 // size is that of the payload
	id         uint32
	slot       uint64
	total      uint64
	addr       uint64
}

func frameWord(data []byte, at uint32) *uint32 {
	return (*uint32)(unsafe.Pointer(&data[at&uint32(len(data)-1)]))
}

// writer is the writing end of a ring. Positions count bytes modulo 2^32.
type writer struct {
	data       []byte
	head, full *uint32
	tail       uint32 // position of the next frame
	seen       uint32 // the reader's position when it was last read
}

// room returns where the payload of a frame goes, nil if it does not fit yet.
func (w *writer) room(payload int) []byte {
	need, size := frameSize(payload), uint32(len(w.data))
	pad := uint32(0)
	if left := size - w.tail&(size-1); need > left {
		pad = left
	}
	if size-(w.tail-w.seen) < pad+need+grain {
		w.seen = atomic.LoadUint32(w.head)
		if size-(w.tail-w.seen) < pad+need+grain {
			return nil
		}
	}
	if pad > 0 {
		*frameWord(w.data, w.tail+pad) = 0
		atomic.StoreUint32(frameWord(w.data, w.tail), framePad)
		w.tail += pad
	}
	at := w.tail & (size - 1)
	return w.data[at+frameHead:][:payload:payload]
}

// fits reports whether a message fits, in a frame of one length and frames of another behind
// it. It may return false although the message would fit.
func (w *writer) fits(total, first, step int) bool {
	n := uint32(total-first+step-1) / uint32(step)
	need := frameSize(first) + n*frameSize(step) + frameSize(max(first, step)) + grain // once, padding
	size := uint32(len(w.data))
	if size-(w.tail-w.seen) < need {
		w.seen = atomic.LoadUint32(w.head)
	}
	return size-(w.tail-w.seen) >= need
}

// claimBytes is up to how long a message may be that has the CPU fetch the lines of the next one. With 4 KiB an answer
// comes before the CPU has asked for all.
const claimBytes = 2 << 10

// publish sends the frame that room has made space for. Its payload is in place.
func (w *writer) publish(f frame) {
	at := w.tail & uint32(len(w.data)-1)
	b := w.data[at : at+frameHead]
	binary.NativeEndian.PutUint32(b[4:], f.id)
	binary.NativeEndian.PutUint64(b[8:], f.slot)
	binary.NativeEndian.PutUint64(b[16:], f.total)
	binary.NativeEndian.PutUint64(b[24:], f.addr)
	w.tail += frameSize(int(f.size))
	*frameWord(w.data, w.tail) = 0
	atomic.StoreUint32(frameWord(w.data, at), f.kind|f.size<<8)
	if f.size <= claimBytes { // the next one is likely to be as long
		next := w.tail&uint32(len(w.data)-1) + grain // without the line that the reader looks at
		copies.Claim(w.data[next:min(next+frameSize(int(f.size)), uint32(len(w.data)))])
	}
}

// reader is the reading end of a ring.
type reader struct {
	data       []byte
	head, full *uint32
	pos        uint32 // position of the next frame
	told       uint32 // the value of *head
}

// next returns the next frame, if it has come. It stays in the ring until done.
func (r *reader) next() (f frame, payload []byte, ok bool) {
	for {
		word := atomic.LoadUint32(frameWord(r.data, r.pos))
		if word == 0 {
			return f, nil, false
		}
		size := uint32(len(r.data))
		at := r.pos & (size - 1)
		if word == framePad && at > 0 {
			r.done(size - at)
			continue
		}
		f.kind, f.size = word&0xff, word>>8
		b := r.data[at : at+frameHead]
		f.id = binary.NativeEndian.Uint32(b[4:])
		f.slot = binary.NativeEndian.Uint64(b[8:])
		f.total = binary.NativeEndian.Uint64(b[16:])
		f.addr = binary.NativeEndian.Uint64(b[24:])
		if f.size > size-at-frameHead || word == framePad {
			f.kind = 0 // no rank sends that
			return f, nil, true
		}
		return f, r.data[at+frameHead:][:f.size], true
	}
}

// done frees n bytes. The writer sees that only now and then: it waits only when the ring is
// nearly full.
func (r *reader) done(n uint32) {
	r.pos += n
	if r.pos-r.told >= uint32(len(r.data))/8 {
		r.told = r.pos
		atomic.StoreUint32(r.head, r.pos)
	}
}

// wakeMesh wakes the rank of the segment if it sleeps until a message moves.
func (s *segment) wakeMesh() {
	if atomic.LoadUint32(s.dozing) != 0 {
		atomic.AddUint32(s.moves, 1)
		wake(s.moves)
	}
}
