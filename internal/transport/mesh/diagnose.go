package mesh

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/transport"
)

// Ping asks a peer how far it is.
type Ping struct {
	Round uint64
	About [2]int // ranks whose connections with the peer the answer describes, -1 for none
	Deep  bool   // the peer asks those ranks, and the ranks that it waits for, before it answers again
}

// Pong answers a Ping.
type Pong struct {
	Round, Issued, Completed uint64
	Op                       uint8            // of the oldest collective under way, transport.NoOp if there is none
	Links                    []transport.Link // at most MaxLinks
}

// MaxLinks is how many connections a Pong describes.
const MaxLinks = 5

const (
	// askAgain is how long a rank waits for an answer before it asks the same peer again for
	// others.
	askAgain = 100 * time.Millisecond

	// sampleFor is how long a measurement is used.
	sampleFor = 3 * time.Second

	// answerIn is how long an answer may take until the connection counts as silent.
	answerIn = 150 * time.Millisecond

	// lateAnswer is how much longer than a packet all answers take if this rank may be slow. With 2 Mbit/s
	// they took 36 ms and more while the words of ranks that had left were on their way. Without TCP_INFO
	// answerIn takes its place.
	lateAnswer = 20 * time.Millisecond

	// heardFor is for how long an answer shows that the peer is alive.
	heardFor = 500 * time.Millisecond

	// keptAnswers is how many answers' times are kept. One rank may be slow for a moment.
	keptAnswers = 5

	// interestFor is how long a rank that has asked gets another answer when there is news.
	interestFor = time.Second

	// doubtRounds and doubtRound are how often and for how long a rank whose connection has ended
	// in silence asks the others about the peer.
	doubtRounds = 3
	doubtRound  = 175 * time.Millisecond
)

// inquiry is what a rank knows of a peer from diagnoses.
type inquiry struct {
	ping     uint64    // the round of a PING to answer, 0 if there is none
	answered uint64    // the last round that was answered
	about    [2]int    // of the peer's last deep PING
	interest time.Time // until when the peer gets more answers

	pong       Pong                       // the last answer
	asked      uint64                     // the round of the last PING to the peer
	askedAt    time.Time                  // and when it was sent
	timed      uint64                     // the last round whose answer was timed
	unanswered time.Time                  // when the first PING was sent that the peer has not answered; zero if none
	heard      time.Time                  // when the last answer came
	rtts       [keptAnswers]time.Duration // how long answers took, the last ones
	answers    int                        // how many there were
	sample     uint64                     // bytes of messages moved at sampleAt
	sampleAt   time.Time
	rate       uint64        // bytes a second before sampleAt
	least      time.Duration // that a packet to the peer and its acknowledgement took, 0 if unknown
}

// Pack returns what a Ping has besides its round.
func (p Ping) Pack() (about uint64, deep uint32) {
	about = uint64(uint32(p.About[0]+1)) | uint64(p.About[1]+1)<<32
	if p.Deep {
		deep = 1
	}
	return about, deep
}

// UnpackPing is the reverse of Pack, for a group of size ranks.
func UnpackPing(round, about uint64, deep uint32, size int) (Ping, error) {
	p := Ping{Round: round, About: [2]int{int(uint32(about)) - 1, int(about>>32) - 1}, Deep: deep == 1}
	if deep > 1 || p.About[0] >= size || p.About[1] >= size {
		return p, fmt.Errorf("PING about ranks %d and %d, of kind %d, in a group of %d", p.About[0], p.About[1], deep, size)
	}
	return p, nil
}

// A packed link has four parts, the lowest bits first: the rank (24 bits), flags (8), a time (16),
// and the rate in KiB a second (16). The time is Silent in units of 10 ms if linkSilent is set, else
// RTT in units of 64 us. 0 is no link.
const (
	linkIs = 1 << (24 + iota)
	linkWaits
	linkAnswered
	linkSilent
	linkSends
	linkRecvs

	silentUnit = 10 * time.Millisecond
	rttUnit    = 64 * time.Microsecond
)

