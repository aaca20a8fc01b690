package simulate

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/plan"
)

// Result is the result of a run.
type Result struct {
	Time     time.Duration // when the last rank ended; the first began at 0
	First    time.Duration // when the first rank ended
	Messages int64         // of all ranks
	Sent     int64         // bytes of all messages
	Remote   int64         // bytes of messages between hosts
	Steps    int64         // of all plans
	Links    []Link        // by host and interface
}

// Link has the traffic of one network interface.
type Link struct {
	Host, NIC int
	Out, In   int64         // bytes
	Busy      time.Duration // of its busier direction
}

// Busiest returns the link with the most bytes in one direction.
func (r *Result) Busiest() Link {
	var most Link
	for _, l := range r.Links {
		if max(l.Out, l.In) > max(most.Out, most.In) {
			most = l
		}
	}
	return most
}

// Run runs an algorithm for all ranks of c, whose Rank it sets. A layout of the
// job is the algorithm's too.
func Run(ctx context.Context, j Job, a *plan.Algorithm, c plan.Call) (*Result, error) {
	if c.Layout == nil {
		c.Layout = j.Layout
	}
	if err := j.Check(c.Size); err != nil {
		return nil, err
	}
	if err := a.Fits(c); err != nil {
		return nil, err
	}
	return RunSteps(ctx, j, c.Size, func(rank int) iter.Seq[[]plan.Step] {
		c.Rank = rank
		return a.Steps(c)
	})
}

// RunSteps runs the plans that steps returns for each rank, some steps at a time.
func RunSteps(ctx context.Context, j Job, ranks int, steps func(rank int) iter.Seq[[]plan.Step]) (*Result, error) {
	if err := j.Check(ranks); err != nil {
		return nil, err
	}
	s := newSimulation(&j, ranks)
	for i := range s.ranks {
		next, stop := iter.Pull(steps(i))
		defer stop()
		s.ranks[i].more = next
	}
	return s.run(ctx)
}

// simulation is a run. Events happen in the order of virtual time. A rank may run ahead of
// it until it needs something that other ranks might need earlier.
type simulation struct {
	job    *Job
	rng    *rand.Rand
	ranks  []rank
	hosts  []host
	nics   []nic
	events agenda
	failed error

	transfers []transfer
	spare     int32 // first free transfer, -1 if none

	latency, overhead, localLatency, jitter ps
	wire, local, memory, reduce, copying    cost
	own                                     bool // no rank's sends depend on those of other ranks

	result Result
}

// rank is the state of a rank in its plan.
type rank struct {
	clock   ps
	steps   []plan.Step // what is left of the last batch
	more    func() ([]plan.Step, bool)
	taken   int64 // steps done
	posting bool  // the next step, a send, has had its CPU time
	ended   bool
	waiting int32 // request that it waits for, -1 if none
	slow    float64
	host    int32
	nic     int32
	reqs    []request
	inbox   []channel
}

// request is a posted send or receive.
type request struct {
	kind plan.Kind
	peer int32
	free bool
	len  int64
	step int64
	done ps // forever while it is under way
}

// channel has the unmatched sends or receives of one sender and one receiver. It never has
// both.
type channel struct {
	from       int32
	sends      bool
	head, tail int32 // transfers
}

// transfer is a message. The side that posts first creates it.
type transfer struct {
	next         int32 // in a channel, or the free ones
	stage        stage
	from, to     int32
	sreq, rreq   int32
	len          int64
	sent, posted ps // when the send and the receive were posted
	arrived      ps // forever until then
	sstep        int64
}

type stage uint8

const (
	unsent stage = iota // only the receive is there
	held                // waits for its receive
	flying
)

type nic struct {
	out, in ps // when it is free again
	carried Link
	busyOut ps
	busyIn  ps
}

type host struct{ memory ps } // when it is free again

