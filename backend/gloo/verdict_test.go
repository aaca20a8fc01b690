package gloo

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/plan"
	"github.com/c10d-go/c10d/internal/transport"
)

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
		"one is idle, and has moved data":                            {0, []transport.Health{in(0, busy(2, ms)), in(1, on(0)), idle(2)}, -1, -1, "rank 2 has not called it: it has issued 1 collectives, this is number 2\nranks 0 and 1: answers take 1ms, rank 1 waits", false, nil},
		"one is idle, and others move data":                          {0, []transport.Health{in(0, busy(1, ms)), in(1, on(2)), idle(2)}, 2, -1, "rank 2 has not called it", false, nil},
		"a circle":                                                   {0, []transport.Health{in(0, on(1)), in(1, on(2)), in(2, on(0))}, -1, -1, "ranks 0, 1, 2 wait for each other", false, nil},
		"a slow link":                                                {3, []transport.Health{in(0, moving(1), hears(2, ms)), in(1, moving(0), hears(2, ms)), in(2, on(1)), in(3, on(0))}, -1, -1, "no rank is missing: the operation was too slow\nranks 0 and 1: answers take 1s, 244 KiB/s, both wait\nranks 0 and 2: answers take 1ms\nranks 0 and 3: answers take 1ms, rank 3 waits\nranks 1 and 2: answers take 1ms, rank 2 waits", false, nil},
		"a slow link, or one of its ranks":                           {0, []transport.Health{in(0, moving(2), hears(1, ms)), in(1), in(2, moving(0))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"no other link":                                              {0, []transport.Health{in(0, moving(1)), in(1, moving(0))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"a slow rank, by its answers":                                {3, []transport.Health{in(0, moving(1)), in(1, moving(0)), in(2, hears(1, 60*ms), hears(0, ms)), in(3, hears(0, ms), on(2))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"a slow rank, while all links move":                          {1, []transport.Health{in(0, busy(1, ms), busy(3, 8*ms)), in(1, busy(0, ms), moving(2), busy(3, ms)), mute(2), in(3, busy(0, ms), busy(2, 120*ms))}, -1, -1, "no rank is missing: the operation was too slow\nranks 1 and 2: answers take 1s, 244 KiB/s, rank 1 waits\nranks 2 and 3: answers take 120ms, 244 KiB/s\nranks 0 and 3: answers take 8ms, 244 KiB/s\nranks 0 and 1: answers take 1ms, 244 KiB/s\nother pairs: answers take 1ms at most", false, nil},
		"a slow rank with a link that stands still":                  {3, []transport.Health{in(0, busy(1, 90*ms), hears(2, ms)), in(1, busy(0, 90*ms), dead(2, s)), in(2, dead(1, s)), in(3, hears(0, ms), hears(2, ms))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"this rank is slow, others hear the silent one":              {1, []transport.Health{in(0, hears(2, 2*ms), hears(1, 300*ms)), in(1, hears(0, 300*ms), dead(2, s)), mute(2)}, -1, -1, "no rank is missing: the operation was too slow\nranks 1 and 2: answers take 1s, rank 1 waits\nranks 0 and 1: answers take 300ms\nranks 0 and 2: answers take 2ms", false, nil},
		"this rank is slow, one does not answer yet":                 {1, []transport.Health{in(0, hears(1, 300*ms), hears(3, ms)), in(1, hears(0, 300*ms), dead(2, s), hears(3, 270*ms)), mute(2), in(3, hears(0, ms))}, -1, -1, "no rank is missing: the operation was too slow", true, nil},
		"all ranks are slow, one is stopped":                         {1, []transport.Health{in(0, hears(1, 300*ms), dead(2, s)), in(1, hears(0, 300*ms), dead(2, s)), mute(2)}, 2, -1, "rank 2 does not answer", false, nil},
		"all ranks are slow, a link is broken":                       {1, []transport.Health{in(0, hears(2, 200*ms), hears(1, 300*ms)), in(1, hears(0, 300*ms), dead(2, s)), mute(2)}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"a slow rank that no answer reaches":                         {0, []transport.Health{in(0, moving(1), dead(2, s)), mute(1), mute(2)}, -1, -1, "no rank is missing: the operation was too slow", true, nil},
		"a slow link of two ranks":                                   {0, []transport.Health{in(0, moving(2), hears(3, ms)), in(1, moving(2), hears(3, ms)), in(2, moving(0), moving(1)), in(3, hears(2, ms))}, -1, -1, "no rank is missing: the operation was too slow", false, plan.NewLayout([]int{0, 0, 1, 2})},
		"a rank that waits in memory":                                {0, []transport.Health{in(0, on(3)), in(1), in(2, on(4)), in(3), in(4, on(2))}, -1, -1, "wait for each other", false, hosts},
		"a rank that waits in memory for one that left":              {0, []transport.Health{in(0, on(3)), in(1), {Rank: 2, Departed: true}, in(3), in(4)}, 2, -1, "rank 2 has left", false, hosts},
		"a link cut, behind a rank in memory":                        {0, []transport.Health{in(0, on(3)), in(1), in(2, dead(4, s)), in(3), in(4, dead(2, s))}, 2, 4, "no data for 1.0 s, both alive", false, hosts},
		"this rank waits in memory":                                  {0, []transport.Health{in(0), in(1, on(2)), in(2), in(3, dead(4, s)), in(4, dead(3, s))}, 3, 4, "both alive", false, hosts},
		"this rank waits in memory, and one left":                    {0, []transport.Health{in(0), in(1, on(4)), in(2), in(3), {Rank: 4, Departed: true}}, 4, -1, "rank 4 has left", false, hosts},
		"a rank that has done its part":                              {0, []transport.Health{in(0, on(1)), ended(1), in(2, on(0))}, 1, -1, "rank 1 did not send or receive what was expected", false, nil},
		"a rank that has done its part, beside one that has not":     {0, []transport.Health{in(0, on(1), on(2)), ended(1), in(2)}, 2, -1, "rank 2 did not send or receive what was expected", false, nil},
		"a silent link of a slow rank":                               {1, []transport.Health{in(0, hears(1, ms)), in(1, hears(0, ms), hears(3, 300*ms)), in(2, dead(3, s)), in(3, dead(2, s))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"a silent link of the second rank of a slow host":            {4, []transport.Health{in(0, dead(3, s)), in(1, hears(4, ms)), in(2, hears(4, 300*ms)), in(3, dead(0, s)), in(4, hears(1, ms), hears(2, 300*ms))}, -1, -1, "no rank is missing: the operation was too slow", false, hosts},
		"own link to a slow rank":                                    {3, []transport.Health{in(0, dead(1, s), hears(2, ms)), mute(1), in(2, moving(1)), in(3, dead(1, s), hears(0, ms), hears(2, ms))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
		"a slow host that no answer reaches":                         {0, []transport.Health{in(0, hears(1, ms), moving(2), moving(4)), in(1, hears(0, ms), dead(2, s)), mute(2), mute(3), mute(4)}, -1, -1, "no rank is missing: the operation was too slow", true, hosts},
		"one host of two is stopped":                                 {0, []transport.Health{in(0, hears(1, ms), dead(2, s), dead(3, s)), in(1, hears(0, ms), dead(2, s), dead(3, s)), mute(2), mute(3)}, 2, -1, "rank 2 does not answer", false, plan.NewLayout([]int{0, 0, 1, 1})},
		"the first rank of a slow host, whose other rank moves data": {2, []transport.Health{mute(0), mute(1), in(2, dead(0, s), dead(1, s), hears(3, ms), dead(4, s)), in(3, moving(0), moving(1), dead(4, s)), mute(4)}, -1, -1, "no rank is missing: the operation was too slow", true, plan.NewLayout([]int{0, 0, 1, 1, 2})},
		"a silent link on a machine that is a bit late":              {1, []transport.Health{in(0, hears(1, ms)), in(1, hears(0, ms), hears(3, 30*ms)), in(2, dead(3, s)), in(3, dead(2, s))}, 2, 3, "no data for 1.0 s, both alive", false, nil},
		"a silent link on a machine that is late, as data move":      {1, []transport.Health{in(0, dead(2, s), busy(1, 34*ms)), in(1, busy(0, 47*ms), on(2), busy(3, 9*ms)), in(2, dead(0, s)), in(3, hears(0, 47*ms), hears(2, ms))}, -1, -1, "no rank is missing: the operation was too slow", false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			e := evidence{silentFrom: linkSilent, self: tc.self, collective: true, call: 1, peer: -1, hosts: tc.hosts}
			var v verdict
			for range 2 * leastRounds {
				e.hear(tc.health)
				v = e.judge()
			}
			require.Equal(t, tc.rank, v.rank, v.why)
			require.Equal(t, tc.other, v.other, v.why)
			require.Contains(t, v.why, tc.why)
			require.Equal(t, tc.weak, v.weak)
		})
	}
}