// Pack returns the links of an answer.
func (a *Pong) Pack() (packed [MaxLinks]uint64) {
	for i, l := range a.Links[:min(len(a.Links), MaxLinks)] {
		u := uint64(l.Peer) | linkIs
		if l.Waits {
			u |= linkWaits
		}
		if l.Answered {
			u |= linkAnswered
		}
		if l.Sends {
			u |= linkSends
		}
		if l.Recvs {
			u |= linkRecvs
		}
		d := units(uint64(l.RTT), uint64(rttUnit))
		if l.Silent > 0 {
			u |= linkSilent
			d = units(uint64(l.Silent), uint64(silentUnit))
		}
		packed[i] = u | d<<32 | units(l.Rate, 1<<10)<<48
	}
	return packed
}

// units returns n in units, rounded up, in 16 bits.
func units(n, unit uint64) uint64 { return min((n+unit-1)/unit, 1<<16-1) }

// Unpack sets the links of an answer in a group of size ranks.
func (a *Pong) Unpack(packed [MaxLinks]uint64, size int) error {
	for _, u := range packed {
		if u == 0 {
			continue
		}
		l := transport.Link{Peer: int(u & (1<<24 - 1)), Rate: u >> 48 << 10}
		l.Waits, l.Answered = u&linkWaits != 0, u&linkAnswered != 0
		l.Sends, l.Recvs = u&linkSends != 0, u&linkRecvs != 0
		if u&linkIs == 0 || l.Peer >= size {
			return fmt.Errorf("PONG with the link %#x in a group of %d", u, size)
		}
		if d := time.Duration(u >> 32 & 0xffff); u&linkSilent != 0 {
			l.Silent = max(d*silentUnit, 1)
		} else {
			l.RTT = d * rttUnit
		}
		a.Links = append(a.Links, l)
	}
	return nil
}

// pairOf returns ranks as Ping.About.
func pairOf(ranks []int) [2]int {
	pair := [2]int{-1, -1}
	copy(pair[:], ranks)
	return pair
}

// ask sends a PING and reports whether the peer can answer it.
func (p *Peer) ask(ping Ping) bool {
	if p.lost != nil {
		return false
	}
	now := time.Now()
	p.measure(now)
	p.asked, p.askedAt = ping.Round, now
	if p.unanswered.IsZero() {
		p.unanswered = now
	}
	if !p.link.Ping(ping) {
		p.unanswered = time.Time{}
		return false
	}
	return true
}

// measure counts the bytes of messages on the connections.
func (p *Peer) measure(now time.Time) traffic {
	t := p.traffic()
	if t.least > 0 && (p.least == 0 || t.least < p.least) {
		p.least = t.least
	}
	bytes := t.acked + p.link.Received()
	switch d := now.Sub(p.sampleAt); {
	case d > sampleFor || bytes < p.sample:
		p.rate = 0
	case d < askAgain:
		return t
	default:
		p.rate = uint64(float64(bytes-p.sample) / d.Seconds())
	}
	p.sample, p.sampleAt = bytes, now
	return t
}

// traffic adds up the traffic of the connections with the peer. The least time is that of the first one, which
// carries the PINGs.
func (p *Peer) traffic() (sum traffic) {
	for i, c := range p.link.Conns() {
		t := trafficOf(c)
		if i == 0 {
			sum.least = t.least
		}
		sum.acked += t.acked
		if sum.quiet == 0 || t.quiet < sum.quiet {
			sum.quiet = t.quiet
		}
	}
	return sum
}

// Pinged notes a PING. The writer answers it. A deep PING makes this rank ask those that it waits
// for, and those that the PING is about.
func (p *Peer) Pinged(ping Ping) {
	b := p.base
	p.ping = ping.Round
	if !ping.Deep {
		return
	}
	now, waiting := time.Now(), b.waits()
	p.about, p.interest = ping.About, now.Add(interestFor)
	for _, q := range b.peers {
		if q == nil || q == p || q.Gone != nil || b.Ended() != nil || !slices.Contains(ping.About[:], q.Rank) && !q.waits(waiting) {
			continue
		}
		if q.unanswered.IsZero() || now.Sub(q.askedAt) > askAgain {
			b.round++
			q.ask(Ping{Round: b.round, About: pairOf(nil)})
		}
	}
}

// PingWaits reports whether a PING is to be answered.
func (p *Peer) PingWaits() bool { return p.ping != 0 }

