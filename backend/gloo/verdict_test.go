package gloo

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
)

// told is a mesh of ranks that always say the same, or something else after long questions. It notes which ranks
// got those.
type told struct {
	transport.Mesh
	health, then []transport.Health
	long         [][]int
}

func (m *told) Diagnose(time.Duration, ...int) []transport.Health { return m.health }

func (m *told) DiagnoseLink(_ time.Duration, _, _ int, long ...int) []transport.Health {
	m.long = append(m.long, long)
	if m.then != nil {
		m.health = m.then
	}
	return m.health
}

// TestLongQuestions: the ranks of other hosts take turns. The rank whose turn it is gets long questions and asks
// both ends of the slow link, or it is this rank. The questions stop once both ends have answered at once.
func TestLongQuestions(t *testing.T) {
	const ms, left = time.Millisecond, -2
	link := func(peer int, rate uint64, long time.Duration) transport.Link {
		return transport.Link{Peer: peer, Answered: true, RTT: ms, Rate: rate, Long: long}
	}
	for name, c := range map[string]struct {
		self  int
		hosts *plan.Layout
		long  time.Duration
		want  [][]int
	}{
		"another rank":               {2, nil, 0, [][]int{{0, 1}, {3}, {0, 1}, {3}}},
		"an end":                     {0, nil, 0, [][]int{{2}, {3}, {2}, {3}}},
		"an end, quick answers":      {1, nil, 2 * ms, [][]int{{2}}},
		"on the host of an end":      {3, plan.NewLayout([]int{0, 1, 2, 0}), 0, [][]int{{2}, {2}, {2}, {2}}},
		"two hosts have one network": {0, plan.NewLayout([]int{0, 1, 1, 0}), 0, nil},
		"all others are PyTorch's":   {0, nil, -1, nil},
		"a rank has left":            {0, nil, left, [][]int{{3}, {3}, {3}, {3}}},
	} {
		t.Run(name, func(t *testing.T) {
			in := func(rank int, l ...transport.Link) transport.Health {
				return transport.Health{Rank: rank, Native: true, Answered: true, Issued: 2, Completed: 1, Links: l}
			}
			m := &told{health: []transport.Health{in(0, link(1, 250_000, 0)), in(1, link(0, 250_000, 0)), in(2), in(3)}}
			switch c.long {
			case left:
				m.health[2] = transport.Health{Rank: 2, Native: true, Departed: true}
			case -1:
				m.health[2], m.health[3] = transport.Health{Rank: 2}, transport.Health{Rank: 3}
			}
			if c.long >= 0 {
				m.then = slices.Clone(m.health)
				m.then[2] = in(2, link(0, 0, c.long), link(1, 0, c.long))
			}
			e := evidence{silentFrom: linkSilent, self: c.self, collective: true, call: 1, peer: -1, hosts: c.hosts}
			var v verdict
			for n := range 2 * leastRounds {
				e.ask(m, 0, v, nil)
				v = e.judge()
				require.False(t, v.long && !v.weak, "round %d", n+1)
			}
			require.Equal(t, c.want, m.long)
		})
	}
}

// TestLastLongQuestion: an asker says a round later how late the answers to its long questions were. The rank that
// diagnoses asks once more after the last of them.
func TestLastLongQuestion(t *testing.T) {
	const ms = time.Millisecond
	in := func(rank int, l ...transport.Link) transport.Health {
		return transport.Health{Rank: rank, Native: true, Answered: true, Issued: 2, Completed: 1, Links: l}
	}
	link := func(peer int, rate uint64, long time.Duration) transport.Link {
		return transport.Link{Peer: peer, Answered: true, RTT: ms, Rate: rate, Long: long}
	}
	m := &told{health: []transport.Health{in(0, link(1, 250_000, 0)), in(1, link(0, 250_000, 0)), in(2, link(0, 0, 90*ms), link(1, 0, 2*ms))}}
	e := evidence{silentFrom: linkSilent, self: 0, collective: true, call: 1, peer: -1}
	var v verdict
	ask := func(rounds int) {
		for range rounds {
			e.ask(m, 0, v, nil)
			v = e.judge()
		}
	}
	ask(leastRounds + longRounds) // the link is blamed from round leastRounds on
	require.Len(t, m.long, longRounds)
	require.True(t, v.weak)
	require.False(t, v.long)
	m.health = slices.Clone(m.health)
	m.health[2] = in(2, link(0, 0, 4*ms), link(1, 0, 2*ms))
	ask(1)
	require.Equal(t, 1, v.other, "the last answer was quick: %s", v.why)
	require.False(t, v.weak)
	require.Len(t, m.long, longRounds)
}

