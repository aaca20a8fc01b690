package mesh

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport"
)

// TestPack: what a PING and a PONG carry arrives, in the units of the wire.
func TestPack(t *testing.T) {
	a := Pong{Links: []transport.Link{
		{Peer: 0, Waits: true, Answered: true, RTT: 640 * time.Microsecond, Rate: 1 << 20},
		{Peer: 9, Silent: 2 * time.Second},
		{Peer: 3, Waits: true, Silent: time.Hour, Rate: 1 << 40},
		{Peer: 4, RTT: 1, Rate: 1},
		{Peer: 5, Waits: true, Sends: true, Recvs: true},
		{Peer: 6}, // one too many
	}}
	var got Pong
	require.NoError(t, got.Unpack(a.Pack(), 10))
	require.Equal(t, []transport.Link{
		a.Links[0], a.Links[1],
		{Peer: 3, Waits: true, Silent: 65535 * silentUnit, Rate: 65535 << 10},
		{Peer: 4, RTT: rttUnit, Rate: 1 << 10},
		{Peer: 5, Waits: true, Sends: true, Recvs: true},
	}, got.Links)
	for _, bad := range []uint64{10 | linkIs, 1} {
		require.ErrorContains(t, new(Pong).Unpack([MaxLinks]uint64{bad}, 10), "PONG with the link", "%#x", bad)
	}
	for _, p := range []Ping{{7, [2]int{-1, -1}, false}, {8, [2]int{0, 9}, true}} {
		about, deep := p.Pack()
		require.Equal(t, p, must.Get(UnpackPing(p.Round, about, deep, 10)))
	}
	for _, bad := range []struct {
		about uint64
		deep  uint32
	}{{0, 2}, {11, 0}, {11 << 32, 1}, {1 << 63, 1}} {
		require.ErrorContains(t, must.Err(UnpackPing(1, bad.about, bad.deep, 10)), "PING about", "%+v", bad)
	}
}

// TestNews: a rank that has asked about another one hears of its first answer to a question, not of the answers that
// follow. Ranks that wait for each other in a circle would send these round for ever.
func TestNews(t *testing.T) {
	var b Base
	b.Init(0, 3, Limits{}, func() {})
	var peers []*Peer
	for r := 1; r < 3; r++ {
		p := &Peer{Native: true}
		b.Add(r, p, &speaker{p: p})
		peers = append(peers, p)
	}
	b.SetWaiting(func() transport.Waiting {
		return transport.Waiting{Op: 3, Peers: map[int]transport.Needs{1: transport.NeedsSend}}
	})
	b.Mu.Lock()
	defer b.Mu.Unlock()
	peers[1].Pinged(Ping{Round: 7, About: pairOf(nil), Deep: true})
	a, ok := peers[1].TakePing()
	require.True(t, ok)
	require.EqualValues(t, 3, a.Op)
	require.Len(t, a.Links, 1)
	require.True(t, a.Links[0].Waits && a.Links[0].Sends && !a.Links[0].Recvs)
	require.Equal(t, b.round, peers[0].asked, "the rank that this one waits for is asked")
	peers[0].Ponged(Pong{Round: b.round})
	_, ok = peers[1].TakePing()
	require.True(t, ok, "there is news")
	peers[0].Ponged(Pong{Round: b.round})
	require.False(t, peers[1].PingWaits())
}