// TakePing returns the answer to a PING. ok is false if there is none to answer, or too late.
func (p *Peer) TakePing() (a Pong, ok bool) {
	if p.ping == 0 || p.Ending {
		return Pong{}, false
	}
	p.answered, p.ping = p.ping, 0
	about := pairOf(nil)
	if time.Now().Before(p.interest) {
		about = p.about
	}
	return p.base.answer(p.answered, about), true
}

// answer describes this rank, with MaxLinks connections at most. The ranks of the question come
// first. Then come those that waiting requests need: the silent ones, the moving ones, the others.
func (b *Base) answer(round uint64, about [2]int) Pong {
	waiting := b.waits()
	a := Pong{Round: round, Issued: b.issued.Load(), Completed: b.completed.Load(), Op: waiting.Op}
	for _, p := range b.peers {
		if p == nil || p.Gone != nil {
			continue
		}
		if p.waits(waiting) || slices.Contains(about[:], p.Rank) {
			a.Links = append(a.Links, p.describe(waiting))
		}
	}
	class := func(l transport.Link) int {
		switch {
		case slices.Contains(about[:], l.Peer):
			return 0
		case l.Silent > 0:
			return 1
		case l.Rate > 0:
			return 2
		}
		return 3
	}
	slices.SortStableFunc(a.Links, func(x, y transport.Link) int { return class(x) - class(y) })
	a.Links = a.Links[:min(len(a.Links), MaxLinks)]
	return a
}

// waits reports whether this rank waits for p.
func (p *Peer) waits(w transport.Waiting) bool { return w.Peers[p.Rank] != 0 || p.link.Waits() }

// describe returns what this rank knows of its connection with p.
func (p *Peer) describe(w transport.Waiting) transport.Link {
	now := time.Now()
	late := p.overdue(now)
	needs := w.Peers[p.Rank]
	l := transport.Link{Peer: p.Rank, Waits: p.waits(w), Sends: needs&transport.NeedsSend != 0, Recvs: needs&transport.NeedsRecv != 0, Answered: p.lost == nil && !late && now.Sub(p.heard) < heardFor}
	if now.Sub(p.heard) < sampleFor {
		l.RTT = p.rtt()
	}
	t := p.measure(now)
	l.Rate = p.rate
	switch {
	case p.lost != nil:
		l.Silent, l.Quiet = max(now.Sub(p.askedAt), time.Millisecond), t.quiet
	case late:
		l.Silent, l.Quiet = now.Sub(p.unanswered), t.quiet
	}
	return l
}

// Ponged notes the answer to a PING. Ranks that have asked about this peer get news, but not of news: ranks that
// wait for each other in a circle would send it round for ever.
func (p *Peer) Ponged(a Pong) {
	b, now, first := p.base, time.Now(), a.Round > p.pong.Round
	if now.Sub(p.heard) > sampleFor {
		p.answers = 0
	}
	p.pong, p.heard = a, now
	p.unanswered = time.Time{}
	if a.Round < p.asked {
		p.unanswered = p.askedAt
	} else if a.Round > p.timed {
		p.rtts[p.answers%keptAnswers] = now.Sub(p.askedAt)
		p.answers++
		p.timed = a.Round
	}
	b.Changed()
	if !first {
		return
	}
	waits := p.waits(b.waits())
	for _, q := range b.peers {
		if q != nil && q != p && q.Gone == nil && q.ping == 0 && now.Before(q.interest) && (waits || slices.Contains(q.about[:], p.Rank)) {
			q.ping = q.answered
			q.link.Answer()
		}
	}
}

// pause waits for d or until the mesh ends.
func (b *Base) pause(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.Await(ctx, func() bool { return false })
}

// InSilence reports whether a connection has ended with err because the other host acknowledged
// nothing, or could not be reached.
func InSilence(err error) bool {
	return errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
}

// Unsure reports whether the end of the connection with p, with err, does not show that p is to blame.
// That is so if the connection has ended in silence, or if no rank answers this one in time. In the
// second case the others may have blamed this rank and left. Their last words may be behind data that
// have not arrived. Doubt finds out. Mu is held.
func (p *Peer) Unsure(err error) bool { return InSilence(err) || p.base.hearsLate() }

