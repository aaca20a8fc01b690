package tcp

import (
	"runtime"
	"time"
)

const (
	// pollFor is for how long who waits polls where each rank has a CPU. It is several times
	// what a message takes whose receiver sleeps (BenchmarkPingPong of 4 bytes, both ways:
	// 25 us asleep, 9 us polling), or two ranks that have once missed each other would go on
	// doing so: with 20 us, all-reduces of 64 KiB took 22 us in some runs and 130 in others.
	pollFor = 100 * time.Microsecond

	// writersTurn divides the time where a goroutine of this rank waits to write, for which
	// it may need the CPU: on 2 CPUs, all-reduces of 16 MiB take 5.6 ms so, and else 5.6 to 6.6.
	writersTurn = 4

	// glance is how many times who polls looks at the sockets before it looks at
	// the clock and lets other goroutines run.
	glance = 8

	// Connections that who has polled them left without a reader get it back after
	// seeAfter, or twice that, without another who polls; while there are some, the
	// time grows to seeAfterMax, because a timer that goes off costs all ranks a little.
	seeAfter    = 200 * time.Microsecond
	seeAfterMax = 5 * time.Millisecond

	// Who has polled in vain does not try the next time, and after n times in a row not
	// the next 2^n-1 times, but for at most idleTimes: the other ranks may be late because
	// they lack the very CPU.
	idleTimes = 15

	// crowd is how many connections are polled at a time.
	crowd = 16
)

// shareCPUs sets how ranks of this host poll that have so many CPUs together.
func (m *Mesh) shareCPUs(ranks, cpus int) {
	m.shares = ranks > cpus
	if m.opts.Poll == 0 {
		m.opts.Poll = pollFor * time.Duration((ranks+cpus-1)/cpus)
	}
}

// Waiter is somebody who waits for requests and lends the goroutine for it.
type Waiter interface {
	// Finished reports whether there is nothing left to wait for. It is asked often.
	Finished() bool
}

// Help reads what peers send in the calling goroutine, until w has finished, or for a
// while, or not at all where that is of no use: then w has to sleep. Requests end
// without it too, but a message takes several times as long when the goroutine that
// waits for it has to be woken.
func (m *Mesh) Help(w Waiter) {
	if m.opts.Poll <= 0 || m.Size() == 1 {
		return
	}
	if skip := m.skip.Load(); skip > 0 {
		m.skip.Store(skip - 1)
		m.See()
		return
	}
	m.helpers.Add(1)
	got := m.poll(w)
	m.helps.Add(1)
	m.helpers.Add(-1)
	switch got {
	case inTime:
		m.vain.Store(0)
		m.leave()
	case inVain:
		vain := min(2*m.vain.Load()+1, idleTimes)
		m.vain.Store(vain)
		m.skip.Store(vain)
		fallthrough
	case other:
		m.See()
	}
}

// What comes of polling.
const (
	inTime = iota
	inVain
	other // there is nothing to poll
)

func (m *Mesh) poll(w Waiter) int {
	var start time.Time
	from := 0
	for n := 1; !w.Finished(); n++ {
		var peers [crowd]*pair
		m.Mu.Lock()
		if m.Ended() != nil {
			m.Mu.Unlock()
			return other
		}
		from = m.expecting(&peers, from)
		limit, what := m.opts.Poll, inVain
		for _, p := range peers {
			if p != nil && p.first.busy {
				limit, what = limit/writersTurn, other
			}
		}
		m.Mu.Unlock()
		moved := false
		for _, p := range peers {
			if p == nil {
				break
			}
			if p.in.help(false) {
				moved = true
			}
		}
		switch {
		case moved:
			n, start = 0, time.Time{}
		case peers[0] == nil:
			return other // what it waits for needs no reader
		case start.IsZero():
			start = time.Now()
		case n%glance == 0:
			if time.Since(start) > limit {
				return what
			}
			runtime.Gosched()
		}
		if m.shares && !moved {
			yield()
		}
	}
	return inTime
}

// expecting collects pairs from which something has to come, beginning with number from,
// and returns with which to begin next. m.Mu is held.
func (m *Mesh) expecting(peers *[crowd]*pair, from int) int {
	n := 0
	for i := range m.pairs {
		at := (from + i) % len(m.pairs)
		p := m.pairs[at]
		if p == nil || p.in.poll == nil || m.AnySlots() == 0 && !p.filling && !p.s.needed() {
			continue
		}
		peers[n] = p
		if n++; n == crowd {
			return at + 1
		}
	}
	return from
}

// leave is the end of a Help that has succeeded. Connections from which something else is
// to come get their readers back at once, others when nobody has helped for a while.
func (m *Mesh) leave() {
	m.Mu.Lock()
	var peers [crowd]*pair
	m.expecting(&peers, 0)
	ended := m.Ended() != nil
	m.Mu.Unlock()
	if !ended {
		m.idle.Start()
	}
	switch {
	case ended || peers[crowd-1] != nil:
		m.See()
	default:
		for _, p := range peers {
			if p == nil {
				break
			}
			p.in.awake()
		}
	}
}

// resumeIdle gives connections their readers back if nobody has helped since the last call.
func (m *Mesh) resumeIdle() (again bool) {
	m.Mu.Lock()
	helps := m.helps.Load()
	idle := helps == m.seen && m.helpers.Load() == 0
	m.seen = helps
	ended := m.Ended() != nil
	m.Mu.Unlock()
	if idle {
		m.idle.Shrink()
		m.See()
		return false
	}
	m.idle.Grow()
	return !ended
}

// See makes the mesh take notice of everything that comes, without Help, from now on and
// until the next Help. It does so by itself a few milliseconds after the last one.
func (m *Mesh) See() {
	for _, p := range m.pairs {
		if p != nil {
			p.in.awake()
		}
	}
}

// awake is see for who does not read.
func (in *input) awake() {
	if in.poll == nil {
		return
	}
	in.mu.Lock()
	in.see()
	in.mu.Unlock()
}

// neighbours returns how many ranks are on this rank's host, as far as their addresses tell.
func neighbours(addrs []address, rank int) int {
	n := 0
	for _, a := range addrs {
		if a.places[0].Addr() == addrs[rank].places[0].Addr() {
			n++
		}
	}
	return n
}