// TestUnsure: a rank that gets late answers from all other hosts does not trust the end of a connection. Quick
// answers of its own host change nothing.
func TestUnsure(t *testing.T) {
	const ms, prompt, slow = time.Millisecond, time.Millisecond, 800 * time.Millisecond
	const untimed = -1 // it was asked, and has answered only earlier questions
	type peer struct {
		near  bool
		rtt   time.Duration // 0: it was not asked
		least time.Duration // that a packet takes, 0: unknown
	}
	for _, c := range []struct {
		name  string
		peers []peer
		want  bool
	}{
		{"nobody was asked", []peer{{}, {}, {}}, false},
		{"all are late", []peer{{rtt: slow}, {rtt: slow}, {rtt: slow}}, true},
		{"all are a bit late", []peer{{rtt: 37 * ms, least: ms}, {rtt: slow, least: ms}, {rtt: 84 * ms, least: ms}}, true},
		{"all may be far away", []peer{{rtt: 37 * ms}, {rtt: slow}, {rtt: 84 * ms}}, false},
		{"one is far away", []peer{{rtt: 101 * ms, least: 100 * ms}, {rtt: slow, least: ms}, {rtt: 37 * ms, least: ms}}, false},
		{"all are far away and late", []peer{{rtt: 121 * ms, least: 100 * ms}, {rtt: slow, least: 200 * ms}}, true},
		{"one answers too late", []peer{{rtt: slow}, {rtt: untimed}, {rtt: slow}}, true},
		{"one answers", []peer{{rtt: slow}, {rtt: slow}, {rtt: prompt}}, false},
		{"a rank of this host answers", []peer{{near: true, rtt: prompt}, {rtt: slow}, {rtt: slow}}, true},
		{"one other host is late", []peer{{near: true, rtt: prompt}, {rtt: slow}}, false},
		{"one host, all are late", []peer{{near: true, rtt: slow}, {near: true, rtt: slow}}, true},
		{"one host, one answers", []peer{{near: true, rtt: slow}, {near: true, rtt: prompt}}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b Base
			b.Init(0, len(c.peers)+1, Limits{}, func() {})
			for i, x := range c.peers {
				p := &Peer{Rank: i + 1, Native: true, Near: x.near, base: &b}
				p.least = x.least
				if x.rtt != 0 {
					p.askedAt, p.heard = time.Now(), time.Now()
				}
				if x.rtt > 0 {
					p.answers, p.rtts[0] = 1, x.rtt
				}
				b.peers[i+1] = p
			}
			b.Mu.Lock()
			defer b.Mu.Unlock()
			require.Equal(t, c.want, b.peers[1].Unsure(io.EOF))
			require.True(t, b.peers[1].Unsure(syscall.ETIMEDOUT))
		})
	}
}

// speaker is the Link of a peer that answers questions, n counted from 0, after a time.
type speaker struct {
	Link
	p      *Peer
	n      int
	after  time.Duration
	answer func(n int) *Pong // nil: no answer
}

func (s *speaker) Ping(q Ping) bool {
	n := s.n
	s.n++
	if s.answer == nil || s.answer(n) == nil {
		return true
	}
	a := *s.answer(n)
	a.Round = q.Round
	if s.after == 0 {
		s.p.Ponged(a)
		return true
	}
	time.AfterFunc(s.after, func() {
		s.p.base.Mu.Lock()
		defer s.p.base.Mu.Unlock()
		s.p.Ponged(a)
	})
	return true
}

func (s *speaker) Cut()                               {}
func (s *speaker) Answer()                            {}
func (s *speaker) Waits() bool                        { return false }
func (s *speaker) Received() uint64                   { return 0 }
func (s *speaker) Conns() []net.Conn                  { return nil }
func (s *speaker) DropQueued(error)                   {}
func (s *speaker) EndRequests(error)                  {}
func (s *speaker) Finish(*transport.Fault, time.Time) {}
func (s *speaker) Died(f *transport.Fault)            { s.p.Depart(f, true) }

