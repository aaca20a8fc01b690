package plan

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/c10d-go/c10d/internal/must"
)

// simulation runs the plans of a whole group on plain slices, one event after another in an order
// drawn from rng. It refuses every plan that could fail on a transport:
//
//   - a group that stops, or messages that differ in length
//   - memory touched while a request owns it, or read before it was written
//   - ranges outside of a buffer
//   - requests never waited for, and resources asked for but not used
type simulation struct {
	rng        *rand.Rand
	rendezvous bool // a send ends only once its receive is posted; else at any time
	op         func(dst, src []byte)
	ranks      []*simRank
	links      [][]*simLink // by sender, then receiver
	live       []*simLink   // those with sends that have no partner yet, and some more
}

// simRank is a rank: its plan, its memory, and the requests it has posted.
type simRank struct {
	rank     int
	plan     *Plan
	next     int
	buf      [3][]byte
	known    [3][]bool     // which bytes have been written; nil for a buffer that came with data
	requests []*simRequest // by index, nil where free
	most     int           // outstanding at most so far
}

type simRequest struct {
	step Step
	done bool
}

// simLink is one direction between two ranks. The k-th send meets the k-th receive.
type simLink struct {
	from, to     int
	live         bool
	sends, recvs []*simRequest
	wire         [][]byte // what was taken from sends and not yet delivered
}

// simEvent is what may happen next: a step of a rank, or, with a link, that the
// rank's end of it takes or delivers a message.
type simEvent struct {
	rank *simRank
	link *simLink
}

// memory is what a rank brings along: its result and its input.
type memory struct {
	out, in []byte
	blank   bool // out has no data yet
}

func newSimulation(plans []*Plan, mems []memory, op func(dst, src []byte), rng *rand.Rand) *simulation {
	s := &simulation{rng: rng, rendezvous: rng.IntN(2) == 0, op: op}
	for r, p := range plans {
		rank := &simRank{rank: r, plan: p, requests: make([]*simRequest, p.Requests)}
		rank.buf[Out], rank.buf[In], rank.buf[Scratch] = mems[r].out, mems[r].in, make([]byte, p.Scratch)
		for i := range rank.buf[Scratch] {
			rank.buf[Scratch][i] = 0xa5
		}
		rank.known[Scratch] = make([]bool, p.Scratch)
		if mems[r].blank {
			rank.known[Out] = make([]bool, len(mems[r].out))
		}
		s.ranks = append(s.ranks, rank)
		links := make([]*simLink, len(plans))
		for i := range links {
			links[i] = &simLink{from: r, to: i}
		}
		s.links = append(s.links, links)
	}
	return s
}

// run executes the plans to their ends.
func (s *simulation) run() error {
	var events []simEvent
	for {
		events = events[:0]
		ended := true
		for _, r := range s.ranks {
			if r.next == len(r.plan.Steps) {
				continue
			}
			ended = false
			step := r.plan.Steps[r.next]
			if step.Kind == Wait {
				if err := r.mayWait(step.Req); err != nil {
					return err
				}
				if !r.requests[step.Req].done {
					continue
				}
			}
			events = append(events, simEvent{rank: r})
		}
		s.live = slices.DeleteFunc(s.live, func(l *simLink) bool {
			l.live = len(l.sends) > 0
			return !l.live
		})
		for _, l := range s.live {
			// Taken in order: the first that still lies in its buffer.
			if i := len(l.wire); i < len(l.sends) && (!s.rendezvous || i < len(l.recvs)) {
				events = append(events, simEvent{s.ranks[l.from], l})
			}
			if len(l.wire) > 0 && len(l.recvs) > 0 {
				events = append(events, simEvent{s.ranks[l.to], l})
			}
		}
		if len(events) == 0 {
			if !ended {
				return s.stuck()
			}
			return s.finish()
		}
		var err error
		switch e := events[s.rng.IntN(len(events))]; {
		case e.link == nil:
			err = s.step(e.rank)
		case e.rank.rank == e.link.from:
			err = s.take(e.rank, e.link)
		default:
			err = s.deliver(e.rank, e.link)
		}
		if err != nil {
			return err
		}
	}
}

func (r *simRank) errorf(format string, args ...any) error {
	at := "at the end"
	if r.next < len(r.plan.Steps) {
		at = fmt.Sprintf("step %d (%v)", r.next, r.plan.Steps[r.next])
	}
	return fmt.Errorf("rank %d, %s: %s", r.rank, at, fmt.Sprintf(format, args...))
}

func (r *simRank) mayWait(req int32) error {
	if req < 0 || int(req) >= len(r.requests) || r.requests[req] == nil {
		return r.errorf("no such request is outstanding")
	}
	return nil
}

