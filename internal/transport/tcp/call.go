package tcp

import (
	"context"
	"fmt"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

// rememberCalls is how many operations' calls a mesh remembers, the latest ones: a rank may
// be so far ahead of another, and the difference is still found. It is a power of two.
const rememberCalls = 256

// calls are what ranks have called, by the number of the operation.
type calls struct {
	known    [rememberCalls]known
	last     maybe // this rank's last operation
	op       uint8 // of that
	seq      uint64
	describe func(what [2]uint64) string
}

// maybe is the number of an operation, or none.
type maybe struct {
	number uint32
	ok     bool
}

// reaches reports whether it is an operation, and not one before number. Numbers wrap.
func (m maybe) reaches(number uint32) bool { return m.ok && int32(m.number-number) >= 0 }

// known is the call that was heard of first, or this rank's own.
type known struct {
	number uint32
	rank   int
	call   transport.Call
	op     uint8 // of this rank's own, transport.NoOp if it has not called it
	seq    uint64
}

// numberOf returns which operation the messages on a slot belong to, if to one: a slot is
// prefix<<56 | number<<24 | step, and those of single messages have no prefix.
func numberOf(slot uint64) (number uint32, ok bool) { return uint32(slot >> 24), slot>>56 != 0 }

// of returns this rank's call behind a slot, the zero one if there is none.
func (c *calls) of(slot uint64) transport.Call {
	number, ok := numberOf(slot)
	if k := &c.known[number%rememberCalls]; ok && k.number == number && k.op != transport.NoOp {
		return k.call
	}
	return transport.Call{}
}

// agree compares what a rank calls with what is known of the same operation. It returns
// what is wrong, and whose fault it is in the eyes of rank self.
func (c *calls) agree(self int, said known) *transport.Fault {
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

// Describe sets how the What of calls is shown to people. It has to be called before Enter, and f
// has to make something of any words.
func (m *Mesh) Describe(f func(what [2]uint64) string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.calls.describe = f
}

// Enter tells what this rank does as operation number. Messages on the operation's slots
// carry that. The mesh fails if another rank has called something else, under this number or
// before: when its first message comes, or at once if it has come. op and seq are what this
// rank's fault is to name.
func (m *Mesh) Enter(number uint32, c transport.Call, op uint8, seq uint64) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if f := m.calls.agree(m.Rank(), known{number: number, rank: m.Rank(), call: c, op: op, seq: seq}); f != nil {
		m.Fail(f)
		return
	}
	m.calls.last, m.calls.op, m.calls.seq = maybe{number, true}, op, seq
	if m.asking > 0 {
		m.answer()
	}
}

// What a CALL is for.
const (
	callTold     = iota // the sender waits for the receiver in it
	callAsked           // the receiver is to answer once it has called the operation too
	callAnswered        // it is the answer
)

// tell sends a CALL about an operation of this rank.
func (p *pair) tell(why, number uint32) {
	p.s.transmit(frame{kind: kCall, handle: why, slot: 1<<56 | uint64(number)<<24}, nil)
	p.pump()
}

// Announce tells a peer what this rank has entered as operation number, for ranks that wait
// for each other and so would never send a message.
func (m *Mesh) Announce(peer int, number uint32) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Ended() != nil || !m.IsPeer(peer) || m.pairs[peer] == nil || m.pairs[peer].Gone != nil {
		return
	}
	if m.calls.of(1<<56|uint64(number)<<24) != (transport.Call{}) {
		m.pairs[peer].tell(callTold, number)
	}
}

// Settle makes sure that the other ranks have called what this rank has called. It asks all of
// them, and returns when each has answered or left, when the mesh fails, as it does if one has
// called something else, or after limit.
func (m *Mesh) Settle(limit time.Duration) {
	m.See()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	m.Mu.Lock()
	defer m.Mu.Unlock()
	last := m.calls.last
	if !last.ok {
		return
	}
	for _, p := range m.pairs {
		if p != nil && p.Gone == nil && m.Ended() == nil {
			p.tell(callAsked, last.number)
		}
	}
	m.Await(ctx, func() bool { return m.settled(last.number) })
}

// settled reports whether nothing more is to be heard of operation number.
func (m *Mesh) settled(number uint32) bool {
	for _, p := range m.pairs {
		if p != nil && p.Gone == nil && !p.bye && !p.answered.reaches(number) {
			return false
		}
	}
	return true
}

// onCall does what a CALL asks for, once it has been compared.
func (p *pair) onCall(f frame) {
	m := p.m
	number, _ := numberOf(f.slot)
	switch f.handle {
	case callAnswered:
		p.answered = maybe{number, true}
		m.Changed()
	case callAsked:
		if !p.asked.ok {
			m.asking++
		}
		p.asked = maybe{number, true}
		if last := m.calls.last; last.ok && !last.reaches(number) {
			p.tell(callTold, last.number) // the peer may find a difference in that
		}
		m.answer()
	}
}

// answer answers the peers that ask about what this rank has called by now.
func (m *Mesh) answer() {
	for _, p := range m.pairs {
		if p == nil || !p.asked.ok || !m.calls.last.reaches(p.asked.number) {
			continue
		}
		number := p.asked.number
		p.asked = maybe{}
		m.asking--
		if m.Ended() == nil && p.Gone == nil {
			p.tell(callAnswered, number)
		}
	}
}

// heard compares the call that came with a frame.
func (p *pair) heard(f frame) *transport.Fault {
	number, ok := numberOf(f.slot)
	if !ok {
		return nil
	}
	return p.m.calls.agree(p.m.Rank(), known{number: number, rank: p.Rank, call: f.call, op: transport.NoOp})
}