// hearsLate reports whether this rank has asked several ranks lately, and none has answered in time. Ranks
// of its own host count only if there are no others: their answers say nothing of the host's network. Ranks
// of PyTorch do not answer, and do not count. Mu is held.
func (b *Base) hearsLate() bool {
	now, late, far := time.Now(), 0, b.hasFar()
	for _, p := range b.peers {
		switch {
		case p == nil || !p.Native || p.Gone != nil || far && p.Near || p.askedAt.IsZero() || now.Sub(p.askedAt) > sampleFor:
		case p.lost == nil && p.answers > 0 && !p.answersLate() && !p.overdue(now):
			return false
		default:
			late++
		}
	}
	return late > 1
}

// answersLate reports whether the answers of a peer mostly took much longer than a packet takes.
func (p *Peer) answersLate() bool {
	if p.least == 0 {
		return p.rtt() >= answerIn
	}
	return p.rtt()-p.least >= lateAnswer
}

// overdue reports whether an answer of the peer should have come by now.
func (p *Peer) overdue(now time.Time) bool {
	return !p.unanswered.IsZero() && now.Sub(p.unanswered) >= answerIn+p.least
}

// hasFar reports whether there are ranks on other hosts. Mu is held.
func (b *Base) hasFar() bool {
	return slices.ContainsFunc(b.peers, func(p *Peer) bool { return p != nil && !p.Near })
}

// rtt returns how long answers of a peer mostly took, 0 if there were none. Of two it is the quicker one: a rank
// that waits for a CPU is late once.
func (p *Peer) rtt() time.Duration {
	n := min(p.answers, keptAnswers)
	if n == 0 {
		return 0
	}
	last := p.rtts
	slices.Sort(last[:n])
	return last[(n-1)/2]
}

// Doubt finds out what the end of the connection with p, with err, means: p need not be to blame. It asks the
// other ranks about p: its host may be gone, or only the link to it. If p has
// died, the mesh goes on while no request needs p. Else it ends. Mu is held.
func (p *Peer) Doubt(err error) {
	if p.lost != nil {
		return
	}
	p.lost = err
	p.unanswered = time.Time{}
	b := p.base
	// A connection that was reset is doubted if this rank may be slow. So may be the others of its host.
	far := !InSilence(err) && b.hasFar()
	begun := time.Now()
	b.Goroutines.Add(1)
	go func() {
		defer b.Goroutines.Done()
		heard, sees := false, false
		answered := make([]bool, b.size) // ranks that had answered when the round began
		var first uint64                 // the number of the last question before the first round
		for n := 0; n < doubtRounds && !sees && b.Fault() == nil; n++ {
			b.Mu.Lock()
			before := b.round
			if n == 0 {
				first = before
			}
			b.Mu.Unlock()
			b.Diagnose(doubtRound, p.Rank)
			// Ranks answer at once, and again when they have heard of p.
			b.pause(doubtRound)
			b.Mu.Lock()
			for _, q := range b.peers {
				if q == nil || q == p || far && q.Near {
					continue
				}
				heard = heard || q.heard.After(begun)
				// The first answer may be from before q has noticed anything. By the second one, q has asked p
				// itself, and p should have answered.
				if answered[q.Rank] && q.pong.Round > before {
					sees = sees || slices.ContainsFunc(q.pong.Links, func(l transport.Link) bool { return l.Peer == p.Rank && l.Answered })
				}
				answered[q.Rank] = q.pong.Round > first
			}
			b.Mu.Unlock()
		}
		b.Mu.Lock()
		defer b.Mu.Unlock()
		f := p.Fault(transport.FaultPeerDied, err)
		switch {
		case sees:
			f.Kind = transport.FaultLink
			f.Err = fmt.Errorf("both ranks are alive, and %w", err)
		case !heard && b.size > 2:
			f.Kind, f.Rank = transport.FaultTimeout, -1
			if InSilence(err) {
				f.Rank = b.rank
			}
			f.Err = fmt.Errorf("no other rank answers this one: %w", err)
		case b.Ended() == nil:
			p.link.Died(f)
			return
		}
		b.Fail(f)
	}()
}