func newSimulation(j *Job, ranks int) *simulation {
	s := &simulation{
		job: j, rng: rand.New(rand.NewPCG(j.Seed, 0)), ranks: make([]rank, ranks), spare: -1,
		latency: picoseconds(j.Latency), overhead: picoseconds(j.Overhead),
		localLatency: picoseconds(j.LocalLatency), jitter: picoseconds(j.Jitter),
		wire: costOf(j.Bandwidth), local: costOf(j.LocalBandwidth), memory: costOf(j.Memory),
		reduce: costOf(j.Reduce), copying: costOf(j.Copy),
	}
	nics, hosts := max(1, j.NICs), ranks
	if j.Layout != nil {
		hosts = j.Layout.Hosts()
	}
	s.hosts, s.nics = make([]host, hosts), make([]nic, hosts*nics)
	for i := range s.nics {
		s.nics[i].carried = Link{Host: i / nics, NIC: i % nics}
	}
	onHost := make([]int, hosts)
	slow := j.slow(ranks, s.rng)
	s.own = j.Eager == 0
	for i := range s.ranks {
		h := i
		if j.Layout != nil {
			h = j.Layout.Host(i)
		}
		r := &s.ranks[i]
		*r = rank{waiting: -1, slow: 1, host: int32(h), nic: int32(h*nics + onHost[h]%nics)}
		if onHost[h]++; onHost[h] > 1 {
			s.own = false
		}
		if slow[i] {
			r.slow, r.clock = max(1, j.Slow), picoseconds(j.Late)
		}
	}
	return s
}

// run runs the plans to their ends.
func (s *simulation) run(ctx context.Context) (*Result, error) {
	for i := range s.ranks {
		s.events.push(s.ranks[i].clock, int32(i), int32(i))
	}
	for n := 0; s.events.len() > 0 && s.failed == nil; n++ {
		if n&0xffff == 0 && ctx.Err() != nil {
			return nil, fmt.Errorf("simulate: stopped after %v of virtual time: %w", duration(s.events.top()), context.Cause(ctx))
		}
		at, what := s.events.pop()
		if what >= 0 {
			s.advance(what)
		} else {
			s.move(^what, at)
		}
	}
	if s.failed != nil {
		return nil, s.failed
	}
	if err := s.leftOver(); err != nil {
		return nil, err
	}
	first := forever
	var last ps
	for i := range s.ranks {
		first, last = min(first, s.ranks[i].clock), max(last, s.ranks[i].clock)
		s.result.Steps += s.ranks[i].taken
	}
	s.result.Time, s.result.First = duration(last), duration(first)
	for i := range s.nics {
		n := &s.nics[i]
		n.carried.Busy = duration(max(n.busyOut, n.busyIn))
		s.result.Links = append(s.result.Links, n.carried)
	}
	return &s.result, nil
}

// advance runs a rank until it waits, ends, or must let other ranks run first.
func (s *simulation) advance(id int32) {
	r := &s.ranks[id]
	for s.failed == nil {
		if len(r.steps) == 0 {
			var ok bool
			if r.steps, ok = r.more(); !ok {
				r.ended = true
				return
			}
			continue
		}
		step := &r.steps[0]
		switch step.Kind {
		case plan.Send:
			if !r.posting {
				r.clock += s.cpu(r, s.overhead)
				r.posting = true
			}
			if !s.own && s.events.len() > 0 && s.events.top() < r.clock {
				s.events.push(r.clock, id, id)
				return
			}
			r.posting = false
			s.send(id, step)
		case plan.Recv:
			s.recv(id, step)
		case plan.Wait:
			if int(step.Req) >= len(r.reqs) || step.Req < 0 || r.reqs[step.Req].free {
				s.fail(id, "no such request is outstanding")
				return
			}
			q := &r.reqs[step.Req]
			if q.done == forever {
				r.waiting = step.Req
				return
			}
			r.clock = max(r.clock, q.done)
			if q.kind == plan.Recv {
				r.clock += s.cpu(r, s.overhead)
			}
			q.free = true
		case plan.Reduce:
			r.clock += s.cpu(r, s.reduce.of(step.Len))
		case plan.Copy:
			r.clock += s.cpu(r, s.copying.of(step.Len))
		default:
			s.fail(id, "no such kind of step")
			return
		}
		r.steps = r.steps[1:]
		r.taken++
	}
}

