package tcp

import (
	"fmt"

	"github.com/c10d-go/c10d/backend/gloo/transport"
)

// Call is what an operation is, as far as all ranks have to agree on it, in words that
// only their owner understands. The zero Call says nothing and is never compared.
type Call [2]uint64

// rememberCalls is how many operations' calls a mesh remembers, the latest ones: a rank may
// be so far ahead of another, and the difference is still found. It is a power of two.
const rememberCalls = 256

// calls are what ranks have called, by the number of the operation.
type calls struct {
	known    [rememberCalls]known
	describe func(Call) string
}

// known is the call that was heard of first, or this rank's own.
type known struct {
	number uint32
	rank   int
	call   Call
	op     uint8 // of this rank's own, noOp if it has not called it
	seq    uint64
}

// numberOf returns which operation the messages on a slot belong to, if to one: a slot is
// prefix<<56 | number<<24 | step, and those of single messages have no prefix.
func numberOf(slot uint64) (number uint32, ok bool) { return uint32(slot >> 24), slot>>56 != 0 }

// of returns this rank's call behind a slot, the zero one if there is none.
func (c *calls) of(slot uint64) Call {
	number, ok := numberOf(slot)
	if k := &c.known[number%rememberCalls]; ok && k.number == number && k.op != noOp {
		return k.call
	}
	return Call{}
}

// agree compares what a rank calls with what is known of the same operation. It returns
// what is wrong, and whose fault it is in the eyes of rank self.
func (c *calls) agree(self int, said known) *transport.Fault {
	if said.call == (Call{}) {
		return nil
	}
	k := &c.known[said.number%rememberCalls]
	switch newer := int32(said.number - k.number); {
	case k.call == (Call{}) || newer > 0:
		*k = said
		return nil
	case newer < 0:
		return nil // long ago
	case k.call == said.call:
		if said.rank == self {
			*k = said
		}
		return nil
	}
	f := &transport.Fault{Kind: transport.FaultMismatch, Rank: said.rank, Reporter: self, Op: k.op, Seq: k.seq}
	if said.rank == self {
		f.Rank, f.Op, f.Seq = k.rank, said.op, said.seq
	}
	f.Err = fmt.Errorf("tcp: the ranks disagree on the operation: as collective number %d rank %d called %s, rank %d called %s",
		said.number, said.rank, c.text(said.call), k.rank, c.text(k.call))
	return f
}

func (c *calls) text(call Call) string {
	if c.describe == nil {
		return fmt.Sprintf("%#x", call)
	}
	return c.describe(call)
}

// Describe sets how calls are shown to people. It has to be called before Enter, and f
// has to make something of any call.
func (m *Mesh) Describe(f func(Call) string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls.describe = f
}

// Enter tells what this rank does as operation number. Messages on the operation's slots
// carry that, and if other ranks call something else under the number, the mesh fails:
// when the first such message comes, or at once if it has come. op and seq are what
// this rank's fault is to name.
func (m *Mesh) Enter(number uint32, c Call, op uint8, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f := m.calls.agree(m.rank, known{number: number, rank: m.rank, call: c, op: op, seq: seq}); f != nil {
		m.fail(f)
	}
}

// Announce tells a peer what this rank has entered as operation number, for ranks that wait
// for each other and so would never send a message.
func (m *Mesh) Announce(peer int, number uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended() != nil || peer < 0 || peer >= m.size || m.pairs[peer] == nil || m.pairs[peer].gone != nil {
		return
	}
	slot := uint64(1)<<56 | uint64(number)<<24
	if m.calls.of(slot) != (Call{}) {
		m.pairs[peer].s.transmit(frame{kind: kCall, slot: slot}, nil)
		m.pairs[peer].pump()
	}
}

// heard compares the call that came with a frame.
func (p *pair) heard(f frame) *transport.Fault {
	number, ok := numberOf(f.slot)
	if !ok {
		return nil
	}
	return p.m.calls.agree(p.m.rank, known{number: number, rank: p.peer, call: f.call, op: noOp})
}
