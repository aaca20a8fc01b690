package tcp

import (
	"runtime"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

const (
	// pollFor is how long a waiting goroutine polls where each rank has a CPU. It is several
	// times what a message to a sleeping receiver takes (4 bytes, both
	// ways: 25 us asleep, 9 us polling). With 20 us, two ranks that had missed each other once
	// kept doing so: all-reduces of 64 KiB took 22 us in some runs and 130 us in others.
	pollFor = 100 * time.Microsecond

	// looksPerClock is how many times a polling goroutine reads the sockets before it reads the
	// clock and lets other goroutines run.
	looksPerClock = 8

	// After polling, the reader goroutines of the connections stay paused. They are resumed
	// when nobody has polled for resumeAfter, or up to twice that. While somebody does poll,
	// the interval grows to resumeAfterMax, because each timer that goes off slows down all
	// ranks a little.
	resumeAfter    = 200 * time.Microsecond
	resumeAfterMax = 5 * time.Millisecond

	// maxPolled is how many connections are polled at a time.
	maxPolled = 16
)

// setShare sets how long the ranks of this host poll, which share so many CPUs, and whether they
// have enough for more connections.
func (m *Mesh) setShare(ranks, cpus int) {
	m.sharesCPUs = ranks > cpus
	m.manyCPUs = cpus >= ranks*cpusForLanes
	if m.opts.Poll == 0 {
		m.opts.Poll = pollFor * time.Duration((ranks+cpus-1)/cpus)
	}
}

// PollUntil reads what peers send, in the calling goroutine, until w has finished or
// Options.Poll is over. The caller has to sleep then. Requests end without PollUntil too, but a
// small message takes several times as long if the goroutine that waits for it has to be woken.
func (m *Mesh) PollUntil(w transport.Waiter) {
	if m.opts.Poll <= 0 || m.Size() == 1 {
		return
	}
	m.pollers.Add(1)
	finished := m.poll(w)
	m.polls.Add(1)
	m.pollers.Add(-1)
	if finished {
		m.leave()
	} else {
		m.ResumeReaders()
	}
}

// poll reports whether w has finished. Otherwise time is over, or there is nothing to poll.
func (m *Mesh) poll(w transport.Waiter) (finished bool) {
	var start time.Time
	from := 0
	for n := 1; !w.Finished(); n++ {
		var peers [maxPolled]*pair
		m.Mu.Lock()
		if m.Ended() != nil {
			m.Mu.Unlock()
			return false
		}
		from = m.expecting(&peers, from)
		m.Mu.Unlock()
		moved := false
		for _, p := range peers {
			if p == nil {
				break
			}
			if p.in.poll(false) {
				moved = true
			}
		}
		switch {
		case moved:
			n, start = 0, time.Time{}
		case peers[0] == nil:
			return false // what it waits for needs no reader
		case start.IsZero():
			start = time.Now()
		case n%looksPerClock == 0:
			if time.Since(start) > m.opts.Poll {
				return false
			}
			runtime.Gosched()
		}
		if m.sharesCPUs && !moved {
			yield()
		}
	}
	return true
}

// expecting collects up to maxPolled pairs that have to send something, beginning with rank
// from, and returns the rank to begin with next. m.Mu is held.
func (m *Mesh) expecting(peers *[maxPolled]*pair, from int) int {
	n := 0
	for i := range m.pairs {
		at := (from + i) % len(m.pairs)
		p := m.pairs[at]
		if p == nil || p.in.sock == nil || m.AnySlots() == 0 && !p.filling && !p.s.needsPeer() {
			continue
		}
		peers[n] = p
		if n++; n == maxPolled {
			return at + 1
		}
	}
	return from
}

// leave ends a PollUntil that has succeeded. Readers of connections with more data to come are
// resumed at once. The others are resumed when nobody has polled for some time.
func (m *Mesh) leave() {
	m.Mu.Lock()
	var peers [maxPolled]*pair
	m.expecting(&peers, 0)
	ended := m.Ended() != nil
	if !m.idle.Pending {
		m.idle.After(max(m.idle.Pause, resumeAfter))
	}
	m.Mu.Unlock()
	switch {
	case ended || peers[maxPolled-1] != nil:
		m.ResumeReaders()
	default:
		for _, p := range peers {
			if p == nil {
				break
			}
			p.in.resume()
		}
	}
}

// resumeIdle resumes all readers if nobody has polled since the last call.
func (m *Mesh) resumeIdle() {
	m.Mu.Lock()
	polls := m.polls.Load()
	idle := polls == m.seen && m.pollers.Load() == 0
	m.seen = polls
	if idle {
		m.idle.Rest()
		m.idle.Pause = resumeAfter
	} else {
		m.idle.After(min(2*m.idle.Pause, resumeAfterMax))
	}
	m.Mu.Unlock()
	if idle {
		m.ResumeReaders()
	}
}

// ResumeReaders resumes the reader goroutines of all connections, which polling has paused.
// Without it, that happens a few milliseconds after the last PollUntil.
func (m *Mesh) ResumeReaders() {
	for _, p := range m.pairs {
		if p != nil {
			p.in.resume()
		}
	}
}

// resume lets the connection wake its reader goroutine again.
func (in *input) resume() {
	if in.sock == nil {
		return
	}
	in.mu.Lock()
	in.resumeLocked()
	in.mu.Unlock()
}

// ranksOnHost returns how many ranks have the same first address as rank.
func ranksOnHost(addrs []address, rank int) int {
	n := 0
	for _, a := range addrs {
		if a.places[0].Addr() == addrs[rank].places[0].Addr() {
			n++
		}
	}
	return n
}