func (s *simulation) cpu(r *rank, t ps) ps {
	if r.slow == 1 {
		return t
	}
	return ps(float64(t) * r.slow)
}

// request makes a request of a step.
func (s *simulation) request(id int32, step *plan.Step) bool {
	r := &s.ranks[id]
	if step.Peer < 0 || int(step.Peer) >= len(s.ranks) || step.Peer == id || step.Req < 0 || step.Req > maxRequests || step.Len < 0 {
		s.fail(id, "no such peer, request or length")
		return false
	}
	for int(step.Req) >= len(r.reqs) {
		r.reqs = append(r.reqs, request{free: true})
	}
	if !r.reqs[step.Req].free {
		s.fail(id, "the request is not free")
		return false
	}
	r.reqs[step.Req] = request{kind: step.Kind, peer: step.Peer, len: step.Len, step: r.taken, done: forever}
	return true
}

const maxRequests = 1 << 20

func (s *simulation) send(id int32, step *plan.Step) {
	if !s.request(id, step) {
		return
	}
	r := &s.ranks[id]
	s.result.Messages++
	s.result.Sent += step.Len
	t, matched := s.match(id, step.Peer, true)
	m := &s.transfers[t]
	if matched && m.len != step.Len {
		to := &s.ranks[step.Peer].reqs[m.rreq]
		s.fail(id, fmt.Sprintf("rank %d expects %d bytes (step %d)", step.Peer, m.len, to.step))
		return
	}
	m.sreq, m.len, m.sent, m.sstep = step.Req, step.Len, r.clock, r.taken
	if s.job.Eager == 0 || step.Len <= s.job.Eager {
		m.stage = flying
		s.leave(t, r.clock)
		return
	}
	m.stage = held
	if matched {
		s.events.push(max(r.clock, m.posted+s.back(m)), m.from, ^t)
	}
}

// back returns the time after which the sender knows of a receive.
func (s *simulation) back(m *transfer) ps {
	if s.ranks[m.from].host == s.ranks[m.to].host {
		return s.localLatency
	}
	return s.latency
}

func (s *simulation) recv(id int32, step *plan.Step) {
	if !s.request(id, step) {
		return
	}
	r := &s.ranks[id]
	t, matched := s.match(step.Peer, id, false)
	m := &s.transfers[t]
	m.rreq, m.posted = step.Req, r.clock
	if !matched {
		m.len = step.Len
		return
	}
	if m.len != step.Len {
		s.fail(id, fmt.Sprintf("rank %d sends %d bytes (step %d)", step.Peer, m.len, m.sstep))
		return
	}
	switch {
	case m.stage == held:
		s.events.push(max(m.sent, r.clock+s.back(m)), m.from, ^t)
	case m.arrived != forever:
		r.reqs[step.Req].done = m.arrived
		s.release(t)
	}
}

// match returns the oldest transfer between two ranks that has no partner, or a
// new one.
func (s *simulation) match(from, to int32, sending bool) (t int32, matched bool) {
	inbox := &s.ranks[to].inbox
	i := 0
	for i < len(*inbox) && (*inbox)[i].from != from {
		i++
	}
	if i < len(*inbox) && (*inbox)[i].sends != sending {
		c := &(*inbox)[i]
		t = c.head
		if c.head = s.transfers[t].next; c.head < 0 {
			last := len(*inbox) - 1
			(*inbox)[i] = (*inbox)[last]
			*inbox = (*inbox)[:last]
		}
		return t, true
	}
	if t = s.spare; t >= 0 {
		s.spare = s.transfers[t].next
	} else {
		t = int32(len(s.transfers))
		s.transfers = append(s.transfers, transfer{})
	}
	s.transfers[t] = transfer{next: -1, from: from, to: to, sreq: -1, rreq: -1, arrived: forever}
	if i < len(*inbox) {
		c := &(*inbox)[i]
		s.transfers[c.tail].next, c.tail = t, t
	} else {
		*inbox = append(*inbox, channel{from: from, sends: sending, head: t, tail: t})
	}
	return t, false
}

