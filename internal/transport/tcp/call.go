package tcp

import (
	"context"
	"fmt"

	"github.com/c10d-go/c10d/internal/transport"
)

// rememberCalls is how many operations a mesh remembers the calls of, the latest ones. A rank
// may be that far ahead of another for a difference to be found. It is a power of two.
const rememberCalls = 256

// calls are the calls of the ranks, by the number of the operation.
type calls struct {
	known    [rememberCalls]knownCall
	last     opNumber // this rank's last operation
	op       uint8    // its type
	seq      uint64
	describe func(what [2]uint64) string
}

// opNumber is the number of an operation, or none.
type opNumber struct {
	number uint32
	ok     bool
}

// reaches reports whether it is number or a later one. Numbers wrap.
func (m opNumber) reaches(number uint32) bool { return m.ok && int32(m.number-number) >= 0 }

// knownCall is the first call of an operation that this rank has heard of, or its own.
type knownCall struct {
	number uint32
	rank   int
	call   transport.Call
	op     uint8 // NoOp if this rank has not called it
	seq    uint64
}

// numberOf returns the number of the operation that a slot belongs to: a slot is prefix<<56 |
// number<<24 | step. Slots of single messages have no prefix.
func numberOf(slot uint64) (number uint32, ok bool) { return uint32(slot >> 24), slot>>56 != 0 }

// behind returns this rank's call that a slot belongs to, the zero one if there is none.
func (c *calls) behind(slot uint64) transport.Call {
	number, ok := numberOf(slot)
	if k := &c.known[number%rememberCalls]; ok && k.number == number && k.op != transport.NoOp {
		return k.call
	}
	return transport.Call{}
}

// operation returns this rank's operation that a slot belongs to, or else its last one. op is
// transport.NoOp if there was none.
func (c *calls) operation(slot uint64) (op uint8, seq uint64) {
	number, ok := numberOf(slot)
	if k := &c.known[number%rememberCalls]; ok && k.number == number && k.op != transport.NoOp && k.call != (transport.Call{}) {
		return k.op, k.seq
	}
	if c.last.ok {
		return c.op, c.seq
	}
	return transport.NoOp, 0
}

// agree compares the call of a rank with the known call of the same operation. If they differ
// it returns the fault that rank self reports.
func (c *calls) agree(self int, said knownCall) *transport.Fault {
	if said.call == (transport.Call{}) {
		return nil
	}
	k := &c.known[said.number%rememberCalls]
	switch newer := int32(said.number - k.number); {
	case k.call == (transport.Call{}) || newer > 0:
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
	switch {
	case said.rank == self:
		f.Rank, f.Op, f.Seq = k.rank, said.op, said.seq
	case f.Op == transport.NoOp && c.last.ok:
		f.Op, f.Seq = c.op, c.seq // two others disagree
	case f.Op == transport.NoOp:
		f.Op = transport.Uncalled
	}
	number, one, other := said.number, said.call.What, k.call.What
	if b := said.call.Before; b != k.call.Before && b[0] != 0 && k.call.Before[0] != 0 {
		number, one, other = number-1, b, k.call.Before
	}
	d := transport.Disagree(number, said.rank, c.text(one), k.rank, c.text(other))
	d.Earlier = one == other
	f.Err = d
	return f
}

func (c *calls) text(what [2]uint64) string {
	if c.describe == nil {
		return fmt.Sprintf("%#x", what)
	}
	return c.describe(what)
}

// Describe sets how the What of calls is shown to people. It has to be called before Enter. f
// must accept any values.
func (m *Mesh) Describe(f func(what [2]uint64) string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.calls.describe = f
}

// Enter records this rank's call of operation number. Messages on the operation's slots carry it.
// If another rank has made another call under this or an earlier number, the mesh fails. It fails
// now, or when the first message of that rank comes. op and seq go into the fault.
func (m *Mesh) Enter(number uint32, c transport.Call, op uint8, seq uint64) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if f := m.calls.agree(m.Rank(), knownCall{number: number, rank: m.Rank(), call: c, op: op, seq: seq}); f != nil {
		m.Fail(f)
		return
	}
	m.calls.last, m.calls.op, m.calls.seq = opNumber{number, true}, op, seq
	if m.asking > 0 {
		m.answerAsking()
	}
}

// What a CALL is for.
const (
	callTold     = iota // the sender waits for the receiver
	callAsked           // the receiver has to answer once it has made the call too
	callAnswered        // the answer
)

// sendCall sends a CALL about an operation of this rank.
func (p *pair) sendCall(why, number uint32) {
	p.s.transmit(frame{kind: kCall, handle: why, slot: 1<<56 | uint64(number)<<24}, nil)
	p.pump()
}

// Announce sends a peer this rank's call of operation number. It is for ranks that wait for
// each other and would never send a message.
func (m *Mesh) Announce(peer int, number uint32) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Ended() != nil || !m.IsPeer(peer) || m.pairs[peer] == nil || m.pairs[peer].Gone != nil {
		return
	}
	if m.calls.behind(1<<56|uint64(number)<<24) != (transport.Call{}) {
		m.pairs[peer].sendCall(callTold, number)
	}
}

// CompareCalls compares this rank's calls with those of all other ranks. It asks every peer, and
// returns when each has answered or left, when the mesh fails, as it does if a call differs, or
// when ctx ends.
func (m *Mesh) CompareCalls(ctx context.Context) {
	m.ResumeReaders()
	m.Mu.Lock()
	defer m.Mu.Unlock()
	last := m.calls.last
	if !last.ok {
		return
	}
	for _, p := range m.pairs {
		if p != nil && p.Gone == nil && m.Ended() == nil {
			p.sendCall(callAsked, last.number)
		}
	}
	m.Await(ctx, func() bool { return m.confirmed(last.number) })
}

// confirmed reports whether no answer about operation number is missing.
func (m *Mesh) confirmed(number uint32) bool {
	for _, p := range m.pairs {
		if p != nil && p.Gone == nil && p.end == nil && !p.answered.reaches(number) {
			return false
		}
	}
	return true
}

// onCall handles a CALL that has been compared.
func (p *pair) onCall(f frame) {
	m := p.m
	number, _ := numberOf(f.slot)
	switch f.handle {
	case callAnswered:
		p.answered = opNumber{number, true}
		m.Changed()
	case callAsked:
		if !p.asked.ok {
			m.asking++
		}
		p.asked = opNumber{number, true}
		if last := m.calls.last; last.ok && !last.reaches(number) {
			p.sendCall(callTold, last.number) // the peer may find a difference in that
		}
		m.answerAsking()
	}
}

// answerAsking answers the peers that asked about a call that this rank has made by now.
func (m *Mesh) answerAsking() {
	for _, p := range m.pairs {
		if p == nil || !p.asked.ok || !m.calls.last.reaches(p.asked.number) {
			continue
		}
		number := p.asked.number
		p.asked = opNumber{}
		m.asking--
		if m.Ended() == nil && p.Gone == nil {
			p.sendCall(callAnswered, number)
		}
	}
}

// compareCall compares the call that came with a frame.
func (p *pair) compareCall(f frame) *transport.Fault {
	number, ok := numberOf(f.slot)
	if !ok {
		return nil
	}
	return p.m.calls.agree(p.m.Rank(), knownCall{number: number, rank: p.Rank, call: f.call, op: transport.NoOp})
}