// TestSure: a rank in a collective may be between two messages if it waits for no rank. It takes all rounds to
// blame it. A rank that does not send a message is blamed sooner. One in an earlier operation is blamed later: it may
// be about to say for whom it waited there.
func TestSure(t *testing.T) {
	wait := transport.Link{Peer: 1, Waits: true, Answered: true}
	for name, c := range map[string]struct {
		issued, completed uint64
		collective        bool
		sure, weak        bool
	}{
		"in an earlier operation": {1, 0, true, false, true},
		"in this operation":       {2, 1, true, false, false},
		"a message does not come": {2, 1, false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			e := evidence{silentFrom: linkSilent, self: 0, collective: c.collective, call: 1, peer: 1}
			for range 2 {
				e.hear([]transport.Health{
					{Rank: 0, Native: true, Answered: true, Issued: 2, Completed: 1, Links: []transport.Link{wait}},
					{Rank: 1, Native: true, Answered: true, Issued: c.issued, Completed: c.completed},
				})
			}
			v := e.judge()
			require.Equal(t, 1, v.rank, v.why)
			require.Equal(t, c.sure, v.sure)
			require.Equal(t, c.weak, v.weak)
			for e.round < idleRounds {
				e.hear(e.health)
			}
			require.False(t, e.judge().weak)
		})
	}
}