func (s *simulation) release(t int32) {
	s.transfers[t].next = s.spare
	s.spare = t
}

// leave sends a message at time at. It is called in the order of time.
func (s *simulation) leave(t int32, at ps) {
	m := &s.transfers[t]
	from, to := &s.ranks[m.from], &s.ranks[m.to]
	if from.host == to.host {
		h := &s.hosts[from.host]
		at = max(at, h.memory)
		h.memory = at + s.memory.of(m.len)
		done := max(at+s.local.of(m.len), h.memory)
		s.complete(m.from, m.sreq, done)
		s.arrive(t, done+s.localLatency)
		return
	}
	n, busy := &s.nics[from.nic], s.wire.of(m.len)
	at = max(at, n.out)
	n.out = at + busy
	n.busyOut += busy
	n.carried.Out += m.len
	s.result.Remote += m.len
	s.complete(m.from, m.sreq, n.out)
	late := s.latency
	if s.jitter > 0 {
		late += s.rng.Int64N(s.jitter + 1)
	}
	s.events.push(at+late, m.from, ^t)
}

// move continues a message at time at: it may leave now, or its first byte has reached the
// receiver's host.
func (s *simulation) move(t int32, at ps) {
	m := &s.transfers[t]
	if m.stage == held {
		m.stage = flying
		s.leave(t, at)
		return
	}
	n, busy := &s.nics[s.ranks[m.to].nic], s.wire.of(m.len)
	n.in = max(at, n.in) + busy
	n.busyIn += busy
	n.carried.In += m.len
	s.arrive(t, n.in)
}

func (s *simulation) arrive(t int32, at ps) {
	m := &s.transfers[t]
	m.arrived = at
	if m.rreq >= 0 {
		to, req := m.to, m.rreq
		s.release(t)
		s.complete(to, req, at)
	}
}

// complete ends a request at time at.
func (s *simulation) complete(id, req int32, at ps) {
	r := &s.ranks[id]
	r.reqs[req].done = at
	if r.waiting == req {
		r.waiting = -1
		s.events.push(max(at, r.clock), id, id)
	}
}

func (s *simulation) fail(id int32, why string) {
	s.failed = fmt.Errorf("simulate: rank %d, step %d (%v): %s", id, s.ranks[id].taken, s.ranks[id].steps[0], why)
}

// named is the largest number of ranks that an error names.
const named = 8

// ErrDeadlock says that ranks wait for messages that nobody sends.
var ErrDeadlock = errors.New("deadlock")

// leftOver returns an error if ranks or messages are left when no event is left.
func (s *simulation) leftOver() error {
	var lines []string
	stuck := 0
	for i := range s.ranks {
		r := &s.ranks[i]
		if r.ended {
			continue
		}
		if stuck++; stuck <= named {
			q := r.reqs[r.waiting]
			way := "receive %d bytes from"
			if q.kind == plan.Send {
				way = "send %d bytes to"
			}
			lines = append(lines, fmt.Sprintf("rank %d waits in step %d for step %d, to "+way+" rank %d", i, r.taken, q.step, q.len, q.peer))
		}
	}
	if stuck > named {
		lines = append(lines, fmt.Sprintf("and %d more", stuck-named))
	}
	if stuck > 0 {
		return fmt.Errorf("simulate: %w: %d of %d ranks are stuck: %s", ErrDeadlock, stuck, len(s.ranks), strings.Join(lines, "; "))
	}
	for i := range s.ranks {
		if len(s.ranks[i].inbox) == 0 {
			continue
		}
		c := s.ranks[i].inbox[0]
		m := &s.transfers[c.head]
		if c.sends {
			return fmt.Errorf("simulate: rank %d, step %d: nobody receives its %d bytes to rank %d", m.from, m.sstep, m.len, i)
		}
		return fmt.Errorf("simulate: rank %d, step %d: nobody sends the %d bytes that it receives from rank %d", i, s.ranks[i].reqs[m.rreq].step, m.len, m.from)
	}
	return nil
}