// touch checks that a range lies within its buffer and that no outstanding
// request forbids reading it or, if write is set, writing it.
func (r *simRank) touch(buf Buffer, off, n int64, write bool) error {
	if int(buf) >= len(r.buf) || off < 0 || n < 0 || off+n > int64(len(r.buf[buf])) {
		return r.errorf("%v[%d:%d] is not within %d bytes", buf, off, off+n, len(r.buf[min(int(buf), 2)]))
	}
	for _, q := range r.requests {
		if q == nil || n == 0 || q.step.Len == 0 || q.step.Buf != buf || off >= q.step.Off+q.step.Len || q.step.Off >= off+n {
			continue
		}
		if write || q.step.Kind == Recv {
			return r.errorf("%v[%d:%d] belongs to %v", buf, off, off+n, q.step)
		}
	}
	return nil
}

// read checks that a range that is about to be read has been written.
func (r *simRank) read(buf Buffer, off, n int64) error {
	if known := r.known[buf]; known != nil && n > 0 && slices.Contains(known[off:off+n], false) {
		return r.errorf("%v[%d:%d] is read before it was written", buf, off, off+n)
	}
	return nil
}

func (r *simRank) wrote(buf Buffer, off, n int64) {
	if known := r.known[buf]; known != nil {
		for i := range known[off : off+n] {
			known[off+int64(i)] = true
		}
	}
}

func (s *simulation) step(r *simRank) (err error) {
	defer must.Catch(&err)
	step := r.plan.Steps[r.next]
	switch step.Kind {
	case Send, Recv:
		if step.Req < 0 || int(step.Req) >= len(r.requests) || r.requests[step.Req] != nil {
			return r.errorf("the request is not free")
		}
		if step.Peer < 0 || int(step.Peer) >= len(s.ranks) || int(step.Peer) == r.rank {
			return r.errorf("no such peer")
		}
		must.Do(r.touch(step.Buf, step.Off, step.Len, step.Kind == Recv))
		if step.Kind == Send {
			must.Do(r.read(step.Buf, step.Off, step.Len))
		}
		q := &simRequest{step: step}
		r.requests[step.Req] = q
		outstanding := 0
		for _, q := range r.requests {
			if q != nil {
				outstanding++
			}
		}
		r.most = max(r.most, outstanding)
		if step.Kind == Send {
			l := s.links[r.rank][step.Peer]
			l.sends = append(l.sends, q)
			if !l.live {
				l.live = true
				s.live = append(s.live, l)
			}
		} else {
			l := s.links[step.Peer][r.rank]
			l.recvs = append(l.recvs, q)
		}
	case Wait:
		r.requests[step.Req] = nil
	case Reduce, Copy:
		if step.Len == 0 {
			return r.errorf("a step without effect")
		}
		must.Do(r.touch(step.Buf, step.Off, step.Len, true))
		must.Do(r.touch(step.Src, step.SrcOff, step.Len, false))
		must.Do(r.read(step.Src, step.SrcOff, step.Len))
		if step.Kind == Reduce {
			must.Do(r.read(step.Buf, step.Off, step.Len))
		}
		r.wrote(step.Buf, step.Off, step.Len)
		dst, src := r.buf[step.Buf][step.Off:][:step.Len], r.buf[step.Src][step.SrcOff:][:step.Len]
		if step.Kind == Copy {
			copy(dst, src)
		} else {
			s.op(dst, src)
		}
	default:
		return r.errorf("no such kind")
	}
	r.next++
	return nil
}

// take moves the bytes of the oldest send still in its buffer onto the wire.
func (s *simulation) take(r *simRank, l *simLink) error {
	q := l.sends[len(l.wire)]
	l.wire = append(l.wire, append([]byte(nil), r.buf[q.step.Buf][q.step.Off:][:q.step.Len]...))
	q.done = true
	return nil
}

// deliver puts the oldest bytes on the wire where the oldest receive wants them.
func (s *simulation) deliver(r *simRank, l *simLink) error {
	data, q := l.wire[0], l.recvs[0]
	if int64(len(data)) != q.step.Len {
		return r.errorf("%d bytes came for %v", len(data), q.step)
	}
	copy(r.buf[q.step.Buf][q.step.Off:], data)
	r.wrote(q.step.Buf, q.step.Off, q.step.Len)
	q.done = true
	l.wire, l.recvs, l.sends = l.wire[1:], l.recvs[1:], l.sends[1:]
	return nil
}

func (s *simulation) stuck() error {
	err := errors.New("deadlock")
	for _, r := range s.ranks {
		err = errors.Join(err, r.errorf("waiting"))
	}
	return err
}

func (s *simulation) finish() error {
	for _, r := range s.ranks {
		for i, q := range r.requests {
			if q != nil {
				return r.errorf("request %d was never waited for: %v", i, q.step)
			}
		}
		if r.most != r.plan.Requests {
			return r.errorf("asks for %d requests and has at most %d outstanding", r.plan.Requests, r.most)
		}
	}
	for from, links := range s.links {
		for to, l := range links {
			if len(l.sends) > 0 || len(l.recvs) > 0 {
				return fmt.Errorf("%d sends and %d receives from rank %d to rank %d have no partner", len(l.sends), len(l.recvs), from, to)
			}
		}
	}
	return nil
}