// TestJudge: what answers show, and whom they blame.
func TestJudge(t *testing.T) {
	const ms, s = time.Millisecond, time.Second
	in := func(rank int, l ...transport.Link) transport.Health {
		return transport.Health{Rank: rank, Native: true, Answered: true, Issued: 2, Completed: 1, Links: l}
	}
	mute := func(rank int) transport.Health { return transport.Health{Rank: rank, Native: true} }
	idle := func(rank int) transport.Health {
		return transport.Health{Rank: rank, Native: true, Answered: true, Issued: 1, Completed: 1}
	}
	ended := func(rank int) transport.Health {
		return transport.Health{Rank: rank, Native: true, Answered: true, Issued: 3, Completed: 2, Links: []transport.Link{{Peer: 0, Answered: true, RTT: ms}}}
	}
	hosts := plan.NewLayout([]int{0, 0, 1, 1, 2})
	on := func(peer int) transport.Link { return transport.Link{Peer: peer, Waits: true, Answered: true, RTT: ms} }
	dead := func(peer int, d time.Duration) transport.Link {
		return transport.Link{Peer: peer, Waits: true, Silent: d}
	}
	hears := func(peer int, rtt time.Duration) transport.Link {
		return transport.Link{Peer: peer, Answered: true, RTT: rtt}
	}
	moving := func(peer int) transport.Link {
		return transport.Link{Peer: peer, Waits: true, Silent: s, Rate: 250_000}
	}
	busy := func(peer int, rtt time.Duration) transport.Link {
		return transport.Link{Peer: peer, Answered: true, RTT: rtt, Rate: 250_000}
	}
	full := func(peer int, rtt time.Duration) transport.Link {
		return transport.Link{Peer: peer, Answered: true, RTT: rtt, Rate: 250_000, Queued: true}
	}
	queued := func(peer int) transport.Link { return full(peer, ms) }
	long := func(l transport.Link, d time.Duration) transport.Link {
		l.Long = d
		return l
	}
	for name, tc := range map[string]struct {
		self        int
		health      []transport.Health
		rank, other int
		why         string
		weak        bool
		hosts       *plan.Layout
	}{
		"a rank answers nobody":                                      {0, []transport.Health{in(0, dead(1, s)), mute(1), in(2, dead(1, s))}, 1, -1, "rank 1 does not answer", false, nil},
		"others have not said so yet":                                {0, []transport.Health{in(0, dead(1, s)), mute(1), in(2)}, 1, -1, "rank 1 does not answer", true, nil},
		"a silent rank, and one that is idle":                        {0, []transport.Health{in(0, dead(1, s)), mute(1), idle(2)}, 1, -1, "rank 1 does not answer (stopped or unreachable); rank 2 has not called it", true, nil},
		"nobody answers":                                             {0, []transport.Health{in(0, dead(1, s), dead(2, s)), mute(1), mute(2)}, 0, -1, "its network does not work", true, nil},
		"own link":                                                   {2, []transport.Health{in(0, hears(1, ms)), mute(1), in(2, dead(1, 2100*ms))}, 1, 2, "no data for 2.1 s, both alive", false, nil},
		"own link, too early to say":                                 {2, []transport.Health{in(0, hears(1, ms)), mute(1), in(2, dead(1, 300*ms))}, 1, 2, "no data for 0.3 s, both alive", true, nil},
		"another link":                                               {2, []transport.Health{in(0, dead(1, s)), in(1, dead(0, s)), in(2, on(1))}, 0, 1, "no data for 1.0 s, both alive", false, nil},
		"a late answer on another link":                              {2, []transport.Health{in(0, dead(1, s), on(2)), in(1, hears(0, ms), on(2)), in(2, on(1))}, -1, -1, "ranks 1, 2 wait for each other", false, nil},
		"one is idle":                                                {0, []transport.Health{in(0, on(1)), in(1, on(2)), idle(2)}, 2, -1, "rank 2 has not called it", false, nil},
		"one is idle behind a broken link":                           {3, []transport.Health{in(0, dead(2, s)), in(1, on(2)), idle(2), in(3, on(2))}, 0, 2, "no data for 1.0 s, both alive", false, nil},
		"the end of the chain":                                       {0, []transport.Health{in(0, on(1)), in(1, on(2)), in(2)}, 2, -1, "rank 2 did not send or receive what was expected", false, nil},
		"the chain leads to PyTorch":                                 {0, []transport.Health{in(0, on(1)), in(1, transport.Link{Peer: 2, Waits: true}), {Rank: 2}}, 2, -1, "rank 2 did not send", false, nil},
		"a circle":                                                   {0, []transport.Health{in(0, on(1)), in(1, on(2)), in(2, on(0))}, -1, -1, "ranks 0, 1, 2 wait for each other", false, nil},
		"a slow link":                                                {3, []transport.Health{in(0, moving(1), hears(2, ms)), in(1, moving(0), hears(2, ms)), in(2, on(1)), in(3, on(0))}, 0, 1, "slow, both alive: answers take 1s, others 1ms", false, nil},
		"a slow link, or one of its ranks":                           {0, []transport.Health{in(0, moving(2), hears(1, ms)), in(1), in(2, moving(0))}, 0, 2, "slow, both alive", true, nil},
		"a slow link, whose answers overtake":                        {2, []transport.Health{in(0, queued(1), hears(2, ms)), in(1, hears(0, ms), hears(2, ms)), in(2)}, 0, 1, "slow, both alive: data wait in its sockets", false, nil},
		"a slow rank, by its answers and a queue":                    {0, []transport.Health{in(0, hears(1, 60*ms), hears(2, 170*ms)), in(1, hears(0, 60*ms), full(2, 180*ms)), in(2)}, 2, -1, "rank 2 is slow: it answers after 170ms, others after 60ms", false, nil},
		"a slow link, by a queue, while all answers are late":        {0, []transport.Health{in(0, hears(1, 60*ms), hears(2, 90*ms)), in(1, hears(0, 60*ms), full(2, 180*ms)), in(2)}, 1, 2, "slow, both alive: data wait in its sockets", false, nil},
		"a slow link of a rank that waits for a CPU":                 {0, []transport.Health{in(0, hears(1, ms), hears(2, 25*ms)), in(1, hears(0, ms), full(2, 107*ms), hears(3, ms)), in(2, hears(3, ms)), in(3)}, 1, 2, "slow, both alive: answers take 107ms, others 25ms", false, nil},
		"a slow link of a rank that waits for a CPU, by a queue":     {0, []transport.Health{in(0, hears(1, 18*ms), hears(2, 10*ms), hears(3, 10*ms)), in(1, hears(0, 18*ms), full(2, 66*ms), hears(3, 35*ms)), in(2, hears(3, ms)), in(3)}, 1, 2, "slow, both alive: data wait in its sockets", false, nil},
		"a slow rank, whose answers overtake":                        {2, []transport.Health{in(0, queued(1), hears(2, ms)), in(1, hears(0, ms), queued(2)), in(2)}, 1, -1, "rank 1 is slow: data wait in its sockets", false, nil},
		"data that wait for a rank to take them":                     {0, []transport.Health{in(0, on(1)), in(1, transport.Link{Peer: 2, Answered: true, RTT: ms, Queued: true, Waits: true}), in(2)}, 2, -1, "rank 2 did not send or receive what was expected", false, nil},
		"data wait everywhere":                                       {2, []transport.Health{in(0, queued(1), queued(2)), in(1, hears(0, ms), queued(2)), in(2)}, -1, -1, "too slow; answers", false, nil},
		"no other link":                                              {0, []transport.Health{in(0, moving(1)), in(1, moving(0))}, 0, 1, "slow, both alive", false, nil},
		"all answers late":                                           {0, []transport.Health{in(0, busy(1, 90*ms), hears(2, 60*ms)), in(1, busy(0, 90*ms), hears(2, 50*ms)), in(2)}, -1, -1, "too slow; answers between ranks 0 and 1 took 90ms, others 60ms at most", false, nil},
		"a slow rank, by its answers":                                {3, []transport.Health{in(0, moving(1)), in(1, moving(0)), in(2, hears(1, 60*ms), hears(0, ms)), in(3, hears(0, ms), on(2))}, 1, -1, "rank 1 is slow", false, nil},
		"a slow rank, by its links":                                  {3, []transport.Health{in(0, moving(1)), in(1, moving(0), moving(2)), in(2, moving(1)), in(3, on(0))}, 1, -1, "rank 1 is slow", false, nil},
		"a slow rank, while all links move":                          {1, []transport.Health{in(0, busy(1, ms), busy(3, 8*ms)), in(1, busy(0, ms), moving(2), busy(3, ms)), mute(2), in(3, busy(0, ms), busy(2, 120*ms))}, 2, -1, "rank 2 is slow: it answers after 120ms, others after 8ms", false, nil},
		"a slow rank with one fast answer":                           {2, []transport.Health{in(0, dead(1, s)), mute(1), in(2, moving(1), hears(0, ms), hears(3, ms)), in(3, hears(1, ms), hears(0, ms))}, 1, -1, "rank 1 is slow", false, nil},
		"a slow rank with a link that stands still":                  {3, []transport.Health{in(0, busy(1, 90*ms), hears(2, ms)), in(1, busy(0, 90*ms), dead(2, s)), in(2, dead(1, s)), in(3, hears(0, ms), hears(2, ms))}, 1, -1, "rank 1 is slow", false, nil},
		"this rank is slow, others hear the silent one":              {1, []transport.Health{in(0, hears(2, 2*ms), hears(1, 300*ms)), in(1, hears(0, 300*ms), dead(2, s)), mute(2)}, 1, -1, "rank 1 is slow: it answers after 300ms, others after 2ms", false, nil},
		"this rank is slow, one does not answer yet":                 {1, []transport.Health{in(0, hears(1, 300*ms), hears(3, ms)), in(1, hears(0, 300*ms), dead(2, s), hears(3, 250*ms)), mute(2), in(3, hears(0, ms))}, 1, -1, "rank 1 is slow", true, nil},
		"all ranks are slow, one is stopped":                         {1, []transport.Health{in(0, hears(1, 300*ms), dead(2, s)), in(1, hears(0, 300*ms), dead(2, s)), mute(2)}, 2, -1, "rank 2 does not answer", false, nil},
		"all ranks are slow, a link is broken":                       {1, []transport.Health{in(0, hears(2, 200*ms), hears(1, 300*ms)), in(1, hears(0, 300*ms), dead(2, s)), mute(2)}, 1, 2, "no data for 1.0 s, both alive", false, nil},
		"a slow rank that no answer reaches":                         {0, []transport.Health{in(0, moving(1), dead(2, s)), mute(1), mute(2)}, 0, -1, "rank 0 is slow: it moves data", true, nil},
		"a slow rank that hears nobody":                              {0, []transport.Health{in(0, moving(1), moving(2)), mute(1), mute(2)}, 0, -1, "rank 0 is slow", false, nil},
		"a slow link of two ranks":                                   {0, []transport.Health{in(0, moving(2), hears(3, ms)), in(1, moving(2), hears(3, ms)), in(2, moving(0), moving(1)), in(3, hears(2, ms))}, 0, 2, "slow, both alive", false, plan.NewLayout([]int{0, 0, 1, 2})},
		"a rank that waits in memory":                                {0, []transport.Health{in(0, on(3)), in(1), in(2, on(4)), in(3), in(4, on(2))}, -1, -1, "wait for each other", false, hosts},
		"a rank that waits in memory for one that left":              {0, []transport.Health{in(0, on(3)), in(1), {Rank: 2, Departed: true}, in(3), in(4)}, 2, -1, "rank 2 has left", false, hosts},
		"a link cut, behind a rank in memory":                        {0, []transport.Health{in(0, on(3)), in(1), in(2, dead(4, s)), in(3), in(4, dead(2, s))}, 2, 4, "no data for 1.0 s, both alive", false, hosts},
		"this rank waits in memory":                                  {0, []transport.Health{in(0), in(1, on(2)), in(2), in(3, dead(4, s)), in(4, dead(3, s))}, 3, 4, "both alive", false, hosts},
		"this rank waits in memory, and one left":                    {0, []transport.Health{in(0), in(1, on(4)), in(2), in(3), {Rank: 4, Departed: true}}, 4, -1, "rank 4 has left", false, hosts},
		"a rank that has done its part":                              {0, []transport.Health{in(0, on(1)), ended(1), in(2, on(0))}, 1, -1, "rank 1 did not send or receive what was expected", false, nil},
		"a rank that has done its part, beside one that has not":     {0, []transport.Health{in(0, on(1), on(2)), ended(1), in(2)}, 2, -1, "rank 2 did not send or receive what was expected", false, nil},
		"a silent link of a slow rank":                               {1, []transport.Health{in(0, hears(1, ms)), in(1, hears(0, ms), hears(3, 300*ms)), in(2, dead(3, s)), in(3, dead(2, s))}, 3, -1, "rank 3 is slow: it answers after 300ms", false, nil},
		"a silent link of the second rank of a slow host":            {4, []transport.Health{in(0, dead(3, s)), in(1, hears(4, ms)), in(2, hears(4, 300*ms)), in(3, dead(0, s)), in(4, hears(1, ms), hears(2, 300*ms))}, 2, -1, "rank 2 is slow: it answers after 300ms", false, hosts},
		"own link to a slow rank":                                    {3, []transport.Health{in(0, dead(1, s), hears(2, ms)), mute(1), in(2, moving(1)), in(3, dead(1, s), hears(0, ms), hears(2, ms))}, 1, -1, "rank 1 is slow: it answers after 1s, others after 1ms", false, nil},
		"a slow host that no answer reaches":                         {0, []transport.Health{in(0, hears(1, ms), moving(2), moving(4)), in(1, hears(0, ms), dead(2, s)), mute(2), mute(3), mute(4)}, 0, -1, "rank 0 is slow: it moves data", true, hosts},
		"one host of two is stopped":                                 {0, []transport.Health{in(0, hears(1, ms), dead(2, s), dead(3, s)), in(1, hears(0, ms), dead(2, s), dead(3, s)), mute(2), mute(3)}, 2, -1, "rank 2 does not answer", false, plan.NewLayout([]int{0, 0, 1, 1})},
		"own link on a slow host":                                    {1, []transport.Health{in(0, moving(2), moving(4)), in(1, hears(0, ms), dead(2, s), moving(3), moving(4)), mute(2), mute(3), mute(4)}, 0, -1, "rank 0 is slow", false, hosts},
		"a slow link of a rank whose other answers are late":         {4, []transport.Health{in(0, hears(2, 9*ms), hears(3, ms)), in(1, hears(2, 9*ms)), mute(2), in(3, hears(2, 10*ms)), in(4, moving(2), hears(0, ms), hears(3, ms))}, 2, -1, "rank 2 is slow: its quickest answer takes 9ms, others 1ms at most", false, nil},
		"a slow rank, by a queue and by its other answers":           {1, []transport.Health{in(0, hears(1, 9*ms), full(2, 12*ms), hears(3, 8*ms)), in(1, hears(0, 9*ms), hears(2, ms), hears(3, ms)), in(2, full(0, 12*ms)), in(3, hears(0, 8*ms), hears(2, ms))}, 0, -1, "rank 0 is slow: its quickest answer takes 8ms, others 1ms at most", false, nil},
		"the first rank of a slow host, whose other rank moves data": {2, []transport.Health{mute(0), mute(1), in(2, dead(0, s), dead(1, s), hears(3, ms), dead(4, s)), in(3, moving(0), moving(1), dead(4, s)), mute(4)}, 2, -1, "rank 2 is slow: it moves data", true, plan.NewLayout([]int{0, 0, 1, 1, 2})},
		"a slow rank of three, whose one other answer is a bit late": {0, []transport.Health{in(0, hears(1, 17*ms), hears(2, ms)), in(1, moving(2), hears(0, 17*ms)), in(2, moving(1), hears(0, ms))}, 1, -1, "rank 1 is slow: its quickest answer takes 17ms, others 1ms at most", false, nil},
		"a slow rank whose answers are alike":                        {1, []transport.Health{in(0, busy(1, ms), busy(2, ms), busy(3, 39*ms)), in(1, busy(0, ms), hears(2, ms), busy(3, 18*ms)), in(2, busy(0, ms), busy(3, 45*ms)), in(3, busy(0, 30*ms), busy(2, 40*ms))}, 3, -1, "rank 3 is slow: its quickest answer takes 18ms, others 1ms at most", false, nil},
		"one link alone carries data":                                {0, []transport.Health{in(0, on(3), hears(2, ms)), in(1, on(0)), in(2, busy(3, ms)), in(3, hears(2, ms))}, 2, 3, "slow, both alive: no other one carries data", false, nil},
		"a silent link on a machine that is a bit late":              {1, []transport.Health{in(0, hears(1, ms)), in(1, hears(0, ms), hears(3, 30*ms)), in(2, dead(3, s)), in(3, dead(2, s))}, 2, 3, "no data for 1.0 s, both alive", false, nil},
		"a silent link on a machine that is late, as data move":      {1, []transport.Health{in(0, dead(2, s), busy(1, 34*ms)), in(1, busy(0, 47*ms), on(2), busy(3, 9*ms)), in(2, dead(0, s)), in(3, hears(0, 47*ms), hears(2, ms))}, 0, 2, "no data for 1.0 s, both alive", false, nil},
		"a slow rank, one of whose links moves, by long questions":   {1, []transport.Health{in(0, moving(2)), in(1, long(hears(0, ms), 90*ms), long(hears(2, ms), 3*ms)), in(2, moving(0))}, 0, -1, "rank 0 is slow: it answers long questions after 90ms, the other end of its slow link after 3ms", false, nil},
		"this rank is slow, by long questions":                       {0, []transport.Health{in(0, moving(2), long(hears(1, ms), 90*ms), long(hears(3, ms), 80*ms)), in(1, long(hears(2, ms), ms)), in(2, moving(0)), in(3, hears(0, ms), long(hears(2, ms), 2*ms))}, 0, -1, "rank 0 is slow: it answers long questions after 80ms", false, nil},
		"a slow host, by long questions":                             {1, []transport.Health{in(0), in(1, moving(2), long(hears(4, ms), 90*ms)), in(2), in(3), in(4, long(hears(0, ms), 80*ms), long(hears(2, ms), ms))}, 0, -1, "rank 0 is slow: it answers long questions after 80ms", false, hosts},
		"a slow link, by long questions":                             {1, []transport.Health{in(0, moving(2)), in(1, long(hears(0, ms), 4*ms), long(hears(2, ms), 3*ms)), in(2, moving(0))}, 0, 2, "slow, both alive", false, nil},
		"a slow link, and one end is a bit late":                     {1, []transport.Health{in(0, moving(2)), in(1, long(hears(0, ms), 45*ms), long(hears(2, ms), 3*ms)), in(2, moving(0))}, 0, 2, "slow, both alive", false, nil},
		"a slow link while no CPU is free":                           {1, []transport.Health{in(0, moving(2)), in(1, long(hears(0, ms), 90*ms), long(hears(2, ms), 70*ms)), in(2, moving(0))}, 0, 2, "slow, both alive", false, nil},
		"a slow link, and one end hears no long question":            {1, []transport.Health{in(0, moving(2)), in(1, long(hears(0, ms), 90*ms), hears(2, ms)), in(2, moving(0))}, 0, 2, "slow, both alive", false, nil},
		"all is slow":                                                {0, []transport.Health{in(0, moving(2), moving(1)), in(1, moving(2)), in(2, moving(0))}, -1, -1, "the operation was too slow", false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			e := evidence{silentFrom: linkSilent, self: tc.self, collective: true, call: 1, peer: -1, hosts: tc.hosts}
			var v verdict
			for range 2 * leastRounds {
				e.ask(&told{health: tc.health}, 0, v, nil)
				v = e.judge()
			}
			require.Equal(t, tc.rank, v.rank, v.why)
			require.Equal(t, tc.other, v.other, v.why)
			require.Contains(t, v.why, tc.why)
			require.Equal(t, tc.weak, v.weak)
		})
	}
}