// TestDoubt: whom a rank blames when connections end while answers are late.
func TestDoubt(t *testing.T) {
	const ms = time.Millisecond
	hears := &Pong{Links: []transport.Link{{Peer: 1, Answered: true}}}
	always := func(int) *Pong { return hears }
	first := func(n int) *Pong { // from before the rank has read the end of its own connection
		if n == 0 {
			return hears
		}
		return &Pong{}
	}
	second := func(n int) *Pong {
		if n == 0 {
			return nil
		}
		return first(n - 1)
	}
	type peer struct {
		near       bool
		rtt, least time.Duration // of earlier answers, and of packets
		after      time.Duration
		answer     func(int) *Pong
	}
	for name, c := range map[string]struct {
		peers []peer // from rank 1 on
		ended []int  // whose connections end
		kind  transport.FaultKind
		rank  int
	}{
		"rank 1 is killed, the others have not read that yet": {
			[]peer{{rtt: 25 * ms, least: ms}, {rtt: 25 * ms, least: ms, answer: first}, {rtt: 25 * ms, least: ms, answer: first}}, []int{1}, transport.FaultPeerDied, 1},
		"rank 1 is killed, and the first answer comes late": {
			[]peer{{rtt: 25 * ms, least: ms}, {rtt: 25 * ms, least: ms, answer: second}, {rtt: 25 * ms, least: ms, answer: second}}, []int{1}, transport.FaultPeerDied, 1},
		"the link to rank 1 breaks": {
			[]peer{{rtt: 25 * ms, least: ms}, {rtt: 25 * ms, least: ms, answer: always}}, []int{1}, transport.FaultLink, 1},
		"the link to rank 1 breaks, all are far away": {
			[]peer{{rtt: 400 * ms, least: 300 * ms}, {rtt: 400 * ms, least: 300 * ms, after: 300 * ms, answer: always}}, []int{1}, transport.FaultLink, 1},
		"this rank is slow, the others have left": {
			[]peer{{rtt: 60 * ms, least: ms}, {rtt: 60 * ms, least: ms}}, []int{1, 2}, transport.FaultTimeout, -1},
		"rank 1 is killed, all are far away": {
			[]peer{{rtt: 500 * ms, least: 400 * ms}, {rtt: 500 * ms, least: 400 * ms, after: 400 * ms, answer: first}}, []int{1}, transport.FaultPeerDied, 1},
		"the other site dies, 25 ms away": {
			[]peer{{rtt: 25 * ms, least: 24 * ms}, {rtt: 25 * ms, least: 24 * ms}, {near: true, rtt: ms, least: ms, answer: first}}, []int{1, 2}, transport.FaultPeerDied, 1},
		"the other site dies, 100 ms away": {
			[]peer{{rtt: 101 * ms, least: 100 * ms}, {rtt: 101 * ms, least: 100 * ms}, {near: true, rtt: ms, least: ms, answer: first}}, []int{1, 2}, transport.FaultPeerDied, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b Base
				b.Init(0, len(c.peers)+1, Limits{Close: time.Second}, func() {})
				for i, x := range c.peers {
					p := &Peer{Native: true, Near: x.near}
					b.Add(i+1, p, &speaker{p: p, after: x.after, answer: x.answer})
					p.askedAt, p.heard, p.answers, p.rtts[0], p.least = time.Now(), time.Now(), 1, x.rtt, x.least
				}
				err := fmt.Errorf("read: %w", syscall.ECONNRESET)
				b.Mu.Lock()
				for _, r := range c.ended {
					if p := b.peers[r]; p.Unsure(err) {
						p.Doubt(err)
					} else {
						b.Fail(p.Fault(transport.FaultPeerDied, err))
					}
				}
				b.Mu.Unlock()
				b.Goroutines.Wait()
				f := b.Fault()
				require.Equal(t, c.kind, f.Kind, "%v", f)
				require.Equal(t, c.rank, f.Rank, "%v", f)
				time.Sleep(time.Second) // until all answers have come
			})
		})
	}
}

// TestOneLateAnswer: the second answer shows that the first was late by chance.
func TestOneLateAnswer(t *testing.T) {
	for _, x := range []struct {
		want    time.Duration
		answers []time.Duration
	}{
		{0, nil},
		{63, []time.Duration{63}},
		{1, []time.Duration{63, 1}},
		{2, []time.Duration{63, 1, 2}},
		{2, []time.Duration{63, 1, 2, 64}},
		{3, []time.Duration{63, 1, 2, 64, 3}},
		{3, []time.Duration{63, 1, 2, 64, 3, 4}},
	} {
		var p Peer
		for _, d := range x.answers {
			p.rtts[p.answers%keptAnswers] = d
			p.answers++
		}
		require.Equal(t, x.want, p.rtt(), "%v", x.answers)
	}
}
